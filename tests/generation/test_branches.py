"""Verified decoding with branches: AR's own output whatever is drafted, and drafts that are what they should be."""

import copy
import json
from random import Random
from types import SimpleNamespace

import pytest
import torch
from oracle import causal_forward, decode, decode_ar
from test_generation import ENDS, LIMIT, generate, prompts_of
from tiny import EOS, MASK, tiny_model, tiny_tokenizer
from transformers import DynamicCache

from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.generation import WindowCache, mixin
from wedlm_hf.generation.branch_pacing import BranchPacer, DraftRecord, check_calibration
from wedlm_hf.generation.branches import BranchRule
from wedlm_hf.generation.decoding import ParallelDecoder
from wedlm_hf.generation.sampling import SHORTLIST
from wedlm_hf.generation.step_times import StepTimes

FIXED = {"adaptive_window": False, "window_size": 4}
COUNTED = {"slot_cost": 0.01}  # a slot cost leaves no part to the clock
PACES = {"fixed": FIXED, "counted": COUNTED, "timed": {}}


def adapted(style="qwen3", head_width=8, **overrides):
    """A tiny model with a random mask adapter that changes every mask."""
    model = tiny_model(style, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapter = model.add_mask_adapter(MaskAdapterSettings(rank=4, head_width=head_width))
        for parameter in adapter.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module", params=["qwen3", "qwen2.5"])
def model(request):
    return adapted(request.param)


@pytest.fixture(scope="module")
def qwen3():
    return adapted()


def ar_outputs(model, prompts):
    """What AR decoding says, by the slow oracle."""
    return [decode_ar(model, prompt, limit=LIMIT, mask_id=MASK, eos_ids=ENDS) for prompt in prompts]


@pytest.fixture
def foreseeing(monkeypatch):
    """Lets the masks draft what AR decoding will say, but for some of the drafts.

    Random weights never agree by chance, so without this hardly a draft would pass.
    """

    def install(answers, errors=0.3, seed=0):
        def draft(rule, hidden, shortlist, before, order, offsets):
            random = Random(seed)
            tokens = torch.zeros_like(offsets)
            for entry, row in enumerate(order.rows):
                for column, offset in enumerate(offsets[entry].tolist()):
                    is_wrong = random.random() < errors or offset >= len(answers[row])
                    tokens[entry, column] = 9 if is_wrong else answers[row][offset]
            return tokens, torch.full(offsets.shape, 1 - errors), torch.zeros(*offsets.shape, 2)

        monkeypatch.setattr(BranchRule, "_draft", draft)

    return install


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("lengths", [[7], [5, 1, 12]])
def test_greedy_output_is_that_of_ar_decoding(model, pace, lengths):
    prompts = prompts_of(lengths)
    output, rows = generate(model, prompts, verification="exact", **PACES[pace])
    assert rows == ar_outputs(model, prompts)
    assert (output.stats.forwards <= output.stats.new_tokens).all()


@pytest.mark.parametrize("pace", ["fixed", "counted"])
@pytest.mark.parametrize("errors", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("lengths", [[7], [5, 1, 12, 3]])
def test_output_is_that_of_ar_decoding_whatever_share_of_the_drafts_passes(model, foreseeing, pace, errors, lengths):
    prompts = prompts_of(lengths)
    expected = ar_outputs(model, prompts)
    foreseeing(expected, errors)
    output, rows = generate(model, prompts, verification="exact", **PACES[pace])
    assert rows == expected
    if errors < 0.5 and len(prompts) > 1:
        assert output.stats.tokens_per_forward > 1.3
        assert output.stats.accepted.sum() > 0


def test_each_row_of_a_batch_gives_what_it_gives_alone(qwen3, foreseeing):
    prompts = prompts_of([5, 1, 12, 3])
    answers = ar_outputs(qwen3, prompts)
    foreseeing(answers, 0.0)
    together, rows = generate(qwen3, prompts, verification="exact", **FIXED)
    for index, prompt in enumerate(prompts):
        foreseeing([answers[index]], 0.0)
        alone, (row,) = generate(qwen3, [prompt], verification="exact", **FIXED)
        assert row == rows[index]
        for name in ("forwards", "token_instances", "drafted", "accepted"):
            assert getattr(alone.stats, name)[0] == getattr(together.stats, name)[index], name


SAMPLED = {
    "plain": {"do_sample": True},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "prefix": {"do_sample": True, "repetition_penalty": 1.3},
    "greedy with a prefix": {"repetition_penalty": 1.3},
}


@pytest.mark.parametrize("pace", ["fixed", "counted"])
@pytest.mark.parametrize("sampling", SAMPLED)
def test_a_seed_gives_the_text_that_it_gives_without_drafts(qwen3, sampling, pace):
    prompts = prompts_of([5, 9])
    texts = []
    for options in ({"slot_cost": 1000.0}, PACES[pace]):
        torch.manual_seed(5)
        output, rows = generate(qwen3, prompts, verification="exact", **SAMPLED[sampling], **options)
        texts.append(rows)
    assert output.stats.drafted.sum() > 0
    assert texts[0] == texts[1]


def test_a_sampled_draft_shares_the_noise_of_the_token_it_guesses(qwen3, monkeypatch):
    """Masks that predict as the AR head does draft just what it will sample, at any temperature."""
    prompts = prompts_of([6])
    torch.manual_seed(3)
    _, (expected,) = generate(qwen3, prompts, verification="exact", slot_cost=1000.0, do_sample=True)

    def draft(rule, hidden, shortlist, before, order, offsets):
        tokens = torch.zeros_like(offsets)
        shortlist = torch.tensor([[token for token in range(320) if token != MASK]])
        for column, offset in enumerate(offsets[0].tolist()):
            sequence = prompts[0] + expected[:offset]
            scores = causal_forward(qwen3, sequence, list(range(len(sequence))))[-1:][:, shortlist[0]]
            place = rule.sampler.draft(scores, shortlist, offsets[:, column], order)
            tokens[0, column] = shortlist.gather(1, place)[0, 0]
        return tokens, torch.ones(offsets.shape), torch.zeros(*offsets.shape, 2)

    monkeypatch.setattr(BranchRule, "_draft", draft)
    torch.manual_seed(3)
    output, (row,) = generate(qwen3, prompts, verification="exact", do_sample=True, **FIXED)
    assert row == expected
    assert output.stats.accepted.sum() >= output.stats.drafted.sum() - 3  # those behind the end


def test_masks_see_their_own_branch_and_the_real_rows_before_it(model, foreseeing, monkeypatch):
    """The hidden state of each mask is that of a plain causal forward on its prefix and the masks of its branch, which
    stand behind the position of the next token."""
    prompts = prompts_of([5, 1, 12])
    foreseeing(ar_outputs(model, prompts), 0.4)
    forward, checked = ParallelDecoder._forward, []

    def checked_forward(decoder, order):
        rows = [copy.deepcopy(row) for row in decoder.rows_in_use]
        logits, slots = forward(decoder, order)
        for entry, row in enumerate(rows):
            column = 0
            for branch, size in enumerate(row.branches):
                prefix = row.tokens + row.window[:branch]
                if size:
                    positions = [*range(len(prefix)), *range(len(prefix) + 1, len(prefix) + 1 + size)]
                    ids = torch.tensor([prefix + [MASK] * size])
                    alone = model.model(input_ids=ids, position_ids=torch.tensor([positions]), slot_mask=size)
                    expected = alone.last_hidden_state[0, -size:]
                    found = slots.hidden[entry, column : column + size]
                    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
                    checked.append(branch)
                column += size
        return logits, slots

    monkeypatch.setattr(ParallelDecoder, "_forward", checked_forward)
    with torch.no_grad():
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            generate(model, prompts, verification="exact", **FIXED)
    model.set_attn_implementation("sdpa")
    assert set(checked) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("lengths", [[7], [3, 10, 6]])
def test_after_every_step_the_cache_is_that_of_a_fresh_prefill(qwen3, foreseeing, monkeypatch, lengths):
    prompts = prompts_of(lengths)
    rows = ar_outputs(qwen3, prompts)
    foreseeing(rows, 0.3)
    seen = 0
    commit = WindowCache.commit

    def checked_commit(cache, counts):
        nonlocal seen
        commit(cache, counts)
        for buffer_row, row in enumerate(cache._rows[: len(counts)]):
            length = cache.lengths[buffer_row]
            sequence = (prompts[row] + rows[row])[:length]
            fresh = DynamicCache()
            qwen3.model(input_ids=torch.tensor([sequence]), past_key_values=fresh, use_cache=True)
            for layer, fresh_layer in zip(cache.layers, fresh.layers, strict=True):
                for buffer, expected in ((layer._keys, fresh_layer.keys), (layer._values, fresh_layer.values)):
                    torch.testing.assert_close(buffer[buffer_row, :, :length], expected[0], atol=1e-4, rtol=1e-4)
            seen += 1

    monkeypatch.setattr(WindowCache, "commit", checked_commit)
    with torch.no_grad():
        generate(qwen3, prompts, verification="exact", **FIXED)
    assert seen >= sum(map(len, rows)) // 4


def replay(model, prompt, *, window_size, limit):
    """Decoding with branches of `window_size` masks, all from scratch. Returns tokens, forwards, token instances."""
    generated, drafts, committed = [], [], 0
    forwards = instances = 0
    while True:
        branches = [min(window_size, limit - len(generated) - branch - 1) for branch in range(len(drafts) + 1)]
        if drafts and drafts[-1] in ENDS:
            branches[-1] = 0
        branches = [max(size, 0) for size in branches]
        forwards += 1
        instances += len(generated) - committed + len(drafts) + sum(branches)
        committed = len(generated)
        found = []
        for draft in [*drafts, None]:
            sequence = prompt + generated + found
            scores = causal_forward(model, sequence, list(range(len(sequence))))[-1]
            scores[MASK] = -torch.inf
            found.append(int(scores.argmax()))
            if found[-1] != draft:
                break
        size = branches[len(found) - 1]
        before = (prompt + generated + found)[-2:]
        sequence = prompt + generated + found[:-1]
        for token in found:
            generated.append(token)
            if token in ENDS or len(generated) == limit:
                return generated, forwards, instances
        drafts = []
        if size:
            # The token behind the sequence is decided: masks stand at the positions behind that one.
            positions = [*range(len(sequence)), *range(len(sequence) + 1, len(sequence) + 1 + size)]
            ids = torch.tensor([sequence + [MASK] * size])
            with torch.no_grad():
                hidden = model.model(input_ids=ids, position_ids=torch.tensor([positions]), slot_mask=size)
            for state in hidden.last_hidden_state[0, -size:]:
                with torch.no_grad():
                    own = model.lm_head(state)
                    own[MASK] = -torch.inf
                    scores = model.lm_head(model.draft_hidden(state, torch.tensor(before)))
                likely = own.topk(min(SHORTLIST, len(own) - 1)).indices
                drafts.append(int(likely[scores[likely].argmax()]))
                before = [before[1], drafts[-1]]
                if drafts[-1] in ENDS:
                    break
        drafts = drafts[: limit - len(generated) - 1]


@pytest.mark.parametrize("head_width", [0, 8])
@pytest.mark.parametrize("window_size", [2, 5])
def test_drafts_and_counts_are_those_of_a_replay_from_scratch(window_size, head_width):
    # A model whose answers soon repeat themselves, so that even random masks are right at times.
    model = adapted(initializer_range=0.1, head_width=head_width)
    passed = 0
    for prompt in prompts_of([5, 9, 3, 7], seed=2):
        output, (row,) = generate(
            model, [prompt], verification="exact", adaptive_window=False, window_size=window_size
        )
        counts = output.stats.forwards.item(), output.stats.token_instances.item()
        assert (row, *counts) == replay(model, prompt, window_size=window_size, limit=LIMIT)
        passed += output.stats.accepted.item()
        for name in ("drafted", "accepted"):
            by_depth = getattr(output.stats, f"{name}_by_depth")[0].tolist()
            assert sum(by_depth) == getattr(output.stats, name).item() and by_depth == sorted(by_depth, reverse=True)


def test_counts_are_what_a_hook_sees(qwen3, foreseeing):
    prompt = prompts_of([6])
    foreseeing(ar_outputs(qwen3, prompt), 0.3)
    shapes = []
    handle = qwen3.model.layers[0].register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape[1]))
    output, _ = generate(qwen3, prompt, verification="exact", **FIXED)
    handle.remove()
    assert output.stats.forwards.item() == len(shapes)
    assert output.stats.token_instances.item() == sum(shapes) - 6


