"""Loading checkpoints: the one place where this package reads a model, its config and its tokenizer, as people have
them: a folder, a Hub id or a GGUF file.

Every command and library call of ours loads through here, so that all of them

- never run Python files of a checkpoint, unless the caller says `trust_remote_code=True`: transformers would ask on
  standard input, where a piped "y" or the next prompt counts as consent;
- never unpickle: weights are safetensors or GGUF;
- fail at once for a Hub id that is neither cached nor reachable: transformers retries for 23 seconds a file;
- raise `OSError` or `ValueError` that says what is damaged, whatever the reading of it raised.
"""

import os
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from .find import ADAPTER_FILE, CONFIG_FILE, check_json, find_checkpoint, find_file, is_adapter, reading
from .gguf import end_token_ids, load_gguf_model, parsed_once, read_gguf_config, read_gguf_tokenizer, split_source
from .packed import PACKINGS, forget_gguf, pack, use_fastest

FASTEST = "fastest"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


@parsed_once()
def load_model(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    model_class: Any = AutoModelForCausalLM,
    **options: Any,
) -> Any:
    """A causal language model in the class that transformers has for it, in evaluation mode.

    Args:
        source: folder, Hub id, or path of a GGUF file.
        revision: branch, tag or commit of a Hub id.
        gguf_file: name of a GGUF file in that folder or Hub id.
        dtype: `"auto"` is the checkpoint's own, float32 for a GGUF file; `"packed"`, `"8bit"` and `"4bit"` are
            packed layers, on a CPU ([`pack`]); `"fastest"` is what this CPU computes fastest ([`use_fastest`]),
            elsewhere as `"auto"`. These are for inference alone.
        device: where the model is put.
        model_class: whose `from_pretrained` is called, and takes the further options; not for a GGUF file.

    Raises:
        ImportError: where `gguf`, or a package that the checkpoint's format needs, is missing.
        OSError: as [`find_checkpoint`], and for weights that are missing, damaged, or not safetensors.
        ValueError: for a damaged config, weights that do not fit, packed ones elsewhere than on a CPU, and a GGUF file
            that transformers would not read whole.
    """
    if dtype in PACKINGS and torch.device(device).type != "cpu":
        raise ValueError(f"`dtype={dtype!r}` is for CPUs, and the model is to be on {str(device)!r}.")
    folder, gguf_file, name = split_source(source, gguf_file)
    if gguf_file is None:
        stored = "auto" if dtype in (*PACKINGS, FASTEST) else dtype
        loaded = _load_safetensors(folder, revision, stored, model_class, options)
    else:
        loaded = _load_gguf(folder, gguf_file, revision, name)
        if dtype not in ("auto", *PACKINGS, FASTEST):
            loaded.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    set_format(loaded[0] if isinstance(loaded, tuple) else loaded, dtype, device)
    return loaded


def _load_gguf(folder: str, gguf_file: str, revision: str | None, name: str) -> Any:
    """The model of a GGUF file, in float32, with the end and padding tokens of its tokenizer."""
    read_gguf_config(folder, gguf_file, revision)
    model = load_gguf_model(folder, gguf_file, revision)[0]
    forget_gguf(model)
    tokenizer = load_tokenizer(folder, revision=revision, gguf_file=gguf_file)
    model.generation_config.eos_token_id = end_token_ids(tokenizer)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.name_or_path = name  # an adapter of it states this
    return model


def set_format(model: Any, dtype: str | torch.dtype, device: str | torch.device) -> None:
    """Packs the weights where `dtype` asks for it (see [`load_model`]), and puts the model on the device."""
    if dtype in (*PACKINGS, FASTEST) and torch.device(device).type == "cpu":
        use_fastest(model) if dtype == FASTEST else pack(model, PACKINGS[str(dtype)])
    model.to(device)


@parsed_once()
def load_config_dict(
    source: str | os.PathLike[str], *, revision: str | None = None, gguf_file: str | None = None
) -> dict[str, Any]:
    """The config of a model that [`load_model`] loads; raises as it does, and `ValueError` for a file that holds no
    JSON object. Weights are not read, and of a GGUF file it is known afterwards that transformers reads all that it
    holds."""
    folder, gguf_file, name = split_source(source, gguf_file)
    if gguf_file is not None:
        return read_gguf_config(folder, gguf_file, revision)
    found = find_checkpoint(folder, revision=revision)
    check_json(Path(folder), CONFIG_FILE)
    with reading(f"The config of {name!r}"):
        config_dict: dict[str, Any] = PreTrainedConfig.get_config_dict(folder, **found)[0]
    return config_dict


