"""What each new token was chosen from: `output_scores`, `output_logits` and log-probabilities.

`B` rows of the call, `A` rows in use, `M` slots of a row, `V` vocabulary.
"""

import torch

from .sampling_wedlm import Choice


class ScoreRecorder:
    """Keeps what each new token was chosen from, in whatever order tokens are decided.

    Args:
        batch_size: B.
        limit: new tokens allowed.
        keep_scores: keep the processed scores.
        keep_logits: keep the model's raw logits.
        device: of the log-probabilities.

    Attributes:
        log_probs: `(B, limit + 1)` float32, log p(token) under the model's raw logits; the last column is a bin.
    """

    def __init__(self, batch_size: int, limit: int, keep_scores: bool, keep_logits: bool, device: torch.device):
        self.keep_scores = keep_scores
        self.keep_logits = keep_logits
        self.log_probs = torch.zeros(batch_size, limit + 1, device=device)
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows and offsets of each step's tokens
        self._scores: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []

    def look(self, logits: torch.Tensor) -> None:
        """Takes the raw logits `(A, M, V)` float32 of a step, before anything is overwritten in them."""
        self._normalizer = logits.logsumexp(-1)
        self._raw = logits.clone() if self.keep_logits else None

    def add(
        self,
        rows: list[int],
        offsets: torch.Tensor,
        decided: torch.Tensor,
        tokens: torch.Tensor,
        choice: Choice,
        logits: torch.Tensor,
    ) -> None:
        """Takes what the step decided.

        Args:
            rows: the call's row that each entry is.
            offsets: `(A, M)` int64, how many new tokens lie before each slot's.
            decided: `(A, M)` bool, the slots whose token is decided now.
            tokens: `(A, M)` int64, those tokens.
            choice: what they were chosen from.
            logits: `(A, M, V)` float32, as [`look`] saw them, but for MASK's.
        """
        index = torch.tensor(rows, device=offsets.device)
        log_probs = logits.gather(-1, tokens.clamp(min=0)[..., None])[..., 0] - self._normalizer
        limit = self.log_probs.shape[1] - 1
        places = torch.where(decided, offsets.clamp(0, limit), limit)
        self.log_probs[index[:, None], places] = log_probs
        if self.keep_scores or self.keep_logits:
            self._places.append((index[:, None].expand_as(offsets)[decided], offsets[decided]))
        if self.keep_scores:
            self._scores.append(choice.scores[decided])
        if self._raw is not None:
            self._logits.append(self._raw[decided])

    def scores(self, new_tokens: torch.Tensor, pad_token_id: int) -> tuple[torch.Tensor, ...] | None:
        """Processed scores: one `(B, V)` float32 tensor for each new token; `None` if not kept.

        After a row's end all is certain: 0 for the padding token and −inf for the others.

        Args:
            new_tokens: `(B,)` int64, how many each row has.
            pad_token_id: stands after a row's end.
        """
        return self._by_token(self._scores, new_tokens, pad_token_id) if self.keep_scores else None

    def logits(self, new_tokens: torch.Tensor, pad_token_id: int) -> tuple[torch.Tensor, ...] | None:
        """The model's raw logits, like [`scores`]."""
        return self._by_token(self._logits, new_tokens, pad_token_id) if self.keep_logits else None

    def _by_token(
        self, kept: list[torch.Tensor], new_tokens: torch.Tensor, pad_token_id: int
    ) -> tuple[torch.Tensor, ...]:
        new_tokens = new_tokens.to(kept[0].device)
        length = int(new_tokens.max())
        table = kept[0].new_full((length, len(new_tokens), kept[0].shape[-1]), float("-inf"))
        is_behind = torch.arange(length, device=table.device)[:, None] >= new_tokens
        table[..., pad_token_id].masked_fill_(is_behind, 0.0)
        for (rows, offsets), values in zip(self._places, kept, strict=True):
            is_kept = offsets < new_tokens[rows]  # what lies behind an end token is gone
            table[offsets[is_kept], rows[is_kept]] = values[is_kept]
        return table.unbind(0)
