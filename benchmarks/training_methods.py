"""All weights trained with the dual stream, the paper's own way, beside a mask adapter: same base, answers, minutes.

    python benchmarks/training_methods.py train all-weights BASE ANSWERS.jsonl HELD_OUT.jsonl build/all --minutes 15 &
    python benchmarks/training_methods.py train adapter BASE ANSWERS.jsonl HELD_OUT.jsonl build/adapter --minutes 15
    python benchmarks/training_methods.py table build/all build/adapter

BASE is a WeDLM checkpoint, ANSWERS and HELD_OUT its own answers (see `adapters/answers.py`), HELD_OUT its greedy ones.
Each run trains on one thread, in bfloat16 (all weights: in autocast, the weights themselves in float32), and then
measures in float32: tokens per forward of verified decoding (each model
verified by itself), the next-token loss on the held-out answers, and how many greedy answers are still the base's. A
run whose training is finished measures again.
"""

import json
import resource
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from wedlm_hf.adapters.budget import MaskTrainingConfig, budget_schedule
from wedlm_hf.adapters.layout import load_answers
from wedlm_hf.adapters.trainer import train_mask_adapter
from wedlm_hf.eval.ar_head import ar_logits
from wedlm_hf.eval.decoders import AR, DECODERS, EXACT
from wedlm_hf.eval.files import write_text
from wedlm_hf.eval.measure import measure
from wedlm_hf.eval.prompts import Prompt
from wedlm_hf.modeling_wedlm.loading import load_model, load_tokenizer
from wedlm_hf.training import WeDLMSFTConfig, WeDLMSFTTrainer

DRAFTS = 4
LONGEST = 640  # tokens of a prompt and its answer
# Without branches, a failed draft costs a step without drafts: how sure a mask must be matters there.
DRAFTERS: dict[str, dict[str, Any]] = {
    "adapter": {f"{DRAFTS} drafts": {"window_size": DRAFTS}},
    "all-weights": {
        f"{DRAFTS} drafts, entropy < {limit:g}": {"window_size": DRAFTS + 1, "entropy_threshold": limit}
        for limit in (1.0, 2.0, 1e9)
    },
}


class Method(StrEnum):
    """What is trained."""

    ALL_WEIGHTS = "all-weights"
    ADAPTER = "adapter"


class TimedTrainer(WeDLMSFTTrainer):
    """Trains until `seconds` have passed; the learning rate follows the clock."""

    seconds: float
    lr_scheduler: Any
    optimizer: Any
    _began: float

    def used(self) -> float:
        """The share of the time that has passed."""
        return min(1.0, (time.monotonic() - self._began) / self.seconds)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """That of mask adapters."""
        self._began = time.monotonic()
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, budget_schedule(self.args, self.used, final=0.05))
        self._created_lr_scheduler = True
        return self.lr_scheduler


class _StopInTime(TrainerCallback):
    def __init__(self, trainer: TimedTrainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = self.trainer.used() >= 1


def train_all_weights(base: str, answers: Path, out: Path, minutes: float, learning_rate: float) -> dict[str, Any]:
    """Dual-stream training of every weight; the model is left in `out`. Returns what it was trained on."""
    rows = [(answer["prompt_ids"], answer["response_ids"]) for answer in load_answers(answers, LONGEST)]
    dataset = Dataset.from_list(
        [{"input_ids": prompt + response, "labels": [-100] * len(prompt) + response} for prompt, response in rows]
    )
    args = WeDLMSFTConfig(
        output_dir=str(out),
        learning_rate=learning_rate,
        warmup_steps=10,
        num_train_epochs=10_000,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_length=LONGEST,
        save_strategy="no",
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        gradient_checkpointing=False,
    )
    trainer = TimedTrainer(base, args, dataset)
    trainer.seconds = 60 * minutes
    trainer.add_callback(_StopInTime(trainer))
    trainer.train()
    trainer.save_model()
    logs = [entry for entry in trainer.state.log_history if "mask_nll" in entry]
    (out / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in logs), encoding="utf-8")
    return {"steps": trainer.state.global_step, "passes": trainer.state.epoch}


