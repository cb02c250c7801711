"""Loading checkpoints: the one place where this package reads a model, its config and its tokenizer.

Every command and library call of ours loads through here, so that all of them

- never run Python files of a checkpoint, unless the caller says `trust_remote_code=True`: transformers would ask on
  standard input, where a piped "y" or the next prompt counts as consent;
- never unpickle: weights are safetensors;
- fail at once for a Hub id that is neither cached nor reachable: transformers retries for 23 seconds a file;
- raise `OSError` or `ValueError` that says what is damaged, whatever the reading of it raised.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session, is_offline_mode, try_to_load_from_cache
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from .modeling_wedlm import WeDLMForCausalLM

CONFIG_FILE = "config.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def find_checkpoint(
    source: str | os.PathLike[str], *, revision: str | None = None, subfolder: str = "", file: str = CONFIG_FILE
) -> dict[str, Any]:
    """Looks for a checkpoint, without reading it.

    Args:
        source: folder or Hub id.
        revision: branch, tag or commit of a Hub id.
        subfolder: where in it the checkpoint lies.
        file: what makes it a checkpoint.

    Returns:
        The keyword arguments that each `from_pretrained` on it takes: `trust_remote_code=False`, where it lies, and
        `local_files_only=True` where the Hub cannot be reached.

    Raises:
        OSError: for a folder that is not there or lacks `file`, and for a Hub id that is neither cached nor reachable.
        ValueError: for a name that cannot be a folder nor a Hub id.
    """
    name = os.fspath(source)
    options: dict[str, Any] = {"trust_remote_code": False, "revision": revision, "local_files_only": False}
    options |= {"subfolder": subfolder} if subfolder else {}
    file = os.path.join(subfolder, file)
    if not name.strip():
        raise ValueError(f"A checkpoint is a folder or a Hub id, got {name!r}.")
    if os.path.isdir(name):
        if not Path(name, file).is_file():
            raise FileNotFoundError(f"There is no checkpoint in {name!r}: it has no {file}.")
        return options | {"local_files_only": True}
    if os.path.exists(name):
        raise NotADirectoryError(f"A checkpoint is a folder or a Hub id, and {name!r} is a file.")
    if name.startswith((".", "~")) or os.path.isabs(name) or name.count("/") > 1:
        raise FileNotFoundError(f"There is no checkpoint folder {name!r}.")
    validate_repo_id(name)
    if is_hub_reachable():
        return options
    if not isinstance(try_to_load_from_cache(name, file, revision=revision), str):
        why = "offline mode is on (HF_HUB_OFFLINE)" if is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
        raise OSError(
            f"{name!r} is no folder here and cannot be loaded as a Hub id: it is not in the cache, and {why}."
        )
    return options | {"local_files_only": True}


def is_hub_reachable() -> bool:
    """Whether the Hub answers, asked once and without retries; never in offline mode (`HF_HUB_OFFLINE=1`)."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # no name server, no route, a proxy that refuses, offline mode: each client has its own classes
        return False
    return True


def load_config_dict(source: str | os.PathLike[str], *, revision: str | None = None) -> dict[str, Any]:
    """What config.json of a checkpoint of any model type says.

    Raises:
        OSError: as [`find_checkpoint`], and for a file that is no JSON.
        ValueError: for JSON that is not an object.
    """
    options = find_checkpoint(source, revision=revision)
    with _named(f"The config of {os.fspath(source)!r}"):
        config_dict: Any = PreTrainedConfig.get_config_dict(source, **options)[0]
        if not isinstance(config_dict, dict):
            raise ValueError(f"{CONFIG_FILE} of {os.fspath(source)!r} holds no JSON object.")
    return config_dict


def load_tokenizer(
    source: str | os.PathLike[str], *, revision: str | None = None, **options: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint of any model type.

    Args:
        source: folder or Hub id.
        revision: branch, tag or commit of a Hub id.
        options: further arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        OSError: as [`find_checkpoint`], and for a checkpoint without a tokenizer.
        ValueError: for a tokenizer that is damaged or needs code of its own.
    """
    name, gguf = os.fspath(source), options.get("gguf_file")
    subfolder = options.pop("subfolder", "")
    found = find_checkpoint(source, revision=revision, subfolder=subfolder, file=gguf or CONFIG_FILE)
    if gguf is None:  # without these files, transformers makes up an empty tokenizer for some model types
        where = {key: value for key, value in found.items() if key != "trust_remote_code"}
        files = (
            cached_file(source, file, _raise_exceptions_for_missing_entries=False, **where) for file in TOKENIZER_FILES
        )
        if not any(files):
            raise FileNotFoundError(f"{name!r} has no {' or '.join(TOKENIZER_FILES)}: a tokenizer is missing.")
    with _named(f"The tokenizer of {name!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **found | options)
    return tokenizer


def load_model(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    **options: Any,
) -> Any:
    """The model of a WeDLM checkpoint.

    Args:
        source: folder or Hub id.
        revision: branch, tag or commit of a Hub id.
        dtype: of the weights; `"auto"` is the checkpoint's own.
        options: further arguments of `WeDLMForCausalLM.from_pretrained`.

    Raises:
        OSError: as [`find_checkpoint`], and for weights that are missing, damaged, or not safetensors.
        ValueError: for a checkpoint of another model type, a damaged config, and weights that do not fit.
    """
    subfolder, file = options.pop("subfolder", ""), options.get("gguf_file") or CONFIG_FILE
    found = find_checkpoint(source, revision=revision, subfolder=subfolder, file=file)
    with _named(f"The checkpoint {os.fspath(source)!r}"):
        return WeDLMForCausalLM.from_pretrained(source, dtype=dtype, **found | {"use_safetensors": True} | options)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turns what the reading of a damaged file raises into a `ValueError` that names the file's owner."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if "trust_remote_code=True" in str(error):
            raise ValueError(
                f"{what} needs Python code of its own, which is not run unless you pass `trust_remote_code=True`."
            ) from error
        if type(error) is ValueError:  # subclasses, such as those of JSON and Unicode, do not say where
            raise
        raise ValueError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
