"""Parallel decoding against the slow decoders of oracle.py, and what must hold at every step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import causal_forward, decode
from tiny import EOS, MASK, PAD, VOCAB_SIZE, stock_twin, tiny_model
from transformers import DynamicCache, Qwen3ForCausalLM

from wedlm_hf.generation import WeDLMGenerationMixin, WindowCache
from wedlm_hf.generation.versions import CACHE, cache_of

LIMIT = 16
THRESHOLDS = {"none": {"entropy_threshold": 2.0}, "exact": {}}
# Random models rarely say the real end token: these are common enough to end some rows early and others not.
ENDS = [EOS, 107, 151, 166, 227, 40, 77]
ORACLE = {"limit": LIMIT, "mask_id": MASK, "eos_ids": ENDS}  # what the slow decoders are told


@pytest.fixture(scope="module", params=["qwen3", "qwen2.5"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def qwen3():
    return tiny_model("qwen3")


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def padded(prompts):
    width = max(map(len, prompts))
    rows = [
        ([PAD] * (width - len(prompt)) + prompt, [0] * (width - len(prompt)) + [1] * len(prompt)) for prompt in prompts
    ]
    return dict(zip(("input_ids", "attention_mask"), map(torch.tensor, zip(*rows, strict=True)), strict=True))


def new_tokens(sequences, width, ends):
    """Rows of new tokens, without what pads them after their end."""
    rows = []
    for row in sequences[:, width:].tolist():
        end = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
        assert all(token == PAD for token in row[end:])
        rows.append(row[:end])
    return rows


def generate(model, prompts, seed=None, **options):
    """What `generate` returns, and the rows of new tokens; with a seed, from the same draws."""
    if seed is not None:
        torch.manual_seed(seed)
    defaults = {"strategy": "wedlm", "max_new_tokens": LIMIT, "eos_token_id": ENDS, "return_dict_in_generate": True}
    options = defaults | options
    output = model.generate(**padded(prompts), **options)
    ends = options["eos_token_id"] if isinstance(options["eos_token_id"], list) else [options["eos_token_id"]]
    return output, new_tokens(output.sequences, max(map(len, prompts)), ends)


def no_forward(model):
    """Within this context, the model must not run."""
    return model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.puts, self.drafts, self.ended = [], [], False

    def put(self, value):
        assert value.device.type == "cpu"  # as `generate` sends them
        self.puts.append(value)

    def put_draft(self, value):
        self.drafts.append(value.tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("strategy", ["wedlm", "block"])
@pytest.mark.parametrize(("window_size", "tau", "lam"), [(1, 0.3, 0), (4, 1.5, 0.5), (32, 0.3, 0)])
def test_greedy_output_and_counts_equal_the_oracle_that_recomputes_everything(model, strategy, window_size, tau, lam):
    prompts = prompts_of([5, 1, 12], seed=window_size)
    arguments = ORACLE | {"window_size": window_size, "tau": tau, "lam": lam, "block": strategy == "block"}
    expected = [decode(model, prompt, **arguments) for prompt in prompts]
    options = {"strategy": strategy, "window_size": window_size, "entropy_threshold": tau, "distance_penalty": lam}
    for chosen in (slice(0, 3), slice(2, 3)):  # in a batch and alone
        output, rows = generate(model, prompts[chosen], **options)
        counts = (output.stats.forwards.tolist(), output.stats.token_instances.tolist())
        assert list(zip(rows, *counts, strict=True)) == expected[chosen]
        assert output.stats.new_tokens.tolist() == list(map(len, rows))


@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 12), st.floats(0, 4), st.floats(0, 1),
    st.integers(1, 20), st.integers(0, 1000),
)  # fmt: skip
def test_any_settings_equal_the_oracle(qwen3, lengths, window_size, tau, lam, limit, seed):
    prompts = prompts_of(lengths, seed)
    options = {"window_size": window_size, "entropy_threshold": tau, "distance_penalty": lam, "max_new_tokens": limit}
    arguments = ORACLE | {"window_size": window_size, "tau": tau, "lam": lam, "limit": limit}
    assert generate(qwen3, prompts, **options)[1] == [decode(qwen3, prompt, **arguments)[0] for prompt in prompts]


def tokens_per_forward(models, lengths, **options):
    """In batches and alone. The prompt's forward counts: it has a window, too."""
    tokens = forwards = 0
    for seed, model in enumerate(models):
        for chosen in (lengths, lengths[:1]):
            stats = generate(model, prompts_of(chosen, seed), max_new_tokens=24, **options)[0].stats
            tokens, forwards = tokens + int(stats.new_tokens.sum()), forwards + int(stats.forwards.sum())
    return tokens / forwards


