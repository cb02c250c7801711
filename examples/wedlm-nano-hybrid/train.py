"""Turns wedlm-nano into a hybrid of 2 million weights: a base for a mask adapter.

What it does: builds a small stock `Qwen3_5ForCausalLM`, three layers of which keep a recurrent state and one attends.
It takes wedlm-nano's weights, but for the attention of these three layers. Their recurrent mixers learn from nano:
first, each by itself, what the attention in its place gives; then all weights what nano's next-token head says on the
text of nano's generators (training split). It knows nothing of masks; `wedlm adapt` gives it drafts afterwards, from
its own answers to prompts that this script writes beside the weights (of the training split, too).

    python examples/wedlm-nano-hybrid/train.py --output-dir build/hybrid
    wedlm adapt build/hybrid build/hybrid-adapter --prompts build/hybrid/prompts.jsonl --minutes 25

Hardware: one thread of a CPU takes about 40 minutes; any GPU works too.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file
from torch.nn import functional as F
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
HEADS = 6
# Nano's third layer is the hardest to learn: its attention stays.
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
ALONE = 0.15  # share of the steps in which each mixer learns by itself
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


def build_model(tokenizer: PreTrainedTokenizerBase, kinds: Sequence[str] = LAYERS) -> Qwen3_5ForCausalLM:
    """A stock Qwen3.5 with wedlm-nano's weights; layers that keep a state have random mixers."""
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=len(kinds),
        layer_types=list(kinds),
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    weights = load_file(NANO / "model.safetensors")
    shared = model.state_dict().keys() & weights.keys()
    model.load_state_dict({name: _converted(name, weights[name]) for name in shared}, strict=False)
    return model


def _converted(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight of Qwen3 as Qwen3.5 has it: norms count from 1, and attention has a gate, here half open."""
    if name.endswith("norm.weight"):
        return weight - 1
    if name.endswith("q_proj.weight"):
        queries = weight.unflatten(0, (HEADS, -1))
        return torch.cat([queries, torch.zeros_like(queries)], 1).flatten(0, 1)
    return 2 * weight if name.endswith("o_proj.weight") else weight


class Imitation(Trainer):
    """Trains a hybrid to do what its teacher does."""

    def __init__(self, *args: Any, teacher: Qwen3_5ForCausalLM, alone: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.teacher, self.alone = teacher.eval().to(self.args.device), alone

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """In the first `alone` steps, the error of each mixer in its teacher's place, relative to the variance there;
        then the divergence of the next-token distributions at the answers."""
        ids, taught = inputs["input_ids"], inputs["labels"][:, 1:] != -100
        if self.state.global_step < self.alone:
            return self._errors_of_mixers(ids)
        with torch.no_grad():
            expected = self.teacher(input_ids=ids).logits[:, :-1][taught].log_softmax(-1)
        found = model(input_ids=ids).logits[:, :-1][taught].log_softmax(-1)
        return F.kl_div(found, expected, log_target=True, reduction="batchmean")

    def _errors_of_mixers(self, ids: torch.Tensor) -> torch.Tensor:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        hooks = [
            layer.self_attn.register_forward_hook(
                lambda _, args, named, output: seen.append((named["hidden_states"], output[0])), with_kwargs=True
            )
            for layer in self.teacher.model.layers
        ]
        with torch.no_grad():
            self.teacher.model(input_ids=ids)
        for hook in hooks:
            hook.remove()
        is_text, errors = ids != self.teacher.config.pad_token_id, []
        for layer, (hidden, output) in zip(self.model.model.layers, seen, strict=True):
            if hasattr(layer, "linear_attn"):
                error = (layer.linear_attn(hidden_states=hidden) - output)[is_text]
                errors.append(error.square().sum() / output[is_text].var(0).sum() / len(error))
        return torch.stack(errors).sum()


def main(
    output_dir: Annotated[Path, typer.Option(help="Folder for the model; `checkpoints/` in it is for `--resume`.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Of the mixers, at its peak, from where it falls to 0.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights and samples.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the newest of `checkpoints/`.")] = False,
) -> None:
    """Train wedlm-nano-hybrid."""
    torch.set_float32_matmul_precision("medium")  # multiplies in bf16 where a CPU can
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    model = build_model(tokenizer)
    checkpoints = output_dir / "checkpoints"
    new, old = [], []
    for name, parameter in model.named_parameters():
        (new if ".linear_attn." in name else old).append(parameter)
    groups = [{"params": new, "lr": learning_rate}, {"params": old, "lr": 0.3 * learning_rate}]
    trainer = Imitation(
        teacher=build_model(tokenizer, ["full_attention"] * len(LAYERS)),
        alone=int(ALONE * steps),
        model=model,
        optimizers=(torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01), None),
        args=TrainingArguments(
            output_dir=str(checkpoints),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": steps // 3},
            warmup_steps=50,
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