def test_a_chain_takes_the_place_of_branches_where_attention_takes_no_mask(qwen3, foreseeing, monkeypatch):
    prompt = prompts_of([6])
    expected = ar_outputs(qwen3, prompt)
    foreseeing(expected, 0.3)
    monkeypatch.setattr(mixin, "DENSE_MASK_ATTENTION", ())
    masks = []
    order = BranchRule.order

    def checked_order(rule, rows, *args):
        masks.append(rows[0].branches[:-1])
        found = order(rule, rows, *args)
        assert found.visibility is None
        return found

    monkeypatch.setattr(BranchRule, "order", checked_order)
    output, rows = generate(qwen3, prompt, verification="exact", **FIXED)
    assert rows == expected
    assert not any(map(any, masks)) and output.stats.accepted.sum() > 0


class WithSlots:
    """A model that is told which rows are slots by their tokens, for the oracle."""

    def __init__(self, model):
        self.model, self.dtype = model, model.dtype

    def __call__(self, input_ids, **inputs):
        ids = input_ids[0].tolist()
        count = next((index for index, token in enumerate(reversed(ids)) if token != MASK), len(ids))
        return self.model(input_ids=input_ids, **inputs, **({"slot_mask": count} if count else {}))


def test_unverified_windows_are_filled_by_the_adapter(qwen3):
    prompts = prompts_of([5, 1, 12])
    settings = {"tau": 1.5, "lam": 0.02, "limit": LIMIT, "mask_id": MASK, "eos_ids": ENDS}
    expected = [decode(WithSlots(qwen3), prompt, window_size=6, **settings) for prompt in prompts]
    output, rows = generate(qwen3, prompts, window_size=6, entropy_threshold=1.5)
    assert rows == [tokens for tokens, _, _ in expected]
    assert output.stats.forwards.tolist() == [forwards for _, forwards, _ in expected]


