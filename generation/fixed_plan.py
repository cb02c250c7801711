"""A plan that is the same in every step."""

from collections.abc import Sequence

from .drafter import Outlook
from .planner import Planner
from .rows import Row, with_masks
from .step_times import StepTimes


class FixedPlan(Planner):
    """Every step checks the first run of drafts, and has `size` masks behind each real row, or behind the last one.
    Where a state is kept, a step without both commits the pending tokens once they are more than those masks."""

    def __init__(self, size: int, is_chain: bool, lost: int, keeps_state: bool = False):
        super().__init__(StepTimes(0.0), size, is_chain, lost, keeps_state)

    def plan(self, outlooks: Sequence[Outlook], before: int = 0) -> list[list[Row]]:
        """See [`Planner.plan`]."""
        if self.commits and before >= self.depth:
            return [[] for _ in outlooks]
        plans = []
        for outlook in outlooks:
            drafts = outlook.drafts[: max(0, min(self.depth, outlook.room - 1 + self.lost))]
            masks = [min(self.depth, outlook.room - depth - 1 + self.lost) for depth in range(len(drafts) + 1)]
            if self.is_chain:
                masks[:-1] = [0] * len(drafts)
            plans.append(with_masks(drafts, [count if count > self.lost else 0 for count in masks], self.lost))
        return plans
