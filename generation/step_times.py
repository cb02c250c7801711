"""t(n): what a step of n physical rows takes, measured while decoding."""

from collections.abc import Callable, Mapping
from statistics import median_low
from time import perf_counter, thread_time
from typing import Any

import numpy as np

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
        self.clock, self._steps, self._given = clock, 0, np.array(sorted(given.items()), dtype=float).T
        self._forget(0.0)

    def _forget(self, load: float) -> None:
        self._load = load
        self._loads = [(load, (0, False))] if load else []  # with the widths that told it
        self._prompt_row = 1e9  # seconds of a row of a prompt, at least: unknown
        self._samples: tuple[dict[int, list[tuple[int, float]]], ...] = {}, {}  # by width: steps, and their times
        self._medians: tuple[dict[int, float], ...] = {}, {}
        self._tables = [np.empty(0)] * 2  # t(0), t(1) ... without masks and with them, as far as asked for

    def record_prompt(self, rows: int, seconds: float) -> None:
        """Takes in the forward of prompts, of which AR decoding has one too."""
        self._prompt_row = min(self._prompt_row, seconds / rows)

    def record(self, rows: int, has_masks: bool, seconds: float) -> None:
        """Takes in a step. The machine's load is the median of what the last ones took, of what they usually do. Where
        these were all of one width, the load is all that they tell: or its time would drift away from others."""
        seconds = max(seconds, 1e-9)  # a coarse clock may stand still
        usual, width = float(self.of(rows, has_masks)), (rows, has_masks)
        ratio = seconds / usual
        self._load = self._load or ratio
        if rows in self._samples[has_masks] or not self._loads:
            self._loads = [*self._loads[1 - ENOUGH :], (ratio, width)]
        load = median_low([each for each, _ in self._loads])
        if not self._load / DOUBT**2 < load < self._load * DOUBT**2:
            self._forget(load)
        self._steps, samples = self._steps + 1, self._samples[has_masks]
        kept = [each for each in samples.get(rows, [])[1 - ENOUGH :] if each[0] > self._steps - FRESH]
        time = seconds / load if len(kept) > 1 else min(seconds / load, DOUBT * float(self.of(rows, has_masks)))
        if len(kept) > 1 and {each for _, each in self._loads} == {width}:
            time = usual
        samples[rows] = [*kept, (self._steps, time)]
        # The first step of a width is slow. It misleads no median of five, and that of four would be low.
        counted = samples[rows] if len(samples[rows]) == ENOUGH else samples[rows][1:] or samples[rows]
        self._medians[has_masks][rows] = median_low([time for _, time in counted])
        for kind in [True] if has_masks and self._medians[False] else [False, True]:
            self._tables[kind] = self._table(len(self._tables[kind]), kind)

    def of(self, rows: Any, has_masks: bool) -> Any:
        """t(rows), of a number or an array."""
        try:
            return self._tables[has_masks][rows]
        except IndexError:
            self._tables[has_masks] = self._table(2 * int(np.max(rows)) + 1, has_masks)
            return self._tables[has_masks][rows]

    def _table(self, size: int, has_masks: bool) -> Any:
        """Lines between the medians of widths, in the middle of the curves that never fall above and below; those of
        steps with masks begin at the narrowest one without. Outside of what was measured the curve is as given, in
        proportion; beyond, it rises no less than within."""
        plain, masked = self._medians
        known = dict([min(plain.items())] if plain else []) | masked if has_masks else plain or masked
        rows = np.arange(max(size, 1 + max(known, default=0)))
        (*_, last, end), (*_, time, its_time) = self._given
        given = np.interp(rows, *self._given) + np.maximum(rows - end, 0) * (its_time - time) / (end - last)
        if not known:
            return given
        widths, medians = np.array(sorted(known.items())).T
        below = np.minimum.accumulate(medians[::-1])[::-1]
        times = (np.maximum.accumulate(medians) + below) / 2
        inside = np.clip(rows, int(widths[0]), int(widths[-1]))
        curve, rise = np.interp(inside, widths, times), (times[-1] - times[0]) / max(widths[-1] - widths[0], 1.0)
        return np.maximum(curve * given / given[inside], curve + rise * (rows - inside))

    def most(self, rows: Any, has_masks: bool, alone: int, lost: int) -> Any:
        """What t(rows) may be at worst: what is believed, up to DOUBT times the widest step that was measured; rows
        beyond may take what those of a prompt took. Two AR steps, of `alone` rows, come first; behind them, `lost`
        rows make no difference."""
        usual, known = self.of(rows, has_masks), alone
        if len(self._samples[False].get(alone, ())) > 1:
            known = int(DOUBT * max(map(max, filter(None, self._samples)))) + lost
        if self.clock is None or rows[-1] <= known:
            return usual
        beyond = np.maximum(rows - known, 0) * (self._prompt_row / self._load if self._load else 1e9)
        return np.maximum(usual, self.of(np.minimum(rows, known), has_masks) + beyond)

    def least(self, rows: Any, has_masks: bool) -> Any:
        """What t(rows) may be at best: that of the next narrower width that was measured lately, or else what as many
        rows of a wider one take; with masks no less than an AR step."""
        usual, samples, oldest = self.of(rows, has_masks), self._samples[has_masks], self._steps - FRESH
        fresh = sorted(width for width, each in samples.items() if len(each) > 1 and each[-1][0] > oldest)
        alone = self.of(1, False) if has_masks or not fresh else 0.0
        if not fresh:
            return np.minimum(usual, alone)
        place = np.searchsorted(fresh, rows, "right")
        share = np.maximum(self.of(fresh[0], has_masks) * rows / fresh[0], alone)
        return np.minimum(usual, np.where(place, self.of(np.array(fresh)[place - 1], has_masks), share))
