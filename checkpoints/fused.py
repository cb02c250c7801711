"""What stands around packed layers, with fewer operations: for few rows, a CPU takes as long to start them as to
multiply.

A module's class becomes a subclass of its own, as far as the values stay the very same. Whether they do is looked at,
layer by layer: names only say what may be tried. Wherever the parts are not as they were then, in training, below a
LoRA or with hooks on them, a module computes as its own class does.

`B` sequences, `Q` rows of each, `D` head width.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import Cache, DynamicCache

from .packed_layers import HOOKS, PackedLinear, PackedNorm, Product

_PROBED = ((1, 1.0), (3, 1.0), (5, 50.0))  # numbers of rows, and how large their numbers are


class Fused:
    """What fused modules share. Their `base_class` is what they were."""

    base_class: type

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copies and pickles are made of classes that a name can find."""
        parts: Any = super().__reduce_ex__(protocol)
        make, (_, *rest), *state = parts
        return _rebuilt, (type(self).__bases__[0], self.base_class, make, *rest), *state


class FusedAttention(Fused):
    """Attention whose queries and keys are normed and turned together, in the product that they come from."""

    _biases: torch.Tensor | None  # of queries, keys and values
    _norms: torch.Tensor | None  # of each head of queries and keys

    def parts(self: Any) -> tuple[Any, ...]:
        """The norms, and the weights and biases that are joined, with their versions: what must stay as it was."""
        norms: list[Any] = [getattr(self, name, None) for name in ("q_norm", "k_norm")]
        tensors = [getattr(layer, "bias", None) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        tensors += [getattr(norm, "weight", None) for norm in norms]
        versions = (0 if each is None or each.is_inference() else each._version for each in tensors)
        return (*map(id, (*norms, *tensors)), *versions)

    def prepare(self: Any) -> None:
        """Joins what belongs to several of the layers. Raises `AttributeError` or `TypeError` for other layers."""
        self._parts, self._is_prepared = self.parts(), False
        layers = self.q_proj, self.k_proj, self.v_proj
        sizes = [layer.out_features for layer in layers]
        self._heads = [size // self.head_dim for size in sizes]
        biases = [layer.bias for layer in layers]
        self._biases = None if biases == [None] * 3 else torch.cat(biases).detach()
        norms: list[Any] = [getattr(self, name, None) for name in ("q_norm", "k_norm")]
        self._norms, self._terms = None, None
        if not all(norm is None or type(norm) is nn.Identity for norm in norms):
            if any(type(norm) is not PackedNorm for norm in norms):
                raise TypeError("These norms are other layers.")
            factors = [norm.factor.detach().expand(n, 1, -1) for norm, n in zip(norms, self._heads, strict=False)]
            self._norms, self._terms = torch.cat(factors), norms[0].terms
        self._is_prepared = True

    def forward(
        self: Any, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None, **how: Any
    ) -> tuple[torch.Tensor, Any]:
        """The base's, on `(B, Q, hidden size)`."""
        if self._parts != self.parts():  # copied, loaded anew, or exchanged
            with suppress(AttributeError, TypeError):
                self.prepare()
        product = _shared(self.q_proj, self.k_proj, self.v_proj) if self._is_prepared else None
        norms = () if self._norms is None else (self.q_norm, self.k_norm)
        is_known = self.config._attn_implementation == "sdpa" and not self.training
        is_known = is_known and position_embeddings[0].shape[-1] == self.head_dim  # else only a part is turned
        if product is None or not is_known or any(map(_is_watched, norms)):
            own: Any = super()
            found: tuple[torch.Tensor, Any] = own.forward(hidden_states, position_embeddings, attention_mask, **how)
            return found
        queries, keys, _ = self._heads
        shape = hidden_states.shape[:-1]
        rows = product.matrix(hidden_states)
        if self._biases is not None:
            rows.add_(self._biases)
        heads = rows.view(*shape, -1, self.head_dim).transpose(1, 2)
        turned, value = heads.split_with_sizes((queries + keys, keys), 1)
        if self._norms is not None:
            turned = PackedNorm.normed(turned, self._norms, self._terms)
        cos, sin = (each.unsqueeze(1) for each in position_embeddings)
        first, second = turned.split_with_sizes((self.head_dim // 2,) * 2, -1)
        turned = (turned * cos).add_(torch.cat((-second, first), -1) * sin)
        query, key = turned.split_with_sizes((queries, keys), 1)
        for name in [name for name, each in how.items() if isinstance(each, Cache)]:
            key, value = how.pop(name).update(key, value, self.layer_idx)
        how.pop("position_ids", None)  # for packed documents, in kernels of GPUs
        kind: Any = type(self)
        attend = _home(kind).ALL_ATTENTION_FUNCTIONS["sdpa"]
        how["sliding_window"] = getattr(self, "sliding_window", None)
        output, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **how)
        return self.o_proj(output.reshape(*shape, -1)), weights

    def probe(self: Any, call: Callable[..., Any], rows: torch.Tensor, cache: str) -> Any:
        """What `call`, this forward or the base's, gives and caches, behind other rows and under a mask, too. `cache`
        is what the base calls it."""
        count, past = rows.shape[1], DynamicCache()
        generator = torch.Generator().manual_seed(count)
        known = torch.randn(2, 1, self._heads[1], 7, self.head_dim, generator=generator)
        for index in range(self.layer_idx + 1):
            past.update(*known, index)
        angles = torch.rand(1, count, self.head_dim // 2, generator=generator).mul(6).repeat(1, 1, 2)
        mask = torch.rand(1, 1, count, 7 + count, generator=generator) < 0.8
        # Some scale queries by their positions, from some point on.
        how = {"position_ids": torch.arange(count)[None] + 10**6, cache: past}
        found = call(rows, (angles.cos(), angles.sin()), None if count == 1 else mask, **how)
        return found[0], past.layers[self.layer_idx].keys, past.layers[self.layer_idx].values


class FusedMLP(Fused):
    """An MLP with a gate."""

    def prepare(self: Any) -> None:
        """Raises `AttributeError` for other layers."""
        assert self.gate_proj.out_features == self.up_proj.out_features == self.down_proj.in_features

    def forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
        """The base's."""
        product = _shared(self.gate_proj, self.up_proj)
        if product is None or self.gate_proj.bias is not None or self.up_proj.bias is not None:
            return super().forward(rows)  # type: ignore[misc]
        gate, up = product.matrix(rows).split_with_sizes(product.sizes, -1)
        output: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return output

    def probe(self: Any, call: Callable[..., Any], rows: torch.Tensor, cache: str) -> Any:
        """What `call`, this forward or the base's, gives."""
        return (call(rows),)


def _is_watched(module: Any) -> bool:
    return "forward" in vars(module) or any(getattr(module, name) for name in HOOKS)


def _shared(*layers: Any) -> Product | None:
    """The product that these layers, and no others, share; `None` where they are other layers, or hooks watch one."""
    product = getattr(layers[0], "product", None)
    if product is None or len(product.sizes) != len(layers) or _has_any_global_hook():
        return None
    for layer in layers:
        if type(layer) is not PackedLinear or layer.product is not product or _is_watched(layer):
            return None
    return product


@cache
def _home(kind: type) -> ModuleType:
    """The file of models that looks up attention functions for a class. Decoding replaces them there."""
    homes = [sys.modules[each.__module__] for each in kind.__mro__]
    return next(home for home in homes if hasattr(home, "ALL_ATTENTION_FUNCTIONS"))


@cache
def _fused(mixin: type, base: type) -> type:
    """A class that has the base's name, which transformers looks at."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "base_class": base})


def _rebuilt(mixin: type, base: type, make: Any, *rest: Any) -> Any:
    return make(_fused(mixin, base), *rest)


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Fuses the modules of a packed model that give the very same values so."""
    for module in list(model.modules()):
        for mixin, names in ((FusedAttention, ("q_proj", "k_proj", "v_proj")), (FusedMLP, ("gate_proj", "up_proj"))):
            if not isinstance(module, Fused) and all(hasattr(module, name) for name in names):
                layers = [getattr(module, name) for name in names]
                if _shared(*layers) is not None and "forward" not in vars(module):
                    _try(module, mixin)


def _try(module: Any, mixin: Any) -> None:
    """Fuses a module, if it stays what it is."""
    before, base = dict(vars(module)), module.__class__
    module.__class__ = _fused(mixin, base)
    for name in ("cache", "past_key_values"):  # of newer versions of transformers and of older ones
        # Whatever the forward of another kind of module raises: it is not fused.
        with suppress(Exception):
            module.prepare()
            module.training = False
            if all(_is_same(module, base, name, count, scale) for count, scale in _PROBED):
                module.training = before["training"]
                return
    vars(module).clear()
    vars(module).update(before)
    module.__class__ = base


def _is_same(module: Any, base: Any, cache: str, count: int, scale: float) -> bool:
    """Whether a fused module gives so many rows the bits that its base gives them."""
    size = next(layer.in_features for layer in module.children() if isinstance(layer, PackedLinear))
    rows = torch.randn(1, count, size, generator=torch.Generator().manual_seed(count)) * scale
    calls = module.forward, partial(base.forward, module)
    return all(map(torch.equal, *(module.probe(call, rows, cache) for call in calls)))
