"""Mask adapters: low-rank updates that act on mask rows alone, so that every real row stays the base model's own.

A mask adapter lets an AR model predict several tokens ahead without changing what it says: real tokens lie physically
before the masks and never attend to them, so their logits, keys and values are computed by the frozen weights alone.

`B` rows of a batch, `T` physical rows of a forward, `M` slots among them (the last ones), `H` hidden size.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .adapter_files import (
    CONFIG_NAME,
    PEFT_TYPE,
    MaskAdapterSettings,
    StoredMaskAdapter,
    base_of,
    check_base,
    read_adapter_config,
)


@dataclass(frozen=True)
class _Slots:
    """The slots of the forward under way.

    Attributes:
        count: M; the last M physical rows of the forward may be slots.
        mask: `(B, M, 1)` bool, which of them are; `None` where all are.
        weights: for each target, for each layer, its two matrices `(rank, in)` and `(out, rank)`.
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
        last = output[:, start:]
        # As one matrix: torch multiplies slices of a batch one by one, with copies of the weights.
        rows = args[0][:, start:].flatten(0, 1)
        update = nn.functional.linear(nn.functional.linear(rows, down), up).view_as(last)
        if slots.mask is not None:
            update = update.masked_fill(~slots.mask, 0)
        if torch.is_grad_enabled():
            return last + update if start == 0 else torch.cat([output[:, :start], last + update], dim=1)
        last.add_(update)
        return None


