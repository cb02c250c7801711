"""Verified parallel decoding on vLLM: the proposer of its speculative decoding.

A request's speculative tokens are drafts f₁…f_d and, behind them, masks. vLLM runs them behind the last accepted token
c at consecutive positions, and verifies them: drafts as any drafts, and the first mask is always rejected, since the
model gives the mask token no chance, and replaced by the AR token. The masks' own rows of the same forward give the
next drafts. See ALGORITHM.md §4 and [`VerifyRule`], which does the same in transformers:

    rows of a request       c  f₁ f₂ │ M  M  M  M         the AR row at f₂ and the first mask predict the same slot:
    predicted slots         0  1  2  │ 2  3  4  5         the AR head decides it, drafts start behind it

If a draft is rejected, the masks behind it saw a wrong token: the next step has masks only. With a mask adapter no
mask stands at the position that the AR head decides, so that every mask gives a draft.

`R` sampled rows of a step, `H` hidden size, `V` vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig

from ...generation.pacing import default_slot_cost
from ...generation.step_times import StepTimes, step_clock
from .options import ARCHITECTURE, EngineOptions, RequestOptions
from .pacing import FIRST_LOOKS, LOOK_EVERY, MEASURE_EVERY, MEASUREMENTS, Acceptance, StepCosts


@dataclass
class RequestState:
    """What is known of a request.

    Attributes:
        options: its own.
        acceptance: of its drafts.
        end_tokens: that end it; nothing is drafted behind one.
        window_size: masks of its next step.
    """

    options: RequestOptions
    acceptance: Acceptance
    end_tokens: frozenset[int]
    window_size: int


@dataclass(frozen=True)
class Step:
    """What the runner shows of a step.

    Attributes:
        requests: ids, in the order of the batch.
        states: the runner's own of each request.
        rows: of the forward.
        is_decode: no prompt was part of it.
        hidden: `(R, H)`, last hidden states of the sampled rows.
        spec_tokens: speculative tokens of each request that were verified.
    """

    requests: list[str]
    states: Any
    rows: int
    is_decode: bool
    hidden: torch.Tensor
    spec_tokens: list[list[int]]


class Proposer:
    """Named in `speculative_config={"model": "wedlm_hf.serving.vllm.Proposer", "num_speculative_tokens": N}`.

    N is the most drafts and masks of one request's step. How many there are follows the request's acceptance and the
    load: down to none, which is AR decoding.
    """

    def __init__(self, vllm_config: VllmConfig):
        options, spec = EngineOptions.of(vllm_config), vllm_config.speculative_config
        architecture = vllm_config.model_config.architecture
        if not options.is_drafting or architecture != ARCHITECTURE:
            raise ValueError(f"This proposer is for WeDLM checkpoints, got one of {architecture}.")
        self.most = spec.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.mask_token_id = vllm_config.model_config.hf_config.mask_token_id
        # Processes of a tensor-parallel group must decide alike: no clock of their own there.
        device = vllm_config.device_config.device_type
        is_alone = vllm_config.parallel_config.tensor_parallel_size == 1
        self.costs = StepCosts(StepTimes(default_slot_cost(device), step_clock(device) if is_alone else None))
        self.acceptance = Acceptance(max(1, (self.most - 1) // 2))
        self.states: dict[str, RequestState] = {}
        self.model: Any = None
        self._step: Step | None = None
        self._last: tuple[frozenset[str], float] = frozenset(), 0.0
        self._steps = self._since = 0
        self._tries: Counter[int] = Counter()
        self._is_look = False

    def load_model(self, target_model: Any) -> None:
        """Takes the model, whose own masks draft: there is no other."""
        self.model = target_model

    def see(self, runner: Any, scheduler_output: Any, hidden: torch.Tensor, metadata: Any) -> None:
        """Takes in a step, just before `propose` is called for it."""
        requests = list(runner.input_batch.req_ids)
        tokens = iter(metadata.draft_token_ids.tolist() if metadata is not None else [])
        counts = metadata.num_draft_tokens if metadata is not None else [0] * len(requests)
        rows = scheduler_output.total_num_scheduled_tokens
        self._step = Step(
            requests=requests,
            states=runner.requests,
            rows=rows,
            is_decode=rows == sum(counts) + len(requests),
            hidden=hidden,
            spec_tokens=[[next(tokens) for _ in range(count)] for count in counts],
        )

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **kwargs: Any
    ) -> list[list[int]]:
        """The drafts and masks of each request for the next step.

        Args:
            sampled_token_ids: what the step gave each request; none for a part of a prompt.
            num_tokens_no_spec: `(requests,)`, tokens of each request so far.
            token_ids_cpu: `(requests, max_model_len)`, those tokens.
        """
        step, self._step = self._step, None
        assert step is not None, "vLLM's model runner was not prepared"
        self._measure(step)
        logits, self.model.sampled_logits = self.model.sampled_logits, None
        active = [index for index, tokens in enumerate(sampled_token_ids) if tokens]
        if not active or not self._may_draft(step, active):
            return [[] for _ in sampled_token_ids]
        for index in active:
            if step.requests[index] not in self.states:
                self.states[step.requests[index]] = self._new_state(step.states[step.requests[index]])
        found = self._drafts(step, sampled_token_ids, active, logits, num_tokens_no_spec, token_ids_cpu)
        return [
            self._plan(step, index, tokens, found.get(index), int(num_tokens_no_spec[index]), len(active))
            if tokens
            else []
            for index, tokens in enumerate(sampled_token_ids)
        ]

    def _measure(self, step: Step) -> None:
        """Times steps that follow each other without a pause, and forgets requests that are gone."""
        clock, requests = self.costs.times.clock, frozenset(step.requests)
        now = clock() if clock else 0.0
        before, began = self._last
        if step.is_decode and requests == before:
            self.costs.record(step.rows, now - began, step.rows == len(step.requests))
        self._last = requests, now
        if requests != before:
            for name in [name for name in self.states if name not in step.states]:
                del self.states[name]

    def _may_draft(self, step: Step, active: Sequence[int]) -> bool:
        """Whether this step gives drafts: now and then none does, to measure AR steps; under a load where drafts do
        not pay for most requests, only every so many steps do, to look whether that has changed."""
        self._steps += 1
        times = self.costs.times
        if times.clock is not None and any(step.spec_tokens):
            self._since += 1
            size = len(active).bit_length()
            # Batches whose sizes change all the time may never tell: only so many steps go into it.
            is_unknown = self._tries[size] < MEASUREMENTS and not times.knows_plain(len(active))
            if self._since > (4 if is_unknown else MEASURE_EVERY):
                self._tries[size] += 1
                self._since = 0
                return False
        self._is_look = self._steps % (FIRST_LOOKS if self._steps < 2 * LOOK_EVERY else LOOK_EVERY) == 0
        if any(step.spec_tokens) or self._is_look:
            return True
        return self.acceptance.best_window(self.costs, len(active)) > 0

    def _new_state(self, request: Any) -> RequestState:
        params = request.sampling_params
        options = RequestOptions.of(params.extra_args)
        ends = params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids
        return RequestState(options, self.acceptance.begin(), frozenset(ends or ()), 0)

    def _drafts(
        self,
        step: Step,
        sampled: list[list[int]],
        active: Sequence[int],
        logits: torch.Tensor,
        lengths: Any,
        texts: Any,
    ) -> dict[int, tuple[list[int], list[float]]]:
        """What the masks of each request say, with the chances that they give it; only where every draft passed."""
        masks: dict[int, list[int]] = {}
        row = 0
        for index, tokens in enumerate(step.spec_tokens):
            drafts = self._count_drafts(tokens)
            unused = self._unused_masks
            if len(sampled[index]) == drafts + 1 and len(tokens) > drafts + unused:
                masks[index] = list(range(row + drafts + 1 + unused, row + len(tokens) + 1))
            row += len(tokens) + 1
        if not masks:
            return {}
        most, device = max(map(len, masks.values())), logits.device
        rows = torch.tensor([each + each[-1:] * (most - len(each)) for each in masks.values()], device=device)
        scores = logits[rows]  # (A, K, V)
        if self.model.adapter is None:
            best, drafted = scores.float().max(-1)
            chances = (best - scores.float().logsumexp(-1)).exp()
        else:
            before = [texts[index, lengths[index] - 2 : lengths[index]].tolist() for index in masks]
            before_ids = torch.tensor(before, device=device)
            drafted, chances = self.model.adapter.draft(self.model, step.hidden[rows], scores, before_ids)
        return {
            index: (tokens[: len(each)], its_chances[: len(each)])
            for (index, each), tokens, its_chances in zip(
                masks.items(), drafted.tolist(), chances.tolist(), strict=True
            )
        }

    @property
    def _unused_masks(self) -> int:
        """The masks at positions that the AR head decides."""
        return 0 if self.model.adapter is not None else 1

    def _count_drafts(self, tokens: Sequence[int]) -> int:
        """How many of a request's speculative tokens are drafts: the others, behind them, are masks."""
        return next((place for place, token in enumerate(tokens) if token == self.mask_token_id), len(tokens))

    def _plan(
        self,
        step: Step,
        index: int,
        sampled: list[int],
        found: tuple[list[int], list[float]] | None,
        length: int,
        requests: int,
    ) -> list[int]:
        """Drafts and masks of one request."""
        name = step.requests[index]
        state, request = self.states[name], step.states[name]
        if state.options.strategy == "ar":
            return []
        limit = min(request.sampling_params.max_tokens - len(request.output_token_ids), self.max_model_len - length)
        drafts, is_unsure = self._choose_drafts(state, found, limit)
        self._learn(state, step.spec_tokens[index], len(sampled) - 1, len(drafts) if is_unsure else None)
        state.window_size = state.acceptance.best_window(self.costs, requests)
        if state.options.window_size is not None:
            state.window_size = min(state.window_size, state.options.window_size)
        if not state.window_size:
            if not self._is_look:
                return []
            state.window_size = 2 + index % 3  # of several sizes, so that the cost of a row shows
        drafts = drafts[: state.window_size]
        unused = self._unused_masks
        masks = min(state.window_size - 1 + unused, self.most - len(drafts), limit - 2 + unused - len(drafts))
        if (drafts and drafts[-1] in state.end_tokens) or masks <= unused:
            masks = 0
        return [*drafts, *[self.mask_token_id] * masks]

    def _choose_drafts(
        self, state: RequestState, found: tuple[list[int], list[float]] | None, limit: int
    ) -> tuple[list[int], bool]:
        """The drafts that are worth it, and whether a mask was not sure enough of the next one. A rejected draft costs
        the next step its drafts, an accepted one gives a token."""
        extra = state.acceptance.extra
        drafts: list[int] = []
        for token, chance in zip(*(found or ([], [])), strict=True):
            if len(drafts) >= limit - 1:
                break
            if chance < (1 - chance) * extra:
                return drafts, True
            drafts.append(token)
            if token in state.end_tokens:
                break
        return drafts, False

    def _learn(self, state: RequestState, spec_tokens: list[int], accepted: int, unsure: int | None) -> None:
        """Takes in what became of a request's drafts, and the depth at which its masks gave no new one."""
        checked = self._count_drafts(spec_tokens)
        for each in (state.acceptance, self.acceptance):
            each.learn(accepted, accepted if accepted < checked else unsure)
            if checked or unsure == 0:  # nothing is lost where there is no draft: what a rejection costs must fade
                each.extra += 0.1 * (accepted - each.extra)
