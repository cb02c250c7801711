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

from .drafter import Drafter, Ends, Winner
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


@dataclass
class VerifyRule:
    """How verified decoding uses a forward: the methods of [`FillRule`]."""

    settings: WeDLMGenerationSettings
    sampler: TokenSampler  # chooses for the AR head
    end_tokens: frozenset[int]
    drafter: Drafter
    planner: Planner
    size: int  # W, for forwards of fixed shapes
    # Real rows attend one by one, see [`attends_by_row`], and no masks stand behind the prompt: its forward is AR
    # decoding's.
    is_by_row: bool = False
    _is_prefill: bool = field(default=True, init=False)

    def order(self, sequences: Sequence[SequenceState], is_fixed: bool) -> PhysicalOrder:
        """The rows of a forward, whose time begins; `is_fixed`: always the same number."""
        slots = [[] if one.is_finished else [0, *(draft.depth for draft in one.drafts)] for one in sequences]
        size, depth = self.size if is_fixed else 0, 1 - self.drafter.lost
        width = size + depth if is_fixed else 0
        order = physical_order(sequences, slots, self.sampler.filler, self.sampler.device, width, size, depth)
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
        """Keeps the path that the AR rows follow, and their own token at its end; `first` is the column of the last
        final token."""
        path = _path(one, tokens, marks)
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
            drafting=self._drafting(one, path[-1]),
        )
        one.committed += len(outcome.kept)
        one.tokens += outcome.new_tokens
        if one.is_finished:
            one.drafts, one.masks = [], []
        return outcome

    def guess(
        self, order: PhysicalOrder, sequences: Sequence[SequenceState], selection: Selection, slots: SlotStates | None
    ) -> torch.Tensor | None:
        """What masks draft behind the path that the AR rows follow, see [`Drafter.guess`]; `None` without masks."""
        if slots is None:
            return None
        ends = self._ends(order, sequences, selection)
        return self.drafter.guess(ends, slots) if ends.masks.numel() else None

    def _ends(self, order: PhysicalOrder, sequences: Sequence[SequenceState], selection: Selection) -> Ends:
        """Where these paths end, found on the device: the host does not know it yet."""
        chosen = selection.choice.tokens
        if chosen.device.type == "cpu":  # nothing waits there, and Python is faster than small tensors
            ends = []
            for one, tokens, marks in zip(sequences, chosen.tolist(), selection.marks.tolist(), strict=True):
                first = order.logit_count - 1 - len(one.drafts)
                path = _path(one, tokens[first:], marks[first:])
                token = one.drafts[path[-1]].token if len(path) > 1 else one.tokens[-1]
                ends.append((self._drafting(one, path[-1]), [token, tokens[first + 1 + path[-1]]], len(path)))
            size = max(len(masks) for masks, _, _ in ends)
            masks = torch.tensor(
                [[masks.start + min(k, max(0, len(masks) - 1)) for k in range(size)] for masks, _, _ in ends]
            )
            before = torch.tensor([before for _, before, _ in ends]).clamp(min=0)
            offsets = torch.tensor(
                [[one.new_count + count] for one, (_, _, count) in zip(sequences, ends, strict=True)]
            )
            return Ends(masks.clamp(max=order.masks_behind - 1), before, offsets, order.sequences)
        most = 1 + max(len(one.drafts) for one in sequences)
        rows = [self._real_rows(one, order.logit_count, most) for one in sequences]
        table = torch.tensor(rows, device=chosen.device)
        parents, tokens, depths, columns = table[..., :4].unbind(-1)
        passed = (chosen.gather(1, parents) == tokens) | selection.marks.gather(1, parents)
        # A draft is on the path where it and all in front of it pass; the deepest one is the path's end.
        is_on_path = (passed[:, None] | (table[..., 6:] == 0)).all(-1) & (columns >= 0)
        end = ((depths + 1) * is_on_path).argmax(1)[:, None, None].expand(-1, 1, 6)
        _, token, _, column, start, count = table[..., :6].gather(1, end)[:, 0].split(1, dim=1)
        places = torch.arange(max(row[5] for each in rows for row in each), device=chosen.device)
        return Ends(
            (start + torch.minimum(places, (count - 1).clamp(min=0))).clamp(max=order.masks_behind - 1),
            torch.cat([token, chosen.gather(1, column)], 1).clamp(min=0),
            order.offsets.gather(1, column) + 1,
            order.sequences,
        )

    def _real_rows(self, one: SequenceState, logit_count: int, count: int) -> list[list[int]]:
        """Of a sequence's last final token and its drafts, `count` rows: the column of the logits that chooses there;
        the token, its depth, the column that chooses behind it (-1: no row); the first mask that drafts what follows,
        and how many do; and for each row, whether it is a draft on the path to this one, itself included."""
        first = logit_count - 1 - len(one.drafts)
        rows: list[list[int]] = []
        for place, draft in enumerate([Draft(one.tokens[-1], -1, 0, None), *one.drafts], -1):
            path = [0] * count
            if place >= 0:
                path = rows[1 + draft.parent][6:]
                path[1 + place] = 1
            masks, columns = self._drafting(one, place), [first + 1 + draft.parent, first + 1 + place]
            rows.append([columns[0], draft.token, draft.depth, columns[1], masks.start, len(masks), *path])
        return rows + [[0, 0, 0, -1, 0, 0, *[0] * count]] * (count - len(rows))

    def _drafting(self, one: SequenceState, place: int) -> range:
        """The masks, counted from the entry's first one, that draft what follows a draft; -1: the last final token."""
        return range(sum(one.masks[: place + 1]) + self.drafter.lost, sum(one.masks[: place + 2]))

    def prepare(self, outcomes: Sequence[SequenceOutcome], guesses: list[list[float]]) -> None:
        """Drafts behind the new last tokens, and plans the next step."""
        if not self._is_prefill:
            self.planner.finish(sum(len(outcome.new_tokens) for outcome in outcomes))
        going = [
            Winner(outcome.sequence, entry, outcome.drafting)
            for entry, outcome in enumerate(outcomes)
            if not outcome.sequence.is_finished
        ]
        self._plan([each.sequence for each in going], self.drafter.draft(going, guesses))

    def begin(self, sequences: Sequence[SequenceState]) -> None:
        """Plans the first step, on the prompts."""
        if self.is_by_row:
            for one in sequences:
                one.drafts, one.masks = [], [0]
            return
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


def _path(one: SequenceState, tokens: list[int], marks: list[bool]) -> list[int]:
    """The drafts that the AR rows follow, behind the last final token (-1)."""
    path = [-1]
    while (child := _child(one, path[-1], tokens[path[-1] + 1], marks[path[-1] + 1])) is not None:
        path.append(child)
    return path


def _child(one: SequenceState, place: int, token: int, is_plausible: bool) -> int | None:
    """Which draft behind another one (-1: the last final token) passes: the one that is the AR row's choice, or else
    the one right behind, if that is plausible."""
    children = [child for child, draft in enumerate(one.drafts) if draft.parent == place]
    same = [child for child in children if one.drafts[child].token == token]
    return next(iter(same or (children if is_plausible else [])), None)
