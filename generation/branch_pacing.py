"""How many drafts a step checks and how many masks each real row has, by what is most likely to be accepted and by
what a physical row costs.

Under `verification="exact"` no token depends on any of this, so times may be measured while decoding: what a step of
n rows takes, relative to one of AR decoding, differs too much between machines and dtypes to be known beforehand.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from .step_times import StepTimes
from .window import RowOutcome

MOST_DRAFTS = 8
# The masks' own probability of a draft is put into one of so many bins, each with a running mean of what passed.
BINS = 8
BIN_PRIOR = 4.0  # observations that the probability itself counts for
BIN_MEMORY = 0.995
# Drafts that were found in the text have two more bins, for the first of a run and for those behind it; what their
# chances are taken for at first.
LOOKUP_CHANCES = (0.6, 0.9)
# Runs of drafts that are remembered, and what their chances are taken for before there is any.
RUNS = 64
PRIOR_CHANCE = 0.65
# What a stored calibration counts for: observations of a bin, at most, and runs of drafts.
CALIBRATED_BIN, CALIBRATED_RUNS = 16.0, 8
# While AR steps are best: steps until masks are tried again, doubled after each try that does not pay, and its drafts;
# fewer steps as long as what rows cost is a guess.
FIRST_LOOK, LAST_LOOK, LOOK_DRAFTS = 24, 128, 4
EARLY_LOOK = 4
LOOK_WEIGHT = 8  # looks are rare: each counts for so many runs
# While branches are best: steps between two AR steps that measure what those take.
MEASURE_EVERY = 256
# Steps between two estimates of the rates, which change slowly.
UPDATE_EVERY = 8
# An advantage over AR steps that is too small to be seen in the times, and one that is beyond doubt.
MARGIN, CLEAR = 1.05, 1.15


def check_calibration(calibration: Any) -> None:
    """Raises `ValueError` for what is no [`DraftRecord.calibration`]."""
    try:
        passed, tried, chances = (calibration[name] for name in ("passed", "tried", "confidence_by_depth"))
        is_known = (
            len(passed) == len(tried) == BINS
            and all(type(value) in (int, float) for value in [*passed, *tried, *chances])
            and all(0 <= here <= there < 1e9 for here, there in zip(passed, tried, strict=True))
            and all(0 <= chance <= 1 for chance in chances)
        )
    except (KeyError, TypeError):
        is_known = False
    if not is_known:
        raise ValueError(
            f"`calibration` must hold `passed` and `tried`, {BINS} counts each, and `confidence_by_depth`, "
            f"probabilities; got {str(calibration)[:200]}."
        )


@dataclass
class DraftRecord:
    """What is known of drafts and times. It stays with the model, and the next call begins with it.

    Attributes:
        times: of steps.
        key: of the machine and the numbers that the times belong to.
        passed, tried: drafts of each bin of probability, and those that were found in the text.
        runs: the masks' own probabilities of the last runs of drafts.
        look_after: AR steps until the next look at what masks would draft.
        steps_since: steps since the last look, or since the last AR step.
    """

    times: StepTimes
    key: Any = None
    passed: list[float] = field(default_factory=lambda: [0.0] * (BINS + len(LOOKUP_CHANCES)))
    tried: list[float] = field(default_factory=lambda: [0.0] * (BINS + len(LOOKUP_CHANCES)))
    runs: deque[list[float]] = field(default_factory=lambda: deque(maxlen=RUNS))
    look_after: int = FIRST_LOOK
    steps_since: int = 0

    @classmethod
    def begin(cls, times: StepTimes, key: Any, calibration: Mapping[str, Sequence[float]] | None) -> "DraftRecord":
        """A new record, which knows what the [`calibration`] of an earlier one says, if there is one."""
        record = cls(times, key)
        if calibration:
            record.passed[:BINS], record.tried[:BINS] = calibration["passed"], calibration["tried"]
            record.runs.extend([list(calibration["confidence_by_depth"])] * CALIBRATED_RUNS)
        return record

    def calibration(self) -> dict[str, list[float]]:
        """What to store of this record, so that decoding begins with it: numbers of the model, not of the machine.
        `passed` and `tried`, counts of the `BINS` bins of probability; `confidence_by_depth`, the mean probability of
        a draft by its place in a run."""
        weights = [min(1.0, CALIBRATED_BIN / tried) if tried else 0.0 for tried in self.tried]
        runs = list(self.runs)
        depths = range(max(map(len, runs), default=0))
        by_depth = [[run[depth] for run in runs if len(run) > depth] for depth in depths]
        return {
            "passed": [round(count * weight, 2) for count, weight in zip(self.passed[:BINS], weights, strict=False)],
            "tried": [round(count * weight, 2) for count, weight in zip(self.tried[:BINS], weights, strict=False)],
            "confidence_by_depth": [round(sum(known) / len(known), 3) for known in by_depth],
        }

    def learn(self, confidences: Sequence[float | None], accepted: int) -> None:
        """Takes in that the first `accepted` drafts of a run passed, and no more of them."""
        for place, (bin_, _) in enumerate(_bins(confidences[: accepted + 1])):
            self.passed[bin_] = BIN_MEMORY * self.passed[bin_] + (place < accepted)
            self.tried[bin_] = BIN_MEMORY * self.tried[bin_] + 1

    def reaches(self, confidences: Sequence[float | None]) -> list[float]:
        """For each draft of a run the chance that it and all before it pass."""
        reached, found = 1.0, []
        for bin_, prior in _bins(confidences):
            reached *= (self.passed[bin_] + BIN_PRIOR * prior) / (self.tried[bin_] + BIN_PRIOR)
            found.append(reached)
        return found


def _bins(confidences: Sequence[float | None]) -> list[tuple[int, float]]:
    """The bin of each draft of a run, and the chance that it is taken for at first."""
    bins, behind = [], 0
    for confidence in confidences:
        if confidence is None:
            bins.append((BINS + behind, LOOKUP_CHANCES[behind]))
        else:
            bins.append((min(int(confidence * BINS), BINS - 1), confidence))
        behind = int(confidence is None)
    return bins


@dataclass
class BranchPacer:
    """Plans steps.

    *Chances.* A draft's own probability tells how likely it is to pass, once corrected by what became of drafts of
    similar probability; drafts that were found in the text have what became of such drafts. For drafts that masks will
    only give, the runs of the last steps stand.

    *Rate.* Let A_k be the chance that draft k and all before it are accepted, q that the branch of the last accepted
    draft has masks, and t(n) the time of a step of n rows, relative to that of an AR step. Two steps in a row bring
    1 + A_1 + … + A_D + (1 − q) tokens in t(n) + (1 − q)·t(n′), n′ being the rows of a step without drafts. That is the
    rate ρ of an average plan; where it does not exceed the 1 of AR steps, these are taken.

    *Price.* One more row is worth it if it brings more tokens than ρ·dt/dn: a draft by the chance that it is accepted;
    the masks of branch b by the chance that the first failure comes right behind draft b, times the chance that what
    they draft is accepted. (Where t(n) is a line, plans of this price have the best ρ: Dinkelbach's method. It is
    convex rather; dt/dn is that of steps at least as wide as an average plan.)

    *Batches.* A step is as wide as its widest row. So all rows get the columns of an average plan, and each spends
    them on its own best drafts and masks.

    Every now and then a step is of the kind that is not the best, to measure: an AR step, or one of masks alone. With
    AR steps, as many drafts from the text are checked as have a better rate.

    Args:
        largest: most drafts of a step.
        record: what is known so far.
        rows: A.
        is_chain: only the last draft has masks, which then needs no attention mask.
        is_adaptive: otherwise every step checks all drafts there are, up to `largest`, and every branch has
            `largest` masks.

    Attributes:
        window_size, largest: what the decoder asks of any pacer.
        drafts: of an average plan; 0 where AR steps are best.
    """

    largest: int
    record: DraftRecord
    rows: int = 1
    is_chain: bool = False
    is_adaptive: bool = True

    def __post_init__(self) -> None:
        self.window_size = self.largest
        self._width = 0  # physical rows of an average plan
        self._began: tuple[int, bool, float] | None = None
        self.drafts, self.rate, self._age = 0, 1.0, 0
        self._update()
        self._is_ar_step = self._choose_ar_step()

    def begin_step(self, physical_rows: int, is_prefill: bool) -> None:
        """Starts the clock for a step of so many rows. A prefill is not timed."""
        clock = self.record.times.clock
        self._began = None if clock is None or is_prefill else (physical_rows, physical_rows == self.rows, clock())

    @property
    def lookup_drafts(self) -> int:
        """Most drafts to look for in the text: in a batch, one row's drafts take columns of all rows."""
        if not self.is_adaptive:
            return 0
        return self.largest if self.rows == 1 else self.drafts

    def learn(self, confidences: Sequence[float | None], checked: int, accepted: int, found: Sequence[float]) -> None:
        """Takes in what became of a row's drafts, and its new ones.

        Args:
            confidences: the masks' own probability of each of the drafts; `None` for those found in the text.
            checked: how many of these were checked.
            accepted: how many passed.
            found: the probabilities of the new drafts.
        """
        self.record.learn(confidences[:checked], accepted)
        if found:
            self.record.runs.extend([list(found)] * (1 if self.drafts else LOOK_WEIGHT))
            if not self.drafts:
                self._age = UPDATE_EVERY

    def observe(self, outcomes: Sequence[RowOutcome]) -> None:
        """Ends a step, and chooses the kind of the next."""
        times = self.record.times
        if self._began is not None and times.clock is not None:
            rows, is_plain, began = self._began
            times.record(rows, times.clock() - began, is_plain)
        rows = max(1, sum(not outcome.row.is_finished for outcome in outcomes))
        self.record.steps_since += 1
        self._age += 1
        if self._age >= UPDATE_EVERY or rows != self.rows:
            self.rows = rows
            self._update()
        self._is_ar_step = self._choose_ar_step()

    def plan(self, confidence: Sequence[float | None], remaining: int) -> list[int]:
        """Masks of each branch: behind the last pending token, and behind each draft that is to be checked.

        Args:
            confidence: of each draft there is, see [`learn`].
            remaining: new tokens that are still allowed.
        """
        confidence = confidence[: max(0, min(self.largest, remaining - 1))]
        if not self.is_adaptive:
            sizes = [0 if self.is_chain else self.largest] * len(confidence) + [self.largest]
        elif self._is_ar_step:
            return [0] * (1 + self._lookup_depth(confidence))
        elif not self.drafts:
            sizes = [min(LOOK_DRAFTS, self.largest)]
        else:
            sizes = self._sizes([1.0, *self.record.reaches(confidence)], self._columns)
        return [max(0, min(size, remaining - draft - 1)) for draft, size in enumerate(sizes)]

    def _lookup_depth(self, confidence: Sequence[float | None]) -> int:
        """How many drafts from the text an AR step checks."""
        if confidence[:1] != [None]:
            return 0
        reached, times = [1.0, *self.record.reaches(confidence)], self.record.times
        rates = [
            sum(reached[: 1 + drafts]) / times.of(1 + drafts, is_plain=not drafts) for drafts in range(len(reached))
        ]
        return rates.index(max(rates))

    def _sizes(self, reached: Sequence[float], columns: tuple[int, int] | None = None) -> list[int]:
        """Masks of each branch, for as many drafts as are worth a row, by the chances that the drafts to it pass (1
        for none); or for the best, if the step has so many `columns` for drafts and for masks."""
        drafts = max((draft for draft, chance in enumerate(reached) if chance > self.price), default=0)
        if columns is not None:
            drafts = min(columns[0], len(reached) - 1)
        ends = [here - there for here, there in pairwise([*reached[: drafts + 1], 0.0])]
        gains = [[chance * gain for gain in self.gains] for chance in ends]
        least = self.price
        if columns is not None:
            least = sorted(chain(*gains, [0.0] * (columns[1] + 1)), reverse=True)[columns[1]]
        sizes = [sum(gain > least for gain in branch) for branch in gains]
        return [0] * drafts + sizes[-1:] if self.is_chain else sizes

    def _update(self) -> None:
        """Estimates the rate of branches and the price of a row."""
        self._age = 0
        times, rows = self.record.times, self.rows
        ar_time = times.of(rows, is_plain=True)
        runs = [self.record.reaches(run) for run in list(self.record.runs)]
        reached, by_depth, chance = [1.0], [], PRIOR_CHANCE
        for depth in range(self.largest):
            known = [run[depth] for run in runs if len(run) > depth]
            by_depth.append([*known, reached[-1] * chance])
            reached.append(sum(by_depth[-1]) / len(by_depth[-1]))
            chance = reached[-1] / reached[-2]  # a depth that was never tried is as good as the one before
        row_cost = times.row_cost(self._width)
        for _ in range(2):
            self.price = max(1.0, self.rate) * rows * row_cost / ar_time
            # What draft k brings beyond that, on average, if it is checked only where it is worth it.
            self.gains = [sum(max(0.0, one - self.price) for one in known) / len(known) for known in by_depth]
            sizes = self._sizes(reached)
            drafts = len(sizes) - 1
            ends = pairwise([*reached[: drafts + 1], 0.0])
            missing = sum(here - there for (here, there), size in zip(ends, sizes, strict=True) if not size)
            self._width = rows * (1 + drafts + sum(sizes))
            time = times.of(self._width) + missing * times.of(rows * (2 + drafts))
            self.rate = (sum(reached[: drafts + 1]) + missing) * ar_time / time
        self.drafts = drafts if self.rate > MARGIN and any(sizes) else 0
        self._columns = None if rows == 1 else (self.drafts, sum(sizes))

    def _choose_ar_step(self) -> bool:
        """Whether the next step is an AR step, be it to measure."""
        record, is_best = self.record, not self.drafts
        if not self.is_adaptive:
            return False
        if not record.times.knows_plain(self.rows):
            return True
        every = record.look_after if record.times.knows_line else EARLY_LOOK
        if not is_best:
            if record.times.clock is None:
                return False
            every = MEASURE_EVERY // 8
            if self.rate > CLEAR:
                every, record.look_after = MEASURE_EVERY, FIRST_LOOK
        if record.steps_since < every:
            return is_best
        record.steps_since = 0
        if is_best and record.times.knows_line:
            record.look_after = min(2 * record.look_after, LAST_LOOK)
            record.times.doubt()
        return not is_best