def test_typical_acceptance_depends_on_no_clock(qwen3, monkeypatch):
    prompts = prompts_of([5, 9])
    outputs = []
    for factor in (1.0, 1000.0):
        moments = iter(factor * index**2 for index in range(10_000))
        monkeypatch.setattr(mixin, "step_clock", lambda _, moments=moments: lambda: next(moments))
        outputs.append(generate(qwen3, prompts, verification="typical", acceptance_epsilon=0.01)[1])
    assert outputs[0] == outputs[1]


def test_stop_strings_streams_scores_and_traces_work_as_without_branches(qwen3, foreseeing):
    prompt, tokenizer = prompts_of([6]), tiny_tokenizer()
    (expected,) = ar_outputs(qwen3, prompt)
    foreseeing([expected], 0.2)
    shown = []

    class Streamer:
        def put(self, value):
            shown.append(value.tolist())

        def put_draft(self, value):
            pass

        def end(self):
            shown.append("end")

    options = {"verification": "exact", **FIXED, "output_trace": True, "output_logits": True, "streamer": Streamer()}
    output, (row,) = generate(qwen3, prompt, **options)
    assert row == expected
    assert [token for tokens in shown[1:-1] for token in tokens] == expected and shown[-1] == "end"
    scores = causal_forward(qwen3, prompt[0] + expected, list(range(6 + len(expected))))[5:-1]
    found = torch.log_softmax(scores, -1).gather(1, torch.tensor(expected)[:, None])[:, 0]
    torch.testing.assert_close(output.log_probs[0], found, atol=1e-3, rtol=1e-3)
    assert len(output.logits) == len(expected)
    assert sorted(set(output.step_map[0].tolist())) == list(range(output.stats.forwards.item()))
    drafted = {}
    for step in output.trace:
        for position, token in drafted.items():  # the drafts of one step are what the next one checks
            assert token in step.input_ids[0][step.position_ids[0] == position]
        columns = step.filled[0]
        drafted = dict(zip(step.logit_positions[0, columns].tolist(), step.tokens[0, columns].tolist(), strict=True))
        drafted = {position: token for position, token in drafted.items() if position < 6 + LIMIT - 1}
    stop = next(text for text in map(tokenizer.decode, expected[3:]) if text.isascii() and text.isprintable())
    stopped = qwen3.generate(
        torch.tensor(prompt), strategy="wedlm", verification="exact", **FIXED, max_new_tokens=LIMIT, eos_token_id=EOS,
        stop_strings=[stop], tokenizer=tokenizer,
    )  # fmt: skip
    text = tokenizer.decode(stopped[0, 6:])
    assert stop in text and len(stopped[0]) < 6 + LIMIT


