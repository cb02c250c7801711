"""What differs between the decoders, as rules: streaming and block-wise filling (paper §5, Algorithm 1, Fig. 4c), and
verified decoding.

A rule says which slots a row's forward predicts, what is chosen for them, how that changes the window, which rows of
the forward enter the cache, and how many masks come next. It works on the logits of all rows at once, and then on one
row after the other, on plain lists.

`A` rows in use, `M` physical rows with logits, `V` vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .branch_pacing import BranchPacer
from .pacing import WindowPacer
from .sampling import Choice, TokenSampler, is_typical
from .selection import select_masks, token_entropy
from .settings import WeDLMGenerationSettings
from .window import PhysicalOrder, Row, RowOutcome, physical_order


@dataclass(frozen=True)
class SlotStates:
    """The masks behind the rows with logits, where a rule does not need logits of all of them.

    Attributes:
        hidden: `(A, masks, H)`, last hidden states.
        logits: `(A, masks, V)`, raw, in the model's dtype: one pass of the head makes them beside the others.
    """

    hidden: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Selection:
    """What is chosen from the logits of a forward.

    Attributes:
        tokens: `(A, M)` int64, what is chosen for each predicted slot.
        chosen: `(A, M)` bool: filling: the masks that take their token. Verifying: the AR rows whose draft passes, and
            the masks whose token is confident enough to be a draft.
        is_mask: `(A, M)` bool, predicted slots that are masks (filling: all of them).
        is_broken: `(A, M)` bool, where there is nothing to choose from: the logits are NaN, or no token is left.
        choice: what the tokens were chosen from; of branches, those of the real rows.
        draft_scores: `(A, K, S)` float32, what the K drafts of a branch were chosen from: S tokens each.
        shortlist: `(A, K, S)` int64, those tokens.
    """

    tokens: torch.Tensor
    chosen: torch.Tensor
    is_mask: torch.Tensor
    is_broken: torch.Tensor
    choice: Choice
    draft_scores: torch.Tensor | None = None
    shortlist: torch.Tensor | None = None


@dataclass
class FillRule:
    """The paper's: masks of low entropy are filled, and what has no gap to its left is final.

    A row without masks (an adaptive window may have none) takes its next token from the AR head: its last pending row
    predicts slot 0.

    Args:
        settings: how to decode.
        sampler: which token fills a slot.
        end_tokens: tokens that end a row.
        pacer: how many masks there are.
    """

    settings: WeDLMGenerationSettings
    sampler: TokenSampler
    end_tokens: frozenset[int]
    pacer: WindowPacer | BranchPacer

    def predicted_slots(self, row: Row) -> list[int]:
        """The window slots that the row's last physical rows predict."""
        return row.mask_slots or [0]

    def order(self, rows: Sequence[Row], width: int | None) -> PhysicalOrder:
        """The rows of a forward, `width` of them where that is fixed, see [`physical_order`]."""
        slot_lists = [[] if row.is_finished else self.predicted_slots(row) for row in rows]
        filler = self.sampler.mask_token_id or 0  # of slots that an adapter embeds
        return physical_order(rows, slot_lists, filler, width, self.sampler.prompt_ids.device)

    def select(
        self, order: PhysicalOrder, rows: Sequence[Row], logits: torch.Tensor, slots: SlotStates | None
    ) -> Selection:
        """Chooses tokens.

        Args:
            order: of the forward.
            rows: those in use.
            logits: `(A, M, V)` float32, raw; MASK's are overwritten.
            slots: of the masks behind the rows with logits.
        """
        settings, is_mask = self.settings, order.slots >= 0
        entropy = token_entropy(logits)
        # Slot 0 is a mask: a slot's number is its distance to the leftmost mask.
        chosen = select_masks(entropy, order.slots, is_mask, settings.entropy_threshold, settings.distance_penalty)
        choice = self.sampler.choose(logits, order)
        is_broken = (entropy.isnan() & is_mask) | (chosen & (choice.tokens < 0))
        return Selection(choice.tokens, chosen, is_mask, is_broken, choice)

    def fill(self, row: Row, first_column: int, chosen: list[bool], tokens: list[int]) -> RowOutcome:
        """Writes the chosen tokens into the row's window.

        Args:
            row: the row.
            first_column: the column of the logits that its first predicted slot has.
            chosen, tokens: of [`Selection`], for its predicted slots.
        """
        slots = self.predicted_slots(row)
        filled = [(first_column + i, slot, tokens[i]) for i, slot in enumerate(slots) if chosen[i]]
        row.window = row.window or [None]
        for _, slot, token in filled:
            row.window[slot] = token
        final = next((slot for slot, token in enumerate(row.window) if token is None), len(row.window))
        paid = len(filled) - 1
        failed = paid if len(filled) < len(slots) else None
        return RowOutcome(row, final, decided=filled, filled=filled, paid=paid, failed=failed)

    def committed(self, row: Row, final: int) -> int:
        """How many physical rows of the forward enter the cache: those that saw nothing but final tokens. `final`
        tokens became final in this step; the window has not slid past them yet."""
        return row.pending

    def refill(self, row: Row) -> None:
        """Gives the row masks for the next step."""
        row.set_masks(self.pacer.window_size)


