"""Where a checkpoint is: a folder, or an id of the Hub, which is asked once."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, is_offline_mode, try_to_load_from_cache
from huggingface_hub.utils import validate_repo_id
from transformers.utils import cached_file

from .card import CARD_NAME

CONFIG_FILE, ADAPTER_FILE = "config.json", "adapter_config.json"


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
            how = "a LoRA is merged first (`wedlm merge`, or `merge_and_unload` of PEFT)"
            why = f"it holds an adapter, not a model; {how}" if is_other else f"it has no {file}"
            if Path(name, "work", "adapt.json").is_file() and not is_adapter(name):
                why = "`wedlm adapt` has not finished there; the same command goes on"
            raise FileNotFoundError(f"There is no {kind} in {name!r}: {why}.")
        return options | {"local_files_only": True}
    if os.path.exists(name):
        raise NotADirectoryError(f"The {kind} must be a folder or a Hub id, got the file {name!r}.")
    if name.lower().endswith(".gguf"):
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


def find_file(source: str | os.PathLike[str], file: str, *, is_needed: bool = True, **options: Any) -> str | None:
    """The path of a checkpoint's file, downloaded if it is of the Hub; `options` as [`find_checkpoint`] returns or
    `cached_file` takes them. Of a file that is not there, None; where it `is_needed`, raises `OSError`."""
    options.pop("trust_remote_code", None)
    return cached_file(os.fspath(source), file, _raise_exceptions_for_missing_entries=is_needed, **options)


def is_hub_reachable() -> bool:
    """Whether the Hub answers, asked once and without retries; never in offline mode (`HF_HUB_OFFLINE=1`)."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # no name server, no route, a proxy that refuses, offline mode: each client has its own classes
        return False
    return True


def fetch_card(source: str, *, revision: str | None = None) -> None:
    """Downloads the model card of a Hub id, where there is one and the Hub can be reached."""
    if not os.path.isdir(source) and is_hub_reachable():
        with suppress(OSError):
            cached_file(source, CARD_NAME, revision=revision)


def is_adapter(source: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter and no model."""
    return Path(source, ADAPTER_FILE).is_file() and not Path(source, CONFIG_FILE).is_file()


def read_adapter_config(name: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """The adapter_config.json of a folder or Hub id; `options` as [`find_file`] takes them. Raises `OSError` if it is
    missing or damaged."""
    path = find_file(name, ADAPTER_FILE, **options)
    try:
        config = json.loads(Path(str(path)).read_bytes())
    except (ValueError, RecursionError) as error:
        raise OSError(f"{str(path)!r} is damaged: {error}.") from error
    if not isinstance(config, dict):
        raise OSError(f"{str(path)!r} must hold an object, got {type(config).__name__}.")
    return config


def base_path(adapter: str | os.PathLike[str]) -> str:
    """Folder or Hub id of the model that an adapter's config names. Raises `ValueError` for one that names none."""
    base = read_adapter_config(adapter).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"The adapter {os.fspath(adapter)!r} does not say which model it belongs to.")
    return base


def check_json(folder: Path, *names: str) -> None:
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


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns whatever the reading of a damaged file raises into a `ValueError` of one line that says `what` is read.
    A package that is missing is no damage: `ImportError` passes, as `OSError` does."""
    try:
        yield
    except (OSError, ImportError):
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
