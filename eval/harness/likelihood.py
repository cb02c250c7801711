"""The block ELBO of a continuation: what the mask head says about a text, estimated with a standard error.

Where the AR head gives log p(continuation | context) exactly, the mask head gives a lower bound on it: block after
block, the mean over all numbers m of masks and all places of them of (n/m)·Σ log p(masked token | what its mask sees),
n being the block's scored tokens (paper Eq. 10). One draw of masks is an unbiased sample of that mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from ...training.collator import DataCollatorForDualStreamMasking
from ...training.log_probs import response_log_probs
from ...training.streams import IGNORE_INDEX


class Estimate(NamedTuple):
    """A block ELBO, nats: the mean of its samples, and the standard error of that mean (0 where masks cannot vary)."""

    value: float
    standard_error: float


@torch.no_grad()
def block_elbo(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[list[int], list[int]]],
    *,
    samples: int = 16,
    block_size: int = 32,
    seed: int = 0,
    batch_size: int = 1,
) -> list[Estimate]:
    """Estimate the block ELBO of each continuation after its context.

    The masks are a function of the seed, the number of the sample and the tokens alone.

    Args:
        model: a WeDLM model in evaluation mode, or what PEFT made of one.
        tokenizer: has the mask, end and padding tokens.
        pairs: tokens of a context, at least one, and of its continuation, at least one.
        samples: draws of masks, each of which costs a forward over context and continuation; at least 2, for the
            standard error. A continuation whose masks cannot vary (one token, or blocks of one) takes one.
        block_size: B; blocks begin at multiples of it, as in training.
        seed: of the masks.
        batch_size: pairs scored together.

    Raises:
        ValueError: for settings out of range, and for a pair without a context or a continuation.
    """
    for name, value, least in (("samples", samples, 2), ("batch_size", batch_size, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
    for pair in pairs:
        if not all(pair):
            lengths = " and ".join(str(len(part)) for part in pair)
            raise ValueError(
                f"A likelihood needs at least one token of context and one of continuation, got {lengths}."
            )
    # Strata: same mean as "count", less noise.
    collator = DataCollatorForDualStreamMasking(
        tokenizer, block_size=block_size, num_eos=1, ratio_sampler="stratified", seed=seed
    )
    estimates: dict[int, Estimate] = {}
    by_length = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
    for is_fixed in (False, True):
        group = [index for index in by_length if (len(pairs[index][1]) == 1 or block_size == 1) == is_fixed]
        for start in range(0, len(group), batch_size):
            batch = group[start : start + batch_size]
            examples = [
                {"input_ids": [*context, *rest], "labels": [IGNORE_INDEX] * len(context) + rest}
                for context, rest in (pairs[index] for index in batch)
            ]
            drawn = []
            for sample in range(1 if is_fixed else samples):
                collator.set_epoch(sample)
                drawn.append(response_log_probs(model, examples, collator).mask_tokens.double().sum(1).cpu())
            values = torch.stack(drawn)  # (samples, pairs)
            errors = values.std(0, correction=0 if is_fixed else 1) / math.sqrt(len(values))
            for index, value, error in zip(batch, values.mean(0).tolist(), errors.tolist(), strict=True):
                estimates[index] = Estimate(value, error)
    return [estimates[index] for index in range(len(pairs))]
