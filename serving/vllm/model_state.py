"""WeDLM on vLLM's model runner V2, through the hook that it has for models: a `ModelState`.

Runner V2 leaves two things to it: what a forward gets beyond the tokens, and how a step's logits become tokens. Drafts
and masks, or the slots of a window, are what vLLM calls draft tokens; which and how many of them are kept says the
sampler. vLLM gives each request the same number of rows in each step, and knows their tokens on the device alone.

`R` sampled rows of a step, `A` requests, `N` draft tokens of one, `V` vocabulary, `M` requests at most.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from ...generation.sampling import token_entropy
from .options import EngineOptions, RequestOptions
from .window import Windows


class VerifiedState(DefaultModelState):
    """Verified decoding: drafts and masks as vLLM's draft tokens, which vLLM's own rejection sampler verifies."""

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Tells a mask adapter which rows are masks."""
        model: Any = self.model
        if model.adapter is not None:
            rows = input_batch.logits_indices
            is_mask = input_batch.input_ids[rows] == model.mask_token_id
            model.adapter.mark(rows, is_mask & (input_batch.expanded_local_pos > 0), input_batch.positions)
        return super().prepare_inputs(input_batch, req_states)

    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        """Verifies, then drafts."""
        return VerifyingSampler(sampler, self.model, self.vllm_config), None


class StreamingState(DefaultModelState):
    """The paper's decoder without verification."""

    # vLLM's scheduler then expects nothing of a step but draft tokens, of which none, some or all are kept.
    num_new_sampled_tokens_per_step = 0

    def __init__(self, vllm_config: VllmConfig, model: Any, encoder_cache: Any, device: torch.device):
        super().__init__(vllm_config, model, encoder_cache, device)
        largest = vllm_config.num_speculative_tokens // 2
        self.windows = Windows(self.max_num_reqs, largest, model.mask_token_id, device)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Slots keep their logical positions, whatever the order in which they are run."""
        if input_batch.num_draft_tokens:
            place = input_batch.expanded_local_pos.long()
            slots = self.windows.order[input_batch.expanded_idx_mapping.long(), place]
            positions = input_batch.positions
            positions[input_batch.logits_indices] += (slots - place).to(positions.dtype)
        return super().prepare_inputs(input_batch, req_states)

    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        """Fills masks and commits tokens."""
        return StreamingSampler(sampler, self.windows, self.vllm_config), None


class WrappedSampler:
    """A sampler that leaves to vLLM's what it does not do itself."""

    def __init__(self, sampler: Any):
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not there yet
            raise AttributeError(name)
        return getattr(self.sampler, name)


