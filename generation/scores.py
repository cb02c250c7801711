"""What each new token was chosen from: `output_scores`, `output_logits` and log-probabilities.

`B` rows of the call, `V` vocabulary.
"""

from collections.abc import Collection
from typing import Any

import torch

from .decoding import StepOutcome


class ScoreRecorder:
    """Keeps what each token was chosen from, in whatever order tokens are decided.

    Args:
        mask_token_id: M.
        keep: of `"log_probs"`, `"scores"` and `"logits"`, see [`output`].
    """

    def __init__(self, mask_token_id: int | None, keep: Collection[str]):
        self.mask_token_id = mask_token_id
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows and offsets of each step's tokens
        self._kept: dict[str, list[torch.Tensor]] = {name: [] for name in keep}

    def observe(self, outcome: StepOutcome) -> None:
        """Takes what the step decided."""
        if not self._kept:
            return
        order, choice = outcome.order, outcome.selection.choice
        decided = [
            (entry, column, order.sequences[entry], order.first[entry] + slot, token)
            for entry, one in enumerate(outcome.sequences)
            for column, slot, token in one.decided
        ]
        if not decided:
            return
        entries, columns, rows, offsets, tokens = torch.tensor(decided, device=outcome.logits.device).unbind(1)
        logits = outcome.logits[entries, columns]
        if choice.mask_logits is not None:
            logits[:, self.mask_token_id] = choice.mask_logits[entries, columns]
        self._places.append((rows, offsets))
        for name, kept in self._kept.items():
            if name == "log_probs":
                kept.append(logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1))
            else:
                kept.append(logits if name == "logits" else choice.scores[entries, columns])

    def output(self, new_tokens: torch.Tensor, pad_token_id: int) -> dict[str, Any]:
        """What was kept.

        Args:
            new_tokens: `(B,)` int64, how many each row has.
            pad_token_id: stands after a row's end.

        Returns:
            `log_probs`: log p(token) under the model's raw logits, `(B, new tokens)` float32; 0 after a row's end.
            `scores`, processed, and `logits`, raw: one `(B, V)` float32 tensor for each new token. After a row's end
            all is certain: 0 for the padding token and −inf for the others.
        """
        found: dict[str, Any] = {}
        for name, kept in self._kept.items():
            table = self._by_token(kept, new_tokens, 0.0 if name == "log_probs" else float("-inf"))
            if name == "log_probs":
                found[name] = table.T.contiguous()
            else:
                is_behind = torch.arange(len(table), device=table.device)[:, None] >= new_tokens.to(table.device)
                table[..., pad_token_id].masked_fill_(is_behind, 0.0)
                found[name] = table.unbind(0)
        return found

    def _by_token(self, kept: list[torch.Tensor], new_tokens: torch.Tensor, value: float) -> torch.Tensor:
        """`(longest, B, …)`: what was kept for each token, `value` after a row's end."""
        longest, device = int(new_tokens.max()), kept[0].device
        new_tokens = new_tokens.to(device)
        table = kept[0].new_full((longest + 1, len(new_tokens), *kept[0].shape[1:]), value)
        for (rows, offsets), values in zip(self._places, kept, strict=True):
            # What lies behind an end token is gone: into the last line, which is dropped.
            table[torch.where(offsets < new_tokens[rows], offsets, longest), rows] = values
        return table[:longest]
