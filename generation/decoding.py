"""Streaming parallel decoding: the loop (paper §5, Algorithm 1, Figure 3).

State of each row: *committed* tokens (their keys and values are cached), *pending* tokens (final, not cached yet) and
a *window* of slots, filled or masked. One step:

    1. order    pending tokens, filled slots, masks
    2. forward  one causal forward in this order on top of the cache, at logical positions
    3. select   masks with H + λ·d < τ, or the best one
    4. fill     them: argmax, or a draw from the processed distribution
    5. slide    what is filled from the left without a gap is final: it becomes pending, and the window moves past it
    6. commit   the keys and values of what was pending; the rest of this forward is overwritten by the next
    7. finish   rows that hold an end token, meet a stopping criterion or reach the limit; refill the other windows

What 3, 4, 6 and the refill are in detail is up to a rule: [`FillRule`] (the above), [`BlockRule`] or [`VerifyRule`],
whose slots are filled with drafts. It selects the drafts that the AR head accepts and the masks that give new ones,
and commits accepted drafts too. Which these are is known only after 4: hence the place of 6, which for the other rules
could as well come after 2. The loop knows nothing of the model but its `forward`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from .attention import StepAttention
from .cache import WindowCache
from .request import DecodingRequest
from .rules import FillRule, Selection, SlotStates
from .window import PhysicalOrder, Row, RowOutcome


@dataclass(frozen=True)
class StepOutcome:
    """What a step did. `rows[i]` is about entry i of the tensors, those of `order`, `logits` and `selection`."""

    order: PhysicalOrder
    logits: torch.Tensor
    selection: Selection
    rows: list[RowOutcome]


@dataclass
class ParallelDecoder:
    """One `generate` call.

    Args:
        model: called as `model(input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep)`.
            Where its `has_mask_adapter` is true, `model.predicting(slots)` is a context in which a forward takes its
            last rows for slots, and which notes their hidden states.
        request: what to decode.
        rule: fill, fill block by block, or verify.
        cache: empty, or holding a beginning of every prompt.
        compiled: called instead of `model` after the first forward, always with the same shapes.
        go_on: asked before each step with whether this process has finished. Where it says yes although it has, other
            processes that share the model's weights still decode, and their forwards wait for one of this process.

    Raises:
        ValueError: if the cache does not hold a beginning of the prompt, or if there is nothing to choose from because
            the model's logits are NaN or the processors leave no token.
    """

    model: Any
    request: DecodingRequest
    rule: FillRule
    cache: WindowCache
    compiled: Callable[..., Any] | None
    go_on: Callable[[bool], bool]

    def __post_init__(self) -> None:
        self.steps = 0
        self.attention = StepAttention(self.model)
        self.cache.open(self.request.prompts, self.request.prompt_ids.device)
        self.rows = [
            Row(index, list(prompt), len(prompt), cached, self.request.limit)
            for index, (prompt, cached) in enumerate(zip(self.request.prompts, self.cache.lengths, strict=True))
        ]
        for row in self.rows:
            self.rule.refill(row)

    @property
    def rows_in_use(self) -> list[Row]:
        """Rows in the order of the cache's buffers: those that decode, or all of them where shapes are fixed."""
        return [self.rows[index] for index in self.cache.rows_in_use]

    def run(self, observers: Sequence[Callable[[StepOutcome], None]]) -> torch.Tensor:
        """Decodes all rows to their end.

        Args:
            observers: are told of each step, when its rows hold the windows of the next one already.

        Returns:
            The new tokens, `(B, longest)` int64, padded after each row's end.
        """
        while self.go_on(is_finished := all(row.is_finished for row in self.rows)):
            if is_finished:
                self.model(input_ids=self.request.prompt_ids.new_zeros(1, 1), use_cache=False)
                continue
            outcome = self._step()
            for observe in observers:
                observe(outcome)
        self.cache.close()
        tokens = [torch.tensor(row.new_tokens, device=self.request.prompt_ids.device) for row in self.rows]
        return pad_sequence(tokens, batch_first=True, padding_value=self.request.pad_token_id)

    def _step(self) -> StepOutcome:
        rows = self.rows_in_use
        is_fixed = self.compiled is not None and self.steps > 0
        order = self.rule.order(rows, 2 * self.rule.pacer.largest if is_fixed else None)  # 1.
        logits, slots = self._forward(order)  # 2.
        selection = self.rule.select(order, rows, logits, slots)  # 3.
        outcomes = self._fill(rows, order, selection)  # 4.
        self._slide(outcomes)  # 5.
        self.cache.commit([outcome.committed for outcome in outcomes])  # 6.
        self._finish(outcomes)  # 7.
        return StepOutcome(order, logits, selection, outcomes)

    def _forward(self, order: PhysicalOrder) -> tuple[torch.Tensor, SlotStates | None]:
        """Logits `(A, M, V)` float32, and what is known of the masks behind them."""
        write = self.cache.plan(order.counts, order.cache_slots, order.input_ids)
        inputs: dict[str, Any] = {"input_ids": order.input_ids}
        if self.steps == 0 and self.request.prompt_embeds is not None:
            inputs = {"inputs_embeds": self._embeds(order)}
        has_slots = self.model.has_mask_adapter and order.slot_mask is not None
        predicting = self.model.predicting(order.slot_mask) if has_slots else nullcontext()
        masks = self.attention.masks(write, order.position_ids, order.visibility)
        forward = self.compiled if self.compiled is not None and self.steps > 0 else self.model
        with predicting as states, self.attention.reading(masks):
            outputs = forward(
                **inputs,
                attention_mask=masks,
                position_ids=order.position_ids,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=order.logit_count + order.masks_behind,
                return_dict=True,
            )
        self.steps += 1
        # Those of the mask token are overwritten later, so they are copied where a compiled forward may own them.
        logits = outputs.logits.to(order.input_ids.device)
        logits, behind = logits.split([order.logit_count, order.masks_behind], dim=1)
        slots = SlotStates(states.hidden, behind) if order.masks_behind else None
        return logits.to(torch.float32, copy=self.compiled is not None), slots

    def _embeds(self, order: PhysicalOrder) -> torch.Tensor:
        """The prompt's own embeddings, and those of the first window's masks, `(B, Q, hidden)`."""
        prompt = self.request.prompt_embeds
        assert prompt is not None
        embeds = self.model.get_input_embeddings()(order.input_ids.clamp(min=0))
        lengths = torch.tensor([[row.prompt_length] for row in self.rows], device=order.position_ids.device)
        columns = (prompt.shape[1] - lengths + order.position_ids).clamp(max=prompt.shape[1] - 1)
        own = prompt.gather(1, columns[..., None].expand(-1, -1, embeds.shape[-1]))
        return torch.where((order.position_ids < lengths)[..., None], own.to(embeds), embeds)

    def _fill(self, rows: list[Row], order: PhysicalOrder, selection: Selection) -> list[RowOutcome]:
        """Writes what was selected into the windows. The only time in a step that the host waits for the device."""
        stacked = torch.stack([selection.chosen.long(), selection.tokens, selection.is_broken.long()], dim=1)
        outcomes = []
        for row, slots, (chosen, tokens, is_broken) in zip(rows, order.slot_lists, stacked.tolist(), strict=True):
            if any(is_broken):
                raise ValueError(
                    f"There is nothing to choose from in forward {self.steps}, row {row.index}: the model's logits "
                    "are NaN or infinite (the checkpoint is broken, or its dtype overflows), or the logits processors "
                    "leave no token."
                )
            first = order.logit_count - len(slots)
            if row.is_finished:
                outcomes.append(RowOutcome(row, 0, [], []))
            else:
                outcomes.append(self.rule.fill(row, first, chosen[first:], tokens[first:]))
        return outcomes

    def _slide(self, outcomes: list[RowOutcome]) -> None:
        """Moves the windows past what is final, cut after an end token, at the limit or where a criterion stops."""
        for outcome in outcomes:
            row = outcome.row
            if row.is_finished:
                continue
            final = row.window[: min(outcome.final, row.remaining)]
            ends = [count for count, token in enumerate(final, 1) if token in self.request.end_tokens]
            count, is_stopped = self._stop(row, final[: ends[0]] if ends else final)
            outcome.final, outcome.accepted = count, min(outcome.accepted, count)
            outcome.committed = self.rule.committed(row, count)
            outcome.new_tokens = row.slide(count)
            row.committed += outcome.committed
            row.is_finished = is_stopped or bool(ends) or row.remaining == 0
            if row.is_finished:
                row.window.clear()
                outcome.decided = [decided for decided in outcome.decided if decided[1] < count]

    def _stop(self, row: Row, final: Sequence[int | None]) -> tuple[int, bool]:
        """How many of these tokens there are up to the first at which a criterion holds, and whether one does."""
        if self.request.stopping_criteria:
            # A criterion may tell rows apart by their index: it gets a batch in which this row is where it should be.
            prompt = self.request.prompt_ids[row.index]
            sequence = torch.cat([prompt, prompt.new_tensor([*row.new_tokens, *final])])
            sequences = sequence.expand(len(self.rows), -1)
            for count in range(1, len(final) + 1):
                if self._is_stopped(sequences[:, : sequences.shape[1] - len(final) + count], row.index):
                    return count, True
        return len(final), False

    def _is_stopped(self, sequences: torch.Tensor, row: int) -> bool:
        """Whether a criterion holds for this row. Raises `ValueError` for one that answers for all rows at once."""
        is_stopped = False
        for criterion in self.request.stopping_criteria:
            answer = torch.as_tensor(criterion(sequences, None))
            if answer.ndim == 0 and len(sequences) > 1:
                raise ValueError(
                    f"{type(criterion).__name__} answers for all rows together, but here rows advance at paces of "
                    "their own: generate one prompt at a time, or use `stop_strings` or `strategy='ar'`."
                )
            is_stopped |= bool(answer.expand(len(sequences))[row])
        return is_stopped

    def _finish(self, outcomes: list[RowOutcome]) -> None:
        """Refills the windows; finished rows leave, and cost nothing from here on."""
        self.rule.pacer.observe(outcomes)
        for outcome in outcomes:
            if not outcome.row.is_finished:
                self.rule.refill(outcome.row)
        if self.compiled is None:
            self.cache.retire([outcome.row.is_finished for outcome in outcomes])
