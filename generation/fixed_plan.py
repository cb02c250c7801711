"""A plan that is the same in every step."""

from collections.abc import Sequence
from sys import maxsize

from .planner import Outlook, StepSize
from .rows import ADAPTER_MASKS, MaskRun, Row, Tree, with_masks


class FixedPlan:
    """Every step checks up to `depth` drafts, and has as many masks behind each real row, or behind the last one; or
    fewer of both, where a step may not have so many rows. Where a state is kept, a step without both commits the
    tokens once `pending` are. It learns nothing."""

    is_timed = False

    def __init__(
        self,
        depth: int,
        is_chain: bool,
        run: MaskRun = ADAPTER_MASKS,
        keeps_state: bool = False,
        most_rows: int = maxsize,
        pending: int = 8,
    ):
        self.depth, self.is_chain, self.run, self.keeps_state = depth, is_chain, run, keeps_state
        self.most_rows, self.pending = most_rows, pending

    def plan(self, outlooks: Sequence[Outlook], before: int = 0) -> list[Tree]:
        """See [`Planner.plan`]."""
        if self.keeps_state and before >= self.pending:
            return [Tree() for _ in outlooks]
        return [self._rows(outlook, self.most_rows - 1 - before) for outlook in outlooks]

    def learn(self, draft: Row, has_passed: bool) -> None:
        """See [`Planner.learn`]."""

    def finish(self, size: StepSize, tokens: int, seconds: float, is_prefill: bool = False) -> None:
        """See [`Planner.finish`]."""

    def _rows(self, outlook: Outlook, most: int) -> Tree:
        room = outlook.room - 1 + self.run.skipped
        for size in range(max(0, min(self.depth, room)), 0, -1):
            drafts = outlook.drafts[: size - self.run.skipped]  # as many as masks draft; a constraint may expect more
            masks = [min(size, room - depth) for depth in range(len(drafts) + 1)]
            if self.is_chain:
                masks[:-1] = [0] * len(drafts)
            masks = [count if count > self.run.skipped else 0 for count in masks]
            if len(drafts) + sum(masks) <= most:
                return with_masks(drafts, masks, self.run)
        return Tree()
