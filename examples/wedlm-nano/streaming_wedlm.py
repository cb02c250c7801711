"""From rows that advance raggedly to what a streamer expects."""

from typing import Any

import torch


class TokenStream:
    """Feeds a streamer as `generate` would.

    One row: final tokens go out as soon as they are, several in one `put` of shape `(n,)`, and a streamer with
    `put_draft` (the protocol of transformers' diffusion streamers) gets the window, masks included. Several rows: one
    `put` of shape `(B,)` for each position, once every row has its token; padding after a row's end.

    Args:
        streamer: a `BaseStreamer`.
        batch_size: B.
        pad_token_id: stands after a row's end.
    """

    def __init__(self, streamer: Any, batch_size: int, pad_token_id: int):
        self.streamer = streamer
        self.pad_token_id = pad_token_id
        self.tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self.is_finished = [False] * batch_size
        self.sent = 0

    def put(self, row: int, tokens: torch.Tensor, is_finished: bool) -> None:
        """Takes `(n,)` final tokens of a row, and sends what is complete."""
        self.tokens[row].extend(tokens.tolist())
        self.is_finished[row] = is_finished
        if len(self.tokens) == 1:
            if len(tokens):  # a step may fill slots and still make nothing final
                self.streamer.put(tokens)
            return
        lengths = [len(row_tokens) for row_tokens in self.tokens]
        unfinished = [length for length, done in zip(lengths, self.is_finished, strict=True) if not done]
        complete = min(unfinished, default=max(lengths))
        for position in range(self.sent, complete):
            column = [row[position] if position < len(row) else self.pad_token_id for row in self.tokens]
            self.streamer.put(torch.tensor(column))
        self.sent = max(self.sent, complete)

    @property
    def wants_drafts(self) -> bool:
        """Whether [`put_draft`] does anything: for a single row and a streamer that takes drafts."""
        return len(self.tokens) == 1 and hasattr(self.streamer, "put_draft")

    def put_draft(self, window: torch.Tensor) -> None:
        """Takes `(n,)` tokens of the window, masks included."""
        if self.wants_drafts:
            self.streamer.put_draft(window)

    def end(self) -> None:
        """Tells the streamer that generation is over."""
        self.streamer.end()
