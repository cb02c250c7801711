"""The state of streaming parallel decoding, as tensors over rows (paper §5, Figure 3).

`A` rows in use, `S` slots of the canvas, `Q` physical rows of a forward, `M` slots with logits, `W` window size.

A row's canvas starts right after its cached tokens. Its slots are logical positions in order:

      cached │ pending │ window                    │ free
             │ p p p   │ M f M M f M …             │ · · ·
             └ final, not cached yet               └ beyond `extent`
                         └ its leftmost slot is always a mask

In the first step the prompt is the pending run, so that the first window rides on the prefill.

Under verification the filled slots are *drafts*: a contiguous run right after the pending token, which the AR rows of
the same forward accept or reject; then W masks.

W may change from step to step. A row without masks takes its next token from the AR head: it decodes as plain AR does.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PhysicalOrder:
    """One forward's rows in physical order: padding, then pending and filled slots, then masks, each ascending.

    Attributes:
        slots: `(A, Q)` int64, the canvas slot of each physical row.
        input_ids: `(A, Q)` int64.
        position_ids: `(A, Q)` int64, logical positions.
        cache_slots: `(A, Q)` int64, where their keys and values go: after the row's cached ones, padding last, unseen.
        counts: physical rows that are no padding, per row.
        logit_count: M, the last physical rows whose logits are needed.
    """

    slots: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cache_slots: torch.Tensor
    counts: list[int]
    logit_count: int

    @property
    def logit_slots(self) -> torch.Tensor:
        """`(A, M)` int64, the canvas slots of the physical rows whose logits are needed."""
        return self.slots[:, -self.logit_count :]


@dataclass(frozen=True)
class Slide:
    """What the host learns of a step, one entry per row: how many slots were cached for good; how many drafts were
    accepted; how many slots are filled out of order, or with drafts; how many new tokens are final by now; whether the
    row is finished, and whether its logits were no numbers."""

    committed: list[int]
    accepted: list[int]
    ahead: list[int]
    new_tokens: list[int]
    finished: list[bool]
    broken: list[bool]


class Window:
    """Pending tokens and windows of all rows in use. Each method is a fixed number of vectorised operations; only
    [`slide`] reads anything back, and what it reads is all that the host needs until the next one.

    Args:
        prompt: `(A, P)` int64, the prompt tokens that are not cached yet, left-aligned.
        prompt_lengths: how many of them each row has.
        cached_lengths: tokens of each row that are in the cache already.
        limit: new tokens allowed.
        largest: the largest W.
        first: W of the first step.
        mask_token_id: M.
        end_tokens: `(E,)` int64, tokens that end a row.
        block: refill the window only when it holds no mask any more.
        verified: filled slots are drafts, see [`verify`].
        is_fixed: after the prompt's, all forwards have one shape: as many rows as the call, 2W slots.
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        prompt_lengths: list[int],
        cached_lengths: list[int],
        limit: int,
        largest: int,
        first: int,
        mask_token_id: int,
        end_tokens: torch.Tensor,
        block: bool = False,
        verified: bool = False,
        is_fixed: bool = False,
    ):
        device = prompt.device
        self.limit = limit
        self.largest = largest
        self.mask_token_id = mask_token_id
        self.end_tokens = end_tokens
        self.block = block
        self.verified = verified
        self.fixed_width = 2 * largest if is_fixed else None

        width = min(first, limit)
        # One slot more than masks need: a row without any writes its AR token there.
        masks = prompt.new_full((prompt.shape[0], width + 1), mask_token_id)
        self.slots = torch.arange(prompt.shape[1] + width + 1, device=device)[None]  # (1, S)
        self.pending = torch.tensor(prompt_lengths, device=device)[:, None]  # (A, 1)
        self.start = torch.tensor(cached_lengths, device=device)[:, None]  # (A, 1), logical position of slot 0
        self.extent = self.pending + width  # (A, 1)
        self.filled = self.slots < self.pending  # (A, S)
        self.tokens = torch.cat([prompt, masks], dim=1).masked_fill(~self.filled, mask_token_id)  # (A, S)
        self.new_tokens = torch.zeros_like(self.pending)  # (A, 1), final ones
        self.accepted = self.new_tokens  # (A, 1), drafts that the last forward accepted
        self.ended = self.ends_ahead = self.new_tokens.bool()  # (A, 1), whether the run, or a draft, ends the row
        # One column more than a row can have: what must not be written lands there.
        self.output = prompt.new_zeros(prompt.shape[0], limit + 1)
        # What the host knows of the above, so that shapes need no synchronisation.
        self.pending_counts = list(prompt_lengths)
        self.extents = [length + width for length in prompt_lengths]
        self.mask_counts = [width] * len(prompt_lengths)
        self.new_counts = [0] * len(prompt_lengths)
        self.ahead_counts = [0] * len(prompt_lengths)
        self.is_idle = [False] * len(prompt_lengths)
        self.is_first = True

    def order(self) -> PhysicalOrder:
        """Topological reordering of pending tokens and windows (paper §4.1)."""
        is_fixed = self.fixed_width is not None and not self.is_first
        width = self.fixed_width if is_fixed else max(self.extents)
        assert width is not None
        if is_fixed:
            logit_count = width
        elif self.verified:
            logit_count = 1 + max(map(int.__sub__, self.extents, self.pending_counts))
        else:
            logit_count = max(1, *self.mask_counts)
        kind = (~self.filled).long().masked_fill_(self.slots >= self.extent, -1)  # -1 free, 0 filled, 1 mask
        slots = kind.argsort(dim=1, stable=True)[:, -width:]
        physical = torch.arange(width, device=slots.device)
        return PhysicalOrder(
            slots=slots,
            input_ids=self.tokens.gather(1, slots),
            position_ids=self.start + slots,
            cache_slots=self.start + (physical - (width - self.extent)) % width,
            counts=self.extents,
            logit_count=logit_count,
        )

    def masks(self, order: PhysicalOrder) -> tuple[torch.Tensor, torch.Tensor]:
        """What the logits predict: the canvas slots `(A, M)` int64, and which of them are to be filled `(A, M)` bool.

        These are the masks; and where a row has none, the slot after its last token, which the AR head predicts.
        """
        slots = order.logit_slots
        is_mask = ~self.filled.gather(1, slots) & (slots < self.extent)
        if min(self.mask_counts) == 0:
            no_masks = ~is_mask.any(1) & (self.pending[:, 0] > 0)
            slots, is_mask = slots.clone(), is_mask.clone()
            slots[:, -1] = torch.where(no_masks, self.pending[:, 0], slots[:, -1])
            is_mask[:, -1] |= no_masks
            self.extent = torch.where(no_masks[:, None], self.pending + 1, self.extent)
        return slots, is_mask

    def fill(self, slots: torch.Tensor, chosen: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Fills the chosen ones `(A, M)` bool of these slots `(A, M)` int64 with `tokens` `(A, M)` int64. Returns the
        final run, `(A, 1)` int64: slots from the left that are filled without a gap, cut after the first end token."""
        self.tokens.scatter_(1, slots, torch.where(chosen, tokens, self.tokens.gather(1, slots)))
        self.filled.scatter_(1, slots, chosen | self.filled.gather(1, slots))
        run = (self.filled & (self.slots < self.extent)).cumprod(1).sum(1, keepdim=True)
        return self._cut_after_end(run, torch.isin(self.tokens, self.end_tokens))

    def ar_rows(self, order: PhysicalOrder) -> tuple[torch.Tensor, torch.Tensor]:
        """Which slots with logits are AR rows (the last pending token and the drafts), and which are masks, `(A, M)`
        bool each."""
        slots = order.logit_slots
        is_filled, in_play = self.filled.gather(1, slots), slots < self.extent
        return is_filled & in_play & (slots >= self.pending - 1), in_play & ~is_filled

    def tokens_after(self, order: PhysicalOrder) -> torch.Tensor:
        """The token in the slot after each slot with logits, `(A, M)` int64; MASK beyond the canvas."""
        canvas = torch.cat([self.tokens, torch.full_like(self.tokens[:, :1], self.mask_token_id)], dim=1)
        return canvas.gather(1, order.logit_slots + 1)

    def output_with_drafts(self) -> torch.Tensor:
        """New tokens of each row as if all its drafts were final, `(A, limit + 1)` int64."""
        drafts = (self.slots >= self.pending) & (self.slots < self.extent)
        columns = torch.where(drafts, self.new_tokens + self.slots - self.pending, self.limit)
        return self.output.scatter(1, columns, self.tokens)

    def verify(
        self,
        order: PhysicalOrder,
        is_ar: torch.Tensor,
        ar_tokens: torch.Tensor,
        passes: torch.Tensor,
        proposed: torch.Tensor,
        proposals: torch.Tensor,
    ) -> torch.Tensor:
        """Accepts drafts as long as they pass, adds the AR head's own token after them, and drafts anew.

        Drafts never influence what an AR row chooses, so with "passes if it is that token" the output is the AR
        head's, greedy or sampled. After a rejection nothing is proposed: the masks saw a wrong token. (Keeping what is
        left of the old drafts, or taking the AR rows' choices behind the wrong token instead, gave fewer tokens per
        forward on wedlm-nano, see docs/generation.md.)

        Args:
            order: of the forward.
            is_ar: `(A, M)` bool, see [`ar_rows`].
            ar_tokens: `(A, M)` int64, what each AR row chose for the slot after its own.
            passes: `(A, M)` bool, whether the draft in the slot after an AR row's is accepted.
            proposed: `(A, M)` bool, masks confident enough to be drafts. Only a run right after the new AR token is
                taken.
            proposals: `(A, M)` int64, their argmax.

        Returns:
            The final run, `(A, 1)` int64, cut after an end token.
        """
        slots = order.logit_slots
        rows, size = self.tokens.shape
        # Slot `size` is a bin for columns that say nothing.
        target = torch.where(is_ar, slots + 1, size)
        is_accepted = torch.zeros(rows, size + 1, dtype=torch.bool, device=slots.device).scatter_(1, target, passes)
        expected = self.tokens.new_full((rows, size + 1), -1).scatter_(1, target, ar_tokens)[:, :size]
        is_draft = self.filled & (self.slots < self.extent) & (self.slots >= self.pending)
        agrees = (self.slots < self.pending) | (is_draft & is_accepted[:, :size])
        last = agrees.cumprod(1).sum(1, keepdim=True)  # the slot that the AR token takes
        is_clean = last == self.pending + is_draft.sum(1, keepdim=True)

        confident = torch.zeros_like(self.filled).scatter_(1, slots, proposed)
        drafts = (confident | (self.slots <= last)).cumprod(1).bool() & (self.slots > last) & is_clean
        tokens = torch.zeros_like(self.tokens).scatter_(1, slots, proposals)
        tokens = torch.where(self.slots == last, expected, torch.where(drafts, tokens, self.tokens))
        # Nothing that lies behind an end token is worth a slot.
        is_end = torch.isin(tokens, self.end_tokens)
        ends = drafts & is_end
        drafts &= ends.cumsum(1) == ends
        self.ends_ahead = ends.any(1, keepdim=True)
        self.filled = (self.slots <= last) | drafts
        self.tokens = tokens.masked_fill_(~self.filled, self.mask_token_id)
        self.extent = torch.maximum(self.extent, last + 1)
        run = torch.minimum(last + 1, self.pending + self.limit - self.new_tokens)
        run = self._cut_after_end(run, is_end)
        if self.fixed_width is not None:  # idle rows
            run = run.masked_fill(self.pending == 0, 0)
        self.accepted = torch.minimum(last, run) - self.pending
        return run

    def _cut_after_end(self, run: torch.Tensor, is_end: torch.Tensor) -> torch.Tensor:
        is_end = self._is_fresh(run) & is_end
        self.ended = is_end.any(1, keepdim=True)
        return torch.where(self.ended, is_end.long().argmax(1, keepdim=True) + 1, run)

    def _is_fresh(self, run: torch.Tensor) -> torch.Tensor:
        return (self.slots >= self.pending) & (self.slots < run)

    def slide(self, run: torch.Tensor, stopped: torch.Tensor, broken: torch.Tensor) -> Slide:
        """Takes the slots that are cached now off the left, and lets the other final ones be pending.

        Args:
            run: `(A, 1)` int64, slots from the left that are final.
            stopped: `(A, 1)` bool, rows that end here whatever their last token is.
            broken: `(A, 1)` bool, rows whose logits are no numbers.

        Returns:
            The host reads back once a step, here.
        """
        fresh = self._is_fresh(run)
        self.accepted = torch.minimum(self.accepted, run - self.pending)  # a stopping criterion may have cut the run
        places = torch.where(fresh, self.new_tokens + self.slots - self.pending, self.limit)
        self.output.scatter_(1, places, self.tokens)
        self.new_tokens = self.new_tokens + run - self.pending
        finished = self.ended | stopped | (self.new_tokens >= self.limit)

        # A forward sees final tokens first, so what it computed for them is final too: all of the old pending run, and
        # under verification every accepted draft.
        committed = (run - 1).clamp_(min=0) if self.verified else self.pending
        pending = run - committed
        is_filled = self.filled & (self.slots < self.extent)
        ahead = (is_filled.sum(1, keepdim=True) - run).clamp_(min=0)
        # Up to where the canvas is in use: what is filled beyond the run stays.
        if self.verified:
            used = pending + ahead
        else:
            used = torch.where(is_filled, self.slots + 1, 0).amax(1, keepdim=True)
            if self.block:
                has_masks = (~self.filled & (self.slots < self.extent)).any(1, keepdim=True)
                used = torch.where(has_masks, self.extent, used)
            used = torch.maximum(used - committed, pending)
        if self.fixed_width is not None:  # finished rows stay, with nothing in play
            is_idle = finished | torch.tensor(self.is_idle, device=finished.device)[:, None]
            pending, used, ahead = (value.masked_fill(is_idle, 0) for value in (pending, used, ahead))
            is_filled = is_filled & ~is_idle
        self._shift(committed, is_filled)
        self.start = self.start + committed
        self.pending = pending
        self.is_first = False

        counts = [committed, self.accepted, ahead, self.new_tokens, pending, used, self.ends_ahead, finished, broken]
        cached, accepted, *state, ends, breaks = map(list, zip(*torch.cat(counts, 1).tolist(), strict=True))
        self.ahead_counts, self.new_counts, self.pending_counts, self.used_counts, self.are_ends_ahead = state
        flags = list(map(bool, ends)), list(map(bool, breaks))
        slide = Slide(cached, accepted, self.ahead_counts, self.new_counts, *flags)
        if self.fixed_width is not None:
            self.is_idle = list(map(bool.__or__, self.is_idle, slide.finished))
        return slide

    def refill(self, window_size: int) -> None:
        """Makes room for W masks: behind the drafts under verification, else behind the pending tokens, where what is
        filled out of order keeps its place.

        Args:
            window_size: W. A row whose answer has less room left gets fewer.
        """
        self.extents, self.mask_counts = [], []
        for entry, (pending, used, new) in enumerate(
            zip(self.pending_counts, self.used_counts, self.new_counts, strict=True)
        ):
            room, remaining = used - pending, self.limit - new
            if self.is_idle[entry]:
                wanted = 0
            elif self.are_ends_ahead[entry]:
                wanted = room
            elif self.verified:
                # The leftmost mask's own slot goes to an AR token, so masks are worth their place from two on.
                wanted = room + window_size if remaining > room + 1 else room
            elif self.block:
                wanted = room or window_size
            else:
                wanted = max(room, window_size)
            self.extents.append(pending + min(wanted, remaining))
            self.mask_counts.append(self.extents[-1] - pending - self.ahead_counts[entry])
        self.extent = torch.tensor(self.extents, device=self.slots.device)[:, None]

    def _shift(self, offset: torch.Tensor, in_play: torch.Tensor) -> None:
        """Moves every canvas left by `offset` `(A, 1)`, onto as many slots as any later step can need."""
        old_size = self.tokens.shape[1]
        self.slots = torch.arange(2 * self.largest + 1, device=self.tokens.device)[None]
        source = self.slots + offset
        inside = source < old_size
        source = source.clamp(max=old_size - 1)
        self.filled = (self.filled & in_play).gather(1, source) & inside
        self.tokens = self.tokens.gather(1, source).masked_fill_(~self.filled, self.mask_token_id)

    def select(self, rows: list[int]) -> None:
        """Goes on with these rows only, in this order."""
        index = torch.tensor(rows, device=self.tokens.device, dtype=torch.int64)
        tensors = ("tokens", "filled", "pending", "start", "extent", "new_tokens", "output", "accepted", "ends_ahead")
        for name in tensors:
            setattr(self, name, getattr(self, name)[index])
        for name in ("pending_counts", "used_counts", "ahead_counts", "new_counts", "are_ends_ahead", "is_idle"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])
