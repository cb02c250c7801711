"""Drafts: tokens that may follow a sequence, from masks and from logits processors that know what comes next. A mask
adapter has a drafter of its own (tree_drafter.py).

`A` sequences, `K` masks of each, `V` vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .rows import Row, SequenceState
from .sampling import TokenSampler, token_entropy

# Chances travel to the host as integers, in this unit.
UNIT = 2.0**-30
# The chance of a draft that is the only token a constraint allows. No mask's draft has it.
CERTAIN = 1.0
# What a draft's chance is taken for before anything is known.
CHANCE = 0.7
# Drafts of a sequence that a step checks at most, and drafts without masks.
MOST_DRAFTS = 12


class Outlook(NamedTuple):
    """What may follow a sequence."""

    drafts: list[Row]  # parents first
    foreseen: int  # depths down to which masks drafted
    room: int  # new tokens allowed


class Drafter:
    """Drafts the likeliest token of each mask by the model's own logits, up to the first mask that is unsure.

    Args:
        sampler: of the AR head.
        end_tokens: tokens that end a sequence.
        draft_threshold: nats; drafts end at the first mask whose H is not below it.
    """

    # Masks behind a row that draft nothing: the first one stands at the position that the row itself predicts.
    skipped_masks = 1
    has_branches = False
    reads_root = False  # it drafts from the root's state, too

    def __init__(self, sampler: TokenSampler, end_tokens: frozenset[int], draft_threshold: float):
        self.sampler, self.end_tokens, self.draft_threshold = sampler, end_tokens, draft_threshold
        # Processors that know what answers may be and how they go on: `grammar.JSONConstraint`.
        self.constraints: list[Any] = [each for each in sampler.processors if hasattr(each, "ahead")]

    def guess(
        self,
        logits: torch.Tensor | None,
        hidden: torch.Tensor | None,
        before: torch.Tensor,
        offsets: torch.Tensor,
        rows: list[int],
        root: torch.Tensor | None = None,
        has_masks: bool = False,
    ) -> list[torch.Tensor]:
        """Predicts what may follow, on the device; also for sequences that turn out to be finished.

        Args:
            logits: `(A, K, V)` float32, raw, of the drafting masks, if there are any; those of the last one repeat
                where an entry has fewer than K. They are overwritten.
            hidden: `(A, K, H)`, last hidden states of these masks, where a mask adapter predicts them; `(A, K, 2H)`
                with inner states behind.
            before: `(A, 2)` int64, the last two tokens.
            offsets: `(A, 1)` int64, new tokens so far.
            rows: each entry's place in the call.
            root: `(A, 1, H)` or `(A, 1, 2H)`, of the rows that chose the last token, if the drafter reads them.
            has_masks: each row that may be the last of an entry's path has masks behind.

        Returns:
            What [`drafts`] reads, each `(A, …)` int64 or bool: here each mask's token (-1 where logits are NaN),
            whether the mask is sure, and the token's chance.
        """
        assert logits is not None
        entropy = token_entropy(logits)
        self.sampler.suppress(logits)
        chances, tokens = logits.softmax(-1).max(-1)
        tokens, is_sure = tokens.masked_fill(entropy.isnan(), -1), entropy < self.draft_threshold
        return [tokens, is_sure, (chances / UNIT).long()]

    def drafts(self, sequence: SequenceState, masks: int, guesses: list[list[int]]) -> list[Row]:
        """The drafts behind a sequence's final tokens, parents first: those of its `masks` masks, by its part of what
        [`guess`] found, and those of constraints."""
        drafts = self._drafts(sequence, masks, guesses)
        for constraint in self.constraints:
            drafts = self._constrained(drafts, sequence.new_tokens, constraint)
        return drafts

    def _drafts(self, sequence: SequenceState, masks: int, guesses: list[list[int]]) -> list[Row]:
        run: list[Row] = []
        triples = list(zip(*guesses, strict=True))[:masks]
        if any(token < 0 for token, _, _ in triples):
            raise ValueError(
                "The logits of masks are NaN or infinite: the checkpoint is broken, or its dtype overflows."
            )
        for depth, (token, is_sure, chance) in enumerate(triples, 1):
            if not is_sure:
                break
            run.append(Row(token, depth, depth - 2, min(chance * UNIT, CERTAIN - UNIT)))
            if token in self.end_tokens:
                break
        return run

    def _constrained(self, drafts: Sequence[Row], answer: Sequence[int | None], constraint: Any) -> list[Row]:
        """The drafts that a constraint allows, and the tokens that it expects behind the likeliest of them."""
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
        """Adds a run of tokens, with their chances, behind a parent, where they are not drafted already."""
        first = 1 + (drafts[parent].position if parent >= 0 else 0)
        for depth, (token, chance) in enumerate(expected, first):
            siblings = [place for place, draft in enumerate(drafts) if draft.parent == parent]
            same = [place for place in siblings if drafts[place].token == token]
            if not same:
                drafts.append(Row(token, depth, parent, chance, bool(siblings)))
            if token in self.end_tokens:
                break
            parent = same[0] if same else len(drafts) - 1
