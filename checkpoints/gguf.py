"""GGUF files, which transformers reads; one of which it would ignore a part without saying so is refused."""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from .find import CONFIG_FILE, find_checkpoint, find_file, is_adapter

# What a file says of the network, and how the names of transformers' settings for it end.
_STATED = {
    "rope.scaling.type": "rope_type", "attention.sliding_window": "sliding_window", "expert_count": "experts",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_ROWS = 256  # of a matrix, dequantized together
_LONGEST = 4096  # array of numbers that is none of the vocabulary
_TOKENS = "tokenizer.ggml.tokens"
_PADDING = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")
# What was made within [`parsed_once`], by folder and options.
_TOKENIZERS: dict[tuple[str, str], PreTrainedTokenizerBase] = {}


@contextmanager
def parsed_once() -> Iterator[None]:
    """Within it a GGUF file is parsed once, and its tokenizer made once. transformers parses it for config, tokenizer
    and weights, seconds each time, and lists the names of tensors anew for every module."""
    if find_spec("gguf") is None:
        yield
        return
    gguf: Any = import_module("gguf")
    if hasattr(gguf.GGUFReader, "cache_info"):  # an outer context has its own
        yield
        return
    headers: Any = import_module("transformers.integrations.gguf.reader")
    instead = [
        (gguf, "GGUFReader", lru_cache(_reader_class(gguf.GGUFReader))),
        (gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),
        (gguf.quants, "_apply_over_grouped_rows", _by_many_rows),
        (headers, "_read_metadata", _reading_once(getattr(headers, "_read_metadata", None))),
    ]
    instead = [each for each in instead if hasattr(*each[:2])]  # two are no part of an interface
    own = [(module, name, getattr(module, name)) for module, name, _ in instead]
    for module, name, value in instead:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in own:
            setattr(module, name, value)
        _TOKENIZERS.clear()


def _reader_class(kind: Any) -> Any:
    """gguf's reader, which passes over the vocabulary: transformers makes the tokenizer by means of its own, and of
    what this one reads it counts the tokens. An array for each of them would take a second."""
    kinds: Any = import_module("gguf").GGUFValueType

    class Reader(kind):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if (tokens := self.fields.get(_TOKENS)) is not None and not tokens.data:
                self.fields[_TOKENS] = tokens._replace(data=[len(tokens.parts) - 1] * int(tokens.parts[-1][0]))

        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if kind == kinds.ARRAY and self.byte_order == "I":  # this machine's order
                held, count = struct.unpack_from("=IQ", self.data, offset)
                if held == kinds.STRING or count > _LONGEST:
                    size, counted = self._end_of(offset + 12, held, count) - offset, np.array([count], np.uint64)
                    return size, [counted], [], [kinds.ARRAY, kinds.UINT64]
            return super()._get_field_parts(offset, kind)

        def _end_of(self, place: int, held: int, count: int) -> int:
            if held != kinds.STRING:
                return place + count * np.dtype(self.gguf_scalar_to_np[kinds(held)]).itemsize
            size, content = struct.Struct("=Q").unpack_from, memoryview(self.data)
            for _ in range(count):
                place += 8 + size(content, place)[0]
            return place

    return Reader


def _reading_once(read: Any) -> Callable[..., Any]:
    """transformers' reading of what a file says of its model, by the file's path and what is asked for."""
    found: dict[tuple[str, tuple[str, ...]], Any] = {}

    def reading(content: Any, path: str, *wanted: Any) -> Any:
        key = path, tuple(*wanted)
        if key not in found:
            found[key] = read(content, path, *wanted)
        metadata, *rest = found[key]
        return dict(metadata), *rest

    return reading


def _by_many_rows(func: Any, arr: np.ndarray, otype: Any, oshape: tuple[int, ...]) -> np.ndarray:
    """gguf's dequantizing of a matrix, by 256 rows in place of 16, in a third of the time."""
    rows, found = arr.reshape(-1, arr.shape[-1]), np.empty(oshape, otype)
    flat = found.reshape(len(rows), -1)
    for first in range(0, len(rows), _ROWS):
        flat[first : first + _ROWS] = func(rows[first : first + _ROWS])
    return found


def split_source(source: str | os.PathLike[str], gguf_file: str | None) -> tuple[str, str | None, str]:
    """Folder or Hub id, the GGUF file in it if it is one, and the source's name for messages."""
    path = Path(source)
    if gguf_file is None and path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.exists() and len(path.parts) == 1:  # else it may be a file of a Hub id
            raise FileNotFoundError(f"There is no GGUF file {str(path)!r}.")
        return str(path.absolute().parent if path.exists() else path.parent), path.name, str(path)
    files = sorted(file.name for file in path.glob("*.gguf")) if source and path.is_dir() else []
    if gguf_file is None and files and not (path / CONFIG_FILE).exists() and not is_adapter(path):
        raise FileNotFoundError(f"{str(source)!r} has no config.json: pass a GGUF file of it, {', '.join(files)}.")
    name = os.fspath(source)
    return name, gguf_file, name if gguf_file is None else os.path.join(name, gguf_file)


def read_gguf_config(folder: str, gguf_file: str, revision: str | None) -> dict[str, Any]:
    """The config of a GGUF file, of which transformers reads all that it holds. Raises `ImportError` without the
    package `gguf`, `OSError` for a damaged file, and `ValueError` for one of which a part would be ignored."""
    if find_spec("gguf") is None:
        raise ImportError("Reading GGUF files needs the package `gguf`: pip install '.[gguf]' in the clone.")
    options = find_checkpoint(folder, revision=revision, file=gguf_file)
    reader = _reader(str(find_file(folder, gguf_file, **options)))
    with _reading_gguf(folder, gguf_file):
        config_dict: dict[str, Any] = PreTrainedConfig.get_config_dict(folder, gguf_file=gguf_file, **options)[0]
        config_dict.pop("quantization_config", None)  # the weights are dequantized
        config = AutoConfig.for_model(**config_dict)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    if left_out := _unread_settings(reader, config) + _unread_tensors(reader, model):
        shown = ", ".join(left_out[:3]) + ", …" * (len(left_out) > 3)
        shown += ": its RoPE scaling" if left_out == ["rope_freqs.weight"] else ""
        instead = "Convert the safetensors checkpoint of this model instead."
        file = os.path.join(folder, gguf_file)
        raise ValueError(f"{file!r} holds {shown}, which transformers does not read from GGUF files. {instead}")
    return config_dict


def load_gguf_model(source: str, gguf_file: str, revision: str | None) -> tuple[Any, dict[str, Any]]:
    """The stock model of a GGUF file, its weights dequantized to float32, and what loading found. Raises `ValueError`
    for a file whose weights are not those of the model that it states."""
    options = find_checkpoint(source, revision=revision, file=gguf_file)
    with _reading_gguf(source, gguf_file):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf_file, dtype=torch.float32, output_loading_info=True, **options
        )
    model, info = loaded
    if faults := [f"{kind} {sorted(info[kind])}" for kind in ("missing_keys", "unexpected_keys") if info[kind]]:
        file = os.path.join(source, gguf_file)
        raise ValueError(f"The weights of {file!r} are not those of {type(model).__name__}: {', '.join(faults)}.")
    return model, info


