"""Causal language models as people have them: a folder, a Hub id or a GGUF file, each in its own class.

transformers reads GGUF files; one of which it would ignore a part without saying so is refused.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from .loading import FASTEST, find_checkpoint, load_config_dict, load_model, load_tokenizer, set_format
from .packed import PACKED, forget_gguf

# The tensors that transformers reads from GGUF files of the families we take. It ignores all others.
_TENSOR = re.compile(
    r"(token_embd|output|output_norm)\.weight"
    r"|blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down)|(attn|ffn)_norm)\.weight"
)
_TENSORS_OF = {
    "qwen2": re.compile(r"blk\.\d+\.attn_(q|k|v)\.bias"),
    "qwen3": re.compile(r"blk\.\d+\.attn_(q|k)_norm\.weight"),
}
_PADDING = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")


@contextmanager
def parsed_once() -> Iterator[None]:
    """Within it a GGUF file is parsed once. transformers does so for config, tokenizer and weights, seconds each time,
    and lists the names of tensors anew for every module."""
    gguf: Any = import_module("gguf") if find_spec("gguf") is not None else None
    found = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map") if gguf is not None}
    for name, read in found.items():
        setattr(gguf, name, read if hasattr(read, "cache_info") else lru_cache(read))  # an outer context has its own
    try:
        yield
    finally:
        for name, read in found.items():
            setattr(gguf, name, read)


@parsed_once()
def load_source(
    source: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
) -> Any:
    """A causal language model in the class that transformers has for it, in evaluation mode, of a folder or Hub id, a
    GGUF file in it, or the path of one. The dtype `"auto"` is the checkpoint's own, float32 for a GGUF file;
    `"packed"` and `"fastest"`, as [`load_model`] takes them, are for inference alone. Raises `ImportError` for a GGUF
    file without the package `gguf`, and `OSError` or `ValueError` for what is missing, damaged or not read whole by
    transformers."""
    folder, gguf_file, name = split_source(source, gguf_file)
    if isinstance(dtype, str) and dtype not in ("auto", FASTEST, PACKED):
        dtype = getattr(torch, dtype)
    if gguf_file is None:
        model = load_model(folder, revision=revision, dtype=dtype, device=device, model_class=AutoModelForCausalLM)
    else:
        read_config_dict(folder, revision, gguf_file)
        model, _ = load_gguf_model(folder, gguf_file, revision)
        forget_gguf(model)
        if isinstance(dtype, torch.dtype):
            model.to(dtype)
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
    """The tokenizer of a checkpoint that [`load_source`] loads; raises as it does. That of a GGUF file gets a padding
    token that does not end answers, where its vocabulary has one."""
    folder, gguf_file, _ = split_source(source, gguf_file)
    if gguf_file is None:
        return load_tokenizer(folder, revision=revision)
    tokenizer = load_tokenizer(folder, revision=revision, gguf_file=gguf_file)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        vocabulary = tokenizer.get_vocab()
        candidates = [token for token in _PADDING if token in vocabulary and token != tokenizer.eos_token]
        tokenizer.pad_token = (candidates or [tokenizer.eos_token])[0]
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


def read_config_dict(
    source: str | os.PathLike[str], revision: str | None = None, gguf_file: str | None = None
) -> dict[str, Any]:
    """The config of a model that [`load_source`] loads; raises as it does. Weights are not read, and of a GGUF file it
    is known afterwards that transformers reads all that it holds."""
    folder, gguf_file, _ = split_source(source, gguf_file)
    if gguf_file is None:
        return load_config_dict(folder, revision=revision)
    if find_spec("gguf") is None:
        raise ImportError("Reading GGUF files needs the package `gguf`: pip install '.[gguf]' in the clone.")
    options = find_checkpoint(folder, revision=revision, file=gguf_file)
    where = {key: value for key, value in options.items() if key != "trust_remote_code"}
    _check_gguf(str(cached_file(folder, gguf_file, **where)))
    with _reading_gguf(folder, gguf_file):
        config_dict: dict[str, Any] = PreTrainedConfig.get_config_dict(folder, gguf_file=gguf_file, **options)[0]
    config_dict.pop("quantization_config", None)  # the weights are dequantized
    return config_dict


def load_gguf_model(source: str, gguf_file: str, revision: str | None) -> tuple[Any, dict[str, Any]]:
    """The stock model of a GGUF file, its weights dequantized to float32, and what loading found."""
    options = find_checkpoint(source, revision=revision, file=gguf_file)
    with _reading_gguf(source, gguf_file):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf_file, dtype=torch.float32, output_loading_info=True, **options
        )
    model, info = loaded
    return model, info


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's end token, and the one with which its chat template ends an answer."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template is not None:
        answer = "\N{WHITE STAR}"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        _, _, rest = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(answer)
        first = tokenizer.encode(rest.lstrip(), add_special_tokens=False)[:1]
        special = [row for row, token in tokenizer.added_tokens_decoder.items() if token.special]
        ids += [token for token in first if token in special and token not in ids]
    return ids


@contextmanager
def _reading_gguf(source: str, gguf_file: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ValueError, KeyError, NotImplementedError …: there is no common class
        raise OSError(f"transformers cannot read the GGUF file {gguf_file!r} of {source!r}: {error}") from error


def _check_gguf(path: str) -> None:
    """Raises unless transformers would read all that the file holds."""
    try:
        reader: Any = import_module("gguf").GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
    except Exception as error:  # whatever the reading of a damaged file raises
        raise OSError(f"{path!r} is not a GGUF file, or damaged or truncated: {error}") from error
    known = [_TENSOR] + ([_TENSORS_OF[architecture]] if architecture in _TENSORS_OF else [])
    names = [tensor.name for tensor in reader.tensors]
    left_out = [name for name in names if not any(pattern.fullmatch(name) for pattern in known)]
    for name in ("rope.scaling.type", "attention.sliding_window", "expert_count", "final_logit_softcapping"):
        field = reader.fields.get(f"{architecture}.{name}")
        if field is not None and field.contents() not in (0, "none"):
            left_out.append(f"{architecture}.{name}={field.contents()}")
    if left_out:
        shown = ", ".join(left_out[:3]) + ", …" * (len(left_out) > 3)
        shown += ": its RoPE scaling" if left_out == ["rope_freqs.weight"] else ""
        instead = "Convert the safetensors checkpoint of this model instead."
        raise ValueError(f"{path!r} holds {shown}, which transformers does not read from GGUF files. {instead}")
