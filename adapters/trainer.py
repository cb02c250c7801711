"""Training of mask adapters on `transformers.Trainer`.

A run that was stopped goes on where it was, and so does a finished one with a larger budget, with the same answers or
with more.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..generation.state import keeps_state
from ..generation.threads import sleeping_beside_others
from ..training.saving import ResumableTrainer
from .adapter_files import StoredMaskAdapter, check_base
from .attach import attached_in, check_answers, save_mask_adapter
from .budget import Budget, Clock, MaskTrainingConfig
from .distillation import MaskDistillation
from .evaluation import measure_acceptance
from .layout import AnswerBatches, AnswerTokens, DataCollatorForMaskRuns
from .root_head import ROOT_ROWS, ShowRoot, ignore, train_root_head


class _Epochs(TrainerCallback):
    """Tells the collator the epoch, also after a resume."""

    def __init__(self, collator: DataCollatorForMaskRuns):
        self.collator = collator

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.collator.set_epoch(int(state.epoch or 0))


def check_trainable(model: Any) -> None:
    """Raises `ValueError` unless the masks of a model's adapter train, and nothing beside the adapter does."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    others = [name for name in trained if not name.startswith("mask_adapter.")]
    if others:
        raise ValueError(
            f"{len(others)} parameters beside the mask adapter would train, {others[0]!r} among them, and change what "
            "the base says: call `requires_grad_(False)` on them, or `load_mask_adapter(…, is_trainable=True)`."
        )
    if not model.mask_adapter.mask_embedding.requires_grad:
        raise ValueError("The mask adapter is frozen: load it with `is_trainable=True`.")


