"""t(n): what a step of n physical rows takes, measured while decoding."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from statistics import median_low
from time import perf_counter, thread_time

# Times of a width that are remembered: their median forgets a busy moment of the machine.
SAMPLES = 9
# How fast the machine's load is followed: the exponent of a step's deviation, which counts up to a factor of 2.
LOAD_RATE = 0.3
# How much longer than believed a step may take, and be believed. A width that once took a hundred times as long, since
# kernels were prepared, would not be tried again for thousands of tokens.
DOUBT = 1.5
# Widths that differ by this factor tell what others take beyond them.
SPAN = 8


def step_clock(device_type: str) -> Callable[[], float]:
    """Seconds for [`StepTimes`]: a CPU's own do not count those of other programs on the machine."""
    return thread_time if device_type == "cpu" else perf_counter


class StepTimes:
    """Times of steps, relative to each other.

    Steps with masks and steps without have a curve each, since masks have work of their own. A width's time is the
    median of its last ones, relative to the machine's load when they were taken. A curve never falls (neighbours that
    would are averaged), and is linear between the widths that were measured.

    Args:
        slot_cost: what a row adds to the time of one row, until it is measured; or times by number of rows.
        clock: seconds. `None`: `slot_cost` is all there is to know.
    """

    def __init__(self, slot_cost: float | Mapping[int, float], clock: Callable[[], float] | None = None):
        self.clock = clock
        given = slot_cost if isinstance(slot_cost, Mapping) else {1: 1.0, 2: 1.0 + slot_cost}
        self._given = sorted((int(rows), float(time)) for rows, time in given.items())
        self._samples: tuple[dict[int, list[float]], dict[int, list[float]]] = {}, {}
        self._met: set[tuple[int, bool]] = set()  # once
        self._curves: list[list[tuple[int, float]]] = [[], []]
        self._load = 0.0

    def record(self, rows: int, has_masks: bool, seconds: float) -> None:
        """Takes in a step."""
        samples, usual, key = self._samples[has_masks], self.of(rows, has_masks), (rows, has_masks)
        self._load = self._load or seconds / usual
        kept = samples.get(rows, [])[1 - SAMPLES :]
        if not kept:
            self._met.add(key)
        elif key in self._met:  # a first step prepares kernels: it counts until there is another
            self._met.remove(key)
            kept = []
        else:
            self._load *= min(max(seconds / self._load / usual, 0.5), 2.0) ** LOAD_RATE
        samples[rows] = [*kept, min(seconds / self._load, DOUBT * usual)]
        self._curves[has_masks] = _monotone(samples)

    def is_measured(self, rows: int, has_masks: bool) -> bool:
        """Whether the time of a width is known."""
        return self.clock is None or (rows in self._samples[has_masks] and (rows, has_masks) not in self._met)

    def of(self, rows: int, has_masks: bool, is_optimistic: bool = False) -> float:
        """t(rows); `is_optimistic`: of a width that was not measured, the time of the next narrower one that was."""
        curve = self._curves[has_masks] or self._curves[not has_masks]
        place = bisect_left(curve, (rows, 0.0))
        if 0 < place < len(curve):
            (here, time), (there, its_time) = curve[place - 1], curve[place]
            return time + (its_time - time) * (0 if is_optimistic and rows < there else rows - here) / (there - here)
        given = _on_line(self._given, rows)
        if not curve:
            return given
        if is_optimistic and place and 3 * rows <= 4 * curve[-1][0] + 4:
            return curve[-1][1]
        # Beyond what was measured: by the mean slope, or by what is given where few widths are known, if that is more.
        (first, least), (here, time) = (self._curves[False] or curve)[0], curve[-1 if place else 0]
        slope = (time - least) / (here - first) if here > first else 0.0
        guess = time * given / _on_line(self._given, here)
        return max(time + slope * (rows - here), guess if here < SPAN * first else 0.0)


def _on_line(points: list[tuple[int, float]], rows: int) -> float:
    """Between neighbouring points; beyond them on the line through the outermost two."""
    place = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
    (here, time), (there, its_time) = points[place - 1], points[place]
    return time + (its_time - time) * (rows - here) / (there - here)


def _monotone(samples: Mapping[int, list[float]]) -> list[tuple[int, float]]:
    """The median of each width; those that fall are averaged with their neighbours, by their number of samples."""
    blocks: list[tuple[float, int, list[int]]] = []
    for width, times in sorted(samples.items()):
        block = median_low(times), len(times), [width]
        while blocks and blocks[-1][0] > block[0]:
            time, count, widths = blocks.pop()
            total = count + block[1]
            block = (time * count + block[0] * block[1]) / total, total, widths + block[2]
        blocks.append(block)
    return [(width, time) for time, _, widths in blocks for width in widths]
