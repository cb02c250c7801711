"""A trace of every step of a parallel `generate`, on request. Not part of the code beside saved checkpoints (hub.py).

`B` rows of the call, `A` of a step, `Q` physical rows of a forward, `M` slots with logits.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .rules import SequenceOutcome, StepOutcome
from .sampling import token_entropy


@dataclass
class TraceStep:
    """One step, for the `A` rows still in use. All tensors are on the CPU.

    Attributes:
        rows: the call's row of each entry.
        input_ids: `(A, Q)` int64, tokens in physical order.
        position_ids: `(A, Q)` int64, their logical positions.
        counts: physical rows of each entry that are not padding: the last ones.
        committed: how many of these entered the cache for good.
        kept: which of these entered the cache, counted from the first one.
        accepted: which of these are drafts that passed, counted alike.
        logit_positions: `(A, M)` int64, logical positions of the physical rows whose logits were computed.
        is_mask: `(A, M)` bool, which of them are masks.
        entropy: `(A, M)` float32, H in nats.
        filled: `(A, M)` bool, masks that this step filled; under verification, masks whose draft the next step
            checks.
        tokens: `(A, M)` int64, what they were filled with; 0 elsewhere.
        likeliest: `(A, M, 5)` int64, the tokens of the highest probability, descending.
        probabilities: `(A, M, 5)` float32, by the raw logits.
        decided: offsets (from the prompt's end) of the new tokens whose value this step settled, per entry.
    """

    rows: list[int]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    counts: list[int]
    committed: list[int]
    kept: list[list[int]]
    accepted: list[list[int]]
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

    def __init__(self) -> None:
        self.steps: list[TraceStep] = []

    def observe(self, outcome: StepOutcome) -> None:
        """Adds a step."""
        step, logits = outcome.step, outcome.logits.float()
        columns = torch.arange(logits.shape[1])
        counts = [len(rows) for rows in step.rows]
        first_row, first_mask = (len(columns) - torch.tensor(each)[:, None] for each in (counts, step.masks))
        filled, tokens = _filled(outcome)
        most_likely, probabilities = likeliest(logits)
        self.steps.append(
            TraceStep(
                rows=[each.sequence.index for each in outcome.sequences],
                input_ids=step.input_ids.cpu(),
                position_ids=step.position_ids.cpu(),
                counts=counts,
                committed=[len(each.kept) for each in outcome.sequences],
                kept=[each.kept for each in outcome.sequences],
                accepted=[each.accepted for each in outcome.sequences],
                logit_positions=step.position_ids[:, -len(columns) :].cpu().masked_fill(columns < first_row, -1),
                is_mask=columns >= first_mask,
                entropy=token_entropy(logits).cpu(),
                filled=filled,
                tokens=tokens,
                likeliest=most_likely.cpu(),
                probabilities=probabilities.cpu(),
                decided=[_decided(each) for each in outcome.sequences],
            )
        )

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


def _filled(outcome: StepOutcome) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows with logits are masks that the step filled, `(A, M)` bool, and with which tokens, int64. Under
    verification these are the masks behind the last row of the path, where the next step checks their draft."""
    count = outcome.logits.shape[1]
    tokens = torch.zeros(len(outcome.sequences), count, dtype=torch.int64)
    filled = torch.zeros_like(tokens, dtype=torch.bool)
    for entry, (rows, each) in enumerate(zip(outcome.step.rows, outcome.sequences, strict=True)):
        for column, _, token in () if each.checked.start else each.decided:  # unverified: choices are made at masks
            filled[entry, column], tokens[entry, column] = True, token
        expected = each.sequence.rows[each.sequence.pending :]
        drafts = {row.position: row.token for row in reversed(expected) if row.token is not None}
        for place in rows.masks((each.accepted or each.kept or [0])[-1]):
            if (draft := drafts.get(rows[place].position)) is not None:
                column = count - len(rows) + place
                filled[entry, column], tokens[entry, column] = True, draft
    return filled, tokens


def _decided(outcome: SequenceOutcome) -> list[int]:
    """The offsets of the tokens that a step decided, without those behind the sequence's end."""
    sequence = outcome.sequence
    end = sequence.new_count if sequence.is_finished else sequence.limit
    return [offset for _, offset, _ in outcome.decided if offset < end]
