"""The rows of a call and their physical order (paper §4.1, §5, Figure 3).

`A` rows in use, `Q` physical rows of a forward, `M` of them with logits, `W` window size.

A row's tokens are final; the window behind them holds the slots that are not, each filled or a mask:

     prompt and new tokens     │ window
     committed       │ pending │
     t t t t t t t t │ p p p   │ M f M M f M
     └ cached                    └ slot 0: the position behind the last final token

In the first step the whole prompt is pending (but for what the cache holds already), so the first window rides on the
prefill. Under verification the filled slots are *drafts*, which stand at the window's left without a gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Row:
    """One row of a call.

    Attributes:
        index: which row of the call.
        tokens: final tokens: the prompt's (-1 behind embeddings), then the new ones.
        prompt_length: how many of them are the prompt's.
        committed: how many of them are in the cache.
        limit: new tokens allowed.
        window: what is in each slot, `None` for a mask.
        branches: where each real row has masks of its own (see [`BranchRule`]): how many, behind the last pending
            token and behind each draft.
        confidence: the masks' own probability of each draft in the window; `None` where it was found in the text.
        is_finished: nothing more is decoded here.
    """

    index: int
    tokens: list[int]
    prompt_length: int
    committed: int
    limit: int
    window: list[int | None] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    confidence: list[float | None] = field(default_factory=list)
    is_finished: bool = False

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
    def filled_slots(self) -> list[int]:
        """Slots that are filled, ascending."""
        return [slot for slot, token in enumerate(self.window) if token is not None]

    @property
    def filled_tokens(self) -> list[int]:
        """What is in them."""
        return [token for token in self.window if token is not None]

    @property
    def mask_slots(self) -> list[int]:
        """Slots that are masks, ascending."""
        return [slot for slot, token in enumerate(self.window) if token is None]

    def set_masks(self, size: int) -> None:
        """Gives the window `size` slots, or as many as the limit leaves: masks are added or removed at its end."""
        size = min(size, self.remaining)
        self.window += [None] * (size - len(self.window))
        while len(self.window) > size and self.window[-1] is None:
            self.window.pop()

    def slide(self, count: int) -> list[int]:
        """Moves the window past its first `count` slots, whose tokens are final now. Returns them."""
        final = [token for token in self.window[:count] if token is not None]
        self.tokens += final
        del self.window[:count]
        return final


@dataclass
class RowOutcome:
    """What a step did to one row.

    Attributes:
        row: the row.
        final: slots, from the window's left, whose tokens are final.
        decided: `(column of the logits, slot, token)` for each slot whose token is settled.
        filled: the same for each mask that was filled, or whose token became a draft.
        checked: drafts that were checked.
        accepted: drafts that passed.
        paid: depths of the window that paid, from the left: accepted drafts, or fills beyond the one of every step.
        failed: the first depth that did not: its draft failed, or no mask was sure enough to give one.
        committed: physical rows that entered the cache for good.
        new_tokens: those that became final.
    """

    row: Row
    final: int
    decided: list[tuple[int, int, int]]
    filled: list[tuple[int, int, int]]
    checked: int = 0
    accepted: int = 0
    paid: int = 0
    failed: int | None = None
    committed: int = 0
    new_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Visibility:
    """Which cache slots each physical row sees, `(A, Q)` int64: those up to `until`, and from `start` to its own."""

    until: torch.Tensor
    start: torch.Tensor


@dataclass(frozen=True)
class PhysicalOrder:
    """One forward's rows in physical order: padding, then pending tokens, filled slots and masks, each ascending.

    Attributes:
        rows: the call's row of each entry.
        input_ids: `(A, Q)` int64.
        position_ids: `(A, Q)` int64, logical positions.
        cache_slots: `(A, Q)` int64, where keys and values go: behind the row's cached ones; padding last, unseen.
        counts: physical rows that are not padding, per entry.
        slots: `(A, M)` int64, the window slot that each of the last M physical rows (but for `masks_behind`) predicts;
            -1 for none.
        slot_lists: the same as lists, without the -1 in front.
        first: new tokens so far, per entry.
        offsets: `(A, M)` int64, new tokens in front of each of `slots`.
        slot_mask: which of the last physical rows are masks, `(A, masks of the entry with the most)` bool; their
            number where that is the same for all entries, `None` where there are none.
        masks_behind: physical rows behind those that predict `slots`: the masks of branches.
        visibility: for an order that is not plain causal, see [`Visibility`].
    """

    rows: list[int]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cache_slots: torch.Tensor
    counts: list[int]
    slots: torch.Tensor
    slot_lists: list[list[int]]
    first: list[int]
    offsets: torch.Tensor
    slot_mask: int | torch.Tensor | None
    masks_behind: int
    visibility: Visibility | None

    @property
    def logit_count(self) -> int:
        """M."""
        return self.slots.shape[1]


def physical_order(
    rows: Sequence[Row], slot_lists: list[list[int]], mask_token_id: int, width: int | None, device: torch.device
) -> PhysicalOrder:
    """Topological reordering of pending tokens and windows (paper §4.1).

    Two rows, `p` pending, `f` filled, `M` masks, `·` padding; the digits are logical positions:

        window of the first:  p4 │ M5 f6 M7           input_ids     p f M M     p p f M
        of the second:     p8 p9 │ f10 M11            position_ids  4 6 5 7     8 9 10 11

    The masks of branches come last. The rows in front of them are aligned, so that their logits are one block, and so
    are the first masks:

        entry 0:   p  p  f  f │ M M │ M M │ M M
        entry 1:   ·  ·  p  f │ M M M │ M · ·

    Args:
        rows: those in use.
        slot_lists: the slots that each row's last physical rows predict, those of branches left aside.
        mask_token_id: M.
        width: Q, where it is fixed; logits are then computed for all rows.
        device: of the tensors.
    """
    size = width or max(1, *(row.pending + len(row.window) for row in rows))
    behind = max(sum(row.branches) for row in rows)
    columns = [_columns(row, mask_token_id, size, behind) for row in rows]
    input_ids, position_ids, cache_slots, *visibility = torch.tensor([*zip(*columns, strict=True)], device=device)
    is_causal = not any(any(row.branches[:-1]) for row in rows)
    masks = [0 if row.is_finished else row.window.count(None) + sum(row.branches) for row in rows]
    most = max(masks)
    slot_mask: int | torch.Tensor | None = most or None
    if min(masks) < most:
        places, counts = torch.arange(most, device=device), torch.tensor(masks, device=device)[:, None]
        slot_mask = places < counts if behind else places >= most - counts
    first = [row.new_count for row in rows]
    logit_count = width or max(1, *map(len, slot_lists))
    slots = torch.tensor([[-1] * (logit_count - len(slots)) + slots for slots in slot_lists], device=device)
    return PhysicalOrder(
        rows=[row.index for row in rows],
        input_ids=input_ids,
        position_ids=position_ids,
        cache_slots=cache_slots,
        counts=[0 if row.is_finished else row.pending + len(row.window) + sum(row.branches) for row in rows],
        slots=slots,
        slot_lists=slot_lists,
        first=first,
        offsets=slots + torch.tensor(first, device=device)[:, None],
        slot_mask=slot_mask,
        masks_behind=behind,
        visibility=None if is_causal else Visibility(*visibility),
    )


def _columns(row: Row, mask_token_id: int, width: int, behind: int) -> list[list[int]]:
    """One entry of the forward, `width` rows and `behind` of branches: its tokens, positions and cache slots; with
    branches, what [`Visibility`] needs, too."""
    begin, end = row.committed, len(row.tokens)
    tokens = row.tokens[begin:] + row.filled_tokens
    positions = [*range(begin, end), *[end + slot for slot in row.filled_slots + row.mask_slots]]
    if row.is_finished:
        tokens, positions = [], []
    padding = width - len(positions)
    until = list(range(begin, begin + len(positions))) if behind else []
    start = list(until)
    for draft, size in enumerate(row.branches):
        first = begin + len(positions)
        positions += range(end + draft + 1, end + draft + 1 + size)
        until += [end - 1 + draft] * size
        start += [first] * size
    stop = begin + len(positions)
    front, back = range(stop, stop + padding), range(stop + padding, begin + width + behind)
    tokens += [mask_token_id] * (len(positions) - len(tokens))
    columns = [
        [mask_token_id] * len(front) + tokens + [mask_token_id] * len(back),
        [*front, *positions, *back],
        [*front, *range(begin, stop), *back],
    ]
    return [*columns, [*front, *until, *back], [*front, *start, *back]] if behind else columns