class MaskAdapterTrainer(ResumableTrainer):
    """Trains the mask adapter of a model on the model's own answers.

    Args:
        model: with a mask adapter that trains; everything else of it is frozen. It may be a `PeftModel`.
        args: settings.
        answers: to train on, each with `prompt_ids` and `response_ids`; those of a single token teach nothing.
        eval_answers: greedy answers of the base, for [`measure_acceptance`].
        clock: measures the budget.

    Raises:
        ValueError: for an adapter that does not train, and for answers that are not the model's or are all of a
            single token.

    Attributes:
        show_root: see [`train_root_head`].
        root_seconds: how long the root head was trained.
    """

    args: MaskTrainingConfig
    model: MaskDistillation
    loss_is_scaled_for_ga: bool | None = True
    lr_scheduler: Any
    optimizer: Any
    eval_dataset: Any
    train_dataset: Any
    control: Any

    def __init__(
        self,
        model: Any,
        args: MaskTrainingConfig,
        answers: Sequence[AnswerTokens],
        eval_answers: Sequence[AnswerTokens] | None = None,
        *,
        clock: Clock = time.monotonic,
    ):
        model = attached_in(model)
        check_trainable(model)
        for some in (answers, eval_answers or ()):
            check_answers(model, some)
        masks: int = args.num_masks or model.mask_adapter.settings.num_masks
        collator = DataCollatorForMaskRuns(0, masks, args.cut_stride, args.seed, keeps_state(model))
        self.budget, self._clock, self._num_masks = Budget(), clock, masks
        self.show_root: ShowRoot = ignore
        self.root_seconds = 0.0
        self._sums: defaultdict[str, float] = defaultdict(float)
        model.mask_adapter.restate(num_masks=masks)
        super().__init__(
            MaskDistillation(model, masks),
            args,
            data_collator=collator,
            train_dataset=AnswerBatches(answers, args.batch_slots, args.cut_stride, masks, args.seed),
            eval_dataset=eval_answers,
            callbacks=[self.budget, _Epochs(collator)],
        )
        self._connect(self.budget)

    @sleeping_beside_others()
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's, for the masks. Then one process trains the root head for all: [`ROOT_ROWS`] rows for each mask
        row of a process. Checkpoints have it as before."""
        distillation = self.accelerator.unwrap_model(self.model)
        root_head = distillation.model.mask_adapter.root_head
        root = [] if root_head is None else list(root_head.parameters())
        trained = [parameter for parameter in root if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            output = super().train(*args, **kwargs)
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
        if trained:
            began, count = self._clock(), ROOT_ROWS * self.budget.mask_rows // self.accelerator.num_processes
            answers = self.train_dataset.answers
            root_head.draft_among(answers)
            try:
                if is_first := self.is_world_process_zero():
                    minutes = self.args.root_minutes
                    how: dict[str, Any] = {"seconds": minutes and 60 * minutes, "clock": self._clock}
                    self.log(train_root_head(distillation, answers, count, self.args.seed, self.show_root, **how))
                for parameter in trained:
                    parameter.data.copy_(self.accelerator.reduce(parameter.data * is_first, "sum"))
            finally:
                self.root_seconds = self._clock() - began
        return output

    # The budget.

    def _connect(self, budget: Budget) -> None:
        self.budget = budget
        budget.clock = self._clock
        budget.synchronized = lambda number: float(self._everyones([number]).max())

    def _everyones(self, numbers: Sequence[float]) -> torch.Tensor:
        """The numbers of each process, `(processes, numbers)` float64."""
        mine = torch.tensor([numbers], dtype=torch.float64, device=self.args.device)
        gathered: torch.Tensor = self.accelerator.gather(mine)
        return gathered

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        """The sum of loss weights of the whole step. Counts the budget, too, the same on every process."""
        weights = self.accelerator.unwrap_model(self.model).depth_weights.cpu()
        counted = [batch["labels"] != -100 for batch in batch_samples]
        sums = [sum(float((mask * weights).sum()) for mask in counted), sum(int(mask.sum()) for mask in counted)]
        everyone = self._everyones(sums)
        self.budget.mask_rows += int(everyone[:, 1].sum())
        return everyone[:, 0].sum().float()

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A learning rate that follows the budget."""
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(
                optimizer or self.optimizer,
                lambda step: self.budget.learning_rate(self.args, step),  # another object after a resume
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        self._connect(next(callback for callback in self.callback_handler.callbacks if isinstance(callback, Budget)))

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """The parent's, which assumes that all steps so far were on the present answers: here, others begin an epoch.

        Returns:
            The epoch to begin with, and how many of its batches are trained already.
        """
        super()._init_training_state(max_steps, *args)
        steps_of_epoch, most_epochs, *_ = args
        state, budget = self.state, self.budget
        settings = {"num_masks": self._num_masks, "cut_stride": self.args.cut_stride}
        for name, value in settings.items():
            if (before := budget.settings.get(name, value)) != value:
                raise ValueError(f"A run with `{name}` {before} cannot go on with {value}: choose a new folder.")
        accumulated = self.args.gradient_accumulation_steps
        steps = f"{self.args.seed}, {self.accelerator.num_processes}, {accumulated}"
        order = f"{self.train_dataset.digest()}, {steps}"
        if state.global_step and budget.order != order:
            budget.first_step, budget.first_epoch = state.global_step, math.ceil(state.epoch or 0)
            state.epoch = float(budget.first_epoch)
        budget.settings, budget.order = settings, order
        if state.global_step >= max_steps or budget.progress(self.args) >= 1:  # it was stopped behind the last step
            return most_epochs, 0
        epochs, skipped = divmod(state.global_step - budget.first_step, steps_of_epoch)
        return budget.first_epoch + epochs, skipped * accumulated

    # The loss and the log.

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of [`MaskDistillation`], and sums for the log."""
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        self._count(outputs)
        loss = outputs["loss"] * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, outputs) if return_outputs else loss

    def _count(self, outputs: dict[str, torch.Tensor]) -> None:
        counted = outputs["counted"]
        self._sums["runs"] += int(counted[..., 0].sum())
        for suffix in ("", "_plain"):
            correct = outputs["correct" + suffix]
            self._sums["accepted" + suffix] += int(correct.long().cumprod(-1).sum())
            self._sums["soft_loss" + suffix] += float(outputs["soft_loss" + suffix].sum())
            for depth, count in enumerate(correct.sum((0, 1)).tolist()):
                self._sums[f"correct{suffix}_{depth}"] += count
        for depth, count in enumerate(counted.sum((0, 1)).tolist()):
            self._sums[f"counted_{depth}"] += count

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The parent's; with accuracy by depth, and accepted drafts given true tokens before them."""
        names = sorted(self._sums)
        if names and "loss" in logs:
            values = torch.tensor([self._sums[name] for name in names], dtype=torch.float64, device=self.args.device)
            sums = dict(zip(names, self.accelerator.reduce(values, "sum").tolist(), strict=True))
            depths = range(self._num_masks)
            total = sum(sums[f"counted_{depth}"] for depth in depths)
            for suffix in ("", "_plain"):
                logs["soft_loss" + suffix] = round(sums["soft_loss" + suffix] / total, 4)
                logs["accepted" + suffix] = round(sums["accepted" + suffix] / max(1, sums["runs"]), 4)
                logs["accuracy" + suffix] = [  # type: ignore[assignment]
                    round(sums[f"correct{suffix}_{depth}"] / max(1, sums[f"counted_{depth}"]), 3) for depth in depths
                ]
            self._sums.clear()
        logs["mask_rows"], logs["minutes"] = self.budget.mask_rows, round(self.budget.seconds / 60, 2)
        super().log(logs, start_time)
        if self.is_world_process_zero():
            path = Path(str(self.args.output_dir)) / "log.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            # A full disk or a kill may have cut off the last line.
            is_cut_off = path.exists() and not (b"\n" + path.read_bytes()).endswith(b"\n")
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" * is_cut_off + json.dumps({"step": self.state.global_step, **logs}) + "\n")

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Expected tokens per forward on the greedy answers of the base."""
        answers = self.eval_dataset if eval_dataset is None else eval_dataset
        if not answers:
            return {}
        mine = list(answers)[self.accelerator.process_index :: self.accelerator.num_processes]
        counted, replays = measure_acceptance(self.accelerator.unwrap_model(self.model), self._announced(mine))
        sums = torch.tensor([counted, *replays.values()], dtype=torch.float64, device=self.args.device)
        tokens, *forwards = self.accelerator.reduce(sums, "sum").tolist()
        metrics = {
            f"{metric_key_prefix}_tokens_per_forward_{name}_{drafts}": round(tokens / count, 4)
            for (name, drafts), count in zip(replays, forwards, strict=True)
        }
        metrics[f"{metric_key_prefix}_tokens"] = int(tokens)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _announced(self, answers: Sequence[AnswerTokens]) -> Iterator[AnswerTokens]:
        """The answers one by one, each told to the callbacks first."""
        for answer in answers:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            yield answer

    # Saves hold the adapter alone.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model = self.accelerator.unwrap_model(self.model).model
        save_mask_adapter(model, output_dir or str(self.args.output_dir), torch.float32)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        trained = self.accelerator.unwrap_model(self.model).model
        adapter: Any = trained.mask_adapter
        stored = StoredMaskAdapter.read(resume_from_checkpoint)
        check_base(trained, stored.base)
        if replace(stored.settings, num_masks=adapter.settings.num_masks) != adapter.settings:
            raise ValueError(
                f"A run with {stored.settings} cannot go on with {adapter.settings}: choose a new folder."
            )
        adapter.load_state_dict(stored.weights)
