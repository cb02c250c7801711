"""Parallel decoding against the slow decoders of oracle.py, and what must hold at every step."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import causal_forward, decode
from tiny import EOS, MASK, PAD, VOCAB_SIZE, stock_twin, tiny_model
from transformers import DynamicCache, Qwen3ForCausalLM

from wedlm_hf.generation import WeDLMGenerationMixin, WindowCache
from wedlm_hf.generation.versions import CACHE, cache_of

LIMIT = 24
THRESHOLD = {"none": "entropy_threshold", "exact": "draft_threshold"}
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
    input_ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    attention_mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": input_ids, "attention_mask": attention_mask}


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
    inputs = padded(prompts)
    defaults = {"strategy": "wedlm", "max_new_tokens": LIMIT, "eos_token_id": ENDS, "return_dict_in_generate": True}
    options = defaults | options
    output = model.generate(**inputs, **options)
    ends = options["eos_token_id"] if isinstance(options["eos_token_id"], list) else [options["eos_token_id"]]
    return output, new_tokens(output.sequences, inputs["input_ids"].shape[1], ends)


@contextmanager
def no_forward(model):
    """Within this context, the model must not run."""

    def forbidden(*args, **kwargs):
        raise AssertionError("the model ran")

    with model.register_forward_pre_hook(forbidden):
        yield


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


@pytest.mark.parametrize(
    ("strategy", "window_size", "tau", "lam"),
    [
        *(("wedlm", *each) for each in ((1, 0.3, 0), (4, 0, 0), (4, 1.5, 0.5), (32, 0.3, 0.5), (32, 1.5, 0))),
        *(("block", *each) for each in ((1, 0.3, 0), (4, 0, 0.5), (4, 1.5, 0), (32, 0.3, 0.5))),
    ],
)
def test_greedy_output_and_counts_equal_the_oracle_that_recomputes_everything(model, strategy, window_size, tau, lam):
    prompts = prompts_of([5, 1, 12], seed=window_size)
    arguments = ORACLE | {"window_size": window_size, "tau": tau, "lam": lam, "block": strategy == "block"}
    expected = [decode(model, prompt, **arguments) for prompt in prompts]
    options = {"strategy": strategy, "window_size": window_size, "entropy_threshold": tau, "distance_penalty": lam}
    batched, batched_rows = generate(model, prompts, **options)
    assert batched_rows == [tokens for tokens, _, _ in expected]
    assert batched.stats.forwards.tolist() == [forwards for _, forwards, _ in expected]
    assert batched.stats.token_instances.tolist() == [instances for _, _, instances in expected]
    assert batched.stats.new_tokens.tolist() == [len(tokens) for tokens, _, _ in expected]
    alone, alone_rows = generate(model, prompts[2:], **options)
    assert alone_rows == batched_rows[2:]
    assert alone.stats.forwards.tolist() == batched.stats.forwards.tolist()[2:]


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    window_size=st.integers(1, 12),
    tau=st.floats(0, 4),
    lam=st.floats(0, 1),
    limit=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_any_settings_equal_the_oracle(qwen3, lengths, window_size, tau, lam, limit, seed):
    prompts = prompts_of(lengths, seed)
    options = {"window_size": window_size, "entropy_threshold": tau, "distance_penalty": lam}
    _, rows = generate(qwen3, prompts, **options, max_new_tokens=limit)
    arguments = ORACLE | {"window_size": window_size, "tau": tau, "lam": lam, "limit": limit}
    assert rows == [decode(qwen3, prompt, **arguments)[0] for prompt in prompts]


def test_the_same_loop_drives_a_stock_qwen3_with_the_same_weights_and_the_mask_token_of_the_call(qwen3):
    stock = stock_twin(qwen3, "sdpa")
    stock.__class__ = type("StockQwen3", (WeDLMGenerationMixin, Qwen3ForCausalLM), {})
    prompts = prompts_of([4, 11])
    _, expected = generate(qwen3, prompts, entropy_threshold=1.5)
    _, rows = generate(stock, prompts, entropy_threshold=1.5, mask_token_id=MASK)
    assert rows == expected


def check_every_commit(model, prompts, rows, monkeypatch, **options):
    """After every step, the cache is that of a fresh prefill. Returns how many rows were compared."""
    seen = 0
    commit = WindowCache.commit

    def checked_commit(cache, kept):
        nonlocal seen
        commit(cache, kept)
        for buffer_row, row in enumerate(cache._rows[: len(kept)]):
            length = cache.lengths[buffer_row]
            sequence = (prompts[row] + rows[row])[:length]
            assert cache.token_ids[buffer_row, :length].tolist() == sequence
            fresh = DynamicCache()
            model.model(input_ids=torch.tensor([sequence]), **{CACHE: fresh}, use_cache=True)
            for layer, fresh_layer in zip(cache.layers, fresh.layers, strict=True):
                for buffer, expected in ((layer._keys, fresh_layer.keys), (layer._values, fresh_layer.values)):
                    torch.testing.assert_close(buffer[buffer_row, :, :length], expected[0], atol=1e-4, rtol=1e-4)
            seen += 1

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(WindowCache, "commit", checked_commit)
        assert generate(model, prompts, **options)[1] == rows
    return seen


@pytest.mark.parametrize("verification", ["none", "exact"])
@pytest.mark.parametrize("lengths", [[7], [3, 10, 6]])
def test_after_every_step_the_cache_is_that_of_a_fresh_prefill(qwen3, monkeypatch, verification, lengths):
    prompts, options = prompts_of(lengths), {THRESHOLD[verification]: 2.0, "verification": verification}
    _, rows = generate(qwen3, prompts, **options)
    assert check_every_commit(qwen3, prompts, rows, monkeypatch, **options) >= sum(map(len, rows)) // 16


def test_tau_zero_fills_one_slot_a_step_and_a_window_of_one_goes_left_to_right(qwen3):
    prompts, traced = prompts_of([6]), {"eos_token_id": EOS, "output_trace": True}
    one_slot, _ = generate(qwen3, prompts, entropy_threshold=0, **traced)
    assert [int(step.filled.sum()) for step in one_slot.trace] == [1] * one_slot.stats.forwards.item()
    assert sorted(one_slot.step_map[0].tolist()) == list(range(LIMIT))
    left_to_right, _ = generate(qwen3, prompts, entropy_threshold=100, window_size=1, **traced)
    assert left_to_right.step_map[0].tolist() == list(range(LIMIT))


@pytest.mark.parametrize("verification", ["none", "exact"])
def test_statistics_equal_what_a_hook_on_the_model_counts(qwen3, verification):
    prompts = prompts_of([5, 9, 2])
    options = {THRESHOLD[verification]: 2.0} | ({"slot_cost": 0.0} if verification == "exact" else {})  # no clock
    calls, note = [], lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape)
    with qwen3.register_forward_pre_hook(note, with_kwargs=True):
        output, rows = generate(qwen3, prompts, verification=verification, output_trace=True, **options)
    assert len(calls) == output.stats.forwards.max().item() == len(output.trace)
    for step, shape in zip(output.trace, calls, strict=True):
        assert shape == step.input_ids.shape == (len(step.rows), max(step.counts))
    instances = [sum(s.counts[s.rows.index(row)] for s in output.trace if row in s.rows) for row in range(3)]
    assert output.stats.token_instances.tolist() == [n - len(p) for n, p in zip(instances, prompts, strict=True)]
    assert output.stats.new_tokens.tolist() == [len(row) for row in rows]
    assert output.stats.tokens_per_forward == pytest.approx(sum(map(len, rows)) / output.stats.forwards.sum().item())
    assert 0 < output.stats.prefix_cacheability <= 1


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
    model, prompts = monotonous(tiny_model()), prompts_of([5])
    fixed = {"window_size": 8, "adaptive_window": False}
    output, rows = generate(model, prompts, verification="exact", max_new_tokens=32, **fixed)
    assert rows == [[50] * 32]
    assert torch.equal(output.stats.accepted, output.stats.drafted)
    assert output.stats.forwards.item() <= 6
    cut = [lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 18])]  # in the middle of a path
    output, rows = generate(model, prompts, verification="exact", max_new_tokens=32, **fixed, stopping_criteria=cut)
    assert rows == [[50] * 13] and cache_of(output).lengths[0] < 18


def test_verified_sampling_is_distributed_as_ar_sampling(qwen3):
    """Two tokens after one prompt: drawn pairs against the AR head's exact probabilities (chi-square)."""
    prompt = prompts_of([6])[0]
    allowed = [30, 31, 32, 33]
    suppressed = [token for token in range(VOCAB_SIZE) if token not in allowed]
    count = 3000

    def probabilities(prefix):
        with torch.no_grad():
            logits = qwen3(input_ids=torch.tensor([prefix])).logits[0, -1]
        return torch.softmax(logits[allowed] / 2.0, dim=-1)

    first = probabilities(prompt)
    expected = torch.stack([first[i] * probabilities([*prompt, token]) for i, token in enumerate(allowed)]).flatten()
    torch.manual_seed(0)
    exact = {"strategy": "wedlm", "verification": "exact", "adaptive_window": False, "draft_threshold": 100.0}
    sampled = {"do_sample": True, "temperature": 2.0, "top_k": 0, "suppress_tokens": suppressed}
    ids = torch.tensor([prompt]).expand(count, -1)
    output = qwen3.generate(ids, **exact, **sampled, max_new_tokens=3, return_dict_in_generate=True)
    assert output.stats.drafted.sum() > count / 2
    pairs = output.sequences[:, 6:8]
    index = (pairs[:, 0] - allowed[0]) * len(allowed) + pairs[:, 1] - allowed[0]
    observed = torch.bincount(index, minlength=16)
    chi_square = ((observed - count * expected) ** 2 / (count * expected)).sum()
    assert chi_square < 44.3  # 15 degrees of freedom, p = 1e-4


