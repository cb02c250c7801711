"""Settings of [`WeDLMSFTTrainer`]."""

import math
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from transformers.utils import is_torch_bf16_gpu_available
from trl import SFTConfig

from .collator import check_settings
from .cpu import FASTER, bf16_speedup
from .streams import RatioSampler

CHATML = Path(__file__).with_name("chat_template.jinja")


# Least values of settings that the parents take as they are, and what some must lie below.
_FROM_ZERO = """
    adam_beta1 adam_beta2 adam_epsilon data_seed dataloader_num_workers dataset_num_proc eval_decoding_samples
    eval_decoding_tokens eval_delay eval_steps learning_rate logging_steps max_grad_norm neftune_noise_alpha
    num_train_epochs router_aux_loss_coef save_steps seed warmup_steps weight_decay
""".split()
_FROM_ONE = """
    eval_accumulation_steps gradient_accumulation_steps per_device_eval_batch_size per_device_train_batch_size
""".split()
_LEAST = {"max_length": 2} | dict.fromkeys(_FROM_ZERO, 0) | dict.fromkeys(_FROM_ONE, 1)
_BELOW = {"adam_beta1": 1, "adam_beta2": 1, "data_seed": 2**32, "seed": 2**32}


def check_range(settings: Any, name: str, least: float, below: float = math.inf) -> None:
    """Raises `ValueError` for a field of a dataclass that is no number of its kind, or out of range."""
    value, stated = getattr(settings, name), next(each for each in fields(settings) if each.name == name)
    if value is None and (stated.default is None or name in ("max_grad_norm", "max_length")):
        return
    is_whole = "float" not in str(stated.type)
    is_number = isinstance(value, Integral if is_whole else Real) and not isinstance(value, bool)
    if not is_number or not least <= value < below:
        wanted = f"{'an integer of ' if is_whole else ''}at least {least}"
        wanted += "" if below == math.inf else f", below {below}"
        raise ValueError(f"`{name}` must be {wanted}, got {value!r}.")


def setting(default: Any, text: str) -> Any:
    """A field with its text for `--help`."""
    return field(default=default, metadata={"help": text})


@dataclass
class WeDLMSFTConfig(SFTConfig):
    """[`trl.SFTConfig`] with the settings of dual-stream training, and the defaults of the released fine-tuning code.

    Some inherited fields mean more than they do there: `assistant_only_loss` may be None (true for chat data),
    `chat_template_path="chatml"` is the template of this package, `use_cpu` is true where there is nothing else,
    `bf16` may be None (on a CPU, what it multiplies faster), and `max_length` counts the tokens of an example, before
    end tokens are filled in: the dual stream is about twice as long.

    Raises:
        ValueError: for settings that dual-stream training cannot honour.
    """

    # The released defaults; SFTConfig's are for larger steps of an AR loss.
    learning_rate: float = setting(3e-6, "Peak learning rate (paper §6.1: 3e-6).")
    lr_scheduler_type: str = setting("cosine", "Schedule of the learning rate (paper §6.1).")
    warmup_steps: float = setting(0.1, "Warm-up: a number of steps, or below 1 a share of them (released code: 0.1).")
    weight_decay: float = setting(0.01, "AdamW's (released code).")
    num_train_epochs: float = setting(3.0, "Passes over the data (released code).")
    gradient_accumulation_steps: int = setting(8, "Micro-batches of an optimizer step (released code).")
    max_length: int | None = setting(2048, "Longest example, in tokens (released code); longer ones are shortened.")
    use_cache: bool = setting(True, "Written into the saved config, for decoding; training never uses a cache.")
    assistant_only_loss: bool | None = setting(  # type: ignore[assignment]
        None, "Supervise assistant turns alone; by default for chat data."
    )

    block_size: int = setting(32, "B, tokens of a prediction block (paper §6.1).")
    ratio_sampler: RatioSampler = setting(  # noqa: RUF009
        "count", "Law of the masked counts; 'stratified' is the same with less noise."
    )
    suffix_probability: float = setting(0.0, "Share of blocks whose masks are a suffix instead of uniform (paper: 0).")
    num_copies: int = setting(1, "Prediction copies of one memory stream (paper: 1).")
    num_eos: int = setting(8, "End tokens after a response (released code).")
    ar_weight: float = setting(1.0, "a, weight of the AR loss (released code; Eq. 10).")
    eval_decoding_samples: int = setting(10, "Prompts of the evaluation set that each evaluation decodes; 0 for none.")
    eval_decoding_tokens: int = setting(128, "Most new tokens of each of these answers.")

    def __post_init__(self) -> None:
        if self.chat_template_path == "chatml":
            self.chat_template_path = str(CHATML)
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.bf16 is None:  # TRL's default is on wherever training runs
            self.bf16 = bf16_speedup() > FASTER if self.use_cpu else is_torch_bf16_gpu_available()
        if getattr(self, "activation_checkpointing", True) is None:  # transformers warns of the older name, TRL's
            self.activation_checkpointing = self.gradient_checkpointing
        for name, least in _LEAST.items():  # the parent divides by some of them and compares others, whatever they are
            check_range(self, name, least, _BELOW.get(name, math.inf))
        if str(self.pad_to_multiple_of).lower() not in ("auto", "none", "null"):  # TRL makes an integer of any other
            reason = "sequences are as long as their two streams"
            raise ValueError(f"`pad_to_multiple_of` must be None, got {self.pad_to_multiple_of!r}: {reason}.")
        self.pad_to_multiple_of = None
        if not self.num_train_epochs and self.max_steps < 1:
            raise ValueError("Without `max_steps`, `num_train_epochs` must be more than 0, got 0.")
        pad_token, self.pad_token = self.pad_token, None  # TRL will drop the field; this config keeps it
        super().__post_init__()
        self.pad_token = pad_token
        refused: dict[str, tuple[Any, str]] = {
            "loss_type": ("nll", "the loss is that of dual-stream training"),
            "label_smoothing_factor": (0.0, "the loss is that of dual-stream training"),
            "padding_free": (False, "`packing=True` puts documents side by side and keeps them apart"),
            "truncation_mode": ("keep_start", "an answer without its question cannot be learnt"),
        }
        for name, (allowed, reason) in refused.items():
            if getattr(self, name) != allowed:
                raise ValueError(f"`{name}` must be {allowed!r}, got {getattr(self, name)!r}: {reason}.")
        if self.packing and self.packing_strategy == "wrapped":
            reason = "it cuts documents anywhere and keeps no border between them"
            raise ValueError(f"`packing_strategy` must be 'bfd' or 'bfd_split', got 'wrapped': {reason}.")
        check_settings(self)
