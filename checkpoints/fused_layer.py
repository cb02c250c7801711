"""A decoder layer of a packed model that is computed by one kernel, see [`fused`]; in a step of decoding, with those
that follow it.

`B` sequences, `Q` rows of each.
"""

import weakref
from collections.abc import Callable
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .fused import Fused, FusedAttention, FusedMLP, implementation, is_plain, turns_of
from .kernels import LayerKernels, Turns, Updates, memory_of, step_layers, takes
from .matrices import Blocked
from .packed_layers import HOOKS, PackedLinear, PackedNorm

# Whose hooks stay on attention once anything was recorded; sdpa has nothing for them.
_RECORDER = "transformers.utils.output_capturing"
_FORWARDS = repeat("forward")
_MOST_AHEAD = 64  # rows: for more, Python's time does not matter, and memory does


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
    held: list[torch.Tensor]  # factors of norms, and biases
    state: list[Any]


class FusedLayer(Fused):
    """A decoder layer that is computed by one kernel, or by two where a cache stores keys and values by itself; the
    updates of a mask adapter, too. While anything else happens in its modules, it computes as its own class does."""

    layer_names = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    needs_kernels = True
    _looked: _Looked | None
    _next: Any = None  # a reference to the layer that follows, once it has run
    _is_end = False  # something happens between this layer and the next one

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
        held = [*(norm.factor for norm in norms), *(bias for bias in biases if bias is not None)]
        where = owners, found, modules, kinds, own, hooks, norms, of_heads, held, _state(norms, layers, held)
        self._looked = looked = _Looked(kernels, layers, *where)
        return looked

    def look(self: Any) -> _Looked | None:
        """What is known of the layer, if all is as it was. Every forward asks every layer: lists are compared by
        functions of C."""
        looked: _Looked | None = self._looked
        try:
            if looked is None:  # copied
                looked = self.prepare()
            attention = self._modules["self_attn"]
            if any(looked.hooks) or _has_any_global_hook() or implementation(attention.config) != "sdpa":
                return None
            if any(getattr(hook, "__module__", None) != _RECORDER for hook in attention._forward_hooks.values()):
                return None
            found = [*chain.from_iterable(map(dict.values, looked.owners))]
            if len(found) != len(looked.found) or not all(map(is_, found, looked.found)):
                return None
            if [*map(type, looked.modules)] != looked.kinds or any(map(dict.__contains__, looked.own, _FORWARDS)):
                return None
            if torch.is_grad_enabled() and any(each.requires_grad for each in self.parameters()):
                return None
            is_same = attention._parts == attention.parts() and attention._norms is looked.of_heads
            is_same = is_same and looked.state == _state(looked.norms, looked.layers, looked.held)
            return looked if is_same else self.prepare()
        except (AttributeError, KeyError, TypeError):  # it cannot be prepared any more
            return None

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        """The base's, on `(B, Q, hidden size)`."""
        ready: _Ready | None = None
        is_known = not args and how.get("position_embeddings") is not None and self.has_kernels and not self.training
        if is_known and takes(hidden_states) and hidden_states.ndim == 3:
            caches = [each for each in how.values() if hasattr(each, "room")]
            cache = caches[0] if len(caches) == 1 else None
            ahead = None if cache is None else _ahead_in(self, cache)
            if ahead is not None and (found := ahead.found(self, hidden_states, how)) is not None:
                return found
            ready = self.ready(hidden_states, how, cache)
        if ready is None:
            own: Any = super()
            output: torch.Tensor = own.forward(hidden_states, *args, **how)
            return output
        rows, mask = hidden_states.contiguous(), how.get("attention_mask")
        if ahead is not None and ready.memory is not None:
            return ahead.step(self, ready, rows, how, cache)
        for name in ("attention_mask", "position_embeddings"):
            how.pop(name, None)
        states = self.self_attn.split(ready.kernels.begin(rows, ready.turns, ready.updates))
        attended, _ = self.self_attn.attend(*states, mask, True, how)
        return ready.kernels.end(rows, attended.contiguous(), ready.updates)

    def ready(self: Any, rows: torch.Tensor, how: dict[str, Any], cache: Any) -> "_Ready | None":
        """What the kernels need for rows `(B, Q, H)` and the layer's other arguments; `None` where they are not for
        them. `cache` is one of these, if it may have room for kernels."""
        if not self.has_kernels or self.training or (looked := self.look()) is None:
            return None
        attention = self._modules["self_attn"]
        sequences, count, width = rows.shape
        turns = turns_of(how["position_embeddings"], rows, attention.head_dim)
        if width != looked.kernels.hidden or turns is None or (updates := _updates(looked, rows)) is False:
            return None
        room = None if cache is None else cache.room(attention.layer_idx)
        memory: Any = None
        if room is not None:
            keys, values, slots, longest = room
            seen = attention.seen(how.get("attention_mask"), sequences, count, longest)
            most, *shape = keys.shape[0], keys.shape[1], keys.shape[3]
            is_fitting = shape == [attention._heads[1], attention.head_dim] and values.shape == keys.shape
            if seen is not False and is_fitting and most >= sequences and is_plain(keys) and is_plain(values):
                is_fitting = slots.shape == (sequences, count)
                memory = memory_of(keys, values, slots, longest, attention.scaling, seen) if is_fitting else None
        return _Ready(looked.kernels, turns, memory, updates)

    def suits_kernels(self: Any) -> bool:
        """Whether its parts have kernels."""
        return bool(self.self_attn.has_kernels and self.mlp.has_kernels)

    def probe(self: Any, call: Callable[..., Any], rows: torch.Tensor, cache: str) -> Any:
        """What `call`, this forward or the base's, gives and caches."""

        def attend(rows: torch.Tensor, turns: Any, mask: Any, **how: Any) -> tuple[torch.Tensor]:
            return (call(rows, attention_mask=mask, position_embeddings=turns, **how),)

        return self.self_attn.probe(attend, rows, cache)


