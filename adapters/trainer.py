"""Training of mask adapters on `transformers.Trainer`.

    python -m wedlm_hf.adapters.trainer BASE ANSWERS.jsonl OUT --minutes 60

BASE is a WeDLM checkpoint (see `convert`), ANSWERS its own answers (see `answers`), OUT a folder for checkpoints, the
log and the adapter. A run that was stopped goes on where it was, and so does a finished one with a larger budget, with
the same answers or with more.
"""

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..modeling_wedlm.loading import load_model
from ..modeling_wedlm.modeling_wedlm import WeDLMForCausalLM
from ..training.saving import AtomicSaveTrainer, newest_complete_checkpoint
from .adapter_files import MaskAdapterSettings, StoredMaskAdapter, check_base
from .budget import Budget, MaskTrainingConfig, budget_schedule
from .distillation import MaskDistillation
from .evaluation import measure_acceptance
from .layout import Answer, AnswerBatches, DataCollatorForMaskRuns, load_answers
from .registered import add_mask_adapter, load_mask_adapter


class _Epochs(TrainerCallback):
    """Tells the collator the epoch, also after a resume."""

    def __init__(self, collator: DataCollatorForMaskRuns):
        self.collator = collator

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Other cuts for a new epoch."""
        self.collator.set_epoch(int(state.epoch or 0))


class MaskAdapterTrainer(AtomicSaveTrainer):
    """Trains the mask adapter of a model on the model's own answers.

    Args:
        model: with a mask adapter; everything else of it is frozen.
        args: settings.
        answers: to train on.
        eval_answers: greedy answers of the base, for [`measure_acceptance`].
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
        model: WeDLMForCausalLM,
        args: MaskTrainingConfig,
        answers: Sequence[Answer],
        eval_answers: Sequence[Answer] | None = None,
    ):
        collator = DataCollatorForMaskRuns(0, args.num_masks, args.cut_stride, args.seed)
        self.budget = Budget()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._started = time.monotonic()
        self._seconds_before = 0.0
        super().__init__(
            MaskDistillation(model, num_masks=args.num_masks),
            args,
            data_collator=collator,
            train_dataset=AnswerBatches(answers, args.batch_slots, args.cut_stride, args.num_masks, args.seed),
            eval_dataset=eval_answers,
            callbacks=[self.budget, _Epochs(collator)],
        )

    # The budget.

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        """The sum of loss weights of the whole step. Counts the budget, too, the same on every process."""
        weights = self.accelerator.unwrap_model(self.model).depth_weights.cpu()
        counted = [batch["labels"] != -100 for batch in batch_samples]
        sums = [sum(float((mask * weights).sum()) for mask in counted), sum(int(mask.sum()) for mask in counted)]
        seconds = self._seconds_before + time.monotonic() - self._started
        mine = torch.tensor([*sums, seconds], dtype=torch.float64, device=device)
        everyone = self.accelerator.gather(mine[None])
        self.budget.mask_rows += int(everyone[:, 1].sum())
        self.budget.seconds = float(everyone[:, 2].max())
        return everyone[:, 0].sum().float()

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A learning rate that follows the budget."""
        if self.lr_scheduler is None:
            args = self.args
            schedule = budget_schedule(args, lambda: self.budget.progress(args), args.final_learning_rate)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, schedule)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        restored = [one for one in self.callback_handler.callbacks if isinstance(one, Budget)]
        self.budget = restored[0]
        self._seconds_before, self._started = self.budget.seconds, time.monotonic()

    def _init_training_state(
        self,
        max_steps: Any,
        num_update_steps_per_epoch: Any,
        num_train_epochs: Any,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """The parent's, which assumes that all steps so far were on the present answers: here, others begin an epoch.

        Returns:
            The epoch to begin with, and how many of its batches are trained already.
        """
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        state, budget = self.state, self.budget
        settings = {"num_masks": self.args.num_masks, "cut_stride": self.args.cut_stride}
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
        epochs, skipped = divmod(state.global_step - budget.first_step, num_update_steps_per_epoch)
        return budget.first_epoch + epochs, skipped * accumulated

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's. Raises `ValueError` for a checkpoint of another base, or of an adapter with other settings."""
        self._started = time.monotonic()
        return super().train(*args, **kwargs)

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
            depths = range(self.args.num_masks)
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
        started = time.perf_counter()
        mine = list(answers)[self.accelerator.process_index :: self.accelerator.num_processes]
        counted, replays = measure_acceptance(self.accelerator.unwrap_model(self.model), self._announced(mine))
        sums = torch.tensor([counted, *replays.values()], dtype=torch.float64, device=self.args.device)
        tokens, *forwards = self.accelerator.reduce(sums, "sum").tolist()
        metrics = {
            f"{metric_key_prefix}_tokens_per_forward_{name}_{drafts}": round(tokens / count, 4)
            for (name, drafts), count in zip(replays, forwards, strict=True)
        }
        metrics[f"{metric_key_prefix}_seconds"] = round(time.perf_counter() - started, 1)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _announced(self, answers: Sequence[Answer]) -> Iterator[Answer]:
        """The answers one by one, each told to the callbacks first."""
        for answer in answers:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            yield answer

    # Saves hold the adapter alone.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model = self.accelerator.unwrap_model(self.model).model
        model.save_mask_adapter(output_dir or str(self.args.output_dir), torch.float32)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        trained = self.accelerator.unwrap_model(self.model).model
        adapter: Any = trained.mask_adapter
        stored = StoredMaskAdapter.read(resume_from_checkpoint)
        check_base(trained, stored.base)
        if stored.settings != adapter.settings:
            raise ValueError(
                f"A run with {stored.settings} cannot go on with {adapter.settings}: choose a new folder."
            )
        adapter.load_state_dict(stored.weights)


