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


class Window:
    """Pending tokens and windows of all rows in use. Each method is a fixed number of vectorised operations; only
    [`slide`] reads anything back.

    Args:
        prompt: `(A, P)` int64, the prompt tokens that are not cached yet, left-aligned.
        prompt_lengths: how many of them each row has.
        cached_lengths: tokens of each row that are in the cache already.
        limit: new tokens allowed.
        window_size: W.
        mask_token_id: M.
        end_tokens: `(E,)` int64, tokens that end a row.
        block: refill the window only when it holds no mask any more.
        verified: filled slots are drafts, see [`verify`].
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        prompt_lengths: list[int],
        cached_lengths: list[int],
        limit: int,
        window_size: int,
        mask_token_id: int,
        end_tokens: torch.Tensor,
        block: bool = False,
        verified: bool = False,
    ):
        device = prompt.device
        self.limit = limit
        self.window_size = min(window_size, limit)  # a canvas no larger than the tokens that can ever be in it
        self.mask_token_id = mask_token_id
        self.end_tokens = end_tokens
        self.block = block
        self.verified = verified

        first_window = self.window_size
        masks = prompt.new_full((prompt.shape[0], first_window), mask_token_id)
        self.slots = torch.arange(prompt.shape[1] + first_window, device=device)[None]  # (1, S)
        self.pending = torch.tensor(prompt_lengths, device=device)[:, None]  # (A, 1)
        self.start = torch.tensor(cached_lengths, device=device)[:, None]  # (A, 1), logical position of slot 0
        self.extent = self.pending + first_window  # (A, 1)
        self.filled = self.slots < self.pending  # (A, S)
        self.tokens = torch.cat([prompt, masks], dim=1).masked_fill(~self.filled, mask_token_id)  # (A, S)
        self.new_tokens = torch.zeros_like(self.pending)  # (A, 1), final ones
        self.drafted = torch.zeros_like(self.pending)  # (A, 1), drafts that were checked
        self.accepted = torch.zeros_like(self.pending)  # (A, 1), drafts that passed
        # One column more than a row can have: what must not be written lands there.
        self.output = prompt.new_zeros(prompt.shape[0], limit + 1)
        # What the host knows of the above, so that shapes need no synchronisation.
        self.pending_counts = list(prompt_lengths)
        self.extents = [length + first_window for length in prompt_lengths]
        self.mask_counts = [first_window] * len(prompt_lengths)

    def order(self) -> PhysicalOrder:
        """Topological reordering of pending tokens and windows (paper §4.1)."""
        width = max(self.extents)
        kind = (~self.filled).long().masked_fill_(self.slots >= self.extent, -1)  # -1 free, 0 filled, 1 mask
        slots = kind.argsort(dim=1, stable=True)[:, -width:]
        physical = torch.arange(width, device=slots.device)
        return PhysicalOrder(
            slots=slots,
            input_ids=self.tokens.gather(1, slots),
            position_ids=self.start + slots,
            cache_slots=self.start + (physical - (width - self.extent)) % width,
            counts=self.extents,
            logit_count=max(
                extent - pending + 1 if self.verified else masks
                for extent, pending, masks in zip(self.extents, self.pending_counts, self.mask_counts, strict=True)
            ),
        )

    def masks(self, order: PhysicalOrder) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the slots with logits: which are masks `(A, M)` bool, and how far from the leftmost `(A, M)` int64."""
        slots = order.slots[:, -order.logit_count :]
        is_mask = ~self.filled.gather(1, slots) & (slots < self.extent)
        return is_mask, slots - self.pending

    def fill(self, order: PhysicalOrder, chosen: torch.Tensor, tokens: torch.Tensor) -> None:
        """Fills the chosen `(A, M)` bool slots with `tokens` `(A, M)` int64."""
        slots = order.slots[:, -order.logit_count :]
        self.tokens.scatter_(1, slots, torch.where(chosen, tokens, order.input_ids[:, -order.logit_count :]))
        self.filled.scatter_(1, slots, chosen | self.filled.gather(1, slots))

    def final_run(self) -> torch.Tensor:
        """`(A, 1)` int64: slots from the left that are filled without a gap, cut after the first end token."""
        return self._cut_after_end((self.filled & (self.slots < self.extent)).cumprod(1).sum(1, keepdim=True))

    def next_tokens(self, order: PhysicalOrder) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the slots with logits: which are AR rows, the last pending token and the drafts `(A, M)` bool, and how
        many new tokens lie before what they predict `(A, M)` int64."""
        slots = order.slots[:, -order.logit_count :]
        is_ar = self.filled.gather(1, slots) & (slots >= self.pending - 1) & (slots < self.extent)
        return is_ar, self.new_tokens + slots + 1 - self.pending

    def tokens_after(self, order: PhysicalOrder) -> torch.Tensor:
        """The token in the slot after each slot with logits, `(A, M)` int64; MASK beyond the canvas."""
        canvas = torch.cat([self.tokens, torch.full_like(self.tokens[:, :1], self.mask_token_id)], dim=1)
        return canvas.gather(1, order.slots[:, -order.logit_count :] + 1)

    def output_with_drafts(self) -> torch.Tensor:
        """New tokens of each row as if all its drafts were final, `(A, limit + 1)` int64."""
        drafts = (self.slots >= self.pending) & (self.slots < self.extent)
        columns = torch.where(drafts, self.new_tokens + self.slots - self.pending, self.limit)
        return self.output.scatter(1, columns, self.tokens)

    def is_filled(self, order: PhysicalOrder) -> torch.Tensor:
        """Which slots with logits hold a token, `(A, M)` bool."""
        return self.filled.gather(1, order.slots[:, -order.logit_count :])

    def verify(
        self,
        order: PhysicalOrder,
        is_ar: torch.Tensor,
        ar_tokens: torch.Tensor,
        proposed: torch.Tensor,
        proposals: torch.Tensor,
    ) -> torch.Tensor:
        """Accepts drafts as long as they are the AR rows' own tokens, adds the AR token after them, and drafts anew.

        A draft is an argmax, so "draw the AR token and accept the draft if it is that token" is rejection sampling
        with q = 1 on the draft: the output is distributed as AR sampling, and equals AR decoding when greedy.

        Args:
            order: of the forward.
            is_ar: `(A, M)` bool, see [`next_tokens`].
            ar_tokens: `(A, M)` int64, what each AR row chose for the slot after its own.
            proposed: `(A, M)` bool, masks confident enough to be drafts. Only a run right after the new AR token is
                taken, and only if no draft was rejected: otherwise these masks saw a wrong token.
            proposals: `(A, M)` int64, their argmax.

        Returns:
            The final run, `(A, 1)` int64, cut after an end token.
        """
        slots = order.slots[:, -order.logit_count :]
        size = self.tokens.shape[1]
        # Slot `size` is a bin for columns that say nothing.
        expected = self.tokens.new_full((self.tokens.shape[0], size + 1), -1)
        expected.scatter_(1, torch.where(is_ar, slots + 1, size), ar_tokens)
        expected = expected[:, :size]
        in_play = self.slots < self.extent
        is_draft = self.filled & in_play & (self.slots >= self.pending)
        agrees = (self.slots < self.pending) | (is_draft & (expected == self.tokens))
        last = agrees.cumprod(1).sum(1, keepdim=True)  # the slot that the AR token takes
        checked, accepted = is_draft.sum(1, keepdim=True), last - self.pending

        confident = torch.zeros_like(self.filled).scatter_(1, slots, proposed)
        drafts = (confident | (self.slots <= last)).cumprod(1).bool() & (self.slots > last) & (accepted == checked)
        tokens = torch.zeros_like(self.tokens).scatter_(1, slots, proposals)
        tokens = torch.where(self.slots == last, expected, torch.where(drafts, tokens, self.tokens))
        self.filled = (self.slots <= last) | drafts
        self.tokens = tokens.masked_fill_(~self.filled, self.mask_token_id)
        run = self._cut_after_end(torch.minimum(last + 1, self.pending + self.limit - self.new_tokens))
        self.drafted, self.accepted = self.drafted + checked, self.accepted + accepted.minimum(run - self.pending)
        return run

    def _cut_after_end(self, run: torch.Tensor) -> torch.Tensor:
        is_end = self._is_fresh(run) & torch.isin(self.tokens, self.end_tokens)
        return torch.where(is_end.any(1, keepdim=True), is_end.long().argmax(1, keepdim=True) + 1, run)

    def _is_fresh(self, run: torch.Tensor) -> torch.Tensor:
        return (self.slots >= self.pending) & (self.slots < run)

    def slide(
        self, run: torch.Tensor, stopped: torch.Tensor, broken: torch.Tensor
    ) -> tuple[list[int], list[bool], list[bool]]:
        """Takes the slots that are cached now off the left, lets the other final ones be pending, refills the window.

        Args:
            run: `(A, 1)` int64, slots from the left that are final.
            stopped: `(A, 1)` bool, rows that end here whatever their last token is.
            broken: `(A, 1)` bool, rows whose logits are no numbers.

        Returns:
            How many slots of each row this forward cached for good, which rows are finished, and which are broken. The
            host reads back once a step, here.
        """
        fresh = self._is_fresh(run)
        columns = torch.where(fresh, self.new_tokens + self.slots - self.pending, self.limit)
        self.output.scatter_(1, columns, self.tokens)
        ended = (fresh & torch.isin(self.tokens, self.end_tokens)).any(1, keepdim=True)
        self.new_tokens = self.new_tokens + run - self.pending
        finished = ended | stopped | (self.new_tokens >= self.limit)

        # A forward sees final tokens first, so what it computed for them is final too: all of the old pending run, and
        # under verification every accepted draft.
        committed = run - 1 if self.verified else self.pending
        pending = run - committed
        remaining = self.limit - self.new_tokens
        in_play = self.slots < self.extent
        if self.verified:
            drafts = (self.filled & in_play).sum(1, keepdim=True) - run
            extent = pending + torch.minimum(drafts.clamp(min=0) + self.window_size, remaining)
        else:
            extent = pending + remaining.clamp(max=self.window_size)
        if self.block:
            has_masks = (in_play & ~self.filled).any(1, keepdim=True)
            extent = torch.where(has_masks, self.extent - committed, extent)
        self._shift(committed, in_play)
        self.start = self.start + committed
        self.pending = pending
        self.extent = extent

        masks = extent - self.filled.sum(1, keepdim=True)
        rows = torch.cat([committed, pending, extent, masks, finished, broken], dim=1).tolist()
        counts, self.pending_counts, self.extents, self.mask_counts, *flags = map(list, zip(*rows, strict=True))
        return counts, [bool(flag) for flag in flags[0]], [bool(flag) for flag in flags[1]]

    def _shift(self, offset: torch.Tensor, in_play: torch.Tensor) -> None:
        """Moves every canvas left by `offset` `(A, 1)`, onto as many slots as any later step can need."""
        old_size = self.tokens.shape[1]
        self.slots = torch.arange(2 * self.window_size + 1, device=self.tokens.device)[None]
        source = self.slots + offset
        inside = source < old_size
        source = source.clamp(max=old_size - 1)
        self.filled = (self.filled & in_play).gather(1, source) & inside
        self.tokens = self.tokens.gather(1, source).masked_fill_(~self.filled, self.mask_token_id)

    def select(self, rows: list[int]) -> None:
        """Goes on with these rows only, in this order."""
        index = torch.tensor(rows, device=self.tokens.device, dtype=torch.int64)
        for name in ("tokens", "filled", "pending", "start", "extent", "new_tokens", "output", "drafted", "accepted"):
            setattr(self, name, getattr(self, name)[index])
        for name in ("pending_counts", "extents", "mask_counts"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])
