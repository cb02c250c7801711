"""Dual-stream training: the collator, new masks every epoch, trainers, log-probabilities of responses.

The names below are looked up on first use. The trainers need the packages of `pip install ".[train]"`; all else
needs only torch and transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collator import DataCollatorForDualStreamMasking as DataCollatorForDualStreamMasking
    from .collator import DynamicMaskingCallback as DynamicMaskingCallback
    from .log_probs import ResponseLogProbs as ResponseLogProbs
    from .log_probs import response_log_probs as response_log_probs
    from .saving import ResumableTrainer as ResumableTrainer
    from .sft_config import WeDLMSFTConfig as WeDLMSFTConfig
    from .sft_trainer import WeDLMSFTTrainer as WeDLMSFTTrainer

_HOME = {
    "ResumableTrainer": "saving", "DataCollatorForDualStreamMasking": "collator",
    "DynamicMaskingCallback": "collator", "ResponseLogProbs": "log_probs", "WeDLMSFTConfig": "sft_config",
    "WeDLMSFTTrainer": "sft_trainer", "response_log_probs": "log_probs",
}  # fmt: skip

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("..generation.versions", __name__)  # first: it says so where transformers is too old
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
