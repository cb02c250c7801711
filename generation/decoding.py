"""Parallel decoding: the loop (paper §5, Algorithm 1, Figure 3).

Of each sequence, *committed* tokens have their keys and values in the cache, *pending* tokens are final and not
cached yet; behind them stand guesses and masks. A [`Row`] is one of these. One step:

    1. lay out  the rows of all sequences as tensors
    2. forward  one forward of them on top of the cache, at logical positions
    3. read     what its logits mean, on the device
    4. settle   what of that is final: the host waits, once
    5. commit   the keys and values of rows that saw nothing but final tokens; the next forward overwrites the rest
    6. finish   sequences that hold an end token, meet a stopping criterion or reach the limit
    7. plan     the rows of the others' next forward

What 3, 4 and 7 are in detail is up to a [`Rule`]: [`FillRule`], the paper's, or [`VerifyRule`]. What is asked of the
model is a [`DecodedModel`].
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
from .forward import DecodedModel, forward_as
from .request import DecodingRequest
from .rows import SequenceState, Step, Tree, lay_out
from .rules import Rule, SequenceOutcome, StepOutcome, on_host
from .state import keeps_state
from .step_times import step_clock
from .versions import cache_name

# Criteria that work wherever the tokens are. Those that callers bring may hold tensors of the prompts' device.
HOST_CRITERIA = (MaxTimeCriteria, StopStringCriteria)
_PACKAGE = __name__.partition(".")[0]


@dataclass
class ParallelDecoder:
    """Decodes the sequences of one `generate` call.

    Raises:
        ValueError: if the cache holds something else than a beginning of the prompt, or if no token can be chosen
            because the model's logits are NaN or the processors leave no token.
    """

    model: DecodedModel
    request: DecodingRequest
    rule: Rule
    cache: WindowCache  # empty, or holding a beginning of every prompt
    compiled: Callable[..., Any] | None  # called after the first forward, always with the same shapes
    # Called before each step with whether this process has finished. Returns whether there is another step: after its
    # end, a process takes part in the forwards of others that share the model's weights.
    go_on: Callable[[bool], bool]

    def __post_init__(self) -> None:
        self.steps = 0
        self.attention = StepAttention(self.model)
        # Without autograd's records a CPU starts operations sooner.
        is_bare = self.compiled is None and self.model.device.type == "cpu" and _needs_no_records(self.model)
        self._bare: Callable[[], AbstractContextManager[Any]] = torch.inference_mode if is_bare else nullcontext
        prompts, criteria = self.request.prompt_ids, self.request.stopping_criteria
        # Elsewhere the host would wait for the device at each token.
        is_on_host = criteria and all(isinstance(each, HOST_CRITERIA) for each in criteria)
        self._criteria_prompts = prompts.cpu() if is_on_host else prompts
        self.cache.open(self.request.prompts, prompts.device, self.model.config)
        self._cache_name = cache_name(self.model)
        self._clock = step_clock(prompts.device.type) if self.rule.is_timed else lambda: 0.0
        self.sequences = [
            SequenceState(index, list(prompt), len(prompt), cached, self.request.limit)
            for index, (prompt, cached) in enumerate(zip(self.request.prompts, self.cache.lengths, strict=True))
        ]
        self._plan(self.sequences)

    def run(self, observers: Sequence[Callable[[StepOutcome], None]]) -> torch.Tensor:
        """Decodes all sequences to their end. Returns their new tokens, `(B, longest)` int64, with padding behind.

        Observers see each step once the next one is planned.
        """
        while self.go_on(is_finished := all(sequence.is_finished for sequence in self.sequences)):
            if is_finished:
                self.model(input_ids=self.request.prompt_ids.new_zeros(1, 1), use_cache=False)
                continue
            outcome = self._step()
            for observe in observers:
                observe(outcome)
        self.cache.close()
        device = self.request.prompt_ids.device
        tokens = [torch.tensor(sequence.new_tokens, device=device) for sequence in self.sequences]
        return pad_sequence(tokens, batch_first=True, padding_value=self.request.pad_token_id)

    def _step(self) -> StepOutcome:
        began = self._clock()
        # In the order of the cache's buffers: the unfinished ones, or all where shapes are fixed.
        sequences = [self.sequences[index] for index in self.cache.rows_in_use]
        step = self._lay_out(sequences)
        logits, hidden = self._forward(step)
        outcome = self.rule.read(step, logits, hidden)
        outcome.sequences = self._settle(outcome)
        self.cache.commit([each.kept for each in outcome.sequences])
        if self.compiled is None:
            self.cache.retire([sequence.is_finished for sequence in sequences])
        self.rule.finish(self._clock() - began)
        self._plan(sequences)
        return outcome

    def _plan(self, sequences: Sequence[SequenceState]) -> None:
        unfinished = [sequence for sequence in sequences if not sequence.is_finished]
        for sequence in sequences:
            sequence.rows = Tree()
        for sequence, rows in zip(unfinished, self.rule.rows(unfinished), strict=True):
            sequence.rows = rows

    def _lay_out(self, sequences: Sequence[SequenceState]) -> Step:
        firsts = [sequence.pending - 1 if self.rule.asks_all else sequence.unmasked for sequence in sequences]
        width = self.rule.width if self.compiled is not None and self.steps > 0 else 0
        shape = width, self.cache.extent.capacity
        return lay_out(sequences, firsts, self.rule.filler, self.request.prompt_ids.device, *shape)

    def _forward(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `(A, T, V)`; with a mask adapter, also the hidden states `(A, T, H)` that the head read, or `(A, T,
        2H)`, with inner states behind."""
        self.cache.announce(step)
        is_compiled = self.compiled is not None and self.steps > 0
        slots = None
        if self.model.has_mask_adapter:
            slots = self.model.slots(step.mask_columns(self.rule.most_masks if is_compiled else 0))
        positions = step.position_ids
        alone = (len(step.rows[0]) - step.masks[0]) * (self.steps > 0) if self.rule.is_by_row else None
        masks = self.attention.masks(step, positions, alone, is_prompt=self.steps == 0)
        forward = self.compiled if self.compiled is not None and is_compiled else self.model
        is_guessing = any(len(sequence.rows) > sequence.pending for sequence in step.sequences)
        record = {"slots": slots, **self.attention.record}
        record["has_short_chunks"] = self.steps > 0  # a prompt is read as AR decoding reads it
        with forward_as(self.cache.layers if is_guessing else (), **record), self._bare():
            inputs: dict[str, Any] = {"input_ids": step.input_ids}
            if self.steps == 0 and self.request.prompt_embeds is not None:
                inputs = {"inputs_embeds": self._embeds(step)}
            outputs = forward(
                **inputs,
                attention_mask=masks,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=step.parents.shape[1],
                return_dict=True,
                **{self._cache_name: self.cache},
            )
        self.steps += 1
        return outputs.logits.to(step.input_ids.device), None if slots is None else slots.states

    def _embeds(self, step: Step) -> torch.Tensor:
        """The caller's embeddings of the prompt, and the model's of the masks behind it, `(A, Q, hidden)`."""
        prompt = self.request.prompt_embeds
        assert prompt is not None
        embeds = self.model.get_input_embeddings()(step.input_ids.clamp(min=0))
        lengths = torch.tensor([[each.prompt_length] for each in self.sequences], device=step.position_ids.device)
        columns = (prompt.shape[1] - lengths + step.position_ids).clamp(max=prompt.shape[1] - 1)
        own = prompt.gather(1, columns[..., None].expand(-1, -1, embeds.shape[-1]))
        return torch.where((step.position_ids < lengths)[..., None], own.to(embeds), embeds)

    def _settle(self, outcome: StepOutcome) -> list[SequenceOutcome]:
        """Settles each sequence by the rule's readings. The host waits for the device here, and nowhere else."""
        found = []
        readings = on_host((outcome.is_broken, outcome.readings))
        for sequence, (is_broken, own) in zip(outcome.step.sequences, readings, strict=True):
            if is_broken:
                raise ValueError(
                    f"There is nothing to choose from in forward {self.steps}, sequence {sequence.index}: the model's "
                    "logits are NaN or infinite (the checkpoint or its adapter is broken, or the dtype overflows), or "
                    "the logits processors leave no token."
                )
            if sequence.is_finished:
                found.append(SequenceOutcome(sequence, [], [], []))
            else:
                found.append(self.rule.settle(sequence, own, self._cut))
        return found

    def _cut(self, sequence: SequenceState, tokens: list[int]) -> int:
        """How many of these tokens a sequence takes: up to an end token, its limit, or where a criterion holds. There
        the sequence is finished."""
        tokens = tokens[: sequence.remaining]
        ends = [count for count, token in enumerate(tokens, 1) if token in self.request.end_tokens]
        count, is_stopped = self._stop(sequence, tokens[: ends[0]] if ends else tokens)
        if is_stopped or ends or count == sequence.remaining:
            sequence.is_finished = True
        return count

    def _stop(self, sequence: SequenceState, tokens: list[int]) -> tuple[int, bool]:
        """How many of these tokens there are up to the first where a criterion holds, and whether there is one."""
        if self.request.stopping_criteria:
            # A criterion may distinguish sequences by their index: it gets a batch with this one in its place.
            prompt = self._criteria_prompts[sequence.index]
            text = torch.cat([prompt, prompt.new_tensor([*sequence.new_tokens, *tokens])])
            batch = text.expand(len(self.sequences), -1)
            for count in range(1, len(tokens) + 1):
                if self._is_stopped(batch[:, : len(text) - len(tokens) + count], sequence.index):
                    return count, True
        return len(tokens), False

    def _is_stopped(self, batch: torch.Tensor, index: int) -> bool:
        """Whether a criterion holds for this sequence. Raises `ValueError` for one that answers for all at once."""
        is_stopped = False
        for criterion in self.request.stopping_criteria:
            answer = torch.as_tensor(criterion(batch, None))
            if answer.ndim == 0 and len(batch) > 1:
                raise ValueError(
                    f"{type(criterion).__name__} answers for all rows together, but here rows advance at paces of "
                    "their own: generate one prompt at a time, or use `stop_strings` or `strategy='ar'`."
                )
            is_stopped |= bool(answer.expand(len(batch))[index])
        return is_stopped


def has_compiled_forward(module: Any) -> bool:
    """Whether `torch.compile` was called on a module or on its forward."""
    return bool(module._compiled_call_impl) or hasattr(module.forward, "_torchdynamo_orig_callable")


def _needs_no_records(model: Any) -> bool:
    """Whether a model's forwards may run in inference mode. Sharded weights and compiled forwards may need autograd's
    records, so may hooks of a user, who trains on what they note; states would be copied before the next call."""
    if keeps_state(model) or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    for module in model.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if has_compiled_forward(module) or any(type(hook).__module__.partition(".")[0] != _PACKAGE for hook in hooks):
            return False
    return True
