"""Which tokens become masks: subset, counts, laws, layouts, and the order of the slots."""

from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wedlm_hf.training.masking import mask_blocks, reorder_blocks, sample_masked_counts

SAMPLERS = ["count", "stratified", "gamma"]
DRAWS = 6000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blocks_of(values: torch.Tensor, block_size: int) -> list[torch.Tensor]:
    return list(values.split(block_size))


def assert_frequencies(observed: Counter, expected: dict, draws: int) -> None:
    """Each outcome as often as its probability says, within 5 standard deviations, and no other outcome."""
    assert set(observed) <= set(expected)
    for outcome, probability in expected.items():
        deviation = (draws * probability * (1 - probability)) ** 0.5
        assert abs(observed[outcome] - draws * probability) <= 5 * deviation, (outcome, observed[outcome], draws)


supervised_tokens = st.lists(st.booleans(), min_size=1, max_size=30).map(torch.tensor)
block_sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32)


@given(supervised_tokens, block_sizes, seeds, st.sampled_from(SAMPLERS), st.sampled_from([0.0, 0.5, 1.0]))
def test_only_supervised_tokens_are_masked_and_only_they_have_a_weight(supervised, block_size, seed, sampler, suffix):
    masked, weights = mask_blocks(supervised, block_size, seeded(seed), sampler, suffix)
    assert masked.shape == weights.shape == supervised.shape and masked.dtype == torch.bool
    assert not (masked & ~supervised).any()
    assert ((weights > 0) == masked).all()


@given(
    supervised_tokens, block_sizes, seeds, st.sampled_from(["count", "stratified"]), st.sampled_from([0.0, 0.5, 1.0])
)
def test_every_block_with_supervised_tokens_has_a_mask_and_weights_that_add_up_to_them(
    supervised, block_size, seed, sampler, suffix
):
    masked, weights = mask_blocks(supervised, block_size, seeded(seed), sampler, suffix)
    triples = zip(
        blocks_of(supervised, block_size), blocks_of(masked, block_size), blocks_of(weights, block_size), strict=True
    )
    for possible, chosen, weight in triples:
        n, m = int(possible.sum()), int(chosen.sum())
        assert (m == 0) if n == 0 else (1 <= m <= n)
        torch.testing.assert_close(weight[chosen], torch.full((m,), n / max(m, 1)))  # 1 / γ, with γ = m / n


@given(supervised_tokens, block_sizes, seeds, st.sampled_from(SAMPLERS))
def test_the_same_generator_state_gives_the_same_masks_and_the_global_one_is_left_alone(
    supervised, block_size, seed, sampler
):
    before = torch.get_rng_state()
    first, second = (mask_blocks(supervised, block_size, seeded(seed), sampler, 0.5) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("sampler", ["count", "stratified"])
def test_masked_counts_are_uniform_from_one_to_all(sampler):
    supervised_counts = torch.tensor([1, 2, 0, 5, 5])
    generator = seeded()
    drawn = [sample_masked_counts(supervised_counts, sampler, generator)[0].tolist() for _ in range(DRAWS)]
    for block, n in enumerate(supervised_counts.tolist()):
        law = dict.fromkeys(range(1, n + 1), 1 / n) if n else {0: 1.0}
        assert_frequencies(Counter(counts[block] for counts in drawn), law, DRAWS)


def test_gamma_rounds_a_uniform_ratio_as_the_paper_writes_it():
    generator = seeded()
    drawn = [sample_masked_counts(torch.tensor([4]), "gamma", generator) for _ in range(DRAWS)]
    counts = Counter(int(count) for count, _ in drawn)
    assert_frequencies(counts, {0: 1 / 8, 1: 1 / 4, 2: 1 / 4, 3: 1 / 4, 4: 1 / 8}, DRAWS)
    assert all(abs(count - 4 / inverse_ratio) <= 0.5 + 1e-5 for count, inverse_ratio in drawn)


@given(st.integers(1, 12), seeds)
def test_stratified_ratios_fill_each_stratum_once(blocks, seed):
    # As many blocks as supervised tokens in each: stratum k holds exactly the count k + 1.
    counts, _ = sample_masked_counts(torch.full((blocks,), blocks), "stratified", seeded(seed))
    assert sorted(counts.tolist()) == list(range(1, blocks + 1))


def test_stratified_strata_ignore_blocks_without_supervised_tokens():
    for seed in range(50):
        counts, _ = sample_masked_counts(torch.tensor([0, 3, 0, 0, 3, 3, 0]), "stratified", seeded(seed))
        assert sorted(counts.tolist()) == [0, 0, 0, 0, 1, 2, 3]


def test_stratified_order_of_strata_is_random():
    orders = Counter(
        tuple(sample_masked_counts(torch.full((3,), 3), "stratified", seeded(seed))[0].tolist())
        for seed in range(DRAWS)
    )
    assert_frequencies(
        orders, dict.fromkeys([(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)], 1 / 6), DRAWS
    )


def test_uniform_layout_draws_every_subset_of_a_size_equally_often():
    supervised = torch.tensor([True, True, False, True, True, False])
    positions = [0, 1, 3, 4]
    law = {
        subset: 1 / len(positions) / len(list(combinations(positions, size)))
        for size in range(1, 5)
        for subset in combinations(positions, size)
    }
    generator = seeded()
    drawn = Counter(tuple(mask_blocks(supervised, 6, generator)[0].nonzero().flatten().tolist()) for _ in range(DRAWS))
    assert_frequencies(drawn, law, DRAWS)


def test_suffix_layout_masks_the_last_supervised_tokens_in_every_number_equally_often():
    supervised = torch.tensor([True, True, False, True, True, False])
    generator = seeded()
    drawn = Counter(
        tuple(mask_blocks(supervised, 6, generator, suffix_probability=1.0)[0].nonzero().flatten().tolist())
        for _ in range(DRAWS)
    )
    assert_frequencies(drawn, dict.fromkeys([(4,), (3, 4), (1, 3, 4), (0, 1, 3, 4)], 1 / 4), DRAWS)


def test_suffix_probability_is_the_share_of_suffix_blocks_and_leaves_the_counts_alone():
    supervised = torch.ones(3 * DRAWS, dtype=torch.bool)
    masked, _ = mask_blocks(supervised, 3, seeded(), suffix_probability=0.7)
    # Of the 3 subsets of one size, the uniform layout draws the suffix in a third of its blocks.
    suffix, other = (0.7 + 0.3 / 3) / 3, (0.3 / 3) / 3
    law = (
        dict.fromkeys([(2,), (1, 2)], suffix) | dict.fromkeys([(0,), (1,), (0, 1), (0, 2)], other) | {(0, 1, 2): 1 / 3}
    )
    drawn = Counter(tuple(block.nonzero().flatten().tolist()) for block in masked.split(3))
    assert_frequencies(drawn, law, DRAWS)


@given(supervised_tokens, block_sizes)
def test_reordering_is_a_permutation_of_each_block_with_observed_tokens_first_and_order_kept(masked, block_size):
    expected = []
    for start in range(0, len(masked), block_size):
        block = range(start, min(start + block_size, len(masked)))
        expected += [position for position in block if not masked[position]]
        expected += [position for position in block if masked[position]]
    assert reorder_blocks(masked, block_size).tolist() == expected


def test_an_unknown_ratio_sampler_is_refused():
    with pytest.raises(
        ValueError, match=r"`ratio_sampler` must be one of \('count', 'stratified', 'gamma'\), got 'beta'"
    ):
        sample_masked_counts(torch.tensor([1]), "beta", seeded())
