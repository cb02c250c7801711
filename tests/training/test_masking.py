"""Which tokens become masks: subset, counts, laws, layouts, and the order of the slots."""

from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wedlm_hf.training.streams import draw_noise, mask_blocks, reorder_blocks, sample_masked_counts

SAMPLERS = ["count", "stratified"]
DRAWS = 6000


def noise_for(blocks: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return draw_noise([seed], [len(blocks)], blocks.shape[1])


def counts_of(supervised_counts: torch.Tensor, sampler: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    noise = draw_noise([seed], [len(supervised_counts)], 1)
    return sample_masked_counts(supervised_counts, noise, sampler, torch.zeros_like(supervised_counts))


def assert_frequencies(observed: Counter, expected: dict, draws: int) -> None:
    """Each outcome as often as its probability says, within 5 standard deviations, and no other outcome."""
    assert set(observed) <= set(expected)
    for outcome, probability in expected.items():
        deviation = (draws * probability * (1 - probability)) ** 0.5
        assert abs(observed[outcome] - draws * probability) <= 5 * deviation, (outcome, observed[outcome], draws)


seeds = st.integers(0, 2**32)


@st.composite
def grids(draw, most: int) -> torch.Tensor:
    """Rows of numbers from 0 to `most`."""
    rows, size = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    row = st.lists(st.integers(0, most), min_size=size, max_size=size)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))


@given(grids(1).map(torch.Tensor.bool), seeds, st.sampled_from(SAMPLERS), st.sampled_from([0.0, 0.5, 1.0]))
def test_masks_are_supervised_tokens_as_many_as_their_weight_says_and_a_function_of_the_key(
    blocks, seed, sampler, suffix
):
    before = torch.get_rng_state()
    (masked, inverse_ratios), again = (mask_blocks(blocks, noise_for(blocks, seed), sampler, suffix) for _ in range(2))
    assert torch.equal(masked, again[0]) and torch.equal(inverse_ratios, again[1])
    assert torch.equal(torch.get_rng_state(), before)
    assert masked.shape == blocks.shape and inverse_ratios.shape == blocks.shape[:1]
    assert (masked.dtype, inverse_ratios.dtype) == (torch.bool, torch.float32) and not (masked & ~blocks).any()
    n, m = blocks.sum(-1), masked.sum(-1)
    assert torch.equal(m > 0, n > 0)
    torch.testing.assert_close(inverse_ratios, n / m.clamp(min=1))  # 1 / γ, with γ = m / n


numbers = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(numbers, numbers, seeds, st.sampled_from(SAMPLERS))
def test_documents_side_by_side_are_masked_as_each_is_alone(first, second, seed, sampler):
    counts = [torch.tensor(first), torch.tensor(second)]
    noise = draw_noise([seed, seed + 1], [len(first), len(second)], 1)
    owner = torch.tensor([3] * len(first) + [7] * len(second))
    together = sample_masked_counts(torch.cat(counts), noise, sampler, owner)
    alone = [counts_of(part, sampler, seed + number) for number, part in enumerate(counts)]
    for values, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(values, torch.cat(parts))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_masked_counts_are_uniform_from_one_to_all(sampler):
    supervised_counts = torch.tensor([1, 2, 0, 5, 5])
    documents = torch.arange(DRAWS).repeat_interleave(5)
    noise = draw_noise([0], [5 * DRAWS], 1)
    drawn = sample_masked_counts(supervised_counts.repeat(DRAWS), noise, sampler, documents)[0].view(DRAWS, 5)
    for block, n in enumerate(supervised_counts.tolist()):
        law = dict.fromkeys(range(1, n + 1), 1 / n) if n else {0: 1.0}
        assert_frequencies(Counter(drawn[:, block].tolist()), law, DRAWS)


@given(st.integers(1, 12), st.integers(0, 5), seeds)
def test_stratified_ratios_fill_each_stratum_once_and_skip_blocks_without_supervised_tokens(blocks, empty, seed):
    # As many blocks as supervised tokens in each: stratum k holds exactly the count k + 1.
    order = torch.randperm(blocks + empty, generator=torch.Generator().manual_seed(seed))
    counts, _ = counts_of(torch.tensor([blocks] * blocks + [0] * empty)[order], "stratified", seed)
    assert sorted(counts.tolist()) == [0] * empty + list(range(1, blocks + 1))


def drawn_masks(suffix_probability: float) -> Counter:
    blocks = torch.tensor([[True, True, False, True, True, False]] * DRAWS)
    masked, _ = mask_blocks(blocks, noise_for(blocks), suffix_probability=suffix_probability)
    return Counter(tuple(row.nonzero().flatten().tolist()) for row in masked)


def test_uniform_layout_draws_every_subset_of_a_size_equally_often():
    law = {}
    for size in range(1, 5):
        subsets = list(combinations([0, 1, 3, 4], size))
        law |= dict.fromkeys(subsets, 1 / 4 / len(subsets))
    assert_frequencies(drawn_masks(0.0), law, DRAWS)


def test_suffix_layout_masks_the_last_supervised_tokens_in_every_number_equally_often():
    law = dict.fromkeys([(4,), (3, 4), (1, 3, 4), (0, 1, 3, 4)], 1 / 4)
    assert_frequencies(drawn_masks(1.0), law, DRAWS)


@given(grids(2))
def test_reordering_is_a_permutation_of_each_block_with_observed_tokens_first_and_order_kept(kinds):
    """Kinds: 0 observed, 1 masked, 2 empty."""
    expected = [sorted(range(len(row)), key=row.__getitem__) for row in kinds.tolist()]  # a stable sort
    assert reorder_blocks(kinds == 1, kinds < 2).tolist() == expected
