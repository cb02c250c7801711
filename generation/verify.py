"""Verified decoding: drafts are final as long as the AR head's own choices are these drafts (ALGORITHM.md §4).

A sequence has its last final token c, drafts behind it, which may branch, and masks behind c and behind drafts:

    rows in front of masks  c  f₁ f₂ g₁ │ masks of c │ of f₁ │ of f₂        g₁ is a sibling of f₁
    predicted slots         0  1  2  1  │

The AR row at c predicts slot 0. If that is f₁ or g₁, the row of this draft predicts slot 1, and so on: the path that
the AR rows follow is final, and so is the token at its end that they choose. The masks behind the last row of the
path have seen nothing wrong, so what they draft is checked next.

Drafts never influence what an AR row chooses, so with `"exact"` the output is that of AR decoding, greedy or sampled.

A [`Drafter`] says what may follow, a [`Planner`] which of it is checked and where masks stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .drafter import Drafter, Winner
from .planner import Draft, Outlook, Plan, Planner
from .rules import Cut, Selection, SlotStates
from .sampling import Choice, TokenSampler, is_typical
from .settings import WeDLMGenerationSettings
from .step_times import StepTimes
from .window import PhysicalOrder, SequenceOutcome, SequenceState, physical_order


class FixedPlan(Planner):
    """Every step checks the first run of drafts, and has `size` masks behind each real row, or behind the last one."""

    def __init__(self, size: int, is_chain: bool, lost: int):
        super().__init__(StepTimes(0.0), size, is_chain, lost)

    def plan(self, outlooks: Sequence[Outlook], before: int = 0) -> list[Plan]:
        """See [`Planner.plan`]."""
        plans = []
        for outlook in outlooks:
            drafts = outlook.drafts[: max(0, min(self.depth, outlook.room - 1 + self.lost))]
            masks = [min(self.depth, outlook.room - depth - 1 + self.lost) for depth in range(len(drafts) + 1)]
            if self.is_chain:
                masks[:-1] = [0] * len(drafts)
            plans.append(Plan(drafts, [count if count > self.lost else 0 for count in masks]))
        return plans

    def learn(self, draft: Draft, has_passed: bool) -> None:
        """Nothing."""


@dataclass
class VerifyRule:
    """How verified decoding uses a forward.

    Args:
        settings: how to decode.
        sampler: what the AR head chooses.
        end_tokens: tokens that end a sequence.
        drafter: of what may follow.
        planner: of what is checked.
        size: W, for forwards of fixed shapes.
    """

    settings: WeDLMGenerationSettings
    sampler: TokenSampler
    end_tokens: frozenset[int]
    drafter: Drafter
    planner: Planner
    size: int
    _is_prefill: bool = field(default=True, init=False)

    def order(self, sequences: Sequence[SequenceState], is_fixed: bool) -> PhysicalOrder:
        """The rows of a forward, whose time begins; `is_fixed`: always the same number."""
        slots = [[] if one.is_finished else [0, *(draft.depth for draft in one.drafts)] for one in sequences]
        size = self.size if is_fixed else 0
        order = physical_order(
            sequences, slots, self.sampler.filler, self.sampler.device, size, size, 1 - self.drafter.lost
        )
        self._is_prefill = any(not one.new_count for one in sequences)
        self.planner.begin(order.input_ids.numel(), order.masks_behind > 0, len(sequences))
        return order

    def select(self, order: PhysicalOrder, sequences: Sequence[SequenceState], logits: torch.Tensor) -> Selection:
        """What the AR rows choose from `logits`, `(A, M, V)` float32, raw; MASK's are overwritten."""
        width = order.logit_count
        behind = torch.full_like(order.slots, -1)
        if self.settings.verification == "typical":
            drafts = [[draft.token for draft in one.drafts] for one in sequences]
            behind = torch.tensor([[-1] * (width - 1 - len(each)) + each + [-1] for each in drafts]).to(behind)

        def plausible(choice: Choice) -> torch.Tensor:
            if self.settings.verification == "exact":
                return behind >= 0
            epsilon, delta = self.settings.acceptance_epsilon, self.settings.acceptance_delta
            return is_typical(choice.scores, behind.clamp(min=0), epsilon, delta) & (behind >= 0)

        def follow(entry: int, place: int, choice: Choice) -> int | None:
            column = width - len(order.slot_lists[entry]) + 1 + place
            is_plausible = bool(plausible(choice)[entry, column])
            return _child(sequences[entry], place, int(choice.tokens[entry, column]), is_plausible)

        choice = self.sampler.choose_in_order(logits, order, sequences, follow)
        is_ar = order.slots >= 0
        return Selection(choice, plausible(choice), torch.zeros_like(is_ar), is_ar & (choice.tokens < 0))

    def settle(
        self, one: SequenceState, first: int, tokens: list[int], marks: list[bool], cut: Cut
    ) -> SequenceOutcome:
        """Keeps the path that the AR rows follow, and their own token at its end.

        Args:
            one: the sequence.
            first: the column of the logits of its last final token.
            tokens, marks: of [`Selection`], from that column on.
            cut: how many of the tokens that could be final are.
        """
        path = [-1]
        while (child := _child(one, path[-1], tokens[path[-1] + 1], marks[path[-1] + 1])) is not None:
            path.append(child)
        for place, draft in enumerate(one.drafts):
            if draft.parent in path:
                self.planner.learn(draft, place in path)
        settled = [*(one.drafts[place].token for place in path[1:]), tokens[path[-1] + 1]]
        count = cut(one, settled)
        outcome = SequenceOutcome(
            sequence=one,
            new_tokens=settled[:count],
            kept=[*range(one.pending), *(one.pending + place for place in path[1:count])],
            decided=[(first + place + 1, slot, settled[slot]) for slot, place in enumerate(path[:count])],
            checked=one.drafts,
            accepted=path[1 : count + 1],
            drafting=range(sum(one.masks[: path[-1] + 1]) + self.drafter.lost, sum(one.masks[: path[-1] + 2])),
        )
        one.committed += len(outcome.kept)
        one.tokens += outcome.new_tokens
        if one.is_finished:
            one.drafts, one.masks = [], []
        return outcome

    def prepare(self, order: PhysicalOrder, outcomes: Sequence[SequenceOutcome], slots: SlotStates | None) -> None:
        """Drafts behind the new last tokens, and plans the next step."""
        if not self._is_prefill:
            self.planner.finish(sum(len(outcome.new_tokens) for outcome in outcomes))
        going = [
            Winner(outcome.sequence, entry, outcome.drafting)
            for entry, outcome in enumerate(outcomes)
            if not outcome.sequence.is_finished
        ]
        self._plan([each.sequence for each in going], self.drafter.draft(going, slots))

    def begin(self, sequences: Sequence[SequenceState]) -> None:
        """Plans the first step, on the prompts."""
        self._plan(sequences, [Outlook([], 0, one.remaining) for one in sequences])

    def _plan(self, sequences: Sequence[SequenceState], outlooks: Sequence[Outlook]) -> None:
        if not sequences:
            return
        before = max(one.pending for one in sequences) - 1
        for one, plan in zip(sequences, self.planner.plan(outlooks, before), strict=True):
            one.drafts, one.masks = plan.drafts, plan.masks
            for place, draft in enumerate(one.drafts, 1):
                if draft.token in self.end_tokens:
                    one.masks[place] = 0  # nothing behind an end is worth a row


def _child(one: SequenceState, place: int, token: int, is_plausible: bool) -> int | None:
    """Which draft behind another one (-1: the last final token) passes: the one that is the AR row's choice, or else
    the one right behind, if that is plausible."""
    children = [child for child, draft in enumerate(one.drafts) if draft.parent == place]
    same = [child for child in children if one.drafts[child].token == token]
    return next(iter(same or (children if is_plausible else [])), None)
