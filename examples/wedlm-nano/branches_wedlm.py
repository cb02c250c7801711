"""Verified decoding where drafts often fail: every real row has masks of its own (ALGORITHM.md §4, "Branches").

A chain of masks behind the last draft is of use only if every draft passes. Here each real row has a *branch* of masks
behind it, so wherever the first failure is, the masks behind the last accepted token have seen nothing wrong, and
their drafts are the next ones. It needs a mask adapter, whose hidden states tell the drafts of a branch one after the
other once the tokens before them are known.

`A` rows in use, `R` real rows with logits, `M` masks, `K` drafts of a branch, `H` hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .branch_pacing_wedlm import BranchPacer
from .lookup_wedlm import TextLookup
from .rules_wedlm import RowOutcome, Selection, SlotStates, VerifyRule
from .sampling_wedlm import TokenSampler
from .settings_wedlm import WeDLMGenerationSettings
from .window_wedlm import PhysicalOrder, Row, Visibility, slot_mask

# A draft is chosen among the likeliest tokens by its mask's own logits: only their rows of the head are read.
SHORTLIST = 64


class BranchRule(VerifyRule):
    """Verified decoding with branches.

    A row has the last pending token c, drafts f₁…f_d, and masks in branches, all behind the real rows:

        physical rows     c   f₁  f₂ │ M  M │ M │ M  M          c has two masks, f₁ one, f₂ two
        positions         7   8   9  │ 9  10│ 10│ 11 12
        predicted slots   0   1   2

    Only real rows have logits. Let j drafts pass: the AR head gives the token in slot j, right behind the last
    accepted draft, and the masks of branch j draft what follows it. So no mask stands at the position of that token.

    Args:
        settings, sampler, end_tokens: see [`FillRule`].
        pacer: how many drafts are checked, and how many masks each real row has.
        model: with a mask adapter.
    """

    def __init__(
        self,
        settings: WeDLMGenerationSettings,
        sampler: TokenSampler,
        end_tokens: frozenset[int],
        pacer: BranchPacer,
        model: Any,
    ):
        super().__init__(settings, sampler, end_tokens)
        self.pacer = pacer
        self.model = model
        # Of the step under way: probabilities of the drafts that were chosen, `(A, K)`, the tokens among which they
        # were, `(A, K, S)`, and each row's entry.
        self._probabilities: torch.Tensor | None = None
        self._shortlist: torch.Tensor | None = None
        self._entries: dict[int, int] = {}
        self._lookups: dict[int, TextLookup] = {}

    def predicted_slots(self, row: Row) -> list[int]:
        """The window slots that the real rows predict."""
        return list(range(len(row.window) + 1))

    def order(
        self,
        rows: Sequence[Row],
        slot_lists: list[list[int]],
        mask_token_id: int,
        width: int | None,
        device: torch.device,
    ) -> PhysicalOrder:
        """The rows of a forward, see [`branch_order`]."""
        order = branch_order(rows, slot_lists, mask_token_id, device)
        is_prefill = any(row.new_count == 0 for row in rows)
        self.pacer.begin_step(order.input_ids.numel(), is_prefill, len(rows))
        return order

    def select(
        self,
        order: PhysicalOrder,
        rows: Sequence[Row],
        logits: torch.Tensor,
        slots: SlotStates | None = None,
    ) -> Selection:
        """What the AR rows choose, whether the drafts behind them pass, and the next drafts: `(A, R + K)`."""
        checked = super().select(order, rows, logits)
        self._entries = {row.index: entry for entry, row in enumerate(rows)}
        self._probabilities = None
        count = max((size for row in rows for size in row.branches), default=0)
        if slots is None or count < 1:
            return checked
        return self._with_drafts(checked, order, rows, slots, count)

    def _with_drafts(
        self, checked: Selection, order: PhysicalOrder, rows: Sequence[Row], slots: SlotStates, count: int
    ) -> Selection:
        """Adds the drafts of the branch that won, which only the device knows so far."""
        width, device = order.logit_count, checked.tokens.device
        lengths = torch.tensor([len(row.window) for row in rows], device=device)[:, None]
        first = width - 1 - lengths
        # A draft passes if all before it do.
        columns = torch.arange(width, device=device)
        passed = (checked.chosen | (columns < first)) & (columns < width - 1)
        accepted = passed.long().cumprod(1).sum(1, keepdim=True) - first
        winner = first + accepted  # the AR row behind the last accepted draft
        real_end = order.input_ids.shape[1] - order.masks_behind
        # Behind embeddings no token is known: any will do, since it only makes drafts worse.
        tokens = order.input_ids[:, real_end - width : real_end].clamp(min=0)
        before = torch.cat([tokens.gather(1, winner), checked.tokens.gather(1, winner)], dim=1)
        # Its masks.
        most = max(len(row.branches) for row in rows)
        sizes = torch.tensor([row.branches + [0] * (most - len(row.branches)) for row in rows], device=device)
        start = (sizes.cumsum(1) - sizes).gather(1, accepted)
        won_sizes = sizes.gather(1, accepted)
        if device.type == "cpu":  # on a GPU, looking would wait for the forward
            count = int(won_sizes.max())
            if count == 0:
                return checked
        steps = torch.arange(count, device=device)
        is_draft = steps < won_sizes
        index = (start + steps).clamp(max=order.masks_behind - 1)
        entries = torch.arange(len(rows), device=device)[:, None]
        won = SlotStates(slots.hidden[entries, index], slots.logits[entries, index])
        offsets = torch.tensor(order.first, device=device)[:, None] + accepted + 1 + steps
        drafts, self._probabilities, scores = self._draft(won, before, order, offsets)
        return Selection(
            tokens=torch.cat([checked.tokens, drafts], dim=1),
            chosen=torch.cat([checked.chosen, is_draft], dim=1),
            is_mask=torch.cat([checked.is_mask, is_draft], dim=1),
            is_broken=torch.cat([checked.is_broken, torch.zeros_like(is_draft)], dim=1),
            choice=checked.choice,
            draft_scores=scores,
            shortlist=self._shortlist,
        )

    def _draft(
        self, won: SlotStates, before: torch.Tensor, order: PhysicalOrder, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chooses drafts one after the other.

        Args:
            won: of their masks, K for each row.
            before: `(A, 2)` int64, the two tokens before the first.
            order: of the forward.
            offsets: `(A, K)` int64, new tokens before each.

        Returns:
            `(A, K)` int64, the drafts; `(A, K)`, their probabilities over a shortlist of tokens; `(A, K, S)` float32,
            the shortlist's scores.
        """
        head = self.model.get_output_embeddings()
        won.logits[..., self.sampler.mask_token_id] = float("-inf")
        shortlist = self._shortlist = won.logits.topk(min(SHORTLIST, won.logits.shape[-1] - 1), dim=-1).indices
        is_plain = type(head) is torch.nn.Linear and head.bias is None and not head._forward_hooks
        weights = head.weight[shortlist] if is_plain else None  # (A, K, S, H)
        drafts, found, places = [], [], []
        for depth in range(won.hidden.shape[1]):
            state, tokens = self.model.draft_hidden(won.hidden[:, depth], before), shortlist[:, depth]
            if weights is not None:
                scores = (weights[:, depth].float() * state[:, None].float()).sum(-1)
            else:
                scores = head(state).gather(1, tokens).float()
            found.append(scores)
            places.append(self.sampler.draft(scores, tokens, offsets[:, depth], order))
            drafts.append(tokens.gather(1, places[-1])[:, 0])
            before = torch.stack([before[:, 1], drafts[-1]], dim=1)
        all_scores = torch.stack(found, 1)
        probabilities = all_scores.softmax(-1).gather(2, torch.stack(places, 1))[..., 0]
        return torch.stack(drafts, 1), probabilities, all_scores

    def fill(self, row: Row, slots: list[int], first_column: int, chosen: list[bool], tokens: list[int]) -> RowOutcome:
        """Keeps the accepted drafts, adds the AR head's own token behind them, and takes the next drafts."""
        drafts = row.filled_tokens
        accepted = next((i for i in range(len(drafts)) if not chosen[i]), len(drafts))
        settled = [*drafts[:accepted], tokens[accepted]]
        filled: list[tuple[int, int, int]] = []
        for index in range(len(slots), len(tokens)):
            if not chosen[index]:
                break
            filled.append((first_column + index, accepted + 1 + len(filled), tokens[index]))
            if tokens[index] in self.end_tokens:
                break  # nothing behind an end is worth a slot
        found: list[float] = []
        if self._probabilities is not None:
            found = self._probabilities[self._entries[row.index], : len(filled)].tolist()
        self.pacer.learn(row.confidence, len(drafts), accepted, found)
        row.confidence = list(found)
        row.window = [*settled, *(token for _, _, token in filled)]
        return RowOutcome(
            row=row,
            final=accepted + 1,
            decided=[(first_column + slot, slot, token) for slot, token in enumerate(settled)],
            filled=filled,
            checked=len(drafts),
            accepted=accepted,
            paid=accepted,
            failed=accepted if accepted < len(drafts) else None,
        )

    def refill(self, row: Row, window_size: int) -> None:
        """Keeps the drafts that are worth being checked, the text's before the masks', and gives each real row its
        masks."""
        self._look_up(row)
        row.branches = self.pacer.plan(row.confidence, row.remaining)
        drafts = len(row.branches) - 1
        del row.window[drafts:]
        if row.window and row.window[-1] in self.end_tokens:
            row.branches[-1] = 0

    def _look_up(self, row: Row) -> None:
        """Takes what the text itself says of its continuation, if more of that is likely to pass than of the drafts.

        Whatever is drafted, `"exact"` gives the same output. `"typical"` would keep repetitions that are plausible.
        """
        count = self.pacer.lookup_drafts
        if self.settings.verification != "exact" or not count or not row.new_count:
            return
        found = self._lookups.setdefault(row.index, TextLookup()).drafts(row.tokens, row.filled_tokens, count)
        ends = [place for place, token in enumerate(found, 1) if token in self.end_tokens]
        if found := found[: ends[0] if ends else count]:
            agreed = row.confidence[:1] if row.window[:1] == found[:1] else []
            confidence = [*agreed, *[None] * (len(found) - len(agreed))]
            reaches = self.pacer.record.reaches
            if sum(reaches(confidence)) > sum(reaches(row.confidence)):
                row.confidence, row.window = confidence, list(found)


