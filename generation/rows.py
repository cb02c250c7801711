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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Row(NamedTuple):
    """One row of a forward. Drafts and plans count positions and places from the root, whose position is 0 and whose
    place is -1."""

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
        place, path = self.pending - 1, []
        for child, row in enumerate(self.rows):
            if row.parent == place and child >= self.pending:
                place = child
                path.append(row)
        return [row.token for row in sorted(path, key=lambda row: row.position)]


@dataclass(frozen=True)
class Step:
    """The rows of a forward as int64 tensors. The last columns hold a sequence's rows, those in front are padding."""

    sequences: list[SequenceState]  # of each entry
    rows: list[list[Row]]  # of each entry
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
    input_ids, position_ids, slots, parents = torch.tensor(columns, device=device).unbind(1)
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
        [filler] * padding + [filler if row.token is None else row.token for row in sequence.rows],
        [0] * padding + [row.position for row in sequence.rows],  # rotary embeddings may depend on the largest
        [*range(end, end + padding), *range(sequence.committed, end)],
        [(parent if parent >= first else column) - first for column, parent in enumerate(parents)],
    ]


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
    """The places of the masks behind each real row that has some."""
    homes: dict[int, int] = {}
    runs: dict[int, range] = {}
    for place, row in enumerate(rows):
        if row.token is None:
            home = homes[place] = homes.get(row.parent, row.parent)
            runs[home] = range(runs[home].start if home in runs else place, place + 1)
    return runs


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
