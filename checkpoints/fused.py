"""What stands around packed layers, with fewer operations: for few rows, a CPU takes as long to start them as to
multiply.

A module's class becomes a subclass of its own, as far as the values stay the very same. Whether they do is looked at,
layer by layer: names only say what may be tried. Where there are [`kernels`], they then take the place of torch's
operations, if the values stay close: sums have another order. Where the parts are not as they were then, and in
training, a module computes as its own class does.

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
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .kernels import LANES, attend_rows, gate_rows, has_kernels, takes, turn_heads
from .packed_layers import HOOKS, PackedLinear, PackedNorm, Product

_PROBED = ((1, 1.0), (3, 1.0), (5, 50.0))  # numbers of rows, and how large their numbers are
# How far kernels may be from torch, as a share: layers of few bits round their inputs, which enlarges differences.
_CLOSE = 0.02


class Fused:
    """What fused modules share. Their `base_class` is what they were."""

    base_class: type
    layer_names: tuple[str, ...]  # of those that read the same rows
    has_kernels = False  # whether kernels compute
    attends_by_row = False  # whether rows attend one by one, in steps and in AR decoding

    def together(self: Any, rows: torch.Tensor) -> torch.Tensor:
        """What these layers give, side by side: by one product, if nothing else happens in them."""
        layers = [self._modules[name] for name in self.layer_names]
        product = _shared(*layers)
        if product is None:
            return torch.cat([layer(rows) for layer in layers], -1)
        found: torch.Tensor = product.matrix(rows)
        if any(layer.bias is not None for layer in layers):
            found.add_(torch.cat([layer.bias for layer in layers]))
        return found

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copies and pickles are made of classes that a name can find."""
        parts: Any = super().__reduce_ex__(protocol)
        make, (_, *rest), *state = parts
        return _rebuilt, (type(self).__bases__[0], self.base_class, make, *rest), *state


