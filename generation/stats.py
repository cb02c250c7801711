"""What a parallel `generate` returns beside the tokens: statistics, and a trace of every step if asked for.

`B` rows of the call, `Q` physical rows of a forward, `M` slots with logits.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.generation import GenerateDecoderOnlyOutput

from .decoding import StepOutcome
from .selection import token_entropy
from .window import PhysicalOrder, Row


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

    @property
    def tokens_per_forward(self) -> float:
        """New tokens / forwards, pooled over rows."""
        return self.new_tokens.sum().item() / max(1, self.forwards.sum().item())

    @property
    def prefix_cacheability(self) -> float:
        """p_cache = N_gen / N_fwd, pooled over rows: 1 where each slot was computed once; a little more where the last
        token, which no forward reads, counts."""
        return self.new_tokens.sum().item() / max(1, self.token_instances.sum().item())

    @property
    def acceptance_rate(self) -> float:
        """Drafts that passed / drafts that were checked, pooled over rows."""
        return self.accepted.sum().item() / max(1, self.drafted.sum().item())


class StatsRecorder:
    """Counts the steps of a call's `rows`. Prompt tokens that are not in the cache yet are no token instances."""

    def __init__(self, rows: list[Row]):
        self.rows = rows
        self.token_instances = [-row.pending for row in rows]
        self.runs: list[Counter[tuple[int, int]]] = [Counter() for _ in rows]  # forwards, by `checked, accepted`

    def observe(self, outcome: StepOutcome) -> None:
        """Takes in a step."""
        for count, row in zip(outcome.order.counts, outcome.rows, strict=True):
            if count:  # where shapes are fixed, finished rows stay, as padding
                self.token_instances[row.row.index] += count
                self.runs[row.row.index][row.checked, row.accepted] += 1

    @property
    def stats(self) -> DecodingStats:
        """The counts so far."""
        drafted, accepted = self._by_depth(0), self._by_depth(1)
        new_tokens, forwards = [row.new_count for row in self.rows], [runs.total() for runs in self.runs]
        counts = map(torch.tensor, (new_tokens, forwards, self.token_instances))
        return DecodingStats(*[*counts, drafted.sum(1), accepted.sum(1), drafted, accepted])

    def _by_depth(self, which: int) -> torch.Tensor:
        """`(B, D)`: runs of more than d drafts (0), or of more than d accepted ones (1)."""
        deepest = max((run[0] for runs in self.runs for run in runs), default=0)
        found = [
            [sum(count for run, count in runs.items() if run[which] > depth) for depth in range(deepest)]
            for runs in self.runs
        ]
        return torch.tensor(found, dtype=torch.int64).view(len(self.runs), deepest)


@dataclass
class TraceStep:
    """One step, for the `A` rows still in use. All tensors are on the CPU.

    Attributes:
        rows: the call's row of each entry.
        input_ids: `(A, Q)` int64, tokens in physical order.
        position_ids: `(A, Q)` int64, their logical positions.
        counts: physical rows of each entry that are no padding: the last ones.
        committed: how many of those, from the left, entered the cache for good.
        logit_positions: `(A, M)` int64, logical positions of the physical rows whose logits were computed.
        is_mask: `(A, M)` bool, which of them are masks.
        entropy: `(A, M)` float32, H in nats.
        filled: `(A, M)` bool, masks that this step filled; under verification, masks whose argmax became a draft.
        tokens: `(A, M)` int64, what they were filled with.
        likeliest: `(A, M, 5)` int64, the tokens of the highest probability, descending.
        probabilities: `(A, M, 5)` float32, by the raw logits; of a branch's drafts, among those on the shortlist.
        decided: offsets (from the prompt's end) of the new tokens whose value this step settled, per entry.
    """

    rows: list[int]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    counts: list[int]
    committed: list[int]
    logit_positions: torch.Tensor
    is_mask: torch.Tensor
    entropy: torch.Tensor
    filled: torch.Tensor
    tokens: torch.Tensor
    likeliest: torch.Tensor
    probabilities: torch.Tensor
    decided: list[list[int]]


