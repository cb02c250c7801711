"""What stands around packed layers, with fewer operations: for few rows, a CPU takes as long to start them as to
multiply.

A module's class becomes a subclass of its own, as far as the values stay the very same. Whether they do is looked at,
layer by layer (`fuse.py`): names only say what may be tried. Where there are [`kernels`], they then take the place of
torch's operations, if the values stay close: sums have another order. Last, a decoder layer becomes one kernel
(`fused_layer.py`), if that gives the very values of its parts' kernels. Where the parts are not as they were then, and
in training, a module computes as its own class does.

`B` sequences, `Q` rows of each, `D` head width.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .kernels import LANES, Turns, attend_rows, gate_rows, takes, turn_heads
from .packed_layers import HOOKS, PackedLinear, PackedNorm, Product, check_rows


class Fused:
    """What fused modules share. Their `base_class` is what they were."""

    base_class: type
    layer_names: tuple[str, ...]  # of those that read the same rows
    has_kernels = False  # whether kernels compute
    needs_kernels = False  # and whether it is fused for their sake alone
    attends_by_row = False  # whether rows attend one by one, in steps and in AR decoding

    def together(self: Any, rows: torch.Tensor) -> torch.Tensor:
        """What these layers give, side by side: by one product, if nothing else happens in them."""
        layers = [self._modules[name] for name in self.layer_names]
        product = shared_product(*layers)
        if product is None:
            return torch.cat([layer(rows) for layer in layers], -1)
        check_rows(rows)
        found: torch.Tensor = product.matrix(rows)
        if any(layer.bias is not None for layer in layers):
            found.add_(torch.cat([layer.bias for layer in layers]))
        return found

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copies and pickles are made of classes that a name can find, and have no addresses of memory."""
        parts: Any = super().__reduce_ex__(protocol)
        (make, (kind, *rest), state, *others), bases = parts, type(self).__bases__
        state = {**state, "_looked": None, "_next": None, "_chain": None}
        if bases[1:] != (self.base_class,):  # somebody's subclass
            return make, (kind, *rest), state, *others
        return _rebuilt, (bases[0], self.base_class, make, *rest), state, *others


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
        places = (None if each is None else each.data_ptr() for each in weights)
        return (*map(id, (*norms, *weights)), *versions, *places, *(getattr(norm, "eps", None) for norm in norms))

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
        is_known = is_known and not (torch.is_grad_enabled() and any(norm.weight.requires_grad for norm in norms))
        if not is_known or implementation(self.config) != "sdpa" or any(map(_is_watched, norms)):
            own: Any = super()
            found: tuple[torch.Tensor, Any] = own.forward(hidden_states, position_embeddings, attention_mask, **how)
            return found
        queries, keys, _ = self._heads
        rows = self.together(hidden_states)
        turns = turns_of((cos, sin), rows, self.head_dim) if self.has_kernels and takes(rows) else None
        if turns is not None:
            turn_heads(rows, turns, queries + keys, self._norms, self._eps)
            query, key, value = self.split(rows)
        else:
            heads = rows.view(*rows.shape[:-1], -1, self.head_dim).transpose(1, 2)
            turned, value = heads.split_with_sizes((queries + keys, keys), 1)
            if self._norms is not None:
                turned = PackedNorm.normed(turned, self._norms, self._eps)
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            first, second = turned.split_with_sizes((self.head_dim // 2,) * 2, -1)
            turned = (turned * cos).add_(torch.cat((-second, first), -1) * sin)
            query, key = turned.split_with_sizes((queries, keys), 1)
        output, weights = self.attend(query, key, value, attention_mask, turns is not None, how)
        return self.o_proj(output), weights

    def split(self: Any, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, `(B, heads, Q, D)` each, that stand side by side in rows `(B, Q, width)`."""
        heads = rows.view(*rows.shape[:-1], -1, self.head_dim).transpose(1, 2)
        parts: tuple[torch.Tensor, ...] = heads.split_with_sizes(self._heads, 1)
        return parts

    def attend(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, is_native: bool, how: Any
    ) -> tuple[torch.Tensor, Any]:
        """What turned queries find, `(B, Q, width of queries)`, with the weights of an implementation that has them.

        Args:
            query, key, value: `(B, heads, Q, D)`.
            mask: the layer's.
            is_native: whether kernels turned them.
            how: the layer's other arguments, with its cache.
        """
        is_static = False
        for name in [name for name, each in how.items() if isinstance(each, Cache)]:
            past = how.pop(name)
            key, value = past.update(key, value, self.layer_idx)
            is_static = past.is_compileable
        seen: Any = False
        if is_native and not is_static and is_plain(key) and is_plain(value):
            seen = self.seen(mask, len(query), query.shape[2], key.shape[2])
        if seen is not False:
            return attend_rows(query, key, value, self.scaling, seen).flatten(2), None
        how.pop("position_ids", None)  # for packed documents, in kernels of GPUs
        how["sliding_window"] = getattr(self, "sliding_window", None)
        attend = self.functions()["sdpa"]
        output, weights = attend(self, query, key, value, mask, dropout=0.0, scaling=self.scaling, **how)
        return output.flatten(2), weights

    def functions(self: Any) -> Any:
        """What looks up the attention function by name."""
        kind: Any = type(self)
        return _home(kind).ALL_ATTENTION_FUNCTIONS

    def seen(self: Any, mask: Any, sequences: int, count: int, keys: int) -> Any:
        """What `count` rows of each sequence see of so many keys by a mask, for [`attend_rows`]; `False` where they
        attend together, or by a function of others."""
        attend = self.functions()["sdpa"] if self.attends_by_row else None
        if attend is not sdpa_attention_forward and not hasattr(attend, "takes_kernels"):
            return False
        return _seen(mask, sequences, count, keys)

    def suits_kernels(self: Any) -> bool:
        """Whether their sizes are those of heads, and what was looked at was this forward."""
        return self.head_dim % (2 * LANES) == 0 and implementation(self.config) == "sdpa"

    def probe(self: Any, call: Callable[..., Any], rows: torch.Tensor, cache: str) -> Any:
        """What `call`, this forward or the base's, gives and caches, behind other rows and under a mask, too. `cache`
        is what the base calls it."""
        count, past = rows.shape[1], DynamicCache()
        generator = torch.Generator().manual_seed(count)
        known = torch.randn(2, 1, self._heads[1], 7, self.head_dim, generator=generator)
        for index in sorted({0, self.layer_idx}):  # a model's first layer is asked how long the cache is
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
        values = torch.linspace(-100, 100, 801)
        how: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
        found = self.act_fn(values)
        self._is_gelu = torch.allclose(found, nn.functional.gelu(values, approximate="tanh"), **how)
        self._is_known = self._is_gelu or torch.allclose(found, nn.functional.silu(values), **how)
        assert self.gate_proj.out_features == self.up_proj.out_features == self.down_proj.in_features

    def forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
        """The base's."""
        both = self.together(rows)
        if self.has_kernels and takes(both) and self.act_fn is self._gate and not _is_changed(self.act_fn):
            between = gate_rows(both, self._is_gelu)
        else:
            gate, up = both.chunk(2, -1)
            between = self.act_fn(gate) * up
        output: torch.Tensor = self.down_proj(between)
        return output

    def suits_kernels(self: Any) -> bool:
        """Whether the gate is a known one, and of whole eights."""
        return bool(self._is_known) and self.gate_proj.out_features % LANES == 0

    def probe(self: Any, call: Callable[..., Any], rows: torch.Tensor, cache: str) -> Any:
        """What `call`, this forward or the base's, gives."""
        return (call(rows),)


def _is_watched(module: Any) -> bool:
    own = module.__dict__
    return "forward" in own or any(map(own.__getitem__, HOOKS))


def _is_changed(activation: Any) -> bool:
    return isinstance(activation, nn.Module) and (_has_any_global_hook() or _is_watched(activation))


def turns_of(turns: Turns, rows: torch.Tensor, width: int) -> Turns | None:
    """Rotary embeddings `(B, Q, D)` of rows `(B, Q, ...)`; `None` for others than kernels take."""
    shape, (cosines, sines) = (*rows.shape[:2], width), turns
    if cosines.dtype != torch.float32 or sines.dtype != torch.float32 or cosines.shape != sines.shape:
        return None
    if cosines.shape != shape:
        if cosines.shape != (1, *shape[1:]):
            return None
        cosines, sines = cosines.expand(shape), sines.expand(shape)
    return cosines.contiguous(), sines.contiguous()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is in float32 and the numbers of a row have no gaps."""
    return tensor.dtype == torch.float32 and tensor.stride(-1) == 1


def _seen(mask: torch.Tensor | None, sequences: int, count: int, keys: int) -> Any:
    """What each row sees by a mask, for [`attend_rows`]; `False` for masks of another kind. It is kept on the mask:
    layers share that."""
    if mask is None:
        return None if count == 1 else False
    version = 0 if mask.is_inference() else mask._version
    known: Any = getattr(mask, "seen_places", None)
    if known is None or known[0] != version:
        # A step says it beside its mask. That of an AR step is `(B, 1, 1, K)`.
        visible = getattr(mask, "visible", mask if count == 1 else None)
        found: Any = False
        if visible is not None and visible.dtype == torch.bool and visible.shape[1:3] == (1, count):
            rows = visible.expand(sequences, -1, -1, -1).flatten(0, 2)
            ends = nn.functional.pad(rows.sum(1).cumsum(0), (1, 0))
            found = rows.nonzero()[:, 1].int(), ends.int(), rows.shape
        mask.seen_places = known = version, found  # type: ignore[attr-defined]
    return known[1][:2] if known[1] and known[1][2] == (sequences * count, keys) else False


def implementation(config: Any) -> str:
    """Of attention, past what transformers does for each attribute of a configuration: each layer asks."""
    found: str = object.__getattribute__(config, "_attn_implementation")
    return found


def shared_product(*layers: Any) -> Product | None:
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
def fused_class(mixin: type, base: type) -> type:
    """A class that has the base's name, which transformers looks at."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "base_class": base})


def _rebuilt(mixin: type, base: type, make: Any, *rest: Any) -> Any:
    return make(fused_class(mixin, base), *rest)
