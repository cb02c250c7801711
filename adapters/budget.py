"""Settings of mask-adapter training, and its budget: minutes or mask rows, counted over all resumes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


@dataclass
class MaskTrainingConfig(TrainingArguments):
    """[`transformers.TrainingArguments`] with the settings of mask-adapter training.

    Training ends when `minutes` have passed or `mask_rows` were trained, whichever comes first; the learning rate
    follows the share of the budget that is used.
    """

    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW's."})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's."})
    warmup_steps: float = field(default=30, metadata={"help": "Optimizer steps of linear warm-up."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "'cosine' or 'linear'."})
    num_train_epochs: float = field(
        default=10_000.0, metadata={"help": "Passes over the answers; the budget ends it."}
    )
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Batches of answers: leave it at 1."})
    per_device_eval_batch_size: int = field(default=1, metadata={"help": "Leave it at 1."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Items are batches of answers."})
    save_strategy: str = field(default="no", metadata={"help": "Left to `save_minutes`."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between entries of the log."})
    report_to: str | list[str] | None = field(default="none", metadata={"help": "Loggers beside log.jsonl."})
    restore_callback_states_from_checkpoint: bool = field(default=True, metadata={"help": "The budget is one."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "All parameters are used."})
    ddp_broadcast_buffers: bool | None = field(default=False, metadata={"help": "No buffer changes."})

    minutes: float | None = field(default=None, metadata={"help": "Budget: minutes of training, over all resumes."})
    mask_rows: int | None = field(default=None, metadata={"help": "Budget: masks with a target that are trained."})
    session_minutes: float | None = field(default=None, metadata={"help": "Stop after so long; resume later."})
    save_minutes: float = field(default=10.0, metadata={"help": "Minutes between checkpoints (and evaluations)."})
    num_masks: int = field(default=5, metadata={"help": "K, masks after each cut."})
    cut_stride: int = field(default=3, metadata={"help": "Response tokens for each cut."})
    batch_slots: int = field(default=640, metadata={"help": "Masks in a batch of one device, about."})
    final_learning_rate: float = field(default=0.05, metadata={"help": "Share of the peak at the end."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minutes is None and self.mask_rows is None:
            raise ValueError("Training needs a budget: `minutes` or `mask_rows`.")
        if self.gradient_checkpointing:
            raise ValueError("`gradient_checkpointing` must be False: only mask rows keep activations.")
        for name in ("minutes", "mask_rows", "num_masks", "cut_stride", "batch_slots", "save_minutes"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"`{name}` must be more than 0, got {value}.")


def budget_schedule(args: TrainingArguments, used: Callable[[], float], final: float) -> Callable[[int], float]:
    """The share of the peak learning rate at a step: linear warm-up, then a curve of the share of the budget `used`.

    Args:
        args: `warmup_steps`, and `lr_scheduler_type`, `"cosine"` or linear.
        used: the share of the budget that is used, 0 to 1.
        final: the least share of the peak.
    """

    def factor(step: int) -> float:
        shape = 0.5 * (1 + math.cos(math.pi * used())) if args.lr_scheduler_type == "cosine" else 1 - used()
        return min(1.0, (step + 1) / max(1, args.warmup_steps)) * max(final, shape)

    return factor


class Budget(TrainerCallback, ExportableState):
    """How much of the budget is used and on what, kept over resumes; stops, saves and evaluates by it.

    Attributes:
        seconds: of training, the same on every process.
        mask_rows: trained by all processes.
        settings: what a resumed run must share with the run so far.
        order: digest of the answers and of the order in which they are trained.
        first_step: optimizer steps before the present answers.
        first_epoch: epochs before the present answers.
    """

    def __init__(self) -> None:
        self.seconds, self.mask_rows, self.saved_at, self.stop_at = 0.0, 0, 0.0, math.inf
        self.settings: dict[str, int] = {}
        self.order, self.first_step, self.first_epoch = "", 0, 0

    def state(self) -> dict[str, Any]:
        """For trainer_state.json."""
        names = ("seconds", "mask_rows", "saved_at", "settings", "order", "first_step", "first_epoch")
        return {"args": {}, "attributes": {name: getattr(self, name) for name in names}}

    def progress(self, args: MaskTrainingConfig) -> float:
        """The share of the budget that is used, 0 to 1."""
        shares = [0.0]
        if args.minutes:
            shares.append(self.seconds / 60 / args.minutes)
        if args.mask_rows:
            shares.append(self.mask_rows / args.mask_rows)
        return min(1.0, max(shares))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begins a session."""
        if args.session_minutes:
            self.stop_at = self.seconds + 60 * args.session_minutes

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Decides what happens after this step."""
        is_over = self.progress(args) >= 1 or self.seconds >= self.stop_at
        if is_over or self.seconds - self.saved_at >= 60 * args.save_minutes:
            self.saved_at = self.seconds
            control.should_save = control.should_evaluate = control.should_log = True
        control.should_training_stop = control.should_training_stop or is_over
