"""Dual-stream training: masking, the collator, new masks every epoch, TRL's trainer, a tokenizer with a mask token.

`WeDLMSFTTrainer` and `WeDLMSFTConfig` need the packages of `pip install "wedlm-hf[train]"`; all else needs only torch
and transformers. Trainers are looked up on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .callback import DynamicMaskingCallback
from .collator import DataCollatorForDualStreamMasking
from .log_probs import ResponseLogProbs, response_log_probs
from .masking import draw_noise, mask_blocks, reorder_blocks, sample_masked_counts
from .tokenizer import train_tokenizer

if TYPE_CHECKING:
    from .saving import WholeSaves
    from .sft_config import WeDLMSFTConfig
    from .sft_trainer import WeDLMSFTTrainer

_HOME = {"WeDLMSFTConfig": "sft_config", "WeDLMSFTTrainer": "sft_trainer", "WholeSaves": "saving"}

__all__ = [
    "DataCollatorForDualStreamMasking",
    "DynamicMaskingCallback",
    "ResponseLogProbs",
    "WeDLMSFTConfig",
    "WeDLMSFTTrainer",
    "WholeSaves",
    "draw_noise",
    "mask_blocks",
    "reorder_blocks",
    "response_log_probs",
    "sample_masked_counts",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
