"""The module of a mask adapter: low-rank updates that act on slots alone, so that every real row stays the base's own.

A mask adapter lets an AR model predict several tokens ahead without changing what it says: real tokens lie physically
before the masks and never attend to them, so their logits, keys and values are computed by the frozen weights alone.

`B` sequences of a batch, `T` physical rows of a forward, `M` slots among them (the last ones), `H` hidden size.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..checkpoints.packed import multiply, pack_matrix
from .adapter_files import MaskAdapterSettings
from .ngrams import NGrams

Matrices = dict[str, list[tuple[Any, Any]]]
"""For each target, for each layer, the two matrices of its update, `(rank, in)` and `(out, rank)`, maybe packed."""


@dataclass
class Slots:
    """The slots of the forward under way."""

    count: int  # M; the last M physical rows of the forward may be slots
    mask: torch.Tensor | None  # (B, M, 1) bool, which of them are; None where all are
    embedding: torch.Tensor  # (H,), of every slot
    weights: Matrices
    multiply: Callable[[torch.Tensor, Any], torch.Tensor]  # rows with one of these matrices
    hidden: torch.Tensor | None = None  # (B, M, H), what the head read of the last M rows; set by the forward


class _UnderWay(threading.local):  # torch.compile can follow it, unlike a context variable
    slots: Slots | None = None


_UNDER_WAY = _UnderWay()


@dataclass(frozen=True)
class Update:
    """Forward hook of one linear layer: adds the update to the rows that are slots, and touches no other row."""

    target: str
    layer: int

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        """What the layer gives."""
        slots = _UNDER_WAY.slots
        if slots is None:
            return None
        down, up = slots.weights[self.target][self.layer]
        start = output.shape[1] - slots.count
        rows, last = (each.narrow(1, start, slots.count) for each in (args[0], output))
        if len(rows) > 1:  # as one matrix: torch multiplies slices of a batch one by one, with copies of the weights
            rows = rows.flatten(0, 1)
        update = slots.multiply(slots.multiply(rows, down), up)
        if len(last) > 1:
            update = update.view_as(last)
        if slots.mask is not None:
            update = update.masked_fill(~slots.mask, 0)
        if torch.is_grad_enabled():
            return last + update if start == 0 else torch.cat([output[:, :start], last + update], dim=1)
        last.add_(update)
        return None


@dataclass(frozen=True)
class EmbedSlots:
    """Forward hook of the input embeddings: slots have an embedding of their own, whatever their token is."""

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        """What the layer gives."""
        slots = _UNDER_WAY.slots
        if slots is None:
            return None
        if slots.count > output.shape[1]:
            raise ValueError(f"There are more slots, {slots.count}, than rows in the input, {output.shape[1]}.")
        embedding = slots.embedding.to(output.dtype)
        real, last = output.split([output.shape[1] - slots.count, slots.count], dim=1)
        last = embedding.expand_as(last) if slots.mask is None else torch.where(slots.mask, embedding, last)
        return torch.cat([real, last], dim=1)


@dataclass(frozen=True)
class CatchSlots:
    """Forward pre-hook of the head: notes the hidden states of the slots."""

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What the head gets."""
        slots = _UNDER_WAY.slots
        # For a slice of a batch, torch copies the head's weights once for each sequence.
        hidden = args[0].contiguous()
        if slots is not None and hidden.ndim == 3:
            slots.hidden = hidden[:, max(0, hidden.shape[1] - slots.count) :]
        return hidden, *args[1:]


HOOKS = (Update, EmbedSlots, CatchSlots)