@pytest.mark.parametrize("strategy", ["wedlm", "block"])
def test_no_step_is_lost_behind_an_end_that_is_known_before_the_text(strategy):
    """The slots from number 9 on are almost surely the end, and no others are."""
    certain, models = torch.zeros(VOCAB_SIZE), [tiny_model(seed=seed) for seed in range(3)]
    certain[EOS] = 9.0

    def tell(model, args, kwargs, output):
        places, tokens = (kwargs[name][:, -output.logits.shape[1] :] for name in ("position_ids", "input_ids"))
        output.logits[..., EOS] = -torch.inf
        output.logits[(tokens == MASK) & (places >= 5 + 9)] = certain

    for model in models:
        model.register_forward_hook(tell, with_kwargs=True)
    options = {"strategy": strategy, "entropy_threshold": 0.05, "eos_token_id": EOS}
    assert tokens_per_forward(models, [5, 5, 5], **options) >= 1


@pytest.mark.parametrize(
    ("strategy", "window_size", "least"),
    [("wedlm", 1, 1.0), ("block", 4, 0.97), ("wedlm", 16, 0.95), ("block", 16, 0.95)],
)
def test_masks_that_know_nothing_need_hardly_more_forwards_than_ar_decoding(strategy, window_size, least):
    """Every 46th token of a random model is an end. What is lost are tokens that were filled before an end in front of
    them was: the more, the wider the window."""
    models = (tiny_model(seed=seed) for seed in range(4))
    options = {"strategy": strategy, "window_size": window_size, "entropy_threshold": 0.05}
    assert tokens_per_forward(models, [5, 1, 12], **options) >= least


def test_the_same_loop_drives_a_stock_qwen3_with_the_same_weights_and_the_mask_token_of_the_call(qwen3):
    stock, prompts = stock_twin(qwen3, "sdpa"), prompts_of([4, 11])
    stock.__class__ = type("StockQwen3", (WeDLMGenerationMixin, Qwen3ForCausalLM), {})
    _, expected = generate(qwen3, prompts, entropy_threshold=1.5)
    assert generate(stock, prompts, entropy_threshold=1.5, mask_token_id=MASK)[1] == expected


def check_every_commit(model, prompts, rows, monkeypatch, **options):
    """After every step, the cache is that of a fresh prefill. Returns how many rows were compared."""
    seen, commit = [], WindowCache.commit

    def checked_commit(cache, kept):
        commit(cache, kept)
        for place, row in enumerate(cache._rows[: len(kept)]):
            length = cache.lengths[place]
            sequence, fresh = (prompts[row] + rows[row])[:length], DynamicCache()
            assert cache.token_ids[place, :length].tolist() == sequence
            model.model(input_ids=torch.tensor([sequence]), **{CACHE: fresh}, use_cache=True)
            for layer, expected in zip(cache.layers, fresh.layers, strict=True):
                found = layer._keys[place, :, :length], layer._values[place, :, :length]
                torch.testing.assert_close(found, (expected.keys[0], expected.values[0]), atol=1e-4, rtol=1e-4)
            seen.append(row)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(WindowCache, "commit", checked_commit)
        assert generate(model, prompts, **options)[1] == rows
    return len(seen)


@pytest.mark.parametrize("verification", THRESHOLDS)
def test_after_every_step_the_cache_is_that_of_a_fresh_prefill(qwen3, monkeypatch, verification):
    prompts, options = prompts_of([3, 10, 6]), THRESHOLDS[verification] | {"verification": verification}
    _, rows = generate(qwen3, prompts, **options)
    assert check_every_commit(qwen3, prompts, rows, monkeypatch, **options) >= sum(map(len, rows)) // 16


def test_tau_zero_fills_one_slot_a_step_and_a_window_of_one_goes_left_to_right(qwen3):
    prompts, traced = prompts_of([6]), {"eos_token_id": EOS, "output_trace": True}
    one_slot, _ = generate(qwen3, prompts, entropy_threshold=0, **traced)
    assert [int(step.filled.sum()) for step in one_slot.trace] == [1] * one_slot.stats.forwards.item()
    assert sorted(one_slot.step_map[0].tolist()) == list(range(LIMIT))
    left_to_right, _ = generate(qwen3, prompts, entropy_threshold=100, window_size=1, **traced)
    assert left_to_right.step_map[0].tolist() == list(range(LIMIT))