def read_gguf_tokenizer(folder: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, with a padding token of its own; `options` as transformers takes them. To be
    called within [`parsed_once`]."""
    key = folder, repr(options)
    if key not in _TOKENIZERS:
        _TOKENIZERS[key] = AutoTokenizer.from_pretrained(folder, **options)
        _set_padding(_TOKENIZERS[key])
    return _TOKENIZERS[key]


def _set_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives the tokenizer a padding token that does not end answers, where its vocabulary has one."""
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


@contextmanager
def _reading_gguf(source: str, gguf_file: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ValueError, KeyError, NotImplementedError …: there is no common class
        raise OSError(f"transformers cannot read the GGUF file {gguf_file!r} of {source!r}: {error}") from error


def _reader(path: str) -> Any:
    """The file as gguf reads it. Raises `OSError` for one that is damaged."""
    try:
        reader: Any = import_module("gguf").GGUFReader(path)
        reader.fields["general.architecture"].contents()
    except Exception as error:  # whatever the reading of a damaged file raises
        raise OSError(f"{path!r} is not a GGUF file, or damaged or truncated: {error}") from error
    return reader


def _unread_settings(reader: Any, config: PreTrainedConfig) -> list[str]:
    """What the file says of the network and the config does not."""
    architecture, found = reader.fields["general.architecture"].contents(), []
    stated = list(_leaves(config.to_dict()))
    for name, ending in _STATED.items():
        field = reader.fields.get(f"{architecture}.{name}")
        value = 0 if field is None else field.contents()
        if value not in (0, "none", *(each for key, each in stated if str(key).endswith(ending))):
            found.append(f"{architecture}.{name}={value}")
    return found


def _leaves(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield key, value


def _unread_tensors(reader: Any, model: Any) -> list[str]:
    """The tensors that the model has no place for, where the file has more weights than the model."""
    spare = sum(int(tensor.n_elements) for tensor in reader.tensors) - sum(p.numel() for p in model.parameters())
    if spare <= 0:  # weights that are missing are seen when they are loaded
        return []
    gguf: Any = import_module("gguf")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    kind = kinds[reader.fields["general.architecture"].contents()]
    names = gguf.get_tensor_name_map(kind, model.config.get_text_config().num_hidden_layers)
    known = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in model.state_dict()}
    return [tensor.name for tensor in reader.tensors if tensor.name not in known] or [f"{spare} weights more"]
