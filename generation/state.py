"""Models that keep a state: recurrent and convolutional layers (docs/algorithm.md#states).

A state has read every row of a forward and can forget none, neither a failed draft nor a mask. So a forward with
drafts or masks runs on a copy of the states, which is thrown away. The tokens that it made final stay pending: the
next forwards read them again, until one without drafts and masks commits them. Keys and values of attention layers are
overwritten as elsewhere, and never copied.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

# The fields of a layer of transformers' caches that hold its states, each a dictionary by the state's number.
FIELDS = tuple(name for name, value in vars(LinearAttentionLayer()).items() if isinstance(value, dict))

# Functions of transformers that pad rows to whole chunks: two rows cost as much as a chunk of 64 to 256. Beside each,
# the package whose kernels replace it where it is installed; these are left alone.
CHUNKED = {"torch_chunk_gated_delta_rule": "fla", "mamba2_chunk_scan": "mamba_ssm"}


class _UnderWay(threading.local):
    """How this thread's forwards read rows."""

    is_short = False


_UNDER_WAY = _UnderWay()


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


def prepare_chunks(model: Any) -> None:
    """Lets [`short_chunks`] act on a model: replaces the chunked functions in the files of models that its layers are
    from, which call them by name."""
    if getattr(model, "use_kernels", False):  # from the Hub
        return
    homes = {sys.modules[kind.__module__] for module in model.modules() for kind in type(module).__mro__}
    for name in _without_kernels():
        for home in homes:
            function = vars(home).get(name)
            if function is not None and not hasattr(function, "takes_short_chunks"):
                setattr(home, name, _fitting(function))


@cache
def _without_kernels() -> list[str]:
    return [name for name, package in CHUNKED.items() if find_spec(package) is None]


@contextmanager
def short_chunks() -> Iterator[None]:
    """Within this context, this thread's forwards use no chunk that is longer than their rows."""
    before, _UNDER_WAY.is_short = _UNDER_WAY.is_short, True
    try:
        yield
    finally:
        _UNDER_WAY.is_short = before


def _fitting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with chunks no longer than its rows within [`short_chunks`]."""
    usual = signature(function).parameters["chunk_size"].default

    @wraps(function)
    def read(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _UNDER_WAY.is_short:
            kwargs["chunk_size"] = min(rows.shape[1], kwargs.get("chunk_size", usual))
        return function(rows, *args, **kwargs)

    read.takes_short_chunks = True  # type: ignore[attr-defined]
    return read