def test_sampled_fills_follow_the_processed_distribution(qwen3):
    """With W = 1 the paper's decoder draws each token from the mask's own distribution (chi-square)."""
    prompt = prompts_of([6])[0]
    with torch.no_grad():
        logits = qwen3(input_ids=torch.tensor([[*prompt, MASK]])).logits[0, -1]
    logits[MASK] = -torch.inf
    top = logits.topk(5)
    expected = torch.softmax(top.values / 3.0, dim=-1)
    torch.manual_seed(0)
    sampled = {"strategy": "wedlm", "window_size": 1, "do_sample": True, "temperature": 3.0, "top_k": 5}
    output = qwen3.generate(torch.tensor([prompt]).expand(2000, -1), **sampled, max_new_tokens=1)
    observed = (output[:, 6:] == top.indices).sum(0)
    assert observed.sum() == 2000
    assert ((observed - 2000 * expected) ** 2 / (2000 * expected)).sum() < 23.5  # 4 degrees of freedom, p = 1e-4


def test_rows_that_finish_leave_the_batch(qwen3):
    prompts = prompts_of([5, 1, 12, 7, 3])
    output, rows = generate(qwen3, prompts, entropy_threshold=2.0, output_trace=True)
    assert len(set(map(len, rows))) > 1
    sizes = [len(step.rows) for step in output.trace]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < len(prompts)
    # The cache comes back in the caller's order: it holds every row but its last pending tokens.
    for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True)):
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
    prompts = prompts_of(SHORT_AND_LONG)
    options = KEEP | {"suppress_tokens": [MASK], "repetition_penalty": 1.3}
    output, rows = generate(qwen3, prompts, verification="exact", draft_threshold=2.0, **options)
    ar, ar_rows = generate(qwen3, prompts, strategy="ar", **options)
    assert rows == ar_rows and len({len(row) for row in rows}) > 1
    for name in ("scores", "logits"):
        values, expected = getattr(output, name), getattr(ar, name)
        assert len(values) == len(expected) == max(map(len, rows))
        for row, tokens in enumerate(rows):
            for offset in range(len(values)):
                if offset < len(tokens):
                    torch.testing.assert_close(values[offset][row], expected[offset][row], atol=1e-4, rtol=1e-4)
                else:  # over: padding is certain
                    assert values[offset][row, PAD] == 0 and values[offset][row].isinf().sum() == 319
    for row, tokens in enumerate(rows):
        for offset, token in enumerate(tokens):
            log_prob = torch.log_softmax(ar.logits[offset][row], dim=-1)[token]
            assert output.log_probs[row, offset] == pytest.approx(log_prob.item(), abs=1e-4)
        assert (output.log_probs[row, len(tokens) :] == 0).all()
    transitions = qwen3.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    expected = qwen3.compute_transition_scores(ar.sequences, ar.scores, normalize_logits=True)
    for row, tokens in enumerate(rows):
        torch.testing.assert_close(transitions[row, : len(tokens)], expected[row, : len(tokens)], atol=1e-4, rtol=0)
        assert (transitions[row, len(tokens) :] == 0).all()


