"""Verified parallel decoding on vLLM: the proposer of its speculative decoding.

A request's speculative tokens are drafts f₁…f_d and, behind them, masks. vLLM runs them behind the last accepted token
c at consecutive positions, and verifies them: drafts as any drafts, and the first mask is always rejected, since the
model gives the mask token no chance, and replaced by the AR token. The masks' own rows of the same forward give the
next drafts. See docs/algorithm.md#verification and [`VerifyRule`], which does the same in transformers:

    rows of a request       c  f₁ f₂ │ M  M  M  M         the AR row at f₂ and the first mask predict the same slot:
    predicted slots         0  1  2  │ 2  3  4  5         the AR head decides it, drafts start behind it

If a draft is rejected, the masks behind it saw a wrong token: the next step has masks only. With a mask adapter no
mask stands at the position that the AR head decides, so that every mask gives a draft.

`R` sampled rows of a step, `H` hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from ...generation.fixed_plan import FixedPlan
from ...generation.mixin import SLOT_COSTS
from ...generation.planner import Outlook, Planner, StepSize
from ...generation.rows import ADAPTER_MASKS, OWN_MASKS, MaskRun, Row, Tree
from ...generation.step_times import StepTimes, step_clock
from .options import ARCHITECTURE, EngineOptions, RequestOptions

PAUSE = 10.0  # seconds between two lines in the log
RATE = 0.05  # of a step in the mean gain

logger = init_logger("vllm.wedlm")


@dataclass
class RequestState:
    """What is known of a request."""

    options: RequestOptions
    end_tokens: frozenset[int]  # nothing is drafted behind one
    drafts: list[Row]  # that are being checked


@dataclass(frozen=True)
class RunnerStep:
    """What the runner shows of a step."""

    requests: list[str]  # ids, in the order of the batch
    states: Any  # the runner's own of each request
    is_decode: bool  # no prompt was part of it
    hidden: torch.Tensor  # (R, H), last hidden states of the sampled rows
    spec_tokens: list[list[int]]  # of each request, that were verified


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
        self.most, self.always_draft = spec.num_speculative_tokens, options.always_draft
        self.max_model_len = vllm_config.model_config.max_model_len
        self.mask_token_id = vllm_config.model_config.hf_config.mask_token_id
        # Processes of a tensor-parallel group must decide alike: no clock of their own there.
        device = vllm_config.device_config.device_type
        is_timed = vllm_config.parallel_config.tensor_parallel_size == 1 and not self.always_draft
        self.times = StepTimes(SLOT_COSTS.get(device, SLOT_COSTS["cuda"]), is_timed)
        self._clock = step_clock(device) if is_timed else lambda: 0.0
        self._size: StepSize = 1, False, 1  # of the step that is under way
        self._began = 0.0
        self.planner: Any = None  # once the model is there
        self._gain: float | None = None  # tokens that drafts and masks bring a request's step, a running mean
        self._logged: tuple[bool | None, float] = None, -PAUSE  # whether they gain, by the log's last line, and when
        self.states: dict[str, RequestState] = {}
        self.model: Any = None
        self._step: RunnerStep | None = None
        self._last: frozenset[str] = frozenset()

    def load_model(self, target_model: Any) -> None:
        """Takes the model, whose own masks draft: there is no other."""
        self.model = target_model
        depth = max(1, (self.most - self._run.skipped) // 2)
        if target_model.adapter is not None:
            depth = min(depth, target_model.adapter.num_masks)
        how: dict[str, Any] = {"depth": depth, "is_chain": True, "run": self._run}
        self.planner = FixedPlan(**how) if self.always_draft else Planner(self.times, **how)

    def see(self, runner: Any, scheduler_output: Any, hidden: torch.Tensor, metadata: Any) -> None:
        """Takes in a step, just before `propose` is called for it."""
        requests = list(runner.input_batch.req_ids)
        tokens = iter(metadata.draft_token_ids.tolist() if metadata is not None else [])
        counts = metadata.num_draft_tokens if metadata is not None else [0] * len(requests)
        rows = scheduler_output.total_num_scheduled_tokens
        self._step = RunnerStep(
            requests=requests,
            states=runner.requests,
            is_decode=rows == sum(counts) + len(requests),
            hidden=hidden,
            spec_tokens=[[next(tokens) for _ in range(count)] for count in counts],
        )

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **kwargs: Any
    ) -> list[list[int]]:
        """The drafts and masks of each request for the next step, from what the step gave each (nothing for a part of
        a prompt), the numbers of its tokens so far, `(requests,)`, and those tokens, `(requests, max_model_len)`."""
        step, self._step = self._step, None
        assert step is not None, "vLLM's model runner was not prepared"
        self._finish(step, sampled_token_ids)
        logits, self.model.sampled_logits = self.model.sampled_logits, None
        active = [index for index, tokens in enumerate(sampled_token_ids) if tokens]
        if not active:
            return [[] for _ in sampled_token_ids]
        for index in active:
            if step.requests[index] not in self.states:
                self.states[step.requests[index]] = _new_state(step.states[step.requests[index]])
        found = self._drafts(step, sampled_token_ids, logits, num_tokens_no_spec, token_ids_cpu)
        outlooks = [self._outlook(step, index, found.get(index), int(num_tokens_no_spec[index])) for index in active]
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        for index, planned in zip(active, self.planner.plan(outlooks), strict=True):
            proposed[index] = self._proposal(step.requests[index], planned)
        requests, speculative = len(active), sum(map(len, proposed))
        self._size, self._began = (requests + speculative, speculative > 0, requests), self._clock()
        if not self.always_draft:
            self._tell(self.planner.gain / requests)
        return proposed

    def _tell(self, gain: float) -> None:
        """Has a line in vLLM's log where drafting begins or ends."""
        mean = self._gain = gain if self._gain is None else self._gain + (gain - self._gain) * RATE
        is_better, (was_better, when) = mean > 0, self._logged
        if is_better != was_better and monotonic() > when + PAUSE:
            self._logged = is_better, monotonic()
            what, sign = ("Parallel decoding", "more") if is_better else ("AR steps", "fewer")
            why = "drafts and masks bring %.2f tokens a step %s than AR steps in the same time, as measured so far"
            logger.info(f"{what}: {why}.", abs(mean), sign)

    def _finish(self, step: RunnerStep, sampled: list[list[int]]) -> None:
        """Takes in what became of drafts, and the time of steps that follow each other without a pause. Forgets
        requests that are gone."""
        for name, tokens, spec_tokens in zip(step.requests, sampled, step.spec_tokens, strict=True):
            state = self.states.get(name)
            if state is not None and tokens:
                checked = min(self._count_drafts(spec_tokens), len(state.drafts))
                for place, draft in enumerate(state.drafts[: min(checked, len(tokens))]):
                    self.planner.learn(draft, place < len(tokens) - 1)
        requests = frozenset(step.requests)
        if step.is_decode and requests == self._last:
            self.planner.finish(self._size, sum(map(len, sampled)), self._clock() - self._began)
        if requests != self._last:
            for name in [name for name in self.states if name not in step.states]:
                del self.states[name]
        self._last = requests

    def _drafts(
        self, step: RunnerStep, sampled: list[list[int]], logits: torch.Tensor, lengths: Any, texts: Any
    ) -> dict[int, tuple[list[int], list[float]]]:
        """What the masks of each request say, with the chances that they give it; only where every draft passed."""
        masks: dict[int, list[int]] = {}
        row = 0
        for index, tokens in enumerate(step.spec_tokens):
            drafts, skipped = self._count_drafts(tokens), self._run.skipped
            if len(sampled[index]) == drafts + 1 and len(tokens) > drafts + skipped:
                masks[index] = list(range(row + drafts + 1 + skipped, row + len(tokens) + 1))
            row += len(tokens) + 1
        if not masks:
            return {}
        most, device = max(map(len, masks.values())), logits.device
        rows = torch.tensor([each + each[-1:] * (most - len(each)) for each in masks.values()], device=device)
        before = [texts[index, lengths[index] - 2 : lengths[index]].tolist() for index in masks]
        drafted, chances = self.model.draft(step.hidden[rows], logits[rows], torch.tensor(before, device=device))
        found = zip(masks.items(), drafted.tolist(), chances.tolist(), strict=True)
        return {index: (tokens[: len(each)], own[: len(each)]) for (index, each), tokens, own in found}

    @property
    def _run(self) -> MaskRun:
        """How masks stand. Those at the position that the AR head decides draft nothing."""
        return ADAPTER_MASKS if self.model.adapter is not None else OWN_MASKS

    def _count_drafts(self, tokens: Sequence[int]) -> int:
        """How many of a request's speculative tokens are drafts: the others, behind them, are masks."""
        return next((place for place, token in enumerate(tokens) if token == self.mask_token_id), len(tokens))

    def _outlook(
        self, step: RunnerStep, index: int, found: tuple[list[int], list[float]] | None, length: int
    ) -> Outlook:
        """What a request can do next."""
        name = step.requests[index]
        state, request = self.states[name], step.states[name]
        room = min(request.sampling_params.max_tokens - len(request.output_token_ids), self.max_model_len - length)
        if state.options.strategy == "ar":
            room = 1
        if state.options.window_size is not None:
            room = min(room, state.options.window_size)
        drafts: list[Row] = []
        for depth, (token, chance) in enumerate(zip(*(found or ([], [])), strict=True), 1):
            drafts.append(Row(token, depth, depth - 2, chance))
            if token in state.end_tokens:
                break
        return Outlook(drafts, len(drafts), room)

    def _proposal(self, name: str, planned: Tree) -> list[int]:
        """The drafts and masks of a request."""
        state, rows = self.states[name], planned[: self.most]
        drafts = state.drafts = [row for row in rows if row.token is not None]
        if len(rows) - len(drafts) <= self._run.skipped or (drafts and drafts[-1].token in state.end_tokens):
            rows = drafts
        return [self.mask_token_id if row.token is None else row.token for row in rows]


def _new_state(request: Any) -> RequestState:
    params = request.sampling_params
    ends = params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids
    return RequestState(RequestOptions.of(params.extra_args), frozenset(ends or ()), [])
