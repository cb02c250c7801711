"""A key/value cache for windows: a step commits rows by a length update, and the next step overwrites the others.

`B` rows, `H` key/value heads, `C` capacity, `Q` slots of a forward, `D` head width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache, DynamicLayer
from transformers.cache_utils import LinearAttentionLayer

from .rows import Step
from .state import cache_layers, has_state, is_attending, state_tensors
from .versions import CACHE

SMALLEST_CAPACITY = 64


@dataclass
class Extent:
    """What a cache and its layers know of its rows. Layers that knew the cache itself would be a cycle of references,
    and each call's buffers would stay until Python looks for such cycles: gigabytes later."""

    capacity: int | None  # see [`WindowCache`]
    lengths: list[int] = field(default_factory=list)  # committed slots of each row
    in_use: int = 0  # how many of the first rows are

    @property
    def longest(self) -> int:
        """Committed slots of the longest row in use."""
        lengths = self.lengths[: self.in_use]
        return max(lengths) if lengths else 0  # torch.compile does not follow `max` with a default


class WindowLayer(DynamicLayer):
    """One layer's buffers `(B, H, C, D)`. `keys` and `values` are the committed part, `(B, H, longest row, D)`, where
    shorter rows end in slots without meaning."""

    def __init__(self, extent: Extent):
        self.extent = extent
        self.is_initialized = False

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """Of the committed part."""
        return self._keys[:, :, : self.extent.longest] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """Of the committed part."""
        return self._values[:, :, : self.extent.longest] if self.is_initialized else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Empty buffers of the states' rows, heads, widths, dtypes and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys, self._values = key_states[:, :, :0].detach(), value_states[:, :, :0].detach()
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `(A, H, Q, D)` for the A rows in use and returns what they may attend to, `(A, H, end, D)`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        dtypes = key_states.dtype, value_states.dtype  # others where autocast began or ended
        if step.end > self._keys.shape[2] or dtypes != (self._keys.dtype, self._values.dtype):
            self._fit(dtypes, step.end)
        rows = key_states.shape[0]
        # Indices would cut each dimension in an operation of its own.
        keys, values = (buffer.narrow(2, 0, step.end) for buffer in (self._keys, self._values))
        if rows < keys.shape[0]:
            keys, values = keys[:rows], values[:rows]
        if step.start is not None:
            for buffer, states in ((keys, key_states), (values, value_states)):
                buffer.narrow(2, step.start, states.shape[2]).copy_(states)
        else:
            # Indexing copies whole states: ten times as fast as `scatter_`, which copies number by number.
            slots = step.slots.to(keys.device)
            index = torch.arange(rows, device=keys.device)[:, None], slots
            keys.transpose(1, 2)[index] = key_states.transpose(1, 2)
            values.transpose(1, 2)[index] = value_states.transpose(1, 2)
        return keys, values

    def room(self, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None:
        """For kernels that store a step's float32 rows themselves: the buffers `(B, H, C, D)`, the slot of each row,
        `(A, Q)` int64, and how many slots rows may attend to. `None` before the first rows are stored."""
        if not self.is_initialized or self._keys.dtype != torch.float32 or self._values.dtype != torch.float32:
            return None
        if step.end > self._keys.shape[2]:
            self._fit((torch.float32, torch.float32), step.end)
        return self._keys, self._values, step.slots, step.end

    def _fit(self, dtypes: tuple[torch.dtype, torch.dtype], end: int) -> None:
        """Gives the buffers these dtypes, and room for `end` slots."""
        held = self._keys.shape[2]
        capacity = held if end <= held else max(end, 2 * held, self.extent.capacity or SMALLEST_CAPACITY)
        room = (0, 0, 0, capacity - held)
        with torch.inference_mode(False):  # they are written between forwards, too
            self._keys, self._values = (
                F.pad(buffer.to(dtype), room) for buffer, dtype in zip((self._keys, self._values), dtypes, strict=True)
            )
        if self.extent.capacity is not None and not torch.compiler.is_compiling():  # else CUDA graphs lose them
            torch._dynamo.mark_static_address(self._keys)
            torch._dynamo.mark_static_address(self._values)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies the states of slots to others, `(A, K)` int64 both."""
        index = torch.arange(len(sources), device=self._keys.device)[:, None]
        sources, targets = sources.to(index), targets.to(index)
        for buffer in (self._keys, self._values):
            states = buffer.transpose(1, 2)
            states[index, targets] = states[index, sources]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps, repeats or reorders sequences."""
        if self.is_initialized:
            indices = indices.to(self._keys.device)
            self._keys, self._values = self._keys[indices], self._values[indices]

    def swap(self, row: int, other: int) -> None:
        """Exchanges two rows in place."""
        for buffer in (self._keys, self._values):
            buffer[[row, other]] = buffer[[other, row]]

    def get_seq_length(self) -> int:
        """Committed slots of the longest row in use."""
        return self.extent.longest


class StateWindowLayer(LinearAttentionLayer, WindowLayer):  # type: ignore[misc, override]
    """A layer that attends and keeps a state beside it."""

    def __init__(self, extent: Extent, number_of_states: int):
        WindowLayer.__init__(self, extent)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *states: Any, **named: Any) -> None:
        """Of keys and values, which come without names, or of a state."""
        (WindowLayer if states else LinearAttentionLayer).lazy_initialization(self, *states, **named)