def test_a_cache_that_is_returned_goes_on_with_the_next_turn(qwen3, foreseeing):
    prompt = prompts_of([6])
    foreseeing(ar_outputs(qwen3, prompt), 0.3)
    first, (row,) = generate(qwen3, prompt, verification="exact", **FIXED)
    following = [prompt[0] + row + [20, 21, 22]]
    expected = ar_outputs(qwen3, following)
    foreseeing(expected, 0.3)
    options = {"verification": "exact", "past_key_values": first.past_key_values, **FIXED}
    assert generate(qwen3, following, **options)[1] == expected


def test_a_static_cache_is_refused(qwen3):
    with pytest.raises(ValueError, match="static"):
        generate(qwen3, prompts_of([5]), verification="exact", cache_implementation="static")


# --- the pacer -------------------------------------------------------------------------------------------------------


def fp32_cpu(rows):
    """Seconds of a step where a second row doubles the time (SmolLM2-135M in float32 on two cores)."""
    return 0.041 if rows == 1 else 0.075 + 0.001 * rows


def bf16_cpu(rows):
    return 0.026 if rows == 1 else 0.0265 + 0.0005 * rows


def few_rows_cpu(rows):
    """fp32 where few rows are multiplied in the faster order: beyond 8, all of them jump."""
    return 0.068 if rows == 1 else 0.038 + 0.0055 * rows if rows <= 8 else 0.1 + 0.001 * rows


