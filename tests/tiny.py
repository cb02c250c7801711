"""Tiny random models and a tiny tokenizer, shared by the tests. Everything is a function of its arguments alone."""

import json
from copy import deepcopy
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

import torch
from nano_tokenizer import train_tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from wedlm_hf.modeling_wedlm import WeDLMConfig, WeDLMForCausalLM

VOCAB_SIZE = 320  # more rows than the tokenizer has tokens, as in the published checkpoints
PAD, START, EOS, MASK = 0, 1, 2, 3  # the ids that `train_tokenizer` gives to its special tokens

Style = Literal["qwen3", "qwen2.5"]

LINES = [
    "Count from 1 to 9: 1, 2, 3, 4, 5, 6, 7, 8, 9",
    "Sort 31, 7, 12, 5: 5, 7, 12, 31",
    "3 + 4 = 7, so 37 + 40 = 77",
    '{"name": "Ada", "city": "London"}',
    "def add(a, b):\n    return a + b\n",
]

# Fields as the published checkpoints state them, but for their sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["WeDLMForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32,
    "initializer_range": 0.02, "intermediate_size": 48, "mask_token_id": None, "max_position_embeddings": 16384,
    "max_window_layers": 36, "model_type": "wedlm", "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "qk_norm": True, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def tiny_config(style: Style = "qwen3", **overrides: Any) -> WeDLMConfig:
    """Two layers, grouped queries; in Qwen3 style a `head_dim` that is not `hidden_size // num_attention_heads`."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16 if style == "qwen3" else 8,
        "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "initializer_range": 0.3, "qk_norm": style == "qwen3", "attention_bias": style == "qwen2.5",
        "tie_word_embeddings": False, "pad_token_id": PAD, "eos_token_id": EOS, "mask_token_id": MASK,
    }  # fmt: skip
    return WeDLMConfig(**settings | overrides)


def tiny_model(style: Style = "qwen3", seed: int = 0, **overrides: Any) -> WeDLMForCausalLM:
    """`WeDLMForCausalLM` in float32 and evaluation mode, from `tiny_config(style, **overrides)`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = WeDLMForCausalLM(tiny_config(style, **overrides))
    return randomize(model, seed)


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A stock Llama in float32 and evaluation mode."""
    settings: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.3,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**settings | overrides)).eval()


@torch.no_grad()
def randomize(model: Any, seed: int = 0) -> Any:
    """Draws biases and norms, which start at 0 and 1, and strengthens embeddings and logits, so that no weight goes
    unnoticed and entropies spread over 0 to 3 nats. Returns the model, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += torch.empty_like(parameter).uniform_(-0.5, 0.5, generator=generator)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embeddings.mul_(3)
    if head is not embeddings:
        head.mul_(2)
    return model.eval()


@lru_cache(maxsize=1)
def _tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(LINES, 300)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """At most 300 tokens; `PAD, START, EOS, MASK` are its special ones. Each call gives an object of its own."""
    return deepcopy(_tokenizer())


def write_checkpoint(folder: Path, model: WeDLMForCausalLM | None = None, **generation: Any) -> Path:
    """Saves a model with its tokenizer, and with settings in its generation config. Returns the folder."""
    model = model or tiny_model()
    vars(model.generation_config).update(generation)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_stock_checkpoint(folder: Path) -> Path:
    """Saves a Qwen3 and a tokenizer without a mask token. Returns the folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    stock_twin(tiny_model()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edit(file: Path, **changes: Any) -> None:
    """Changes fields of a JSON file; `...` takes one out."""
    stated = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in stated.items() if value is not ...}))


def stock_twin(model: WeDLMForCausalLM, attn_implementation: str = "eager") -> Qwen2ForCausalLM | Qwen3ForCausalLM:
    """The Qwen3 or Qwen2 model of transformers with the same weights, in evaluation mode."""
    settings = model.config.to_dict()
    for key in ("model_type", "architectures", "transformers_version", "mask_token_id", "qk_norm", "auto_map"):
        settings.pop(key, None)
    twin: Qwen2ForCausalLM | Qwen3ForCausalLM
    if model.config.qk_norm:
        twin = Qwen3ForCausalLM(Qwen3Config(**settings))
    else:
        twin = Qwen2ForCausalLM(Qwen2Config(**settings))
    twin.load_state_dict(model.state_dict())  # strict: no weight missing, none left over
    twin.set_attn_implementation(attn_implementation)
    return twin.eval()


def script(path: str) -> Any:
    """A module of no package, by its path in the repository, such as `examples/new-task/train.py`."""
    file = Path(__file__).parents[1] / path
    spec = spec_from_file_location(f"{file.parent.name}_{file.stem}".replace("-", "_"), file)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_equal_but_rounding(actual: torch.Tensor, expected: torch.Tensor, roundings: float = 64) -> None:
    """Equal but for the order of sums: within so many float32 roundings of the largest value.

    A float64 model rounds so, too: transformers' eager attention takes its softmax in float32."""
    tolerance = roundings * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=tolerance, rtol=0)
