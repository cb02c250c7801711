"""Hashes by which a model is known again."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMForCausalLM
from ..modeling_wedlm.packed import is_packed

_WITHOUT_EFFECT = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}


def fingerprint(model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Of `weights`, `config` and `tokenizer`, each 16 hexadecimal digits: what decides a model's answers."""
    weights, parameters = hashlib.sha256(), dict(model.named_parameters())
    if is_packed(model):  # nor is a table in 16 bits a parameter
        parameters |= {name: weight for name, weight in model.state_dict().items() if name.endswith(".weight")}
    for name, parameter in sorted(parameters.items()):
        weights.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        weights.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    config = {name: value for name, value in model.config.to_dict().items() if name not in _WITHOUT_EFFECT}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    texts = {
        "config": json.dumps(config, sort_keys=True, default=str),
        "tokenizer": f"{vocabulary}\n{tokenizer.chat_template}",
    }
    digests = {"weights": weights} | {name: hashlib.sha256(text.encode()) for name, text in texts.items()}
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}