class BlockRule(FillRule):
    """The block-wise baseline: the window is refilled only when all of it is filled."""

    def refill(self, row: Row) -> None:
        """Gives the row masks for the next step, if its block is done."""
        if not row.window:
            super().refill(row)


class VerifyRule(FillRule):
    """Verified decoding: drafts are final as long as the AR head accepts them, and masks give the next ones.

    A row has the last pending token c, drafts f₁…f_d in slots 0 to d−1, and m masks behind them. The AR row at c
    predicts slot 0, the one at f_i slot i; the masks predict their own slots d to d+m−1:

        physical rows    c  f₁ f₂ │ M  M  M  M         the AR row at f₂ and the first mask predict the same slot:
        predicted slots  0  1  2  │ 2  3  4  5         the AR head decides it, drafts start behind it

    Drafts never influence what an AR row chooses, so with `"exact"` the output is that of AR decoding, greedy or
    sampled. After a rejection nothing is drafted: the masks saw a wrong token. (Keeping what is left of the old
    drafts, or taking the AR rows' choices behind the wrong token, gave fewer tokens per forward on wedlm-nano, see
    docs/generation.md.)
    """

    def predicted_slots(self, row: Row) -> list[int]:
        """The window slots that the row's last physical rows predict: AR rows, then masks."""
        return [*range(len(row.filled_slots) + 1), *row.mask_slots]

    def select(
        self, order: PhysicalOrder, rows: Sequence[Row], logits: torch.Tensor, slots: SlotStates | None
    ) -> Selection:
        """What the AR rows choose, whether the drafts behind them pass, and the masks' own choices."""
        width, device, settings = order.logit_count, logits.device, self.settings
        masks, drafts = [len(row.mask_slots) for row in rows], [row.filled_tokens for row in rows]
        behind = torch.tensor(
            [[-1] * (width - len(f) - 1 - m) + f + [-1] * (m + 1) for f, m in zip(drafts, masks, strict=True)],
            device=device,
        )  # (A, M), the draft that each AR row has behind it
        is_mask = torch.arange(width, device=device) >= width - torch.tensor(masks, device=device)[:, None]
        is_ar = (order.slots >= 0) & ~is_mask

        def passes(choice: Choice) -> torch.Tensor:
            same = choice.tokens == behind
            if settings.verification == "exact":
                return same
            plausible = is_typical(
                choice.scores, behind.clamp(min=0), settings.acceptance_epsilon, settings.acceptance_delta
            )
            return same | (plausible & (behind >= 0))

        most = max(masks)
        # AR rows are judged by their token: only masks need an entropy, of the logits with MASK's.
        entropy = token_entropy(logits[:, width - most :]) if most else None
        choice = self.sampler.choose_in_order(logits, order, rows, is_ar, passes)
        tokens, chosen, is_broken = choice.tokens, passes(choice), is_ar & (choice.tokens < 0)
        if entropy is not None:
            entropy = F.pad(entropy, (width - most, 0))
            proposals = tokens if self.sampler.is_argmax else logits.argmax(-1)
            tokens = torch.where(is_mask, proposals, tokens)
            chosen = torch.where(is_mask, entropy < settings.entropy_threshold, chosen)
            is_broken = is_broken | (entropy.isnan() & is_mask)
        return Selection(tokens, chosen, is_mask, is_broken, choice)

    def fill(self, row: Row, first_column: int, chosen: list[bool], tokens: list[int]) -> RowOutcome:
        """Keeps the accepted drafts, adds the AR head's own token behind them, and drafts anew."""
        drafts = row.filled_tokens
        accepted = next((i for i in range(len(drafts)) if not chosen[i]), len(drafts))
        settled = [*drafts[:accepted], tokens[accepted]]
        failed = accepted if accepted < len(drafts) else None
        filled: list[tuple[int, int, int]] = []
        for index in self.draft_columns(len(drafts), accepted, len(tokens)):
            if not chosen[index]:
                failed = len(filled) if failed is None else failed
                break
            filled.append((first_column + index, accepted + 1 + len(filled), tokens[index]))
            if tokens[index] in self.end_tokens:
                break  # nothing behind an end is worth a slot
        row.window = [*settled, *(token for _, _, token in filled)]
        return RowOutcome(
            row=row,
            final=accepted + 1,
            decided=[(first_column + slot, slot, token) for slot, token in enumerate(settled)],
            filled=filled,
            checked=len(drafts),
            accepted=accepted,
            paid=accepted,
            failed=failed,
        )

    def draft_columns(self, checked: int, accepted: int, count: int) -> range:
        """Which of a row's `count` choices are the next drafts: the masks', but for the first one's, whose slot the AR
        head decides."""
        return range(checked + 2 if accepted == checked else count, count)

    def committed(self, row: Row, final: int) -> int:
        """Pending tokens and accepted drafts: all that is final but the last, which no row of the forward read."""
        return row.pending + final - 1

    def refill(self, row: Row) -> None:
        """Masks behind the drafts. The first one's slot goes to the AR token, so they are worth it from two on."""
        drafts = len(row.window)
        if row.remaining > drafts + 1 and not (row.window and row.window[-1] in self.end_tokens):
            row.set_masks(drafts + self.pacer.window_size)
