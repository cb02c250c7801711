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


def remembered(name: str, key: Any, choices: set[str], measure: Callable[[], str]) -> str:
    """One of the choices for a key: as it was measured before on this machine, with these versions; else measured now.

    Args:
        name: of the file in the cache folder of the user, `$XDG_CACHE_HOME/wedlm-hf`.
        key: what the choice depends on, as JSON has it.
    """
    own = [key, _machine(), version("torch"), version("wedlm-hf")]
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "wedlm-hf", f"{name}.json")
    entry, entries = json.dumps(own), _read(path)
    if entries.get(entry) in choices:
        return str(entries[entry])
    choice = measure()
    kept = [*((other, value) for other, value in _read(path).items() if other != entry), (entry, choice)]
    with suppress(OSError):  # a disk that is full or read-only: measured again next time
        write_text(path, json.dumps(dict(kept[-MOST:]), indent=1))
    return choice


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
