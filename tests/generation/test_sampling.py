"""Draws: the noise they share, and that a shortlist of tokens gives the law of all of them; which masks are filled."""

import math

import pytest
import torch
from scipy import stats
from transformers import LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from wedlm_hf.generation.rules import select_masks
from wedlm_hf.generation.sampling import PositionNoise, TokenSampler, _split_mix, token_entropy

MASK, VOCABULARY = 7, 500
WARPED = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(50), TopPLogitsWarper(0.9), MinPLogitsWarper(0.01)]


def sampler_of(processors, rows=1) -> TokenSampler:
    torch.manual_seed(0)
    sampler = TokenSampler(LogitsProcessorList(processors), True, MASK, torch.zeros(rows, 1, dtype=torch.long))
    assert sampler.noise is sampler.noise  # seeded here
    return sampler


def slots_of(count, slots):
    """Offsets of `slots` slots of `count` sequences without new tokens, and the call's rows."""
    return [list(range(slots)) for _ in range(count)], list(range(count))


def test_bits_are_those_of_splitmix64():
    seed = torch.tensor(1234567)
    bits = [int(_split_mix(seed, torch.tensor(index))) % 2**64 for index in range(3)]
    assert bits == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_is_exponential_and_independent_between_rows_positions_and_tokens():
    torch.manual_seed(1)
    noise = PositionNoise(3, torch.device("cpu"))
    tokens = torch.arange(300).expand(3, 200, -1)
    found = noise.at([0, 1, 2], torch.arange(200).expand(3, -1), tokens)
    assert found.dtype == torch.float32 and bool((found > 0).all())
    assert stats.kstest(found.flatten().numpy(), "expon").pvalue > 1e-3
    for a, b in ((found[0], found[1]), (found[:, :-1], found[:, 1:]), (found[..., :-1], found[..., 1:])):
        correlation = stats.spearmanr(a.flatten().numpy(), b.flatten().numpy())
        assert correlation.pvalue > 1e-3


def test_noise_does_not_depend_on_what_else_is_asked_for():
    torch.manual_seed(1)
    noise = PositionNoise(3, torch.device("cpu"))
    tokens = torch.tensor([[[5, 9], [9, 400]]])
    alone = noise.at([2], torch.tensor([[11, 3]]), tokens)
    beside = noise.at(
        [0, 2], torch.tensor([[1, 2, 3], [3, 8, 11]]), torch.tensor([[[9, 5]], [[9, 5]]]).expand(2, 3, 2)
    )
    assert alone[0, 0].tolist() == beside[1, 2].flip(0).tolist()
    assert alone[0, 1, 0] == beside[1, 0, 0]


@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize(
    ("processors", "spread"), [([], 0.0), ([], 3.0), ([TopKLogitsWarper(200)], 3.0), (WARPED, 3.0)]
)
def test_draws_have_the_law_of_the_processed_scores(processors, is_on_cpu, spread):
    """With a spread of 0 nearly all of the mass lies behind the shortlist."""
    draws, sampler = 10_000, sampler_of(processors)
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2)) * spread
    sampler.is_on_cpu = is_on_cpu
    tokens, _ = sampler.choose(logits.repeat(1, draws, 1), *slots_of(1, draws))
    counts = torch.bincount(tokens[0], minlength=VOCABULARY)
    logits[MASK] = -torch.inf
    expected = LogitsProcessorList(processors)(torch.zeros(1, 1).long(), logits[None])[0].softmax(-1).double() * draws
    assert counts[expected == 0].sum() == 0
    is_large = expected >= 5
    seen, wanted = ([*each[is_large].tolist(), each[~is_large].sum().item()] for each in (counts, expected))
    if wanted[-1] < 5:  # too few for a cell of their own
        seen[-2:], wanted[-2:] = [sum(seen[-2:])], [sum(wanted[-2:])]
    assert stats.chisquare(seen, wanted, sum_check=False).pvalue > 1e-3


