"""Dual-stream training: masking, the collator, new masks every epoch, and a tokenizer with a mask token."""

from .callback import DynamicMaskingCallback
from .collator import DataCollatorForDualStreamMasking
from .masking import mask_blocks, reorder_blocks, sample_masked_counts
from .tokenizer import train_tokenizer

__all__ = [
    "DataCollatorForDualStreamMasking",
    "DynamicMaskingCallback",
    "mask_blocks",
    "reorder_blocks",
    "sample_masked_counts",
    "train_tokenizer",
]