class VerifyingSampler(WrappedSampler):
    """Verifies each request's drafts and takes new ones from its masks, as proposer.py does on runner V1."""

    def __init__(self, sampler: Any, model: Any, vllm_config: VllmConfig):
        super().__init__(sampler)
        self.model, self.most = model, vllm_config.num_speculative_tokens
        places, device = vllm_config.scheduler_config.max_num_seqs, sampler.req_states.device
        standard = {"enable_adaptive_verification": False, "rejection_sample_method": "standard"}
        settings = SimpleNamespace(num_speculative_tokens=self.most, **standard)
        self.verifier = RejectionSampler(sampler, settings, device)
        self.columns = torch.arange(self.most + 1, device=device)
        self.extra = torch.ones(places, device=device)  # tokens beyond the first of steps with drafts, a running mean
        self.width = torch.full((places,), self.most, device=device)

    def add_request(self, place: int, sampling_params: Any) -> None:
        """Takes a new request's options."""
        self.sampler.add_request(place, sampling_params)
        self.extra[place] = 1.0
        self.width[place] = RequestOptions.of(sampling_params.extra_args).most_rows(self.most)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """`(R, V)` logits to what is accepted of each request, and its next drafts and masks."""
        sampler = self.verifier if input_batch.num_draft_tokens else self.sampler
        output = sampler(logits, input_batch)
        places = input_batch.idx_mapping.long()
        self.sampler.req_states.draft_tokens[places] = self._draft(logits, input_batch, output, places)
        return output

    def _draft(self, logits: torch.Tensor, batch: Any, output: SamplerOutput, places: torch.Tensor) -> torch.Tensor:
        """`(A, N)`, drafts and the masks behind them."""
        mask, starts = self.model.mask_token_id, batch.cu_num_logits[: batch.num_reqs + 1].long()
        index = (starts[:-1, None] + self.columns).clamp(max=len(logits) - 1)  # (A, 1 + N)
        ids = batch.input_ids[batch.logits_indices].long()[index]
        is_draft_row = (self.columns > 0) & (self.columns < starts.diff()[:, None])
        is_mask = is_draft_row & (ids == mask)
        checked, accepted = (is_draft_row & ~is_mask).sum(1), output.num_sampled.long() - 1

        unused = 0 if self.model.adapter is not None else 1  # masks at positions that the AR head decides
        found = torch.where(accepted == checked, is_mask.sum(1) - unused, 0)
        depths = self.columns[: max(1, self.most // 2)]
        row = index.gather(1, ((checked + 1 + unused)[:, None] + depths).clamp(max=self.most))
        new = torch.cat([ids[:, :1], output.sampled_token_ids.long()], dim=1)
        before = new.gather(1, torch.stack([accepted, accepted + 1], dim=1).clamp(min=0))
        drafts, chances = self.model.draft(self.model.sampled_hidden[row], logits[row], before)
        extra = self.extra[places]
        is_worth_it = (depths < found[:, None]) & (chances >= (1 - chances) * extra[:, None])
        count = is_worth_it.long().cumprod(1).sum(1)
        has_learnt = (accepted >= 0) & ((checked > 0) | ((found > 0) & (count == 0)))
        self.extra[places] = torch.where(has_learnt, extra + 0.1 * (accepted - extra), extra)
        count = torch.minimum(count, (self.width[places] // 2).clamp(min=1))
        padded = torch.nn.functional.pad(drafts, (0, self.most - drafts.shape[1]))
        return torch.where(self.columns[:-1] < count[:, None], padded, mask)


class StreamingSampler(WrappedSampler):
    """Fills masks of each request's window with tokens that vLLM's sampler draws, and commits those that are pending
    (see [`Windows`])."""

    def __init__(self, sampler: Any, windows: Windows, vllm_config: VllmConfig):
        super().__init__(sampler)
        self.windows = windows
        self.settings = EngineOptions.of(vllm_config).settings(vllm_config)
        self.longest = [0] * vllm_config.scheduler_config.max_num_seqs  # new tokens, by place
        self.max_model_len = vllm_config.model_config.max_model_len

    def add_request(self, place: int, sampling_params: Any) -> None:
        """Takes a new request's options."""
        self.sampler.add_request(place, sampling_params)
        settings = RequestOptions.of(sampling_params.extra_args).settings(self.settings)
        self.windows.window[place] = settings.window_size
        self.windows.threshold[place] = settings.entropy_threshold
        self.windows.penalty[place] = settings.distance_penalty
        self.longest[place] = sampling_params.max_tokens or self.max_model_len

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """`(R, V)` logits to the tokens that each request commits, which may be none."""
        counts = torch.from_numpy(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1]).diff()
        self._begin(input_batch, (counts == 0).nonzero()[:, 0].tolist())
        shape, device = (input_batch.num_reqs, len(self.windows.columns)), logits.device
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        committed = torch.zeros(input_batch.num_reqs, dtype=torch.int32, device=device)
        rows = input_batch.cu_num_logits[: input_batch.num_reqs + 1].long().diff()
        if len(logits):
            decoded = counts.nonzero()[:, 0].to(device)
            sampled, entropies = self._sample(logits, input_batch)
            starts = input_batch.cu_num_logits[:-1].long()[decoded, None]
            index = (starts + self.windows.columns).clamp(max=len(logits) - 1)
            places = input_batch.idx_mapping.long()[decoded]
            new, count, following = self.windows.advance(places, rows[decoded], entropies[index], sampled[index])
            tokens[decoded], committed[decoded] = new, count.int()
            self.sampler.req_states.draft_tokens[places] = following
        rejected = rows.int() - committed
        counted = {"num_sampled": committed, "num_rejected": rejected}
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None, num_nans=None, **counted)

    def _begin(self, batch: Any, requests: list[int]) -> None:
        """Opens the windows of those requests whose prompt ends with this step."""
        states, places, left = self.sampler.req_states, [], []
        for request in requests:
            length = int(batch.prefill_len_np[request])
            if batch.num_computed_prefill_tokens_np[request] + batch.num_scheduled_tokens[request] >= length:
                place = int(batch.idx_mapping_np[request])
                most = min(int(states.prompt_len.np[place]) + self.longest[place], self.max_model_len)
                places.append(place)
                left.append(most - length)
        if places:
            index = torch.tensor(places, device=states.device)
            states.draft_tokens[index] = self.windows.begin(index, torch.tensor(left, device=states.device))

    def _sample(self, logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`(R,)` tokens, which are never masks, and the entropies `(R,)` of the distributions as they are."""
        entropies = token_entropy(logits)
        logits[:, self.windows.mask_token_id] = -torch.inf
        requests = batch.expanded_idx_mapping, batch.idx_mapping, batch.idx_mapping_np
        rows = batch.positions[batch.logits_indices], batch.input_ids[batch.logits_indices], batch.expanded_local_pos
        sampled, _ = self.sampler.sample(logits, *requests, *rows, batch.seq_lens_cpu_upper_bound.numpy())
        return sampled.long(), entropies
