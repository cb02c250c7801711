"""What may follow a sequence: the sources of drafts, in the order in which they are asked.

    masks        the model's own (WeDLM), or those of a mask adapter
    root         a mask adapter's head on the state of the last row, where no masks drafted
    text         what followed where the last tokens stood before
    constraint   what a logits processor expects, such as `grammar.JSONConstraint`

Each adds its drafts to the [`Tree`] of the sequence. Another one takes a class with `guess` and `add`, and its line in
[`make_drafter`].

`A` sequences, `K` masks of each, `D` drafts of a depth, `B` paths that are followed, `C` children of a draft, `S`
tokens of a shortlist, `H` hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

import torch

from .forward import DecodedModel
from .lookup import TextLookup
from .rows import CERTAIN, MOST_DRAFTS, OWN_MASKS, MaskRun, SequenceState, Tree
from .sampling import SHORTLIST, TokenSampler

# Where drafts branch: likeliest tokens of a position that become drafts, and likeliest paths that are followed.
CHILDREN, PATHS = 3, 4


class Seen(NamedTuple):
    """What a forward shows of the end of each sequence's accepted path, on the device; also of sequences that turn out
    to be finished."""

    before: torch.Tensor  # `(A, 2)` int64, the last two tokens
    offsets: torch.Tensor  # `(A, 1)` int64, new tokens so far
    sequences: list[int]  # each entry's place in the call
    # `(A, K, V)` float32, raw, of the drafting masks behind the path, if there are any; those of the last one repeat
    # where an entry has fewer than K. They are overwritten.
    logits: torch.Tensor | None
    hidden: torch.Tensor | None  # `(A, K, H)`, last hidden states of these masks, where a mask adapter predicts them
    root: torch.Tensor | None  # `(A, 1, H)`, what the root head makes of the row that chose the last token
    all_masked: bool  # whichever path is accepted has masks behind


class Source(Protocol):
    """Something that knows what may follow."""

    def guess(self, seen: Seen) -> Any:
        """What it has to know of a forward: a NamedTuple of tensors `(A, …)`, or such ones nested, or `None`."""

    def add(self, tree: Tree, sequence: SequenceState, masks: int, guess: Any) -> None:
        """Adds drafts to those of the sources before.

        Args:
            tree: of the sequence, whose last token is the root.
            sequence: as it is now.
            masks: how many masks drafted behind its path.
            guess: the sequence's part of what [`guess`] found, with lists in the place of tensors.
        """


class Ranked(NamedTuple):
    """The likeliest tokens of positions, the first one most likely."""

    tokens: torch.Tensor  # `(A, K, C)` int64
    chances: torch.Tensor  # `(A, K, C)` float32


class OwnMasks:
    """Masks that the model itself was trained to fill: each predicts its position, whatever is drafted before it."""

    def __init__(self, sampler: TokenSampler, children: int):
        self.sampler, self.children = sampler, children

    def guess(self, seen: Seen) -> Ranked | None:
        """See [`Source`]."""
        if (logits := seen.logits) is None:
            return None
        self.sampler.suppress(logits)
        count, depth, size = logits.shape
        scores, shortlist = logits.topk(min(SHORTLIST, size - 1))  # (A, K, S)
        share = (scores.logsumexp(-1) - logits.logsumexp(-1)).exp()
        offsets = (seen.offsets + torch.arange(depth, device=logits.device)).view(-1, 1)
        homes = [place for place in seen.sequences for _ in range(depth)]
        tokens, chances = self.sampler.draft(
            scores.flatten(0, 1)[:, None], shortlist.flatten(0, 1), offsets, homes, self.children
        )
        return Ranked(tokens.view(count, depth, -1), chances.view(count, depth, -1) * share[..., None])

    def add(self, tree: Tree, sequence: SequenceState, masks: int, guess: Any) -> None:
        """Adds the likeliest paths, since a path's chance is the product of its drafts'."""
        ranked = [] if guess is None else [list(zip(*each, strict=True)) for each in zip(*guess, strict=True)][:masks]
        if not ranked:
            return
        most = len(tree) + masks + MOST_DRAFTS
        heap = [(-ranked[0][0][1], 0, 0, -1, 1.0)]  # reach, depth, rank, parent and the parent's reach
        while heap and len(tree) < most:
            reach, depth, rank, parent, before = heappop(heap)
            token, chance = ranked[depth][rank]
            place = tree.add(token, parent, _likely(chance))
            if rank + 1 < len(ranked[depth]):
                heappush(heap, (-before * ranked[depth][rank + 1][1], depth, rank + 1, parent, before))
            if place is not None and depth + 1 < len(ranked):
                heappush(heap, (reach * ranked[depth + 1][0][1], depth + 1, 0, place, -reach))


class Grown(NamedTuple):
    """The drafts of one depth."""

    parents: torch.Tensor  # `(A, D)` int64, which of the drafts of the depth before
    tokens: torch.Tensor  # `(A, D)` int64
    chances: torch.Tensor  # `(A, D)` float32


class AdapterMasks:
    """Masks of a mask adapter, one after the other: its previous-token head reads the drafts before."""

    def __init__(self, sampler: TokenSampler, model: DecodedModel, children: int, paths: int):
        self.sampler, self.model, self.children, self.paths = sampler, model, children, paths
        self.config = model.config.get_text_config(decoder=True)

    def guess(self, seen: Seen) -> list[Grown] | None:
        """See [`Source`]."""
        if seen.logits is None:
            return None
        assert seen.hidden is not None
        self.sampler.suppress(seen.logits)
        # Drafts are among the likeliest tokens of the mask's own logits: only their rows of the head are read.
        shortlist = seen.logits.topk(min(SHORTLIST, seen.logits.shape[-1] - 1), dim=-1).indices  # (A, K, S)
        found, paths = [], seen.before[:, None]  # (A, B, 2), the last two tokens of each
        reaches = torch.ones(paths.shape[:2], device=seen.logits.device)  # (A, B)
        for depth in range(shortlist.shape[1]):
            # Of the masks behind the first, the root's state knows nothing.
            of_root = None if depth else seen.root
            scores = self._scores(seen.hidden[:, depth], shortlist[:, depth], paths, of_root)  # (A, B, S)
            offsets = seen.offsets + depth
            tokens, chances = self.sampler.draft(scores, shortlist[:, depth], offsets, seen.sequences, self.children)
            joint = (reaches[..., None] * chances).flatten(1)
            most = 2 * self.children if self.paths > 1 else 1  # drafts of one depth
            kept = joint.topk(min(joint.shape[1], most)).indices
            own = tokens.flatten(1).gather(1, kept)
            found.append(Grown(kept // self.children, own, chances.flatten(1).gather(1, kept)))
            followed = kept[:, : self.paths]
            reaches = joint.gather(1, followed)
            last = paths[..., 1].gather(1, followed // self.children)
            paths = torch.stack([last, own[:, : self.paths]], -1)
        return found

    def add(self, tree: Tree, sequence: SequenceState, masks: int, guess: Any) -> None:
        """Adds the drafts of each depth behind those of the depth before."""
        places: list[int | None] = [-1]
        for grown in (guess or ())[:masks]:
            drafts = zip(grown.parents, grown.tokens, grown.chances, strict=True)
            places = [tree.add(token, places[parent], _likely(chance)) for parent, token, chance in drafts]

    def _scores(
        self, hidden: torch.Tensor, shortlist: torch.Tensor, before: torch.Tensor, of_root: torch.Tensor | None
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


class RootState:
    """The state of the last row, where no masks drafted: it knows something of the token behind the next.

    Args:
        tokens: `(S,)` int64, those that it drafts among.
        head: what scores them, from a state.
    """

    def __init__(self, sampler: TokenSampler, config: Any, tokens: torch.Tensor, head: Any, children: int):
        self.sampler, self.tokens, self.head, self.children = sampler, tokens, head, children
        self.config = config.get_text_config(decoder=True)

    def guess(self, seen: Seen) -> Ranked | None:
        """See [`Source`]."""
        if seen.root is None or seen.all_masked:
            return None
        scores, tokens = scaled(self.head(seen.root), self.config), self.tokens.expand(len(seen.root), -1)
        return Ranked(*self.sampler.draft(scores, tokens, seen.offsets, seen.sequences, self.children))

    def add(self, tree: Tree, sequence: SequenceState, masks: int, guess: Any) -> None:
        """Adds drafts of the next token."""
        if not masks and guess is not None:
            for token, chance in zip(*guess.tokens, *guess.chances, strict=True):
                tree.add(token, chance=_likely(chance))


class Text:
    """What the text itself had before, see [`TextLookup`]."""

    def __init__(self) -> None:
        self._lookups: dict[int, TextLookup] = {}

    def guess(self, seen: Seen) -> None:
        """Nothing."""

    def add(self, tree: Tree, sequence: SequenceState, masks: int, guess: Any) -> None:
        """Adds one path, whose chances nobody knows."""
        lookup = self._lookups.setdefault(sequence.index, TextLookup())
        known, place = [tree[place].token for place in tree.likeliest(-1)[:1]], -1
        for token in lookup.drafts(sequence.tokens, known, MOST_DRAFTS):
            if (added := tree.add(token, place)) is None:
                break
            place = added


class Constraint:
    """A processor that knows what answers may be and how they go on. Others' drafts that it forbids never get into the
    tree (see [`Drafter`])."""

    def __init__(self, processor: Any, has_branches: bool):
        self.processor, self.has_branches = processor, has_branches

    def guess(self, seen: Seen) -> None:
        """Nothing."""

    def add(self, tree: Tree, sequence: SequenceState, masks: int, guess: Any) -> None:
        """Adds the tokens that it expects, behind each draft of the likeliest continuation. Where drafts may not
        branch, they take the place of what stood there."""
        answer, line = list(sequence.new_tokens), -1  # the draft at the end of the likeliest continuation
        while True:
            if expected := self.processor.ahead(answer, MOST_DRAFTS):
                place: int | None = line
                if not self.has_branches:
                    tree.cut(line + 1)
                for token, chance in expected:
                    place = tree.add(token, place, chance)
            children = [place for place in tree.children(line) if tree[place].chance not in (None, CERTAIN)]
            if not children or tree[children[0]].is_sibling:
                return
            line = children[0]
            answer.append(tree[line].token)


class Drafter:
    """Asks all sources of a call.

    Args:
        sources: in this order.
        run: how masks stand behind a row.
        end_tokens: that end a sequence.
        constraints: processors that say which drafts are allowed.
        root_hidden: the root head of the model, if it drafts: from states `(A, 1, H)` and the two tokens before.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        run: MaskRun,
        end_tokens: frozenset[int] = frozenset(),
        constraints: Sequence[Any] = (),
        root_hidden: Any = None,
    ):
        self.sources, self.run, self.end_tokens, self.constraints = sources, run, end_tokens, constraints
        self.root_hidden = root_hidden

    @property
    def reads_root(self) -> bool:
        """Whether it drafts from the state of the row that chose the last token, too."""
        return self.root_hidden is not None

    def guess(self, seen: Seen) -> list[Any]:
        """What each source has to know of a forward. `seen.root` is the row's own state, `(A, 1, …)`."""
        if seen.root is not None:
            seen = seen._replace(root=self.root_hidden(seen.root, seen.before[:, None]))
        return [source.guess(seen) for source in self.sources]

    def drafts(self, sequence: SequenceState, masks: int, guesses: Sequence[Any]) -> Tree:
        """The drafts behind a sequence's final tokens, where so many masks drafted."""

        def allows(path: list[int]) -> bool:
            return all(each.allows([*sequence.new_tokens, *path]) for each in self.constraints)

        tree = Tree(ends=self.end_tokens, allows=allows if self.constraints else None)
        for source, guess in zip(self.sources, guesses, strict=True):
            source.add(tree, sequence, masks, guess)
        return tree


