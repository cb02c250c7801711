"""A decoder layer of a packed model that is computed by one kernel, see [`fused`].

`B` sequences, `Q` rows of each.
"""

from collections.abc import Callable
from contextlib import suppress
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .fused import Fused, FusedAttention, FusedMLP, implementation, is_plain, turns_of
from .kernels import LayerKernels, Updates, memory_of, takes
from .matrices import Blocked
from .packed_layers import HOOKS, PackedLinear, PackedNorm

# Whose hooks stay on attention once anything was recorded; sdpa has nothing for them.
_RECORDER = "transformers.utils.output_capturing"


class _Looked(NamedTuple):
    """What a layer was when its kernels were prepared."""

    kernels: LayerKernels
    layers: list[PackedLinear]  # those of [`LayerKernels`]
    owners: list[dict[str, Any]]  # of its modules, of their parameters
    found: list[Any]  # in these
    modules: list[nn.Module]
    kinds: list[type]  # of these modules
    own: list[dict[str, Any]]  # their attributes, without a forward of their own among them
    hooks: list[dict[Any, Any]]  # which were empty
    norms: list[PackedNorm]
    of_heads: torch.Tensor | None  # of queries' and keys' norms, joined
    state: list[Any]


class FusedLayer(Fused):
    """A decoder layer that is computed by one kernel, or by two where a cache stores keys and values by itself; the
    updates of a mask adapter, too. While anything else happens in its modules, it computes as its own class does."""

    layer_names = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    needs_kernels = True
    _looked: _Looked | None

    def prepare(self: Any) -> _Looked:
        """Raises `AttributeError` or `TypeError` for other layers."""
        attention, mlp = self.self_attn, self.mlp
        is_gemma = hasattr(self, "pre_feedforward_layernorm")
        names = [*self.layer_names[2:], *(("pre_feedforward_layernorm", "post_feedforward_layernorm") * is_gemma)]
        norms = [getattr(self, name) for name in names]
        layers = [*map(attention.__getattr__, (*FusedAttention.layer_names, "o_proj"))]
        layers += map(mlp.__getattr__, (*FusedMLP.layer_names, "down_proj"))
        groups = layers[:3], layers[3:4], layers[4:6], layers[6:]
        is_known = attention._is_prepared and attention._parts == attention.parts() and mlp.act_fn is mlp._gate
        is_known = is_known and type(attention).forward is FusedAttention.forward
        is_known = is_known and type(mlp).forward is FusedMLP.forward
        is_known = is_known and all(type(norm) is PackedNorm and norm.has_kernels for norm in norms)
        for group in groups:
            product = group[0].product
            is_known = is_known and len(product.sizes) == len(group) and isinstance(product.matrix, Blocked)
            is_known = is_known and all(type(each) is PackedLinear and each.product is product for each in group)
        sides = norms if is_gemma else [norms[0], None, norms[1], None]
        factors = [None if norm is None else norm.factor for norm in sides]
        hidden, biases, of_heads = layers[3].out_features, [layer.bias for layer in layers], attention._norms
        sizes = [
            *[hidden] * 4,
            sum(attention._heads[:2]) * attention.head_dim,
            *(layer.out_features for layer in layers),
        ]
        for tensor, size in zip((*factors, of_heads, *biases), sizes, strict=True):
            is_known = is_known and (tensor is None or (is_plain(tensor) and tensor.numel() == size))
        if not is_known:
            raise TypeError("These parts have no kernels.")
        kernels = LayerKernels(
            [group[0].product.matrix for group in groups],
            biases,
            [*factors, of_heads],
            [*(getattr(norm, "eps", 0.0) for norm in sides), attention._eps],
            tuple(attention._heads[:2]),
            mlp._is_gelu,
        )
        owners = [each._modules for each in (self, attention, mlp)]
        modules = [each for owner in owners for each in owner.values() if isinstance(each, nn.Module)]
        owners += [each._parameters for each in modules]
        found = [each for owner in owners for each in owner.values()]
        others = [id(each._forward_hooks) for each in (attention, *layers)]  # which are looked at one by one
        hooks = [hooks for each in modules for name in HOOKS if id(hooks := vars(each)[name]) not in others]
        kinds, own = [*map(type, modules)], [*map(vars, modules)]
        where = owners, found, modules, kinds, own, hooks, norms, of_heads, _state(norms, layers)
        self._looked = looked = _Looked(kernels, layers, *where)
        return looked

    def look(self: Any) -> _Looked | None:
        """What is known of the layer, if all is as it was."""
        looked: _Looked | None = self._looked
        with suppress(AttributeError, TypeError):  # where it cannot be prepared any more
            if looked is None:  # copied
                looked = self.prepare()
            attention = self.self_attn
            if any(looked.hooks) or _has_any_global_hook() or implementation(attention.config) != "sdpa":
                return None
            if any(getattr(hook, "__module__", None) != _RECORDER for hook in attention._forward_hooks.values()):
                return None
            found = [each for owner in looked.owners for each in owner.values()]
            if len(found) != len(looked.found) or not all(map(is_, found, looked.found)):
                return None
            if [*map(type, looked.modules)] != looked.kinds or any("forward" in own for own in looked.own):
                return None
            if torch.is_grad_enabled() and any(each.requires_grad for each in self.parameters()):
                return None
            is_same = attention._parts == attention.parts() and attention._norms is looked.of_heads
            is_same = is_same and looked.state == _state(looked.norms, looked.layers)
            return looked if is_same else self.prepare()
        return None

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        """The base's, on `(B, Q, hidden size)`."""
        turns: Any = how.get("position_embeddings")
        looked: _Looked | None = None
        updates: Any = None
        if not args and turns is not None and self.has_kernels and not self.training and takes(hidden_states):
            looked = self.look()
        attention = self.self_attn
        if looked is not None and hidden_states.ndim == 3 and hidden_states.shape[2] == looked.kernels.hidden:
            turns, updates = turns_of(turns, hidden_states, attention.head_dim), _updates(looked.layers, hidden_states)
        else:
            turns = None
        if looked is None or turns is None or updates is False:
            own: Any = super()
            found: torch.Tensor = own.forward(hidden_states, *args, **how)
            return found
        kernels, rows, mask = looked.kernels, hidden_states.contiguous(), how.pop("attention_mask", None)
        rooms: list[Any] = [each.room(attention.layer_idx) for each in how.values() if hasattr(each, "room")]
        if len(rooms) == 1 and rooms[0] is not None:
            keys, values, slots, longest = rooms[0]
            seen = attention.seen(mask, *rows.shape[:2], longest)
            shape = attention._heads[1], attention.head_dim
            is_fitting = keys.shape[1::2] == values.shape[1::2] == shape and len(keys) >= len(rows)
            if seen is not False and is_fitting and slots.shape == rows.shape[:2] and is_plain(keys):
                memory = memory_of(keys, values, slots, longest, attention.scaling, seen)
                return kernels.step(rows, turns, memory, updates)
        del how["position_embeddings"]
        states = attention.split(kernels.begin(rows, turns, updates))
        attended, _ = attention.attend(*states, mask, True, how)
        return kernels.end(rows, attended.contiguous(), updates)

    def suits_kernels(self: Any) -> bool:
        """Whether its parts have kernels."""
        return bool(self.self_attn.has_kernels and self.mlp.has_kernels)

    def probe(self: Any, call: Callable[..., Any], rows: torch.Tensor, cache: str) -> Any:
        """What `call`, this forward or the base's, gives and caches."""

        def attend(rows: torch.Tensor, turns: Any, mask: Any, **how: Any) -> tuple[torch.Tensor]:
            return (call(rows, attention_mask=mask, position_embeddings=turns, **how),)

        return self.self_attn.probe(attend, rows, cache)


def _state(norms: list[PackedNorm], layers: list[PackedLinear]) -> list[Any]:
    """What may be changed in place: where weights lie, and how."""
    tensors = [norm.factor for norm in norms]
    tensors += [bias for layer in layers if (bias := layer._parameters["bias"]) is not None]
    state: list[Any] = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in tensors]
    return [*state, *(norm.eps for norm in norms), *(vars(layer)["product"] for layer in layers)]


def _updates(layers: list[Any], rows: torch.Tensor) -> Any:
    """What hooks add to these layers; `None` where they add nothing, and `False` where kernels cannot add it."""
    pairs: list[Any] = [None] * len(layers)
    places = None
    for number, layer in enumerate(layers):
        for hook in layer._forward_hooks.values():
            if not hasattr(hook, "low_rank") or pairs[number] is not None:
                return False
            if (found := hook.low_rank(rows)) is not None:
                down, up, places = found
                if not (isinstance(down, Blocked) and isinstance(up, Blocked)):
                    return False
                pairs[number] = down, up
    return None if places is None else Updates(pairs, places)
