"""Noise of dual-stream training: which tokens of each block become masks, and in what order its rows lie.

Pure functions: tensors in, tensors out, noise is passed in. A *block grid* `(K, B)` holds `K` blocks of `B` cells, in
logical order; cells without a token are False everywhere.
"""

from collections.abc import Sequence
from typing import Literal

import torch

RatioSampler = Literal["count", "stratified", "gamma"]

# Columns of a block's noise: its ratio, its place among the strata, its layout; then one for each of its cells.
_RATIO, _STRATUM, _LAYOUT, _CELLS = range(4)


def draw_noise(keys: Sequence[int], block_counts: Sequence[int], block_size: int) -> torch.Tensor:
    """The noise of [`mask_blocks`] for several documents, each a function of its own 64-bit key alone: `(K, B + 3)`
    float32, uniform in [0, 1); K is the sum of `block_counts`, the documents' numbers of blocks."""
    noise = torch.empty(sum(block_counts), _CELLS + block_size)
    generator = torch.Generator()
    for key, rows in zip(keys, noise.split(list(block_counts)), strict=True):
        torch.rand(rows.shape, generator=generator.manual_seed(key), out=rows)
    return noise


def sample_masked_counts(
    supervised_counts: torch.Tensor, noise: torch.Tensor, ratio_sampler: RatioSampler, document_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws how many of the n_k supervised tokens of each block, `(K,)` int64, are masked: m_k, `(K,)` int64, zero
    where n_k is zero; and the weight 1/γ_k of each of them, `(K,)` float32. The noise, `(K, ≥ 2)` float32, is uniform
    in [0, 1).

    `"count"`: m_k ~ Uniform{1…n_k}, γ_k = m_k / n_k, an unbiased bound on −log p. `"stratified"`: the same law for
    each block, spread evenly over the blocks of a document, `(K,)` int64, ascending (less noise in the loss).
    `"gamma"`: literally the paper's, γ_k ~ Uniform(0, 1) and m_k = round(γ_k n_k), which leaves some blocks without a
    mask.
    """
    uniform = noise[:, _RATIO]
    if ratio_sampler == "gamma":
        masked_counts = (uniform * supervised_counts).round().long()
        return masked_counts, 1.0 / uniform.clamp(min=torch.finfo(torch.float32).tiny)
    if ratio_sampler == "stratified":
        uniform = uniform.clone()
        drawn = (supervised_counts > 0).nonzero().flatten()
        shuffled = drawn[noise[drawn, _STRATUM].argsort()]
        shuffled = shuffled[document_ids[shuffled].argsort(stable=True)]
        sizes = document_ids[shuffled].unique_consecutive(return_counts=True)[1]
        first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        strata = torch.arange(len(shuffled)) - first
        uniform[shuffled] = (strata + uniform[shuffled]) / sizes.repeat_interleave(sizes)
    masked_counts = (uniform * supervised_counts).long().clamp(max=supervised_counts - 1) + 1
    masked_counts[supervised_counts == 0] = 0
    return masked_counts, supervised_counts / masked_counts.clamp(min=1)


def mask_blocks(
    supervised: torch.Tensor,
    noise: torch.Tensor,
    ratio_sampler: RatioSampler = "count",
    suffix_probability: float = 0.0,
    document_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the masked tokens of every block among the supervised ones, `(K, B)` bool (paper §4.2), by the noise of
    [`draw_noise`] and the law of [`sample_masked_counts`]: `(K, B)` bool, and 1/γ of each block, `(K,)` float32.

    Of a share of the blocks, `suffix_probability`, the *last* m_k supervised tokens are masked, which is what decoding
    meets right after a commit; the others get m_k tokens uniformly without replacement (the paper's layout). All
    blocks are one document's if `document_ids` are left out.
    """
    if document_ids is None:
        document_ids = torch.zeros(len(supervised), dtype=torch.int64)
    masked_counts, inverse_ratios = sample_masked_counts(supervised.sum(-1), noise, ratio_sampler, document_ids)
    priority = noise[:, _CELLS:]
    if suffix_probability > 0:
        from_the_end = torch.arange(supervised.shape[1], 0, -1, dtype=priority.dtype).expand_as(priority)
        priority = torch.where(noise[:, _LAYOUT, None] < suffix_probability, from_the_end, priority)
    rank = priority.masked_fill(~supervised, float("inf")).argsort(-1).argsort(-1)
    return rank < masked_counts[:, None], inverse_ratios.float()


def reorder_blocks(masked: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Topological reordering within each block: observed tokens first, then masks, both in logical order (paper §4.1).
    `(K, B)` int64: the cell that lies at each row of its block; cells that hold no token (`present`) come last."""
    return (masked.long() + 2 * ~present).argsort(dim=-1, stable=True)
