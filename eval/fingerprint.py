"""Hashes by which a model is known again."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMForCausalLM

_WITHOUT_EFFECT = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}


def fingerprint(model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Of `weights`, `config` and `tokenizer`, each 16 hexadecimal digits: what decides a model's answers."""
    weights = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
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
