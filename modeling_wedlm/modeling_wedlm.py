"""WeDLM: Qwen3 (or Qwen2.5) weights under plain causal attention in *physical* order, RoPE at *logical* positions."""

from functools import wraps
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import Qwen3ForCausalLM, Qwen3Model, Qwen3PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer
from transformers.utils import can_return_tuple

from ..generation.mixin import WeDLMGenerationMixin
from ..generation.versions import CACHE, explained, takes_cache, warn_if_untested
from .configuration_wedlm import WeDLMConfig
from .dual_stream import dual_stream_mask, forward_with_targets


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
        self, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The parent's, without the position ids."""
        return super().forward(*args, **kwargs)


class WeDLMPreTrainedModel(Qwen3PreTrainedModel):
    """Identical to [`Qwen3PreTrainedModel`] except that a checkpoint must hold every weight of the model."""

    config: WeDLMConfig
    _can_record_outputs = {"hidden_states": Qwen3DecoderLayer, "attentions": WeDLMAttention}

    @classmethod
    @explained
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Like the parent's, but where that starts missing weights at random and warns, this raises `ValueError`,
        unless `output_loading_info=True` leaves the judgement to the caller; `OSError` for damaged weight files."""
        name, kwargs = str(pretrained_model_name_or_path), {**kwargs, "output_loading_info": True}
        try:
            loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(f"The weights of {name!r} are damaged or truncated: {error}.") from error
        if output_loading_info:
            return loaded
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            shown = ", ".join(missing[:3]) + ", …" * (len(missing) > 3)
            raise ValueError(
                f"{name!r} lacks {len(missing)} of the weights that {cls.__name__} needs with this config: {shown}."
            )
        return model


def _check_one_document(position_ids: Any, attention_mask: Any) -> None:
    """Raises `ValueError` where positions count up from 0 again and again in a row, with nothing that keeps these
    documents apart: they would see each other."""
    if position_ids is None or torch.compiler.is_compiling():
        return
    if isinstance(attention_mask, torch.Tensor) and (attention_mask.ndim > 2 or not bool(attention_mask.all())):
        return
    restarts = position_ids[..., 1:] == 0
    if restarts.any() and bool((restarts | (position_ids.diff(dim=-1) == 1)).all()):
        raise ValueError(
            "`position_ids` restart at 0 inside a row: its documents would see each other, since WeDLM reads "
            "positions as places alone. Pad the documents (no `padding_free`, no flattening), pass an "
            "`attention_mask` of shape (B, 1, T, T), or train with "
            "DataCollatorForDualStreamMasking, which keeps packed documents apart."
        )


class WeDLMModel(WeDLMPreTrainedModel, Qwen3Model):
    """Identical to [`Qwen3Model`] except for its attention, and that the mask follows physical order, whatever
    `position_ids` say, or is the dual-stream mask of training."""

    def __init__(self, config: WeDLMConfig):
        super().__init__(config)
        warn_if_untested()
        for layer_idx, layer in enumerate(self.layers):
            layer.self_attn = WeDLMAttention(config, layer_idx)
        self.post_init()

    @takes_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        stream_ids: torch.LongTensor | None = None,
        block_ids: torch.LongTensor | None = None,
        document_ids: torch.LongTensor | None = None,
        memory_ends: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """See [`WeDLMForCausalLM.forward`], and [`dual_stream_mask_function`] for `memory_ends`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        if kwargs.get("targets") is not None:  # which the model keeps to itself
            raise ValueError(
                "Another loss has taken the place of the model's own, as TRL's `SFTTrainer` does it, and dual-stream "
                "batches have no other: train with `WeDLMSFTTrainer`, or with transformers' `Trainer`."
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        if isinstance(attention_mask, dict):  # prepared by `generate` for a compiled forward
            masks = attention_mask
        elif stream_ids is not None and attention_mask is not None:
            raise ValueError("`stream_ids` say who sees whom: leave `attention_mask` out beside them.")
        elif stream_ids is None:
            if self.training and cache is None:
                _check_one_document(position_ids, attention_mask)
            masks = {"full_attention": self._physical_causal_mask(inputs_embeds, attention_mask, cache)}
        else:
            layout = stream_ids, block_ids, document_ids, memory_ends
            masks = {"full_attention": dual_stream_mask(self, inputs_embeds, *layout)}
        kwargs |= {CACHE: cache, "inputs_embeds": inputs_embeds, "use_cache": use_cache}
        return super().forward(attention_mask=masks, position_ids=position_ids, **kwargs)

    def _physical_causal_mask(self, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Any) -> Any:
        # Without `position_ids`: transformers would take reordered ones for packed sequences and split at each jump.
        mask: Any = create_causal_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **{CACHE: cache}
        )
        is_boolean = isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.dtype == torch.bool
        if is_boolean and self.config._attn_implementation != "sdpa":
            # A caller's own mask arrives here untouched, and attention other than sdpa would *add* it as 0 and 1.
            lowest = torch.finfo(inputs_embeds.dtype).min
            mask = torch.zeros_like(mask, dtype=inputs_embeds.dtype).masked_fill(~mask, lowest)
        return mask


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

    @explained
    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Any = None,
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
            position_ids (`torch.LongTensor` of shape `(B, T)`): *logical* positions, for rotary embeddings alone.
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
            CACHE: cache, "inputs_embeds": inputs_embeds, "use_cache": use_cache,
            "stream_ids": stream_ids, "block_ids": block_ids, "document_ids": document_ids,
        }  # fmt: skip
        inputs = {name: value for name, value in inputs.items() if value is not None} | kwargs
        if targets is not None:
            if self.training:  # ready were the masks of other weights
                self.config.masks_trained, self.generation_config.masks_ready = True, False  # type: ignore[attr-defined]
            return forward_with_targets(self, inputs, targets, loss_weights, labels, num_items_in_batch)
        if labels is not None:
            inputs |= {"labels": labels, "num_items_in_batch": num_items_in_batch}
        if isinstance(logits_to_keep, int) and logits_to_keep:
            # As rows of their own: for a slice of a batch, torch copies the head's weights once for each sequence.
            given = inputs.get("input_ids", inputs.get("inputs_embeds"))
            if given is not None:
                logits_to_keep = torch.arange(given.shape[1], device=given.device)[-logits_to_keep:]
        return super().forward(logits_to_keep=logits_to_keep, **inputs)

    @wraps(Qwen3ForCausalLM.prepare_inputs_for_generation, assigned=())  # transformers looks for `inputs_embeds` in it
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The parent's, with the cache by the name that PEFT reads: under the other it would not see the cache, and
        prefix tuning would put its prefix in front of every token."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        if CACHE in inputs:
            inputs["past_key_values"] = inputs.pop(CACHE)
        return inputs
