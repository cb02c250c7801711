"""The block ELBO against the mean over all masks, and its standard error against what it claims."""

import math
from itertools import combinations

import pytest
import torch
from dual_stream_oracle import last_nll
from tiny import EOS, MASK, START, tiny_model, tiny_tokenizer

from wedlm_hf.eval.harness.model import block_elbo

BLOCK = 4
# The context ends within a block; the continuation has 3, 4 and 1 tokens in its blocks.
PAIR = ([START, 20, 21, 22, 23], [40, 41, 42, 43, 44, 45, 46, EOS])


def exact_bound(model, context: list[int], continuation: list[int], block_size: int) -> float:
    """The mean over all numbers and places of masks, one forward for each mask (docs/algorithm.md#training)."""
    tokens, total = context + continuation, 0.0
    for start in range(0, len(tokens), block_size):
        block = range(start, min(start + block_size, len(tokens)))
        scored = [position for position in block if position >= len(context)]
        for count in range(1, len(scored) + 1):
            for masked in combinations(scored, count):
                seen = [*range(start), *(position for position in block if position not in masked)]
                for index, position in enumerate(masked):
                    row = [tokens[place] for place in seen] + [MASK] * (index + 1)
                    log_prob = -last_nll(model, row, [*seen, *masked[: index + 1]], tokens[position])
                    # 1/n for the number, 1/C(n, m) for the places, n/m for the weight
                    total += float(log_prob) / math.comb(len(scored), count) / count
    return total


def many_pairs(count: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(10, 300, (count, 16), generator=generator).tolist()
    return [(row[:6], row[6:]) for row in tokens]


def test_the_mean_over_many_masks_is_that_of_all_masks():
    model = tiny_model().double()
    with torch.no_grad():
        exact = exact_bound(model, *PAIR, BLOCK)
    (estimate,) = block_elbo(model, tiny_tokenizer(), [PAIR], samples=600, block_size=BLOCK)
    assert estimate.standard_error < 0.005 * abs(exact)
    assert abs(estimate.value - exact) < 3 * estimate.standard_error


def test_the_standard_error_shrinks_with_the_root_of_the_samples_and_is_that_of_the_mean():
    model, tokenizer, pairs = tiny_model(), tiny_tokenizer(), many_pairs(24)
    few, many, reference = (
        block_elbo(model, tokenizer, pairs, samples=samples, block_size=BLOCK, seed=seed, batch_size=24)
        for samples, seed in ((8, 0), (72, 1), (72, 2))
    )
    roots = [math.sqrt(sum(estimate.standard_error**2 for estimate in estimates)) for estimates in (few, many)]
    assert roots[0] / roots[1] == pytest.approx(3, rel=0.2)
    scores = [
        (estimate.value - other.value) / math.hypot(estimate.standard_error, other.standard_error)
        for estimate, other in zip(few, reference, strict=True)
    ]
    assert 0.6 < math.sqrt(sum(score**2 for score in scores) / len(scores)) < 1.5


def test_an_estimate_depends_on_seed_and_tokens_alone():
    model, tokenizer, pairs = tiny_model(), tiny_tokenizer(), [PAIR, *many_pairs(3)]
    alone = [block_elbo(model, tokenizer, [pair], samples=4, block_size=BLOCK)[0] for pair in pairs]
    together = block_elbo(model, tokenizer, pairs[::-1], samples=4, block_size=BLOCK, batch_size=3)[::-1]
    for estimate, other in zip(alone, together, strict=True):
        assert estimate.value == pytest.approx(other.value, rel=1e-5)
        assert estimate.standard_error == pytest.approx(other.standard_error, rel=1e-3)
    assert block_elbo(model, tokenizer, [PAIR], samples=4, block_size=BLOCK, seed=1)[0].value != alone[0].value


@pytest.mark.parametrize(("continuation", "block_size"), [([40], BLOCK), ([40, 41, EOS], 1)])
def test_where_masks_cannot_vary_one_forward_is_exact(continuation, block_size):
    model, context = tiny_model(), [START, 20, 21]
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    (estimate,) = block_elbo(model, tiny_tokenizer(), [(context, continuation)], samples=50, block_size=block_size)
    assert len(forwards) == 1 and estimate.standard_error == 0
    with torch.no_grad():
        assert estimate.value == pytest.approx(exact_bound(model, context, continuation, block_size), rel=1e-5)


@pytest.mark.parametrize(("settings", "pair", "message"), [
    ({"samples": 1}, PAIR, "`samples` must be an integer of at least 2, got 1"),
    ({"block_size": 0}, PAIR, "`block_size` must be an integer of at least 1, got 0"),
    ({"batch_size": 0.5}, PAIR, "`batch_size` must be an integer of at least 1, got 0.5"),
    ({}, ([], [40]), "at least one token of context and one of continuation, got 0 and 1"),
    ({}, ([40], []), "at least one token of context and one of continuation, got 1 and 0"),
])  # fmt: skip
def test_what_cannot_be_estimated_is_refused(settings, pair, message):
    with pytest.raises(ValueError, match=message):
        block_elbo(tiny_model(), tiny_tokenizer(), [pair], **settings)
