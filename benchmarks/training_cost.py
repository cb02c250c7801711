"""What a training step costs, next to a plain implementation of the same loss: dense mask, all blocks, all logits.

    python benchmarks/training_cost.py
    python benchmarks/training_cost.py --shape qwen3-0.6b --dtype bfloat16 --attention flex_attention --device cuda
    python benchmarks/training_cost.py --shape smollm2-135m --against-ar

Times both in turn on half-supervised samples of 1,024 random tokens, and prints clean tokens/s and, on CUDA, memory.
`--against-ar` times next-token training of one sample instead, beside dual-stream training by some settings, with
all rows and without those that repeat the memory.
"""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
import typer
from torch.nn import functional as F

from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_tokenizer
from wedlm_hf.eval.measure import now
from wedlm_hf.modeling_wedlm import WeDLMConfig, WeDLMForCausalLM, dual_stream
from wedlm_hf.training import DataCollatorForDualStreamMasking

LENGTH = 1024
BLOCK = 32
Batch = dict[str, torch.Tensor]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "smollm2-135m": {
        "vocab_size": 49_153,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "qk_norm": False,
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "suffix masks, 0.7": {"suffix_probability": 0.7},
    "the same, blocks of 16, two copies": {
        "suffix_probability": 0.7, "block_size": 16, "num_copies": 2, "ratio_sampler": "stratified",
    },
}  # fmt: skip
# Tiny, but for its vocabulary.
SMALL: dict[str, Any] = {"vocab_size": 32_768, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


def random_model(shape: dict[str, Any], seed: int = 0) -> WeDLMForCausalLM:
    """In evaluation mode, without an end token."""
    ends = {"mask_token_id": shape["vocab_size"] - 1, "eos_token_id": None, "bos_token_id": None}
    torch.manual_seed(seed)
    return WeDLMForCausalLM(
        WeDLMConfig(**shape, max_position_embeddings=8192, tie_word_embeddings=True, **ends)
    ).eval()


def samples(count: int, vocabulary: int, length: int = LENGTH, prompt: float = 0.5) -> list[dict[str, list[int]]]:
    """`count` samples of random tokens; the first part of each is a prompt."""
    generator = torch.Generator().manual_seed(0)
    end = load_tokenizer(NANO).eos_token_id
    result = []
    for _ in range(count):
        tokens = [*torch.randint(4, vocabulary, (length - 1,), generator=generator).tolist(), end]
        begin = int(length * prompt)
        result.append({"input_ids": tokens, "labels": [-100] * begin + tokens[begin:]})
    return result


def collate(examples: list[dict[str, list[int]]], **settings: Any) -> Batch:
    """Ours. The tokenizer only says which tokens are special."""
    settings = {"block_size": BLOCK, "num_eos": 1} | settings
    return DataCollatorForDualStreamMasking(load_tokenizer(NANO), **settings)(examples)


def dense_batch(examples: list[dict[str, list[int]]], batch: Batch, dtype: torch.dtype = torch.float32) -> Batch:
    """The same masks as in `batch`, as two whole streams of `LENGTH` slots under one additive 4D mask."""
    mask_token, rows = load_tokenizer(NANO).mask_token_id, list[Batch]()
    for row, example in enumerate(examples):
        tokens, supervised = torch.tensor(example["input_ids"]), torch.tensor(example["labels"]) != -100
        is_mask = (batch["stream_ids"][row] > 0) & (batch["targets"][row] != -100)
        masked = torch.zeros(LENGTH, dtype=torch.bool)
        masked[batch["position_ids"][row][is_mask]] = True
        order = (torch.arange(LENGTH) // BLOCK * 2 + masked).argsort(stable=True)  # observed first within each block
        counts = [flags.view(-1, BLOCK).sum(-1).repeat_interleave(BLOCK) for flags in (supervised, masked)]
        next_token = torch.where(supervised, tokens, -100).roll(-1)
        next_token[-1] = -100
        rows.append(
            {
                "input_ids": torch.cat([tokens, tokens.masked_fill(masked, mask_token)[order]]),
                "position_ids": torch.cat([torch.arange(LENGTH), order]),
                "targets": torch.cat([next_token, torch.where(masked, tokens, -100)[order]]),
                "weights": torch.cat([torch.ones(LENGTH), (counts[0] / counts[1].clamp(min=1))[order]]) / 2,
            }
        )
    index = torch.arange(LENGTH)
    causal, block = index[:, None] >= index, index // BLOCK
    to_memory, to_prediction = block[:, None] > block, (block[:, None] == block) & causal
    visible = torch.cat(
        [torch.cat([causal, torch.zeros_like(causal)], dim=1), torch.cat([to_memory, to_prediction], dim=1)]
    )
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return stacked | {"attention_mask": mask.expand(len(rows), 1, -1, -1).contiguous()}


def our_loss(model: WeDLMForCausalLM, batch: Batch) -> torch.Tensor:
    """The model's own."""
    return model(**batch).loss


def dense_loss(model: WeDLMForCausalLM, batch: Batch) -> torch.Tensor:
    """All logits, then the weighted sum."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
    nll = F.cross_entropy(logits.float(), batch["targets"].flatten(), ignore_index=-100, reduction="none")
    supervised = len(batch["input_ids"]) * LENGTH // 2
    return (nll * batch["weights"].flatten()).sum() / supervised


def compare(model: WeDLMForCausalLM, rows: int, repeats: int, attention: str = "sdpa") -> dict[str, dict[str, float]]:
    """`tokens_per_second`, `loss` and, on CUDA, `peak_bytes` of `ours` under that attention, and of `dense` under
    sdpa; forward and backward, after a warm-up."""
    examples = samples(rows, model.config.vocab_size)
    batch = collate(examples)
    ways: dict[str, tuple[str, Callable[..., torch.Tensor], Batch]] = {
        "ours": (attention, our_loss, batch),
        "dense": ("sdpa", dense_loss, dense_batch(examples, batch, model.dtype)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, dict[str, float]] = {}
    for _ in range(repeats + 1):
        for name, (implementation, loss_of, inputs) in ways.items():
            model.set_attn_implementation(implementation)
            inputs = {key: values.to(model.device) for key, values in inputs.items()}
            if is_cuda := model.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(model.device)
            began = now(model)
            loss = loss_of(model, inputs)
            loss.backward()
            seconds[name].append(now(model) - began)
            found[name] = {"loss": float(loss.detach())}
            found[name] |= {"peak_bytes": torch.cuda.max_memory_allocated(model.device)} if is_cuda else {}
            del loss
            model.zero_grad()
    for name, times in seconds.items():
        found[name]["tokens_per_second"] = rows * LENGTH / median(times[1:])
    return found


def ar_table(model: WeDLMForCausalLM, length: int, prompt: float, repeats: int) -> Iterator[dict[str, Any]]:
    """For each setting: rows of a forward for each token, and the least time of a forward and backward over that of
    next-token training, in turn; with all rows, and without those that are left out."""
    (example,) = samples(1, min(model.config.vocab_size, 300), length, prompt)
    tokens = {name: torch.tensor([column], device=model.device) for name, column in example.items()}
    for name, settings in SETTINGS.items():
        batch = {column: values.to(model.device) for column, values in collate([example], **settings).items()}
        layout = {column: batch[column] for column in dual_stream.COLUMNS}
        left = dual_stream.leave_out_repeats(layout, batch["targets"]).inputs["stream_ids"]
        whole, compact = dual_stream.Compact.whole, dual_stream.leave_out_repeats
        ways: dict[str, Any] = {"ar": (tokens, whole), "all": (batch, whole), "now": (batch, compact)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats + 1):
            for way, (inputs, leave_out) in ways.items():
                with patch.object(dual_stream, "leave_out_repeats", leave_out):
                    began = now(model)
                    model(**inputs).loss.backward()
                    seconds[way].append(now(model) - began)
                model.zero_grad()
        least = {way: min(times[1:]) for way, times in seconds.items()}
        yield {
            "settings": name, "tokens": length, "supervised": f"{1 - prompt:.0%}",
            "rows, all": batch["stream_ids"].shape[1] / length, "rows": left.shape[1] / length,
            "time, all rows": least["all"] / least["ar"], "time": least["now"] / least["ar"],
        }  # fmt: skip


def main(
    shape: str = "",
    rows: int = 2,
    repeats: int = 5,
    dtype: str = "float32",
    attention: str = "sdpa",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    against_ar: bool = False,
) -> None:
    """Measure and print; `--shape` may be qwen3-0.6b or smollm2-135m; by default a tiny one with a vocabulary of
    32,768."""
    model = random_model(SHAPES[shape] if shape else SMALL).to(device=device, dtype=getattr(torch, dtype)).train()
    if against_ar:
        if rows != 2:
            raise typer.BadParameter("`--against-ar` times one sample: leave out `--rows`.")
        model.set_attn_implementation(attention)
        found_of = [ar_table(model, length, prompt, repeats) for length, prompt in ((256, 0.5), (512, 0.0))]
        print(pd.DataFrame([row for rows_of in found_of for row in rows_of]).to_markdown(index=False, floatfmt=".2f"))
        return
    found = compare(model, rows, repeats, attention)
    print("| form | " + " | ".join(name.replace("_", " ") for name in found["ours"]) + " |")
    print("|---|" + "---:|" * len(found["ours"]))
    for name, numbers in found.items():
        print(f"| {name} | " + " | ".join(f"{value:,.4g}" for value in numbers.values()) + " |")
    print(f"{dtype}, {attention}, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    typer.run(main)
