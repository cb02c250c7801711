"""Conversion: a WeDLM checkpoint from a Qwen2, Qwen2.5 or Qwen3 one.

The network is the same, so every weight is copied as it is; what is added is a mask token and its row.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AddedToken, PreTrainedTokenizerBase, Qwen2Config, Qwen3Config

from ..generation.settings_wedlm import check_mask_token_id
from .configuration_wedlm import WeDLMConfig
from .loading import load_config_dict, load_model, load_tokenizer
from .modeling_wedlm import WeDLMForCausalLM

MASK_TOKEN = "<|mask|>"

_SOURCES: dict[str, type[Qwen2Config] | type[Qwen3Config]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}


@dataclass(frozen=True)
class Conversion:
    """What [`convert`] made, and its report.

    Attributes:
        model: in evaluation mode, in the dtype of the source.
        tokenizer: the source's, with a mask token.
        mask_token_id: the row of the mask token.
        mask_row: where that row came from: `"existing"` (the tokenizer had the token; the row is the source's),
            `"unused"` (a row without a token) or `"added"` (the embeddings grew). The last two start from the mean.
        copied: number of weight tensors copied.
        missing_keys, unexpected_keys: weights the source lacks, and weights of it that have no place, as loading found
            them; a source with any is refused, so both are empty.
    """

    model: WeDLMForCausalLM
    tokenizer: PreTrainedTokenizerBase
    mask_token_id: int
    mask_row: str
    copied: int
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.copied} weights copied, {len(self.missing_keys)} missing, {len(self.unexpected_keys)} unexpected; "
            f"mask token {self.tokenizer.mask_token!r} is id {self.mask_token_id} ({self.mask_row} row)"
        )


def convert(
    source: str | os.PathLike[str],
    output_dir: str | os.PathLike[str] | None = None,
    *,
    mask_token: str | None = None,
    revision: str | None = None,
) -> Conversion:
    """Makes a WeDLM checkpoint: the weights and the tokenizer of `source`, and a mask token.

    All logits are those of the source, except at the mask token's own row.

    Args:
        source: folder or Hub id of a Qwen2, Qwen2.5 or Qwen3 checkpoint with safetensors weights and a tokenizer.
        output_dir: where to write it, whole or not at all; by default nothing is written.
        mask_token: text of the mask token; by default the tokenizer's own, else `<|mask|>`. It may name a special
            token that the tokenizer already has.
        revision: branch, tag or commit of a Hub id.

    Raises:
        FileNotFoundError: for a source without config.json, tokenizer or weights.
        FileExistsError: for an `output_dir` that is not empty.
        OSError: for weights that are damaged.
        ValueError: for a checkpoint of another model type or with parts that WeDLM has not (sliding-window attention,
            a bias on the output projection, quantized weights), for weights that do not fit their config, and for a
            mask token that cannot be one.
    """
    target = None if output_dir is None else Path(output_dir).absolute()
    if target is not None and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"The output folder must be new or empty, got {str(output_dir)!r}.")
    source_config = _read_config(source, revision)
    tokenizer = load_tokenizer(source, revision=revision)
    used = sorted(set(tokenizer.get_vocab().values()))
    mask_token_id = _add_mask_token(tokenizer, mask_token)
    model, info = _load_weights(source, revision, source_config, mask_token_id)
    check_mask_token_id(
        mask_token_id, mask_token_id + 1, model.generation_config.eos_token_id, model.generation_config.pad_token_id
    )
    mask_row = _prepare_mask_row(model, mask_token_id, used)
    if target is not None:
        with _written_whole(target) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            reloaded = load_tokenizer(folder)
            if reloaded.mask_token_id != mask_token_id or reloaded.get_vocab() != tokenizer.get_vocab():
                raise ValueError(f"The tokenizer of {str(source)!r} does not survive being saved and loaded again.")
        model.name_or_path = model.config.name_or_path = str(target)  # an adapter of it is loaded onto this
    copied = len(model.state_dict()) - len(model.all_tied_weights_keys)
    missing, unexpected = tuple(info["missing_keys"]), tuple(info["unexpected_keys"])
    return Conversion(model, tokenizer, mask_token_id, mask_row, copied, missing, unexpected)


@contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place at the end, or is removed if anything goes wrong."""
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if target.exists():
            target.rmdir()  # it is empty, and some systems refuse to replace a folder
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_config(source: str | os.PathLike[str], revision: str | None) -> Qwen2Config | Qwen3Config:
    config_dict = load_config_dict(source, revision=revision)
    model_type = config_dict.get("model_type")
    if model_type not in _SOURCES:
        raise ValueError(
            f"Only checkpoints of the model types {', '.join(map(repr, _SOURCES))} (Qwen2, Qwen2.5, Qwen3) can be "
            f"converted, got {model_type!r} in {str(source)!r}."
        )
    if config_dict.get("quantization_config") is not None:
        raise ValueError(
            f"Quantized checkpoints cannot be converted, got {str(source)!r} "
            f"(quantization_config={config_dict['quantization_config']})."
        )
    if model_type == "qwen3" and config_dict.get("attention_bias"):
        raise ValueError(
            f"{str(source)!r} has attention_bias=True: a Qwen3 model then has a bias on `o_proj`, and WeDLM has none."
        )
    return _SOURCES[model_type].from_dict(config_dict)


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


def _load_weights(
    source: str | os.PathLike[str],
    revision: str | None,
    source_config: Qwen2Config | Qwen3Config,
    mask_token_id: int,
) -> tuple[WeDLMForCausalLM, dict[str, Any]]:
    """The source's weights in our model, with the embeddings in the source's size, and what loading found."""
    settings: dict[str, Any] = source_config.to_dict()
    for key in ("model_type", "architectures", "auto_map", "transformers_version"):
        settings.pop(key, None)
    is_qwen2 = source_config.model_type == "qwen2"
    config = WeDLMConfig(
        **settings
        | {
            "qk_norm": not is_qwen2,
            "attention_bias": is_qwen2,
            "mask_token_id": mask_token_id,
            "vocab_size": max(source_config.vocab_size, mask_token_id + 1),
        }
    )
    config.vocab_size = source_config.vocab_size
    model, info = load_model(source, config=config, revision=revision, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise ValueError(
            f"The weights of {str(source)!r} do not fit its config: missing {sorted(info['missing_keys'])}, "
            f"unexpected {sorted(info['unexpected_keys'])}."
        )
    return model, info


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
