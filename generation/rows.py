"""Rows: what a forward reads of a sequence. A step is a tree of them (paper §4.1, ALGORITHM.md §4).

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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Row(NamedTuple):
    """A physical row of a forward. What is drafted or planned counts from the root, whose position is 0, and its place
    −1."""

    token: int | None  # `None`: a mask
    position: int  # logical
    parent: int  # the row that it stands behind, by its place among the sequence's rows; -1: what the cache holds
    chance: float | None = None  # a draft's, by its drafter; `None` for those from the text
    is_sibling: bool = False  # a likelier token is drafted behind the same parent


@dataclass
class SequenceState:
    """One sequence of a call."""

    index: int  # its place in the call
    tokens: list[int]  # final: the prompt's (-1 behind embeddings), then the new ones
    prompt_length: int  # how many of them are the prompt's
    committed: int  # how many of them are in the cache
    limit: int  # new tokens allowed
    rows: list[Row] = field(default_factory=list)  # of the next forward: pending tokens, guesses, masks
    is_finished: bool = False  # nothing more is decoded here

    @property
    def new_tokens(self) -> list[int]:
        """Final tokens behind the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def new_count(self) -> int:
        """How many these are."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """New tokens that are still allowed."""
        return self.limit - self.new_count

    @property
    def pending(self) -> int:
        """Final tokens that are not in the cache yet."""
        return len(self.tokens) - self.committed

    @property
    def unmasked(self) -> int:
        """Rows of the next forward that are no masks."""
        return sum(row.token is not None for row in self.rows)

    @property
    def pending_rows(self) -> list[Row]:
        """A row for each of them. The last one is the *root* of what is guessed."""
        pending = enumerate(self.tokens[self.committed :])
        return [Row(token, self.committed + place, place - 1) for place, token in pending]

    @property
    def expected(self) -> list[int | None]:
        """What is guessed behind the final tokens, `None` for a mask: the first child of each row from the root on."""
        place, path = self.pending - 1, []
        for child, row in enumerate(self.rows):
            if row.parent == place and child >= self.pending:
                place = child
                path.append(row)
        return [row.token for row in sorted(path, key=lambda row: row.position)]


@dataclass(frozen=True)
class Step:
    """The rows of a forward as tensors: of each sequence from right to left, with padding in front. Tensors are
    int64."""

    sequences: list[SequenceState]  # of each entry
    counts: list[int]  # rows that are not padding
    masks: list[int]  # how many of them are masks, the last ones
    input_ids: torch.Tensor  # `(A, Q)`
    position_ids: torch.Tensor  # `(A, Q)`, logical positions
    slots: torch.Tensor  # `(A, Q)`, where in the cache keys and values go: behind what it holds; padding last, unseen
    start: int | None  # the first of these slots, where all entries write the same contiguous range
    end: int  # one past the last slot that is seen
    parents: torch.Tensor  # `(A, T)`, by their places among these columns; its own where the parent is none of them
    is_chain: bool  # every row stands behind the one in front of it

    def mask_columns(self, width: int = 0) -> int | torch.Tensor | None:
        """Which of the last columns are masks, `(A, width)` bool, or as wide as the entry with most has them; their
        number where that is the same for all entries, `None` where there are none."""
        most = width or max(self.masks)
        if not width and min(self.masks) == most:
            return most or None
        counts = torch.tensor(self.masks, device=self.input_ids.device)[:, None]
        return torch.arange(most, 0, -1, device=counts.device) <= counts

    def starts(self, rows: Sequence[int]) -> list[int]:
        """In which of the T columns a row of each entry is, for one row of each."""
        return [self.parents.shape[1] - count + row for count, row in zip(self.counts, rows, strict=True)]


def lay_out(
    sequences: Sequence[SequenceState],
    firsts: Sequence[int],
    filler: int,
    device: torch.device,
    width: int = 0,
    capacity: int | None = None,
) -> Step:
    """The next forward of these sequences, two of them here, with digits for logical positions:

        window of the first:  p4 │ M5 f6 M7           input_ids     p f M M     p p f M
        of the second:     p8 p9 │ f10 M11            position_ids  4 6 5 7     8 9 10 11

    Args:
        sequences: those in use.
        firsts: the first row of each whose logits are wanted.
        filler: the token of masks and of padding.
        device: of the tensors.
        width: Q of a compiled forward, all of whose rows have logits; otherwise as many as the longest entry has.
        capacity: slots of a cache that is always seen whole.
    """
    counts = [len(one.rows) for one in sequences]
    size = max(1, width, *counts)
    tail = width or max(1, *(count - first for count, first in zip(counts, firsts, strict=True)))
    columns = []
    for one, count in zip(sequences, counts, strict=True):
        front = range(size - count)
        token, position, parent, *_ = zip(*one.rows, strict=True) if count else ((), (), ())
        end = one.committed + count
        columns.append(
            [
                [*(filler for _ in front), *(filler if each is None else each for each in token)],
                [*(0 for _ in front), *position],  # rotary embeddings may depend on the largest
                [*(end + each for each in front), *range(one.committed, end)],
                [*front, *(len(front) + (place if each < 0 else each) for place, each in enumerate(parent))],
            ]
        )
    input_ids, position_ids, slots, parents = torch.tensor(columns, device=device).unbind(1)
    places = torch.arange(tail, device=device)
    parents = parents[:, size - tail :] - (size - tail)
    committed = [one.committed for one in sequences]
    is_contiguous = capacity is None and min(committed) == max(committed) and min(counts) == size
    return Step(
        sequences=list(sequences),
        counts=counts,
        masks=[len(one.rows) - one.unmasked for one in sequences],
        input_ids=input_ids,
        position_ids=position_ids,
        slots=slots,
        start=committed[0] if is_contiguous else None,
        end=max(max(committed) + size, capacity or 0),
        parents=torch.where(parents < 0, places, parents),
        is_chain=all(row.parent == place - 1 for one in sequences for place, row in enumerate(one.rows)),
    )


def with_masks(drafts: Sequence[Row], counts: Sequence[int], skipped_masks: int) -> list[Row]:
    """Drafts, and masks behind the root and behind each draft.

    Args:
        drafts: parents first.
        counts: how many masks stand behind the root and behind each draft.
        skipped_masks: 0 if the first of these masks stands behind the position that their row predicts, 1 if at it.
    """
    rows = list(drafts)
    for home, count in enumerate(counts, -1):
        first = 2 - skipped_masks + (drafts[home].position if home >= 0 else 0)
        rows += [Row(None, first + place, len(rows) - 1 + place if place else home) for place in range(count)]
    return rows


def mask_runs(rows: Sequence[Row]) -> dict[int, range]:
    """Where the masks behind a real row are, for each that has some."""
    homes: dict[int, int] = {}
    runs: dict[int, range] = {}
    for place, row in enumerate(rows):
        if row.token is None:
            home = homes[place] = homes.get(row.parent, row.parent)
            runs[home] = range(runs[home].start if home in runs else place, place + 1)
    return runs


def lines(parents: torch.Tensor) -> torch.Tensor:
    """Which rows are a row's own line: itself, its parent, and so on.

    Args:
        parents: `(A, N)` int64, the row that each stands behind; itself for the first ones.

    Returns:
        `(A, N, N)` bool.
    """
    count = parents.shape[1]
    found = torch.eye(count, dtype=torch.bool, device=parents.device).repeat(len(parents), 1, 1)
    for _ in range((count - 1).bit_length()):  # each round doubles how far back a line is known
        found = found | found.gather(1, parents[..., None].expand(-1, -1, count))
        parents = parents.gather(1, parents)
    return found
