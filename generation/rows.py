"""Rows: what a forward reads of a sequence. A step is a tree of them (docs/algorithm.md#branches-and-trees).

`A` sequences in use, `Q` physical rows of a forward, `T` of them, the last ones, with logits.

A row is a token or a mask, at a logical position, behind another row. It sees the rows that it stands behind, up
to the first, and what the cache holds; what a step keeps of them is a path:

    tokens of the text         t t t t t t t t │ p p p           │
                               └ in the cache    └ pending: final, and not in the cache yet
    the paper's window                           p p p f f M M M   one behind the other; logical positions have gaps
    a chain of drafts                            p p p d d d M M   the same, with drafts in the place of filled slots
    branches, trees                              p p p d d s M M   behind whichever row they belong to: s may stand
                                                                   behind the last p, as the first d does

Real rows come first and masks last, parents before their children. In the first step the whole prompt is pending (but
for what the cache holds already).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

# Drafts of a sequence that a step checks at most, beside those of masks.
MOST_DRAFTS = 12
# The chance of a draft that is the only token a constraint allows. No other draft has it.
CERTAIN = 1.0


class Row(NamedTuple):
    """One row of a forward: a token or a mask at a logical position, behind another row.

    In drafts and plans, positions and places are relative to the root, the last final token: its position is 0, its
    place -1.
    """

    token: int | None  # `None`: a mask
    position: int  # logical
    parent: int  # the row that it stands behind, by its place among the sequence's rows; -1: what the cache holds
    chance: float | None = None  # a draft's, by its drafter; `None` for those from the text
    is_sibling: bool = False  # another token was drafted behind the same parent before
    fill: int | None = None  # the token that a mask holds; `None`: any


@dataclass(frozen=True)
class MaskRun:
    """How masks stand behind a row, at positions that follow each other. The row chooses the token behind it, so what
    they draft begins at the token behind that one."""

    first: int  # the position of the first one, counted from the row
    skipped: int  # how many of the first ones draft nothing

    holds_tokens: ClassVar[bool] = False  # they are read by their tokens; otherwise by an embedding of masks

    def fill(self, prompt: Sequence[int], text: Sequence[int], place: int) -> int:
        """The token of a mask where they hold tokens.

        Args:
            prompt: its tokens.
            text: from the first token of the prompt to the row that the masks stand behind.
            place: the mask's, counted from the first one behind that row.
        """
        raise NotImplementedError


# Of a mask adapter, and of a WeDLM model, where they stand as in training: right behind the text.
ADAPTER_MASKS, OWN_MASKS = MaskRun(first=2, skipped=0), MaskRun(first=1, skipped=1)


class Tree(Sequence[Row]):
    """Rows behind each other, parents first. What is added is a draft or a mask.

    Args:
        rows: to begin with.
        ends: tokens behind which nothing stands.
        allows: whether a path may be drafted, by its tokens from the root on.
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        ends: frozenset[int] = frozenset(),
        allows: Callable[[list[int]], bool] | None = None,
    ):
        self.ends, self.allows = ends, allows
        self._rows: list[Row] = []
        self._children: dict[int, list[int]] = {}
        for row in rows:
            self._append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        return self._rows[place]

    def _append(self, row: Row) -> int:
        self._children.setdefault(row.parent, []).append(len(self._rows))
        self._rows.append(row)
        return len(self._rows) - 1

    def add(self, token: int, parent: int | None = -1, chance: float | None = None) -> int | None:
        """Adds a draft behind a row, by its place (-1: the root). Returns the draft's place: that of the same draft if
        it is there already; `None` if it may not stand there, as behind an end or behind `None`."""
        if parent is None or (parent >= 0 and self._rows[parent].token in self.ends):
            return None
        for child in self.children(parent):
            if self._rows[child].token == token:
                return child
        if self.allows is not None and not self.allows([*self.tokens(parent), token]):
            return None
        return self._append(Row(token, 1 + self.position(parent), parent, chance, bool(self.children(parent))))

    def add_masks(self, home: int, count: int, run: MaskRun) -> None:
        """Adds so many masks behind a row."""
        parent, first = home, self.position(home) + run.first
        for position in range(first, first + count):
            parent = self._append(Row(None, position, parent))

    def position(self, place: int) -> int:
        """A row's position, or the root's."""
        return self._rows[place].position if place >= 0 else 0

    def path(self, place: int) -> list[int]:
        """The places from the first row to this one, which it sees."""
        found: list[int] = []
        while place >= 0:
            found.append(place)
            place = self._rows[place].parent
        return found[::-1]

    def tokens(self, place: int) -> list[int]:
        """The tokens of a path without masks."""
        return [token for each in self.path(place) if (token := self._rows[each].token) is not None]

    def children(self, place: int) -> Sequence[int]:
        """The places of the rows right behind a row, in the order in which they were added."""
        return self._children.get(place, ())

    def masks(self, home: int) -> range:
        """The places of the masks behind a row that is none."""
        end = first = next((child for child in self.children(home) if self._rows[child].token is None), len(self))
        while end < len(self) and self._rows[end].token is None and self._rows[end].parent in (home, end - 1):
            end += 1
        return range(first, end)

    def likeliest(self, place: int) -> list[int]:
        """The places of the rows behind a row, each the first child of the one before."""
        found: list[int] = []
        while children := self.children(found[-1] if found else place):
            found.append(children[0])
        return found

    def cut(self, count: int) -> None:
        """Keeps the first rows."""
        while len(self._rows) > count:
            self._children[self._rows.pop().parent].pop()