def simulate(seconds, chance, steps, pacer, seed=0):
    """Steps of one row whose drafts pass with `chance(step)` and whose masks say so.

    Returns the time per token relative to AR decoding."""
    random, time, tokens, confidence, branches = Random(seed), 0.0, 0, [], [0]
    clock = pacer.record.times.clock
    for step in range(steps):
        drafts, rows = len(branches) - 1, len(branches) + sum(branches)
        pacer.begin_step(rows, is_prefill=False)
        clock.now += seconds(rows)
        time += seconds(rows)
        accepted = 0
        while accepted < drafts and random.random() < confidence[accepted]:
            accepted += 1
        tokens += accepted + 1
        found = [chance(step) * random.uniform(0.7, 1.0) for _ in range(branches[accepted])]
        pacer.learn(confidence, drafts, accepted, found)
        pacer.observe([])
        confidence = found
        branches = pacer.plan(confidence, remaining=1000)
    return time / tokens / seconds(1)


class Clock:
    """A clock that only moves when it is told to."""

    now = 0.0

    def __call__(self):
        return self.now


def pacer(**options):
    return BranchPacer(8, DraftRecord(StepTimes(0.02, Clock())), **options)


@pytest.mark.parametrize("seconds", [fp32_cpu, bf16_cpu])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.95])
def test_a_step_costs_no_more_than_ar_decoding_and_uses_what_can_be_foreseen(seconds, chance):
    pace = pacer()
    simulate(seconds, lambda step: chance, 300, pace)
    cost = simulate(seconds, lambda step: chance, 1000, pace, seed=1)
    assert cost < 1.03
    if chance > 0.9:
        assert cost < (0.8 if seconds is fp32_cpu else 0.5)


