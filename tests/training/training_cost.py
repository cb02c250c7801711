"""What a training step costs, next to a plain implementation of the same loss: dense mask, all blocks, all logits.

    PYTHONPATH=tests:examples/wedlm-nano python tests/training/training_cost.py

times both in turn on half-supervised samples of 1,024 tokens, with a vocabulary of 32,768, and prints clean tokens/s.
"""

import time
from statistics import median

import torch
from tiny import EOS, MASK, tiny_model, tiny_tokenizer
from torch.nn import functional as F

from wedlm_hf.modeling_wedlm import WeDLMForCausalLM
from wedlm_hf.training import DataCollatorForDualStreamMasking

LENGTH = 1024
BLOCK = 32
Batch = dict[str, torch.Tensor]


def cost_model() -> WeDLMForCausalLM:
    """Tiny, but for its vocabulary of 32,768."""
    return tiny_model(vocab_size=32_768, hidden_size=64, intermediate_size=192, max_position_embeddings=LENGTH).train()


def samples(count: int) -> list[dict[str, list[int]]]:
    """`count` samples of random tokens; the second half of each is an answer."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for _ in range(count):
        tokens = [*torch.randint(4, 32_768, (LENGTH - 1,), generator=generator).tolist(), EOS]
        result.append({"input_ids": tokens, "labels": [-100] * (LENGTH // 2) + tokens[LENGTH // 2 :]})
    return result


def collate(examples: list[dict[str, list[int]]]) -> Batch:
    """Ours. The tiny tokenizer only says which tokens are special."""
    return DataCollatorForDualStreamMasking(tiny_tokenizer(), block_size=BLOCK, num_eos=1)(examples)


def dense_batch(examples: list[dict[str, list[int]]], batch: Batch) -> Batch:
    """The same masks as in `batch`, as two whole streams of `LENGTH` slots under one additive 4D mask."""
    rows: list[Batch] = []
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
                "input_ids": torch.cat([tokens, tokens.masked_fill(masked, MASK)[order]]),
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
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
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


def main(rows: int = 2, repeats: int = 5) -> None:
    """Times both in turn, after a warm-up."""
    model, examples = cost_model(), samples(rows)
    batch = collate(examples)
    dense = dense_batch(examples, batch)
    times: dict[str, list[float]] = {"dense": [], "ours": []}
    for _ in range(repeats + 1):
        for name, loss, inputs in (("dense", dense_loss, dense), ("ours", our_loss, batch)):
            start = time.perf_counter()
            loss(model, inputs).backward()
            times[name].append(time.perf_counter() - start)
            model.zero_grad()
    speeds = {name: rows * LENGTH / median(seconds[1:]) for name, seconds in times.items()}
    print(", ".join(f"{name}: {speed:,.0f} tokens/s" for name, speed in speeds.items()))
    print(f"ratio: {speeds['ours'] / speeds['dense']:.2f} ({torch.get_num_threads()} threads, forward and backward)")


if __name__ == "__main__":
    main()
