"""t(n): what a step of n physical rows takes, measured while decoding."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from math import inf
from statistics import median_low
from time import perf_counter, thread_time

# Observations that outweigh what was believed before. Their median forgets a busy moment of the machine.
ENOUGH = 5
# How much longer than believed the first steps of a width may take, and be believed, since they may prepare kernels;
# and how much wider than all before a step may be. All steps slower or faster by its square: it is another machine.
DOUBT = 2.0
# What an observation still counts one step later: memory reaches about 50 steps back.
MEMORY = 0.98
# Steps after which a time that was measured may be another one.
FRESH = 200


def step_clock(device_type: str) -> Callable[[], float]:
    """Seconds for [`StepTimes`]: a CPU's own do not count those of other programs on the machine."""
    return thread_time if device_type == "cpu" else perf_counter


class StepTimes:
    """Times of steps, relative to each other: steps with masks and without have a curve each, which never falls.

    Args:
        slot_cost: what a row adds to the time of one row, until it is measured; or times by number of rows.
        clock: seconds. `None`: `slot_cost` is all there is to know.
    """

    def __init__(self, slot_cost: float | Mapping[int, float], clock: Callable[[], float] | None = None):
        given = slot_cost if isinstance(slot_cost, Mapping) else {1: 1.0, 2: 1.0 + slot_cost}
        self.clock, self._given = clock, sorted((int(rows), float(time)) for rows, time in given.items())
        self._steps, self._load, self._loads = 0, 0.0, [0.0]
        self._prompt_row = inf  # seconds of a row of a prompt, at least
        self._forget()

    def _forget(self) -> None:
        self._samples: tuple[dict[int, list[tuple[int, float]]], ...] = {}, {}  # by width: steps, and their times
        self._curves: list[list[float]] = [[], []]  # by number of rows, from 0
        self._fresh: list[list[int]] = [[], []]  # widths that were measured lately

    def record(self, rows: int, has_masks: bool, seconds: float) -> None:
        """Takes in a step. The machine's load is the median of what the last ones took, of what they usually do."""
        usual = self.of(rows, has_masks)
        if rows in self._samples[has_masks] or not self._load:
            self._loads = [*self._loads[1 - ENOUGH :], seconds / usual]
        load = median_low(self._loads) or seconds / usual
        if not self._load / DOUBT**2 < load < self._load * DOUBT**2:
            self._forget()
            self._prompt_row = inf if self._load else self._prompt_row
            self._load, self._loads, usual = load, [load], self.of(rows, has_masks)
        self._steps, oldest, samples = self._steps + 1, self._steps - FRESH, self._samples[has_masks]
        kept = [sample for sample in samples.get(rows, [])[1 - ENOUGH :] if sample[0] > oldest]
        time = seconds / load if len(kept) > 1 else min(seconds / load, DOUBT * usual)
        samples[rows] = [*kept, (self._steps, time)]
        self._curves[has_masks] = self._curve(samples)
        self._fresh = [
            sorted(width for width, each in samples.items() if len(each) > 1 and each[-1][0] > oldest)
            for samples in self._samples
        ]

    def _curve(self, samples: Mapping[int, list[tuple[int, float]]]) -> list[float]:
        """Lines between the medians of widths, without their first steps; between the curves that never fall above
        and below. It begins like what is given."""
        widths = sorted(samples)
        medians = [median_low([time for _, time in samples[width][1:] or samples[width]]) for width in widths]
        below = reversed([*accumulate(reversed(medians), min)])
        times = [(high + low) / 2 for high, low in zip(accumulate(medians, max), below, strict=True)]
        curve = [times[0] * self._guess(rows) / self._guess(widths[0]) for rows in range(widths[0])]
        for (here, time), (there, its_time) in pairwise(zip(widths, times, strict=True)):
            curve += [time + (its_time - time) * step / (there - here) for step in range(there - here)]
        return [*curve, times[-1]]

    def _guess(self, rows: int) -> float:
        """What is given: between neighbours, and beyond them on the line through the outermost two."""
        place = min(max(1, bisect_right(self._given, (rows, 0.0))), len(self._given) - 1)
        (here, time), (there, its_time) = self._given[place - 1], self._given[place]
        return time + (its_time - time) * (rows - here) / (there - here)

    def record_prompt(self, rows: int, seconds: float) -> None:
        """Takes in the forward of prompts, of which AR decoding has one too."""
        self._prompt_row = min(self._prompt_row, seconds / rows)

    def doubt(self, rows: int, has_masks: bool, alone: int, lost: int) -> float:
        """How much more than t(rows) a step may take: nothing up to DOUBT times the widest one that was measured; rows
        beyond may take what those of a prompt took. Two AR steps, of `alone` rows, come first; behind them, `lost`
        rows of each sequence make no difference."""
        known = alone
        if any(width <= alone and len(times) > 1 for width, times in self._samples[False].items()):
            known = int(DOUBT * (max(map(len, self._curves)) - 1)) + lost * alone
        if self.clock is None or rows <= known:
            return 0.0
        if not self._load:
            return inf
        most = self.of(known, has_masks) + (rows - known) * self._prompt_row / self._load
        return max(0.0, most - self.of(rows, has_masks))

    def of(self, rows: int, has_masks: bool) -> float:
        """t(rows). Beyond what was measured it rises like the other curve, or evenly; no less than what is given."""
        curve, other = self._curves[has_masks], self._curves[not has_masks]
        if rows < len(curve):
            return curve[rows]
        if not curve:
            return self.of(rows, not has_masks) if other else self._guess(rows)
        here, rise = len(curve) - 1, 0.0
        if len(other) > len(curve):
            rise = self.of(rows, not has_masks) - other[here]
        elif here > 1:
            rise = (curve[here] - (self._curves[False] or curve)[1]) / (here - 1) * (rows - here)
        return max(curve[here] + rise, curve[here] * self._guess(rows) / self._guess(here))

    def least(self, rows: int, has_masks: bool) -> float:
        """What t(rows) may be at best: that of the next narrower width that was measured lately, or else what as many
        rows of a wider one take, and an AR step."""
        usual, curve, fresh = self.of(rows, has_masks), self._curves[has_masks], self._fresh[has_masks]
        if self.clock is None or not fresh:
            return usual if self.clock is None else min(usual, self.of(1, False))
        place = bisect_right(fresh, rows)
        share = curve[fresh[0]] * rows / fresh[0]
        return min(usual, curve[fresh[place - 1]] if place else max(share, self.of(1, False)) if has_masks else share)
