"""Teaches wedlm-nano a task it has never seen, by SFT or by LoRA, in minutes on a CPU.

What it does: fine-tunes `examples/wedlm-nano` with `WeDLMSFTTrainer` on "List backwards: …" (held-out prompts never
occur in training), with a share of the old tasks in the data so that they are not forgotten; then prints exact match
on held-out prompts by streaming parallel decoding and by AR decoding, before and after, for the new task and for the
old ones. Against the paper: a larger learning rate and smaller blocks, as befits a small model, and a share of suffix
masks.

    python examples/new-task/train.py --output-dir build/new-task
    python examples/new-task/train.py --output-dir build/new-task-lora --lora

Hardware: two CPU cores with bf16 instructions take about two minutes; any GPU works too.
"""

import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from wedlm_hf import WeDLMForCausalLM
from wedlm_hf.eval.prompts import Prompt
from wedlm_hf.training import WeDLMSFTConfig, WeDLMSFTTrainer

NANO = Path(__file__).parents[1] / "wedlm-nano"
sys.path.append(str(NANO))
from nano_tasks import TASKS, generate_samples, is_heldout  # noqa: E402

WORDS = (
    "black blue brown green grey pink red white yellow cat dog duck goat hamster horse parrot rabbit bag bike boat "
    "car chair coat cup hat kite lamp phone table bread cake cheese fish pasta rice salad soup"
).split()


def samples(seed: int, split: str) -> Iterator[Prompt]:
    """Endless samples of the new task: three to six words, listed backwards."""
    rng = random.Random(seed)
    while True:
        words = rng.sample(WORDS, rng.randint(3, 6))
        prompt = f"List backwards: {', '.join(words)}"
        if is_heldout(prompt) == (split == "heldout"):
            yield Prompt.of(prompt, task="backwards", answers=(", ".join(reversed(words)),))


def old_samples(count: int, seed: int, split: str) -> Iterator[Prompt]:
    """The same number of samples of each task that the model knows."""
    for task in TASKS:
        yield from generate_samples(task, count // len(TASKS), seed, split=split)


def dataset(samples: Iterator[Prompt]) -> Dataset:
    """Chat data."""
    turns = [[*sample.messages, {"role": "assistant", "content": sample.answers[0]}] for sample in samples]
    return Dataset.from_dict({"messages": turns})


@torch.no_grad()
def exact_match(
    model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, samples: list[Prompt], strategy: str
) -> tuple[float, float]:
    """Share of answers that are exactly the wanted ones, and tokens per forward."""
    right = new_tokens = forwards = 0
    for start in range(0, len(samples), 50):
        batch = samples[start : start + 50]
        inputs = tokenizer.apply_chat_template(
            [sample.messages for sample in batch],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        ).to(model.device)
        output = model.generate(**inputs, strategy=strategy, max_new_tokens=128, return_dict_in_generate=True)
        answers = output.sequences[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        right += sum(text.strip() == sample.answers[0] for text, sample in zip(texts, batch, strict=True))
        if strategy == "wedlm":
            new_tokens += int(output.stats.new_tokens.sum())
            forwards += int(output.stats.forwards.sum())
    return right / len(samples), new_tokens / forwards if forwards else 1.0


def evaluate(
    model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, sets: dict[str, list[Prompt]]
) -> dict[str, float]:
    """Exact match on held-out prompts by both decoders, and tokens per forward."""
    model.eval()
    scores = {}
    for name, prompts in sets.items():
        for strategy in ("wedlm", "ar"):
            scores[f"{name}, {strategy}"], parallelism = exact_match(model, tokenizer, prompts, strategy)
            if strategy == "wedlm":
                scores[f"{name}, tokens per forward"] = parallelism
    return scores


def fine_tune(
    output_dir: Path,
    rows: list[Prompt],
    sets: dict[str, list[Prompt]],
    *,
    lora: bool,
    steps: int,
    batch_size: int,
    seed: int,
) -> tuple[dict[str, float], dict[str, float]]:
    """Trains on `rows` and saves; the evaluation of `sets` before and after."""
    args = WeDLMSFTConfig(
        str(output_dir),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=1,
        learning_rate=4e-3 if lora else 1e-3,
        block_size=16,
        suffix_probability=0.7,
        ratio_sampler="stratified",
        packing=True,
        max_length=256,
        shuffle_dataset=True,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = WeDLMSFTTrainer(str(NANO), args, dataset(iter(rows)), peft_config=adapter if lora else None)
    before = evaluate(trainer.model, trainer.processing_class, sets)
    trainer.train()
    after = evaluate(trainer.model, trainer.processing_class, sets)
    trainer.save_model()
    return before, after


def main(
    output_dir: Annotated[Path, typer.Option(help="Folder for checkpoints and the model.")],
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter instead of all weights.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Packed rows of 256 tokens per step.")] = 8,
    examples: Annotated[int, typer.Option(min=6, help="Examples of the new task.")] = 4000,
    old_examples: Annotated[int, typer.Option(help="Examples of the old tasks, so that they are kept.")] = 2000,
    count: Annotated[int, typer.Option(min=6, help="Held-out prompts, of the new task and of the old ones.")] = 120,
    seed: int = 0,
) -> None:
    """Fine-tune wedlm-nano on a new task and compare before and after."""
    sets = {"new": list(islice(samples(1, "heldout"), count)), "old": list(old_samples(count, 1, "heldout"))}
    rows = [*islice(samples(seed, "train"), examples), *old_samples(old_examples, seed, "train")]
    before, after = fine_tune(output_dir, rows, sets, lora=lora, steps=steps, batch_size=batch_size, seed=seed)
    table = Table("held-out", "before", "after", title=f"{'LoRA' if lora else 'SFT'}, {steps} steps")
    for name in before:
        style = "{:.2f}" if "forward" in name else "{:.1%}"
        table.add_row(name, style.format(before[name]), style.format(after[name]))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
