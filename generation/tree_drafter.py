"""Drafts of a mask adapter: from its masks and the root's own state, from the latter alone where there are no masks,
and from the text.

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
        has_branches: a position has several drafts, of masks and of the text; otherwise one.
        frequent: `(S,)` int64, tokens that the root's state drafts among where there are no masks, and what scores
            them; `None`: no drafts.
    """

    skipped_masks = 0

    def __init__(
        self,
        sampler: TokenSampler,
        end_tokens: frozenset[int],
        model: Any,
        has_branches: bool,
        frequent: tuple[torch.Tensor, Any] | None = None,
    ):
        super().__init__(sampler, end_tokens, float("inf"))
        self.model, self.has_branches = model, has_branches
        self.config = model.config.get_text_config(decoder=True)
        most = self.config.vocab_size - 1
        self.children: int = min(CHILDREN, most) if has_branches else 1
        self.paths = PATHS if has_branches else 1
        self.reads_root = model.drafts_from_root
        self.frequent = frequent if self.reads_root else None
        self._lookups: dict[int, TextLookup] = {}

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
        """See [`Drafter.guess`]. For each depth of masks: which pairs of a path and a child became drafts, as path *
        children + child; their tokens; their chances. Last come the root's, where not all have masks: tokens and
        chances."""
        guesses, paths = [], before[:, None]  # (A, B, 2), the last two tokens of each
        is_read = root is not None and (logits is not None or self.frequent is not None)
        of_root = self.model.root_hidden(root, paths) if is_read else None
        if logits is not None:
            assert hidden is not None
            self.sampler.suppress(logits)
            # Drafts are among the likeliest tokens of the mask's own logits: only their rows of the head are read.
            shortlist = logits.topk(min(SHORTLIST, logits.shape[-1] - 1), dim=-1).indices  # (A, K, S)
            chances = torch.ones(paths.shape[:2], device=logits.device)  # (A, B)
            for depth in range(shortlist.shape[1]):
                # Of the masks behind the first, the root's state knows nothing.
                of_first = None if depth else of_root
                scores = self._scores(hidden[:, depth], shortlist[:, depth], paths, of_first)  # (A, B, S)
                tokens, found = self.sampler.draft(scores, shortlist[:, depth], offsets + depth, rows, self.children)
                joint = (chances[..., None] * found).flatten(1)
                most = 2 * self.children if self.has_branches else 1  # drafts of one depth
                kept = joint.topk(min(joint.shape[1], most)).indices
                own = tokens.flatten(1).gather(1, kept)
                guesses += [kept, own, _units(found.flatten(1).gather(1, kept))]
                followed = kept[:, : self.paths]
                chances = joint.gather(1, followed)
                last = paths[..., 1].gather(1, followed // self.children)
                paths = torch.stack([last, own[:, : self.paths]], -1)
        if of_root is not None and self.frequent is not None and not has_masks:
            frequent, head = self.frequent
            scores = scaled(head(of_root), self.config)
            tokens, found = self.sampler.draft(scores, frequent.expand(len(scores), -1), offsets, rows, self.children)
            guesses += [tokens[:, 0], _units(found[:, 0])]
        return guesses

    def _drafts(self, sequence: SequenceState, masks: int, guesses: list[list[int]]) -> list[Row]:
        """Drafts of masks, or where none drafted, of the root's state; and of text. Nothing follows an end token."""
        drafts: list[Row] = []
        parents: list[int | None] = [-1]  # of the paths that are followed; `None` behind an end token
        for depth in range(1, masks + 1):
            behind = []
            for place, token, chance in zip(*guesses[3 * depth - 3 : 3 * depth], strict=True):
                parent, rank = parents[place // self.children], place % self.children
                is_over = parent is None or token in self.end_tokens
                behind.append(None if is_over else len(drafts))
                if parent is not None:
                    drafts.append(Row(token, depth, parent, min(chance * UNIT, CERTAIN - UNIT), rank > 0))
            parents = behind[: self.paths]
        if not masks and self.frequent is not None:
            for rank, (token, chance) in enumerate(zip(*guesses[-2:], strict=True)):
                drafts.append(Row(token, 1, -1, min(chance * UNIT, CERTAIN - UNIT), rank > 0))
        if self.has_branches:
            lookup = self._lookups.setdefault(sequence.index, TextLookup())
            known = [draft.token for draft in drafts[:1] if draft.token is not None]
            self._add_path(drafts, [(token, None) for token in lookup.drafts(sequence.tokens, known, MOST_DRAFTS)])
        return drafts

    def _scores(
        self, hidden: torch.Tensor, shortlist: torch.Tensor, before: torch.Tensor, of_root: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores of each path's next draft, `(A, B, S)` float32.

        Args:
            hidden: `(A, H)`, last hidden states of masks.
            shortlist: `(A, S)` int64, the tokens to choose from.
            before: `(A, B, 2)` int64, the two tokens before.
            of_root: `(A, 1, H)`, what the root head makes of the rows before, where these are the first masks.
        """
        states = self.model.draft_hidden(hidden[:, None].expand(-1, before.shape[1], -1), before, of_root)
        head = self.model.get_output_embeddings()
        if (table := head_rows(head)) is None:
            return scaled(head(states).gather(2, shortlist[:, None].expand(-1, before.shape[1], -1)), self.config)
        scores = states.float() @ table[shortlist].float().mT
        return scaled(scores if head.bias is None else scores + head.bias[shortlist][:, None].float(), self.config)


def scaled(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """What a family makes of its head's output, in float32; `config` is that of the text."""
    logits = logits.float()
    scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    logits = logits if scale == 1 else logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * (logits / cap).tanh()


def _units(chances: torch.Tensor) -> torch.Tensor:
    """Chances as integers; 0 where a head gives NaN, since what it drafts changes no text."""
    return (chances.nan_to_num() / UNIT).long()


def head_rows(head: Any) -> torch.Tensor | None:
    """The weights of a head, `(V, H)`, where single rows can be read: quantizers have kinds of their own."""
    if head._forward_hooks:
        return None
    is_plain = type(head) is torch.nn.Linear and type(head.weight) is torch.nn.Parameter
    return head.weight if is_plain else getattr(head, "rows", None)  # of packed layers: `PackedLinear.rows`
