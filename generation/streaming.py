"""Feeds streamers, which expect tokens in order, from sequences that advance at paces of their own."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from .rows import SequenceState
from .rules import StepOutcome


@dataclass
class TokenStream:
    """Feeds a streamer as `generate` would.

    One sequence: each step's final tokens in one `put` of shape `(n,)`. A streamer with `put_draft` (the protocol of
    transformers' diffusion streamers) then gets the draft behind them, masks included.
    Several sequences: one `put` of shape `(B,)` for each position, once every sequence has its token; padding after a
    sequence's end.
    A streamer with `put_logits` first gets, of the tokens that a step decided, two lists, their sequences' places in
    the call and the tokens, and the model's raw logits, `(N, V)` float32. Tokens of a sequence come in order.
    A streamer with `put_step` gets what each forward did, before its tokens: of the sequences in it the place in the
    call, the drafts that were checked, and those that passed.
    """

    streamer: Any  # a `BaseStreamer`
    sequences: list[SequenceState]  # of the call
    pad_token_id: int  # stands after a sequence's end
    mask_token_id: int | None  # M; without one, padding stands for masks
    sent: int = 0  # positions, of several sequences

    def observe(self, outcome: StepOutcome) -> None:
        """Sends the tokens that a step made final, and the draft behind them."""
        if hasattr(self.streamer, "put_logits") and (decided := outcome.decided):
            places = torch.tensor(decided, device=outcome.logits.device)
            logits = outcome.logits_at(places[:, 0], places[:, 1])
            self.streamer.put_logits([each[2] for each in decided], [each[4] for each in decided], logits)
        if hasattr(self.streamer, "put_step"):
            taken = zip(outcome.step.rows, outcome.sequences, strict=True)
            self.streamer.put_step(
                [(each.sequence.index, len(each.checked), len(each.accepted)) for rows, each in taken if rows]
            )
        lengths = [sequence.new_count for sequence in self.sequences]
        if len(lengths) == 1:
            tokens, expected = outcome.sequences[0].new_tokens, self.sequences[0].expected
            if tokens:  # a step may fill slots and still make nothing final
                self.streamer.put(torch.tensor(tokens))
            if expected and hasattr(self.streamer, "put_draft"):
                mask = self.pad_token_id if self.mask_token_id is None else self.mask_token_id
                draft = [mask if token is None else token for token in expected]
                self.streamer.put_draft(torch.tensor(draft))
            return
        unfinished = [sequence.new_count for sequence in self.sequences if not sequence.is_finished]
        complete = min(unfinished, default=max(lengths))
        ready = [sequence.new_tokens[self.sent : complete] for sequence in self.sequences]
        for column in zip_longest(*ready, fillvalue=self.pad_token_id):
            self.streamer.put(torch.tensor(column))
        self.sent = max(self.sent, complete)
