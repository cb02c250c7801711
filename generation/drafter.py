"""What may follow a sequence: drafts from masks, and of logits processors that know what comes. A mask adapter has a
drafter of its own (tree_drafter.py).

`A` sequences, `K` masks of each, `V` vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .rows import Row, SequenceState
from .sampling import TokenSampler, token_entropy

# Chances go to the host beside tokens, in units of this.
UNIT = 2.0**-30
# The chance of what a constraint leaves no choice about. No mask is as sure.
CERTAIN = 1.0
# The chance of a draft of a mask, and of the text, before anything is known.
CHANCE = 0.7
# Drafts of a sequence that a step checks at most, and drafts without masks.
MOST_DRAFTS = 12


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

    # Masks behind a row that draft nothing: the first one stands at the position that the row itself predicts.
    skipped_masks = 1
    has_branches = False

    def __init__(self, sampler: TokenSampler, end_tokens: frozenset[int], draft_threshold: float):
        self.sampler, self.end_tokens, self.draft_threshold = sampler, end_tokens, draft_threshold
        # Processors that know of whole answers what is allowed, and what comes: `grammar.JSONConstraint`.
        self.constraints: list[Any] = [each for each in sampler.processors if hasattr(each, "ahead")]

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
        """What may follow a sequence's final tokens, parents first: what [`guess`] found of its `masks` masks, and
        what constraints expect."""
        drafts = self._drafts(one, masks, numbers if masks else [])
        for constraint in self.constraints:
            drafts = self._constrained(drafts, one.new_tokens, constraint)
        return drafts

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
            run.append(Row(token, depth, depth - 2, min(chance * UNIT, CERTAIN - UNIT)))
            if token in self.end_tokens:
                break
        return run

    def _constrained(self, drafts: Sequence[Row], answer: Sequence[int | None], constraint: Any) -> list[Row]:
        """Drafts that a constraint allows, and what it expects behind the answer and its likeliest continuation."""
        kept: list[Row] = []
        found = {-1: (-1, [*answer])}  # of each draft that stays, its new place and the answer up to it
        for place, draft in enumerate(drafts):
            parent, text = found.get(draft.parent, (-1, None))
            if text is not None and constraint.allows(text := [*text, draft.token]):
                found[place] = len(kept), text
                is_sibling = any(other.parent == parent for other in kept)
                kept.append(draft._replace(parent=parent, is_sibling=is_sibling))
        line = -1  # the draft at the end of the likeliest continuation
        while True:
            if expected := constraint.ahead(answer, MOST_DRAFTS):
                del kept[len(kept) if self.has_branches else line + 1 :]
                self._add_path(kept, expected, line)
            children = [n for n, each in enumerate(kept) if each.parent == line and each.chance not in (None, CERTAIN)]
            if not children or kept[children[0]].is_sibling:
                return kept
            line = children[0]
            answer = [*answer, kept[line].token]

    def _add_path(self, drafts: list[Row], expected: Sequence[tuple[int, float | None]], parent: int = -1) -> None:
        """Adds tokens with their chances as drafts one behind the other, where they are not there yet."""
        first = 1 + (drafts[parent].position if parent >= 0 else 0)
        for depth, (token, chance) in enumerate(expected, first):
            siblings = [place for place, draft in enumerate(drafts) if draft.parent == parent]
            same = [place for place in siblings if drafts[place].token == token]
            if not same:
                drafts.append(Row(token, depth, parent, chance, bool(siblings)))
            if token in self.end_tokens:
                break
            parent = same[0] if same else len(drafts) - 1
