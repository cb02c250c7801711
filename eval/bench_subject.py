"""What `wedlm bench` measures: a checkpoint on tasks or on the user's prompts, or random weights on random prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMConfig, WeDLMForCausalLM
from .measure import encode, encode_text
from .tasks import TASKS, Sample, generate_samples, is_correct

SEED_OF_PROMPTS = 4
PROMPT_TOKENS = 64  # of a random model
RANDOM_CONTEXT = 8192
# Sizes only: weights are random. The first is Qwen3-0.6B's; the second is small enough to be timed on any CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "86m": {
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


@dataclass(frozen=True)
class Prompt:
    """Tokens to go on from; those of a task come with their sample, which judges the answer."""

    tokens: list[int]
    sample: Sample | None = None

    @property
    def task(self) -> str:
        """Of the sample; all other prompts are one task."""
        return self.sample.task if self.sample else "prompts"

    def judges(self, text: str) -> bool:
        """Whether `text` is a right answer."""
        return self.sample is not None and is_correct(self.sample, text)


@dataclass(frozen=True)
class Subject:
    """What is measured: a model in evaluation mode and prompts. Random ones have no tokenizer."""

    name: str
    model: WeDLMForCausalLM
    tokenizer: PreTrainedTokenizerBase | None
    prompts: Sequence[Prompt]


def checkpoint_subject(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    texts: Sequence[str] | None = None,
    *,
    raw: bool = False,
    count: int = 8,
) -> Subject:
    """A checkpoint on the user's prompts, or else on `count` held-out prompts of each task, the tasks in turn, so that
    a batch of any size mixes them.

    Raises:
        ValueError: for prompts that leave no room for an answer.
    """
    if texts is not None:
        prompts = [Prompt(encode_text(model, tokenizer, text, raw)) for text in texts]
    else:
        groups = zip(*(generate_samples(task, count, SEED_OF_PROMPTS, "heldout") for task in TASKS), strict=True)
        prompts = [Prompt(encode(tokenizer, sample.messages), sample) for group in groups for sample in group]
    return Subject(Path(name).name if Path(name).is_dir() else name, model, tokenizer, prompts)


def random_subject(shape: str, device: str | torch.device, dtype: str, count: int, seed: int) -> Subject:
    """A model of one of the [`SHAPES`] with random weights and no end token, on `count` prompts of random tokens.

    Raises:
        ValueError: for a shape that is not there.
    """
    if shape not in SHAPES:
        raise ValueError(f"`--random` takes one of {', '.join(SHAPES)}, got {shape!r}.")
    vocab_size = SHAPES[shape]["vocab_size"]
    config = WeDLMConfig(
        **SHAPES[shape],
        max_position_embeddings=RANDOM_CONTEXT,
        tie_word_embeddings=True,
        mask_token_id=vocab_size - 1,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = WeDLMForCausalLM(config).eval()
    if dtype != "auto":
        model.to(dtype=getattr(torch, dtype))
    tokens = torch.randint(vocab_size - 1, (count, PROMPT_TOKENS))
    return Subject(f"random {shape}", model, None, [Prompt(row) for row in tokens.tolist()])
