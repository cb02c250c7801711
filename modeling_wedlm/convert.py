"""Conversion: a WeDLM checkpoint from a Llama, Mistral, Qwen2, Qwen2.5 or Qwen3 one.

These families differ in two things alone: biases on queries, keys and values, and norms on queries and keys. So the
network is the same, and every weight is copied as it is; what is added is a mask token and its row.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AddedToken, PreTrainedConfig, PreTrainedTokenizerBase

from ..checkpoints.files import check_new_folder, folder_written_whole
from ..checkpoints.find import fetch_card, reading
from ..checkpoints.gguf import end_token_ids, load_gguf_model, split_source
from ..checkpoints.loading import load_config_dict, load_model, load_tokenizer
from ..generation.settings import check_mask_token_id
from .configuration_wedlm import WeDLMConfig, not_wedlm
from .modeling_wedlm import WeDLMForCausalLM

MASK_TOKEN = "<|mask|>"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

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


@dataclass(frozen=True)
class Conversion:
    """What [`convert`] made, and its report. The mask's row is `"existing"` (the tokenizer had the token; the row is
    the source's), `"unused"` (a row without a token) or `"added"` (the embeddings grew); the last two start from the
    mean."""

    model: WeDLMForCausalLM  # in evaluation mode, in the dtype of the source; float32 from a GGUF file
    tokenizer: PreTrainedTokenizerBase  # the source's, with a mask token
    mask_token_id: int
    mask_row: str
    copied: int  # weight tensors: all that the source has

    def __str__(self) -> str:
        mask = f"mask token {self.tokenizer.mask_token!r} is id {self.mask_token_id} ({self.mask_row} row)"
        return f"{self.copied} weights copied; {mask}"

    def record(self) -> dict[str, Any]:
        """The report as values that JSON has."""
        names = ("copied", "mask_token_id", "mask_row")
        return {name: getattr(self, name) for name in names} | {"mask_token": self.tokenizer.mask_token}


def convert(
    source: str | os.PathLike[str],
    output_dir: str | os.PathLike[str] | None = None,
    *,
    mask_token: str | None = None,
    revision: str | None = None,
    gguf_file: str | None = None,
) -> Conversion:
    """Makes a WeDLM checkpoint: the weights and the tokenizer of `source`, and a mask token.

    All logits are those of the source, except at the mask token's own row.

    Args:
        source: folder or Hub id of a Llama, Mistral, Qwen2, Qwen2.5 or Qwen3 checkpoint with safetensors weights and
            a tokenizer; or the path of a GGUF file.
        output_dir: where to write it, whole or not at all; by default nothing is written.
        mask_token: text of the mask token; by default the tokenizer's own, else `<|mask|>`. It may name a special
            token that the tokenizer already has.
        revision: branch, tag or commit of a Hub id.
        gguf_file: name of a GGUF file in that folder or Hub id.

    Raises:
        FileExistsError: for an `output_dir` that is not empty.
        ImportError: for a GGUF file without the package `gguf`.
        OSError: for a source that lacks a part or is damaged, and for a disk without room for the weights.
        ValueError: for a checkpoint of another model type or with parts that WeDLM does not have (see `read_family`),
            for weights that do not fit their config, and for a mask token that cannot be one.
    """
    target = None if output_dir is None else Path(output_dir).absolute()
    if target is not None:
        check_new_folder(target)
    source_config = read_source_config(source, revision, gguf_file)
    if isinstance(source_config, WeDLMConfig):
        raise ValueError(f"{os.fspath(source)!r} is a WeDLM checkpoint already: there is nothing to convert.")
    tokenizer = load_tokenizer(source, revision=revision, gguf_file=gguf_file)
    folder, gguf_file, _ = split_source(source, gguf_file)
    fetch_card(folder, revision=revision)  # its licence is the copy's
    used = sorted(set(tokenizer.get_vocab().values()))
    mask_token_id = _add_mask_token(tokenizer, mask_token)
    with reading(f"The config of {os.fspath(source)!r}"):
        config = wedlm_config(source_config, mask_token_id)
    model = _load_weights(folder, revision, gguf_file, config)
    if gguf_file is not None:
        model.generation_config.eos_token_id = end_token_ids(tokenizer)
        model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    check_mask_token_id(
        mask_token_id, mask_token_id + 1, model.generation_config.eos_token_id, model.generation_config.pad_token_id
    )
    mask_row = _prepare_mask_row(model, mask_token_id, used)
    if target is not None:
        write_checkpoint(target, model, tokenizer, str(source))
        model.name_or_path = model.config.name_or_path = str(target)  # an adapter of it is loaded onto this
    copied = len(model.state_dict()) - len(model.all_tied_weights_keys)
    return Conversion(model, tokenizer, mask_token_id, mask_row, copied)


def read_source_config(
    source: str | os.PathLike[str], revision: str | None = None, gguf_file: str | None = None
) -> PreTrainedConfig:
    """The config of a checkpoint that is a WeDLM one, or that [`convert`] can make one of; its weights are not read.
    Raises as [`convert`]."""
    name = split_source(source, gguf_file)[2]
    config_dict = load_config_dict(source, revision=revision, gguf_file=gguf_file)
    with reading(f"The config of {name!r}"):
        if config_dict.get("model_type") == WeDLMConfig.model_type:
            return WeDLMConfig.from_dict(config_dict)
        return read_family(config_dict, name)


def require_wedlm(source: str | os.PathLike[str]) -> None:
    """Raises `ValueError` for the checkpoint of a model of another type; else as [`load_config_dict`]."""
    if split_source(source, None)[1] is not None and os.path.exists(source):
        raise not_wedlm(repr(os.fspath(source)), "GGUF file")
    kind = load_config_dict(source).get("model_type", WeDLMConfig.model_type)
    if kind != WeDLMConfig.model_type:
        raise not_wedlm(repr(os.fspath(source)), f"model of type {kind!r}")


def read_family(config_dict: dict[str, Any], source: str) -> PreTrainedConfig:
    """The stock config of a checkpoint, called `source`, that can become a WeDLM one. Raises `ValueError` for one of
    another family, or with parts that WeDLM's network does not have."""
    model_type = config_dict.get("model_type")
    if model_type not in FAMILIES:
        parts = _foreign_parts(config_dict)
        having = f" with {', '.join(parts)}" if parts else ""
        raise ValueError(
            f"Only checkpoints of the model types {', '.join(map(repr, FAMILIES))} (Llama, Mistral, Qwen2, Qwen2.5 "
            f"and Qwen3) can be converted, got {model_type!r}{having} in {source!r}."
        )
    config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(config_dict)
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
        "masks_trained": False,
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


