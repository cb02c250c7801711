"""Windows that follow what they pay: the rule itself, and decoding while it changes W from step to step."""

from random import Random

import pytest
from oracle import decode, decode_ar
from test_generation import ENDS, LIMIT, generate, prompts_of
from tiny import MASK, tiny_model

from wedlm_hf.generation import mixin
from wedlm_hf.generation.pacing import WindowPacer, default_slot_cost
from wedlm_hf.generation.window import RowOutcome


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def pacer(rows=1, slot_cost=0.04, largest=16):
    return WindowPacer(largest, slot_cost, is_adaptive=True, rows=rows)


def outcome(paid, failed):
    return RowOutcome(row=None, final=0, decided=[], filled=[], paid=paid, failed=failed)


def simulate(pace, steps, foresee, rows=1, seed=0):
    """Steps in which a draft at each depth is right with a probability and proposed whatever it is. Returns the sizes
    of the window, and what the time per token was, relative to that of AR steps."""
    random = Random(seed)
    sizes, time, tokens, drafts = [], 0.0, 0, [0] * rows
    for step in range(steps):
        sizes.append(pace.window_size)
        slots = 1 + max(drafts) + pace.window_size
        outcomes, found = [], []
        for count in drafts:
            accepted = 0
            while accepted < count and random.random() < foresee(step, accepted):
                accepted += 1
            outcomes.append(outcome(accepted, accepted if accepted < count else None))
            found.append(max(0, pace.window_size - 1) if accepted == count else 0)
            tokens += (accepted + 1) / rows
        time += 1 + pace.slot_cost * rows * slots
        drafts = found
        pace.observe(outcomes)
    return sizes, time / tokens / (1 + pace.slot_cost * rows)


def test_a_window_that_finds_nothing_gives_way_to_ar_steps_and_costs_next_to_nothing():
    for rows, slot_cost in ((1, 0.04), (8, 0.04), (16, 0.03)):
        pace = pacer(rows, slot_cost)
        assert pace.window_size > 0
        sizes, cost = simulate(pace, 3000, lambda step, depth: 0.0, rows)
        assert 0 < sum(size > 0 for size in sizes[1000:]) < 600  # it still looks up now and then
        assert cost < 1.05


def test_a_window_settles_at_the_depth_that_can_be_foreseen():
    for foreseen in (2, 5, 9):
        sizes, _ = simulate(pacer(), 300, lambda step, depth, foreseen=foreseen: float(depth < foreseen))
        assert sum(sizes[100:]) / 200 == pytest.approx(foreseen + 1, abs=1.5)
    assert simulate(pacer(), 300, lambda step, depth: 1.0)[0][-1] == 16


def test_a_window_that_shrank_grows_back_where_the_text_becomes_foreseeable():
    sizes, _ = simulate(pacer(rows=4), 400, lambda step, depth: float(step > 50), rows=4)
    assert sizes[50] <= 1
    assert sizes[-1] > 6


