"""The model on vLLM: vLLM's Qwen3 with what WeDLM checkpoints have beyond it.

`R` sampled rows of a step, `V` vocabulary, `H` hidden size.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from .adapter import VllmMaskAdapter
from .options import EngineOptions
from .runner import prepare_runner


class WeDLMForCausalLM(Qwen3ForCausalLM):
    """Identical to vLLM's `Qwen3ForCausalLM` except that norms on queries and keys can be off (`qk_norm=False`, the
    styles of Qwen2.5, Llama and Mistral), and that the mask token is never sampled."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        options = EngineOptions.of(vllm_config)
        if not self.config.qk_norm:
            for layer in self.model.layers[self.model.start_layer : self.model.end_layer]:
                layer.self_attn.q_norm, layer.self_attn.k_norm = nn.Identity(), nn.Identity()
        self.mask_token_id: int | None = self.config.mask_token_id
        self.is_drafting, self._options = options.is_drafting, options
        self._most_rows: int = vllm_config.scheduler_config.max_num_batched_tokens
        self.adapter: VllmMaskAdapter | None = None
        # (R, V) and (R, H), of the step under way, for the drafts that its masks give.
        self.sampled_logits: torch.Tensor | None = None
        self.sampled_hidden: torch.Tensor | None = None
        if self.is_drafting:
            prepare_runner()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Loads the checkpoint, then the mask adapter."""
        loaded = super().load_weights(weights)
        if (name := self._options.mask_adapter) is not None:
            self.adapter = VllmMaskAdapter(name, self, self._most_rows)
            loaded |= {f"adapter.{parameter}" for parameter, _ in self.adapter.named_parameters()}
        return loaded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """The parent's; with a mask adapter, masks have its embedding instead of the mask token's."""
        if self.adapter is not None and intermediate_tensors is None and inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.adapter.embed(self.embed_input_ids(input_ids))
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def draft(
        self, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the masks of each request say, see [`VllmMaskAdapter.draft`]; without its head, each for itself."""
        if self.adapter is not None and self.adapter.head is not None:
            return self.adapter.draft(self, hidden, logits, before)
        best, tokens = logits.float().max(-1)
        return tokens, (best - logits.float().logsumexp(-1)).exp()

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        """`(R, V)` logits, in which the mask token has no chance; `None` where another process has them."""
        logits = super().compute_logits(hidden_states)
        if logits is not None and self.mask_token_id is not None:
            logits[:, self.mask_token_id] = float("-inf")
            if self.is_drafting:
                self.sampled_logits, self.sampled_hidden = logits, hidden_states
        return logits
