"""A decoder layer of a packed model that is computed by one kernel, see [`fused`]; in a step of decoding, with those
that follow it.

`B` sequences, `Q` rows of each.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
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
    _chain: Any = None  # see there: of this layer and those that follow
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
        """What is known of the layer, if all is as it was. A forward asks every layer, but for those of a [`_Chain`]:
        lists are compared by functions of C."""
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
        ahead: Any = _STEP.ahead()
        is_under_way = ahead is not None and ahead.run is not None and not args
        if is_under_way and (found := ahead.found(self, hidden_states, how)) is not None:
            return found
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
            if seen is not False and _fits(attention, keys, values) and len(keys) >= sequences:
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


def _fits(attention: Any, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a cache's buffers `(B, heads, C, D)` are for kernels, and of this attention."""
    is_fitting = [keys.shape[1], keys.shape[3]] == [attention._heads[1], attention.head_dim]
    return is_fitting and values.shape == keys.shape and is_plain(keys) and is_plain(values)


class _Ready(NamedTuple):
    """What the kernels of a layer need for some rows."""

    kernels: LayerKernels
    turns: Turns
    memory: Any  # where its keys and values go; `None` where a cache stores them by itself
    updates: Updates | None


class _Chain:
    """Layers that were ready together, and all that this rested on: while it is as it was, they are ready again. Each
    step asks that of all layers, so lists of theirs are compared by functions of C.

    Args:
        layers: one behind the other, as [`FusedLayer.look`] found them.

    Raises:
        KeyError: for layers that must be asked one by one.
    """

    def __init__(self, layers: list[Any]):
        attentions = [layer._modules["self_attn"] for layer in layers]
        self.of_attention, alike = [*map(vars, attentions)], itemgetter("head_dim", "attends_by_row")
        if len({(type(each), *alike(vars(each))) for each in attentions}) > 1:
            raise KeyError("These layers see other keys.")
        self.others, self.looked = layers[1:], [layer._looked for layer in layers]  # the first one keeps this
        linear = [layer for each in self.looked for layer in each.layers]
        self.hooked = [*map(vars, (*attentions, *self.others, *linear))]
        self.hooks = [layers[0]._forward_hooks, *(own["_forward_hooks"] for own in self.hooked)]
        self.kinds = {type(hook) for layer in linear for hook in layer._forward_hooks.values()}
        self.empty = [hooks for each in self.looked for hooks in each.hooks]
        self.empty += [layer._forward_pre_hooks for layer in self.others]
        self.dicts = self.hooks + [owner for each in self.looked for owner in each.owners]
        self.modules = [module for each in self.looked for module in each.modules]
        self.of_modules = [own for each in self.looked for own in each.own]
        self.in_place = [
            [each for looked in self.looked for each in part(looked)]
            for part in (attrgetter("norms"), attrgetter("layers"), attrgetter("held"))
        ]
        self.attentions, self.configs = attentions, {id(each.config): each.config for each in attentions}.values()
        self.normed = [attention for attention in attentions if attention._parts]
        # For each cache, which is used by one call at a time: references to its buffers, and where they lie.
        self.memories: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[Any]]] = weakref.WeakKeyDictionary()
        self.objects, self.numbers = self._now(layers)

    def _now(self, layers: list[Any]) -> tuple[list[Any], list[Any]]:
        """Objects that must be the same, and what must be equal; so many objects there are as that says."""
        own = [*map(vars, layers)]
        objects = [*chain.from_iterable(map(dict.values, self.dicts)), *map(type, self.modules)]
        objects += map(itemgetter("_forward_hooks"), self.hooked)
        objects += map(itemgetter("_looked"), own)
        objects += [each.get("_next") for each in own]
        objects += chain.from_iterable(map(itemgetter("config", "_norms"), self.of_attention))
        numbers = [
            [*map(len, self.dicts)], _state(*self.in_place), [attention.parts() for attention in self.normed],
            [each.get("_is_end") for each in own], [*map(itemgetter("training", "has_kernels"), own)],
            [*map(itemgetter("layer_idx", "scaling", "head_dim", "attends_by_row"), self.of_attention)],
        ]  # fmt: skip
        return objects, numbers

    def again(
        self, layer: Any, ready: _Ready, rows: torch.Tensor, cache: Any
    ) -> tuple[list[Any], list[LayerKernels], list[Any], list[Updates | None]] | None:
        """The layers, and what their kernels need for these rows, if they are ready as the first one is."""
        layers = [layer, *self.others]
        if torch.is_grad_enabled() or any(self.empty) or any(map(dict.__contains__, self.of_modules, _FORWARDS)):
            return None
        if any(implementation(config) != "sdpa" for config in self.configs):
            return None
        try:
            objects, numbers = self._now(layers)
        except KeyError:
            return None
        if numbers != self.numbers or not all(map(is_, objects, self.objects)):
            return None
        if (memories := self._memories(cache, ready.memory)) is None:
            return None
        updates: list[Any] = [None] * len(layers)
        if not all(kind.adds_nothing() for kind in self.kinds):
            updates = [_updates(looked, rows) for looked in self.looked]
            if False in updates:
                return None
        return layers, [looked.kernels for looked in self.looked], memories, updates

    def _memories(self, cache: Any, memory: Any) -> list[Any] | None:
        """Where the layers' keys and values go in the step that the first one's `memory` is for; `None` where the
        cache has no such room."""
        rooms: list[Any] = [cache.room(attention.layer_idx) for attention in self.attentions]
        if None in rooms:
            return None
        buffers = [buffer for room in rooms for buffer in room[:2]]
        known, memories = self.memories.get(cache, ((), []))
        if len(known) != len(buffers) or not all(map(is_, [each() for each in known], buffers)):
            pairs = list(zip(self.attentions, rooms, strict=True))
            if not all(_fits(attention, room[0], room[1]) for attention, room in pairs):
                return None
            memories = [
                memory_of(keys, values, slots, longest, attention.scaling, None)
                for attention, (keys, values, slots, longest) in pairs
            ]
            self.memories[cache] = [*map(weakref.ref, buffers)], memories
        shared = memory.slots, memory.places, memory.ends, memory.of_each, memory.longest
        for each in memories:
            each.slots, each.places, each.ends, each.of_each, each.longest = shared
        return memories


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
        is_short = rows.shape[0] * rows.shape[1] <= _MOST_AHEAD
        before: _Chain | None = layer._chain if is_short else None
        if before is not None and any(each in self.done for each in before.others):
            before = None
        known = None if before is None else before.again(layer, ready, rows, cache)
        layers, kernels, memories, updates = known or self._ask(layer, ready, rows, how, cache if is_short else None)
        self.done.append(layer)
        found = step_layers(kernels, rows, ready.turns, memories, updates)
        self.run = _Run(layers, found, [*how.values()]) if len(layers) > 1 else None
        self.place, self.last = 1, (layers[0], found[0])
        _STEP.ahead = weakref.ref(self)
        return found[0]

    def _ask(self, first: Any, ready: _Ready, rows: torch.Tensor, how: dict[str, Any], cache: Any) -> Any:
        """The first layer and those behind it that are ready, too, asked one after the other, and what their kernels
        need; without a cache, the first one alone."""
        layers, all_ready, is_whole = [first], [ready], cache is not None
        while cache is not None:
            following = None if layers[-1]._is_end or layers[-1]._next is None else layers[-1]._next()
            if following is None or following in layers:
                break
            is_done = following in self.done  # what it stored stays
            is_apart = is_done or _has_hooks_between(layers[-1], following)
            own: _Ready | None = None if is_apart else following.ready(rows, how, cache)
            if own is None or own.memory is None:
                is_whole = False
                break
            layers.append(following)
            all_ready.append(own)
        made = None
        if is_whole and len(layers) > 1 and not torch.is_grad_enabled():  # else more may be ready the next time
            with suppress(KeyError):
                made = _Chain(layers)
        if cache is not None:
            vars(first)["_chain"] = made
        kernels, _, memories, updates = zip(*all_ready, strict=True)
        return layers, kernels, memories, updates


class _Step(threading.local):
    """A reference to what was computed ahead in the step that a thread computes."""

    ahead: Callable[[], _Ahead | None] = staticmethod(lambda: None)


_STEP = _Step()


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


def _has_hooks_between(layer: Any, following: Any) -> bool:
    """Whether hooks may do something between two layers. They may state that they only read (`only_reads`), as those
    do that record what layers give."""
    for hook in layer._forward_hooks.values():
        if not getattr(hook, "only_reads", False) and getattr(hook, "__module__", None) != _RECORDER:
            return True
    return bool(following._forward_pre_hooks)


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
