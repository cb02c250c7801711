"""What a run of `wedlm train` says: what it is about to do, how far it has come, and a picture of its curves."""

import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import has_length

from ..console.progress import Show, stage
from ..modeling_wedlm.dual_stream import COLUMNS, leave_out_repeats
from .streams import IGNORE_INDEX

CURVE = "curve.png"
# Names of the log, and what they are called where they are shown.
SHOWN = {
    "ar_nll": "AR {:.2f} nats",
    "mask_nll": "masks {:.2f} nats",
    "eval_tokens_per_forward": "{:.2f} tokens/forward",
}
# What is known of one small model; docs/train.md has it in more words.
MASKS_WANT = (
    "Masks learn later than the next-token head: a narrow task (forms as JSON) gave SmolLM2-135M 3.0 tokens per "
    "forward after 600 examples and 5.2 after 1,200; open ones want far more."
)
# Examples that the tokens of a large dataset are estimated on, and those that the rows are.
_COUNTED, _LAID_OUT = 2000, 64


class RunProgress(TrainerCallback):
    """Says what will be done before the first step, and shows the time left of training and of each evaluation: one
    line at a time, since older versions of rich have no two. For one process of a run alone."""

    def __init__(self, trainer: Any, console: Console):
        self.trainer, self.console = trainer, console
        self._stack = ExitStack()
        self._title = ""
        self._show: Show | None = None
        self._note: dict[str, float] = {}
        self._evaluated = 0

    def _tell(self, title: str, share: float, note: str) -> None:
        if title != self._title:
            self.close()
            self._title, self._show = title, self._stack.enter_context(stage(self.console, title))
        if self._show is not None:
            self._show(share, note)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Prints the plan."""
        for line in plan(self.trainer, state.max_steps - state.global_step):
            self.console.print(line, highlight=False, soft_wrap=True)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Moves the line of the training."""
        words = [f"step {state.global_step:,}"]
        words += [text.format(self._note[name]) for name, text in SHOWN.items() if name in self._note]
        self._tell("Training", state.global_step / state.max_steps, ", ".join(words))

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Moves the line of an evaluation; decoding, which ends it, has one of its own."""
        self._evaluated += 1
        count = len(eval_dataloader) if has_length(eval_dataloader) else 0
        if self._evaluated < count:
            self._tell("Evaluating", self._evaluated / count, "")
        else:
            self.close()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keeps what the line shows."""
        self._note |= {name: value for name, value in (logs or {}).items() if name in SHOWN}

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Ends the count of an evaluation."""
        self._evaluated = 0

    def close(self) -> None:
        """Closes the line, whatever has ended the work."""
        self._title, self._show = "", None
        self._stack.close()


def plan(trainer: Any, steps: int) -> list[str]:
    """What a run will do, in a few lines: tokens, steps, rows, and about how long that takes."""
    args, data = trainer.args, trainer.train_dataset
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    some: list[Any] = []
    if isinstance(data, IterableDataset):
        lines = [f"A stream, in {steps:,} steps of {size}."]
    else:
        stride = max(1, len(data) // _COUNTED)
        counted = [data[index] for index in range(0, len(data), stride)]
        tokens = sum(len(example["input_ids"]) for example in counted)
        supervised = sum(label != IGNORE_INDEX for example in counted for label in example["labels"])
        scale, about = len(data) / len(counted), "About " if stride > 1 else ""
        lines = [
            f"{about}{round(scale * tokens):,} tokens, {round(scale * supervised):,} of them to learn, "
            f"{steps * size / len(data):.3g} times in {steps:,} steps."
        ]
        some = counted[:_LAID_OUT]
        batch = trainer.data_collator(some)
        left = leave_out_repeats({name: batch[name] for name in COLUMNS}, batch["targets"]).inputs["stream_ids"]
        rows = int((left >= 0).sum()) / int((batch["stream_ids"] == 0).sum())
        lines.append(f"A token takes {rows:.1f} rows of a forward: its own, and masks.")
    if some and args.world_size == 1:
        seconds = _micro_step(trainer, some[: args.per_device_train_batch_size]) * args.gradient_accumulation_steps
        lines[-1] += f" About {timedelta(seconds=round(seconds * steps))} on this machine, evaluations not counted."
    return [*lines, MASKS_WANT]


def _micro_step(trainer: Any, examples: list[Any]) -> float:
    """Seconds of a forward and a backward of one micro-batch, the second of two. No weight and no random state
    changes."""
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        inputs = {name: value.to(trainer.args.device) for name, value in trainer.data_collator(examples).items()}
        trainer.model.train()
        seconds = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            with trainer.compute_loss_context_manager():
                loss = trainer.model_wrapped(**inputs).loss
            loss.backward()
            loss.item()  # waits for the device
            seconds = time.perf_counter() - begin
            trainer.model.zero_grad()
    return seconds


def draw_curve(history: list[dict[str, Any]], folder: Path) -> Path | None:
    """Draws what the log of a trainer says of the losses and of decoding, over its steps. Returns the file; None where
    there is nothing to draw."""

    def series(name: str) -> tuple[list[int], list[float]]:
        found = [(entry["step"], entry[name]) for entry in history if name in entry]
        return [step for step, _ in found], [value for _, value in found]

    lines = {
        "AR loss, training": "ar_nll", "mask loss, training": "mask_nll", "AR loss, held out": "eval_ar_nll",
        "mask bound, held out": "eval_elbo_nll",
    }  # fmt: skip
    drawn = {label: series(name) for label, name in lines.items() if series(name)[0]}
    if not drawn:
        return None
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    losses, decoding = figure.subplots(1, 2)
    for label, (steps, values) in drawn.items():
        losses.plot(steps, values, label=label, marker="." if len(steps) < 30 else "")
    losses.set(xlabel="step", ylabel="nats per token", title="Loss")
    losses.legend()
    decoding.plot(*series("eval_tokens_per_forward"), marker=".")
    decoding.axhline(1, linestyle=":", color="grey")
    decoding.set(xlabel="step", ylabel="tokens per forward", title="Verified decoding, held out (1: AR)")
    file = folder / CURVE
    figure.savefig(file, dpi=120)
    return file
