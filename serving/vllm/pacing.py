"""How many masks a request's next step takes: as many as give the most tokens per time, by what drafts of this request
have given so far and by what a step of so many rows takes at the load of the moment.

Verified output depends on none of this, so times may be measured while serving.
"""

from dataclasses import dataclass, field

from ...generation.pacing import MEMORY, best_window
from ...generation.step_times import StepTimes

# A new request starts from what others have seen, which counts as so many observations of its own.
KNOWN_WEIGHT = 3.0
# Steps between two looks at what masks would draft, while AR steps are best; fewer at first, when costs are guessed.
LOOK_EVERY, FIRST_LOOKS = 32, 4
# Steps between two AR steps that measure what those take. Before that is known there are a few at once, for batches
# of 2^k to 2^(k+1) requests so many.
MEASURE_EVERY, MEASUREMENTS = 64, 5
# Steps between two estimates of what rows cost.
ESTIMATE_EVERY = 8


@dataclass
class Acceptance:
    """How often the draft at each depth passes, given that those before it did (see [`WindowPacer`]).

    Args:
        depths: number of drafts.

    Attributes:
        passed, tried: observations, which fade.
        extra: tokens beyond the first that a step with drafts gives, a running mean.
    """

    depths: int
    passed: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)
    extra: float = 1.0

    def __post_init__(self) -> None:
        self.passed = self.passed or [0.0] * self.depths
        self.tried = self.tried or [0.0] * self.depths

    def learn(self, accepted: int, failed: int | None) -> None:
        """Takes in a step.

        Args:
            accepted: drafts that passed.
            failed: the depth of the draft that did not, or that no mask was sure enough to give; `None` for none.
        """
        self.passed = [MEMORY * passed + (depth < accepted) for depth, passed in enumerate(self.passed)]
        self.tried = [MEMORY * tried + (depth < accepted or depth == failed) for depth, tried in enumerate(self.tried)]

    def begin(self) -> "Acceptance":
        """Of a new request."""
        scales = [min(1.0, KNOWN_WEIGHT / tried) if tried else 0.0 for tried in self.tried]
        return Acceptance(
            self.depths,
            [scale * passed for scale, passed in zip(scales, self.passed, strict=True)],
            [scale * tried for scale, tried in zip(scales, self.tried, strict=True)],
            self.extra,
        )

    def best_window(self, costs: "StepCosts", requests: int) -> int:
        """The number of masks W of the highest rate of tokens, by [`WindowPacer`]'s reasoning; 0 for AR steps.

        Args:
            costs: of steps.
            requests: that are decoded together.
        """
        return best_window(self.passed, self.tried, requests, lambda rows: costs.of(rows, rows == requests))


class StepCosts:
    """What a step of n rows takes, measured as steps go by (see [`StepTimes`]).

    Args:
        times: of steps. Without a clock, its slot cost stands: where several processes decide together, they must
            decide the same.
    """

    def __init__(self, times: StepTimes):
        self.times = times
        self._age, self._line = 0, times.line()
        self._plain: dict[int, float] = {}

    def record(self, rows: int, seconds: float, is_plain: bool) -> None:
        """Takes in a step."""
        if self.times.clock is None:
            return
        self.times.record(rows, seconds, is_plain)
        self._age += 1
        if self._age % ESTIMATE_EVERY == 0 or self._age < ESTIMATE_EVERY:
            self._line = self.times.line()
            self._plain.clear()

    def of(self, rows: int, is_plain: bool = False) -> float:
        """Time of a step, or of an AR step, relative to others."""
        on_line = self._line[0] + self._line[1] * rows
        if not is_plain:
            return on_line
        if rows not in self._plain:  # those of fewer rows say little about these
            self._plain[rows] = self.times.of(rows, is_plain=True) if self.times.knows_plain(rows) else on_line
        return self._plain[rows]
