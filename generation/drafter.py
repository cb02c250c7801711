"""What may follow a sequence: drafts from masks. A mask adapter has a drafter of its own (tree_drafter.py).

`A` sequences, `K` masks of each, `V` vocabulary.
"""

from typing import NamedTuple

import torch

from .rows import Row, SequenceState
from .sampling import TokenSampler, token_entropy

# Chances go to the host beside tokens, in units of this.
UNIT = 2.0**-30
# The chance of a draft of a mask, and of the text, before anything is known.
CHANCE = 0.7


class Outlook(NamedTuple):
    """What may follow a sequence."""

    drafts: list[Row]  # parents first
    foreseen: int  # depths of them that masks drafted
    room: int  # new tokens allowed


class Drafter:
    """Drafts of masks that have no more than their own logits: the likeliest token of each, as far as masks are sure.

    Args:
        sampler: how the AR head will choose.
        end_tokens: tokens that end a sequence.
        draft_threshold: nats: drafts end at the first mask whose H is not below.
    """

    lost = 1  # masks behind a row that draft nothing: the first one stands at the position of the AR row's own token

    def __init__(self, sampler: TokenSampler, end_tokens: frozenset[int], draft_threshold: float):
        self.sampler, self.end_tokens, self.draft_threshold = sampler, end_tokens, draft_threshold

    def guess(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
        before: torch.Tensor,
        offsets: torch.Tensor,
        rows: list[int],
    ) -> torch.Tensor:
        """What masks predict, on the device; also of sequences that are found to be finished.

        Args:
            logits: `(A, K, V)` float32, raw, which change: of the masks that draft what follows; of the last one
                again where an entry has fewer than K.
            hidden: `(A, K, H)`, their last hidden states, where a mask adapter predicts them.
            before: `(A, 2)` int64, the last two tokens.
            offsets: `(A, 1)` int64, new tokens.
            rows: the call's row that each entry is.

        Returns:
            `(A, numbers)` int64, for [`drafts`]: here, of each mask its token (-1 where logits are NaN), whether it is
            sure, and the token's chance.
        """
        entropy = token_entropy(logits)
        self.sampler.suppress(logits)
        chances, tokens = logits.softmax(-1).max(-1)
        tokens, is_sure = tokens.masked_fill(entropy.isnan(), -1), entropy < self.draft_threshold
        return torch.stack([tokens, is_sure, (chances / UNIT).long()], -1).flatten(1)

    def drafts(self, one: SequenceState, masks: int, numbers: list[int]) -> list[Row]:
        """What may follow a sequence's final tokens, parents first, from what [`guess`] found of its `masks` masks."""
        return self._drafts(one, masks, numbers) if masks else []

    def _drafts(self, one: SequenceState, masks: int, numbers: list[int]) -> list[Row]:
        run: list[Row] = []
        found = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))[:masks]
        if any(token < 0 for token, _, _ in found):
            raise ValueError(
                "The logits of masks are NaN or infinite: the checkpoint is broken, or its dtype overflows."
            )
        for depth, (token, is_sure, chance) in enumerate(found, 1):
            if not is_sure:
                break
            run.append(Row(token, depth, depth - 2, chance * UNIT))
            if token in self.end_tokens:
                break
        return run
