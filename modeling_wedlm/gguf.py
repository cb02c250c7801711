"""Reading GGUF files by transformers, and refusing those of which it would ignore a part without saying so."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from .loading import find_checkpoint

# The tensors that transformers reads of the families we take. It ignores all others.
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


def load_gguf_config_dict(source: str, gguf_file: str, revision: str | None) -> dict[str, Any]:
    """The stock config of a GGUF file, once it is known that transformers reads all that the file holds.

    Raises:
        ImportError: without the package `gguf`.
        OSError: for a file that is not there, damaged, truncated or not GGUF, or of a kind transformers cannot read.
        ValueError: for tensors or settings that transformers ignores, so that it would make another model of them.
    """
    if find_spec("gguf") is None:
        raise ImportError("Reading GGUF files needs the package `gguf`: pip install 'wedlm-hf[gguf]'.")
    options = find_checkpoint(source, revision=revision, file=gguf_file)
    where = {key: value for key, value in options.items() if key != "trust_remote_code"}
    _check(str(cached_file(source, gguf_file, **where)))
    try:
        config_dict: dict[str, Any] = PreTrainedConfig.get_config_dict(source, gguf_file=gguf_file, **options)[0]
    except Exception as error:  # ValueError, KeyError, NotImplementedError …: there is no common class
        raise OSError(f"transformers cannot read the GGUF file {gguf_file!r} of {source!r}: {error}") from error
    config_dict.pop("quantization_config", None)  # the weights are dequantized
    return config_dict


def _check(path: str) -> None:
    """Raises unless transformers would read all that the file holds."""
    from gguf import GGUFReader

    try:
        reader: Any = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
    except Exception as error:  # whatever the reading of a damaged file raises
        raise OSError(f"{path!r} is not a GGUF file, or damaged or truncated: {error}") from error
    own = _TENSORS_OF.get(architecture)
    left_out = [
        tensor.name
        for tensor in reader.tensors
        if not _TENSOR.fullmatch(tensor.name) and not (own and own.fullmatch(tensor.name))
    ]
    for name in ("rope.scaling.type", "attention.sliding_window", "expert_count", "final_logit_softcapping"):
        field = reader.fields.get(f"{architecture}.{name}")
        if field is not None and field.contents() not in (0, "none"):
            left_out.append(f"{architecture}.{name}={field.contents()}")
    if left_out:
        hint = (
            ": its RoPE scaling, which transformers" if left_out == ["rope_freqs.weight"] else ", which transformers"
        )
        raise ValueError(
            f"{path!r} holds {', '.join(left_out[:3])}{', …' if len(left_out) > 3 else ''}{hint} does not read from "
            "GGUF files. Convert the safetensors checkpoint of this model instead."
        )


def load_gguf_model(source: str, gguf_file: str, revision: str | None) -> tuple[Any, dict[str, Any]]:
    """The stock model of a GGUF file, its weights dequantized to float32, and what loading found.

    Raises:
        OSError: for a file that transformers cannot read.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=gguf_file,
            dtype=torch.float32,
            output_loading_info=True,
            **find_checkpoint(source, revision=revision, file=gguf_file),
        )
    except Exception as error:  # NotImplementedError, KeyError, ValueError …: there is no common class
        raise OSError(f"transformers cannot read the GGUF file {gguf_file!r} of {source!r}: {error}") from error
    model, info = loaded
    return model, info


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives the tokenizer of a GGUF file a padding token that does not end answers, where its vocabulary has one."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        vocabulary = tokenizer.get_vocab()
        candidates = [token for token in _PADDING if token in vocabulary and token != tokenizer.eos_token]
        tokenizer.pad_token = (candidates or [tokenizer.eos_token])[0]


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
