"""The selection rule on hand-made distributions whose entropies stand beside them."""

import math

import torch

from wedlm_hf.generation.rules import select_masks
from wedlm_hf.generation.sampling import token_entropy

PROBABILITIES = torch.tensor(
    [
        [1.0, 0.0, 0.0, 0.0],  # 0 nats
        [0.5, 0.5, 0.0, 0.0],  # ln 2 = 0.693
        [0.25, 0.25, 0.25, 0.25],  # ln 4 = 1.386
        [0.9, 0.1, 0.0, 0.0],  # 0.325
    ]
)
ENTROPIES = [0.0, math.log(2), math.log(4), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)]


def select(entropy, tau):
    entropy = torch.tensor([entropy])
    distance, is_mask = torch.arange(entropy.shape[1])[None], torch.ones_like(entropy, dtype=torch.bool)
    return select_masks(entropy, distance, is_mask, tau, 0.0)[0].nonzero().flatten().tolist()


def test_entropy_is_in_nats_and_certain_tokens_have_none():
    entropy = token_entropy(PROBABILITIES.log())
    torch.testing.assert_close(entropy, torch.tensor(ENTROPIES))
    assert not torch.signbit(entropy[1:]).any()


def test_every_mask_strictly_below_the_threshold_is_chosen():
    assert select(ENTROPIES, tau=0.7) == [0, 1, 3]
    assert select([0.5, 0.25, 0.5], tau=0.5) == [1]


def test_without_one_below_it_the_least_is_chosen_and_ties_go_to_the_left():
    assert select([0.9, 0.6, 0.8], tau=0.5) == [1]
    assert select([0.6, 0.9, 0.6], tau=0.5) == [0]
    assert select([0.0, 0.0], tau=0.0) == [0]
