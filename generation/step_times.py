"""What a step of n physical rows takes, measured while decoding."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, thread_time

# How fast the load of the machine is followed: the share of a step's deviation.
LOAD_RATE = 0.5
# Steps, other than AR steps, that make a line, and that are still believed once their times are in doubt.
LEAST_STEPS = 3


def step_clock(device_type: str) -> Callable[[], float]:
    """Seconds for [`StepTimes`]: a CPU's own do not count those of other programs on the machine."""
    return thread_time if device_type == "cpu" else perf_counter


@dataclass
class StepTimes:
    """What a step of n physical rows takes, relative to other steps.

    A processor reads a matrix for few rows in its own way, and steps without masks and drafts do less for each row. So
    AR steps have times of their own, a median for each number of rows; all others lie on a line, fitted to the last
    steps. All are relative to the load of the machine when they were taken.

    Args:
        slot_cost: what one more row adds, relative to an empty forward; a first guess where there is a clock.
        clock: seconds; `None`: the slot cost is all there is to know.

    Attributes:
        plain: relative times of the last AR steps, by their rows; one row alone is always an AR step.
        others: rows and relative times of the other last steps.
        load: seconds of a step that takes 1; follows the machine.
        met: numbers of rows that there were.
    """

    slot_cost: float
    clock: Callable[[], float] | None = None
    plain: dict[int, deque[float]] = field(default_factory=dict)
    others: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=48))
    load: float = 0.0
    met: set[int] = field(default_factory=set)
    _line: tuple[float, float] | None = None  # until the next step is recorded

    def record(self, rows: int, seconds: float, is_plain: bool = False) -> None:
        """Takes in a step, relative to the steps just before it: the machine may have been busier at other times."""
        is_plain = is_plain or rows == 1
        if rows not in self.met:
            self.met.add(rows)  # kernels are prepared when they meet a shape: such a step may take twice as long
            return
        usual = self.of(rows, is_plain)
        self.load = self.load or seconds / usual
        relative = seconds / self.load
        if is_plain or len(self.others) >= 6:  # before, it is the cost of rows that is not known
            now = min(max(relative / usual, 0.5), 2.0)  # a single step may be an accident
            self.load *= now**LOAD_RATE
        if is_plain:
            self.plain.setdefault(rows, deque(maxlen=9)).append(relative)
        else:
            self.others.append((rows, relative))
        self._line = None

    def doubt(self) -> None:
        """Forgets all but the last steps that were no AR steps. Where these seem too dear to be taken, nothing else
        would correct times from a bad moment of the machine."""
        while len(self.others) > LEAST_STEPS:
            self.others.popleft()
        self._line = None

    def knows_plain(self, rows: int) -> bool:
        """Whether the time of an AR step is known well enough."""
        if self.clock is None:
            return True
        near = self._nearest(rows)
        if near is None or 2 * rows > 3 * near or 2 * near > 3 * rows:
            return False
        return len(self.plain[near]) >= 3

    @property
    def knows_line(self) -> bool:
        """Whether the cost of rows was measured."""
        return self.clock is None or len(self.others) >= LEAST_STEPS

    def _nearest(self, rows: int) -> int | None:
        """Rows of AR steps that were timed: the least number that is not smaller, otherwise the largest."""
        counts = sorted(self.plain)
        return next((count for count in counts if count >= rows), counts[-1] if counts else None)

    def line(self) -> tuple[float, float]:
        """Intercept and slope for more than one row."""
        line = self._line  # other threads may drop it
        if line is None:
            line = self._line = self._fit(list(self.others))
        return line

    def row_cost(self, width: int) -> float:
        """What one more row adds to a step of `width` rows or more: the first rows are nearly free where reading the
        weights takes all the time. Never below the slope of all steps: that of a few wide ones is uncertain."""
        wide = [step for step in list(self.others) if step[0] >= width]
        return max(self.line()[1], self._fit(wide)[1] if len(wide) >= LEAST_STEPS else 0.0)

    def _fit(self, steps: list[tuple[int, float]]) -> tuple[float, float]:
        """Intercept and slope for these steps, drawn to the slot cost."""
        if len(steps) < LEAST_STEPS:
            near = self._nearest(1)
            scale = median(self.plain[near]) / (1 + self.slot_cost * near) if near else 1.0
            return scale, scale * self.slot_cost
        typical = median(seconds for _, seconds in steps)
        points = [(rows, min(seconds, 1.5 * typical)) for rows, seconds in steps]
        mean_rows = sum(rows for rows, _ in points) / len(points)
        mean = sum(seconds for _, seconds in points) / len(points)
        covariance = sum((rows - mean_rows) * (seconds - mean) for rows, seconds in points)
        variance = sum((rows - mean_rows) ** 2 for rows, _ in points)
        guess, weight = mean * self.slot_cost / (1 + self.slot_cost * mean_rows), 4.0 * mean_rows
        slope = (covariance + weight * guess) / (variance + weight)
        slope = min(max(slope, 0.1 * guess), 0.9 * mean / mean_rows)
        return mean - slope * mean_rows, slope

    def of(self, rows: int, is_plain: bool = False) -> float:
        """Time of a step, or of an AR step."""
        intercept, slope = self.line()
        near = self._nearest(rows) if is_plain or rows == 1 else None
        if near is None:
            return intercept + slope * rows
        return median(self.plain[near]) * (intercept + slope * rows) / (intercept + slope * near)