@parsed_once()
def load_tokenizer(
    source: str | os.PathLike[str], *, revision: str | None = None, gguf_file: str | None = None, **options: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that [`load_model`] loads; `options` as `AutoTokenizer.from_pretrained` takes them.
    That of a GGUF file gets a padding token that does not end answers, where its vocabulary has one. Raises as
    [`find_checkpoint`], `OSError` where there is none, and `ValueError` for a damaged one, or with code of its own.
    """
    folder, gguf_file, name = split_source(source, gguf_file)
    subfolder = options.pop("subfolder", "")
    file = gguf_file or (ADAPTER_FILE if is_adapter(source) else CONFIG_FILE)  # training saves one beside a LoRA
    found = find_checkpoint(folder, revision=revision, subfolder=subfolder, file=file)
    if gguf_file is None:  # without these files, transformers makes up an empty tokenizer for some model types
        if not any(find_file(folder, file, is_needed=False, **found) for file in TOKENIZER_FILES):
            raise FileNotFoundError(f"{name!r} has no {' or '.join(TOKENIZER_FILES)}: a tokenizer is missing.")
    else:
        options["gguf_file"] = gguf_file
    check_json(Path(folder, subfolder), "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    with reading(f"The tokenizer of {name!r}"):
        make: Any = AutoTokenizer.from_pretrained if gguf_file is None else read_gguf_tokenizer
        tokenizer: PreTrainedTokenizerBase = make(folder, **found | options)
        tokenizer("?", verbose=False)
    with reading(f"The chat template of {name!r}"):
        _try_chat_template(tokenizer)
    return tokenizer


def find_device(name: str | None, called: str = "The device {!r}") -> torch.device:
    """The device of this name, by default a GPU if there is one. Raises `ValueError` for one that is not there, which
    the message names as `called`."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name).cpu()  # the device `meta` has no data to copy
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{called.format(name)} is not available: {error}") from error
    return torch.device(name)


def _load_safetensors(
    source: str, revision: str | None, dtype: str | torch.dtype, model_class: Any, options: dict[str, Any]
) -> Any:
    """What `model_class.from_pretrained` returns; its token ids are checked."""
    subfolder = options.pop("subfolder", "")
    found = find_checkpoint(source, revision=revision, subfolder=subfolder)
    # transformers takes a generation config that is no JSON for a missing one.
    check_json(Path(source, subfolder), CONFIG_FILE, "generation_config.json", "model.safetensors.index.json")
    with reading(f"The checkpoint {source!r}"):
        _refuse_pickles(source, found)
        found |= {"use_safetensors": True, "adapter_kwargs": {"local_files_only": found["local_files_only"]}}
        loaded = model_class.from_pretrained(source, dtype=dtype, **found | options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(model.generation_config, name)
            ids = value if isinstance(value, list) else [value]
            if any(not isinstance(each, int) or isinstance(each, bool) for each in ids if value is not None):
                wanted = "an integer or a list of integers"
                raise ValueError(f"`{name}` of generation_config.json must be {wanted}, got {value!r}.")
    return loaded


def _refuse_pickles(source: str, found: dict[str, Any]) -> None:
    """Raises `OSError` for a checkpoint whose weights are pickled alone."""
    options = {name: found[name] for name in ("revision", "subfolder", "local_files_only") if name in found}
    if any(find_file(source, name, is_needed=False, **options) for name in SAFETENSORS):
        return
    if pickled := next((name for name in PICKLES if find_file(source, name, is_needed=False, **options)), None):
        raise OSError(
            f"{source!r} has its weights as {pickled} alone: reading that file would run what it holds, so it is "
            "never read. Where you trust it, transformers writes them as safetensors, which are: "
            "`AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)`."
        )


def _try_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render a short chat, so that a damaged template is found here and not after hours of work."""
    if isinstance(tokenizer.chat_template, str):
        chat = [{"role": "user", "content": "?"}]
        try:
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (TemplateSyntaxError, UndefinedError):
            raise
        except TemplateError:
            pass  # the template refuses this chat on purpose, and is not damaged
