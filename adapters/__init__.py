"""Mask adapters: any AR model writes its own text in fewer forwards (ALGORITHM.md §5, §8).

Using one of the names below makes the method known to PEFT, where that is installed. The import itself needs no torch:
`wedlm --help` reads the settings of `wedlm adapt` from here.
"""

from typing import Any

__all__ = [
    "MaskAdapterSettings",
    "WeDLMForCausalLM",
    "add_mask_adapter",
    "load_mask_adapter",
    "save_mask_adapter",
    "unload_mask_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import registered

    return getattr(registered, name)
