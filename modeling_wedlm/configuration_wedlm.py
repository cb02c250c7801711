"""Configuration of WeDLM: Qwen3's, plus what the WeDLM checkpoints state beyond it."""

from ..generation.versions import check_format  # first: it says so where transformers is too old

# isort: split

from collections.abc import Callable
from os import PathLike
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from ..generation.settings import check_mask_token_id
from ..generation.versions import CACHE

# The published checkpoints say `"mask_token_id": null` and use this row of the Qwen2.5/Qwen3 embedding as the mask.
PUBLISHED_MASK_TOKEN_ID = 151665


@strict
class WeDLMConfig(Qwen3Config):
    r"""Identical to [`Qwen3Config`] except for three fields, one default, and stricter checks.

    Args:
        qk_norm (`bool`, *optional*, defaults to `True`):
            RMS norms on queries and keys: `True` for Qwen3-style checkpoints, `False` for the styles of Qwen2.5
            (whose `attention_bias` is `True`), Llama and Mistral (where it is `False`).
        mask_token_id (`int`, *optional*):
            Row of the mask token M. `None` means 151665 where the vocabulary is large enough to have that row (the
            convention of the published checkpoints), and "no mask token" otherwise.
        masks_trained (`bool`, *optional*, defaults to `True`):
            `False`: a copy of an AR model that has learnt nothing of masks yet. Training sets it.
        head_dim (`int`, *optional*, defaults to `hidden_size // num_attention_heads`):
            Width of an attention head.

    Raises:
        ValueError: for a mask token outside the vocabulary or equal to the end or padding token; for attention other
            than full (physical and logical distance differ under reordering: a sliding window has no meaning here);
            for two different RoPE bases; and, when read from a `config.json`, for one that states no RoPE base, is of
            another model type, or has a later format.
    """

    model_type = "wedlm"
    keys_to_ignore_at_inference = [CACHE, "token_nll", "correct"]

    head_dim: int | None = None  # type: ignore[assignment]  # an `int` from __post_init__ on, as in the parent
    qk_norm: bool = True
    mask_token_id: int | None = None
    masks_trained: bool = True

    # Set where the package is installed (see hub.py); absent in the files that travel with a checkpoint.
    _hub_bundle: ClassVar[Callable[[str | PathLike[str]], dict[str, str]] | None] = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.mask_token_id is None and self.vocab_size > PUBLISHED_MASK_TOKEN_ID:
            self.mask_token_id = PUBLISHED_MASK_TOKEN_ID
        if not self.qk_norm:
            plan = {name: how for name, how in self.base_model_tp_plan.items() if not name.endswith("_norm")}
            self.base_model_tp_plan = plan  # type: ignore[misc]  # this config's alone
        base = rope_base({**kwargs, "rope_parameters": self.rope_parameters})
        super().__post_init__(**kwargs if base is None else {**kwargs, "rope_theta": base})
        self._check()

    def _check(self) -> None:
        if any(layer_type != "full_attention" for layer_type in self.layer_types or []):
            raise ValueError(
                f"WeDLM needs full attention in every layer, got layer_types={self.layer_types} "
                f"(use_sliding_window={self.use_sliding_window}, sliding_window={self.sliding_window})."
            )
        check_mask_token_id(self.mask_token_id, self.vocab_size, self.eos_token_id, self.pad_token_id)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Like the parent's, but refuses another model's dictionary, and assumes no RoPE base where none is stated."""
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise not_wedlm("This", f"model of type {model_type!r}")
        check_format(config_dict)
        if rope_base(config_dict) is None:
            raise ValueError(
                "The WeDLM config states no RoPE base: expected `rope_theta`, at the top level or in "
                f"`rope_parameters`, got keys {sorted(config_dict)}."
            )
        result = super().from_dict(config_dict, **kwargs)
        (result[0] if isinstance(result, tuple) else result)._check()  # `kwargs` may have replaced what was checked
        return result

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Saves the config; that of a trained model, of an installed class, also writes the `trust_remote_code` files
        beside it (see hub.py)."""
        self._check()
        if (write_bundle := type(self)._hub_bundle) is not None:
            vars(self).pop("auto_map", None)
            if self.masks_trained or push_to_hub:
                self.auto_map = write_bundle(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def _get_files_timestamps(self, working_dir: str | PathLike[str]) -> dict[str, float]:
        # `save_pretrained` uploads what has changed since it asked for these, and the bundle is written before that.
        timestamps = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in timestamps.items() if not name.endswith("_wedlm.py")}


def not_wedlm(name: str, kind: str) -> ValueError:
    """For a stock model where a WeDLM checkpoint is expected: the error that says what helps."""
    adapted = "pass its mask adapter (`--adapter`, in Python `load_mask_adapter`), train one (`wedlm adapt MODEL OUT`)"
    converted = "make a WeDLM checkpoint of it (`wedlm convert MODEL OUT`) and train that"
    return ValueError(f"{name} is a {kind}, not a WeDLM checkpoint: {adapted}, or {converted}.")


def rope_base(config_dict: dict[str, Any]) -> float | None:
    """The RoPE base that a config states at top level (published checkpoints), in `rope_parameters` or `rope_scaling`;
    `None` where none is. Raises `ValueError` for two: the parent would take one of them, or neither, in silence."""
    places = {name: config_dict.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    places = {"rope_theta": config_dict, **places}
    stated = {name: place["rope_theta"] for name, place in places.items() if place.get("rope_theta") is not None}
    if len(set(stated.values())) > 1:
        raise ValueError(f"The WeDLM config states different RoPE bases: {stated}.")
    return next(iter(stated.values()), None)
