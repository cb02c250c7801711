"""Which AR models WeDLM's network can take over weight by weight, and why it cannot take others.

Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 differ in two things alone: biases on queries, keys and values, and norms on
queries and keys.
"""

from typing import Any

from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from .configuration_wedlm import WeDLMConfig

FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config,
}  # fmt: skip
FAMILY_NAMES = "Llama, Mistral, Qwen2, Qwen2.5 and Qwen3"

# Config fields of parts that WeDLM's network does not have, with their names. Absent, None, False and 0: no such part.
_FOREIGN_PARTS = {
    "attn_logit_softcapping": "a soft cap on attention scores",
    "final_logit_softcapping": "a soft cap on logits",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "mlp_bias": "biases in the feed-forward layers",
    "use_qk_norm": "norms on queries and keys",
    "quantization_config": "quantized weights",
}
# A rotation that changes when the text grows does not fit the keys that are cached already.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What does not pass from a source's config to ours: it names the source's classes, or means nothing here.
_DROPPED = (
    "model_type", "architectures", "auto_map", "transformers_version", "quantization_config", "mlp_bias",
    "pretraining_tp", "_name_or_path", "_model_name_or_path", "unk_token_id",
)  # fmt: skip


def read_family(config_dict: dict[str, Any], source: str) -> PreTrainedConfig:
    """The stock config of a checkpoint, called `source`, that can become a WeDLM one. Raises `ValueError` for one of
    another family, or with parts that WeDLM's network does not have."""
    model_type = config_dict.get("model_type")
    if model_type not in FAMILIES:
        parts = _foreign_parts(config_dict)
        having = f" with {', '.join(parts)}" if parts else ""
        raise ValueError(
            f"Only checkpoints of the model types {', '.join(map(repr, FAMILIES))} ({FAMILY_NAMES}) can be converted, "
            f"got {model_type!r}{having} in {source!r}."
        )
    config = FAMILIES[model_type].from_dict(config_dict)
    if parts := _foreign_parts(config.to_dict()):  # what the family's defaults say counts too
        raise ValueError(f"{source!r} cannot be converted: WeDLM has no place for {', '.join(parts)}.")
    return config


def wedlm_config(source_config: PreTrainedConfig, mask_token_id: int) -> WeDLMConfig:
    """The config of the same network as a WeDLM model. `vocab_size` stays the source's, so that its weights fit."""
    settings: dict[str, Any] = source_config.to_dict()
    for key in _DROPPED:
        settings.pop(key, None)
    settings |= {
        "qk_norm": source_config.model_type == "qwen3",
        "attention_bias": source_config.model_type == "qwen2",
        "mask_token_id": mask_token_id,
        "vocab_size": max(source_config.vocab_size, mask_token_id + 1),
    }
    config = WeDLMConfig(**settings)
    config.vocab_size = source_config.vocab_size
    return config


def _foreign_parts(config_dict: dict[str, Any]) -> list[str]:
    """Parts of this config that WeDLM's network does not have, each with the field that names it."""
    found = {field: value for field in _FOREIGN_PARTS if (value := config_dict.get(field))}
    parts = [f"{_FOREIGN_PARTS[field]} ({field}={value})" for field, value in found.items()]
    if config_dict.get("attention_bias") and config_dict.get("model_type") != "qwen2":  # Qwen2's code ignores it
        parts.append("a bias on the attention's output projection `o_proj` (attention_bias=True)")
    window, kinds = config_dict.get("sliding_window"), config_dict.get("layer_types")
    if window is not None or any(kind != "full_attention" for kind in kinds or ()):
        parts.append(f"attention that is not full in every layer (sliding_window={window}, layer_types={kinds})")
    rope = {**(config_dict.get("rope_scaling") or {}), **(config_dict.get("rope_parameters") or {})}
    share = rope.get("partial_rotary_factor", config_dict.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        parts.append(f"partial rotary embeddings (partial_rotary_factor={share})")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        parts.append(f"rotary embeddings of the type {rope_type!r} (only {', '.join(_ROPE_TYPES)})")
    return parts
