"""Statistics of a parallel `generate`, and its other outputs beside tokens. `B` rows of the call, `V` vocabulary."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList

from .rows import SequenceState
from .rules import StepOutcome


@dataclass
class DecodingStats:
    """Counts of one `generate` call, for each of its `B` rows.

    Attributes:
        new_tokens: `(B,)` int64, tokens generated, the end token included.
        forwards: `(B,)` int64, forwards that the row took part in; the prefill is the first of them.
        token_instances: `(B,)` int64, tokens processed after the prompt: N_fwd of prefix cacheability (paper §6.3).
        drafted: `(B,)` int64, drafts that were checked (verified decoding only).
        accepted: `(B,)` int64, drafts that passed.
        drafted_by_depth: `(B, D)` int64, the checked drafts by their place in their run.
        accepted_by_depth: `(B, D)` int64, those that passed.
    """

    new_tokens: torch.Tensor
    forwards: torch.Tensor
    token_instances: torch.Tensor
    drafted: torch.Tensor
    accepted: torch.Tensor
    drafted_by_depth: torch.Tensor
    accepted_by_depth: torch.Tensor

    @classmethod
    def of_ar(cls, tokens: torch.Tensor) -> "DecodingStats":
        """Of plain decoding, one token per forward: `tokens` are those of each row, `(B,)` int64."""
        nothing, no_depth = torch.zeros_like(tokens), tokens.new_zeros(len(tokens), 0)
        return cls(tokens, tokens.clone(), (tokens - 1).clamp(min=0), nothing, nothing.clone(), no_depth, no_depth)

    def __str__(self) -> str:
        """A table: a line for each row, and one for their sums where there are several."""
        columns = (self.new_tokens, self.forwards, self.accepted, self.drafted)
        counts = torch.stack([column.cpu() for column in columns], dim=1)
        named = [(str(index), *row) for index, row in enumerate(counts.tolist())]
        named += [("all", *counts.sum(0).tolist())] if len(named) > 1 else []
        lines = [("row", "new tokens", "forwards", "tokens per forward", "drafts accepted")]
        for name, tokens, forwards, accepted, drafted in named:
            per_forward = f"{tokens / max(1, forwards):.2f}"
            lines.append((name, str(tokens), str(forwards), per_forward, f"{accepted} of {drafted}"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)

    @property
    def tokens_per_forward(self) -> float:
        """New tokens / forwards, pooled over rows."""
        return self.new_tokens.sum().item() / max(1, self.forwards.sum().item())

    @property
    def prefix_cacheability(self) -> float:
        """p_cache = N_gen / N_fwd, pooled over rows: 1 where each slot was computed once; a little more where the last
        token, which no forward reads, counts."""
        return self.new_tokens.sum().item() / max(1, self.token_instances.sum().item())


class EndRecorder(StoppingCriteriaList):
    """The stopping criteria of plain decoding, which note where each row ends: what follows there may be padding."""

    new_tokens: Any = 0  # (B,) int64, so far
    is_open: Any = True  # (B,) bool, whether none of them ended the row

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        """The parent's."""
        is_over = super().__call__(input_ids, scores, **kwargs)
        self.new_tokens = self.new_tokens + torch.ones_like(is_over, dtype=torch.int64) * self.is_open
        self.is_open = self.is_open & ~is_over
        return is_over


class StatsRecorder:
    """Counts the steps of a call. Prompt tokens that are not in the cache yet are no token instances."""

    def __init__(self, sequences: list[SequenceState]):
        self.sequences = sequences
        self.forwards = [0 for _ in sequences]
        self.token_instances = [-sequence.pending for sequence in sequences]
        self.drafted: list[Counter[int]] = [Counter() for _ in sequences]  # by depth, from 1
        self.accepted: list[Counter[int]] = [Counter() for _ in sequences]

    def observe(self, step: StepOutcome) -> None:
        """Counts a step."""
        for rows, outcome in zip(step.step.rows, step.sequences, strict=True):
            if rows:  # where shapes are fixed, finished sequences stay, as padding
                index, root = outcome.sequence.index, outcome.checked.start - 1
                self.forwards[index] += 1
                self.token_instances[index] += len(rows)
                self.drafted[index].update(rows[place].position - rows[root].position for place in outcome.checked)
                self.accepted[index].update(range(1, len(outcome.accepted) + 1))

    @property
    def stats(self) -> DecodingStats:
        """The counts so far."""
        deepest = max((depth for counts in self.drafted for depth in counts), default=0)
        drafted, accepted = (
            torch.tensor([[counts[depth + 1] for depth in range(deepest)] for counts in found])
            .view(len(self.sequences), deepest)
            .long()
            for found in (self.drafted, self.accepted)
        )
        new_tokens = [sequence.new_count for sequence in self.sequences]
        tokens, forwards, instances = map(torch.tensor, (new_tokens, self.forwards, self.token_instances))
        return DecodingStats(tokens, forwards, instances, drafted.sum(1), accepted.sum(1), drafted, accepted)


class ScoreRecorder:
    """Keeps the logits, scores or log-probabilities of each new token, in whatever order tokens are decided.

    Args:
        keep: of `"log_probs"`, `"scores"` and `"logits"`, see [`output`].
    """

    def __init__(self, keep: Collection[str]):
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows and offsets of each step's tokens
        self._kept: dict[str, list[torch.Tensor]] = {name: [] for name in keep}

    def observe(self, outcome: StepOutcome) -> None:
        """Keeps those of the tokens that a step decided."""
        if not self._kept or not (decided := outcome.decided):
            return
        entries, places, rows, offsets, tokens = torch.tensor(decided, device=outcome.logits.device).unbind(1)
        logits = outcome.logits_at(entries, places)
        self._places.append((rows, offsets))
        for name, kept in self._kept.items():
            if name == "log_probs":
                kept.append(logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1))
            else:
                kept.append(logits if name == "logits" else outcome.scores[entries, places])

    def output(self, new_tokens: torch.Tensor, pad_token_id: int) -> dict[str, Any]:
        """What was kept, in the order of the tokens.

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
        """The kept values by token and row, `(longest, B, …)`, and `value` after a row's end."""
        longest, device = int(new_tokens.max()), kept[0].device
        new_tokens = new_tokens.to(device)
        table = kept[0].new_full((longest + 1, len(new_tokens), *kept[0].shape[1:]), value)
        for (rows, offsets), values in zip(self._places, kept, strict=True):
            # Tokens behind an end token were dropped: their values go into the last line, which is dropped too.
            table[torch.where(offsets < new_tokens[rows], offsets, longest), rows] = values
        return table[:longest]


@dataclass
class WeDLMGenerateOutput(GenerateDecoderOnlyOutput):
    """[`GenerateDecoderOnlyOutput`] plus statistics, trace and log-probabilities of parallel decoding.

    `scores` and `logits` hold, for each new token, the distribution that it was chosen from: under verification the AR
    head's, else that of its mask in the step that filled it.

    Args:
        log_probs (`torch.FloatTensor` of shape `(B, new tokens)`, *optional*, under verification): log p of each new
            token under the AR head's raw logits; 0 after a row's end.
        stats (`DecodingStats`): counts per row, and the ratios that follow from them.
        trace (`list[TraceStep]`, *optional*, with `output_trace=True`): every step.
        step_map (`torch.LongTensor` of shape `(B, new tokens)`, *optional*, with `output_trace=True`): the step (from
            0) that decided each new token; -1 after a row's end.
    """

    log_probs: torch.Tensor | None = None
    stats: DecodingStats | None = None
    trace: list[Any] | None = None
    step_map: torch.Tensor | None = None
