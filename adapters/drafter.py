"""Drafts of a mask adapter, from its masks and from the text itself.

`A` sequences, `K` masks of each, `B` paths that are followed, `C` children of a draft, `S` tokens of a shortlist, `H`
hidden size, `V` vocabulary.
"""

from typing import Any

import torch

from ..generation.drafter import Drafter, Ends, Winner
from ..generation.planner import DRAFT_COUNTS, Draft, Outlook
from ..generation.sampling import SHORTLIST, TokenSampler
from .lookup import TextLookup

# Where drafts branch: likeliest tokens of a position that become drafts, and likeliest paths that are followed.
CHILDREN, PATHS = 3, 4


class TreeDrafter(Drafter):
    """Drafts of a mask adapter, one after the other: the previous-token head of the adapter knows the drafts before.

    Args:
        sampler, end_tokens: see [`Drafter`].
        model: with a mask adapter.
        has_branches: several of the likeliest tokens of a position become drafts, and what the text says, too.
    """

    lost = 0

    def __init__(self, sampler: TokenSampler, end_tokens: frozenset[int], model: Any, has_branches: bool):
        super().__init__(sampler, end_tokens, float("inf"))
        self.model, self.has_branches, self.children = model, has_branches, CHILDREN if has_branches else 1
        self._lookups: dict[int, TextLookup] = {}

    def _outlook(self, winner: Winner, drafts: list[Draft]) -> Outlook:
        one, outlook = winner.sequence, super()._outlook(winner, drafts)
        if not self.has_branches:
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
            kept = joint.flatten(1).topk(min(count, 2 * self.children if self.has_branches else 1)).indices
            pick = [each.expand_as(tokens).flatten(1).gather(1, kept) for each in (parents[..., None], tokens, ranks)]
            level = torch.stack([*pick, found.flatten(1).gather(1, kept)], -1)
            levels.append(torch.nn.functional.pad(level, (0, 1), value=depth + 1))
            followed = kept[:, : PATHS if self.has_branches else 1]
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
        # Quantizers put tensors of their own kinds in its place, of which no rows can be read.
        is_plain = type(head) is torch.nn.Linear and head.bias is None and type(head.weight) is torch.nn.Parameter
        table = head.weight if is_plain else getattr(head, "rows", None)  # of packed layers: `PackedLinear.rows`
        if table is not None and not head._forward_hooks:
            return states.float() @ table[shortlist].float().mT
        return head(states).gather(2, shortlist[:, None].expand(-1, before.shape[1], -1)).float()
