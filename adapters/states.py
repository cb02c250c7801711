"""Memory and mask runs of models that keep a state (docs/algorithm.md#states).

The answers are read in pieces from cut to cut, without a graph, and the states at the cuts are kept. Then all runs of
masks are one batch of short sequences on these states.

`B` answers, `L` tokens, `C` cuts, `K` masks after each.
"""

from typing import Any

import torch
from transformers import Cache, DynamicLayer
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..generation.forward import forward_as
from ..generation.state import cache_layers, has_state, is_attending
from ..generation.versions import cache_name


class StateMemory(Cache):
    """What a model knows of answers: keys and values of all tokens read so far, and the states at their end and at the
    cuts of the last call of [`read`].

    Args:
        config: of the model.
    """

    def __init__(self, config: Any) -> None:
        layers: list[Any] = []
        for layer in cache_layers(config):
            if is_attending(layer):  # sliding ones forget keys that masks may see
                both = LinearAttentionAndFullAttentionLayer
                layer = both(layer.number_of_states) if has_state(layer) else DynamicLayer()
            layers.append(layer)
        super().__init__(layers=layers)
        self.length = 0  # tokens read so far
        self.at_cuts: dict[int, dict[str, dict[int, torch.Tensor]]] = {}  # layer, kind and number: `(B·C, …)`

    def read(self, decoder: Any, input_ids: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
        """Reads on to the end of `input_ids`.

        Args:
            decoder: the model without its head.
            input_ids: `(B, L)`, of which the first `length` tokens are known.
            cuts: `(B, C)`, -1 for none; none of them in front of what is known.

        Returns:
            Last hidden states of what was read, `(B, L - length, H)`.
        """
        ends = {int(cut) + 1 for cut in cuts.unique() if cut >= 0} | {input_ids.shape[1]}
        hidden = []
        self.at_cuts = {index: {} for index, layer in enumerate(self.layers) if has_state(layer)}
        for end in sorted(ends):
            if end > self.length:
                places = torch.arange(self.length, end, device=cuts.device)[None]
                inputs = {"input_ids": input_ids[:, self.length : end], "position_ids": places}
                with forward_as(has_short_chunks=True):
                    read = decoder(**inputs, use_cache=True, **{cache_name(decoder): self})
                hidden.append(read.last_hidden_state)
                self.length = end
            self._keep(cuts == end - 1)
        return torch.cat(hidden, dim=1)

    def _keep(self, is_here: torch.Tensor) -> None:
        """Keeps the states of answers whose cuts `(B, C)` are here."""
        places = is_here.flatten().nonzero()[:, 0]
        if not len(places):
            return
        for index, kinds in self.at_cuts.items():
            for kind in ("conv_states", "recurrent_states"):
                for number, state in getattr(self.layers[index], kind).items():
                    if state is not None:
                        kept = kinds.setdefault(kind, {})
                        if number not in kept:
                            kept[number] = state.new_zeros(is_here.numel(), *state.shape[1:])
                        kept[number][places] = state[places.to(state.device) // is_here.shape[1]]

    def runs(self) -> Cache:
        """A cache for `B·C` sequences of masks, one behind each cut. It takes a single forward, and keeps nothing."""
        layers: list[Any] = [
            RunState(self.at_cuts.get(index, {}), layer) if isinstance(layer, LinearAttentionLayer)
            else RunKeys() if is_attending(layer) else layer
            for index, layer in enumerate(self.layers)
        ]  # fmt: skip
        return Cache(layers=layers)


class RunKeys(DynamicLayer):
    """An attention layer of one forward: its own keys and values are all that it hands on."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same."""
        return key_states, value_states


class RunState(LinearAttentionLayer, RunKeys):  # type: ignore[misc, override]
    """A layer with a state, of one forward with a graph: nothing is written where the graph reads.

    Args:
        states: by kind and number.
        memory: the layer that they are of.
    """

    def __init__(self, states: dict[str, dict[int, torch.Tensor]], memory: Any) -> None:
        RunKeys.__init__(self)
        LinearAttentionLayer.__init__(self, memory.number_of_states)
        self.device, self.dtype = memory.device, memory.dtype
        self.conv_kernel_size = dict(memory.conv_kernel_size)
        for kind, numbered in states.items():
            getattr(self, kind).update(numbered)
            getattr(self, f"is_{kind}_initialized").update(dict.fromkeys(numbered, True))
            self.has_previous_state.update(dict.fromkeys(numbered, True))

    def update_conv_state(  # type: ignore[override]
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """The state and what follows it."""
        state = self.conv_states[state_idx]
        assert state is not None
        return torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """The same."""
        return recurrent_states
