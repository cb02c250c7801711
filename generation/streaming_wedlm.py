"""From rows that advance raggedly to what a streamer expects."""

from typing import Any

import torch

from .decoding_wedlm import StepOutcome


class TokenStream:
    """Feeds a streamer as `generate` would.

    One row: final tokens go out as soon as they are, several in one `put` of shape `(n,)`, and a streamer with
    `put_draft` (the protocol of transformers' diffusion streamers) gets the window, masks included. Several rows: one
    `put` of shape `(B,)` for each position, once every row has its token; padding after a row's end.

    Args:
        streamer: a `BaseStreamer`.
        batch_size: B.
        pad_token_id: stands after a row's end.
        mask_token_id: M.
    """

    def __init__(self, streamer: Any, batch_size: int, pad_token_id: int, mask_token_id: int):
        self.streamer = streamer
        self.pad_token_id = pad_token_id
        self.mask_token_id = mask_token_id
        self.tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self.is_finished = [False] * batch_size
        self.sent = 0

    def observe(self, outcome: StepOutcome) -> None:
        """Sends what a step made final, and the window it leaves."""
        for row in outcome.rows:
            if not self.is_finished[row.row.index]:
                self._put(row.row.index, row.new_tokens, row.row.is_finished)
        window = outcome.rows[0].row.window
        if len(self.tokens) == 1 and not self.is_finished[0] and window and hasattr(self.streamer, "put_draft"):
            self.streamer.put_draft(torch.tensor([self.mask_token_id if token is None else token for token in window]))

    def _put(self, row: int, tokens: list[int], is_finished: bool) -> None:
        """Takes final tokens of a row, and sends what is complete."""
        self.tokens[row].extend(tokens)
        self.is_finished[row] = is_finished
        if len(self.tokens) == 1:
            if tokens:  # a step may fill slots and still make nothing final
                self.streamer.put(torch.tensor(tokens))
            return
        lengths = [len(row_tokens) for row_tokens in self.tokens]
        unfinished = [length for length, done in zip(lengths, self.is_finished, strict=True) if not done]
        complete = min(unfinished, default=max(lengths))
        for position in range(self.sent, complete):
            column = [row[position] if position < len(row) else self.pad_token_id for row in self.tokens]
            self.streamer.put(torch.tensor(column))
        self.sent = max(self.sent, complete)
