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

from .planner import Draft


@dataclass
class SequenceState:
    """One sequence of a call. It has a window, or drafts and masks under verification."""

    index: int  # its place in the call
    tokens: list[int]  # final: the prompt's (-1 behind embeddings), then the new ones
    prompt_length: int  # how many of them are the prompt's
    committed: int  # how many of them are in the cache
    limit: int  # new tokens allowed
    window: list[int | None] = field(default_factory=list)  # what is in each slot, `None` for a mask
    drafts: list[Draft] = field(default_factory=list)  # guesses behind the last final token, parents first
    masks: list[int] = field(default_factory=list)  # how many stand behind the last final token, and each draft
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
    def mask_slots(self) -> list[int]:
        """Slots of the window that are masks, ascending."""
        return [slot for slot, token in enumerate(self.window) if token is None]

    @property
    def expected(self) -> list[int | None]:
        """What is guessed behind the final tokens, `None` for a mask: the window, or the first run of drafts and the
        masks behind it."""
        if not self.masks:
            return self.window
        run: list[int | None] = []
        for place, draft in enumerate(self.drafts):
            if draft.parent != place - 1:
                break
            run.append(draft.token)
        return [*run, *[None] * self.masks[len(run)]]

    def set_masks(self, size: int) -> None:
        """Gives the window `size` slots, or as many as the limit leaves: masks are added or removed at its end."""
        size = min(size, self.remaining)
        self.window += [None] * (size - len(self.window))
        while len(self.window) > size and self.window[-1] is None:
            self.window.pop()


@dataclass(frozen=True)
class SequenceOutcome:
    """What a step did to one sequence."""

    sequence: SequenceState
    new_tokens: list[int]  # that became final
    kept: list[int]  # physical rows whose keys and values entered the cache, counted from the sequence's first one
    decided: list[tuple[int, int, int]]  # column of the logits, slot and token of each slot whose value was settled
    filled: list[tuple[int, int, int]] = field(default_factory=list)  # the same of each mask that was filled
    checked: list[Draft] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # places of those that passed, a path
    drafting: range = range(0)  # masks, counted from the sequence's first one, that draft what follows


@dataclass(frozen=True)
class Visibility:
    """Which cache slots each physical row sees: those up to `until`, those from `start` to its own, `(A, Q)` int64,
    and those in `path`, `(A, Q, E)` int64, if there is one (a slot of no meaning is the row's own)."""

    until: torch.Tensor
    start: torch.Tensor
    path: torch.Tensor | None = None


@dataclass(frozen=True)
class PhysicalOrder:
    """One forward's rows in physical order: padding, then pending tokens, filled slots and masks, each ascending.

    Tensors are int64; lists have an item for each entry."""

    sequences: list[int]  # places in the call
    input_ids: torch.Tensor  # `(A, Q)`
    position_ids: torch.Tensor  # `(A, Q)`, logical positions
    cache_slots: torch.Tensor  # `(A, Q)`, where keys and values go: behind the cached ones; padding last, unseen
    counts: list[int]  # physical rows that are not padding
    # `(A, M)`, the window slot that each of the last M physical rows (but for `masks_behind`) predicts; -1 for none.
    slots: torch.Tensor
    slot_lists: list[list[int]]  # the same without the -1 in front
    first: list[int]  # new tokens so far
    offsets: torch.Tensor  # `(A, M)`, new tokens in front of each of `slots`
    # Which of the last physical rows are masks, `(A, masks of the entry with the most)` bool; their number where that
    # is the same for all entries, `None` where there are none.
    slot_mask: int | torch.Tensor | None
    masks_behind: int  # physical rows behind those that predict `slots`: masks, and padding where there are fewer
    mask_counts: list[int]  # how many of them are masks
    visibility: Visibility | None  # for an order that is not plain causal

    @property
    def logit_count(self) -> int:
        """M."""
        return self.slots.shape[1]


