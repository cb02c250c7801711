"""The module of a mask adapter: low-rank updates that act on slots alone, so that every real row stays the base's own.

A mask adapter lets an AR model predict several tokens ahead without changing what it says: real tokens lie physically
before the masks and never attend to them, so their logits, keys and values are computed by the frozen weights alone.

`B` sequences of a batch, `T` physical rows of a forward, `M` slots among them (the last ones), `H` hidden size.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from ..checkpoints.matrices import Matrix, near_matrix
from ..generation.forward import UNDER_WAY
from ..generation.rows import MaskRun
from .adapter_files import MOST_FREQUENT, MaskAdapterSettings

Pair = tuple[torch.Tensor | Matrix, torch.Tensor | Matrix]
"""Two matrices to multiply rows with, one after the other: `(inner, in)` and `(out, inner)`."""


def multiply(rows: torch.Tensor, matrix: torch.Tensor | Matrix) -> torch.Tensor:
    """`(..., in)` to `(..., out)`, by a matrix of [`Pair`]."""
    return nn.functional.linear(rows, matrix) if isinstance(matrix, torch.Tensor) else matrix(rows)


@dataclass
class Matrices:
    """An adapter's matrices, ready to multiply rows with."""

    updates: dict[str, list[Pair]]  # for each target, of each layer
    head: Pair | None
    root_head: Pair | None