class PreviousTokenHead(nn.Module):
    """Corrects a mask's last hidden state once the two tokens before it are known (ALGORITHM.md §5).

    A draft behind a token cannot know it while its own forward runs. Choosing the drafts one after the other, each
    through this small network, makes up for that; the base's own head then reads the corrected state.
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
    """The weights of a mask adapter: updates of layers, the slots' embedding, and the previous-token head; and the
    n-grams of the model's answers.

    It begins as no change at all, but for the embedding of the slots.

    Args:
        settings: its shape; `target_modules` are known.
        sizes: of each target, the number of layers that have it, and rows and columns of its weights: `(layers, out,
            in)`.
        mask_embedding: `(H,)`, what the slots' embedding begins with.
    """

    def __init__(
        self,
        settings: MaskAdapterSettings,
        sizes: Sequence[tuple[int, int, int]],
        mask_embedding: torch.Tensor,
    ):
        super().__init__()
        self.settings, self.is_enabled = settings, True
        self.frozen: set[str] = set()  # parameters of the base that trained before
        self.peft_config: Any = None  # PEFT's copy of the settings, where PEFT made the adapter
        self.mask_embedding = nn.Parameter(mask_embedding.detach().float().clone())
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for target, (layers, rows, columns) in zip(settings.target_modules, sizes, strict=True):
            key = target.replace(".", "/")  # parameters cannot have a dot in their name
            self.down[key] = nn.Parameter(torch.randn(layers, settings.rank, columns) / columns**0.5)
            self.up[key] = nn.Parameter(torch.zeros(layers, rows, settings.rank))
        width = settings.head_width
        self.head = PreviousTokenHead(len(mask_embedding), width) if width else None
        self.ngrams = NGrams(settings.ngrams) if settings.ngrams else None
        self._prepared: tuple[Any, Matrices] | None = None
        self.to(mask_embedding.device)

    def restate(self, **changes: Any) -> None:
        """Changes settings."""
        self.settings = replace(self.settings, **changes)
        for name, value in changes.items() if self.peft_config is not None else ():
            setattr(self.peft_config, name, value)

    @contextmanager
    def predicting(
        self, slots: int | torch.Tensor | None, dtype: torch.dtype, is_packed: bool = False
    ) -> Iterator[Slots | None]:
        """Within this context, a forward takes the last rows of its input for slots: it embeds and updates them.

        Args:
            slots: `(B, M)` bool, which of the last M physical rows are slots; M where all are; `None` for none.
            dtype: of the rows.
            is_packed: the model's layers are, and so are the updates: half as many bytes to read.

        Yields:
            What is known of the slots: `hidden` after the forward; `None` without slots.
        """
        if slots is None:
            yield None
            return
        count, mask = (slots, None) if isinstance(slots, int) else (slots.shape[1], slots[..., None])
        is_packed = is_packed and not torch.is_grad_enabled()  # packed products have no gradients
        found = Slots(
            count,
            mask,
            self.mask_embedding,
            self._weights(dtype, is_packed),
            multiply if is_packed else nn.functional.linear,
        )
        try:
            _UNDER_WAY.slots = found
            yield found
        finally:
            _UNDER_WAY.slots = None

    def _weights(self, dtype: torch.dtype, is_packed: bool) -> Matrices:
        """The matrices of the updates, ready to multiply rows of `dtype` with; made once where they do not train."""
        parameters = [*self.down.values(), *self.up.values()]
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        versions = (0 if parameter.is_inference() else parameter._version for parameter in parameters)
        key = dtype, is_packed, *zip(versions, (parameter.data_ptr() for parameter in parameters), strict=True)
        prepared = self._prepared
        if not trains and prepared is not None and prepared[0] == key:
            return prepared[1]

        def matrices(stacked: torch.Tensor) -> list[Any]:
            return [pack_matrix(each) for each in stacked] if is_packed else list(stacked.to(dtype).unbind())

        weights = {
            target.replace("/", "."): list(zip(matrices(down), matrices(self.up[target]), strict=True))
            for target, down in self.down.items()
        }
        # Optimizers may change parameters without raising their version: what trains is never kept.
        self._prepared = None if trains else (key, weights)
        return weights

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_prepared": None}