def test_windows_are_smaller_where_slots_cost_more():
    costs = (0.001, 0.02, 0.1, 0.3, 10.0)
    sizes = [pacer(slot_cost=cost).window_size for cost in costs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16 and sizes[-1] == 0
    assert default_slot_cost("cuda") < default_slot_cost("cpu")


@pytest.mark.parametrize("slot_cost", [0.005, 0.05, 0.3])
@pytest.mark.parametrize("p", [0.1, 0.4, 0.7, 0.9, 0.99])
def test_no_window_is_kept_that_yields_less_than_ar_steps_would(p, slot_cost):
    assert simulate(pacer(slot_cost=slot_cost), 2000, lambda step, depth: p)[1] < 1.05


def test_the_window_is_the_one_of_the_highest_rate():
    """By hand: 100 steps in which draft 1 passed 8 times of 10 and draft 2 never, a slot costs 0.1."""
    pace = pacer(slot_cost=0.1, largest=3)
    pace.passed, pace.tried = [8.0, 0.0], [10.0, 8.0]
    # p_1 = (8 + 0.48) / 10.5 = 0.8076, p_2 = (0 + 0.5 · 0.8076) / 8.5 = 0.0475
    one = (1 + 0.8076 + 0.1924) / (1.4 + 0.1924 * 1.3)
    two = (1 + 0.8076 + 0.0384 + 0.9616) / (1.6 + 0.9616 * 1.4)
    assert one > 1 / 1.1 and one > two
    assert pace.best_window(rows=1) == 2


def test_a_window_that_is_not_adaptive_stays():
    fixed = WindowPacer(largest=16, slot_cost=0.04, is_adaptive=False)
    fixed.observe([outcome(0, 0)])
    assert fixed.window_size == 16


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("slot_cost", [0.005, 0.04, 0.1])
def test_without_a_setting_it_costs_little_more_than_the_best_fixed_window(slot_cost, p, rows):
    def cost(pace):
        return simulate(pace, 1000, lambda step, depth: p, rows)[1]

    fixed = [WindowPacer(size, slot_cost, is_adaptive=False) for size in (4, 6, 8, 12, 16, 24)]
    assert cost(pacer(rows, slot_cost, largest=32)) < 1.12 * min(1.0, *map(cost, fixed))


SCRIPTS = [
    [0],
    [0, 0, 3, 5, 0, 0, 0, 16, 1, 0],
    [16, 0, 0, 4, 4, 0, 8],
    [1, 0, 1, 0, 2, 0],
]


@pytest.fixture(params=SCRIPTS, ids=str)
def script(request, monkeypatch):
    """Makes the decoder follow a list of window sizes, over and over."""

    class Scripted(WindowPacer):
        def __init__(self, largest, slot_cost, is_adaptive, rows):
            super().__init__(largest, slot_cost, is_adaptive=False)
            self.steps = 0
            self.window_size = request.param[0]

        def observe(self, outcomes):
            self.steps += 1
            self.window_size = min(self.largest, request.param[self.steps % len(request.param)])

    monkeypatch.setattr(mixin, "WindowPacer", Scripted)
    return request.param


@pytest.mark.parametrize("tau", [0.3, 2.0])
@pytest.mark.parametrize("lam", [0.0, 0.1])
def test_unverified_decoding_follows_the_oracle_through_any_change_of_window(model, script, tau, lam):
    for prompt in prompts_of([5, 9]):
        expected = decode(
            model,
            prompt,
            window_size=lambda forwards: min(16, script[forwards % len(script)]),
            tau=tau,
            lam=lam,
            limit=LIMIT,
            mask_id=MASK,
            eos_ids=ENDS,
        )
        output, rows = generate(model, [prompt], entropy_threshold=tau, distance_penalty=lam)
        assert (rows[0], output.stats.forwards.item(), output.stats.token_instances.item()) == expected


@pytest.mark.parametrize("tau", [0.3, 2.0, 100.0])
def test_verified_output_is_the_ar_output_through_any_change_of_window(model, script, tau):
    prompts = prompts_of([5, 1, 12])
    expected = [decode_ar(model, prompt, limit=LIMIT, mask_id=MASK, eos_ids=ENDS) for prompt in prompts]
    output, rows = generate(model, prompts, verification="exact", entropy_threshold=tau)
    assert rows == expected
    assert (output.stats.forwards <= output.stats.new_tokens).all()


def test_adaptive_unverified_decoding_becomes_ar_decoding_where_masks_know_nothing():
    """All masks are unsure about everything, so but for the looks that are taken every token is the AR head's."""
    model = tiny_model(initializer_range=0.02)
    prompt = prompts_of([6])[0]
    options = {"max_new_tokens": 200, "eos_token_id": [], "adaptive_window": True, "slot_cost": 0.3}
    output, _ = generate(model, [prompt], **options)
    assert output.stats.token_instances.item() < 1.15 * 200
