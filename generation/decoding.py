"""Parallel decoding: the loop (paper §5, Algorithm 1, Figure 3).

Of each sequence, *committed* tokens have their keys and values in the cache, *pending* tokens are final and not
cached yet; behind them stands a *window* of slots, filled or masked, or drafts and masks. One step:

    1. order    pending tokens, filled slots or drafts, masks
    2. forward  one forward in this order on top of the cache, at logical positions
    3. select   tokens for the rows that predict one
    4. settle   what of them is final: the window slides past it, or the drafts that passed
    5. commit   the keys and values of rows that saw nothing but final tokens; the next forward overwrites the rest
    6. finish   sequences that hold an end token, meet a stopping criterion or reach the limit
    7. prepare  the others for the next step: masks, or drafts and masks

What 1, 3, 4 and 7 are in detail is up to a rule: [`FillRule`] (the paper's), [`BlockRule`] or [`VerifyRule`]. The
loop knows nothing of the model but its `forward`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation import MaxTimeCriteria, StopStringCriteria

from .attention import StepAttention
from .cache import WindowCache
from .request import DecodingRequest
from .rules import FillRule, Selection, SlotStates
from .verify import VerifyRule
from .window import PhysicalOrder, SequenceOutcome, SequenceState

# Criteria that work wherever the tokens are. Those that callers bring may hold tensors of the prompts' device.
HOST_CRITERIA = (MaxTimeCriteria, StopStringCriteria)


@dataclass(frozen=True)
class StepOutcome:
    """What a step did. `sequences[i]` is about entry i of the tensors, those of `order`, `logits`, `selection` and
    `slots`."""

    order: PhysicalOrder
    logits: torch.Tensor
    selection: Selection
    slots: SlotStates | None
    sequences: list[SequenceOutcome]

    @property
    def decided(self) -> list[tuple[int, int, int, int, int]]:
        """The tokens that became final, or were filled in for good: entry and column of the logits, the call's row,
        how many new tokens are before it, and the token."""
        return [
            (entry, column, self.order.sequences[entry], self.order.first[entry] + slot, token)
            for entry, one in enumerate(self.sequences)
            for column, slot, token in one.decided
        ]

    def raw_logits(self, entries: torch.Tensor, columns: torch.Tensor, mask_token_id: int | None) -> torch.Tensor:
        """What the model said there, `(N, V)` float32: MASK's logits, if there is one, as they were."""
        logits, mask_logits = self.logits[entries, columns], self.selection.choice.mask_logits
        if mask_logits is not None:
            logits[:, mask_token_id] = mask_logits[entries, columns]
        return logits


