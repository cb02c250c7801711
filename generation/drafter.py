"""What may follow a sequence: drafts from masks, as the model predicts them, and from the text itself.

`A` sequences, `K` masks of each, `B` paths that are followed, `C` children of a draft, `S` tokens of a shortlist, `H`
hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
from math import isnan
from typing import Any, NamedTuple

import torch

from .lookup import TextLookup
from .planner import DRAFT_COUNTS, Draft, Outlook
from .rules import SlotStates
from .sampling import SHORTLIST, TokenSampler
from .selection import token_entropy
from .window import SequenceState

# Likeliest tokens of a position that become drafts, and likeliest paths of a length that are followed.
CHILDREN, PATHS = 3, 4


class Ends(NamedTuple):
    """Where the steps of `A` sequences end, known to the device alone.

    Attributes:
        masks: `(A, K)` int64, the masks of the forward that draft what follows; where a sequence has fewer than K of
            them, the last one again.
        before: `(A, 2)` int64, the last two tokens.
        offsets: `(A, 1)` int64, new tokens.
        sequences: their places in the call.
    """

    masks: torch.Tensor
    before: torch.Tensor
    offsets: torch.Tensor
    sequences: list[int]


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

    Attributes:
        lost: masks behind a row that draft nothing: the first one stands at the position of the AR row's own token.
    """

    lost = 1

    def __init__(self, sampler: TokenSampler, end_tokens: frozenset[int], entropy_threshold: float):
        self.sampler, self.end_tokens, self.entropy_threshold = sampler, end_tokens, entropy_threshold

    def guess(self, ends: Ends, slots: SlotStates) -> torch.Tensor:
        """What masks predict, as numbers for [`draft`], `(A, numbers)` float32: the host reads them with what else it
        must know of a step, and waits once.

        Args:
            ends: of all sequences, also of those that are found to be finished.
            slots: the masks of the forward.
        """
        entries = torch.arange(len(ends.masks), device=ends.masks.device)[:, None]
        hidden = None if slots.hidden is None else slots.hidden[entries, ends.masks]
        return self._guess(slots.logits[entries, ends.masks].float(), hidden, ends).flatten(1)

    def draft(self, winners: Sequence[Winner], guesses: list[list[float]]) -> list[Outlook]:
        """What may follow each sequence's final tokens.

        Args:
            winners: the sequences that go on.
            guesses: what [`guess`] found, of each entry; empty without masks.
        """
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


class TreeDrafter(Drafter):
    """Drafts of a mask adapter, one after the other: the previous-token head of the adapter knows the drafts before.

    Args:
        sampler, end_tokens: see [`Drafter`].
        model: with a mask adapter.
        children: likeliest tokens of a position that become drafts: 1 for a chain.
        looks_up: whether drafts come from the text, too.
    """

    lost = 0

    def __init__(self, sampler: TokenSampler, end_tokens: frozenset[int], model: Any, children: int, looks_up: bool):
        super().__init__(sampler, end_tokens, float("inf"))
        self.model, self.children, self.looks_up = model, children, looks_up
        self._lookups: dict[int, TextLookup] = {}

    def _outlook(self, winner: Winner, drafts: list[Draft]) -> Outlook:
        one, outlook = winner.sequence, super()._outlook(winner, drafts)
        if not self.looks_up:
            return outlook
        lookup = self._lookups.setdefault(one.index, TextLookup())
        parent, drafts = -1, list(drafts)
        first = [draft.token for draft in drafts[:1]]
        for depth, token in enumerate(lookup.drafts(one.tokens, first, DRAFT_COUNTS[-1]), 1):
            same = [place for place, draft in enumerate(drafts) if draft.parent == parent and draft.token == token]
            if not same:
                is_sibling = any(draft.parent == parent for draft in drafts)
                drafts.append(Draft(token, parent, depth, None, is_sibling))
                same = [len(drafts) - 1]
            if token in self.end_tokens:
                break
            parent = same[0]
        return outlook._replace(drafts=drafts)

    def _guess(self, logits: torch.Tensor, hidden: torch.Tensor | None, ends: Ends) -> torch.Tensor:
        """`(A, drafts, 5)`: parents, tokens, ranks, chances, depths."""
        assert hidden is not None
        device = logits.device
        self.sampler.suppress(logits)
        # A draft is one of the likeliest tokens by its mask's own logits: only their rows of the head are read.
        shortlist = logits.topk(min(SHORTLIST, logits.shape[-1] - 1), dim=-1).indices  # (A, K, S)
        before = ends.before[:, None]  # (A, B, 2)
        chances = torch.ones(before.shape[:2], device=device)  # (A, B), of the paths so far
        parents = torch.full(before.shape[:2], -1, device=device)
        levels, offset = [], 0
        for depth in range(shortlist.shape[1]):
            scores = self._scores(hidden[:, depth], shortlist[:, depth], before)  # (A, B, S)
            tokens, found = self.sampler.draft(
                scores, shortlist[:, depth], ends.offsets + depth, ends.sequences, self.children
            )
            count = tokens.shape[1] * tokens.shape[2]
            ranks = torch.arange(tokens.shape[2], device=device).expand_as(tokens)
            joint = chances[..., None] * found
            kept = (
                joint.flatten(1).topk(min(count, self.children if self.children == 1 else 2 * self.children)).indices
            )
            pick = [each.expand_as(tokens).flatten(1).gather(1, kept) for each in (parents[..., None], tokens, ranks)]
            level = torch.stack([*pick, found.flatten(1).gather(1, kept)], -1)
            levels.append(torch.nn.functional.pad(level, (0, 1), value=depth + 1))
            followed = kept[:, : 1 if self.children == 1 else PATHS]
            chances = joint.flatten(1).gather(1, followed)
            last = before[..., 1:].expand_as(tokens).flatten(1).gather(1, followed)
            before = torch.stack([last, tokens.flatten(1).gather(1, followed)], -1)
            parents = torch.arange(followed.shape[1], device=device).expand_as(followed) + offset
            offset += kept.shape[1]
        return torch.cat(levels, 1)

    def _drafts(self, winner: Winner, numbers: list[float]) -> list[Draft]:
        """The drafts that an entry's numbers mean; nothing follows an end token."""
        drafts: list[Draft] = []
        places = {-1: -1}
        columns = [numbers[column::5] for column in range(5)]
        for row, (parent, token, rank, chance, depth) in enumerate(zip(*columns, strict=True)):
            if int(parent) in places:
                drafts.append(Draft(int(token), places[int(parent)], int(depth), chance, rank > 0))
                if int(token) not in self.end_tokens:
                    places[row] = len(drafts) - 1
        return drafts

    def _scores(self, hidden: torch.Tensor, shortlist: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What each path's next draft is chosen from, `(A, B, S)` float32.

        Args:
            hidden: `(A, H)`, last hidden states of masks.
            shortlist: `(A, S)` int64, the tokens to choose from.
            before: `(A, B, 2)` int64, the two tokens before.
        """
        states = self.model.draft_hidden(hidden[:, None].expand(-1, before.shape[1], -1), before)
        head = self.model.get_output_embeddings()
        is_plain = type(head) is torch.nn.Linear and head.bias is None
        table = head.weight if is_plain else getattr(head, "rows", None)  # of packed layers: `PackedLinear.rows`
        if table is not None and not head._forward_hooks:
            return torch.einsum("ash,abh->abs", table[shortlist].float(), states.float())
        return head(states).gather(2, shortlist[:, None].expand(-1, before.shape[1], -1)).float()