class PreviousTokenHead(nn.Module):
    """Corrects a mask's last hidden state once the two tokens before it are known (ALGORITHM.md §5).

    A draft behind a token cannot know it while its own forward runs. Choosing the drafts one after the other, each
    through this small network, makes up for that; the base's own `lm_head` then reads the corrected state.
    """

    context = 2  # tokens before the slot

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        # Plain parameters: PEFT's "all-linear" would put a LoRA on linear layers.
        inputs = (1 + self.context) * hidden_size
        self.down = nn.Parameter(torch.empty(width, inputs).uniform_(-(inputs**-0.5), inputs**-0.5))
        self.up = nn.Parameter(torch.zeros(hidden_size, width))

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Hidden states `(..., H)` for the base's head.

        Args:
            hidden: `(..., H)`, the masks' last hidden states.
            previous: `(..., 2, H)`, the embeddings of the two tokens before each mask, in the order of the text.
        """
        dtype = self.down.dtype
        previous = previous.to(dtype)
        previous = previous / previous.std(-1, keepdim=True).clamp(min=1e-6)
        inner = nn.functional.linear(torch.cat([hidden.to(dtype), previous.flatten(-2)], dim=-1), self.down)
        return hidden + nn.functional.linear(nn.functional.silu(inner), self.up).to(hidden.dtype)


class MaskAdapter(nn.Module):
    """The weights of a mask adapter: updates of every layer, the slots' embedding, and the previous-token head.

    It begins as no change at all, but for the embedding of the slots, a copy of the mask token's.

    Args:
        settings: its shape.
        backbone: the [`WeDLMModel`] that it belongs to.

    Attributes:
        calibration: how often its drafts pass, which decoding begins with (`DraftRecord.calibration`); or None.
    """

    def __init__(self, settings: MaskAdapterSettings, backbone: Any):
        super().__init__()
        self.settings, self.is_enabled = settings, True
        self.calibration: dict[str, list[float]] | None = None
        layers, embeddings = backbone.layers, backbone.embed_tokens.weight
        self.mask_embedding = nn.Parameter(embeddings[backbone.config.mask_token_id].detach().float().clone())
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for target in settings.target_modules:
            linear: Any = _linear(layers[0], target)
            down = torch.randn(len(layers), settings.rank, linear.in_features) / linear.in_features**0.5
            self.down[target] = nn.Parameter(down)
            self.up[target] = nn.Parameter(torch.zeros(len(layers), linear.out_features, settings.rank))
        hidden_size = backbone.config.hidden_size
        self.head = PreviousTokenHead(hidden_size, settings.head_width) if settings.head_width else None
        self._prepared: tuple[Any, dict[str, list[tuple[torch.Tensor, torch.Tensor]]]] | None = None
        self.to(embeddings.device)

    @contextmanager
    def acting_on(self, slots: int | torch.Tensor | None, dtype: torch.dtype) -> Iterator[None]:
        """Within this context, the linear layers update the last rows of their input that are slots, or none.

        A forward without slots says so too: Ctrl-C may have kept an earlier one from leaving its context.
        """
        if slots is None:
            _SLOTS.set(None)
            yield
            return
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

    def embed(self, inputs_embeds: torch.Tensor, slots: int | torch.Tensor) -> Any:
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
        parameters = [*self.down.values(), *self.up.values()]
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        key = dtype, tuple((parameter.data_ptr(), parameter._version) for parameter in parameters)
        prepared = self._prepared
        if not trains and prepared is not None and prepared[0] == key:
            return prepared[1]
        weights = {
            target: list(zip(self.down[target].to(dtype).unbind(), self.up[target].to(dtype).unbind(), strict=True))
            for target in self.settings.target_modules
        }
        # Optimizers may change parameters without raising their version: what trains is never kept.
        self._prepared = None if trains else (key, weights)
        return weights


class MaskAdapterMixin:
    """What a causal language model with a mask adapter can do; `self.model` is the [`WeDLMModel`]."""

    @property
    def has_mask_adapter(self: Any) -> bool:
        """Whether a forward may be given `slot_mask`."""
        adapter = self.model.mask_adapter
        return adapter is not None and adapter.is_enabled

    def draft_hidden(self: Any, hidden: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """The states that `lm_head` turns into drafts, once the tokens before the slots are known.

        Args:
            hidden: `(..., H)`, last hidden states of slots.
            previous_ids: `(..., 2)` int64, the two tokens before each slot in the order of the text: accepted ones,
                or drafts chosen just now.

        Returns:
            `(..., H)`; `hidden` itself where the adapter has no previous-token head.
        """
        head = self.model.mask_adapter.head
        return hidden if head is None else head(hidden, self.model.embed_tokens(previous_ids))

    def add_mask_adapter(self: Any, settings: MaskAdapterSettings | None = None) -> MaskAdapter:
        """Gives the model a new mask adapter to train, in float32, and freezes everything else.

        Raises:
            ValueError: for a model that has one or has no mask token, and for targets that its layers do not have.
        """
        backbone = self.model
        if backbone.mask_adapter is not None:
            raise ValueError("The model has a mask adapter already: call `unload_mask_adapter()` first.")
        if self.config.mask_token_id is None:
            raise ValueError("A mask adapter needs a model with a mask token: `config.mask_token_id` is None.")
        adapter = MaskAdapter(settings or MaskAdapterSettings(), backbone)
        self.requires_grad_(False)
        for index, layer in enumerate(backbone.layers):
            for target in adapter.settings.target_modules:
                _linear(layer, target).register_forward_hook(_Update(target, index))
        backbone.mask_adapter = adapter
        # The base's own checkpoint stays the base's.
        for owner, prefix in ((backbone, "mask_adapter."), (self, "model.mask_adapter.")):
            owner._keys_to_ignore_on_save = {prefix + name for name in adapter.state_dict()}
        return adapter

    def unload_mask_adapter(self: Any) -> None:
        """Takes the mask adapter away: the model is the base again."""
        backbone = self.model
        backbone.mask_adapter = None
        for owner in (backbone, self):
            owner._keys_to_ignore_on_save = type(owner)._keys_to_ignore_on_save
        for module in backbone.layers.modules():
            for key, hook in list(module._forward_hooks.items()):
                if isinstance(hook, _Update):
                    del module._forward_hooks[key]

    def save_mask_adapter(self: Any, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Writes `adapter_config.json` and `adapter_model.safetensors`, which PEFT reads too, each file whole.

        Args:
            folder: made if it is not there.
            dtype: of the weights; default: the model's.
        """
        adapter = self.model.mask_adapter
        if adapter is None:
            raise ValueError("The model has no mask adapter to save.")
        weights = {
            name: tensor.detach().to(dtype or self.dtype).cpu().contiguous()
            for name, tensor in adapter.state_dict().items()
        }
        stored = StoredMaskAdapter(adapter.settings, base_of(self), adapter.calibration, weights)
        stored.write(folder, str(self.config.name_or_path or "") or None)

    def load_mask_adapter(
        self: Any,
        name: str | os.PathLike[str],
        *,
        any_base: bool = False,
        is_trainable: bool = False,
        **download_options: Any,
    ) -> None:
        """Loads a saved mask adapter; PEFT is not needed.

        Args:
            name: folder or Hub id.
            any_base: take it also where the model's weights are not those that it was trained for (a fine-tuned
                base, say): answers are still the model's own, but fewer drafts may be accepted.
            is_trainable: keep it in float32, to be trained further.
            download_options: `revision`, `token`, … of the Hub.

        Raises:
            OSError: for missing or damaged files.
            ValueError: for an adapter of another kind, of another base, or of another mask token.
        """
        stored = StoredMaskAdapter.read(name, **download_options)
        check_base(self, stored.base, any_base=any_base)
        adapter = self.add_mask_adapter(stored.settings)
        try:
            adapter.load_state_dict(stored.weights)
        except RuntimeError as error:
            self.unload_mask_adapter()
            raise ValueError(f"The weights of {str(name)!r} do not fit its {CONFIG_NAME}: {error}") from error
        adapter.calibration = stored.calibration
        if not is_trainable:
            adapter.to(self.dtype).requires_grad_(False)

    def load_adapter(self: Any, peft_model_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' own; of a mask adapter, [`load_mask_adapter`], which may be beside any other adapter."""
        if peft_model_id is not None:
            options = {key: kwargs[key] for key in ("revision", "token", "cache_dir", "subfolder") if key in kwargs}
            try:
                config = read_adapter_config(peft_model_id, **options)
            except OSError:
                config = {}  # transformers says what is missing
            if config.get("peft_type") == PEFT_TYPE:
                is_trainable = bool(kwargs.get("is_trainable", False))
                return self.load_mask_adapter(peft_model_id, is_trainable=is_trainable, **options)
        return super().load_adapter(peft_model_id, *args, **kwargs)  # type: ignore[misc]


def _linear(layer: nn.Module, name: str) -> nn.Module:
    """The linear layer `name` of a decoder layer; of one that PEFT wraps, the base's own."""
    for parent in (layer.self_attn, layer.mlp):
        if (module := getattr(parent, name, None)) is not None:
            return module.get_base_layer() if hasattr(module, "get_base_layer") else module
    raise ValueError(f"`target_modules` names {name!r}, which no decoder layer has.")


__all__ = ["MaskAdapter", "MaskAdapterMixin", "MaskAdapterSettings"]
