"""The check of examples/smollm2 finds what it is there to find, on a tiny Llama."""

import argparse

import pytest
import torch
from tiny import script
from transformers import LlamaConfig, LlamaForCausalLM

check = script("examples/smollm2/check.py")


class WordTokenizer:
    """Stands for the model's: a token for each character of a question."""

    eos_token_id = pad_token_id = 1

    def apply_chat_template(self, messages, **kwargs):
        return messages[0]["content"]

    def __call__(self, texts, **kwargs):
        ids = [[2 + ord(character) % 20 for character in text[:8]] for text in texts]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), 8, dtype=torch.long)}


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class OtherDecoder:
    """Stands for the model that is checked: another Llama, with AR's `generate`."""

    def __init__(self, model):
        self.model = model

    def generate(self, **kwargs):
        names = ("strategy", "verification", "adaptive_window", "window_size", "return_dict_in_generate")
        sequences = self.model.generate(**{name: value for name, value in kwargs.items() if name not in names})
        ones = torch.ones(len(sequences))
        stats = argparse.Namespace(new_tokens=ones, forwards=ones, drafted=ones, accepted=ones)
        return argparse.Namespace(sequences=sequences, stats=stats)


@pytest.fixture
def options() -> argparse.Namespace:
    return argparse.Namespace(answers=4, samples=640, max_new_tokens=6, batch_size=2, drafts=2, dtype="float32")


def test_probabilities_of_all_sequences_sum_to_one():
    found = dict(check.probabilities(tiny_llama(0), torch.tensor([[3, 4, 5]]), eos_token_id=1))
    assert len(found) <= check.TOP_K**check.LENGTH
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_model_passes_and_another_fails(options, seed):
    for look in (check.check_greedy, check.check_samples):
        assert look(OtherDecoder(tiny_llama(seed)), tiny_llama(0), WordTokenizer(), options) == (seed == 0)
