"""vLLM's scheduler for verified decoding."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from .runner import PADDING


class WeDLMScheduler(Scheduler):
    """Identical to vLLM's `Scheduler` except that a request under a grammar keeps its masks, which no grammar accepts,
    and that masks are not counted as drafted tokens."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._mask_token_id: int = self.vllm_config.model_config.hf_config.mask_token_id

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Takes in the drafts and masks of the next step."""
        super().update_draft_token_ids(draft_token_ids)
        for request_id, proposed in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            if request.use_structured_output:
                drafts = len(proposed) - self._masks_in(proposed)
                # The grammar has cut the list at the first token that it does not accept, at the latest a mask.
                if len(request.spec_token_ids) >= drafts:
                    request.spec_token_ids = [*proposed[:drafts], *[PADDING] * (len(proposed) - drafts)]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Takes in what a step gave. Statistics leave out tokens that vLLM calls invalid: the masks."""
        scheduler_output.num_invalid_spec_tokens = {
            request_id: self._masks_in(tokens)
            for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        return super().update_from_output(scheduler_output, model_runner_output)

    def _masks_in(self, tokens: list[int]) -> int:
        """The number of masks, which are the last of a request's speculative tokens."""
        return sum(token in (self._mask_token_id, PADDING) for token in tokens)
