"""Causal language models as people have them: a folder, a Hub id or a GGUF file, each in its own class."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from .gguf import complete_tokenizer, end_token_ids, load_gguf_config_dict, load_gguf_model, parsed_once
from .loading import FASTEST, load_config_dict, load_model, load_tokenizer, set_format
from .packed import PACKED


def check_source(source: str, revision: str | None = None, gguf_file: str | None = None) -> None:
    """Looks for a model without reading its weights. Raises as [`load_source`]."""
    folder, gguf_file, _ = split_source(source, gguf_file)
    if gguf_file is None:
        load_config_dict(folder, revision=revision)
    else:
        load_gguf_config_dict(folder, gguf_file, revision)


@parsed_once()
def load_source(
    source: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
) -> Any:
    """A causal language model in the class that transformers has for it, in evaluation mode.

    Args:
        source: folder or Hub id, or the path of a GGUF file.
        revision: branch, tag or commit of a Hub id.
        gguf_file: name of a GGUF file in that folder or Hub id.
        dtype: of the weights; `"auto"` is the checkpoint's own, float32 for a GGUF file; `"packed"` and
            `"fastest"` as [`load_model`] takes them, for inference alone.
        device: where the model is put.

    Raises:
        ImportError: for a GGUF file without the package `gguf`.
        OSError, ValueError: for what is missing, damaged or not read whole by transformers.
    """
    folder, gguf_file, name = split_source(source, gguf_file)
    is_format = dtype in ("auto", FASTEST, PACKED)
    if gguf_file is None:
        dtype = dtype if is_format or isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        model = load_model(folder, revision=revision, dtype=dtype, device=device, model_class=AutoModelForCausalLM)
    else:
        load_gguf_config_dict(folder, gguf_file, revision)
        model, _ = load_gguf_model(folder, gguf_file, revision)
        # Its weights are dequantized: they can be cast, packed and saved.
        model.is_quantized, model.hf_quantizer = False, None
        vars(model.config).pop("quantization_config", None)
        if not is_format:
            model.to(dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
        set_format(model, dtype, device)
        tokenizer = read_source_tokenizer(folder, revision, gguf_file)
        model.generation_config.eos_token_id = end_token_ids(tokenizer)
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.name_or_path = name  # an adapter of it states this
    return model.eval()


@parsed_once()
def read_source_tokenizer(
    source: str | os.PathLike[str], revision: str | None = None, gguf_file: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint that [`load_source`] loads.

    Raises:
        OSError, ValueError: as [`load_source`].
    """
    folder, gguf_file, _ = split_source(source, gguf_file)
    if gguf_file is None:
        return load_tokenizer(folder, revision=revision)
    tokenizer = load_tokenizer(folder, revision=revision, gguf_file=gguf_file)
    complete_tokenizer(tokenizer)
    return tokenizer


def split_source(source: str | os.PathLike[str], gguf_file: str | None) -> tuple[str, str | None, str]:
    """Folder or Hub id, the GGUF file in it if it is one, and the source's name for messages."""
    path = Path(source)
    if gguf_file is None and path.suffix.lower() == ".gguf" and not path.is_dir():
        return str(path.absolute().parent if path.exists() else path.parent), path.name, str(path)
    files = sorted(file.name for file in path.glob("*.gguf")) if path.is_dir() else []
    if gguf_file is None and files and not (path / "config.json").exists():
        raise FileNotFoundError(f"{str(source)!r} has no config.json: pass a GGUF file of it, {', '.join(files)}.")
    name = os.fspath(source)
    return name, gguf_file, name if gguf_file is None else os.path.join(name, gguf_file)