@pytest.mark.parametrize("verification", THRESHOLDS)
def test_statistics_equal_what_a_hook_on_the_model_counts_and_nothing_else_is_kept(qwen3, verification):
    prompts, shapes = prompts_of([5, 9, 2]), []
    options = THRESHOLDS[verification] | ({"slot_cost": 0.0} if verification == "exact" else {})  # no clock
    note = lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape)  # noqa: E731
    with qwen3.register_forward_pre_hook(note, with_kwargs=True):
        output, rows = generate(qwen3, prompts, verification=verification, output_trace=True, **options)
    stats, trace = output.stats, output.trace
    assert len(shapes) == stats.forwards.max().item()
    assert shapes == [step.input_ids.shape for step in trace] == [(len(s.rows), max(s.counts)) for s in trace]
    instances = [sum(step.counts[step.rows.index(row)] for step in trace if row in step.rows) for row in range(3)]
    assert stats.token_instances.tolist() == [n - len(prompt) for n, prompt in zip(instances, prompts, strict=True)]
    assert stats.new_tokens.tolist() == list(map(len, rows))
    assert stats.tokens_per_forward == pytest.approx(sum(map(len, rows)) / stats.forwards.sum().item())
    assert 0 < stats.prefix_cacheability <= 1
    assert output.scores is output.logits is None and (output.log_probs is None) == (verification == "none")


def monotonous(model):
    """The model, with weights that make every slot predict token 50: each draft is right."""
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 100.0
        model.lm_head.weight[50, 0] = 10.0
    return model


def test_verified_decoding_uses_good_drafts():
    """W + 1 tokens come of a forward."""
    model = monotonous(tiny_model())
    options = {"verification": "exact", "max_new_tokens": 32, "window_size": 8}
    output, rows = generate(model, prompts_of([5]), **options)
    assert rows == [[50] * 32] and output.stats.forwards.item() <= 6
    assert torch.equal(output.stats.accepted, output.stats.drafted)
    cut = [lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 18])]  # in the middle of a path
    output, rows = generate(model, prompts_of([5]), **options, stopping_criteria=cut)
    assert rows == [[50] * 13] and cache_of(output).lengths[0] < 18


@torch.no_grad()
def chances_of(model, ids, tokens, temperature):
    """Of some tokens at the last place, where no others may come."""
    return torch.softmax(model(input_ids=torch.tensor([ids])).logits[0, -1, tokens] / temperature, dim=-1)


def chi_square(observed, chances):
    expected = observed.sum() * chances
    return ((observed - expected) ** 2 / expected).sum()


def test_verified_sampling_is_distributed_as_ar_sampling(qwen3):
    """Two tokens after one prompt: drawn pairs against the AR head's exact probabilities."""
    (prompt,), count, allowed = prompts_of([6]), 2000, [30, 31, 32, 33]
    suppressed = [token for token in range(VOCAB_SIZE) if token not in allowed]
    second = torch.stack([chances_of(qwen3, [*prompt, token], allowed, 2.0) for token in allowed])
    expected = chances_of(qwen3, prompt, allowed, 2.0)[:, None] * second
    exact = {"verification": "exact", "window_size": 16, "max_new_tokens": 3}
    sampled = {"do_sample": True, "temperature": 2.0, "top_k": 0, "suppress_tokens": suppressed}
    output, _ = generate(qwen3, [prompt] * count, 0, **exact, **sampled)
    assert output.stats.drafted.sum() > count / 2
    first, second = (output.sequences[:, 6:8] - allowed[0]).T
    assert chi_square(torch.bincount(first * 4 + second, minlength=16), expected.flatten()) < 44.3  # p = 1e-4


def test_sampled_fills_follow_the_processed_distribution(qwen3):
    """With W = 1 the paper's decoder draws each token from the mask's own distribution."""
    (prompt,) = prompts_of([6])
    with torch.no_grad():
        logits = qwen3(input_ids=torch.tensor([[*prompt, MASK]])).logits[0, -1]
    logits[MASK] = -torch.inf
    top = logits.topk(5).indices
    sampled = {"window_size": 1, "do_sample": True, "temperature": 3.0, "top_k": 5, "max_new_tokens": 1}
    output, _ = generate(qwen3, [prompt] * 2000, 0, **sampled)
    observed = (output.sequences[:, 6:] == top).sum(0)
    assert observed.sum() == 2000
    assert chi_square(observed, chances_of(qwen3, [*prompt, MASK], top, 3.0)) < 23.5  # p = 1e-4


def test_rows_that_finish_leave_the_batch_and_the_cache_comes_back_in_the_callers_order(qwen3):
    prompts = prompts_of([5, 1, 12, 7, 3])
    output, rows = generate(qwen3, prompts, entropy_threshold=2.0, output_trace=True)
    sizes = [len(step.rows) for step in output.trace]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < len(prompts) and len(set(map(len, rows))) > 1
    for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True)):  # all but the last pending tokens
        length = cache_of(output).lengths[row]
        assert len(prompt) <= length <= len(prompt) + len(tokens)
        assert cache_of(output).token_ids[row, :length].tolist() == (prompt + tokens)[:length]