def make_drafter(
    model: DecodedModel, sampler: TokenSampler, end_tokens: frozenset[int], has_branches: bool
) -> Drafter:
    """The sources of a call. `has_branches`: a position has several drafts, of masks and of the text; else one."""
    constraints = [each for each in sampler.processors if hasattr(each, "ahead")]
    children = min(CHILDREN, model.config.get_text_config(decoder=True).vocab_size - 1) if has_branches else 1
    sources: list[Source] = []
    run, root_hidden = OWN_MASKS, None
    if model.has_mask_adapter:
        run, root_hidden = model.mask_run, model.root_hidden if model.drafts_from_root else None
        sources.append(AdapterMasks(sampler, model, children, PATHS if has_branches else 1))
        if has_branches and root_hidden is not None and (shortlist := model.root_shortlist()) is not None:
            tokens, score = shortlist
            sources.append(RootState(sampler, model.config, tokens, score, children))
    else:
        sources.append(OwnMasks(sampler, children))
    if has_branches:
        sources.append(Text())
    sources += [Constraint(each, has_branches) for each in constraints]
    return Drafter(sources, run, end_tokens, constraints, root_hidden)


def _likely(chance: float) -> float:
    """A chance below that of what is certain; 0 where a head gives NaN, since what it drafts changes no text."""
    return min(chance, CERTAIN - 2.0**-24) if chance == chance else 0.0


def scaled(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """What a family makes of its head's output, in float32; `config` is that of the text."""
    logits = logits.float()
    scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    logits = logits if scale == 1 else logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * (logits / cap).tanh()


def head_rows(head: Any) -> Any:
    """The weights of a head, `(V, H)`, where single rows can be read: quantizers have kinds of their own."""
    if head._forward_hooks:
        return None
    is_plain = type(head) is torch.nn.Linear and type(head.weight) is torch.nn.Parameter
    return head.weight if is_plain else getattr(head, "rows", None)  # of packed layers: `PackedLinear.rows`