def write_checkpoint(target: Path, model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Writes the checkpoint, whole or not at all. Raises `ValueError` for a tokenizer that is not loaded as it was."""
    with folder_written_whole(target) as unfinished:
        tokenizer.save_pretrained(unfinished)  # first: with a chat template, the model card's example is a chat
        model.save_pretrained(unfinished)
        reloaded = load_tokenizer(unfinished)
        if reloaded.mask_token_id != tokenizer.mask_token_id or reloaded.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"The tokenizer of {source!r} does not survive being saved and loaded again.")


def _add_mask_token(tokenizer: PreTrainedTokenizerBase, mask_token: str | None) -> int:
    """Gives the tokenizer the mask token, if it has none, and returns the id."""
    text = mask_token or tokenizer.mask_token or MASK_TOKEN
    vocabulary = tokenizer.get_vocab()
    if text in vocabulary and text not in tokenizer.get_added_vocab():
        raise ValueError(f"`mask_token` must be a special token or a new one, got the ordinary token {text!r}.")
    tokenizer.add_special_tokens({"mask_token": AddedToken(text, special=True, normalized=False)})
    mask_token_id = tokenizer.get_vocab()[text]
    if tokenizer.mask_token_id != mask_token_id or tokenizer.encode(text, add_special_tokens=False) != [mask_token_id]:
        raise ValueError(f"The tokenizer does not encode the mask token {text!r} as its one id {mask_token_id}.")
    check_mask_token_id(mask_token_id, mask_token_id + 1, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return mask_token_id


def _load_weights(source: str, revision: str | None, gguf_file: str | None, config: WeDLMConfig) -> WeDLMForCausalLM:
    """The source's weights in our model, with the embeddings in the source's size."""
    if gguf_file is None:
        options: Any = {"model_class": WeDLMForCausalLM, "config": config, "output_loading_info": True}
        model, info = load_model(source, revision=revision, **options)
    else:
        stock, info = load_gguf_model(source, gguf_file, revision)
        model = WeDLMForCausalLM.from_pretrained(None, config=config, state_dict=stock.state_dict())
    # Older Llama checkpoints store what RoPE computes from its base.
    unexpected = sorted(key for key in info["unexpected_keys"] if not key.endswith("rotary_emb.inv_freq"))
    if (missing := sorted(info["missing_keys"])) or unexpected:
        fault = f"missing {missing}, unexpected {unexpected}"
        raise ValueError(f"The weights of {source!r} do not fit its config: {fault}.")
    return model


@torch.no_grad()
def _prepare_mask_row(model: WeDLMForCausalLM, mask_token_id: int, used: list[int]) -> str:
    """Starts the mask's row from the mean of the `used` ones, in the embedding and in the head. Returns its origin."""
    old_size = model.config.vocab_size
    if mask_token_id in used and mask_token_id < old_size:
        return "existing"
    rows = torch.tensor([row for row in used if row < old_size], device=model.device)
    if mask_token_id >= old_size:
        model.resize_token_embeddings(mask_token_id + 1, mean_resizing=False)
    new_rows = slice(min(old_size, mask_token_id), mask_token_id + 1)
    for weight in {model.model.embed_tokens.weight, model.lm_head.weight}:  # one matrix where they are tied
        weight[new_rows] = weight[rows].mean(dim=0, dtype=torch.float32).to(weight.dtype)
    return "unused" if mask_token_id < old_size else "added"