class WindowCache(Cache):
    """A transformers `Cache` whose rows have lengths of their own.

    A row's slots are its logical positions: slot i holds position i, without gaps and without padding. A step of
    parallel decoding announces where it writes ([`plan`]), forwards, and commits a prefix of what it wrote
    ([`commit`]): nothing is concatenated or cropped, and buffers that are full are doubled. Rows that finish are
    swapped behind those still in use ([`retire`]) and cost nothing from then on; [`close`] puts all rows back in
    order. It takes no forwards outside of such steps. Of a model that keeps a state, it holds one sequence, and its
    states have read the committed slots and nothing else.

    Args:
        capacity: slots to make room for at once. Forwards then attend to all of it, whatever is in use, so that their
            shapes stay the same (for `torch.compile`).

    Attributes:
        token_ids: `(B, C)` int64, the tokens behind the slots (-1: not known); they tell whether a prompt fits.
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(layers=[])
        self.layers: list[Any]
        self.extent = Extent(capacity)
        self.token_ids = torch.empty(0, 0, dtype=torch.int64)
        self._step: Step | None = None
        self._rows: list[int] = []  # the caller's row that each buffer row holds

    @property
    def lengths(self) -> list[int]:
        """Committed slots of each row."""
        return self.extent.lengths

    @property
    def is_compileable(self) -> bool:
        """Whether shapes stay the same."""
        return self.extent.capacity is not None

    # --- steps of parallel decoding ----------------------------------------------------------------------------------

    @property
    def rows_in_use(self) -> list[int]:
        """The caller's row that each buffer row in use holds."""
        return self._rows[: self.extent.in_use]

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state."""
        return any(map(has_state, self.layers))

    def open(self, prompts: list[list[int]], device: torch.device, config: Any) -> None:
        """Gets ready for a call. Each sequence keeps the slots that hold the beginning of its prompt, without the
        prompt's last token, whose logits are needed. Slots of embeddings are computed again.

        Args:
            prompts: the tokens of each sequence; -1 behind embeddings.
            device: of the tokens.
            config: of the model.

        Raises:
            ValueError: if the cache holds another number of sequences, or tokens that are not the first of a prompt.
        """
        if len(self.lengths) != len(prompts):
            if any(self.lengths):
                raise ValueError(f"The cache holds {len(self.lengths)} rows, but the prompt has {len(prompts)}.")
            self._empty(prompts, device, config)
        self._rows, self.extent.in_use = list(range(len(prompts))), len(prompts)
        lengths = self._known_lengths(prompts)
        if self.has_states and lengths != self.lengths:  # states have read tokens that are dropped now
            self._empty(prompts, device, config)
        else:
            self.extent.lengths = lengths
        buffers = [layer._keys for layer in self.layers if getattr(layer, "_keys", None) is not None]
        held = [self.token_ids, *buffers, *(state for layer in self.layers for state in state_tensors(layer))]
        if any(tensor.is_inference() for tensor in held) and not torch.is_inference_mode_enabled():
            self.batch_select_indices(torch.arange(len(prompts)))  # copies, which can be written

    def as_dynamic(self, prompts: list[list[int]], width: int, config: Any) -> DynamicCache:
        """A cache for AR decoding: copies of the columns that the cache holds of all prompts, left-padded to `width`.
        Raises `ValueError` as [`open`]."""
        cache, pads = DynamicCache(config=config), [width - len(prompt) for prompt in prompts]
        if not any(self.lengths) or self.has_states:  # states may have read more than these columns
            return cache
        if len(self.lengths) != len(prompts):
            raise ValueError(f"The cache holds {len(self.lengths)} rows, but the prompt has {len(prompts)}.")
        columns = min(pad + length for pad, length in zip(pads, self._known_lengths(prompts), strict=True))
        for index, layer in enumerate(self.layers if columns > max(pads) else ()):
            held = (layer._keys, layer._values)
            states = [buffer.new_zeros(*buffer.shape[:2], columns, buffer.shape[3]) for buffer in held]
            for state, buffer in zip(states, held, strict=True):
                for row, pad in enumerate(pads):
                    state[row, :, pad:] = buffer[row, :, : columns - pad]
            cache.update(*states, index)
        return cache

    def _empty(self, prompts: list[list[int]], device: torch.device, config: Any) -> None:
        """Forgets everything, and gets ready for so many sequences of a model."""
        self.reset()
        self.token_ids = torch.empty(len(prompts), 0, dtype=torch.int64, device=device)
        self.extent.lengths = [0] * len(prompts)
        if any(map(has_state, layers := cache_layers(config))):
            self.layers += [self._layer(layer) for layer in layers]

    def _layer(self, layer: Any) -> Any:
        """The layer that replaces one of transformers' own cache: only keys and values are stored otherwise."""
        if not is_attending(layer):
            return layer
        if has_state(layer):
            return StateWindowLayer(self.extent, layer.number_of_states)
        return WindowLayer(self.extent)

    def _known_lengths(self, prompts: list[list[int]]) -> list[int]:
        """How many of the first tokens of each prompt its row holds."""
        lengths = []
        for row, (prompt, cached) in enumerate(zip(prompts, self.lengths, strict=True)):
            known = self.token_ids[row, :cached].tolist()
            known = known[: known.index(-1)] if -1 in known else known
            if known != prompt[: len(known)]:
                raise ValueError(
                    f"The cache does not belong to the prompt: row {row} of `{CACHE}` holds {cached} tokens "
                    "that are not the first ones of that prompt."
                )
            lengths.append(min(len(known), len(prompt) - 1))
        return lengths

    def announce(self, step: Step) -> None:
        """Prepares for the next forward, which writes the rows of this step."""
        if step.end > self.token_ids.shape[1]:
            room = max(step.end - self.token_ids.shape[1], self.token_ids.shape[1])
            self.token_ids = F.pad(self.token_ids, (0, room), value=-1)
        self.token_ids[: self.extent.in_use].scatter_(1, step.slots, step.input_ids)
        self._step = step

    def commit(self, kept: list[list[int]]) -> None:
        """Keeps slots of the last forward, and drops the others: for each sequence in use, those at these places among
        the slots that the forward wrote for it, ascending."""
        gaps = [entry for entry, places in enumerate(kept) if places and places[-1] >= len(places)]
        if len(gaps) == 1 and (run := _run(kept[gaps[0]])):  # a path through a tree with one gap: copies a range
            (entry,), (source, target, count) = gaps, run
            source, target = source + self.lengths[entry], target + self.lengths[entry]
            buffers = [
                buffer[entry].transpose(0, 1) for layer in self.layers for buffer in (layer._keys, layer._values)
            ]
            for buffer in [self.token_ids[entry], *buffers]:
                moved = buffer[source : source + count]
                buffer[target : target + count] = moved if source >= target + count else moved.clone()
        elif gaps:
            longest = max(map(len, kept))
            starts = torch.tensor(self.lengths[: len(kept)])[:, None]
            sources = starts + torch.tensor([[*places, *range(len(places), longest)] for places in kept])
            targets = starts + torch.arange(longest)
            for layer in self.layers:
                layer.move(sources, targets)
            index = torch.arange(len(kept))[:, None].to(self.token_ids.device)
            self.token_ids[index, targets.to(index)] = self.token_ids[index, sources.to(index)]
        for entry, places in enumerate(kept):
            self.lengths[entry] += len(places)
        self._step = None

    def retire(self, finished: list[bool]) -> None:
        """Takes finished rows out of use: they are swapped behind the others. `finished` has an entry for each row in
        use."""
        in_use = finished.count(False)
        movers = [row for row in range(in_use, self.extent.in_use) if not finished[row]]
        for row in range(in_use):
            if finished[row]:
                self._swap(row, movers.pop())
        self.extent.in_use = in_use

    def close(self) -> None:
        """Ends a call: all rows are in the caller's order again."""
        for row in range(len(self._rows)):
            while self._rows[row] != row:
                self._swap(row, self._rows[row])
        self._step = None
        self.extent.in_use = len(self._rows)

    @contextmanager
    def emptied_on_failure(self) -> Iterator[None]:
        """Within this context, an exception leaves an empty cache, not half a forward or mixed sequences."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def _swap(self, row: int, other: int) -> None:
        with self.emptied_on_failure():
            for layer in self.layers:
                layer.swap(row, other)
            self.token_ids[[row, other]] = self.token_ids[[other, row]]
            for per_row in (self.lengths, self._rows):
                per_row[row], per_row[other] = per_row[other], per_row[row]

    # --- the interface of transformers -------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a layer's new keys and values in the step's slots; returns those that its rows may attend to."""
        if self._step is None:
            raise ValueError(
                "A `WindowCache` takes the steps of `generate(strategy='wedlm')` and no other forward: pass a "
                "`DynamicCache`, or none."
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(WindowLayer(self.extent))
        layer: WindowLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states, self._step)

    def room(self, layer_idx: int) -> Any:
        """What [`WindowLayer.room`] gives for the step; `None` where a layer stores rows by [`update`] alone."""
        layer = self.layers[layer_idx] if len(self.layers) > layer_idx and not self.is_compileable else None
        return layer.room(self._step) if self._step is not None and type(layer) is WindowLayer else None

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` slots of every row (negative, as everywhere in transformers)."""
        if tokens_to_remove > 0:
            raise ValueError(f"`crop` takes the negative number of tokens to remove, got {tokens_to_remove}.")
        if self.has_states and tokens_to_remove:
            raise ValueError("This cache cannot be cropped: its layers keep a state, which has read all its tokens.")
        self.extent.lengths = [max(0, length + tokens_to_remove) for length in self.lengths]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows, in this order."""
        with self.emptied_on_failure():
            for layer in self.layers:
                if is_attending(layer):
                    layer.batch_select_indices(indices)
                if has_state(layer):
                    layer.reorder_cache(indices)
            self.token_ids = self.token_ids[indices.to(self.token_ids.device)]
            self.extent.lengths = [self.lengths[index] for index in indices.tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Same as [`batch_select_indices`]."""
        self.batch_select_indices(beam_idx)

    def reset(self) -> None:
        """Forgets everything, the number of rows too."""
        self.extent.lengths = []  # first: an exception in between must leave nothing that counts
        self._step = None
        self.layers.clear()


def _run(places: list[int]) -> tuple[int, int, int] | None:
    """Of a path with one gap: where the places behind it begin, where they move to, and how many they are. `None` if
    it has several gaps."""
    target = next(target for target, place in enumerate(places) if place != target)
    count = len(places) - target
    return (places[target], target, count) if places[-1] - places[target] == count - 1 else None