def with_masks(drafts: Iterable[Row], counts: Sequence[int], run: MaskRun) -> Tree:
    """Drafts, parents first, and masks behind the root and behind each draft; `counts` are their numbers."""
    found = Tree(drafts)
    for home, count in enumerate(counts, -1):
        found.add_masks(home, count, run)
    return found


@dataclass
class SequenceState:
    """One sequence of a call."""

    index: int  # its place in the call
    tokens: list[int]  # final: the prompt's (-1 behind embeddings), then the new ones
    prompt_length: int  # how many of them are the prompt's
    committed: int  # how many of them are in the cache
    limit: int  # new tokens allowed
    rows: Tree = field(default_factory=Tree)  # of the next forward: pending tokens, guesses, masks
    is_finished: bool = False  # nothing more is decoded here

    @property
    def new_tokens(self) -> list[int]:
        """Final tokens behind the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def new_count(self) -> int:
        """How many tokens these are."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """New tokens that are still allowed."""
        return self.limit - self.new_count

    @property
    def pending(self) -> int:
        """How many final tokens are not in the cache yet."""
        return len(self.tokens) - self.committed

    @property
    def unmasked(self) -> int:
        """How many rows of the next forward are tokens."""
        return sum(row.token is not None for row in self.rows)

    @property
    def pending_rows(self) -> list[Row]:
        """A row for each pending token. The last one is the *root*: drafts and masks stand behind it."""
        pending = enumerate(self.tokens[self.committed :])
        return [Row(token, self.committed + place, place - 1) for place, token in pending]

    @property
    def expected(self) -> list[int | None]:
        """The likeliest continuation, `None` for a mask: the first child of each row, from the root on."""
        rows = [self.rows[place] for place in self.rows.likeliest(self.pending - 1)]
        return [row.token for row in sorted(rows, key=lambda row: row.position)]


@dataclass(frozen=True)
class Step:
    """The rows of a forward as int64 tensors. The last columns hold a sequence's rows, those in front are padding."""

    sequences: list[SequenceState]  # of each entry
    rows: list[Tree]  # of each entry
    input_ids: torch.Tensor  # `(A, Q)`
    position_ids: torch.Tensor  # `(A, Q)`, logical positions
    slots: torch.Tensor  # `(A, Q)`, where in the cache keys and values go: behind what it holds; padding last, unseen
    start: int | None  # the first of these slots, where all entries write the same contiguous range
    end: int  # one past the last slot that is seen
    parents: torch.Tensor  # `(A, T)`, each row's parent as one of these columns; the row itself where it is in none
    is_chain: bool  # every row stands behind the one in front of it

    @property
    def masks(self) -> list[int]:
        """How many rows of each entry, the last ones, are masks."""
        return [sum(row.token is None for row in rows) for rows in self.rows]

    def mask_columns(self, width: int = 0) -> int | torch.Tensor | None:
        """Which of the last columns are masks: `(A, width)` bool, by default as wide as the most masks of an entry.
        Their number, where all entries have as many; `None` where no entry has any."""
        masks = self.masks
        most = width or max(masks)
        if not width and min(masks) == most:
            return most or None
        counts = torch.tensor(masks, device=self.input_ids.device)[:, None]
        return torch.arange(most, 0, -1, device=counts.device) <= counts


