"""When to commit, for a model that keeps a state (ALGORITHM.md §9; see state.py)."""

from .drafter import CHANCE
from .step_times import ENOUGH, MEMORY, StepTimes


class Commits:
    """Decides when a step goes without drafts and masks. Such a step commits the pending tokens; all others read them
    again.

    Args:
        times: of steps.
    """

    def __init__(self, times: StepTimes):
        self.times = times
        self._cycle = 0.0, 0.0  # tokens since the last commit, and the time that they took
        self._drafted = 0.0, 0.0, 0.0  # tokens of steps with drafts, rows behind their roots, and how many
        self._chosen = 0, 0  # drafts of the step under way, and rows in front of its root

    def note(self, tokens: int, rows: int, has_masks: bool) -> None:
        """Learns from a step: its new tokens and physical rows."""
        drafts, before = self._chosen
        self._cycle = self._cycle[0] + tokens, self._cycle[1] + self.times.of(rows, has_masks)
        if drafts:
            given, width, count = self._drafted
            width = MEMORY * width + rows - before - 1
            self._drafted = MEMORY * given + tokens, width, MEMORY * count + 1

    def is_due(self, room: int, gain: float, drafts: int, masks: int, before: int) -> bool:
        """Whether to commit now instead of checking these drafts: whether that gives more tokens per time, from the
        last commit to the next, than a commit after this step, or after any number of further steps like the former
        ones.

        Args:
            room: new tokens allowed.
            gain: tokens that the drafts bring.
            before: rows in front of the root.
        """
        if not before:
            self._cycle = 0.0, 0.0
        is_due = bool(drafts + masks) and self._is_better(room, 1 + gain, drafts + masks, masks > 0, 1 + before)
        self._chosen = 0 if is_due else drafts, before
        return is_due

    def _is_better(self, room: int, gain: float, rows: int, has_masks: bool, pending: int) -> bool:
        (tokens, time), (given, width, count) = self._cycle, self._drafted
        now, rate, read = (tokens + 1) / (time + self.times.of(pending, False)), 0.0, float(pending)
        later = (given + ENOUGH * (1 + CHANCE)) / (count + ENOUGH), (width + ENOUGH * rows) / (count + ENOUGH)
        for _ in range(room if has_masks else 1):
            tokens, time, read = tokens + gain, time + self.times.of(round(read + rows), has_masks), read + gain
            before, rate = rate, (tokens + 1) / (time + self.times.of(round(read), False))
            if rate > now or rate < before:
                return rate <= now
            gain, rows = later[0], round(later[1])
        return True
