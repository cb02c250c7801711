"""Decoding in simulation, for any planner on any curve of times; and what the best fixed shape would reach.

Drafts pass with a chance that varies from draft to draft around a mean, and masks say so. A planner sees what it sees
in the library: drafts with their chances, what became of them, and seconds. A fixed shape checks the n likeliest
drafts of each step, with m masks behind each row. Where a state is kept, drafts are a chain with m masks behind it,
and a fixed shape commits once k tokens are pending. Speeds are relative to AR decoding.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from math import ceil
from random import Random

from wedlm_hf.generation.fixed_plan import FixedPlan
from wedlm_hf.generation.planner import Outlook, Planner
from wedlm_hf.generation.rows import Row
from wedlm_hf.generation.step_times import StepTimes

Curve = Callable[[int], float]

DEPTH, ROOM, STEPS = 5, 10**6, 400
# Milliseconds of SmolLM2-135M's matrices on two cores with AVX2 (docs/results.md).
BFLOAT16 = StepTimes({1: 19, 3: 58, 6: 101, 9: 144, 12: 190, 16: 278, 32: 488, 128: 1940})
PACKED = StepTimes({1: 18, 3: 20, 6: 23, 9: 34, 12: 35, 16: 49, 32: 80, 128: 267})
FOUR_BITS = StepTimes({1: 8.4, 2: 9.6, 3: 10.9, 4: 12.4, 6: 20.3, 8: 20.9, 9: 29.6, 12: 29.6, 16: 37.4})
CURVES: dict[str, Curve] = {
    "flat": lambda rows: 1.0,
    "3.5 % a row": lambda rows: 1 + 0.035 * (rows - 1),
    "stairs of 3": lambda rows: float(ceil(rows / 3)),
    "stairs of 8": lambda rows: float(ceil(rows / 8)),
    "bfloat16, AVX2": cache(lambda rows: BFLOAT16.of(rows, False)),
    "packed, AVX2": cache(lambda rows: PACKED.of(rows, False)),
    "four bits, AVX-512": cache(lambda rows: FOUR_BITS.of(rows, False)),
}
ACCEPTANCES = [percent / 100 for percent in range(10, 100, 5)]
# What siblings have of the chance that is left.
SIBLINGS = (0.4, 0.25)


def drafts_of(masks: int, acceptance: float, random: Random, siblings: tuple[float, ...] = SIBLINGS) -> list[Row]:
    """A tree of drafts: the likeliest token and its siblings behind each of the four likeliest paths of a length."""
    drafts: list[Row] = []
    paths = [(1.0, -1)]
    for depth in range(1, masks + 1):
        grown = []
        for reach, parent in paths:
            chances = [min(0.99, max(0.01, acceptance + 0.3 * (random.random() - 0.5)))]
            for share in siblings:
                chances.append(min(chances[0], (1 - sum(chances)) * share))
            for rank, chance in enumerate(chances):
                grown.append((reach * chance, len(drafts)))
                drafts.append(Row(0, depth, parent, chance, rank > 0))
        paths = sorted(grown, reverse=True)[:4]
    return drafts


def passed(drafts: list[Row], random: Random, odds: float = 1.0) -> Iterator[tuple[int, bool]]:
    """Drafts whose parent passed, and whether they do, by `odds` times those that their chances say."""
    parent: int | None = -1
    while parent is not None:
        left, last, parent = random.random(), parent, None
        for place, draft in enumerate(drafts):
            if draft.parent == last:
                chance = draft.chance or 0.0
                left -= odds * chance / (1 - chance + odds * chance)
                is_right = parent is None and left < 0
                parent = place if is_right else parent
                yield place, is_right


def speed(
    planner: Planner | FixedPlan,
    curve: Callable[[int, bool, int], float],
    acceptance: float | Callable[[int], float],
    steps: int = STEPS,
    seed: int = 0,
    batch: int = 1,
    noise: Callable[[Random], float] = lambda random: 1.0,
    maskless: float = 0.0,
    odds: float = 1.0,
    prompts: int = 0,
) -> float:
    """Tokens per time, relative to AR decoding. `curve`: of rows, whether masks are among them, and the step, whose
    time the planner is told times `noise`. `maskless`: mean chance of the drafts that there are without masks,
    of one position; 0 for none. `odds`: times those that are told, a draft passes. `prompts`: rows that the forward
    of the prompts had; 0 where its time is not told."""
    random, jitter = Random(seed), Random(seed)
    keeps_state = planner.keeps_state
    outlooks = [Outlook([], 0, ROOM)] * batch
    siblings = () if keeps_state else SIBLINGS
    time = tokens = alone = 0.0
    before = 0
    if prompts:
        planner.finish((prompts, False, batch), batch, 0.025 * curve(prompts, False, 0), is_prefill=True)
    for step in range(steps):
        plans = planner.plan(outlooks, before)
        checked = [[row for row in plan if row.token is not None] for plan in plans]
        masks = max(len(plan) - len(drafts) for plan, drafts in zip(plans, checked, strict=True))
        rows = batch * (1 + before + max(map(len, checked)) + masks)
        took = curve(rows, masks > 0, step)
        time, alone = time + took, alone + curve(batch, False, step)
        outlooks, found = [], 0
        for plan, drafts in zip(plans, checked, strict=True):
            last, found = -1, found + 1
            for place, is_right in passed(drafts, random, odds):
                planner.learn(drafts[place], is_right)
                if is_right:
                    last, found = place, found + 1
            mean = acceptance(step) if callable(acceptance) else acceptance
            foreseen = len(plan.masks(last))
            depth, mean = (foreseen, mean) if foreseen else (int(maskless > 0), maskless)
            outlooks.append(Outlook(drafts_of(depth, mean, random, siblings), foreseen, ROOM))
        planner.finish((rows, masks > 0, batch), found, 0.025 * took * noise(jitter))
        before = before + found if keeps_state and plans[0] else 0
        tokens += found
    return tokens / batch / time * (alone / steps)


def planned(curve: Curve, acceptance: float, batch: int = 1, seeds: int = 3, keeps_state: bool = False) -> float:
    """The mean speed of new planners."""
    found = 0.0
    for seed in range(1, seeds + 1):
        planner = Planner(StepTimes(0.035, is_measured=True), DEPTH, is_chain=keeps_state, keeps_state=keeps_state)
        found += speed(planner, lambda rows, has_masks, step: curve(rows), acceptance, seed=seed, batch=batch)
    return found / seeds


@cache
def _expected(acceptance: float) -> dict[tuple[int, int], float]:
    """Tokens of a step of each shape: masks stand behind each row, so that every step checks drafts of a new tree."""
    random, sums, trees = Random(7), dict[tuple[int, int], float](), 200
    for _ in range(trees):
        reaches: list[float] = []
        drafts = drafts_of(DEPTH, acceptance, random)
        for draft in drafts:
            reaches.append((draft.chance or 0.0) * (reaches[draft.parent] if draft.parent >= 0 else 1.0))
        for masks in (1, 2, 3, 5):
            likeliest = sorted(reach for reach, draft in zip(reaches, drafts, strict=True) if draft.position <= masks)
            for count in (1, 2, 3, 4, 6, 8, 12):
                sums[count, masks] = sums.get((count, masks), 0.0) + (1 + sum(likeliest[-count:])) / trees
    return sums


def best_fixed(curve: Curve, acceptance: float, batch: int = 1, keeps_state: bool = False) -> float:
    """The speed of the best fixed shape, or chain where a state is kept, AR decoding among them."""
    if keeps_state:
        shapes = product((1, 2, 3, 5), (2, 4, 8, 16, 32))
        chains = [FixedPlan(masks, True, keeps_state=True, pending=pending) for masks, pending in shapes]
        return max([1.0, *(speed(plan, lambda rows, *_: curve(rows), acceptance, seed=7) for plan in chains)])
    rows = {shape: batch * (1 + shape[0] + shape[1] * (1 + shape[0])) for shape in _expected(acceptance)}
    return max([1.0, *(n * curve(batch) / curve(rows[shape]) for shape, n in _expected(acceptance).items())])
