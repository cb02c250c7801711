"""How far packed layers take a model from what it was: weights are rounded, and in few bits rows are, too.

`T` texts, `L` tokens of each, `V` vocabulary.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional as F

from .kernels import kernels_digest
from .remembered import remembered

TEXTS, LENGTH = 4, 8  # T, L: each token of them is looked at
SAMPLED = 64  # entries of each tensor, at least, which tell models apart beside the sum of all


@torch.no_grad()
def distance_of(model: Any, bits: int, change: Callable[[], None]) -> float | None:
    """Lets `change` pack a model. Returns the nats per token that it then is from what it was: the mean of the
    Kullback-Leibler divergences of the tokens that may follow, on texts that the model wrote before. `None` for a
    model that writes no text. It is remembered for these weights (see [`remembered`])."""
    is_changed = False

    def measure() -> float | None:
        nonlocal is_changed
        model.eval()  # no dropout
        found: tuple[torch.Tensor, torch.Tensor] | None = None
        # Whatever the forward of another kind of model raises.
        with suppress(Exception):
            found = _own_texts(model)
        change()
        is_changed = True
        if found is None:
            return None
        ids, before = found
        divergences = F.kl_div(_logs(model, ids), before, log_target=True, reduction="none").sum(-1)
        return float(divergences.mean().clamp(min=0))  # below 0 by rounding alone

    key = [bits, kernels_digest(), TEXTS, LENGTH, _digest(model)]
    was_training = model.training
    try:
        value: float | None = remembered("distances", key, lambda found: isinstance(found, float), measure)
    finally:
        model.train(was_training)
    if not is_changed:
        change()
    return value


def _own_texts(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as the model draws them, `(T, L)` int64, and the logarithms of what may follow each token, `(T, L, V)`
    float32."""
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(0)
    start = next(each for each in (config.bos_token_id, config.eos_token_id, 0) if isinstance(each, int))
    ids = torch.full((TEXTS, 1), start)
    while len((logs := _logs(model, ids))[0]) < LENGTH:
        ids = torch.cat([ids, torch.multinomial(logs[:, -1].exp(), 1, generator=generator)], 1)
    return ids, logs


def _logs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return F.log_softmax(logits, -1).clamp(min=-1e4)  # the logarithm of 0, for what is forbidden, has no difference


def _digest(model: Any) -> str:
    """16 hexadecimal digits that differ where the weights do."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        size = flat.element_size()
        if flat.nbytes % 8 == 0 and flat.storage_offset() * size % 8 == 0:  # words are summed sooner
            size = 8
        bits = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[size])
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {int(bits.sum())}".encode())
        digest.update(flat[:: max(1, len(flat) // SAMPLED)].float().numpy().tobytes())
    return digest.hexdigest()[:16]
