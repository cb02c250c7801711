"""Settings of mask-adapter training, and its budget: minutes or mask rows, counted over all resumes."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

Clock = Callable[[], float]
"""Seconds since some moment, as `time.monotonic`."""

EVALUATION_SHARE, SAVING_SHARE = 0.05, 0.02  # of the time, beside it, for all evaluations and all saves
WARMUP = 0.1  # of the budget, at most
_EVALUATION_STEP = 0.1  # of the budget, between two evaluations at least


@dataclass
class MaskTrainingConfig(TrainingArguments):
    """[`transformers.TrainingArguments`] with the settings of mask-adapter training.

    Training ends when `minutes` of it have passed or `mask_rows` were trained, whichever comes first; the learning
    rate follows the share of the budget that is used. Evaluating, saving and the training of a root head, which comes
    last, do not count.
    """

    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's."})
    warmup_steps: float = field(
        default=30, metadata={"help": "Optimizer steps of linear warm-up, or a tenth of the budget if that is less."}
    )
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "'cosine' or 'linear'."})
    num_train_epochs: float = field(default=10_000.0, metadata={"help": "Passes over answers; the budget ends it."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Batches of answers: leave it at 1."})
    per_device_eval_batch_size: int = field(default=1, metadata={"help": "Leave it at 1."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Items are batches of answers."})
    save_strategy: str = field(default="no", metadata={"help": "Left to `save_minutes`."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between entries of the log."})
    restore_callback_states_from_checkpoint: bool = field(default=True, metadata={"help": "The budget is one."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "All parameters are used."})
    ddp_broadcast_buffers: bool | None = field(default=False, metadata={"help": "No buffer changes."})

    minutes: float | None = field(default=None, metadata={"help": "Budget: minutes of training, over all resumes."})
    mask_rows: int | None = field(default=None, metadata={"help": "Budget: masks with a target that are trained."})
    root_minutes: float | None = field(
        default=None, metadata={"help": "Minutes for the root head at most; it sees four rows for each mask row."}
    )
    save_minutes: float = field(default=0.8, metadata={"help": "Minutes between checkpoints, or more if they slow."})
    num_masks: int | None = field(default=None, metadata={"help": "K, masks after each cut; default: the adapter's."})
    cut_stride: int = field(default=3, metadata={"help": "Response tokens for each cut."})
    # With 640, the same 40,000 masks gave 5 % fewer tokens per forward: fewer steps (examples/smollm2/README.md).
    batch_slots: int = field(default=400, metadata={"help": "Masks in a batch of one device, about."})
    final_learning_rate: float = field(default=0.05, metadata={"help": "Share of the peak at the end."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minutes is None and self.mask_rows is None:
            raise ValueError("Training needs a budget: `minutes` or `mask_rows`.")
        if self.gradient_checkpointing:
            raise ValueError("`gradient_checkpointing` must be False: only mask rows keep activations.")
        for name in ("minutes", "mask_rows", "root_minutes", "num_masks", "cut_stride", "batch_slots", "save_minutes"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be a finite number greater than 0, got {value}.")
        curve, more = self.lr_scheduler_type, self.lr_scheduler_kwargs
        if curve not in ("cosine", "linear") or more:
            raise ValueError(
                "The learning rate follows the budget: `lr_scheduler_type` must be 'cosine' or 'linear', without "
                f"`lr_scheduler_kwargs`; got {curve!r} and {more!r}."
            )
        if self.load_best_model_at_end:
            raise ValueError("`load_best_model_at_end` must be False: the root head learns after the last step.")


class Budget(TrainerCallback, ExportableState):
    """How much of the budget is used and on what, kept over resumes; stops, saves and evaluates by it.

    Evaluations get [`EVALUATION_SHARE`] of the time beside training, saves [`SAVING_SHARE`]: each is as rare as its
    last one took long. The last evaluation is always made.
    """

    clock: Clock = time.monotonic
    synchronized: Callable[[float], float] = float  # the largest of the numbers that the processes give

    def __init__(self) -> None:
        self.seconds, self.mask_rows = 0.0, 0  # of training, by all processes
        self.spent, self.last = ({"evaluation": 0.0, "saving": 0.0} for _ in range(2))  # seconds: of all, of the last
        self.saved_at, self.evaluated_at = 0.0, 0.0  # `seconds` at the last save, share of the budget
        self.settings: dict[str, int] = {}  # what a resumed run must share with the run so far
        self.order = ""  # digest of the answers and of the order in which they are trained
        self.first_step, self.first_epoch = 0, 0  # optimizer steps and epochs before the present answers
        self._kept = tuple(vars(self))
        self._since = self.clock()

    def state(self) -> dict[str, Any]:
        """For trainer_state.json."""
        return {"args": {}, "attributes": {name: getattr(self, name) for name in self._kept}}

    def progress(self, args: MaskTrainingConfig) -> float:
        """The share of the budget that is used, 0 to 1."""
        shares = [0.0]
        if args.minutes:
            shares.append(self.seconds / 60 / args.minutes)
        if args.mask_rows:
            shares.append(self.mask_rows / args.mask_rows)
        return min(1.0, max(shares))

    def learning_rate(self, args: MaskTrainingConfig, step: int) -> float:
        """The share of the peak at a step: linear warm-up, then a curve of the share of the budget that is used."""
        used = self.progress(args)
        shape = 0.5 * (1 + math.cos(math.pi * used)) if args.lr_scheduler_type == "cosine" else 1 - used
        warm = max((step + 1) / max(1, args.warmup_steps), used / WARMUP)
        return min(1.0, warm) * max(args.final_learning_rate, shape)

    def elapsed(self, args: MaskTrainingConfig) -> float:
        """The share of the time that has passed, with what is spent beside training."""
        since, share = self.clock() - self._since, self.progress(args)
        passed = self.seconds + sum(self.spent.values()) + since
        left = self.last["evaluation"]
        if share < 1:
            left += self.seconds * (1 / max(share, 1e-9) - 1) * (1 + SAVING_SHARE)
        else:  # it is under way
            left -= since
        return min(passed / max(passed + left, 1e-9), 1.0)

    def _passed(self) -> float:
        """Seconds since the last call."""
        since, self._since = self._since, self.clock()
        return self._since - since

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Starts the clock."""
        self.evaluated_at = min(self.evaluated_at, self.progress(args))  # the budget may have grown
        self._passed()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Decides what happens after this step."""
        self.seconds = self.synchronized(self.seconds + self._passed())
        progress = self.progress(args)
        least = max(60 * args.save_minutes, self.last["saving"] / SAVING_SHARE)
        if progress >= 1 or self.seconds - self.saved_at >= least:
            self.saved_at = self.seconds
            control.should_save = True
        # With one more of them, the last evaluation still fits.
        fits = self.spent["evaluation"] + 2 * self.last["evaluation"] <= EVALUATION_SHARE * self.seconds
        if progress >= 1 or (progress - self.evaluated_at >= _EVALUATION_STEP and fits):
            self.evaluated_at = progress
            control.should_evaluate = control.should_log = True
        control.should_training_stop = control.should_training_stop or progress >= 1

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Counts an evaluation."""
        self._charge("evaluation")

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Counts a save."""
        self._charge("saving")

    def _charge(self, what: str) -> None:
        self.last[what] = self.synchronized(self._passed())
        self.spent[what] += self.last[what]
