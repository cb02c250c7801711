"""A trace of every step of a parallel `generate`, if asked for; no part of the code beside saved checkpoints (hub.py).

`B` rows of the call, `A` of a step, `Q` physical rows of a forward, `M` slots with logits.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .decoding import StepOutcome
from .sampling import token_entropy
from .window import PhysicalOrder


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
        width, behind = order.logit_count, order.masks_behind
        tokens = F.pad(selection.choice.tokens.cpu(), (0, behind))
        is_mask = F.pad(selection.is_mask.cpu(), (0, behind))
        filled = torch.zeros_like(is_mask)
        positions = order.position_ids[:, order.position_ids.shape[1] - width - behind :].cpu().clone()
        positions[:, :width].masked_fill_(order.slots.cpu() < 0, -1)
        for entry, one in enumerate(outcome.sequences):
            masks = order.mask_counts[entry]
            is_mask[entry, width : width + masks] = True
            positions[entry, width + masks :] = -1
            for column, slot, _ in one.filled:
                filled[entry, column] = True
                positions[entry, column] = one.sequence.prompt_length + order.first[entry] + slot
            # Of the next step's drafts, the likeliest ones of the masks behind the last row that gave a token.
            for draft in reversed(one.sequence.drafts):
                place = one.drafting.start + draft.depth - 1
                if draft.chance is not None and place in one.drafting:
                    filled[entry, width + place], tokens[entry, width + place] = True, draft.token
        entropy, tokens_found, probabilities = self._predicted(outcome)
        self.steps.append(
            TraceStep(
                rows=order.sequences,
                input_ids=_padded_in_front(order.input_ids, order),
                position_ids=_padded_in_front(order.position_ids, order),
                counts=order.counts,
                committed=[len(one.kept) for one in outcome.sequences],
                kept=[one.kept for one in outcome.sequences],
                logit_positions=positions,
                is_mask=is_mask,
                entropy=entropy,
                filled=filled,
                tokens=tokens,
                likeliest=tokens_found,
                probabilities=probabilities,
                decided=[
                    [first + slot for _, slot, _ in one.decided]
                    for first, one in zip(order.first, outcome.sequences, strict=True)
                ],
            )
        )

    def _predicted(self, outcome: StepOutcome) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """H of what the model said, MASK's logit included; its likeliest tokens and their probabilities."""
        logits, choice = outcome.logits.clone(), outcome.selection.choice
        if choice.mask_logits is not None:
            logits[..., self.mask_token_id] = choice.mask_logits
        if outcome.slots is not None:
            logits = torch.cat([logits, outcome.slots.logits.float()], dim=1)
        tokens, probabilities = likeliest(logits)
        return token_entropy(logits).cpu(), tokens.cpu(), probabilities.cpu()

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
