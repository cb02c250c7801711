"""What each new token was chosen from: `output_scores`, `output_logits` and log-probabilities.

`B` rows of the call, `V` vocabulary.
"""

import torch

from .decoding_wedlm import StepOutcome


class ScoreRecorder:
    """A [`StepObserver`] that keeps what each token was chosen from, in whatever order tokens are decided.

    Args:
        mask_token_id: M.
        keep_scores: keep the processed scores.
        keep_logits: keep the model's raw logits.
    """

    def __init__(self, mask_token_id: int, keep_scores: bool, keep_logits: bool):
        self.mask_token_id = mask_token_id
        self.keep_scores = keep_scores
        self.keep_logits = keep_logits
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows and offsets of each step's tokens
        self._log_probs: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []

    def observe(self, outcome: StepOutcome) -> None:
        """Takes what the step decided."""
        order, choice = outcome.order, outcome.selection.choice
        decided = [
            (entry, column, order.rows[entry], order.first[entry] + slot, token)
            for entry, row in enumerate(outcome.rows)
            for column, slot, token in row.decided
        ]
        if not decided:
            return
        entries, columns, rows, offsets, tokens = torch.tensor(decided, device=outcome.logits.device).unbind(1)
        logits = outcome.logits[entries, columns]
        logits[:, self.mask_token_id] = choice.mask_logits[entries, columns]
        self._places.append((rows, offsets))
        self._log_probs.append(logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1))
        if self.keep_scores:
            self._scores.append(choice.scores[entries, columns])
        if self.keep_logits:
            self._logits.append(logits)

    def end(self) -> None:
        """Nothing is left to do."""

    def log_probs(self, new_tokens: torch.Tensor) -> torch.Tensor:
        """log p(token) under the model's raw logits, `(B, new tokens)` float32; 0 after a row's end.

        Args:
            new_tokens: `(B,)` int64, how many each row has.
        """
        return self._by_token(self._log_probs, new_tokens, 0.0).T.contiguous()

    def scores(self, new_tokens: torch.Tensor, pad_token_id: int) -> tuple[torch.Tensor, ...] | None:
        """Processed scores: one `(B, V)` float32 tensor for each new token; `None` if not kept.

        After a row's end all is certain: 0 for the padding token and −inf for the others.

        Args:
            new_tokens: `(B,)` int64, how many each row has.
            pad_token_id: stands after a row's end.
        """
        return self._distributions(self._scores, new_tokens, pad_token_id) if self.keep_scores else None

    def logits(self, new_tokens: torch.Tensor, pad_token_id: int) -> tuple[torch.Tensor, ...] | None:
        """The model's raw logits, like [`scores`]."""
        return self._distributions(self._logits, new_tokens, pad_token_id) if self.keep_logits else None

    def _distributions(
        self, kept: list[torch.Tensor], new_tokens: torch.Tensor, pad_token_id: int
    ) -> tuple[torch.Tensor, ...]:
        table = self._by_token(kept, new_tokens, float("-inf"))
        is_behind = torch.arange(len(table), device=table.device)[:, None] >= new_tokens.to(table.device)
        table[..., pad_token_id].masked_fill_(is_behind, 0.0)
        return table.unbind(0)

    def _by_token(self, kept: list[torch.Tensor], new_tokens: torch.Tensor, value: float) -> torch.Tensor:
        """`(longest, B, …)`: what was kept for each token, `value` after a row's end."""
        new_tokens = new_tokens.to(kept[0].device)
        table = kept[0].new_full((int(new_tokens.max()), len(new_tokens), *kept[0].shape[1:]), value)
        for (rows, offsets), values in zip(self._places, kept, strict=True):
            is_kept = offsets < new_tokens[rows]  # what lies behind an end token is gone
            table[offsets[is_kept], rows[is_kept]] = values[is_kept]
        return table
