"""Mask adapters: any AR model writes its own text in fewer forwards (ALGORITHM.md §5, §8).

Using one of the names below makes the method known to PEFT, where that is installed. The import itself needs no torch:
`wedlm --help` reads the settings of `wedlm adapt` from here.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_HOME = {
    "MaskAdapterSettings": ".adapter_files",
    "WeDLMForCausalLM": "..modeling_wedlm",
    "add_mask_adapter": ".attach",
    "count_ngrams": ".attach",
    "load_mask_adapter": ".attach",
    "save_mask_adapter": ".attach",
    "unload_mask_adapter": ".attach",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("..generation.versions", __name__)  # first: it says so where transformers is too old
    if find_spec("peft") is not None:
        import_module(".peft_method", __name__)
    return getattr(import_module(_HOME[name], __name__), name)