class TraceRecorder:
    """Keeps a [`TraceStep`] of every step, in `steps`."""

    def __init__(self, mask_token_id: int | None) -> None:
        self.mask_token_id = mask_token_id
        self.steps: list[TraceStep] = []

    def observe(self, outcome: StepOutcome) -> None:
        """Adds the step."""
        order, selection = outcome.order, outcome.selection
        tokens, is_mask = selection.tokens.cpu(), selection.is_mask.cpu().clone()
        width, end = order.logit_count, order.input_ids.shape[1] - order.masks_behind
        filled, positions = torch.zeros_like(is_mask), torch.full_like(tokens, -1)
        positions[:, :width] = order.position_ids[:, end - width : end].cpu()
        for entry, row in enumerate(outcome.rows):
            for column, slot, _ in row.filled:
                filled[entry, column] = True
                positions[entry, column] = row.row.prompt_length + order.first[entry] + slot
        # Columns behind the logits are drafts of branches, of which one may have fewer than another.
        is_mask[:, width:] &= filled[:, width:]
        entropy, likeliest, probabilities = self._predicted(outcome)
        self.steps.append(
            TraceStep(
                rows=order.rows,
                input_ids=_padded_in_front(order.input_ids, order),
                position_ids=_padded_in_front(order.position_ids, order),
                counts=order.counts,
                committed=[row.committed for row in outcome.rows],
                logit_positions=positions,
                is_mask=is_mask,
                entropy=entropy,
                filled=filled,
                tokens=tokens,
                likeliest=likeliest,
                probabilities=probabilities,
                decided=[
                    [first + slot for _, slot, _ in row.decided]
                    for first, row in zip(order.first, outcome.rows, strict=True)
                ],
            )
        )

    def _predicted(self, outcome: StepOutcome) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """H of what the model said, MASK's logit included; its likeliest tokens and their probabilities."""
        logits, selection = outcome.logits.clone(), outcome.selection
        if selection.choice.mask_logits is not None:
            logits[..., self.mask_token_id] = selection.choice.mask_logits
        entropy = [token_entropy(logits)]
        tokens, probabilities = map(list, zip(likeliest(logits), strict=True))
        if selection.draft_scores is not None and selection.shortlist is not None:
            entropy.append(token_entropy(selection.draft_scores))
            places, shares = likeliest(selection.draft_scores)
            tokens.append(selection.shortlist.gather(-1, places))
            probabilities.append(shares)
        return torch.cat(entropy, dim=1).cpu(), torch.cat(tokens, dim=1).cpu(), torch.cat(probabilities, dim=1).cpu()

    def step_map(self, new_tokens: torch.Tensor) -> torch.Tensor:
        """The step that decided each new token, `(B, longest)` int64, -1 after a row's end.

        Args:
            new_tokens: `(B,)` int64, how many each row has.
        """
        found = torch.full((len(new_tokens), int(new_tokens.max())), -1)
        for index, step in enumerate(self.steps):
            for row, offsets in zip(step.rows, step.decided, strict=True):
                found[row, [offset for offset in offsets if offset < new_tokens[row]]] = index
        return found


def likeliest(logits: torch.Tensor, count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of the highest probability, `(…, count)` int64, and their probabilities, float32; logits `(…, V)`.
    Where V is less than `count`, what is missing has probability 0."""
    values, tokens = logits.topk(min(count, logits.shape[-1]), dim=-1)
    missing = (0, count - values.shape[-1])
    return F.pad(tokens, missing), F.pad((values - logits.logsumexp(-1, keepdim=True)).exp(), missing)


def _padded_in_front(values: torch.Tensor, order: PhysicalOrder) -> torch.Tensor:
    """`(A, Q)` on the CPU, with what pads short branches moved in front of the physical rows."""
    values = values.cpu()
    if not order.masks_behind or not isinstance(order.slot_mask, torch.Tensor):
        return values
    behind = (~order.slot_mask).sum(1).tolist()
    return torch.stack([row.roll(count) for row, count in zip(values, behind, strict=True)])


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
    trace: list[TraceStep] | None = None
    step_map: torch.Tensor | None = None
