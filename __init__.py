"""WeDLM for Hugging Face transformers: diffusion language models that decode in parallel under causal attention.

The four sub-packages are the library: `modeling_wedlm` (model, conversion, Hub bundle), `generation` (decoding),
`training` (masking, collator, loss) and `eval`. The names below are shortcuts, looked up on first use.

`import wedlm_hf` makes the model known to the Auto classes of transformers, and mask adapters to PEFT. The command
`wedlm` reads its words first: it registers what it needs when it runs.
"""

import gc
import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import (
        add_mask_adapter,
        load_mask_adapter,
        save_mask_adapter,
        unload_mask_adapter,
    )
    from .adapters.budget import MaskTrainingConfig
    from .adapters.trainer import MaskAdapterTrainer
    from .checkpoints.packed import pack
    from .modeling_wedlm import WeDLMConfig, WeDLMForCausalLM, WeDLMModel
    from .modeling_wedlm.convert import convert
    from .training import DataCollatorForDualStreamMasking, DynamicMaskingCallback, WeDLMSFTConfig, WeDLMSFTTrainer

__version__ = "0.1.0"

__all__ = [
    "DataCollatorForDualStreamMasking",
    "DynamicMaskingCallback",
    "MaskAdapterTrainer",
    "MaskTrainingConfig",
    "WeDLMConfig",
    "WeDLMForCausalLM",
    "WeDLMModel",
    "WeDLMSFTConfig",
    "WeDLMSFTTrainer",
    "add_mask_adapter",
    "convert",
    "load_mask_adapter",
    "pack",
    "save_mask_adapter",
    "unload_mask_adapter",
]

_HOME = {
    "DataCollatorForDualStreamMasking": "training",
    "DynamicMaskingCallback": "training",
    "MaskAdapterTrainer": "adapters.trainer",
    "MaskTrainingConfig": "adapters.budget",
    "WeDLMConfig": "modeling_wedlm",
    "WeDLMForCausalLM": "modeling_wedlm",
    "WeDLMModel": "modeling_wedlm",
    "WeDLMSFTConfig": "training",
    "WeDLMSFTTrainer": "training",
    "add_mask_adapter": "adapters",
    "convert": "modeling_wedlm.convert",
    "load_mask_adapter": "adapters",
    "pack": "checkpoints.packed",
    "save_mask_adapter": "adapters",
    "unload_mask_adapter": "adapters",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its sub-package on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])


def register() -> None:
    """Makes the model known to the Auto classes of transformers, and mask adapters to PEFT where it is installed."""
    others, collects = logging.getLogger("bitsandbytes"), gc.isenabled()
    level = others.level
    gc.disable()  # what is imported stays: the search for garbage among it would take a sixth of the time
    try:
        import_module(".modeling_wedlm", __name__)
        if find_spec("peft") is not None:
            others.setLevel(logging.ERROR)  # PEFT imports it, and it warns of a kernel that nobody has asked for
            import_module(".adapters.peft_method", __name__)
    finally:
        others.setLevel(level)
        if collects:
            gc.enable()


if __name__ == "wedlm_hf" and "wedlm_cli" not in sys.modules:  # not where pytest imports this file by another name
    register()