@dataclass
class Slots:
    """The slots of the forward under way."""

    count: int  # M; the last M physical rows of the forward may be slots
    mask: torch.Tensor | None  # (B, M, 1) bool, which of them are; None where all are
    embedding: torch.Tensor | None  # (H,), of every slot; None where slots hold tokens
    size: int  # H
    matrices: Matrices
    # Set by the forward: what the head read of slots and of other rows, (B, T, H), or (B, T, 2H) with inner states
    # behind; and the inner states of all rows, (B, Q, H), where a root head reads them.
    states: torch.Tensor | None = None
    inner: torch.Tensor | None = None

    _places: torch.Tensor | None = None

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        """Where slots are among the `B * T` rows of a forward, `(B, T, H)`: int32."""
        if self._places is None:
            sequences, count = rows.shape[:2]
            places = torch.arange(sequences * count, dtype=torch.int32).view(sequences, count)[:, count - self.count :]
            self._places = (places if self.mask is None else places[self.mask[..., 0]]).flatten().contiguous()
        return self._places

    @property
    def hidden(self) -> torch.Tensor:
        """`(B, M, H)`, last hidden states of the last M rows."""
        assert self.states is not None
        return self.states[:, max(0, self.states.shape[1] - self.count) :, : self.size]

    def with_inner(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last hidden states of the last T rows, `(B, T, H)`, with their inner states behind, if there are any."""
        if self.inner is None:
            return hidden
        return torch.cat([hidden, self.inner[:, -hidden.shape[1] :].to(hidden)], dim=-1)


@dataclass(frozen=True)
class Update:
    """Forward hook of one linear layer: adds the update to the rows that are slots, and touches no other row."""

    target: str
    layer: int

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        """What the layer gives."""
        if self.adds_nothing():
            return None
        slots: Slots = UNDER_WAY.slots
        down, up = slots.matrices.updates[self.target][self.layer]
        start = output.shape[1] - slots.count
        rows, last = (each.narrow(1, start, slots.count) for each in (args[0], output))
        if len(rows) > 1:  # as one matrix: torch multiplies slices of a batch one by one, with copies of the weights
            rows = rows.flatten(0, 1)
        update = multiply(multiply(rows, down), up)
        if len(last) > 1:
            update = update.view_as(last)
        if slots.mask is not None:
            update = update.masked_fill(~slots.mask, 0)
        if torch.is_grad_enabled():
            return last + update if start == 0 else torch.cat([output[:, :start], last + update], dim=1)
        last.add_(update)
        return None

    @staticmethod
    def adds_nothing() -> bool:
        """Whether no update of the forward under way adds anything."""
        return UNDER_WAY.slots is None or not UNDER_WAY.slots.count

    def low_rank(self, rows: torch.Tensor) -> tuple[Any, Any, torch.Tensor] | None:
        """For kernels that compute a whole decoder layer: the two matrices, and which of the rows `(B, T, H)` they are
        for, as places among the `B * T`, int32. `None` where it adds nothing."""
        if self.adds_nothing():
            return None
        slots: Slots = UNDER_WAY.slots
        return *slots.matrices.updates[self.target][self.layer], slots.places(rows)


@dataclass(frozen=True)
class EmbedSlots:
    """Forward hook of the input embeddings: slots have an embedding of their own, whatever their token is."""

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        """What the layer gives."""
        slots: Slots | None = UNDER_WAY.slots
        if slots is None or not slots.count:
            return None
        if slots.count > output.shape[1]:
            raise ValueError(f"There are more slots, {slots.count}, than rows in the input, {output.shape[1]}.")
        if slots.embedding is None:
            return None
        embedding = slots.embedding.to(output.dtype)
        real, last = output.split([output.shape[1] - slots.count, slots.count], dim=1)
        last = embedding.expand_as(last) if slots.mask is None else torch.where(slots.mask, embedding, last)
        return torch.cat([real, last], dim=1)


@dataclass(frozen=True)
class CatchSlots:
    """Forward pre-hook of the head: notes the hidden states that it reads."""

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What the head gets."""
        slots: Slots | None = UNDER_WAY.slots
        # For a slice of a batch, torch copies the head's weights once for each sequence.
        hidden = args[0].contiguous()
        if slots is not None and hidden.ndim == 3:
            slots.states = slots.with_inner(hidden)
        return hidden, *args[1:]


@dataclass(frozen=True)
class CatchInner:
    """Forward hook of a decoder layer: notes the states that it gives, which the root head reads."""

    only_reads: ClassVar[bool] = True  # so that kernels compute the layers behind, too

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Nothing: the states stay as they are."""
        if UNDER_WAY.slots is not None:
            states = output if isinstance(output, torch.Tensor) else output[0]
            UNDER_WAY.slots.inner = states[0] if states.ndim == 4 else states  # of Gemma 3n's streams the first


FOREIGN = "An adapter of Uno is read as it is: it is not trained here, extended or saved."
HOOKS = (Update, EmbedSlots, CatchSlots, CatchInner)


class PreviousTokenHead(nn.Module):
    """Corrects a mask's last hidden state once the two tokens before it are known (docs/algorithm.md#mask-adapters).

    A draft behind a token cannot know it while its own forward runs. Choosing the drafts one after the other, each
    through this small network, makes up for that; the base's own head then reads the corrected state.
    """

    def __init__(self, hidden_size: int, width: int, has_inner: bool = False):
        super().__init__()
        # Plain parameters: PEFT's "all-linear" would put a LoRA on linear layers.
        inputs = (3 + has_inner) * hidden_size
        self.down = nn.Parameter(torch.empty(width, inputs).uniform_(-(inputs**-0.5), inputs**-0.5))
        self.up = nn.Parameter(torch.zeros(hidden_size, width))

    def forward(
        self,
        hidden: torch.Tensor,
        previous: torch.Tensor,
        pair: Pair | None = None,
    ) -> torch.Tensor:
        """Hidden states `(..., H)` for the base's head.

        Args:
            hidden: `(..., H)`, the masks' last hidden states; of the root head, those that predicted the last token,
                or `(..., 2H)`, with the inner states behind.
            previous: `(..., 2, H)`, the embeddings of the two tokens before each mask, in the order of the text.
            pair: the head's own matrices in another format.
        """
        down, up = pair or (self.down, self.up)
        dtype = down.dtype if isinstance(down, torch.Tensor) else torch.float32  # which packed matrices take
        size = previous.shape[-1]
        if hidden.shape[-1] > size:
            hidden, inner = hidden[..., :size], hidden[..., None, size:]
            previous = torch.cat([previous, inner.to(previous)], dim=-2)
        previous = previous.to(dtype)
        previous = previous / previous.std(-1, keepdim=True).clamp(min=1e-6)
        units = multiply(torch.cat([hidden.to(dtype), previous.flatten(-2)], dim=-1), down)
        return hidden + multiply(nn.functional.silu(units), up).to(hidden.dtype)


class RootHead(PreviousTokenHead):
    """Drafts without masks: it makes, of the state of a real row and of the token that the row predicts, a state that
    predicts the token behind, as Hydra's heads do (Ankner et al., 2024). It may read the row's state behind an inner
    layer, too, which knows more of what comes later (Pal et al., 2023).

    Attributes:
        tokens: `(4096,)` int64, those that it drafts among, the most frequent ones of the model's answers first; -1
            where there are fewer.
    """

    tokens: torch.Tensor

    def __init__(self, hidden_size: int, width: int, has_inner: bool = False):
        super().__init__(hidden_size, width, has_inner)
        self.register_buffer("tokens", torch.full((MOST_FREQUENT,), -1))

    def draft_among(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """From now on it drafts among the most frequent tokens of answers (their `response_ids`); where these have few
        kinds of tokens, among those from before, too."""
        counts = Counter(token for answer in answers for token in answer["response_ids"])
        found = [token for token, _ in counts.most_common()]
        found = list(dict.fromkeys([*found, *self.frequent().tolist()]))[:MOST_FREQUENT]
        self.tokens[: len(found)] = torch.tensor(found)

    def frequent(self, vocab_size: int | None = None) -> torch.Tensor:
        """`(S,)` int64, its tokens, of a vocabulary that may have been resized since."""
        is_known = self.tokens >= 0
        return self.tokens[is_known if vocab_size is None else is_known & (self.tokens < vocab_size)]


class MaskAdapter(nn.Module):
    """The weights of a mask adapter: updates of layers, the slots' embedding, the previous-token head and the root
    head.

    It begins as no change at all, but for the embedding of the slots.

    Args:
        settings: its shape; `target_modules` and `root_layer` are known.
        sizes: of each target, the number of layers that have it, and rows and columns of its weights: `(layers, out,
            in)`.
        hidden_size: H.
        mask_embedding: `(H,)`, what the slots' embedding begins with; `None` where slots hold tokens.
        run: what draft rows are: how they stand behind a row, and what they hold.
    """

    mask_embedding: nn.Parameter | None

    def __init__(
        self,
        settings: MaskAdapterSettings,
        sizes: Sequence[tuple[int, int, int]],
        hidden_size: int,
        mask_embedding: torch.Tensor | None,
        run: MaskRun,
    ):
        super().__init__()
        self.settings, self.is_enabled, self.hidden_size, self.run = settings, True, hidden_size, run
        self.frozen: set[str] = set()  # parameters of the base that trained before
        self.peft_config: Any = None  # PEFT's copy of the settings, where PEFT made the adapter
        known = None if mask_embedding is None else nn.Parameter(mask_embedding.detach().float().clone())
        self.register_parameter("mask_embedding", known)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for target, (layers, rows, columns) in zip(settings.target_modules, sizes, strict=True):
            key = target.replace(".", "/")  # parameters cannot have a dot in their name
            self.down[key] = nn.Parameter(torch.randn(layers, settings.rank, columns) / columns**0.5)
            self.up[key] = nn.Parameter(torch.zeros(layers, rows, settings.rank))
        width, root = settings.head_width, (settings.root_width, bool(settings.root_layer))
        self.head = PreviousTokenHead(hidden_size, width) if width else None
        self.root_head = RootHead(hidden_size, *root) if settings.root_width else None
        self._prepared: tuple[Any, Matrices] | None = None
        self.frequent: tuple[Any, Any] | None = None  # what drafts without masks are among, see `attach.py`

    def check_own(self) -> None:
        """Raises `ValueError` for an adapter of another library's format, which is read and no more."""
        if self.mask_embedding is None:
            raise ValueError(FOREIGN)

    def restate(self, **changes: Any) -> None:
        """Changes settings."""
        self.settings = replace(self.settings, **changes)
        for name, value in changes.items() if self.peft_config is not None else ():
            setattr(self.peft_config, name, value)

    def slots(self, slots: int | torch.Tensor | None, dtype: torch.dtype, is_packed: bool = False) -> Slots | None:
        """The slots of a forward, which embeds and updates them, for [`forward_as`].

        Args:
            slots: `(B, M)` bool, which of the last M physical rows are slots; M where all are; `None` for none.
            dtype: of the rows.
            is_packed: the model's layers are, and so are the updates.

        Returns:
            The slots, with the states that the head read once the forward has run. `None` where nothing reads them:
            without slots and without a root head.
        """
        if slots is None and self.root_head is None:
            return None
        count, mask = (slots.shape[1], slots[..., None]) if isinstance(slots, torch.Tensor) else (slots or 0, None)
        return Slots(count, mask, self.mask_embedding, self.hidden_size, self.matrices(dtype, is_packed))

    def matrices(self, dtype: torch.dtype, is_packed: bool) -> Matrices:
        """The matrices, for rows of `dtype`; made once where they do not train."""
        heads = [head for head in (self.head, self.root_head) if head is not None]
        parameters = [
            *self.down.values(),
            *self.up.values(),
            *(each for head in heads for each in (head.down, head.up)),
        ]
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        is_packed = is_packed and not torch.is_grad_enabled()  # packed products have no gradients
        versions = (0 if parameter.is_inference() else parameter._version for parameter in parameters)
        key = dtype, is_packed, *zip(versions, (parameter.data_ptr() for parameter in parameters), strict=True)
        prepared = self._prepared
        if not trains and prepared is not None and prepared[0] == key:
            return prepared[1]

        def each(stacked: torch.Tensor) -> list[Any]:
            return [*map(near_matrix, stacked)] if is_packed else list(stacked.to(dtype).unbind())

        def pair(head: PreviousTokenHead | None) -> Pair | None:
            if head is None:
                return None
            return (near_matrix(head.down), near_matrix(head.up)) if is_packed else (head.down, head.up)

        updates = {
            target.replace("/", "."): list(zip(each(down), each(self.up[target]), strict=True))
            for target, down in self.down.items()
        }
        found = Matrices(updates, pair(self.head), pair(self.root_head))
        # Optimizers may change parameters without raising their version: what trains is never kept.
        self._prepared = None if trains else (key, found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_prepared": None, "frequent": None}
