"""t(n): what a step of n physical rows takes, measured while decoding."""

from collections.abc import Callable, Mapping
from statistics import median_low
from sys import maxsize
from time import perf_counter, thread_time
from typing import Any

import numpy as np

# Observations that outweigh what was believed before. Their median forgets a busy moment of the machine.
ENOUGH = 5
# A factor with three uses. The first steps of a width may prepare kernels: they count only up to so many times the
# time that was expected. A step is at most so many times as wide as all before. Where all steps are slower or faster
# by its square, the machine has changed.
DOUBT = 2.0
# What an observation still counts one step later: memory reaches about 50 steps back.
MEMORY = 0.98
# Steps after which a time that was measured may be another one.
FRESH = 200


def step_clock(device_type: str) -> Callable[[], float]:
    """Seconds: a CPU's own do not count those of other programs on the machine."""
    return thread_time if device_type == "cpu" else perf_counter


class StepTimes:
    """Times of steps, relative to each other: steps with masks and without have a curve each, which never falls.

    Args:
        slot_cost: what a row adds to the time of one row, until it is measured; or times by number of rows.
        is_measured: steps are timed. Otherwise `slot_cost` is all there is to know.
    """

    def __init__(self, slot_cost: float | Mapping[int, float], is_measured: bool = False):
        given = slot_cost if isinstance(slot_cost, Mapping) else {1: 1.0, 2: 1.0 + slot_cost}
        self.is_measured, self._steps, self._given = is_measured, 0, np.array(sorted(given.items()), dtype=float).T
        self._forget(0.0)

    def _forget(self, load: float) -> None:
        self._load = load
        self._loads = [(load, (0, False))] if load else []  # each with the width that it was measured at
        self._samples: tuple[dict[int, list[float]], ...] = {}, {}  # the last times of each width
        self._medians: tuple[dict[int, float], ...] = {}, {}  # the median of each of these, within 1 %
        self._met: dict[tuple[int, bool], int] = {}  # the step that was the last of a width
        self.prompts = 0, 0.0  # rows and seconds of the forward that read them
        self._tables = [np.empty(0)] * 2  # t(0), t(1) ... without masks and with them, as far as asked for

    def record(self, rows: int, has_masks: bool, seconds: float) -> None:
        """Learns from a step. The machine's load is the median of the last steps' times, relative to their usual
        ones. Where these steps were all of one width, they change the load alone, or that width's time would drift."""
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
        kept = samples.get(rows, [])[1 - ENOUGH :]
        time = seconds / load if len(kept) > 1 else min(seconds / load, DOUBT * float(self.of(rows, has_masks)))
        if len(kept) > 1 and {each for _, each in self._loads} == {width}:
            time = usual
        samples[rows], self._met[width] = [*kept, time], self._steps
        median, medians = median_low(samples[rows]), self._medians[has_masks]
        if abs(medians.get(rows, 0.0) - median) > 0.01 * median:  # smaller changes are not worth new tables
            medians[rows] = median
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
        if len(known) == 1 and self.prompts[0] > widths[0]:  # until more is measured, times rise to that of prompts
            widths = np.append(widths, self.prompts[0])
            times = np.append(times, max(times[0], self.prompts[1] / self._load))
        inside = np.clip(rows, int(widths[0]), int(widths[-1]))
        curve, rise = np.interp(inside, widths, times), (times[-1] - times[0]) / max(widths[-1] - widths[0], 1.0)
        return np.maximum(curve * given / given[inside], curve + rise * (rows - inside))

    def widest(self, alone: int) -> int:
        """The widest step that may be tried. After two AR steps, of `alone` rows, it is as wide as the prompts'
        forward, then DOUBT times the widest so far."""
        if not self.is_measured:
            return maxsize
        if len(self._samples[False].get(alone, ())) < 2:
            return 0
        widest = max(map(max, filter(None, self._samples)))
        return max(int(DOUBT * widest), self.prompts[0] if widest == alone else 0)

    def least(self, rows: Any, has_masks: bool) -> Any:
        """What t(rows) may be at best: of a width that was not measured lately, what an AR step takes."""
        usual, oldest = self.of(rows, has_masks), self._steps - FRESH
        lately = [
            width
            for width, times in self._samples[has_masks].items()
            if len(times) > 1 and self._met[width, has_masks] > oldest
        ]
        return np.where(np.isin(rows, lately), usual, np.minimum(usual, self.of(1, False)))