def train_adapter(base: str, answers: Path, out: Path, minutes: float, learning_rate: float) -> dict[str, Any]:
    """A mask adapter in `out`. Returns what it was trained on."""
    args = MaskTrainingConfig(
        output_dir=str(out),
        minutes=minutes,
        save_minutes=1e9,
        learning_rate=learning_rate,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = train_mask_adapter(base, answers, args, max_length=LONGEST)
    return {"steps": trainer.state.global_step, "passes": trainer.state.epoch, "mask_rows": trainer.budget.mask_rows}


def next_token_loss(model: Any, answers: list[dict[str, Any]]) -> float:
    """Nats per token of the answers, by the next-token head."""
    total = torch.zeros((), dtype=torch.float64)
    for answer in answers:
        logits = ar_logits(model, answer["prompt_ids"], answer["response_ids"])
        total += F.cross_entropy(logits, torch.tensor(answer["response_ids"]), reduction="sum").double()
    return float(total) / sum(len(answer["response_ids"]) for answer in answers)


def evaluate(base: str, method: Method, out: Path, held_out: Path, max_new_tokens: int) -> dict[str, Any]:
    """What became of the base."""
    answers = load_answers(held_out, 10**9)
    tokenizer, model = load_tokenizer(base), load_model(base, dtype=torch.float32).eval()
    prompts = [Prompt.of("", tokens=answer["prompt_ids"]) for answer in answers]
    shared = {"max_new_tokens": max_new_tokens, "repetition_penalty": 1.0, "do_sample": False}
    ar = {**DECODERS[AR], **shared}
    before = next_token_loss(model, answers)
    own = [row["tokens"] for row in measure(model, tokenizer, prompts, {AR: ar})]
    if method is Method.ADAPTER:
        model.load_mask_adapter(out)
    else:
        model = load_model(out, dtype=torch.float32).eval()
    exact = {**DECODERS[EXACT], **shared, "adaptive_window": False}
    drafters = {name: {**exact, **options} for name, options in DRAFTERS[method].items()}
    rows = measure(model, tokenizer, prompts, {AR: ar} | drafters, title="Measuring")
    found = {name: [row for row in rows if row["decoder"] == name] for name in (AR, *drafters)}
    now = [row["tokens"] for row in found[AR]]
    return {
        "answers": len(answers),
        "loss_before": before,
        "loss_after": next_token_loss(model, answers),
        "answers_of_the_base": sum(map(list.__eq__, now, own)),
        "tokens_as_the_base": sum(_shared_start(*pair) for pair in zip(now, own, strict=True)) / sum(map(len, own)),
        "tokens_per_forward": {
            name: sum(row["new_tokens"] for row in found[name]) / sum(row["forwards"] for row in found[name])
            for name in drafters
        },
        "verified": {
            name: sum(row["tokens"] == tokens for row, tokens in zip(found[name], now, strict=True))
            for name in drafters
        },
    }


def _shared_start(one: list[int], other: list[int]) -> int:
    """How many tokens two answers share before they part."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)


@app.command()
def train(
    method: Method,
    base: str,
    answers: Path,
    held_out: Path,
    out: Path,
    minutes: float = 15.0,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak; default: 2e-4 for all weights, 1e-3 for an adapter.")
    ] = None,
    threads: int = 1,
    max_new_tokens: int = 96,
) -> None:
    """Train and measure; what was found is in OUT/result.json."""
    torch.set_num_threads(threads)
    summary = out / "training.json"
    if not summary.exists():
        is_adapter = method is Method.ADAPTER
        run = train_adapter if is_adapter else train_all_weights
        trained = run(base, answers, out, minutes, learning_rate or (1e-3 if is_adapter else 2e-4))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # KiB on Linux
        write_text(summary, json.dumps({"method": method, "minutes": minutes, "peak_gb": peak, **trained}) + "\n")
    found = json.loads(summary.read_text()) | evaluate(base, method, out, held_out, max_new_tokens)
    write_text(out / "result.json", json.dumps(found, indent=2) + "\n")
    table([out])


@app.command()
def table(runs: list[Path]) -> None:
    """Print the results of some runs as a Markdown table."""
    columns = ("trained", "minutes", "passes", "peak GB", "tokens per forward", "verified = its own AR answer",
               "next-token loss before, after", "answers still the base's", "tokens before they part")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for run in runs:
        one = json.loads((run / "result.json").read_text())
        name, best = max(one["tokens_per_forward"].items(), key=lambda item: item[1])
        count = one["answers"]
        cells = (
            one["method"], f"{one['minutes']:g}", f"{one['passes']:.2f}", f"{one['peak_gb']:.1f}",
            f"{best:.2f} ({name})", f"{one['verified'][name]} of {count}",
            f"{one['loss_before']:.3f}, {one['loss_after']:.3f}", f"{one['answers_of_the_base']} of {count}",
            f"{one['tokens_as_the_base']:.0%}",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    app()
