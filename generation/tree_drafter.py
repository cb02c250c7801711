"""Drafts of a mask adapter: from its masks, from the root's own state where there are none, and from the text.

`A` sequences, `K` masks of each, `B` paths that are followed, `C` children of a draft, `S` tokens of a shortlist, `H`
hidden size, `V` vocabulary.
"""

from typing import Any

import torch

from .drafter import CERTAIN, MOST_DRAFTS, UNIT, Drafter
from .lookup import TextLookup
from .rows import Row, SequenceState
from .sampling import SHORTLIST, TokenSampler

# Where drafts branch: likeliest tokens of a position that become drafts, and likeliest paths that are followed.
CHILDREN, PATHS = 3, 4


class TreeDrafter(Drafter):
    """Drafts the masks of an adapter one after the other: its previous-token head reads the drafts before.

    Args:
        sampler, end_tokens: see [`Drafter`].
        model: with a mask adapter.
        has_branches: a position has several drafts, of masks, of the text and of n-grams; otherwise one.
        ngrams: drafts what often followed, see [`NGramDrafter`].
        frequent: `(S,)` int64, tokens that the root's state drafts among, and what scores them; `None`: no drafts.
    """

    skipped_masks = 0

    def __init__(
        self,
        sampler: TokenSampler,
        end_tokens: frozenset[int],
        model: Any,
        has_branches: bool,
        ngrams: Any = None,
        frequent: tuple[torch.Tensor, Any] | None = None,
    ):
        super().__init__(sampler, end_tokens, float("inf"))
        self.model, self.has_branches, self.children = model, has_branches, CHILDREN if has_branches else 1
        self.ngrams, self.frequent, self.reads_root = ngrams, frequent, frequent is not None
        self._lookups: dict[int, TextLookup] = {}

    def guess(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
        before: torch.Tensor,
        offsets: torch.Tensor,
        rows: list[int],
        root: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See [`Drafter.guess`]. The numbers are a draft's parent, token, rank, chance and depth, 0 of the root's."""
        assert hidden is not None
        self.sampler.suppress(logits)
        # Drafts are among the likeliest tokens of the mask's own logits: only their rows of the head are read.
        shortlist = logits.topk(min(SHORTLIST, logits.shape[-1] - 1), dim=-1).indices  # (A, K, S)
        before, device = before[:, None], logits.device  # (A, B, 2)
        chances = torch.ones(before.shape[:2], device=device)  # (A, B), of the paths so far
        parents = torch.full(before.shape[:2], -1, device=device)
        levels, first = [], 0
        if root is not None and self.frequent is not None:
            frequent, head = self.frequent
            scores = head(self.model.root_hidden(root[:, None], before)).float()
            tokens, found = self.sampler.draft(scores, frequent.expand(len(root), -1), offsets, rows, self.children)
            ranks = torch.arange(tokens.shape[2], device=device).expand_as(tokens)
            columns = parents[..., None], tokens, ranks, (found.float() / UNIT).long(), ranks.new_zeros(1)
            levels.append(torch.stack([each.expand_as(tokens)[:, 0] for each in columns], -1))
        for depth in range(shortlist.shape[1]):
            scores = self._scores(hidden[:, depth], shortlist[:, depth], before)  # (A, B, S)
            tokens, found = self.sampler.draft(scores, shortlist[:, depth], offsets + depth, rows, self.children)
            ranks = torch.arange(tokens.shape[2], device=device).expand_as(tokens)
            joint = chances[..., None] * found
            count = min(joint.shape[1] * joint.shape[2], 2 * self.children if self.has_branches else 1)
            kept = joint.flatten(1).topk(count).indices
            columns = parents[..., None], tokens, ranks, (found.float() / UNIT).long(), ranks.new_tensor(depth + 1)
            levels.append(torch.stack([each.expand_as(tokens).flatten(1).gather(1, kept) for each in columns], -1))
            followed = kept[:, : PATHS if self.has_branches else 1]
            chances = joint.flatten(1).gather(1, followed)
            last = before[..., 1:].expand_as(tokens).flatten(1).gather(1, followed)
            before = torch.stack([last, tokens.flatten(1).gather(1, followed)], -1)
            parents = torch.arange(followed.shape[1], device=device).expand_as(followed) + first
            first += kept.shape[1]
        return torch.cat(levels, 1).flatten(1)

    def _drafts(self, sequence: SequenceState, masks: int, numbers: list[int]) -> list[Row]:
        """Drafts of masks, or where none drafted, of the root's state; and of text. Nothing follows an end token."""
        drafts: list[Row] = []
        places = {-1: -1}
        found = (numbers[place : place + 5] for place in range(0, len(numbers), 5))
        own = (each for each in found if (each[-1] > 0) == (masks > 0))
        for number, (parent, token, rank, chance, depth) in enumerate(own):
            if parent in places and depth <= masks:
                drafts.append(Row(token, max(1, depth), places[parent], min(chance * UNIT, CERTAIN - UNIT), rank > 0))
                if token not in self.end_tokens:
                    places[number] = len(drafts) - 1
        if drafts and not masks and not self.sampler.do_sample:  # whose noise says more than chances
            drafts = self.ngrams.mixed(drafts, sequence.tokens)
        if self.has_branches:
            lookup = self._lookups.setdefault(sequence.index, TextLookup())
            known = [draft.token for draft in drafts[:1] if draft.token is not None]
            self._add_path(drafts, [(token, None) for token in lookup.drafts(sequence.tokens, known, MOST_DRAFTS)])
            if self.ngrams is not None:
                self.ngrams.extend(drafts, sequence.tokens, self.end_tokens)
        return drafts

    def _scores(self, hidden: torch.Tensor, shortlist: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The scores of each path's next draft, `(A, B, S)` float32.

        Args:
            hidden: `(A, H)`, last hidden states of masks.
            shortlist: `(A, S)` int64, the tokens to choose from.
            before: `(A, B, 2)` int64, the two tokens before.
        """
        states = self.model.draft_hidden(hidden[:, None].expand(-1, before.shape[1], -1), before)
        head = self.model.get_output_embeddings()
        if (table := head_rows(head)) is not None:
            return states.float() @ table[shortlist].float().mT
        return head(states).gather(2, shortlist[:, None].expand(-1, before.shape[1], -1)).float()


def head_rows(head: Any) -> torch.Tensor | None:
    """The weights of a head, `(V, H)`, where single rows can be read: quantizers have kinds of their own."""
    if head._forward_hooks or getattr(head, "bias", None) is not None:
        return None
    is_plain = type(head) is torch.nn.Linear and type(head.weight) is torch.nn.Parameter
    return head.weight if is_plain else getattr(head, "rows", None)  # of packed layers: `PackedLinear.rows`