@pytest.mark.parametrize("strategy", ["wedlm", "block"])
def test_trace_and_step_map_tell_the_whole_generation_and_logits_are_those_of_the_masks_that_were_filled(
    qwen3, strategy
):
    prompts = prompts_of(SHORT_AND_LONG)
    output, rows = generate(qwen3, prompts, strategy=strategy, entropy_threshold=2.0, output_trace=True, **KEEP)
    assert output.log_probs is None
    for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True)):
        told = {}
        for index, step in enumerate(output.trace):
            if row not in step.rows:
                continue
            entry = step.rows.index(row)
            count, filled = step.counts[entry], step.filled[entry]
            ids = step.input_ids[entry, -count:].tolist()
            positions = step.position_ids[entry, -count:].tolist()
            committed = sorted(set(range(min(positions))) - set(positions))
            known = [*prompt, *tokens][: len(committed)]
            logits = causal_forward(qwen3, known + ids, committed + positions)
            where = dict(zip(committed + positions, logits, strict=True))
            columns = step.logit_positions[entry][filled].tolist(), step.tokens[entry][filled].tolist()
            for position, token in zip(*columns, strict=True):
                told[position - len(prompt)] = index, token, where[position]
        for offset, token in enumerate(tokens):
            index, said, logits = told[offset]
            assert said == token and output.step_map[row, offset] == index
            torch.testing.assert_close(output.logits[offset][row], logits, atol=1e-4, rtol=1e-4)
            logits[MASK] = -torch.inf
            torch.testing.assert_close(output.scores[offset][row], logits, atol=1e-4, rtol=1e-4)
        assert (output.step_map[row, len(tokens) :] == -1).all()


