"""Configuration of WeDLM: Qwen3's, plus what the WeDLM checkpoints state beyond it."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

# The published checkpoints say `"mask_token_id": null` and use this row of the Qwen2.5/Qwen3 embedding as the mask.
PUBLISHED_MASK_TOKEN_ID = 151665


@strict
class WeDLMConfig(Qwen3Config):
    r"""Identical to [`Qwen3Config`] except for two fields, one default, and stricter checks.

    Args:
        qk_norm (`bool`, *optional*, defaults to `True`):
            RMS norms on queries and keys: `True` for Qwen3-style checkpoints, `False` for Qwen2.5-style ones (whose
            `attention_bias` is `True`).
        mask_token_id (`int`, *optional*):
            Row of the mask token M. `None` means 151665 where the vocabulary is large enough to have that row (the
            convention of the published checkpoints), and "no mask token" otherwise.
        head_dim (`int`, *optional*, defaults to `hidden_size // num_attention_heads`):
            Width of an attention head.

    Raises:
        ValueError: for a mask token outside the vocabulary or equal to the end or padding token; for sliding-window
            attention (physical and logical distance differ under reordering, so it has no meaning here); and, when
            read from a `config.json`, for one that states no RoPE base.
    """

    model_type = "wedlm"

    head_dim: int | None = None
    qk_norm: bool = True
    mask_token_id: int | None = None

    # Set where the package is installed (see hub.py); absent in the files that travel with a checkpoint.
    _hub_bundle: ClassVar[Any] = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.mask_token_id is None and self.vocab_size > PUBLISHED_MASK_TOKEN_ID:
            self.mask_token_id = PUBLISHED_MASK_TOKEN_ID
        super().__post_init__(**kwargs)
        if "sliding_attention" in self.layer_types:
            raise ValueError(
                f"WeDLM needs full attention in every layer, got layer_types={self.layer_types} "
                f"(use_sliding_window={self.use_sliding_window}, sliding_window={self.sliding_window})."
            )
        check_mask_token_id(self.mask_token_id, self.vocab_size, self.eos_token_id, self.pad_token_id)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Like the parent's, but refuses a dictionary without a RoPE base instead of assuming one."""
        rope = config_dict.get("rope_parameters") or config_dict.get("rope_scaling") or {}
        if config_dict.get("rope_theta") is None and rope.get("rope_theta") is None:
            raise ValueError(
                "The WeDLM config states no RoPE base: expected `rope_theta`, at the top level or in `rope_parameters`, "
                f"got keys {sorted(config_dict)}."
            )
        return super().from_dict(config_dict, **kwargs)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Saves the config; an installed class also writes the `trust_remote_code` files beside it (see hub.py)."""
        if self._hub_bundle is not None:
            self.auto_map = self._hub_bundle(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)


def check_mask_token_id(
    mask_token_id: int | None,
    vocab_size: int,
    eos_token_id: int | list[int] | None,
    pad_token_id: int | None,
) -> None:
    """Raises `ValueError` if the mask id (when there is one) is no row of its own: outside the vocabulary, end or pad."""
    if mask_token_id is None:
        return
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(f"mask_token_id must lie in the vocabulary (0 to {vocab_size - 1}), got {mask_token_id}.")
    end_tokens = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if mask_token_id in end_tokens:
        raise ValueError(f"mask_token_id must differ from the end token, got {mask_token_id} for both.")
    if mask_token_id == pad_token_id:
        raise ValueError(f"mask_token_id must differ from the padding token, got {mask_token_id} for both.")


__all__ = ["WeDLMConfig"]
