"""From rows that advance raggedly to what a streamer expects."""

from dataclasses import dataclass
from typing import Any

import torch

from .decoding import StepOutcome
from .rows import SequenceState


@dataclass
class TokenStream:
    """Feeds a streamer as `generate` would.

    One sequence: final tokens go out as soon as they are, several in one `put` of shape `(n,)`, and a streamer with
    `put_draft` (the protocol of transformers' diffusion streamers) gets what is expected behind them, masks included.
    Several sequences: one `put` of shape `(B,)` for each position, once every sequence has its token; padding after a
    sequence's end. A streamer with `put_logits` gets what tokens were chosen from before it gets them: the call's row
    of each and the tokens, two lists, and the model's raw logits, `(N, V)` float32; in order within a row.
    """

    streamer: Any  # a `BaseStreamer`
    sequences: list[SequenceState]  # of the call
    pad_token_id: int  # stands after a sequence's end
    mask_token_id: int | None  # M; without one, padding stands for masks
    sent: int = 0  # positions, where there are several sequences

    def observe(self, outcome: StepOutcome) -> None:
        """Sends what a step made final, and what is expected next."""
        if hasattr(self.streamer, "put_logits") and (decided := outcome.decided):
            places = torch.tensor(decided, device=outcome.logits.device)
            logits = outcome.logits_at(places[:, 0], places[:, 1])
            self.streamer.put_logits([each[2] for each in decided], [each[4] for each in decided], logits)
        lengths = [one.new_count for one in self.sequences]
        if len(lengths) == 1:
            tokens, expected = outcome.sequences[0].new_tokens, self.sequences[0].expected
            if tokens:  # a step may fill slots and still make nothing final
                self.streamer.put(torch.tensor(tokens))
            if expected and hasattr(self.streamer, "put_draft"):
                mask = self.pad_token_id if self.mask_token_id is None else self.mask_token_id
                draft = [mask if token is None else token for token in expected]
                self.streamer.put_draft(torch.tensor(draft))
            return
        unfinished = [one.new_count for one in self.sequences if not one.is_finished]
        complete = min(unfinished, default=max(lengths))
        for position in range(self.sent, complete):
            column = [
                one.tokens[one.prompt_length + position] if position < one.new_count else self.pad_token_id
                for one in self.sequences
            ]
            self.streamer.put(torch.tensor(column))
        self.sent = max(self.sent, complete)