def branch_order(
    rows: Sequence[Row], slot_lists: list[list[int]], mask_token_id: int, device: torch.device
) -> PhysicalOrder:
    """Physical rows with branches: padding, pending tokens, drafts, masks by branch, and padding again.

    The last real rows of all entries are aligned, so that their logits are one block, and so are their first masks:

        entry 0:   p  c  f  f │ M M │ M M │ M M
        entry 1:   ·  ·  c  f │ M M M │ M · ·

    Args:
        rows: those in use.
        slot_lists: the slots that each row's last real rows predict.
        mask_token_id: M.
        device: where the tensors go.
    """
    real_width = max(row.pending + len(row.window) for row in rows)
    masks = [sum(row.branches) for row in rows]
    mask_width = max(masks)
    columns = [_branch_columns(row, mask_token_id, real_width, mask_width) for row in rows]
    ids, positions, cache_slots, until, start = torch.tensor(columns, device=device).unbind(1)
    width = max(map(len, slot_lists))
    first_new = [row.new_count for row in rows]
    slots = torch.tensor([[-1] * (width - len(slots)) + slots for slots in slot_lists], device=device)
    is_causal = all(not any(row.branches[:-1]) for row in rows)
    return PhysicalOrder(
        rows=[row.index for row in rows],
        input_ids=ids,
        position_ids=positions,
        cache_slots=cache_slots,
        counts=[row.pending + len(row.window) + size for row, size in zip(rows, masks, strict=True)],
        slots=slots,
        slot_lists=slot_lists,
        first=first_new,
        offsets=slots + torch.tensor(first_new, device=device)[:, None],
        slot_mask=slot_mask(masks, device, at_left=True),
        masks_behind=mask_width,
        visibility=None if is_causal else Visibility(until, start),
    )


def _branch_columns(row: Row, mask_token_id: int, real_width: int, mask_width: int) -> list[list[int]]:
    """One entry of the forward: its tokens, positions and cache slots, and what [`Visibility`] needs."""
    end, drafts = len(row.tokens), len(row.window)
    positions = list(range(row.committed, end + drafts))
    until, start = list(positions), list(positions)
    tokens = row.tokens[row.committed :] + row.filled_tokens
    padding = real_width - len(tokens)
    for draft, size in enumerate(row.branches):
        first = row.committed + len(positions)
        positions += range(end + draft + 1, end + draft + 1 + size)
        until += [end - 1 + draft] * size
        start += [first] * size
    behind = row.committed + len(positions)
    tokens += [mask_token_id] * (len(positions) - len(tokens))
    front = range(behind, behind + padding)
    back = range(behind + padding, row.committed + real_width + mask_width)
    return [
        [mask_token_id] * len(front) + tokens + [mask_token_id] * len(back),
        [*front, *positions, *back],
        [*front, *range(row.committed, behind), *back],
        [*front, *until, *back],
        [*front, *start, *back],
    ]
