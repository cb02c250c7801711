"""A trace of every step of a parallel `generate`, if asked for; no part of the code beside saved checkpoints (hub.py).

`B` rows of the call, `A` of a step, `Q` physical rows of a forward, `M` slots with logits.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .decoding import StepOutcome
from .rows import mask_runs
from .rules import SequenceOutcome
from .sampling import token_entropy


@dataclass
class TraceStep:
    """One step, for the `A` rows still in use. All tensors are on the CPU.

    Attributes:
        rows: the call's row of each entry.
        input_ids: `(A, Q)` int64, tokens in physical order.
        position_ids: `(A, Q)` int64, their logical positions.
        counts: physical rows of each entry that are no padding: the last ones.
        committed: how many of those entered the cache for good.
        kept: which they are, counted from the first one.
        accepted: drafts that passed, counted alike.
        logit_positions: `(A, M)` int64, logical positions of the physical rows whose logits were computed.
        is_mask: `(A, M)` bool, which of them are masks.
        entropy: `(A, M)` float32, H in nats.
        filled: `(A, M)` bool, masks that this step filled; under verification, masks that the next step checks a
            draft of.
        tokens: `(A, M)` int64, what they were filled with.
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
        """Adds the step."""
        step, choice, logits = outcome.step, outcome.choice, outcome.logits.float()
        count = logits.shape[1]
        tokens = torch.zeros_like(step.input_ids[:, -count:]).scatter(1, choice.columns, choice.tokens).cpu()
        filled, is_mask = torch.zeros(2, *tokens.shape, dtype=torch.bool)
        positions = step.position_ids[:, -count:].cpu().clone()
        for entry, one in enumerate(outcome.sequences):
            positions[entry, : max(0, count - len(one.rows))] = -1
            first = count - len(one.rows)  # the column of the first row
            for place, row in enumerate(one.rows):
                if row.token is None:
                    is_mask[entry, first + place] = True
            if not one.checked.start:  # else the columns of what AR rows choose are others
                for column, _, _ in one.decided:
                    filled[entry, column] = True
            # Under verification: what the masks behind the last row of the path draft, and the next step checks.
            guesses = one.sequence.rows[one.sequence.pending :]
            drafts = {row.position: row.token for row in reversed(guesses) if row.token is not None}
            for place in mask_runs(one.rows).get((one.accepted or one.kept or [0])[-1], ()):
                if (token := drafts.get(one.rows[place].position)) is not None:
                    filled[entry, first + place], tokens[entry, first + place] = True, token
        shares = likeliest(logits)
        self.steps.append(
            TraceStep(
                rows=[one.sequence.index for one in outcome.sequences],
                input_ids=step.input_ids.cpu(),
                position_ids=step.position_ids.cpu(),
                counts=step.counts,
                committed=[len(one.kept) for one in outcome.sequences],
                kept=[one.kept for one in outcome.sequences],
                accepted=[one.accepted for one in outcome.sequences],
                logit_positions=positions,
                is_mask=is_mask,
                entropy=token_entropy(logits).cpu(),
                filled=filled,
                tokens=tokens,
                likeliest=shares[0].cpu(),
                probabilities=shares[1].cpu(),
                decided=[_decided(one) for one in outcome.sequences],
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


def _decided(one: SequenceOutcome) -> list[int]:
    """Offsets; what lies behind a sequence's end is gone."""
    end = one.sequence.new_count if one.sequence.is_finished else one.sequence.limit
    return [offset for _, offset, _ in one.decided if offset < end]