def physical_order(
    sequences: Sequence[SequenceState],
    slot_lists: list[list[int]],
    filler: int,
    device: torch.device,
    width: int = 0,
    behind: int = 0,
    mask_offset: int = 0,
) -> PhysicalOrder:
    """Topological reordering of pending tokens and windows (paper §4.1).

    Two sequences, `p` pending, `f` filled, `M` masks, `·` padding; the digits are logical positions:

        window of the first:  p4 │ M5 f6 M7           input_ids     p f M M     p p f M
        of the second:     p8 p9 │ f10 M11            position_ids  4 6 5 7     8 9 10 11

    Under verification the masks come last, those behind the last final token first. The rows in front of them are
    aligned, so that their logits are one block, and so are the first masks:

        entry 0:   p  p  f  f │ M M │ M M │ M M
        entry 1:   ·  ·  p  f │ M M M │ M · ·

    Args:
        sequences: those in use.
        slot_lists: the slots that each sequence's last rows in front of those masks predict.
        filler: the token of masks.
        device: of the tensors.
        width, behind: the least numbers of rows in front of masks, and of masks; with a `width`, logits are computed
            for all rows.
        mask_offset: positions between a row and the first mask behind it.
    """
    size = max(1, width, *(len(one.drafts) + one.pending + len(one.window) for one in sequences))
    behind = max(behind, *(sum(one.masks) for one in sequences))
    columns = [_Columns.of(one, filler, size, behind, mask_offset) for one in sequences]
    tokens, positions, cache_slots, until, start = torch.tensor(
        [[each.tokens, each.positions, each.slots, each.until, each.start] for each in columns], device=device
    ).unbind(1)
    visibility = None
    if not all(each.is_causal for each in columns):
        longest = max(len(path) for each in columns for path in each.paths)
        path = None
        if longest:
            padded = [
                [[*row, *[own] * (longest - len(row))] for row, own in zip(each.paths, each.slots, strict=True)]
                for each in columns
            ]
            path = torch.tensor(padded, device=device)
        visibility = Visibility(until, start, path)
    masks = [one.window.count(None) + sum(one.masks) for one in sequences]
    most = (behind or width) if width else max(masks)
    slot_mask: int | torch.Tensor | None = most or None
    if width or min(masks) < most:
        places, counts = torch.arange(most, device=device), torch.tensor(masks, device=device)[:, None]
        slot_mask = places < counts if behind else places >= most - counts
    first = [one.new_count for one in sequences]
    logit_count = width or max(1, *map(len, slot_lists))
    slots = torch.tensor([[-1] * (logit_count - len(slots)) + slots for slots in slot_lists], device=device)
    return PhysicalOrder(
        sequences=[one.index for one in sequences],
        input_ids=tokens,
        position_ids=positions,
        cache_slots=cache_slots,
        counts=[each.count for each in columns],
        slots=slots,
        slot_lists=slot_lists,
        first=first,
        offsets=slots + torch.tensor(first, device=device)[:, None],
        slot_mask=slot_mask,
        masks_behind=behind,
        mask_counts=[sum(one.masks) for one in sequences],
        visibility=visibility,
    )


@dataclass
class _Columns:
    """One entry of a forward: token, position, cache slot and visibility of each physical row."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    until: list[int]
    start: list[int]
    paths: list[list[int]]
    count: int
    is_causal: bool

    @classmethod
    def of(cls, one: SequenceState, filler: int, size: int, behind: int, mask_offset: int) -> "_Columns":
        begin, end = one.committed, len(one.tokens)
        slots = sorted(range(len(one.window)), key=lambda slot: one.window[slot] is None)  # masks last
        tokens = [*one.tokens[begin:], *(filler if (token := one.window[slot]) is None else token for slot in slots)]
        positions = [*range(begin, end), *(end + slot for slot in slots)]
        if one.is_finished:
            tokens, positions = [], []
        tokens += [draft.token for draft in one.drafts]
        positions += [end - 1 + draft.depth for draft in one.drafts]
        root, real = end - 1, len(positions)
        until, start = list(range(begin, begin + real)), list(range(begin, begin + real))
        paths: list[list[int]] = [[] for _ in until]
        for place, draft in enumerate(one.drafts):
            slot, parent = root + 1 + place, root + 1 + draft.parent
            if draft.parent < place - 1 or until[parent - begin] < parent:  # not right behind all that it sees
                until[slot - begin], paths[slot - begin] = _seen_from(parent, until, paths, begin)
        padding = size - real
        for place, count in enumerate(one.masks):
            seen, path = _seen_from(root + place, until, paths, begin)
            first = begin + len(positions)
            depth = one.drafts[place - 1].depth if place else 0
            positions += range(end + depth + mask_offset, end + depth + mask_offset + count)
            until += [seen] * count
            start += [first] * count
            paths += [path] * count
        stop = begin + len(positions)
        front, back = range(stop, stop + padding), range(stop + padding, begin + size + behind)
        tokens += [filler] * (len(positions) - len(tokens))
        return cls(
            tokens=[filler] * len(front) + tokens + [filler] * len(back),
            positions=[*[0] * padding, *positions, *[0] * len(back)],  # rotary embeddings may depend on the largest
            slots=[*front, *range(begin, stop), *back],
            until=[*front, *until, *back],
            start=[*front, *start, *back],
            paths=[[] for _ in front] + paths + [[] for _ in back],
            count=len(positions),
            is_causal=not any(one.masks[:-1]) and all(d.parent == place - 1 for place, d in enumerate(one.drafts)),
        )


def _seen_from(parent: int, until: list[int], paths: list[list[int]], begin: int) -> tuple[int, list[int]]:
    """What a row behind that of slot `parent` sees: all up to a slot, and single slots behind it."""
    seen, path = until[parent - begin], paths[parent - begin]
    return seen, path if seen >= parent else [*path, parent]
