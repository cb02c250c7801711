"""Trains wedlm-nano from scratch with plain `transformers.Trainer`, on text that this script generates.

What it does: builds a byte-level BPE tokenizer and a 1.9M-parameter WeDLM, and minimises the joint dual-stream + AR
loss on an endless stream of synthetic chat samples (nano_tasks.py, training split). Against the paper: the
model starts from random weights rather than from an AR checkpoint, and most blocks use suffix masks, which a small
model decodes from better.

    python examples/wedlm-nano/train.py --output-dir build/wedlm-nano

Hardware: two CPU cores with bf16 instructions take about two and a half hours; any GPU works too.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from nano_tasks import TASKS, generate_samples
from nano_tokenizer import train_tokenizer
from torch.utils.data import IterableDataset
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from wedlm_hf.modeling_wedlm import WeDLMConfig, WeDLMForCausalLM
from wedlm_hf.modeling_wedlm.hub import remove_hub_files
from wedlm_hf.training.collator import DataCollatorForDualStreamMasking


@dataclass(frozen=True)
class Phase:
    """Part of the training, with a learning rate schedule of its own.

    Attributes:
        steps: optimizer steps.
        learning_rate: at its peak, from where it falls to 0 along a cosine.
        block_size: B.
        ar_weight: a.
        mixtures: shares of the tasks in the stream, from a step on.
        suffix_probability: share of blocks whose masks are a suffix.
        num_copies: prediction copies of each sample.
    """

    steps: int
    learning_rate: float
    block_size: int
    ar_weight: float
    mixtures: dict[int, dict[str, float]]
    suffix_probability: float = 0.7
    num_copies: int = 1


PHASES = (
    # Arithmetic first, whose working is longest to learn; then all tasks about evenly by tokens; at last those whose
    # masks learn late.
    Phase(
        steps=5_000,
        learning_rate=3e-3,
        block_size=32,
        ar_weight=1.0,
        mixtures={
            0: {"counting": 2, "arithmetic": 5, "sorting": 4, "json": 2, "chat": 2, "python": 2},
            1_500: {"counting": 5, "arithmetic": 3, "sorting": 6, "json": 4, "chat": 5, "python": 2},
            3_500: {"counting": 7, "arithmetic": 1.5, "sorting": 6, "json": 1.5, "chat": 6, "python": 5},
        },
    ),
    # The mask head learns later than the next-token head: shorter blocks have more masks right behind known text.
    Phase(
        steps=1_000,
        learning_rate=1.5e-3,
        block_size=16,
        ar_weight=0.6,
        mixtures={0: {"counting": 9, "arithmetic": 3, "sorting": 5, "json": 1.5, "chat": 9, "python": 3}},
    ),
    # Several prediction copies share one memory stream: more masks for the time.
    Phase(
        steps=6_000,
        learning_rate=2e-3,
        block_size=16,
        ar_weight=0.6,
        mixtures={0: {"counting": 9, "arithmetic": 2.5, "sorting": 8, "json": 1.5, "chat": 9, "python": 3.5}},
        suffix_probability=0.8,
        num_copies=2,
    ),
    # The same at a lower rate and in longer blocks: masks further behind the known text.
    Phase(
        steps=1_500,
        learning_rate=1.2e-3,
        block_size=24,
        ar_weight=1.0,
        mixtures={0: {"counting": 6, "arithmetic": 8, "sorting": 6, "json": 2, "chat": 6, "python": 3}},
        suffix_probability=0.8,
        num_copies=2,
    ),
    # Two copies of a long sum do not fit into a row, so the last two phases saw short ones only. All of them again.
    Phase(
        steps=800,
        learning_rate=1e-3,
        block_size=16,
        ar_weight=1.0,
        mixtures={0: {"counting": 5, "arithmetic": 14, "sorting": 5, "json": 2, "chat": 5, "python": 3}},
        suffix_probability=0.8,
    ),
)
VOCABULARY_SAMPLES_PER_TASK = 2000
ENDLESS = 10**9
OPEN_ROWS = 16


class ChatSampleStream(IterableDataset):
    """Tokenised training samples without end, packed into rows that fill `row_size` slots of the dual stream.

    A row has `input_ids`, `labels` (-100 outside assistant turns) and `seq_lengths`. Samples too long for a row (a few
    functions of the standard library) are left out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        collator: DataCollatorForDualStreamMasking,
        mixtures: dict[int, dict[str, float]],
        row_size: int,
        rows_per_step: int,
    ):
        self.tokenizer = tokenizer
        self.collator = collator
        self.mixtures = mixtures
        self.row_size = row_size
        self.rows_per_step = rows_per_step

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        self.rows_yielded = 0
        rows: list[dict[str, list[int]]] = []  # rows that may still take a sample (first fit)
        free: list[int] = []
        for sample in self._samples():
            slots = len(self.collator([sample])["input_ids"][0])
            if slots > self.row_size:
                continue
            index = next((index for index, room in enumerate(free) if room >= slots), len(rows))
            if index == len(rows):
                if len(rows) == OPEN_ROWS:
                    fullest = free.index(min(free))
                    free.pop(fullest)
                    self.rows_yielded += 1
                    yield rows.pop(fullest)
                    index -= 1
                rows.append({"input_ids": [], "labels": [], "seq_lengths": []})
                free.append(self.row_size)
            rows[index]["input_ids"].extend(sample["input_ids"])
            rows[index]["labels"].extend(sample["labels"])
            rows[index]["seq_lengths"].append(len(sample["input_ids"]))
            free[index] -= slots

    def _samples(self) -> Iterator[dict[str, list[int]]]:
        seed = self.collator.seed
        rng = random.Random(seed)
        streams = {task: generate_samples(task, ENDLESS, seed, split="train") for task in TASKS}
        while True:
            step = self.rows_yielded // self.rows_per_step
            mixture = self.mixtures[max(start for start in self.mixtures if start <= step)]
            (task,) = rng.choices(list(mixture), weights=list(mixture.values()))
            sample = next(streams[task])
            encoded = self.tokenizer.apply_chat_template(
                [*sample.messages, {"role": "assistant", "content": sample.answers[0]}],
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
            labels = [token if marked else -100 for token, marked in pairs]
            yield {"input_ids": encoded["input_ids"], "labels": labels}


def build_tokenizer(vocab_size: int, seed: int) -> PreTrainedTokenizerBase:
    """A tokenizer trained on samples of every task."""
    samples = (
        sample
        for task in TASKS
        for sample in islice(generate_samples(task, ENDLESS, seed, split="train"), VOCABULARY_SAMPLES_PER_TASK)
    )
    return train_tokenizer((f"{sample.text}\n{sample.answers[0]}" for sample in samples), vocab_size)


def build_model(tokenizer: PreTrainedTokenizerBase) -> WeDLMForCausalLM:
    """A Qwen3-style WeDLM with random weights."""
    config = WeDLMConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = WeDLMForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def train(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    phase: Phase,
    output_dir: Path,
    batch_size: int,
    max_steps: int,
    seed: int,
    resume: bool,
) -> None:
    """One phase."""
    collator = DataCollatorForDualStreamMasking(
        tokenizer,
        block_size=phase.block_size,
        ar_weight=phase.ar_weight,
        ratio_sampler="stratified",
        suffix_probability=phase.suffix_probability,
        num_copies=phase.num_copies,
        seed=seed,
    )
    steps = min(phase.steps, max_steps)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output_dir),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=phase.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 10,
            weight_decay=0.01,
            adam_beta2=0.98,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=50,
            save_steps=min(500, steps),
            save_total_limit=2,
            dataloader_num_workers=1,
            remove_unused_columns=False,  # `seq_lengths` is for the collator, not for the model
            report_to="none",
            seed=seed,
        ),
        train_dataset=ChatSampleStream(tokenizer, collator, phase.mixtures, row_size=256, rows_per_step=batch_size),
        data_collator=collator,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume and any(output_dir.glob("checkpoint-*")))


def main(
    output_dir: Annotated[Path, typer.Option(help="Folder for the model; `checkpoints/` in it is for `--resume`.")],
    max_steps: Annotated[int, typer.Option(min=1, help="Most steps of a phase: for a try.")] = 1_000_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Packed rows per step.")] = 36,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 1536,
    seed: Annotated[int, typer.Option(help="Seed of weights, samples and noise.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the newest of `checkpoints/`.")] = False,
) -> None:
    """Train wedlm-nano."""
    set_seed(seed)
    tokenizer = build_tokenizer(vocab_size, seed)
    model = build_model(tokenizer)
    for number, phase in enumerate(PHASES):
        folder = output_dir / "checkpoints" / f"phase-{number + 1}"
        train(model, tokenizer, phase, folder, batch_size, max_steps, seed + number, resume)
    model.config.use_cache = True  # the trainer switched it off
    model.generation_config.masks_ready = True
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    # Loading marks a tokenizer as loaded: saved once more, it stays the same through any later save.
    AutoTokenizer.from_pretrained(output_dir, trust_remote_code=False).save_pretrained(output_dir)
    remove_hub_files(output_dir)  # who has the repository has the package


if __name__ == "__main__":
    typer.run(main)
