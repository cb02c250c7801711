"""What may follow a sequence: drafts from masks. A mask adapter has a drafter of its own (adapters/drafter.py).

`A` sequences, `K` masks of each, `V` vocabulary.
"""

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

import torch

from .planner import Draft, Outlook
from .rules import SlotStates
from .sampling import TokenSampler, token_entropy
from .window import SequenceState


class Ends(NamedTuple):
    """Where the steps of `A` sequences end, known to the device alone. Tensors are int64."""

    masks: torch.Tensor  # `(A, K)`, the masks that draft what follows; the last one again where there are fewer than K
    before: torch.Tensor  # `(A, 2)`, the last two tokens
    offsets: torch.Tensor  # `(A, 1)`, new tokens
    sequences: list[int]  # their places in the call


class Winner(NamedTuple):
    """A sequence that goes on, its entry in the forward, and the masks, counted from the entry's first one, that
    draft what follows it."""

    sequence: SequenceState
    entry: int
    masks: range


class Drafter:
    """Drafts of masks that have no more than their own logits: the likeliest token of each, as far as masks are sure.

    Args:
        sampler: how the AR head will choose.
        end_tokens: tokens that end a sequence.
        entropy_threshold: tau, nats: drafts end at the first mask whose H is not below.
    """

    lost = 1  # masks behind a row that draft nothing: the first one stands at the position of the AR row's own token

    def __init__(self, sampler: TokenSampler, end_tokens: frozenset[int], entropy_threshold: float):
        self.sampler, self.end_tokens, self.entropy_threshold = sampler, end_tokens, entropy_threshold

    def guess(self, ends: Ends, slots: SlotStates) -> torch.Tensor:
        """What masks predict, as numbers for [`draft`], `(A, numbers)` float32: the host reads them with what else it
        must know of a step, and waits once. Also of sequences that are found to be finished."""
        entries = torch.arange(len(ends.masks), device=ends.masks.device)[:, None]
        hidden = None if slots.hidden is None else slots.hidden[entries, ends.masks]
        return self._guess(slots.logits[entries, ends.masks].float(), hidden, ends).flatten(1)

    def draft(self, winners: Sequence[Winner], guesses: list[list[float]]) -> list[Outlook]:
        """What may follow each sequence's final tokens, from what [`guess`] found of each entry; nothing without
        masks."""
        found = []
        for winner in winners:
            drafts = self._drafts(winner, guesses[winner.entry]) if winner.masks else []
            found.append(self._outlook(winner, [draft for draft in drafts if draft.depth <= len(winner.masks)]))
        return found

    def _outlook(self, winner: Winner, drafts: list[Draft]) -> Outlook:
        return Outlook(drafts, len(winner.masks), winner.sequence.remaining)

    def _guess(self, logits: torch.Tensor, hidden: torch.Tensor | None, ends: Ends) -> torch.Tensor:
        """`(A, K, 3)`: tokens, their chances, and entropies; logits `(A, K, V)` float32, which change."""
        entropy = token_entropy(logits)
        self.sampler.suppress(logits)
        chances, tokens = logits.softmax(-1).max(-1)
        return torch.stack([tokens, chances, entropy], -1)

    def _drafts(self, winner: Winner, numbers: list[float]) -> list[Draft]:
        """The drafts that an entry's numbers mean."""
        run: list[Draft] = []
        rows = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
        if any(isnan(entropy) for _, _, entropy in rows):
            raise ValueError(
                "The logits of masks are NaN or infinite: the checkpoint is broken, or its dtype overflows."
            )
        for depth, (token, chance, entropy) in enumerate(rows, 1):
            if entropy >= self.entropy_threshold:
                break
            run.append(Draft(int(token), depth - 2, depth, chance))
            if token in self.end_tokens:
                break
        return run
