"""Mask adapters: low-rank updates that act on mask rows alone, so that every real row stays the base model's own.

A mask adapter lets an AR model predict several tokens ahead without changing what it says: real tokens lie physically
before the masks and never attend to them, so their logits, keys and values are computed by the frozen weights alone.

`B` rows of a batch, `T` physical rows of a forward, `M` slots among them (the last ones), `H` hidden size.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
DEFAULT_TARGETS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class MaskAdapterSettings:
    """Shape of a mask adapter.

    Attributes:
        rank: of the updates.
        target_modules: names of the linear layers that are updated, the same ones in every decoder layer.
        head_width: hidden units of the previous-token head; 0 for none.
    """

    rank: int = 64
    target_modules: tuple[str, ...] = DEFAULT_TARGETS
    head_width: int = 640

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {"target_modules": list(self.target_modules)}


@dataclass(frozen=True)
class _Slots:
    """The slots of the forward under way.

    Attributes:
        count: M; the last M physical rows of the forward may be slots.
        mask: `(B, M, 1)` bool, which of them are; `None` where all are.
        weights: for each target, for each layer, its two matrices `(in, rank)` and `(rank, out)`.
    """

    count: int
    mask: torch.Tensor | None
    weights: dict[str, list[tuple[torch.Tensor, torch.Tensor]]]


_SLOTS: ContextVar[_Slots | None] = ContextVar("wedlm_slots", default=None)


@dataclass(frozen=True)
class _Update:
    """Forward hook of one linear layer: adds the update to the rows that are slots, and touches no other row."""

    target: str
    layer: int

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        slots = _SLOTS.get()
        if slots is None:
            return None
        down, up = slots.weights[self.target][self.layer]
        start = output.shape[1] - slots.count
        update = (args[0][:, start:] @ down) @ up
        if slots.mask is not None:
            update = update.masked_fill(~slots.mask, 0)
        if not torch.is_grad_enabled():
            output[:, start:] += update
            return None
        return output + update if start == 0 else torch.cat([output[:, :start], output[:, start:] + update], dim=1)


class PreviousTokenHead(nn.Module):
    """Corrects a mask's last hidden state once the two tokens before it are known (ALGORITHM.md §5).

    A draft behind a token cannot know it while its own forward runs. Choosing the drafts one after the other, each
    through this small network, makes up for that; the base's own `lm_head` then reads the corrected state.
    """

    context = 2  # tokens before the slot

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.down = nn.Linear((1 + self.context) * hidden_size, width, bias=False)
        self.up = nn.Linear(width, hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Hidden states `(..., H)` for the base's head.

        Args:
            hidden: `(..., H)`, the masks' last hidden states.
            previous: `(..., 2, H)`, the embeddings of the two tokens before each mask, in the order of the text.
        """
        dtype = self.down.weight.dtype
        previous = previous.to(dtype)
        previous = previous / previous.std(-1, keepdim=True).clamp(min=1e-6)
        inner = self.down(torch.cat([hidden.to(dtype), previous.flatten(-2)], dim=-1))
        return hidden + self.up(nn.functional.silu(inner)).to(hidden.dtype)


