"""Filling: what the unverified decoders do with a forward, streaming and block-wise (paper §5, Algorithm 1, Fig. 4c).

A rule orders the rows of a forward, chooses tokens from its logits for all sequences at once, says what the step did
to each of them, and prepares them for the next one. [`VerifyRule`] is the third.

`A` sequences in use, `M` physical rows with logits, `V` vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .sampling import Choice, TokenSampler, token_entropy
from .settings import WeDLMGenerationSettings
from .window import PhysicalOrder, SequenceOutcome, SequenceState, physical_order

# How many of these tokens a sequence takes: up to an end token, its limit, or where a stopping criterion holds.
Cut = Callable[[SequenceState, list[int]], int]


@dataclass(frozen=True)
class SlotStates:
    """The masks behind the rows with logits."""

    hidden: torch.Tensor | None  # `(A, masks, H)`, last hidden states; `None` without a mask adapter
    logits: torch.Tensor  # `(A, masks, V)`, raw, in the model's dtype: one pass of the head makes them with the others


@dataclass(frozen=True)
class Selection:
    """What is chosen from the logits of a forward. Tensors are `(A, M)` bool."""

    choice: Choice  # a token for each row with logits, and what it was chosen from
    # Filling: the masks that take their token. Under verification: the AR rows that find the draft right behind them
    # plausible.
    marks: torch.Tensor
    is_mask: torch.Tensor
    is_broken: torch.Tensor  # where there is nothing to choose from: the logits are NaN, or no token is left


def select_masks(
    entropy: torch.Tensor,
    distance: torch.Tensor,
    is_mask: torch.Tensor,
    entropy_threshold: float | torch.Tensor,
    distance_penalty: float | torch.Tensor,
) -> torch.Tensor:
    """Every mask with H + λ·d < τ; where a row has none, its mask with the least (ties: the leftmost).

    Args:
        entropy: `(B, M)` float32, H in nats.
        distance: `(B, M)` int64, d: logical distance to the row's leftmost mask.
        is_mask: `(B, M)` bool; False where a row has fewer than M masks.
        entropy_threshold: τ, nats; or `(B, 1)`, of each row.
        distance_penalty: λ, nats per position; likewise.

    Returns:
        `(B, M)` bool, at least one True in each row that has a mask (paper §5.3, Algorithm 1).
    """
    adjusted = (entropy + distance_penalty * distance).masked_fill(~is_mask, float("inf"))
    chosen = adjusted < entropy_threshold
    least = torch.zeros_like(chosen).scatter_(1, adjusted.argmin(1, keepdim=True), True)
    return torch.where(chosen.any(1, keepdim=True), chosen, least) & is_mask


@dataclass
class FillRule:
    """The paper's: masks of low entropy are filled, and what has no gap to its left is final."""

    settings: WeDLMGenerationSettings
    sampler: TokenSampler
    size: int  # W
    is_by_row = False

    def order(self, sequences: Sequence[SequenceState], is_fixed: bool) -> PhysicalOrder:
        """The rows of a forward; `is_fixed`: always the same number."""
        slots = [one.mask_slots for one in sequences]
        return physical_order(
            sequences, slots, self.sampler.filler, self.sampler.device, width=2 * self.size if is_fixed else 0
        )

    def select(self, order: PhysicalOrder, sequences: Sequence[SequenceState], logits: torch.Tensor) -> Selection:
        """Chooses tokens from `logits`, `(A, M, V)` float32, raw; MASK's are overwritten."""
        settings, is_mask = self.settings, order.slots >= 0
        entropy = token_entropy(logits)
        # Slot 0 is a mask: a slot's number is its distance to the leftmost mask.
        marks = select_masks(entropy, order.slots, is_mask, settings.entropy_threshold, settings.distance_penalty)
        choice = self.sampler.choose(logits, order)
        is_broken = (entropy.isnan() & is_mask) | (marks & (choice.tokens < 0))
        return Selection(choice, marks, is_mask, is_broken)

    def settle(
        self, one: SequenceState, first: int, tokens: list[int], marks: list[bool], cut: Cut
    ) -> SequenceOutcome:
        """Fills the sequence's slots, and slides its window past what is final.

        Args:
            one: the sequence.
            first: the column of the logits of its first predicted slot.
            tokens, marks: of [`Selection`], from that column on.
            cut: how many of the tokens that could be final are.
        """
        filled = [(first + i, slot, tokens[i]) for i, slot in enumerate(one.mask_slots) if marks[i]]
        window = list(one.window)
        for _, slot, token in filled:
            window[slot] = token
        final = []
        for token_or_mask in window:
            if token_or_mask is None:
                break
            final.append(token_or_mask)
        final = final[: cut(one, final)]
        outcome = SequenceOutcome(
            sequence=one,
            new_tokens=final,
            kept=list(range(one.pending)),
            decided=[each for each in filled if not one.is_finished or each[1] < len(final)],
            filled=filled,
        )
        one.committed += one.pending
        one.tokens += final
        one.window = [] if one.is_finished else window[len(final) :]
        return outcome

    def guess(
        self, order: PhysicalOrder, sequences: Sequence[SequenceState], selection: Selection, slots: SlotStates | None
    ) -> torch.Tensor | None:
        """Numbers for [`prepare`], `(A, numbers)` float32, on the device; none here: the selection says it all."""
        return None

    def prepare(self, outcomes: Sequence[SequenceOutcome], guesses: list[list[float]]) -> None:
        """Gives the sequences that go on masks for the next step."""
        self.begin([outcome.sequence for outcome in outcomes if not outcome.sequence.is_finished])

    def begin(self, sequences: Sequence[SequenceState]) -> None:
        """Gives new sequences their first masks."""
        for one in sequences:
            one.set_masks(self.size)


class BlockRule(FillRule):
    """The block-wise baseline: the window is refilled only when all of it is filled."""

    def begin(self, sequences: Sequence[SequenceState]) -> None:
        """Gives sequences masks whose block is done."""
        super().begin([one for one in sequences if not one.window])
