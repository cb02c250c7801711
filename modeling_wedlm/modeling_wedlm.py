"""WeDLM: Qwen3 (or Qwen2.5) weights under plain causal attention in *physical* order, RoPE at *logical* positions."""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
)
from transformers.utils import can_return_tuple

from ..generation.mixin import WeDLMGenerationMixin
from .configuration_wedlm import WeDLMConfig
from .dual_stream import CHUNK_LOGITS, dual_stream_loss, dual_stream_mask_function


class WeDLMAttention(Qwen3Attention):
    """Identical to [`Qwen3Attention`] except that the output projection has no bias, that `qk_norm=False` leaves
    queries and keys as they are (Qwen2.5), and that position ids end at RoPE (attention kernels read a jump in them as
    the border of a packed sequence)."""

    def __init__(self, config: WeDLMConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        if not config.qk_norm:
            for name in ("q_norm", "k_norm"):
                setattr(self, name, nn.Identity())

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


class WeDLMPreTrainedModel(Qwen3PreTrainedModel):
    """Identical to [`Qwen3PreTrainedModel`] except that a checkpoint must hold every weight of the model."""

    config: WeDLMConfig
    _can_record_outputs = {"hidden_states": Qwen3DecoderLayer, "attentions": WeDLMAttention}

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Like the parent's, but where that starts missing weights at random and warns, this raises `ValueError`,
        unless `output_loading_info=True` leaves the judgement to the caller; `OSError` for damaged weight files."""
        name = str(pretrained_model_name_or_path)
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise OSError(f"The weights of {name!r} are damaged or truncated: {error}.") from error
        if output_loading_info:
            return loaded
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"{name!r} lacks {len(missing)} of the weights that {cls.__name__} needs with this config: "
                f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}."
            )
        return model


class WeDLMModel(WeDLMPreTrainedModel, Qwen3Model):
    """Identical to [`Qwen3Model`] except for its attention, and that the mask follows physical order, whatever
    `position_ids` say, or is the dual-stream mask of training."""

    def __init__(self, config: WeDLMConfig):
        super().__init__(config)
        for layer_idx, layer in enumerate(self.layers):
            layer.self_attn = WeDLMAttention(config, layer_idx)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        stream_ids: torch.LongTensor | None = None,
        block_ids: torch.LongTensor | None = None,
        document_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """See [`WeDLMForCausalLM.forward`]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        if isinstance(attention_mask, dict):  # prepared by `generate` for a compiled forward
            masks = attention_mask
        elif stream_ids is not None and attention_mask is not None:
            raise ValueError("`stream_ids` say who sees whom: leave `attention_mask` out beside them.")
        elif stream_ids is None:
            masks = {"full_attention": self._physical_causal_mask(inputs_embeds, attention_mask, past_key_values)}
        else:
            masks = {"full_attention": self._dual_stream_mask(inputs_embeds, stream_ids, block_ids, document_ids)}
        return super().forward(
            attention_mask=masks,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def _physical_causal_mask(self, inputs_embeds: torch.Tensor, attention_mask: Any, past_key_values: Any) -> Any:
        # Without `position_ids`: transformers would take reordered ones for packed sequences and split at each jump.
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        if self.config._attn_implementation == "sdpa" or not isinstance(mask, torch.Tensor):
            return mask
        if mask.ndim == 4 and mask.dtype == torch.bool:
            # A caller's own mask arrives here untouched, and attention other than sdpa would *add* it as 0 and 1.
            lowest = torch.finfo(inputs_embeds.dtype).min
            mask = torch.zeros_like(mask, dtype=inputs_embeds.dtype).masked_fill(~mask, lowest)
        return mask

    def _dual_stream_mask(
        self, inputs_embeds: torch.Tensor, stream_ids: torch.Tensor, block_ids: Any, document_ids: Any
    ) -> Any:
        if block_ids is None:
            raise ValueError("`stream_ids` needs `block_ids` beside it, got None.")
        if stream_ids.shape != inputs_embeds.shape[:2]:
            raise ValueError(
                f"`stream_ids` must have the shape of the input, {tuple(inputs_embeds.shape[:2])}, got "
                f"{tuple(stream_ids.shape)}. Context parallelism, which cuts the input into pieces and drops the mask "
                "that says who sees whom, cannot train a dual stream: use data, sharded (FSDP2) or tensor parallelism."
            )
        if document_ids is None:
            document_ids = torch.zeros_like(stream_ids)
        implementation = self.config._attn_implementation
        if implementation not in ALL_MASK_ATTENTION_FUNCTIONS or "flash" in implementation:
            raise ValueError(
                "Dual-stream training needs an attention implementation that takes an arbitrary mask "
                f"('sdpa', 'eager' or 'flex_attention'), got {implementation!r}."
            )
        batch_size, length = stream_ids.shape
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
            batch_size=batch_size,
            q_length=length,
            kv_length=length,
            q_offset=0,
            kv_offset=0,
            mask_function=dual_stream_mask_function(stream_ids, block_ids, document_ids),
            attention_mask=None,
            allow_is_causal_skip=False,
            dtype=inputs_embeds.dtype,
            config=self.config,
            device=inputs_embeds.device,
        )


@dataclass
class WeDLMCausalLMOutputWithPast(CausalLMOutputWithPast):
    """[`CausalLMOutputWithPast`], and what training and evaluation report beside the loss, 0 without a target."""

    token_nll: torch.Tensor | None = None  # (B, T) float32, of each slot's target, in nats, with its graph
    correct: torch.Tensor | None = None  # (B, T) bool, whether the target is the likeliest token


class WeDLMForCausalLM(WeDLMGenerationMixin, WeDLMPreTrainedModel, Qwen3ForCausalLM):
    """Identical to [`Qwen3ForCausalLM`] except for its backbone, the dual-stream loss, and
    `generate(strategy=...)` (see [`WeDLMGenerationMixin`])."""

    # `num_items_in_batch` is used, so that gradient accumulation and data parallelism change no digit of the loss.
    accepts_loss_kwargs = True

    def __init__(self, config: WeDLMConfig):
        Qwen3PreTrainedModel.__init__(self, config)  # not the parent's: it would build a Qwen3 backbone first
        self.model = WeDLMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        targets: torch.LongTensor | None = None,
        loss_weights: torch.FloatTensor | None = None,
        stream_ids: torch.LongTensor | None = None,
        block_ids: torch.LongTensor | None = None,
        document_ids: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        r"""One causal forward in physical order.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, T)`): tokens in physical order.
            position_ids (`torch.LongTensor` of shape `(B, T)`): *logical* positions. They rotate queries and keys and
                decide nothing else.
            attention_mask (`torch.Tensor` of shape `(B, S + T)` or `(B, 1, T, S + T)`): padding; or a mask of one's
                own, boolean (`True` is visible) or additive.
            labels (`torch.LongTensor` of shape `(B, T)`): alone, the parent's next-token loss; beside `targets`, the
                clean tokens, of which only the number of supervised ones is used.
            targets, loss_weights (shape `(B, T)`): the token each slot must predict, unshifted (-100 for none), and
                the weight of its loss (1 if left out).
            stream_ids, block_ids, document_ids (`torch.LongTensor` of shape `(B, T)`): the dual-stream layout, see
                [`dual_stream_mask_function`]; `document_ids` may be left out where each row is one document.
            num_items_in_batch (`torch.Tensor` or `int`): what the summed loss is divided by; default: the number of
                supervised `labels`, or of `targets` where no labels are given.

        Returns:
            [`CausalLMOutputWithPast`]; when `targets` are given, [`WeDLMCausalLMOutputWithPast`] without `logits`,
            which are never held all at once.
        """
        inputs: dict[str, Any] = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache,
            "stream_ids": stream_ids, "block_ids": block_ids, "document_ids": document_ids,
        }  # fmt: skip
        inputs = {name: value for name, value in inputs.items() if value is not None} | kwargs
        if targets is not None:
            return self._forward_with_targets(inputs, targets, loss_weights, labels, num_items_in_batch)
        if labels is not None:
            inputs |= {"labels": labels, "num_items_in_batch": num_items_in_batch}
        if isinstance(logits_to_keep, int) and logits_to_keep:
            # As rows of their own: for a slice of a batch, torch copies the head's weights once for each sequence.
            given = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
            logits_to_keep = torch.arange(given.shape[1], device=given.device)[-logits_to_keep:]
        return super().forward(logits_to_keep=logits_to_keep, **inputs)

    def _forward_with_targets(
        self,
        inputs: dict[str, Any],
        targets: torch.Tensor,
        loss_weights: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> WeDLMCausalLMOutputWithPast:
        """The loss of dual-stream training (paper Eq. 10)."""
        # No cache unless asked for: nothing reads it, and the model config's default is for generation.
        outputs = self.model(**{"use_cache": False} | inputs)
        if num_items_in_batch is None:
            counted = targets if labels is None else labels[..., 1:]
            num_items_in_batch = (counted != -100).sum()
        loss, nll, correct = dual_stream_loss(
            self.lm_head,
            outputs.last_hidden_state,
            targets,
            torch.ones_like(targets, dtype=torch.float32) if loss_weights is None else loss_weights,
            num_items_in_batch,
            chunk_size=max(1, CHUNK_LOGITS // self.config.vocab_size),
        )
        return WeDLMCausalLMOutputWithPast(
            loss=loss,
            token_nll=nll,
            correct=correct,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = ["WeDLMForCausalLM", "WeDLMModel", "WeDLMPreTrainedModel"]