@dataclass
class ParallelDecoder:
    """One `generate` call.

    Raises:
        ValueError: if the cache does not hold a beginning of the prompt, or if there is nothing to choose from because
            the model's logits are NaN or the processors leave no token.
    """

    # Called as `model(input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep)`. Where its
    # `has_mask_adapter` is true, `model.predicting(slots)` is a context in which a forward takes its last rows for
    # slots, and which notes their hidden states.
    model: Any
    request: DecodingRequest
    rule: FillRule | VerifyRule
    cache: WindowCache  # empty, or holding a beginning of every prompt
    compiled: Callable[..., Any] | None  # called after the first forward, always with the same shapes
    # Is told before each step whether this process has finished, and says whether there is another step: after the
    # end, processes that share the model's weights take part in each other's forwards.
    go_on: Callable[[bool], bool]

    def __post_init__(self) -> None:
        self.steps = 0
        self.attention = StepAttention(self.model)
        prompts, criteria = self.request.prompt_ids, self.request.stopping_criteria
        # Elsewhere the host would wait for the answer to each token.
        is_on_host = criteria and all(isinstance(each, HOST_CRITERIA) for each in criteria)
        self._criteria_prompts = prompts.cpu() if is_on_host else prompts
        self.cache.open(self.request.prompts, prompts.device)
        self.sequences = [
            SequenceState(index, list(prompt), len(prompt), cached, self.request.limit)
            for index, (prompt, cached) in enumerate(zip(self.request.prompts, self.cache.lengths, strict=True))
        ]
        self.rule.begin(self.sequences)

    def run(self, observers: Sequence[Callable[[StepOutcome], None]]) -> torch.Tensor:
        """Decodes all sequences to their end. Returns the new tokens, `(B, longest)` int64, padded after each one's.

        Observers are told of each step when its sequences are prepared for the next one.
        """
        while self.go_on(is_finished := all(one.is_finished for one in self.sequences)):
            if is_finished:
                self.model(input_ids=self.request.prompt_ids.new_zeros(1, 1), use_cache=False)
                continue
            outcome = self._step()
            for observe in observers:
                observe(outcome)
        self.cache.close()
        tokens = [torch.tensor(one.new_tokens, device=self.request.prompt_ids.device) for one in self.sequences]
        return pad_sequence(tokens, batch_first=True, padding_value=self.request.pad_token_id)

    def _step(self) -> StepOutcome:
        # In the order of the cache's buffers: those that decode, or all of them where shapes are fixed.
        sequences = [self.sequences[index] for index in self.cache.rows_in_use]
        order = self.rule.order(sequences, is_fixed=self.compiled is not None and self.steps > 0)
        logits, slots = self._forward(order)
        selection = self.rule.select(order, sequences, logits)
        found, guesses = self._read(selection, self.rule.guess(order, sequences, selection, slots))
        outcomes = self._settle(sequences, order, found)
        self.cache.commit([outcome.kept for outcome in outcomes])
        self.rule.prepare(outcomes, guesses)
        if self.compiled is None:
            self.cache.retire([one.is_finished for one in sequences])
        return StepOutcome(order, logits, selection, slots, outcomes)

    def _forward(self, order: PhysicalOrder) -> tuple[torch.Tensor, SlotStates | None]:
        """Logits `(A, M, V)` float32, and what is known of the masks behind them."""
        write = self.cache.plan(order.counts, order.cache_slots, order.input_ids)
        predicting: AbstractContextManager[Any] = nullcontext()
        if self.model.has_mask_adapter:
            predicting = self.model.predicting(order.slot_mask)
        positions = order.position_ids
        if self.request.table:  # a guess behind its end will not count
            positions = positions.clamp(max=self.request.table - 1)
        alone = (positions.shape[1] - order.masks_behind) * (self.steps > 0) if self.rule.is_by_row else None
        masks = self.attention.masks(write, positions, order.visibility, alone)
        forward = self.compiled if self.compiled is not None and self.steps > 0 else self.model
        with predicting as states, self.attention.reading(masks):
            inputs: dict[str, Any] = {"input_ids": order.input_ids}
            if self.steps == 0 and self.request.prompt_embeds is not None:
                inputs = {"inputs_embeds": self._embeds(order)}
            outputs = forward(
                **inputs,
                attention_mask=masks,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=order.logit_count + order.masks_behind,
                return_dict=True,
            )
        self.steps += 1
        # Those of the mask token are overwritten later, so they are copied where a compiled forward may own them.
        logits = outputs.logits.to(order.input_ids.device)
        logits, behind = logits.split([order.logit_count, order.masks_behind], dim=1)
        hidden = None if states is None else states.hidden
        slots = SlotStates(hidden, behind) if order.masks_behind else None
        return logits.to(torch.float32, copy=self.compiled is not None), slots

    def _embeds(self, order: PhysicalOrder) -> torch.Tensor:
        """The prompt's own embeddings, and those of the first window's masks, `(B, Q, hidden)`."""
        prompt = self.request.prompt_embeds
        assert prompt is not None
        embeds = self.model.get_input_embeddings()(order.input_ids.clamp(min=0))
        lengths = torch.tensor([[one.prompt_length] for one in self.sequences], device=order.position_ids.device)
        columns = (prompt.shape[1] - lengths + order.position_ids).clamp(max=prompt.shape[1] - 1)
        own = prompt.gather(1, columns[..., None].expand(-1, -1, embeds.shape[-1]))
        return torch.where((order.position_ids < lengths)[..., None], own.to(embeds), embeds)

    def _read(self, selection: Selection, guesses: torch.Tensor | None) -> tuple[Any, list[list[float]]]:
        """What the host must know of a step, of each entry: marks, tokens, whether they are broken, and guesses. All
        in one tensor: the host waits for the device here, and nowhere else in a step."""
        found = torch.stack([selection.marks, selection.choice.tokens, selection.is_broken], dim=1)
        if guesses is None:
            return found.tolist(), []
        # Tokens are below 2^24: float32 holds them exactly.
        numbers = torch.cat([found.flatten(1).float(), guesses], dim=1).tolist()
        count, width = found.shape[1:]
        rows = [[list(map(int, row[at : at + width])) for at in range(0, count * width, width)] for row in numbers]
        return rows, [row[count * width :] for row in numbers]

    def _settle(self, sequences: list[SequenceState], order: PhysicalOrder, found: Any) -> list[SequenceOutcome]:
        """What was read means this for each sequence."""
        outcomes = []
        for one, slots, (marks, tokens, is_broken) in zip(sequences, order.slot_lists, found, strict=True):
            if any(is_broken):
                raise ValueError(
                    f"There is nothing to choose from in forward {self.steps}, sequence {one.index}: the model's "
                    "logits are NaN or infinite (the checkpoint is broken, or its dtype overflows), or the logits "
                    "processors leave no token."
                )
            first = order.logit_count - len(slots)
            if one.is_finished:
                outcomes.append(SequenceOutcome(one, [], [], []))
            else:
                outcomes.append(self.rule.settle(one, first, tokens[first:], marks[first:], self._cut))
        return outcomes

    def _cut(self, one: SequenceState, tokens: list[int]) -> int:
        """How many of these tokens a sequence takes: up to an end token, its limit, or where a criterion holds.
        Finishes the sequence there."""
        tokens = tokens[: one.remaining]
        ends = [count for count, token in enumerate(tokens, 1) if token in self.request.end_tokens]
        count, is_stopped = self._stop(one, tokens[: ends[0]] if ends else tokens)
        table = self.request.table
        if table and len(one.tokens) + count > table + 1:  # no forward reads the last token
            raise ValueError(
                f"Sequence {one.index} goes on behind the last position that this model knows: prompt and answer may "
                f"have {table + 1} tokens (`max_position_embeddings` + 1). Pass a smaller `max_new_tokens`."
            )
        if is_stopped or ends or count == one.remaining:
            one.is_finished = True
        return count

    def _stop(self, one: SequenceState, tokens: list[int]) -> tuple[int, bool]:
        """How many of these tokens there are up to the first at which a criterion holds, and whether one does."""
        if self.request.stopping_criteria:
            # A criterion may tell sequences apart by their index: it gets a batch in which this one is where it
            # should be.
            prompt = self._criteria_prompts[one.index]
            sequence = torch.cat([prompt, prompt.new_tensor([*one.new_tokens, *tokens])])
            sequences = sequence.expand(len(self.sequences), -1)
            for count in range(1, len(tokens) + 1):
                if self._is_stopped(sequences[:, : sequences.shape[1] - len(tokens) + count], one.index):
                    return count, True
        return len(tokens), False

    def _is_stopped(self, sequences: torch.Tensor, index: int) -> bool:
        """Whether a criterion holds for this sequence. Raises `ValueError` for one that answers for all at once."""
        is_stopped = False
        for criterion in self.request.stopping_criteria:
            answer = torch.as_tensor(criterion(sequences, None))
            if answer.ndim == 0 and len(sequences) > 1:
                raise ValueError(
                    f"{type(criterion).__name__} answers for all rows together, but here rows advance at paces of "
                    "their own: generate one prompt at a time, or use `stop_strings` or `strategy='ar'`."
                )
            is_stopped |= bool(answer.expand(len(sequences))[index])
        return is_stopped
