"""Models that keep a state: recurrent and convolutional layers (docs/algorithm.md#states).

A state has read every row of a forward and can forget none, neither a failed draft nor a mask. So a forward with
drafts or masks runs on a copy of the states, which is thrown away. The tokens that it made final stay pending: the
next forwards read them again, until one without drafts and masks commits them. Keys and values of attention layers are
overwritten as elsewhere, and never copied.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

# The fields of a layer of transformers' caches that hold its states, each a dictionary by the state's number.
FIELDS = tuple(name for name, value in vars(LinearAttentionLayer()).items() if isinstance(value, dict))


def keeps_state(model: Any) -> bool:
    """Whether a model keeps a state: its class says so, or transformers' cache for its config has states."""
    is_known = getattr(model, "_is_stateful", False)
    return bool(is_known) or any(map(has_state, cache_layers(model.config)))


def cache_layers(config: Any) -> list[Any]:
    """The layers of transformers' own cache for a model; none where it makes them as it goes."""
    try:
        return list(DynamicCache(config=config).layers)
    except KeyError:  # a kind of layer that it has no cache for
        return []


def has_state(layer: Any) -> bool:
    """Whether a layer of a cache holds a state."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def is_attending(layer: Any) -> bool:
    """Whether a layer of a cache holds keys and values."""
    return isinstance(layer, CacheLayerMixin)


def state_tensors(layer: Any) -> list[torch.Tensor]:
    """The tensors of a layer's states; none before it has read anything."""
    found = [value for name in FIELDS for value in getattr(layer, name).values()] if has_state(layer) else []
    return [value for value in found if isinstance(value, torch.Tensor)]


@contextmanager
def forgetting(layers: Sequence[Any]) -> Iterator[None]:
    """Within this context, layers work on copies of their states. Behind it, they have their former states again."""
    kept = [(layer, {name: getattr(layer, name) for name in FIELDS}) for layer in layers if has_state(layer)]
    try:
        for layer, fields in kept:
            for name, values in fields.items():
                setattr(layer, name, {key: _copy(value) for key, value in values.items()})
        yield
    finally:
        for layer, fields in kept:
            vars(layer).update(fields)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