@pytest.mark.parametrize("is_coarse", [False, True], ids=["distinct scores", "many equal scores"])
def test_a_shortlist_chooses_as_the_whole_vocabulary_does(is_coarse, monkeypatch):
    logits = torch.randn(3, 200, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 3
    logits = (logits * 2).round() / 2 if is_coarse else logits
    slots = slots_of(3, 200)
    short, whole = sampler_of(WARPED, rows=3), sampler_of(WARPED, rows=3)
    assert short.top_k == 50
    whole.top_k = 0
    expected = whole.choose(logits.clone(), *slots)
    if not is_coarse:  # otherwise tokens behind the shortlist are as likely as the 50th, and all are looked at
        monkeypatch.setattr(TokenSampler, "_choose", None)
    found = short.choose(logits.clone(), *slots)
    assert all(part.equal(other) for part, other in zip(found, expected, strict=True))


def test_a_shortlist_is_used_where_the_likeliest_tokens_are_all_that_matters():
    penalty, top = RepetitionPenaltyLogitsProcessor(1.2), TopKLogitsWarper(20)
    assert [sampler_of(used).top_k for used in (WARPED, WARPED[1:], [top, MinPLogitsWarper(0.1)])] == [50, 50, 20]
    assert not any(
        sampler_of(used).top_k for used in ([], [TopPLogitsWarper(0.9), top], [penalty, top], [top, penalty])
    )


@pytest.mark.parametrize("processors", [[], WARPED])
def test_logits_that_are_nan_choose_nothing(processors):
    logits = torch.randn(1, 3, VOCABULARY)
    logits[0, 1, 4] = torch.nan
    tokens, _ = sampler_of(processors).choose(logits, *slots_of(1, 3))
    assert (tokens[0] < 0).tolist() == [False, True, False]


# The selection rule on hand-made distributions whose entropies stand beside them, in nats.
PROBABILITIES = torch.tensor(
    [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.9, 0.1, 0.0, 0.0]]
)
ENTROPIES = [0.0, math.log(2), math.log(4), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)]  # 0, 0.693, 1.386, 0.325


def test_entropy_is_in_nats_and_certain_tokens_have_none():
    entropy = token_entropy(PROBABILITIES.log())
    torch.testing.assert_close(entropy, torch.tensor(ENTROPIES))
    assert not torch.signbit(entropy[1:]).any()


@pytest.mark.parametrize(
    ("entropy", "tau", "chosen"),
    [
        (ENTROPIES, 0.7, [0, 1, 3]), ([0.5, 0.25, 0.5], 0.5, [1]),  # every one strictly below the threshold
        ([0.9, 0.6, 0.8], 0.5, [1]), ([0.6, 0.9, 0.6], 0.5, [0]), ([0.0, 0.0], 0.0, [0]),  # the least, the first one
    ],
)  # fmt: skip
def test_every_mask_strictly_below_the_threshold_is_chosen_or_else_the_first_of_the_least(entropy, tau, chosen):
    distance, is_mask = torch.arange(len(entropy))[None], torch.ones(1, len(entropy), dtype=torch.bool)
    found = select_masks(torch.tensor([entropy]), distance, is_mask, is_mask, tau, 0.0)
    assert found[0].nonzero().flatten().tolist() == chosen


@pytest.mark.parametrize(
    ("entropy", "useful", "chosen"),
    [
        ([0.9, 0.6, 0.1], [True, True, False], [1, 2]),  # the sure one is of no use: a useful one beside it
        ([0.9, 0.3, 0.1], [True, True, False], [1, 2]), ([0.9, 0.6, 0.7], [True, False, True], [2]),
        ([0.9, 0.6, 0.6], [True, False, False], [0]),
    ],
)  # fmt: skip
def test_a_useful_mask_is_chosen_in_every_step(entropy, useful, chosen):
    distance, is_mask = torch.arange(len(entropy))[None], torch.ones(1, len(entropy), dtype=torch.bool)
    found = select_masks(torch.tensor([entropy]), distance, is_mask, torch.tensor([useful]), 0.5, 0.0)
    assert found[0].nonzero().flatten().tolist() == chosen
