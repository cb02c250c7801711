"""Adapts a stock Qwen3 that was only ever trained AR: the same AR loss, several tokens per forward.

What it does: trains a small stock `Qwen3ForCausalLM` from scratch, AR alone, on lines that repeat a random motif;
converts it and continues training on the same raw text with the dual-stream loss, every token supervised (paper §6.1,
`examples/recipes/adapt.yaml`); prints AR loss and tokens per forward on held-out lines, before and after. Against the
paper: a model and a text small enough for a CPU, a larger learning rate, smaller blocks, and four times the weight on
the AR loss, without which so small a model gives up some of it.

    python examples/adaptation/train.py --output-dir build/adaptation

Hardware: a CPU core takes two minutes.
"""

import random
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import (
    DataCollatorForLanguageModeling,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from wedlm_hf.training import WeDLMSFTConfig, WeDLMSFTTrainer

sys.path.append(str(Path(__file__).parents[1] / "wedlm-nano"))
from nano_tokenizer import train_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def texts(count: int, seed: int) -> Dataset:
    """Lines such as `kbdx kbdx kbdx …`: four random letters, eight times. Only the first four are hard to guess."""
    rng = random.Random(seed)
    return Dataset.from_dict({"text": [" ".join(["".join(rng.choices(LETTERS, k=4))] * 8) for _ in range(count)]})


def train_stock(folder: Path, steps: int, seed: int) -> None:
    """A stock Qwen3 and its tokenizer, without a mask token, trained AR."""
    tokenizer = train_tokenizer(["byte by byte"], 260, min_frequency=10**9)
    tokenizer.mask_token = None
    set_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    data = texts(4000, seed).map(
        lambda example: tokenizer(example["text"] + tokenizer.eos_token), remove_columns="text"
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder),
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            seed=seed,
        ),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(str(folder))
    tokenizer.save_pretrained(folder)


def adapt(source: Path, folder: Path, steps: int, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Continued training with the dual-stream loss; the evaluation before and after."""
    args = WeDLMSFTConfig(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=1,
        learning_rate=2e-3,
        ar_weight=4.0,
        block_size=16,
        suffix_probability=0.5,
        ratio_sampler="stratified",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        eval_decoding_samples=20,
        eval_decoding_tokens=24,
        eval_strategy="steps",
        eval_steps=100,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    trainer = WeDLMSFTTrainer(str(source), args, texts(4000, seed + 1), texts(200, seed + 2))
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    return before, after


def main(
    output_dir: Annotated[Path, typer.Option(help="Folder for the stock model and the adapted one.")],
    stock_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the AR training.")] = 600,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the adaptation.")] = 600,
    seed: int = 0,
) -> None:
    """Train a stock Qwen3 AR, adapt it, and compare."""
    train_stock(output_dir / "stock", stock_steps, seed)
    before, after = adapt(output_dir / "stock", output_dir / "adapted", steps, seed)
    table = Table("held-out", "stock weights", "adapted")
    for name in ("eval_ar_nll", "eval_elbo_nll", "eval_tokens_per_forward"):
        table.add_row(name.removeprefix("eval_"), f"{before[name]:.4f}", f"{after[name]:.4f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
