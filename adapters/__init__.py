"""Mask adapters: any AR model writes its own text in fewer forwards (docs/algorithm.md#mask-adapters).

The import itself needs no torch: `wedlm --help` reads the settings of `wedlm adapt` from here.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "MaskAdapterSettings": ".adapter_files",
    "add_mask_adapter": ".attach",
    "load_mask_adapter": ".attach",
    "save_mask_adapter": ".attach",
    "unload_mask_adapter": ".attach",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("..generation.versions", __name__)  # first: it says so where transformers is too old
    return getattr(import_module(_HOME[name], __name__), name)