@pytest.mark.parametrize(
    ("seconds", "chance"),
    [
        (bf16_cpu, 0.2),
        (bf16_cpu, 0.5),
        (bf16_cpu, 0.85),
        (few_rows_cpu, 0.2),
        (few_rows_cpu, 0.5),
    ],
)
def test_without_a_setting_it_costs_little_more_than_the_best_fixed_choice(seconds, chance):
    costs = []
    for largest in (1, 2, 3, 4, 6):
        fixed = BranchPacer(largest, DraftRecord(StepTimes(0.02, Clock())), is_adaptive=False)
        costs.append(simulate(seconds, lambda step: chance, 600, fixed, seed=1))
    pace = pacer()
    simulate(seconds, lambda step: chance, 300, pace)
    assert simulate(seconds, lambda step: chance, 600, pace, seed=1) < 1.06 * min(1.0, *costs)


def test_even_the_first_call_costs_little_where_nothing_is_foreseen():
    assert simulate(fp32_cpu, lambda step: 0.1, 128, pacer()) < 1.1
    assert simulate(bf16_cpu, lambda step: 0.1, 128, pacer()) < 1.05


def test_branches_come_back_where_the_text_becomes_foreseeable():
    pace = pacer()
    simulate(fp32_cpu, lambda step: 0.0, 400, pace)
    assert pace.drafts == 0
    simulate(fp32_cpu, lambda step: 0.95, 600, pace)
    assert pace.drafts > 2


def test_masks_are_given_where_the_first_failure_is_likely():
    """A sure draft leaves the first branch nothing to do, a hopeless one everything."""
    pace = BranchPacer(8, DraftRecord(StepTimes(0.03)))
    pace.record.runs.extend([[0.6, 0.5]] * 32)
    pace.observe([])
    sure, hopeless = pace.plan([0.99], 100), pace.plan([0.02], 100)
    assert sure[0] == 0 and sure[1] > 0
    assert hopeless[0] > 0 and sum(hopeless[1:]) == 0
    assert pace.plan([0.99], remaining=2) == [0, 0]


def test_own_probabilities_are_corrected_by_what_passed():
    record = DraftRecord(StepTimes(0.03))
    pace = BranchPacer(8, record)
    for _ in range(100):
        pace.learn([0.9], checked=1, accepted=0, found=[])
    assert record.reaches([0.9])[0] < 0.1
    assert record.reaches([0.5])[0] == 0.5


def test_drafts_that_no_masks_are_worth_count_as_ar_steps():
    times = StepTimes(0.0)
    times.of = lambda rows, is_plain=False: 6.0 if is_plain else float(rows)  # AR steps are slow, but rows cost more
    times.line, times.row_cost, times.knows_plain = lambda: (0.0, 1.0), lambda width: 1.0, lambda rows: True
    record = DraftRecord(times)
    record.runs.extend([[0.41, 0.69, 0.26]] * 8)
    pace = BranchPacer(8, record)
    assert pace.rate > 2 and not any(pace.plan([], 100))
    assert pace.drafts == 0


def test_decoding_begins_with_what_a_calibration_knows():
    seen = DraftRecord(StepTimes(0.03))
    pace = BranchPacer(8, seen)
    for _ in range(60):
        pace.learn([0.9, 0.2], checked=2, accepted=1, found=[0.9, 0.2])
    stored = json.loads(json.dumps(seen.calibration()))
    check_calibration(stored)
    assert stored["confidence_by_depth"] == [0.9, 0.2]
    record = DraftRecord.begin(StepTimes(0.03), None, stored)
    assert record.reaches([0.9])[0] > 0.95 and record.reaches([0.2])[0] < 0.1
    assert BranchPacer(8, record).drafts in (1, 2)
    assert DraftRecord.begin(StepTimes(0.03), None, None) == DraftRecord(StepTimes(0.03))
    for _ in range(40):  # it gives way to what is seen now
        BranchPacer(8, record).learn([0.9], 1, 0, [0.9])
    assert record.reaches([0.9])[0] < 0.4


