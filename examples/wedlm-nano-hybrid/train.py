"""Trains a hybrid of 2 million weights from scratch, next-token loss alone: a base for a mask adapter.

What it does: builds a small stock `Qwen3_5ForCausalLM`, three layers of which keep a recurrent state and one attends,
and trains it with plain `transformers.Trainer` on the text of wedlm-nano's generators (its tokenizer, its training
split). It knows nothing of masks; `wedlm adapt` gives it drafts afterwards, from its own answers to prompts that this
script writes beside the weights (of the training split, too).

    python examples/wedlm-nano-hybrid/train.py --output-dir build/hybrid
    wedlm adapt build/hybrid build/hybrid-adapter --prompts build/hybrid/prompts.jsonl --minutes 25

Hardware: one thread of a CPU takes about 65 minutes; any GPU works too.

No gain yet: with an adapter of 115,395 mask rows (the second command, on a busy machine), the first held-out prompt of
each task was decoded at 1.00 tokens per forward and 0.83 of AR's speed on one thread, letters equal. 61 % of the
base's answers are right, and a step with masks takes 1.5 to 1.9 times an AR step.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

sys.path.append(str(Path(__file__).parents[1] / "wedlm-nano"))
from nano_tasks import TASKS, generate_samples

NANO = Path(__file__).parents[1] / "wedlm-nano"
MIXTURE = {"counting": 5, "arithmetic": 4, "sorting": 6, "json": 3, "chat": 5, "python": 3}
ENDLESS = 10**9
LONGEST = 192  # tokens; longer samples, a few functions of the standard library, are left out
PROMPTS = 3_000  # for `wedlm adapt`
SORTED = 16  # batches whose samples are sorted by length: less padding


def mixture(seed: int) -> Iterator[Any]:
    """Samples of all tasks, without end."""
    rng = random.Random(f"mixture/{seed}")
    streams = {task: generate_samples(task, ENDLESS, seed, split="train") for task in TASKS}
    while True:
        yield next(streams[rng.choices(list(MIXTURE), weights=list(MIXTURE.values()))[0]])


class ChatSamples(IterableDataset):
    """Samples without end: `input_ids`, and `labels` that are -100 outside the answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, batch_size: int, seed: int):
        self.tokenizer, self.batch_size, self.seed = tokenizer, batch_size, seed

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        rng, mixed = random.Random(self.seed), mixture(self.seed)
        while True:
            samples: list[dict[str, list[int]]] = []
            while len(samples) < SORTED * self.batch_size:
                if len((sample := self._encoded(next(mixed)))["input_ids"]) <= LONGEST:
                    samples.append(sample)
            samples.sort(key=lambda sample: len(sample["input_ids"]))
            for batch in rng.sample(range(SORTED), SORTED):
                yield from samples[batch * self.batch_size : (batch + 1) * self.batch_size]

    def _encoded(self, sample: Any) -> dict[str, list[int]]:
        encoded = self.tokenizer.apply_chat_template(
            [*sample.messages, {"role": "assistant", "content": sample.answers[0]}],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        return {"input_ids": encoded["input_ids"], "labels": [token if marked else -100 for token, marked in pairs]}


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right, where nothing sees the padding."""

    def padded(name: str, value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(sample[name]) for sample in samples], True, value)

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3_5ForCausalLM:
    """A stock Qwen3.5 with random weights."""
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def main(
    output_dir: Annotated[Path, typer.Option(help="Folder for the model; `checkpoints/` in it is for `--resume`.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 8_600,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="At its peak, from where it falls to 0.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights and samples.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the newest of `checkpoints/`.")] = False,
) -> None:
    """Train wedlm-nano-hybrid."""
    torch.set_float32_matmul_precision("medium")  # multiplies in bf16 where a CPU can
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    model = build_model(tokenizer)
    checkpoints = output_dir / "checkpoints"
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(checkpoints),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": steps // 4},
            warmup_steps=100,
            weight_decay=0.01,
            adam_beta2=0.98,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=25,
            save_steps=min(200, steps),
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=ChatSamples(tokenizer, batch_size, seed),
        data_collator=collate,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume and any(checkpoints.glob("checkpoint-*")))
    model.config.use_cache = True  # the trainer switched it off
    model.save_pretrained(output_dir)  # in float32, which decodes faster on a CPU without bfloat16 products
    tokenizer.save_pretrained(output_dir)
    messages = [sample.messages for sample, _ in zip(mixture(seed + 1), range(PROMPTS), strict=False)]
    lines = [json.dumps({"messages": each}) + "\n" for each in messages]
    (output_dir / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