class FusedAttention(Fused):
    """Attention whose queries and keys are normed and turned together, in the product that they come from."""

    layer_names = ("q_proj", "k_proj", "v_proj")
    _norms: torch.Tensor | None  # of each head of queries and keys

    def parts(self: Any) -> tuple[Any, ...]:
        """The norms and their weights, with their versions: what must stay as it was."""
        norms = [self._modules.get(name) for name in ("q_norm", "k_norm")]
        if norms == [None, None]:
            return ()
        weights: list[Any] = [getattr(norm, "weight", None) for norm in norms]
        versions = (0 if each is None or each.is_inference() else each._version for each in weights)
        return (*map(id, (*norms, *weights)), *versions)

    def prepare(self: Any) -> None:
        """Joins what belongs to several of the layers. Raises `AttributeError` or `TypeError` for other layers."""
        self._parts, self._is_prepared = self.parts(), False
        sizes = [getattr(self, name).out_features for name in self.layer_names]
        self._heads = [size // self.head_dim for size in sizes]
        norms: list[Any] = [getattr(self, name, None) for name in ("q_norm", "k_norm")]
        self._norms, self._eps = None, 0.0
        if not all(norm is None or type(norm) is nn.Identity for norm in norms):
            if any(type(norm) is not PackedNorm for norm in norms):
                raise TypeError("These norms are other layers.")
            factors = [norm.factor.detach().expand(n, 1, -1) for norm, n in zip(norms, self._heads, strict=False)]
            self._norms, self._eps = torch.cat(factors), norms[0].eps
        self._is_prepared = True

    def forward(
        self: Any, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None, **how: Any
    ) -> tuple[torch.Tensor, Any]:
        """The base's, on `(B, Q, hidden size)`."""
        if self._parts != self.parts():  # copied, loaded anew, or exchanged
            self._is_prepared = False
            with suppress(AttributeError, TypeError):
                self.prepare()
        norms = () if self._norms is None else (self.q_norm, self.k_norm)
        cos, sin = position_embeddings
        is_known = self._is_prepared and not self.training and cos.shape[-1] == self.head_dim  # else a part is turned
        if not is_known or _implementation(self.config) != "sdpa" or any(map(_is_watched, norms)):
            own: Any = super()
            found: tuple[torch.Tensor, Any] = own.forward(hidden_states, position_embeddings, attention_mask, **how)
            return found
        queries, keys, _ = self._heads
        shape = hidden_states.shape[:-1]
        rows = self.together(hidden_states)
        is_native = self.has_kernels and takes(rows) and cos.shape[:-1] == shape
        is_native = is_native and cos.dtype == sin.dtype == torch.float32
        if is_native:
            turn_heads(rows, cos, sin, queries + keys, self._norms, self._eps)
        heads = rows.view(*shape, -1, self.head_dim).transpose(1, 2)
        if is_native:
            query, key, value = heads.split_with_sizes(self._heads, 1)
        else:
            turned, value = heads.split_with_sizes((queries + keys, keys), 1)
            if self._norms is not None:
                turned = PackedNorm.normed(turned, self._norms, self._eps)
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            first, second = turned.split_with_sizes((self.head_dim // 2,) * 2, -1)
            turned = (turned * cos).add_(torch.cat((-second, first), -1) * sin)
            query, key = turned.split_with_sizes((queries, keys), 1)
        is_static = False
        for name in [name for name, each in how.items() if isinstance(each, Cache)]:
            past = how.pop(name)
            key, value = past.update(key, value, self.layer_idx)
            is_static = past.is_compileable
        how.pop("position_ids", None)  # for packed documents, in kernels of GPUs
        kind: Any = type(self)
        attend = _home(kind).ALL_ATTENTION_FUNCTIONS["sdpa"]
        is_ours = getattr(attend, "takes_kernels", attend is sdpa_attention_forward)  # nobody registered another one
        if is_native and self.attends_by_row and is_ours and not is_static and _is_plain(key) and _is_plain(value):
            if len(query) == query.shape[2] == 1 and (seen := _seen(attention_mask)) is not False:
                output = attend_rows(query, key, value, self.scaling, seen)
                return self.o_proj(output.view(*shape, -1)), None
            how["attend_rows"] = attend_rows  # for rows that attend one by one in a step, as they do here
        how["sliding_window"] = getattr(self, "sliding_window", None)
        output, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **how)
        return self.o_proj(output.reshape(*shape, -1)), weights

    def rounds_inputs(self: Any) -> bool:
        """Whether the product that queries, keys and values come from rounds its rows."""
        return bool(self.q_proj.rounds_rows)

    def suits_kernels(self: Any) -> bool:
        """Whether their sizes are those of heads, and what was looked at was this forward."""
        return self.head_dim % (2 * LANES) == 0 and _implementation(self.config) == "sdpa"

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

    layer_names = ("gate_proj", "up_proj")

    def prepare(self: Any) -> None:
        """Raises `AttributeError` for other layers."""
        self._gate = self.act_fn  # which kernels take the place of
        assert self.gate_proj.out_features == self.up_proj.out_features == self.down_proj.in_features

    def forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
        """The base's."""
        both = self.together(rows)
        if self.has_kernels and takes(both) and self.act_fn is self._gate and not _is_changed(self.act_fn):
            between = gate_rows(both)
        else:
            gate, up = both.chunk(2, -1)
            between = self.act_fn(gate) * up
        output: torch.Tensor = self.down_proj(between)
        return output

    def suits_kernels(self: Any) -> bool:
        """Whether the gate is a SiLU, and of whole eights."""
        values = torch.linspace(-100, 100, 801)
        is_silu = torch.allclose(self.act_fn(values), nn.functional.silu(values), rtol=1e-5, atol=1e-6)
        return is_silu and self.gate_proj.out_features % LANES == 0

    def probe(self: Any, call: Callable[..., Any], rows: torch.Tensor, cache: str) -> Any:
        """What `call`, this forward or the base's, gives."""
        return (call(rows),)


def _is_watched(module: Any) -> bool:
    own = module.__dict__
    return "forward" in own or any(map(own.__getitem__, HOOKS))


def _is_changed(activation: Any) -> bool:
    return isinstance(activation, nn.Module) and (_has_any_global_hook() or _is_watched(activation))


def _is_plain(states: torch.Tensor) -> bool:
    return states.dtype == torch.float32 and states.stride(3) == 1


def _seen(mask: torch.Tensor | None) -> Any:
    """What one row sees by a mask, for [`attend_rows`]; `False` for masks of another kind. It is kept on the mask: all
    layers share that."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.shape[:3] != (1, 1, 1):
        return False
    found = getattr(mask, "seen_places", None)
    if found is None:
        places = mask.flatten().nonzero()[:, 0].int()
        found = mask.seen_places = places, torch.tensor([0, len(places)], dtype=torch.int32)  # type: ignore[attr-defined]
    return found


def _implementation(config: Any) -> str:
    """Of attention, past what transformers does for each attribute of a configuration: each layer asks."""
    found: str = object.__getattribute__(config, "_attn_implementation")
    return found


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
    keeps_state = getattr(model, "_is_stateful", False)  # the rows of its steps attend together
    for module in list(model.modules()):
        for mixin in (FusedAttention, FusedMLP):
            if not isinstance(module, Fused) and all(hasattr(module, name) for name in mixin.layer_names):
                layers = [getattr(module, name) for name in mixin.layer_names]
                if _shared(*layers) is not None and "forward" not in vars(module):
                    _try(module, mixin)
                    if isinstance(module, FusedAttention):
                        # Where small differences grow, as decoding decides it; elsewhere rows attend together.
                        module.attends_by_row = module.has_kernels and not keeps_state and module.rounds_inputs()


def _try(module: Any, mixin: Any) -> None:
    """Fuses a module, if it stays what it is."""
    before, base = dict(vars(module)), module.__class__
    module.__class__ = _fused(mixin, base)
    for name in ("cache", "past_key_values"):  # of newer versions of transformers and of older ones
        # Whatever the forward of another kind of module raises: it is not fused.
        with suppress(Exception):
            module.prepare()
            module.training = False
            norms = [each for each in module.modules() if isinstance(each, PackedNorm) and each.has_kernels]
            for norm in norms:
                norm.has_kernels = False
            try:
                is_same = all(_is_same(module, base, name, count, scale) for count, scale in _PROBED)
            finally:
                for norm in norms:
                    norm.has_kernels = True
            if is_same:
                module.has_kernels = has_kernels() and module.suits_kernels()
                if module.has_kernels:
                    module.has_kernels = all(_is_close(module, base, name, count, scale) for count, scale in _PROBED)
                module.training = before["training"]
                return
    vars(module).clear()
    vars(module).update(before)
    module.__class__ = base


def _is_same(module: Any, base: Any, cache: str, count: int, scale: float) -> bool:
    """Whether a fused module gives so many rows the bits that its base gives them."""
    return all(map(torch.equal, *_both(module, base, cache, count, scale)))


def _is_close(module: Any, base: Any, cache: str, count: int, scale: float) -> bool:
    """Whether it gives them nearly the same values."""
    pairs = zip(*_both(module, base, cache, count, scale), strict=True)
    return all(bool((found - own).norm() <= _CLOSE * own.norm()) for found, own in pairs)


def _both(module: Any, base: Any, cache: str, count: int, scale: float) -> list[Any]:
    """What a fused module and its base give so many rows."""
    size = next(layer.in_features for layer in module.children() if isinstance(layer, PackedLinear))
    rows = torch.randn(1, count, size, generator=torch.Generator().manual_seed(count)) * scale
    calls = module.forward, partial(base.forward, module)
    return [module.probe(call, rows, cache) for call in calls]
