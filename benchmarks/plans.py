"""The planner beside every fixed shape, in simulation: how far from the best choice is it?

    python benchmarks/plans.py

Drafts pass with a chance that varies from step to step around a mean, and masks say so; times follow a curve that the
planner can only measure. A fixed shape checks n drafts and has m masks behind each row. Speeds are relative to AR
decoding.
"""

from collections.abc import Callable, Iterator
from math import ceil
from random import Random

import pandas as pd
import typer

from wedlm_hf.generation.planner import Draft, Outlook, Plan, Planner
from wedlm_hf.generation.step_times import StepTimes

DEPTH, ROOM = 5, 10**6
# Milliseconds of SmolLM2-135M's matrices on two cores with AVX2 (ALGORITHM.md §7).
BFLOAT16 = {1: 19, 3: 58, 6: 101, 9: 144, 12: 190, 16: 278, 32: 488, 128: 1940}
PACKED = {1: 18, 3: 20, 6: 23, 9: 34, 12: 35, 16: 49, 32: 80, 128: 267}
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 1.0,
    "3.5 % a row": lambda rows: 1 + 0.035 * (rows - 1),
    "stairs of 3": lambda rows: float(ceil(rows / 3)),
    "stairs of 8": lambda rows: float(ceil(rows / 8)),
    "bfloat16, AVX2": lambda rows: StepTimes(BFLOAT16).of(rows, False),
    "packed, AVX2": lambda rows: StepTimes(PACKED).of(rows, False),
}
ACCEPTANCES = (0.1, 0.3, 0.5, 0.7, 0.9)
# What siblings have of the chance that is left.
SIBLINGS = (0.4, 0.25)


class Clock:
    """Moves only when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def drafts_of(masks: int, acceptance: float, random: Random) -> list[Draft]:
    """A tree of drafts: the likeliest token and two siblings behind each of the four likeliest paths of a length."""
    drafts: list[Draft] = []
    paths = [(1.0, -1)]
    for depth in range(1, masks + 1):
        grown = []
        for reach, parent in paths:
            chance = min(0.99, max(0.01, acceptance + 0.3 * (random.random() - 0.5)))
            chances = [chance]
            for share in SIBLINGS:
                chances.append(min(chance, (1 - sum(chances)) * share))
            for rank, one in enumerate(chances):
                grown.append((reach * one, len(drafts)))
                drafts.append(Draft(0, parent, depth, one, rank > 0))
        paths = sorted(grown, reverse=True)[:4]
    return drafts


def passed(plan: Plan, random: Random) -> Iterator[tuple[int, bool]]:
    """Drafts whose parent passed, and whether they do."""
    parent: int | None = -1
    while parent is not None:
        left, last, parent = random.random(), parent, None
        for place, draft in enumerate(plan.drafts):
            if draft.parent == last:
                left -= draft.chance or 0.0
                is_right = parent is None and left < 0
                parent = place if is_right else parent
                yield place, is_right


class Shape(Planner):
    """Checks the `count` likeliest drafts in every step, with `masks` behind each row."""

    def __init__(self, count: int, masks: int):
        super().__init__(StepTimes(0.0), DEPTH)
        self.count, self.masks = count, masks

    def plan(self, outlooks: list[Outlook], before: int = 0) -> list[Plan]:  # type: ignore[override]
        """See [`Planner.plan`]."""
        plans = []
        for outlook in outlooks:
            reaches = self.reaches(outlook.drafts)
            best = sorted(range(len(reaches)), key=lambda place: -reaches[place])[: self.count]
            rows = {place: row for row, place in enumerate(sorted(best))} | {-1: -1}
            drafts = [outlook.drafts[place] for place in sorted(best)]
            drafts = [draft._replace(parent=rows[draft.parent]) for draft in drafts]
            plans.append(Plan(drafts, [self.masks] * (1 + len(drafts))))
        return plans


def speed(
    planner: Planner, curve: Callable[[int], float], acceptance: float, steps: int, seed: int = 0, batch: int = 1
) -> float:
    """Tokens per time, relative to AR decoding."""
    random, clock = Random(seed), planner.times.clock
    outlooks = [Outlook([], 0, ROOM)] * batch
    time = tokens = 0.0
    for _ in range(steps):
        plans = planner.plan(outlooks)
        masks = max(sum(plan.masks) for plan in plans)
        rows = batch * (1 + max(len(plan.drafts) for plan in plans) + masks)
        planner.begin(rows, masks > 0, batch)
        if isinstance(clock, Clock):
            clock.now += curve(rows)
        time += curve(rows)
        outlooks, found = [], 0
        for plan in plans:
            row, found = 0, found + 1
            for place, is_right in passed(plan, random):
                planner.learn(plan.drafts[place], is_right)
                if is_right:
                    row, found = place + 1, found + 1
            outlooks.append(Outlook(drafts_of(plan.masks[row], acceptance, random), plan.masks[row], ROOM))
        planner.finish(found)
        tokens += found
    return tokens / time * curve(batch) / batch


def compare(curve: str, acceptance: float, steps: int = 600, batch: int = 1) -> dict[str, float]:
    """Speed of the best fixed shape, and of the planner: its first steps, and those behind."""
    shapes = {(n, m) for n in (1, 2, 3, 4, 6, 12) for m in (1, 2, 3, 5)}
    fixed = {shape: speed(Shape(*shape), CURVES[curve], acceptance, steps, batch=batch) for shape in shapes}
    planner = Planner(StepTimes(0.035, Clock()), DEPTH)
    first = speed(planner, CURVES[curve], acceptance, 128, batch=batch)
    return {
        "best fixed": max(1.0, *fixed.values()),
        "first 128 steps": first,
        "planner": speed(planner, CURVES[curve], acceptance, steps, seed=1, batch=batch),
    }


def main(steps: int = 1500, batch: int = 1) -> None:
    """Print a table."""
    rows = [
        {"curve": curve, "acceptance": acceptance} | compare(curve, acceptance, steps, batch)
        for curve in CURVES
        for acceptance in ACCEPTANCES
    ]
    table = pd.DataFrame(rows)
    table["of the best"] = table["planner"] / table["best fixed"]
    print(table.round(2).to_markdown(index=False))


if __name__ == "__main__":
    typer.run(main)
