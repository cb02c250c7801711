"""What verified decoding needs of vLLM's model runner beyond its public interface.

vLLM gives a proposer of a user's own neither the hidden states nor the requests, and knows nothing of masks. So a few
methods of the runner are wrapped, once in each process, when a WeDLM model that drafts is built. For other models
nothing changes. All of it depends on the version of vLLM, which plugin.py guards.
"""

from functools import wraps
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PADDING = -1  # vLLM's speculative token that no grammar looks at; the scheduler writes masks so behind a grammar


def prepare_runner() -> None:
    """Wraps the runner's methods; calling it again changes nothing."""
    if hasattr(GPUModelRunner, "wedlm_originals"):
        return
    GPUModelRunner.wedlm_originals = {}
    for wrapper in (_calc_spec_decode_metadata, _sample, _input_fits_in_drafter, propose_draft_token_ids):
        name = wrapper.__name__
        original = getattr(GPUModelRunner, name)
        GPUModelRunner.wedlm_originals[name] = original
        setattr(GPUModelRunner, name, wraps(original)(wrapper))
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _model_that_drafts(runner: Any) -> Any:
    """The runner's model if it is a WeDLM model that drafts, else `None`."""
    model = getattr(runner, "model", None)
    return model if getattr(model, "is_drafting", False) and hasattr(model, "sampled_logits") else None


def _calc_spec_decode_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Before a forward: masks that came as padding become the mask token, and a mask adapter learns where they are."""
    model = _model_that_drafts(self)
    original = self.wedlm_originals["_calc_spec_decode_metadata"]
    if model is None:
        return original(self, *args, **kwargs)
    ids = self.input_ids.gpu
    ids.masked_fill_(ids == PADDING, model.mask_token_id)
    for tokens in self.input_batch.spec_token_ids:  # penalties read these
        if tokens and tokens[-1] == PADDING:
            tokens[:] = [model.mask_token_id if token == PADDING else token for token in tokens]
    metadata = original(self, *args, **kwargs)
    if model.adapter is not None:
        rows = metadata.logits_indices[metadata.target_logits_indices + 1]
        model.adapter.mark(rows.long(), metadata.draft_token_ids == model.mask_token_id, self.positions)
    return metadata


def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """A step without any draft or mask is sampled as without speculative decoding, which is faster."""
    if spec_decode_metadata is not None and not spec_decode_metadata.max_spec_len and _model_that_drafts(self):
        spec_decode_metadata = None
    return self.wedlm_originals["_sample"](self, logits, spec_decode_metadata)


def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
    """vLLM stops drafting for all requests while one is near `max_model_len`; the proposer looks at each alone."""
    if _model_that_drafts(self) is not None:
        return common_attn_metadata is not None
    return bool(self.wedlm_originals["_input_fits_in_drafter"](self, common_attn_metadata))


def propose_draft_token_ids(self: Any, *args: Any) -> Any:
    """Shows the proposer the step before it is asked for drafts."""
    if _model_that_drafts(self) is not None:
        scheduler_output, _, _, _, sampled_hidden, _, metadata, *_ = args
        self.drafter.see(self, scheduler_output, sampled_hidden, metadata)
    return self.wedlm_originals["propose_draft_token_ids"](self, *args)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """A value of each request, `x` `(requests,)`, with `replace_to` for `replace_from`, repeated for each of its
    tokens. `cu_num_tokens` `(requests,)` are those of a request and of those before it, `num_tokens` of all.

    In place of vLLM's own on CPUs, which fills a copy of its result that nobody reads
    (https://github.com/vllm-project/vllm/issues/55005): temperatures, top-k and top-p of drafts are random there.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts.long(), output_size=num_tokens)
