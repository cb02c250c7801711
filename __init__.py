"""WeDLM for Hugging Face transformers: diffusion language models that decode in parallel under causal attention.

The four sub-packages are the library: `modeling_wedlm` (model, conversion, Hub bundle), `generation` (decoding),
`training` (masking, collator, loss) and `eval`. The names below are shortcuts, looked up on first use, so that
`import wedlm_hf` itself loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import add_mask_adapter, load_mask_adapter, save_mask_adapter, unload_mask_adapter
    from .modeling_wedlm import WeDLMConfig, WeDLMForCausalLM, WeDLMModel, convert
    from .training import DataCollatorForDualStreamMasking, WeDLMSFTConfig, WeDLMSFTTrainer

__version__ = "0.1.0"

__all__ = [
    "DataCollatorForDualStreamMasking",
    "WeDLMConfig",
    "WeDLMForCausalLM",
    "WeDLMModel",
    "WeDLMSFTConfig",
    "WeDLMSFTTrainer",
    "add_mask_adapter",
    "convert",
    "load_mask_adapter",
    "save_mask_adapter",
    "unload_mask_adapter",
]

_HOME = {
    "DataCollatorForDualStreamMasking": "training",
    "WeDLMConfig": "modeling_wedlm",
    "WeDLMForCausalLM": "adapters",  # with its methods for mask adapters
    "WeDLMModel": "modeling_wedlm",
    "WeDLMSFTConfig": "training",
    "WeDLMSFTTrainer": "training",
    "add_mask_adapter": "adapters",
    "convert": "modeling_wedlm",
    "load_mask_adapter": "adapters",
    "save_mask_adapter": "adapters",
    "unload_mask_adapter": "adapters",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its sub-package on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
