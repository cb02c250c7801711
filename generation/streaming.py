"""From rows that advance raggedly to what a streamer expects."""

from dataclasses import dataclass
from typing import Any

import torch

from .decoding import StepOutcome
from .window import Row


@dataclass
class TokenStream:
    """Feeds a streamer as `generate` would.

    One row: final tokens go out as soon as they are, several in one `put` of shape `(n,)`, and a streamer with
    `put_draft` (the protocol of transformers' diffusion streamers) gets the window, masks included. Several rows: one
    `put` of shape `(B,)` for each position, once every row has its token; padding after a row's end.

    Args:
        streamer: a `BaseStreamer`.
        rows: of the call.
        pad_token_id: stands after a row's end.
        mask_token_id: M; without one, padding stands for masks.
    """

    streamer: Any
    rows: list[Row]
    pad_token_id: int
    mask_token_id: int | None
    sent: int = 0  # positions, where there are several rows

    def observe(self, outcome: StepOutcome) -> None:
        """Sends what a step made final, and the window it leaves."""
        lengths = [row.new_count for row in self.rows]
        if len(lengths) == 1:
            tokens, window = outcome.rows[0].new_tokens, self.rows[0].window
            if tokens:  # a step may fill slots and still make nothing final
                self.streamer.put(torch.tensor(tokens))
            if window and hasattr(self.streamer, "put_draft"):
                mask = self.pad_token_id if self.mask_token_id is None else self.mask_token_id
                draft = [mask if token is None else token for token in window]
                self.streamer.put_draft(torch.tensor(draft))
            return
        unfinished = [length for length, row in zip(lengths, self.rows, strict=True) if not row.is_finished]
        complete = min(unfinished, default=max(lengths))
        for position in range(self.sent, complete):
            column = [
                row.tokens[row.prompt_length + position] if position < row.new_count else self.pad_token_id
                for row in self.rows
            ]
            self.streamer.put(torch.tensor(column))
        self.sent = max(self.sent, complete)
