"""What evaluation reports: sums over tokens that are divided once, and tokens per forward of real decoding.

`B` sequences of the batch, `T` physical rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .collator import DataCollatorForDualStreamMasking
from .streams import IGNORE_INDEX


def evaluation_sums(
    batch: Mapping[str, torch.Tensor], output: Any, collator: DataCollatorForDualStreamMasking
) -> dict[str, torch.Tensor]:
    """Sums over the tokens of each sequence of a batch, from the model's output on it: pairs of a sum and, under
    the same name and `/count`, of what to divide it by, every tensor `(B,)` float64. Over sequences, batches and
    processes they simply add up."""
    has_target, in_memory = batch["targets"] != IGNORE_INDEX, batch["stream_ids"] == 0
    memory, masked = has_target & in_memory, has_target & ~in_memory
    inverse_ratio = batch["loss_weights"].double() * (1 + collator.ar_weight) * collator.num_copies
    nll, correct = output.token_nll.double(), output.correct.double()
    cells = {"ar_nll": (nll, memory), "ar_accuracy": (correct, memory), "mask_accuracy": (correct, masked)}
    quarter = (4 / inverse_ratio.clamp(min=1)).sub(1e-4).ceil()  # γ of the block: (0, ¼], (¼, ½], (½, ¾], (¾, 1]
    for part in (1, 2, 3, 4):
        cells[f"mask_nll_ratio_{25 * part}"] = nll, masked & (quarter == part)
    size, offset = collator.block_size, batch["position_ids"] % collator.block_size
    for first in [0, *(2**power for power in range((size - 1).bit_length()))]:  # 0, 1, 2-3, 4-7, …
        last = min(max(2 * first, 1), size) - 1
        name = f"accuracy_offset_{first}" + (f"_{last}" if last > first else "")
        cells[name] = correct, masked & (offset >= first) & (offset <= last)
    sums = {"elbo_nll": (nll * inverse_ratio * masked).sum(-1) / collator.num_copies}
    sums["elbo_nll/count"] = (batch["labels"][..., 1:] != IGNORE_INDEX).sum(-1).double()
    for name, (values, where) in cells.items():
        sums[name], sums[f"{name}/count"] = (values * where).sum(-1), where.sum(-1).double()
    return sums


def divide(sums: Mapping[str, float]) -> dict[str, float]:
    """Each sum over its count; a name without any token is left out."""
    names = [name for name in sums if not name.endswith("/count")]
    return {name: sums[name] / sums[f"{name}/count"] for name in names if sums[f"{name}/count"] > 0}


def prompt_of(example: Mapping[str, Any]) -> list[int]:
    """What comes before the first supervised token of the first document; of raw text, its first tokens."""
    length = int(example["seq_lengths"][0]) if "seq_lengths" in example else len(example["input_ids"])
    labels = list(example["labels"])[:length]
    end = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), 0)
    return list(example["input_ids"])[: end if end > 1 else min(16, length // 2)]


@torch.no_grad()
def tokens_per_forward(model: Any, prompts: Sequence[list[int]], max_new_tokens: int, device: torch.device) -> float:
    """Answers prompts by streaming parallel decoding, greedily, one at a time, with the model's own settings."""
    new_tokens = forwards = 0
    how = {"strategy": "wedlm", "do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": max_new_tokens}
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **how)
        new_tokens += int(output.stats.new_tokens.sum())
        forwards += int(output.stats.forwards.sum())
    return new_tokens / max(forwards, 1)