class MaskAdapter(nn.Module):
    """The weights of a mask adapter: updates of every layer, the slots' embedding, and the previous-token head."""

    def __init__(self, settings: MaskAdapterSettings, backbone: Any):
        super().__init__()
        self.settings = settings
        layers, embeddings = backbone.layers, backbone.embed_tokens.weight
        options = {"device": embeddings.device, "dtype": torch.float32}
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for target in settings.target_modules:
            linear: Any = _linear(layers[0], target)
            self.lora_A[target] = nn.Parameter(
                torch.randn(len(layers), settings.rank, linear.in_features, **options) / linear.in_features**0.5
            )
            self.lora_B[target] = nn.Parameter(torch.zeros(len(layers), linear.out_features, settings.rank, **options))
        mask_row = embeddings[backbone.config.mask_token_id].detach()
        self.mask_embedding = nn.Parameter(mask_row.to(torch.float32, copy=True))
        hidden_size = backbone.config.hidden_size
        head = PreviousTokenHead(hidden_size, settings.head_width) if settings.head_width else None
        self.head = None if head is None else head.to(**options)
        self._prepared: tuple[Any, dict[str, list[tuple[torch.Tensor, torch.Tensor]]]] | None = None

    def hook(self, backbone: Any) -> None:
        """Puts the updates behind the linear layers of `backbone`."""
        for index, layer in enumerate(backbone.layers):
            for target in self.settings.target_modules:
                _linear(layer, target).register_forward_hook(_Update(target, index))

    @contextmanager
    def acting_on(self, slots: int | torch.Tensor, dtype: torch.dtype) -> Iterator[None]:
        """Within this context, the linear layers update the last rows of their input that are slots."""
        mask = None
        if isinstance(slots, torch.Tensor):
            count = slots.shape[1]
            if slots.device.type != "cpu" or not bool(slots.all()):
                mask = slots[..., None]
        else:
            count = slots
        token = _SLOTS.set(_Slots(count, mask, self._weights(dtype)))
        try:
            yield
        finally:
            _SLOTS.reset(token)

    def embed(self, inputs_embeds: torch.Tensor, slots: int | torch.Tensor) -> torch.Tensor:
        """`inputs_embeds` `(B, T, H)` with the slots' own embedding where there are slots."""
        row = self.mask_embedding.to(inputs_embeds.dtype)
        count = slots if isinstance(slots, int) else slots.shape[1]
        if count > inputs_embeds.shape[1]:
            raise ValueError(f"There are more slots, {count}, than rows in the input, {inputs_embeds.shape[1]}.")
        real, last = inputs_embeds.split([inputs_embeds.shape[1] - count, count], dim=1)
        last = row.expand_as(last) if isinstance(slots, int) else torch.where(slots[..., None], row, last)
        return torch.cat([real, last], dim=1)

    def _weights(self, dtype: torch.dtype) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The matrices of the updates in `dtype`, ready to multiply rows with; made once where they do not train."""
        parameters = [*self.lora_A.values(), *self.lora_B.values()]
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        key = dtype, tuple((parameter.data_ptr(), parameter._version) for parameter in parameters)
        prepared = self._prepared
        if not trains and prepared is not None and prepared[0] == key:
            return prepared[1]
        weights = {}
        for target in self.settings.target_modules:
            down = self.lora_A[target].to(dtype).transpose(1, 2)
            up = self.lora_B[target].to(dtype).transpose(1, 2)
            weights[target] = list(zip(down.unbind(), up.unbind(), strict=True))
        if not trains:
            self._prepared = key, weights
        return weights


def _linear(layer: nn.Module, name: str) -> nn.Module:
    """The linear layer `name` of a decoder layer; of one that PEFT wraps, the base's own."""
    for parent in (layer.self_attn, layer.mlp):
        if (module := getattr(parent, name, None)) is not None:
            return module.get_base_layer() if hasattr(module, "get_base_layer") else module
    raise ValueError(f"`target_modules` names {name!r}, which no decoder layer has.")


def add_mask_adapter(model: Any, settings: MaskAdapterSettings) -> MaskAdapter:
    """Gives `model` a new mask adapter and freezes everything else of it. It predicts as the base does at first."""
    backbone = model.model
    if backbone.mask_adapter is not None:
        raise ValueError("The model has a mask adapter already: unload it first.")
    model.requires_grad_(False)
    adapter = MaskAdapter(settings, backbone)
    adapter.hook(backbone)
    backbone.mask_adapter = adapter
    return adapter


def save_mask_adapter(model: Any, folder: str | os.PathLike[str], dtype: torch.dtype) -> None:
    """Writes the adapter of `model` into `folder`, its weights in `dtype`."""
    adapter = model.model.mask_adapter
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(dtype).cpu().contiguous() for name, tensor in adapter.state_dict().items()}
    unfinished = folder / f".{WEIGHTS_NAME}.{os.getpid()}"
    save_file(weights, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(adapter.settings.to_dict(), indent=2) + "\n", encoding="utf-8")


def load_weights(model: Any, folder: str | os.PathLike[str]) -> None:
    """Reads the weights of a saved adapter of the same shape into that of `model`."""
    model.model.mask_adapter.load_state_dict(load_file(Path(folder) / WEIGHTS_NAME))


__all__ = ["MaskAdapter", "MaskAdapterSettings"]
