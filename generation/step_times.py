"""t(n): what a step of n physical rows takes, measured while decoding."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from statistics import median_low
from time import perf_counter, thread_time

# Observations that outweigh what was believed before. Their median forgets a busy moment of the machine.
ENOUGH = 5
# How much longer than believed the first steps of a width may take, and be believed, since they may prepare kernels;
# and how much wider than all before a step may be. All steps by the square of it slower or faster: another machine.
DOUBT = 2.0
# Steps after which a time that was measured may be another one.
FRESH = 200

Curve = list[tuple[int, float]]  # widths, ascending, and their times


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
        self._forget()

    def _forget(self) -> None:
        self._samples: tuple[dict[int, Curve], ...] = {}, {}  # by width: steps, and times
        self._curves: list[Curve] = [[], []]
        self._fresh: list[Curve] = [[], []]

    def record(self, rows: int, has_masks: bool, seconds: float) -> None:
        """Takes in a step. The machine's load is the median of what the last ones took, of what they usually do."""
        usual = self.of(rows, has_masks)
        if rows in self._samples[has_masks] or not self._load:
            self._loads = [*self._loads[1 - ENOUGH :], seconds / usual]
        load = median_low(self._loads[-ENOUGH:]) or seconds / usual
        if not self._load / DOUBT**2 < load < self._load * DOUBT**2:
            self._forget()
            self._load, self._loads, usual = load, [load], self.of(rows, has_masks)
        self._steps, oldest = self._steps + 1, self._steps - FRESH
        kept = [sample for sample in self._samples[has_masks].get(rows, [])[1 - ENOUGH :] if sample[0] > oldest]
        time = seconds / load if len(kept) > 1 else min(seconds / load, DOUBT * usual)
        self._samples[has_masks][rows] = [*kept, (self._steps, time)]
        self._curves[has_masks] = _monotone(self._samples[has_masks])
        for kind, samples in enumerate(self._samples):
            curve = self._curves[kind]
            self._fresh[kind] = [at for at in curve if len(samples[at[0]]) > 1 and samples[at[0]][-1][0] > oldest]

    def widest(self, rows: int) -> int:
        """The most rows that a step may have, as far as times are known: no more than `rows` at first."""
        if self.clock is None:
            return 1 << 30
        is_known = any(width <= rows and len(times) > 1 for width, times in self._samples[0].items())
        return int(DOUBT * max(curve[-1][0] for curve in self._curves if curve)) if is_known else rows

    def of(self, rows: int, has_masks: bool) -> float:
        """t(rows). Beyond what was measured it rises like the other curve, like what is given, or by the mean slope."""
        curve, other = self._curves[has_masks], self._curves[not has_masks]
        if not curve:
            return self.of(rows, not has_masks) if other else _on_line(self._given, rows)
        (first, least), (here, time) = curve[0], curve[0 if rows < curve[0][0] else -1]
        if first <= rows <= here:
            return _on_line(curve, rows)
        guess = time * _on_line(self._given, rows) / _on_line(self._given, here)
        if rows > here and other and other[-1][0] > here:
            return max(guess, time + self.of(rows, not has_masks) - self.of(here, not has_masks))
        return max(guess, time + (time - least) / (here - first) * (rows - here) if here > first else 0.0)

    def least(self, rows: int, has_masks: bool) -> float:
        """What t(rows) may be at best: that of the next narrower width that was measured lately, or else what as many
        rows of a wider one take, and an AR step."""
        usual, fresh = self.of(rows, has_masks), self._fresh[has_masks]
        if self.clock is None or not fresh:
            return usual if self.clock is None else min(usual, self.of(1, False))
        place = bisect_right(fresh, (rows, float("inf")))
        share = fresh[0][1] * rows / fresh[0][0]
        return min(usual, fresh[place - 1][1] if place else max(share, self.of(1, False)) if has_masks else share)


def _on_line(curve: Curve, rows: int) -> float:
    """Between neighbouring points; beyond them on the line through the outermost two."""
    place = min(max(1, bisect_left(curve, (rows, 0.0))), len(curve) - 1)
    (here, time), (there, its_time) = curve[place - 1], curve[place]
    return time + (its_time - time) * (rows - here) / (there - here) if place else time


def _monotone(samples: Mapping[int, Curve]) -> Curve:
    """The median of each width, without its first step; those that fall are averaged with their neighbours."""
    blocks: list[tuple[float, list[int]]] = []
    for width, times in sorted(samples.items()):
        block = median_low([time for _, time in times[1:] or times]), [width]
        while blocks and blocks[-1][0] > block[0]:
            time, widths = blocks.pop()
            both = widths + block[1]
            block = (time * len(widths) + block[0] * len(block[1])) / len(both), both
        blocks.append(block)
    return [(width, time) for time, widths in blocks for width in widths]
