"""Loading checkpoints: the one place where this package reads a model, its config and its tokenizer.

Every command and library call of ours loads through here, so that all of them

- never run Python files of a checkpoint, unless the caller says `trust_remote_code=True`: transformers would ask on
  standard input, where a piped "y" or the next prompt counts as consent;
- never unpickle: weights are safetensors;
- fail at once for a Hub id that is neither cached nor reachable: transformers retries for 23 seconds a file;
- raise `OSError` or `ValueError` that says what is damaged, whatever the reading of it raised.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session, is_offline_mode, try_to_load_from_cache
from huggingface_hub.utils import validate_repo_id
from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from .card import CARD_NAME
from .configuration_wedlm import WeDLMConfig, not_wedlm
from .modeling_wedlm import WeDLMForCausalLM
from .packed import PACKED, pack, use_fastest

FASTEST = "fastest"
CONFIG_FILE, ADAPTER_FILE = "config.json", "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def find_checkpoint(
    source: str | os.PathLike[str], *, revision: str | None = None, subfolder: str = "", file: str = CONFIG_FILE
) -> dict[str, Any]:
    """Looks for a checkpoint, without reading it: a folder or Hub id, where `subfolder` holds `file`. Returns the
    keywords that each `from_pretrained` on it takes, with `local_files_only=True` where the Hub cannot be reached.
    Raises `OSError` for a folder that is not there or lacks `file` and a Hub id that is neither cached nor reachable,
    and `ValueError` for a name that cannot be a folder nor a Hub id."""
    name, kind = os.fspath(source), "adapter" if file == ADAPTER_FILE else "checkpoint"
    options: dict[str, Any] = {"trust_remote_code": False, "revision": revision, "local_files_only": False}
    options |= {"subfolder": subfolder} if subfolder else {}
    file = os.path.join(subfolder, file)
    if not name.strip():
        raise ValueError(f"The {kind} must be a folder or a Hub id, got {name!r}.")
    if os.path.isdir(name):
        if not Path(name, file).is_file():
            is_other = file == CONFIG_FILE and is_adapter(name)
            why = "it holds an adapter, not a model" if is_other else f"it has no {file}"
            raise FileNotFoundError(f"There is no {kind} in {name!r}: {why}.")
        return options | {"local_files_only": True}
    is_gguf = name.lower().endswith(".gguf")
    if os.path.exists(name):
        if is_gguf and kind == "checkpoint":
            raise not_wedlm(repr(name), "GGUF file")
        raise NotADirectoryError(f"The {kind} must be a folder or a Hub id, got the file {name!r}.")
    if is_gguf:
        raise FileNotFoundError(f"There is no GGUF file {name!r}.")
    if name.startswith((".", "~")) or os.path.isabs(name) or name.count("/") > 1:
        raise FileNotFoundError(f"There is no {kind} folder {name!r}.")
    validate_repo_id(name)
    if is_hub_reachable():
        return options
    if not isinstance(try_to_load_from_cache(name, file, revision=revision), str):
        why = "offline mode is on (HF_HUB_OFFLINE)" if is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
        fault = "is no folder here and cannot be loaded as a Hub id: it is not in the cache"
        raise OSError(f"{name!r} {fault}, and {why}.")
    return options | {"local_files_only": True}


def is_hub_reachable() -> bool:
    """Whether the Hub answers, asked once and without retries; never in offline mode (`HF_HUB_OFFLINE=1`)."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # no name server, no route, a proxy that refuses, offline mode: each client has its own classes
        return False
    return True


def load_config_dict(source: str | os.PathLike[str], *, revision: str | None = None, **found: Any) -> dict[str, Any]:
    """What config.json of a checkpoint of any model type says; `found` is what [`find_checkpoint`] returned beside the
    revision, where it was called already. Raises as that, and `ValueError` for a file that holds no JSON object."""
    options = {**found, "revision": revision} if found else find_checkpoint(source, revision=revision)
    _check_json(Path(source, found.get("subfolder", "")), CONFIG_FILE)
    with reading(f"The config of {os.fspath(source)!r}"):
        config_dict: dict[str, Any] = PreTrainedConfig.get_config_dict(source, **options)[0]
    return config_dict


def require_wedlm(source: str | os.PathLike[str], **found: Any) -> None:
    """Raises `ValueError` for the checkpoint of a model of another type; else as [`load_config_dict`]."""
    kind = load_config_dict(source, **found).get("model_type", WeDLMConfig.model_type)
    if kind != WeDLMConfig.model_type:
        raise not_wedlm(repr(os.fspath(source)), f"model of type {kind!r}")


