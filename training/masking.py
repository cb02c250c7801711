"""Noise of dual-stream training: which tokens of each block become masks, and in what order its slots lie.

Pure functions: tensors in, tensors out, randomness only from the generator that is passed in. `L` tokens of a
document, `K` blocks, `B` block size.
"""

from typing import Literal, get_args

import torch
from torch.nn import functional as F

RatioSampler = Literal["count", "stratified", "gamma"]


def sample_masked_counts(
    supervised_counts: torch.Tensor, ratio_sampler: RatioSampler, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws how many supervised tokens of each block are masked, and the weight 1/γ of each of them.

    Args:
        supervised_counts: `(K,)` int64, n_k.
        ratio_sampler: `"count"`: m_k ~ Uniform{1…n_k}, γ_k = m_k / n_k, an unbiased bound on −log p.
            `"stratified"`: the same law for each block, spread evenly over the document's blocks (less noise in the
            loss). `"gamma"`: the paper's letter, γ_k ~ Uniform(0, 1) and m_k = round(γ_k n_k), which leaves some
            blocks without a mask.
        generator: source of randomness.

    Returns:
        m_k `(K,)` int64, zero where n_k is zero, and 1/γ_k `(K,)` float32.
    """
    if ratio_sampler not in get_args(RatioSampler):
        raise ValueError(f"`ratio_sampler` must be one of {get_args(RatioSampler)}, got {ratio_sampler!r}.")
    uniform = torch.rand(supervised_counts.shape, generator=generator)
    if ratio_sampler == "gamma":
        masked_counts = (uniform * supervised_counts).round().long()
        return masked_counts, 1.0 / uniform.clamp(min=torch.finfo(torch.float32).tiny)
    if ratio_sampler == "stratified":
        drawn = supervised_counts > 0
        strata = torch.randperm(int(drawn.sum()), generator=generator)
        uniform[drawn] = (strata + uniform[drawn]) / max(len(strata), 1)
    masked_counts = (uniform * supervised_counts).long().clamp(max=supervised_counts - 1) + 1
    masked_counts[supervised_counts == 0] = 0
    return masked_counts, supervised_counts / masked_counts.clamp(min=1)


def mask_blocks(
    supervised: torch.Tensor,
    block_size: int,
    generator: torch.Generator,
    ratio_sampler: RatioSampler = "count",
    suffix_probability: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the masked tokens of every block of a document (paper §4.2).

    Args:
        supervised: `(L,)` bool; only these are ever masked.
        block_size: B; the last block may be shorter.
        generator: source of randomness.
        ratio_sampler: see [`sample_masked_counts`].
        suffix_probability: share of blocks whose *last* m_k supervised tokens are masked, which is what decoding meets
            right after a commit; the others get m_k tokens uniformly without replacement (the paper's layout).

    Returns:
        `masked` `(L,)` bool, and `weights` `(L,)` float32: 1/γ of its block on masked tokens, 0 elsewhere.
    """
    length = supervised.shape[0]
    blocks = F.pad(supervised, (0, -length % block_size)).view(-1, block_size)
    masked_counts, inverse_ratios = sample_masked_counts(blocks.sum(-1), ratio_sampler, generator)
    priority = torch.rand(blocks.shape, generator=generator)
    is_suffix = torch.rand(blocks.shape[0], generator=generator) < suffix_probability
    from_the_end = torch.arange(block_size, 0, -1, dtype=priority.dtype).expand_as(priority)
    priority = torch.where(is_suffix[:, None], from_the_end, priority).masked_fill(~blocks, float("inf"))
    rank = priority.argsort(-1).argsort(-1)
    masked = rank < masked_counts[:, None]
    weights = masked * inverse_ratios[:, None]
    return masked.flatten()[:length], weights.flatten()[:length].float()


def reorder_blocks(masked: torch.Tensor, block_size: int) -> torch.Tensor:
    """Topological reordering within each block: observed tokens first, then masks, both in logical order (paper §4.1).

    Args:
        masked: `(L,)` bool.
        block_size: B.

    Returns:
        `(L,)` int64: the logical position that lies at each physical slot, a permutation of `0…L−1`.
    """
    block_ids = torch.arange(masked.shape[0]) // block_size
    return torch.argsort(2 * block_ids + masked.long(), stable=True)
