"""What evaluation reports: sums over tokens that are divided once, and tokens per forward of real decoding.

`B` sequences of the batch, `T` physical rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..console.progress import track
from .collator import DataCollatorForDualStreamMasking
from .streams import IGNORE_INDEX

READY, LEAST_ANSWERS = 0.9, 10  # share of answers, and how many there must be


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
def decode(
    model: Any, prompts: Sequence[list[int]], max_new_tokens: int, device: torch.device, title: str = ""
) -> dict[str, float]:
    """Answers prompts greedily, one at a time: `tokens_per_forward` with verification, where rows cost nothing; and of
    the paper's decoder, with the model's own settings, `unverified_tokens_per_forward` and the share of its answers
    that are AR decoding's, `unverified_as_ar`; and how many there are, `decoded_prompts`. Shows its progress under a
    title, if one is given."""
    sums = dict.fromkeys(("tokens", "forwards", "free_tokens", "free_forwards", "same"), 0)
    how = {"strategy": "wedlm", "do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": max_new_tokens}
    how |= {"return_dict_in_generate": True}
    for prompt in track(prompts, title):
        ids = torch.tensor([prompt], device=device)
        mask = torch.ones_like(ids)
        exact = model.generate(ids, attention_mask=mask, verification="exact", window_size=None, slot_cost=0.0, **how)
        free = model.generate(ids, attention_mask=mask, verification="none", **how)
        sums["tokens"] += int(exact.stats.new_tokens.sum())
        sums["forwards"] += int(exact.stats.forwards.sum())
        sums["free_tokens"] += int(free.stats.new_tokens.sum())
        sums["free_forwards"] += int(free.stats.forwards.sum())
        sums["same"] += torch.equal(exact.sequences, free.sequences)
    return {
        "tokens_per_forward": sums["tokens"] / max(sums["forwards"], 1),
        "unverified_tokens_per_forward": sums["free_tokens"] / max(sums["free_forwards"], 1),
        "unverified_as_ar": sums["same"] / max(len(prompts), 1),
        "decoded_prompts": float(len(prompts)),
    }


def masks_are_ready(metrics: Mapping[str, float], prefix: str = "") -> bool:
    """Whether masks need no verification any more: of [`LEAST_ANSWERS`] or more, nine of ten are AR's, in fewer
    forwards."""
    names = ("unverified_as_ar", "unverified_tokens_per_forward", "decoded_prompts")
    same, tokens, count = (metrics[prefix + name] for name in names)
    return same >= READY and tokens > 1 and count >= LEAST_ANSWERS
