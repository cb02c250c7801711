"""What may follow a sequence: drafts from masks, as the model predicts them, and from the text itself.

`A` sequences, `K` masks of each, `B` paths that are followed, `C` children of a draft, `S` tokens of a shortlist, `H`
hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
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

    def draft(self, winners: Sequence[Winner], slots: SlotStates | None) -> list[Outlook]:
        """What may follow each sequence's final tokens.

        Args:
            winners: the sequences that go on.
            slots: the masks of the forward.
        """
        count = max((len(winner.masks) for winner in winners), default=0)
        drafts: list[list[Draft]] = [[] for _ in winners]
        if slots is not None and count:
            device = slots.logits.device
            entries = torch.tensor([winner.entry for winner in winners], device=device)[:, None]
            places = [[min(winner.masks.start + k, winner.masks.stop - 1) for k in range(count)] for winner in winners]
            columns = torch.tensor(places, device=device).clamp(min=0)
            logits = slots.logits[entries, columns]
            hidden = None if slots.hidden is None else slots.hidden[entries, columns]
            drafts = self._from_masks(logits, hidden, winners)
        return [
            self._outlook(winner, [draft for draft in each if draft.depth <= len(winner.masks)])
            for winner, each in zip(winners, drafts, strict=True)
        ]

    def _outlook(self, winner: Winner, drafts: list[Draft]) -> Outlook:
        return Outlook(drafts, len(winner.masks), winner.sequence.remaining)

    def _from_masks(
        self, logits: torch.Tensor, hidden: torch.Tensor | None, winners: Sequence[Winner]
    ) -> list[list[Draft]]:
        logits = logits.float()
        entropy = token_entropy(logits)
        if bool(entropy.isnan().any()):
            raise ValueError(
                "The logits of masks are NaN or infinite: the checkpoint is broken, or its dtype overflows."
            )
        self.sampler.suppress(logits)
        chances, tokens = logits.softmax(-1).max(-1)
        found = []
        for each in torch.stack([tokens, chances, entropy], -1).tolist():
            run: list[Draft] = []
            for depth, (token, chance, its_entropy) in enumerate(each, 1):
                if its_entropy >= self.entropy_threshold:
                    break
                run.append(Draft(int(token), depth - 2, depth, chance))
                if token in self.end_tokens:
                    break
            found.append(run)
        return found


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

    def _from_masks(
        self, logits: torch.Tensor, hidden: torch.Tensor | None, winners: Sequence[Winner]
    ) -> list[list[Draft]]:
        assert hidden is not None
        device = logits.device
        self.sampler.suppress(logits)
        # A draft is one of the likeliest tokens by its mask's own logits: only their rows of the head are read.
        shortlist = logits.topk(min(SHORTLIST, logits.shape[-1] - 1), dim=-1).indices  # (A, K, S)
        # Behind embeddings no token is known: any will do, since it only makes drafts worse.
        before = torch.tensor(
            [[[max(token, 0) for token in one.sequence.tokens[-2:]]] for one in winners], device=device
        )
        if before.shape[-1] < 2:
            before = torch.cat([before, before], -1)
        chances = torch.ones(before.shape[:2], device=device)  # (A, B), of the paths so far
        parents = torch.full(before.shape[:2], -1, device=device)
        sequences = [one.sequence.index for one in winners]
        first = torch.tensor([[one.sequence.new_count] for one in winners], device=device)
        levels, offset = [], 0
        for depth in range(shortlist.shape[1]):
            scores = self._scores(hidden[:, depth], shortlist[:, depth], before)  # (A, B, S)
            tokens, found = self.sampler.draft(scores, shortlist[:, depth], first + depth, sequences, self.children)
            count = tokens.shape[1] * tokens.shape[2]
            ranks = torch.arange(tokens.shape[2], device=device).expand_as(tokens)
            joint = chances[..., None] * found
            kept = (
                joint.flatten(1).topk(min(count, self.children if self.children == 1 else 2 * self.children)).indices
            )
            pick = [each.expand_as(tokens).flatten(1).gather(1, kept) for each in (parents[..., None], tokens, ranks)]
            levels.append(torch.stack([*pick, found.flatten(1).gather(1, kept)], -1))
            followed = kept[:, : 1 if self.children == 1 else PATHS]
            chances = joint.flatten(1).gather(1, followed)
            last = before[..., 1:].expand_as(tokens).flatten(1).gather(1, followed)
            before = torch.stack([last, tokens.flatten(1).gather(1, followed)], -1)
            parents = torch.arange(followed.shape[1], device=device).expand_as(followed) + offset
            offset += kept.shape[1]
        depths = [depth for depth, level in enumerate(levels, 1) for _ in range(level.shape[1])]
        return [self._pruned(rows, depths) for rows in torch.cat(levels, 1).tolist()]

    def _pruned(self, rows: list[list[float]], depths: list[int]) -> list[Draft]:
        """Drafts of `(parent, token, rank, chance)`; nothing follows an end token."""
        drafts: list[Draft] = []
        places = {-1: -1}
        for row, ((parent, token, rank, chance), depth) in enumerate(zip(rows, depths, strict=True)):
            if int(parent) in places:
                drafts.append(Draft(int(token), places[int(parent)], depth, chance, rank > 0))
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