def train_mask_adapter(
    base: str | os.PathLike[str],
    answers: str | os.PathLike[str],
    args: MaskTrainingConfig,
    settings: MaskAdapterSettings | None = None,
    eval_answers: str | os.PathLike[str] | None = None,
    max_length: int = 640,
    dtype: str | torch.dtype = "bfloat16",
    adapter: str | os.PathLike[str] | None = None,
) -> MaskAdapterTrainer:
    """Trains a mask adapter, going on from the newest checkpoint in `args.output_dir` if there is one.

    A finished run goes on with a larger budget, and with more answers or other ones: they begin a new epoch. What is
    left of a run elsewhere is its adapter: `adapter` trains that one further, with a new optimizer and budget.

    Args:
        base: folder or Hub id of a WeDLM checkpoint.
        answers: JSONL file of its own answers, see [`load_answers`].
        args: settings of the training.
        settings: shape of a new adapter.
        eval_answers: JSONL file of greedy answers to measure acceptance on.
        max_length: longest prompt and answer, in tokens.
        dtype: of the base; the adapter trains in float32.
        adapter: folder or Hub id of a mask adapter of this base to begin with; it has its own `settings`.

    Returns:
        The trainer; the finished adapter, in `dtype`, is in `args.output_dir` where the budget is used up.

    Raises:
        ValueError: for `settings` beside an `adapter`, and for an adapter of another base.
    """
    if settings and adapter:
        raise ValueError(f"The adapter {str(adapter)!r} has its own settings: leave {settings} out.")
    model = load_model(base, dtype=dtype).eval()
    torch.manual_seed(args.seed)
    if adapter:
        load_mask_adapter(model, adapter, is_trainable=True)
    else:
        add_mask_adapter(model, settings)
    trainer = MaskAdapterTrainer(
        model,
        args,
        load_answers(answers, max_length),
        load_answers(eval_answers, 10**9) if eval_answers else None,
    )
    resume = None
    if any(Path(str(args.output_dir)).glob("checkpoint-*")):
        resume = str(newest_complete_checkpoint(Path(str(args.output_dir))))
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        model.save_mask_adapter(str(args.output_dir))
    return trainer


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m wedlm_hf.adapters.trainer", description=__doc__)
    for name in ("base", "answers", "out"):
        parser.add_argument(name)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--mask-rows", type=int)
    parser.add_argument("--session-minutes", type=float)
    parser.add_argument("--save-minutes", type=float, default=10.0)
    parser.add_argument("--eval-answers")
    parser.add_argument("--adapter", help="mask adapter to begin with; default: a new one")
    parser.add_argument("--rank", type=int, help="of a new adapter")
    parser.add_argument("--head-width", type=int, help="of a new adapter")
    parser.add_argument("--num-masks", type=int, default=5)
    parser.add_argument("--cut-stride", type=int, default=3)
    parser.add_argument("--batch-slots", type=int, default=640)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    args = MaskTrainingConfig(
        output_dir=options.out,
        minutes=options.minutes,
        mask_rows=options.mask_rows,
        session_minutes=options.session_minutes,
        save_minutes=options.save_minutes,
        num_masks=options.num_masks,
        cut_stride=options.cut_stride,
        batch_slots=options.batch_slots,
        learning_rate=options.learning_rate,
        seed=options.seed,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="gloo" if not torch.cuda.is_available() and "WORLD_SIZE" in os.environ else None,
    )
    shape = {name: value for name in ("rank", "head_width") if (value := getattr(options, name)) is not None}
    settings = MaskAdapterSettings(**shape) if shape else None
    train_mask_adapter(options.base, options.answers, args, settings, options.eval_answers, adapter=options.adapter)


if __name__ == "__main__":
    main()