def test_mask_tokens_in_a_prompt_are_ordinary_text_and_none_is_ever_emitted(qwen3):
    prompt = [10, MASK, 11, MASK, MASK, 12]
    _, rows = generate(qwen3, [prompt], entropy_threshold=3.0, window_size=8)
    assert rows == [decode(qwen3, prompt, window_size=8, tau=3.0, lam=0.02, **ORACLE)[0]]
    assert MASK not in rows[0]
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[MASK] = model.lm_head.weight.sum(0) * 3
    for verification in ("none", "exact"):
        assert MASK not in generate(model, [prompt], verification=verification)[1][0]


KEEP = {"output_scores": True, "output_logits": True}
SHORT_AND_LONG = [5, 1, 12]


def test_verified_scores_logits_and_log_probs_are_those_of_ar_decoding(qwen3):
    options = KEEP | {"suppress_tokens": [MASK], "repetition_penalty": 1.3}
    output, rows = generate(qwen3, prompts_of(SHORT_AND_LONG), verification="exact", **options)
    ar, ar_rows = generate(qwen3, prompts_of(SHORT_AND_LONG), strategy="ar", **options)
    assert rows == ar_rows and len({len(row) for row in rows}) > 1
    transitions, expected = (
        qwen3.compute_transition_scores(run.sequences, run.scores, normalize_logits=True) for run in (output, ar)
    )
    for row, tokens in enumerate(rows):
        count = len(tokens)
        for values, others in ((output.scores, ar.scores), (output.logits, ar.logits)):
            assert len(values) == len(others) == max(map(len, rows))
            found, wanted = (torch.stack([each[row] for each in scores[:count]]) for scores in (values, others))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
            for padding in values[count:]:  # certain
                assert padding[row, PAD] == 0 and padding[row].isinf().sum() == 319
        log_probs = torch.log_softmax(wanted, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(output.log_probs[row, :count], log_probs, atol=1e-4, rtol=0)
        torch.testing.assert_close(transitions[row, :count], expected[row, :count], atol=1e-4, rtol=0)
        assert (output.log_probs[row, count:] == 0).all() and (transitions[row, count:] == 0).all()


@pytest.mark.parametrize("strategy", ["wedlm", "block"])
def test_trace_and_step_map_tell_all_and_logits_are_those_of_the_masks_that_were_filled(qwen3, strategy):
    prompts = prompts_of(SHORT_AND_LONG)
    output, rows = generate(qwen3, prompts, strategy=strategy, entropy_threshold=2.0, output_trace=True, **KEEP)
    for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True)):
        told = {}
        for index, step in enumerate(output.trace):
            if row not in step.rows:
                continue
            entry = step.rows.index(row)
            count, filled = step.counts[entry], step.filled[entry]
            positions = step.position_ids[entry, -count:].tolist()
            places = [*sorted(set(range(min(positions))) - set(positions)), *positions]  # those of the cache first
            ids = [*prompt, *tokens][: len(places) - count] + step.input_ids[entry, -count:].tolist()
            where = dict(zip(places, causal_forward(qwen3, ids, places), strict=True))
            columns = step.logit_positions[entry][filled].tolist(), step.tokens[entry][filled].tolist()
            told |= {place - len(prompt): (index, token, where[place]) for place, token in zip(*columns, strict=True)}
        for offset, token in enumerate(tokens):
            index, said, logits = told[offset]
            assert said == token and output.step_map[row, offset] == index
            torch.testing.assert_close(output.logits[offset][row], logits, atol=1e-4, rtol=1e-4)
            logits[MASK] = -torch.inf
            torch.testing.assert_close(output.scores[offset][row], logits, atol=1e-4, rtol=1e-4)
        assert (output.step_map[row, len(tokens) :] == -1).all()


def test_ar_decoding_counts_each_row_up_to_where_a_criterion_ended_it_and_counts_print_as_a_table(qwen3):
    """The padding behind may be an end token, or any other."""
    ends = torch.tensor([EOS, MASK + 1])  # which transformers takes, too
    how = {"max_new_tokens": 9, "return_dict_in_generate": True, "eos_token_id": ends}
    stop = lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 5, ids.shape[1] >= 8])  # noqa: E731
    for pad in (PAD, EOS):
        how |= {"inputs": torch.tensor([[5, 6, 7], [8, 9, 10]]), "pad_token_id": pad, "stopping_criteria": [stop]}
        exact, ar = qwen3.generate(**how, strategy="wedlm", verification="exact"), qwen3.generate(**how)
        assert ar.sequences.tolist() == exact.sequences.tolist()
        assert ar.stats.new_tokens.tolist() == ar.stats.forwards.tolist() == exact.stats.new_tokens.tolist() == [2, 5]
    assert ar.stats.tokens_per_forward == 1
    titles, *rows = str(ar.stats).splitlines()
    assert titles.split("  ")[-2:] == ["tokens per forward", "drafts accepted"]
    assert [row.split() for row in rows] == [f"{name} 1.00 0 of 0".split() for name in ("0 2 2", "1 5 5", "all 7 7")]