def lay_out(
    sequences: Sequence[SequenceState],
    firsts: Sequence[int],
    filler: int,
    device: torch.device,
    width: int = 0,
    capacity: int | None = None,
) -> Step:
    """The next forward of these sequences. Here are two of them, with digits for logical positions:

        window of the first:  p4 │ M5 f6 M7           input_ids     p f M M     p p f M
        of the second:     p8 p9 │ f10 M11            position_ids  4 6 5 7     8 9 10 11

    `firsts` are the first rows whose logits are wanted. `filler` is the token of masks and of padding. A compiled
    forward has `width` columns, all with logits. A cache with a `capacity` is always seen whole.
    """
    counts = [len(sequence.rows) for sequence in sequences]
    size = max(1, width, *counts)
    tail = width or max(1, *(count - first for count, first in zip(counts, firsts, strict=True)))
    columns = [_columns(sequence, size, size - tail, filler) for sequence in sequences]
    input_ids, position_ids, slots, parents = torch.tensor([*zip(*columns, strict=True)], device=device)
    committed = [sequence.committed for sequence in sequences]
    is_contiguous = capacity is None and min(committed) == max(committed) and min(counts) == size
    return Step(
        sequences=list(sequences),
        rows=[sequence.rows for sequence in sequences],
        input_ids=input_ids,
        position_ids=position_ids,
        slots=slots,
        start=committed[0] if is_contiguous else None,
        end=max(max(committed) + size, capacity or 0),
        parents=parents[:, size - tail :],
        is_chain=all(row.parent == place - 1 for sequence in sequences for place, row in enumerate(sequence.rows)),
    )


def _columns(sequence: SequenceState, size: int, first: int, filler: int) -> list[list[int]]:
    """A sequence's tokens, positions, slots and parents, in `size` columns; parents count from column `first` on."""
    padding, end = size - len(sequence.rows), sequence.committed + len(sequence.rows)
    parents = [*range(padding), *(padding + row.parent if row.parent >= 0 else -1 for row in sequence.rows)]
    return [
        [filler] * padding + [_token(row, filler) for row in sequence.rows],
        [0] * padding + [row.position for row in sequence.rows],  # rotary embeddings may depend on the largest
        [*range(end, end + padding), *range(sequence.committed, end)],
        [(parent if parent >= first else column) - first for column, parent in enumerate(parents)],
    ]


def _token(row: Row, filler: int) -> int:
    known = row.fill if row.token is None else row.token
    return filler if known is None else known


def lines(parents: torch.Tensor) -> torch.Tensor:
    """The line of each row: itself, its parent, its parent's parent, and so on.

    Args:
        parents: `(A, N)` int64, the row that each stands behind; the row itself where it stands behind none.

    Returns:
        `(A, N, N)` bool: whether the second row is in the line of the first.
    """
    count = parents.shape[1]
    found = torch.eye(count, dtype=torch.bool, device=parents.device).repeat(len(parents), 1, 1)
    for _ in range((count - 1).bit_length()):  # each round doubles how far back a line is known
        found = found | found.gather(1, parents[..., None].expand(-1, -1, count))
        parents = parents.gather(1, parents)
    return found