@pytest.mark.parametrize(
    "calibration",
    [[], "x", {}, {"passed": [0.0] * 8, "tried": [0.0] * 7, "confidence_by_depth": []},
     {"passed": [1.0] * 8, "tried": [0.0] * 8, "confidence_by_depth": [0.5]},
     {"passed": [0.0] * 8, "tried": [float("nan")] * 8, "confidence_by_depth": [0.5]},
     {"passed": [0.0] * 8, "tried": [1.0] * 8, "confidence_by_depth": [1.5]},
     {"passed": [0.0] * 8, "tried": [1.0] * 8, "confidence_by_depth": ["0.5"]}],
)  # fmt: skip
def test_a_calibration_that_is_none_is_refused(calibration):
    with pytest.raises(ValueError, match="`calibration` must hold `passed` and `tried`, 8 counts each"):
        check_calibration(calibration)


def test_times_are_those_of_a_line_and_of_one_row():
    times = StepTimes(0.02, Clock())
    for rows in (1, 1, 1, 4, 8, 12, 16, 8, 4, 12) * 3:
        times.record(rows, fp32_cpu(rows))
    times.record(8, 30.0)  # the machine was busy
    for rows in (2, 8, 24):
        assert times.of(rows) / times.of(1) == pytest.approx(fp32_cpu(rows) / fp32_cpu(1), rel=0.1)


def test_a_row_more_costs_what_it_adds_to_wide_steps():
    times = StepTimes(0.02, Clock())
    wide = [2, 4, 6, 8, 10, 12, 14, 16] * 7
    Random(0).shuffle(wide)
    for rows in [1] * 4 + wide:
        times.record(rows, 10.0 + max(0, rows - 8))  # up to 8 rows, reading the weights takes all the time
    assert times.row_cost(10) > 1.2 * times.line()[1]
    times.doubt()  # few steps are left
    assert times.row_cost(100) == times.line()[1]


def test_in_a_batch_every_row_gets_the_same_columns_for_its_own_best_masks():
    """A step is as wide as its widest row: what one of them leaves unused is lost."""
    record = DraftRecord(StepTimes(0.01))
    record.runs.extend([[0.7, 0.5, 0.4]] * 32)
    pace = BranchPacer(8, record, rows=4)
    assert pace.drafts >= 2
    sure, doubtful = pace.plan([0.9, 0.9, 0.9], 100), pace.plan([0.2, 0.2, 0.2], 100)
    assert len(sure) == len(doubtful) == pace.drafts + 1
    assert sum(sure) == sum(doubtful) and sure != doubtful
    assert sure[-1] > doubtful[-1] and doubtful[0] > sure[0]


def test_what_rows_cost_is_soon_known():
    clock = Clock()
    record = DraftRecord(StepTimes(0.2, clock))  # a guess so high that AR steps seem to be best
    outcomes = [SimpleNamespace(row=SimpleNamespace(is_finished=False))] * 4
    pace = BranchPacer(8, record, rows=4)
    planned = []
    for _ in range(40):
        planned.append(sum(pace.plan([], 100)))
        pace.begin_step(4 * (1 + planned[-1]), is_prefill=False)
        clock.now += 1.0
        pace.learn([], 0, 0, [0.9] * planned[-1])
        pace.observe(outcomes)
    assert sum(map(bool, planned)) < 10 and record.times.knows_line


def test_times_of_a_busy_and_of_a_quiet_machine_are_not_compared():
    times = StepTimes(0.02, Clock())
    for rows in (1, 4, 8, 12, 1, 1, 1, 1, 1, 4, 8, 12, 4, 8, 12):
        times.record(rows, 2 * fp32_cpu(rows))
    for rows in (4, 8, 12) * 8:
        times.record(rows, fp32_cpu(rows))
    assert times.of(8) / times.of(1) == pytest.approx(fp32_cpu(8) / fp32_cpu(1), rel=0.15)


def test_the_first_step_of_a_shape_does_not_count():
    times = StepTimes(0.02, Clock())
    for rows in (1, 4, 8):
        times.record(rows, 10.0)
    for rows in (1, 1, 1, 4, 8, 4, 8, 4, 8):
        times.record(rows, bf16_cpu(rows))
    assert times.of(8) / times.of(1) == pytest.approx(bf16_cpu(8) / bf16_cpu(1), rel=0.1)


def test_rows_that_cost_more_than_they_can_bring_are_not_planned():
    pace = pacer()
    pace.drafts, pace.price, pace._is_ar_step = 2, 1.5, False
    assert pace.plan([0.9, 0.9], remaining=100) == [0]
