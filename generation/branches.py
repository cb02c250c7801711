"""Verified decoding where drafts often fail: every real row has masks of its own (ALGORITHM.md §4, "Branches").

A chain of masks behind the last draft is of use only if every draft passes. Here each real row has a *branch* of masks
behind it, so wherever the first failure is, the masks behind the last accepted token have seen nothing wrong, and
their drafts are the next ones. It needs a mask adapter, whose hidden states tell the drafts of a branch one after the
other once the tokens before them are known.

`A` rows in use, `R` real rows with logits, `M` masks, `K` drafts of a branch, `H` hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .branch_pacing import BranchPacer
from .lookup import TextLookup
from .rules import Selection, SlotStates, VerifyRule
from .sampling import SHORTLIST
from .window import PhysicalOrder, Row, RowOutcome


@dataclass
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

    pacer: BranchPacer
    model: Any

    def __post_init__(self) -> None:
        # For each row of the call the probabilities, `(K,)`, of the drafts that this step chose.
        self._probabilities: dict[int, torch.Tensor] = {}
        self._lookups: dict[int, TextLookup] = {}

    def order(self, rows: Sequence[Row], width: int | None) -> PhysicalOrder:
        """The rows of a forward, whose time begins."""
        order = super().order(rows, width)
        self.pacer.begin_step(order.input_ids.numel(), is_prefill=any(row.new_count == 0 for row in rows))
        return order

    def select(
        self, order: PhysicalOrder, rows: Sequence[Row], logits: torch.Tensor, slots: SlotStates | None
    ) -> Selection:
        """What the AR rows choose, whether the drafts behind them pass, and the next drafts: `(A, R + K)`."""
        checked = super().select(order, rows, logits, None)
        self._probabilities = {}
        return checked if slots is None else self._with_drafts(checked, order, rows, slots)

    def _with_drafts(
        self, checked: Selection, order: PhysicalOrder, rows: Sequence[Row], slots: SlotStates
    ) -> Selection:
        """Adds the drafts of the branch that won, which only the device knows so far."""
        width, device = order.logit_count, checked.tokens.device
        first = width - 1 - torch.tensor([len(row.window) for row in rows], device=device)[:, None]
        # A draft passes if all before it do; the AR row behind the last of them wins.
        columns = torch.arange(width, device=device)
        passed = (checked.chosen | (columns < first)) & (columns < width - 1)
        winner = passed.long().cumprod(1).sum(1, keepdim=True)
        accepted = winner - first
        real_end = order.input_ids.shape[1] - order.masks_behind
        # Behind embeddings no token is known: any will do, since it only makes drafts worse.
        tokens = order.input_ids[:, real_end - width : real_end].clamp(min=0)
        before = torch.cat([tokens.gather(1, winner), checked.tokens.gather(1, winner)], dim=1)
        # Its masks.
        most = max(len(row.branches) for row in rows)
        sizes = torch.tensor([row.branches + [0] * (most - len(row.branches)) for row in rows], device=device)
        start, won_sizes = (sizes.cumsum(1) - sizes).gather(1, accepted), sizes.gather(1, accepted)
        # On a GPU, looking at who won would wait for the forward.
        count = int(won_sizes.max()) if device.type == "cpu" else max(max(row.branches) for row in rows)
        if count == 0:
            return checked
        steps = torch.arange(count, device=device)
        is_draft = steps < won_sizes
        index = torch.arange(len(rows), device=device)[:, None], (start + steps).clamp(max=order.masks_behind - 1)
        logits = slots.logits[index]
        if self.sampler.mask_token_id is not None:
            logits[..., self.sampler.mask_token_id] = float("-inf")
        # A draft is one of the likeliest tokens by its mask's own logits: only their rows of the head are read.
        shortlist = logits.topk(min(SHORTLIST, logits.shape[-1] - 1), dim=-1).indices
        offsets = torch.tensor(order.first, device=device)[:, None] + accepted + 1 + steps
        drafts, probabilities, scores = self._draft(slots.hidden[index], shortlist, before, order, offsets)
        self._probabilities = dict(zip(order.rows, probabilities, strict=True))
        return Selection(
            tokens=torch.cat([checked.tokens, drafts], dim=1),
            chosen=torch.cat([checked.chosen, is_draft], dim=1),
            is_mask=torch.cat([checked.is_mask, is_draft], dim=1),
            is_broken=torch.cat([checked.is_broken, torch.zeros_like(is_draft)], dim=1),
            choice=checked.choice,
            draft_scores=scores,
            shortlist=shortlist,
        )

    def _draft(
        self,
        hidden: torch.Tensor,
        shortlist: torch.Tensor,
        before: torch.Tensor,
        order: PhysicalOrder,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chooses drafts one after the other.

        Args:
            hidden: `(A, K, H)`, last hidden states of their masks.
            shortlist: `(A, K, S)` int64, the tokens to choose from.
            before: `(A, 2)` int64, the two tokens before the first.
            order: of the forward.
            offsets: `(A, K)` int64, new tokens before each.

        Returns:
            `(A, K)` int64, the drafts; `(A, K)`, their probabilities over the shortlist; `(A, K, S)` float32, the
            shortlist's scores.
        """
        head = self.model.get_output_embeddings()
        is_plain = type(head) is torch.nn.Linear and head.bias is None
        table = head.weight if is_plain else getattr(head, "rows", None)  # of packed layers: `PackedLinear.rows`
        weights = None if table is None or head._forward_hooks else table[shortlist]  # (A, K, S, H)
        drafts, found, places = [], [], []
        for depth, tokens in enumerate(shortlist.unbind(1)):
            state = self.model.draft_hidden(hidden[:, depth], before)
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

    def draft_columns(self, checked: int, accepted: int, count: int) -> range:
        """Which of a row's `count` choices are the next drafts: those behind the AR rows'."""
        return range(checked + 1, count)

    def fill(self, row: Row, first_column: int, chosen: list[bool], tokens: list[int]) -> RowOutcome:
        """Keeps the accepted drafts, adds the AR head's own token behind them, and takes the next drafts."""
        outcome = super().fill(row, first_column, chosen, tokens)
        probabilities = self._probabilities.get(row.index)
        found = [] if probabilities is None else probabilities[: len(outcome.filled)].tolist()
        self.pacer.learn(row.confidence, outcome.checked, outcome.accepted, found)
        row.confidence = found
        return outcome

    def refill(self, row: Row) -> None:
        """Keeps the drafts that are worth being checked, the text's before the masks', and gives each real row its
        masks."""
        self._look_up(row)
        row.branches = self.pacer.plan(row.confidence, row.remaining)
        del row.window[len(row.branches) - 1 :]
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
