"""What was measured on this machine, remembered from one process to the next."""

import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .files import write_text

MOST = 100  # entries of a file; the oldest go


def remembered(name: str, key: Any, is_valid: Callable[[Any], bool], measure: Callable[[], Any]) -> Any:
    """The value for a key: as it was measured before on this machine, with these versions; else measured now.

    Args:
        name: of the file in the [`cache_folder`].
        key: what the value depends on, as JSON has it.
        is_valid: whether a value in the file can be one.
    """
    own = [key, _machine(), version("torch"), version("wedlm-hf")]
    path = cache_folder() / f"{name}.json"
    entry, entries = json.dumps(own), _read(path)
    if entry in entries and is_valid(entries[entry]):
        return entries[entry]
    value = measure()
    kept = [*(each for each in _read(path).items() if each[0] != entry), (entry, value)]
    with suppress(OSError):  # a disk that is full or read-only: measured again next time
        write_text(path, json.dumps(dict(kept[-MOST:]), indent=1))
    return value


def cache_folder() -> Path:
    """The user's folder for what can be made anew: `$XDG_CACHE_HOME/wedlm-hf`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wedlm-hf")


def _read(path: Path) -> dict[str, Any]:
    """The entries of a file; none where it is missing or damaged."""
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _machine() -> list[Any]:
    """What the speed of products depends on."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return [*names[:1], torch.backends.cpu.get_cpu_capability(), os.cpu_count()]
    return [platform.processor() or platform.machine(), torch.backends.cpu.get_cpu_capability(), os.cpu_count()]
