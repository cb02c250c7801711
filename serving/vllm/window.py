"""The paper's decoder as tensors: the windows of all requests of an engine (ALGORITHM.md §3).

This module does not import vLLM. `M` requests at most, `A` of a step, `C` rows of one, twice the largest window: as
many slots may be pending, and the window stands behind them.
"""

import torch

from ...generation.rules import select_masks


class Windows:
    """A window for each place that the engine has for a request.

    Slots are counted from the first token whose keys and values are not in the cache: first the pending tokens, then
    the window, each slot of it filled or a mask.
    """

    def __init__(self, places: int, largest: int, mask_token_id: int, device: torch.device):
        self.mask_token_id, self.columns = mask_token_id, torch.arange(2 * largest, device=device)
        shape = places, 2 * largest
        self.tokens = torch.full(shape, mask_token_id, device=device)
        self.is_filled = torch.zeros(shape, dtype=torch.bool, device=device)
        self.order = self.columns.repeat(places, 1)  # in which slots are run: filled ones, masks, then unused ones
        # Pending slots, those in use, W, and new tokens still allowed, those that are pending included.
        self.pending, self.size, self.window, self.left = torch.zeros(4, places, dtype=torch.int64, device=device)
        self.threshold, self.penalty = torch.zeros(2, places, device=device)  # τ in nats, λ in nats per position

    def begin(self, places: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Windows of masks alone, behind a prompt, at `places`, `(A,)`, with `left`, `(A,)`, new tokens allowed.
        Returns `(A, C)` int64, the tokens to run next, in their order."""
        self.tokens[places], self.is_filled[places] = self.mask_token_id, False
        self.pending[places], self.left[places] = 0, left
        return self._refill(places)

    def advance(
        self, places: torch.Tensor, rows: torch.Tensor, entropies: torch.Tensor, sampled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fills masks, commits what was pending, and slides the windows at `places`, `(A,)`. Of the order's slots the
        first `rows`, `(A,)`, were run, with these entropies, `(A, C)` float32 in nats, and tokens for them, `(A, C)`
        int64. Returns the committed tokens, `(A, C)`, of which the first `(A,)` count, and those to run next, `(A,
        C)`."""
        order, filled = self.order[places], self.is_filled[places]
        pending, size = self.pending[places], self.size[places, None]
        is_mask = ~filled.gather(1, order) & (self.columns < size) & (self.columns < rows[:, None])
        distance = order - order.masked_fill(~is_mask, order.shape[1]).amin(1, keepdim=True)
        chosen = select_masks(entropies, distance, is_mask, self.threshold[places, None], self.penalty[places, None])

        is_new = torch.zeros_like(filled).scatter(1, order, chosen)
        values = torch.zeros_like(order).scatter(1, order, sampled)
        tokens, filled = torch.where(is_new, values, self.tokens[places]), filled | is_new

        committed = torch.minimum(pending, rows)
        source = self.columns + committed[:, None]
        is_there = source < order.shape[1]
        source = source.clamp(max=order.shape[1] - 1)
        self.is_filled[places] = filled.gather(1, source) & is_there
        kept = tokens.gather(1, source)
        self.tokens[places] = torch.where(self.is_filled[places], kept, self.mask_token_id)
        self.pending[places] = self.is_filled[places].long().cumprod(1).sum(1)
        self.left[places] -= committed
        return tokens, committed, self._refill(places)

    def _refill(self, places: torch.Tensor) -> torch.Tensor:
        """Sets size and order; returns the tokens in it."""
        size = torch.minimum(self.pending[places] + self.window[places], self.left[places])
        self.size[places] = size
        kinds = torch.where(self.columns < size[:, None], (~self.is_filled[places]).long(), 2)
        self.order[places] = kinds.argsort(dim=1, stable=True)
        return self.tokens[places].gather(1, self.order[places])