def load_tokenizer(
    source: str | os.PathLike[str], *, revision: str | None = None, **options: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint of any model type; `options` as `AutoTokenizer.from_pretrained` takes them. Raises
    as [`find_checkpoint`], `OSError` where there is none, and `ValueError` for a damaged one, or with code of its own.
    """
    name, gguf = os.fspath(source), options.get("gguf_file")
    subfolder = options.pop("subfolder", "")
    file = gguf or (ADAPTER_FILE if is_adapter(source) else CONFIG_FILE)  # training saves one beside a LoRA
    found = find_checkpoint(source, revision=revision, subfolder=subfolder, file=file)
    if gguf is None:  # without these files, transformers makes up an empty tokenizer for some model types
        where = {key: value for key, value in found.items() if key != "trust_remote_code"}
        where["_raise_exceptions_for_missing_entries"] = False
        if not any(cached_file(source, file, **where) for file in TOKENIZER_FILES):
            raise FileNotFoundError(f"{name!r} has no {' or '.join(TOKENIZER_FILES)}: a tokenizer is missing.")
    _check_json(Path(name, subfolder), "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    with reading(f"The tokenizer of {name!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **found | options)
        tokenizer("?", verbose=False)
    with reading(f"The chat template of {name!r}"):
        _try_chat_template(tokenizer)
    return tokenizer


def load_model(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    model_class: Any = WeDLMForCausalLM,
    **options: Any,
) -> Any:
    """The model of a checkpoint, which is a folder or Hub id; `model_class.from_pretrained` takes the further options.

    The dtype `"auto"` is the checkpoint's own; `"packed"` is 16-bit weights and float32 rows, on a CPU ([`pack`]);
    `"fastest"` is what this CPU computes fastest ([`use_fastest`]), elsewhere as `"auto"`. Raises `OSError` as
    [`find_checkpoint`], and for weights that are missing, damaged, or not safetensors; `ValueError` for a checkpoint
    of another model type, a damaged config, weights that do not fit, and packed ones elsewhere than on a CPU.
    """
    if dtype == PACKED and torch.device(device).type != "cpu":
        raise ValueError(f"`dtype={PACKED!r}` is for CPUs, and the model is to be on {str(device)!r}.")
    is_ours = dtype in (PACKED, FASTEST)
    subfolder, file = options.pop("subfolder", ""), options.get("gguf_file") or CONFIG_FILE
    found = find_checkpoint(source, revision=revision, subfolder=subfolder, file=file)
    # transformers takes a generation config that is no JSON for a missing one.
    _check_json(Path(source, subfolder), CONFIG_FILE, "generation_config.json", "model.safetensors.index.json")
    with reading(f"The checkpoint {os.fspath(source)!r}"):
        if model_class is WeDLMForCausalLM and "config" not in options:
            require_wedlm(source, **found)
        options = found | {"use_safetensors": True} | options
        loaded = model_class.from_pretrained(source, dtype="auto" if is_ours else dtype, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(model.generation_config, name)
            ids = value if isinstance(value, list) else [value]
            if any(not isinstance(one, int) or isinstance(one, bool) for one in ids if value is not None):
                wanted = "an integer or a list of integers"
                raise ValueError(f"`{name}` of generation_config.json must be {wanted}, got {value!r}.")
    set_format(model, dtype, device)
    return loaded


def set_format(model: Any, dtype: str | torch.dtype, device: str | torch.device) -> None:
    """Packs the weights where `dtype` asks for it (see [`load_model`]), and puts the model on the device."""
    if dtype in (PACKED, FASTEST) and torch.device(device).type == "cpu":
        pack(model) if dtype == PACKED else use_fastest(model)
    model.to(device)


def fetch_card(source: str, *, revision: str | None = None) -> None:
    """Downloads the model card of a Hub id, where there is one and the Hub can be reached."""
    if not os.path.isdir(source) and is_hub_reachable():
        with suppress(OSError):
            cached_file(source, CARD_NAME, revision=revision)


def find_device(name: str | None, called: str = "The device {!r}") -> torch.device:
    """The device of this name, by default a GPU if there is one. Raises `ValueError` for one that is not there, which
    the message names as `called`."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name).cpu()  # the device `meta` has no data to copy
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{called.format(name)} is not available: {error}") from error
    return torch.device(name)


def is_adapter(source: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter and no model."""
    return Path(source, ADAPTER_FILE).is_file() and not Path(source, CONFIG_FILE).is_file()


def base_path(adapter: str | os.PathLike[str]) -> str:
    """Folder or Hub id of the model that an adapter's config names. Raises `ValueError` for one that names none."""
    _check_json(Path(adapter), ADAPTER_FILE)
    base = json.loads(Path(adapter, ADAPTER_FILE).read_bytes()).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"The adapter {os.fspath(adapter)!r} does not say which model it belongs to.")
    return base


def _check_json(folder: Path, *names: str) -> None:
    """Raises `ValueError` for files of these names in a folder that hold no JSON object."""
    for path in (folder / name for name in names):
        if not path.is_file():
            continue
        try:
            is_object = isinstance(json.loads(path.read_bytes()), dict)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} is no JSON: {error}.") from error
        if not is_object:
            raise ValueError(f"{str(path)!r} must hold a JSON object.")


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


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns whatever the reading of a damaged file raises into a `ValueError` of one line that says `what` is read."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        fault = f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
        if "trust_remote_code=True" in str(error):
            fault = "needs Python code of its own, which is not run unless you pass `trust_remote_code=True`."
        elif "ignore_mismatched_sizes" in str(error):
            fault = "has weights of other shapes than its config states; see the report above."
        elif type(error) is ValueError:  # subclasses, such as those of JSON and Unicode, do not say where
            raise
        raise ValueError(f"{what} {fault}") from error