def test_nothing_is_kept_that_nobody_asked_for(qwen3):
    output, _ = generate(qwen3, prompts_of([5]))
    assert output.scores is output.logits is output.log_probs is None
    output, _ = generate(qwen3, prompts_of([5]), verification="exact")
    assert output.scores is output.logits is None
    assert output.log_probs is not None


def test_ar_decoding_counts_each_row_up_to_where_a_criterion_ended_it(qwen3):
    """The padding behind may be an end token, or any other."""
    prompts = torch.tensor([[5, 6, 7], [8, 9, 10]])
    ends = torch.tensor([EOS, MASK + 1])  # which transformers takes, too
    shared = {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True, "eos_token_id": ends}

    def stop(ids, scores, **kwargs):
        return torch.tensor([ids.shape[1] >= 5, ids.shape[1] >= 8])

    for pad in (PAD, EOS):
        how = {**shared, "pad_token_id": pad, "stopping_criteria": [stop]}
        exact = qwen3.generate(prompts, **how, strategy="wedlm", verification="exact")
        ar = qwen3.generate(prompts, **how)
        assert ar.sequences.tolist() == exact.sequences.tolist()
        assert ar.stats.new_tokens.tolist() == exact.stats.new_tokens.tolist() == [2, 5]


def test_counts_print_as_a_table_and_ar_decoding_has_them(qwen3):
    inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]), "do_sample": False, "return_dict_in_generate": True}
    exact = qwen3.generate(**inputs, max_new_tokens=9, strategy="wedlm", verification="exact")
    ar = qwen3.generate(**inputs, max_new_tokens=9)
    assert ar.sequences.tolist() == exact.sequences.tolist()
    assert ar.stats.new_tokens.tolist() == ar.stats.forwards.tolist() == exact.stats.new_tokens.tolist()
    assert ar.stats.tokens_per_forward == 1
    titles, *rows = str(ar.stats).splitlines()
    assert titles.split("  ")[-2:] == ["tokens per forward", "drafts accepted"]
    counts = [*ar.stats.new_tokens.tolist(), int(ar.stats.new_tokens.sum())]
    named = zip(("0", "1", "all"), map(str, counts), strict=True)
    assert [row.split() for row in rows] == [[name, count, count, *"1.00 0 of 0".split()] for name, count in named]
