"""Mask adapters as a method of PEFT, where that is installed."""

from importlib.util import find_spec

from ..modeling_wedlm import WeDLMForCausalLM
from .adapter_files import MaskAdapterSettings
from .attach import add_mask_adapter, load_mask_adapter, save_mask_adapter, unload_mask_adapter

if find_spec("peft") is not None:
    from .peft_method import register

    register()

__all__ = [
    "MaskAdapterSettings",
    "WeDLMForCausalLM",
    "add_mask_adapter",
    "load_mask_adapter",
    "save_mask_adapter",
    "unload_mask_adapter",
]