class _Ready(NamedTuple):
    """What the kernels of a layer need for some rows."""

    kernels: LayerKernels
    turns: Turns
    memory: Any  # where its keys and values go; `None` where a cache stores them by itself
    updates: Updates | None


class _Run(NamedTuple):
    """Layers that were computed ahead."""

    layers: list[Any]
    found: list[torch.Tensor]  # what each gives
    how: list[Any]  # the arguments of all


class _Ahead:
    """The layers of a step that were computed ahead.

    Before a layer asks for its kernels, Python takes as long as they compute for a few rows. So the first of several
    computes for all, by one call, and each of the others gives what was found if it gets what it was found for: the
    very rows that the one before gave, unchanged, and the same arguments. Else it computes anew, and what it stores in
    the cache takes the place of what was stored there. Which layer follows, a layer learns as they run (`_next`).
    """

    def __init__(self) -> None:
        self.run: _Run | None = None
        self.place = 0  # of the layer of the run that comes next
        self.last: tuple[Any, torch.Tensor] | None = None  # the layer that ran last, and what it gave
        self.done: list[Any] = []  # layers that ran: what they stored stays

    def found(self, layer: Any, rows: torch.Tensor, how: dict[str, Any]) -> torch.Tensor | None:
        """What the layer gives, if that is known."""
        run, place = self.run, self.place
        before, given = self.last or (None, None)
        if run is not None and run.layers[place] is layer:
            values = [*how.values()]
            is_same = given is rows and rows._version == 0 and len(values) == len(run.how)
            if is_same and all(map(is_, values, run.how)):
                self.place, self.last = place + 1, (layer, run.found[place])
                self.done.append(layer)
                if self.place == len(run.layers):
                    self.run = None
                return run.found[place]
            vars(before)["_is_end"] = True  # something happens between them
        elif given is rows:
            vars(before)["_next"] = weakref.ref(layer)  # a module would take it for a part
        self.run = None
        return None

    def step(self, layer: Any, ready: _Ready, rows: torch.Tensor, how: dict[str, Any], cache: Any) -> torch.Tensor:
        """What the layer gives, whose kernels are ready; those that follow it are computed, too."""
        layers, all_ready = [layer], [ready]
        self.done.append(layer)
        if rows.shape[0] * rows.shape[1] <= _MOST_AHEAD:
            while (layer := _following(layer)) is not None and layer not in layers and layer not in self.done:
                following = layer.ready(rows, how, cache)
                if following is None or following.memory is None:
                    break
                layers.append(layer)
                all_ready.append(following)
        kernels, turns, memories, updates = zip(*all_ready, strict=True)
        found = step_layers(kernels, rows, turns[0], memories, updates)
        self.run = _Run(layers, found, [*how.values()]) if len(layers) > 1 else None
        self.place, self.last = 1, (layers[0], found[0])
        return found[0]


def _ahead_in(layer: Any, cache: Any) -> _Ahead | None:
    """The step's own, which is kept on its slots and ends with them; `None` where a cache stores by itself."""
    number = getattr(layer._modules.get("self_attn"), "layer_idx", None)
    room = None if number is None else cache.room(number)
    if room is None:
        return None
    slots: Any = room[2]
    found: _Ahead | None = getattr(slots, "layers_ahead", None)
    if found is None:
        slots.layers_ahead = found = _Ahead()
    return found


def _following(layer: Any) -> Any:
    """The layer that follows, if nothing happens between them. Hooks may state that they only read (`only_reads`), as
    those do that record what layers give."""
    following = None if layer._is_end or layer._next is None else layer._next()
    for hook in layer._forward_hooks.values():
        if not getattr(hook, "only_reads", False) and getattr(hook, "__module__", None) != _RECORDER:
            return None
    return None if following is None or following._forward_pre_hooks else following


def _state(norms: list[PackedNorm], layers: list[PackedLinear], held: list[torch.Tensor]) -> list[Any]:
    """What may be changed in place: where weights lie, and how."""
    state: list[Any] = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in held]
    state += [norm.eps for norm in norms]
    state += [id(norm.factor) for norm in norms]
    return state + [vars(layer)["product"] for layer in layers]


def _updates(looked: _Looked, rows: torch.Tensor) -> Any:
    """What hooks add to the linear layers; `None` where they add nothing, and `False` where kernels cannot add it."""
    pairs: list[Any] = [None] * len(looked.layers)
    places = None
    for number, layer in enumerate(looked.layers):
        for hook in layer._forward_hooks.values():
            if not hasattr(hook, "low_rank") or pairs[number] is not None:
                return False
            if (found := hook.low_rank(rows)) is not None:
                down, up, places = found
                if not (isinstance(down, Blocked) and isinstance(up, Blocked)):
                    return False
                pairs[number] = down, up
    return None if places is None else Updates(pairs, places)
