"""Mask adapters on the model object that a person has: any causal language model of transformers, as it was loaded.

Nothing is converted or copied (docs/algorithm.md#mask-adapters). Hooks on some linear layers update the rows that are
slots, a hook on the embeddings gives slots their own, and one on the head notes their hidden states. The object's
class becomes a subclass of its own class, whose `generate` knows `strategy="wedlm"`; [`unload_mask_adapter`] gives it
back as it was.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from ..checkpoints.find import ADAPTER_FILE
from ..checkpoints.matrices import near_matrix
from ..checkpoints.packed import give_back_memory
from ..checkpoints.packed_layers import PackedLinear
from ..generation.drafter import head_rows
from ..generation.forward import forward_as
from ..generation.mixin import WeDLMGenerationMixin
from ..generation.rows import ADAPTER_MASKS, MaskRun
from ..generation.state import keeps_state
from ..generation.versions import explained, is_checkpointing, warn_if_untested
from .adapter_files import (
    MaskAdapterSettings,
    StoredMaskAdapter,
    base_embeddings,
    base_of,
)
from .formats import read_adapter
from .layers import base_layer, decoder_layers, find_targets, root_layer_of, sizes_of
from .mask_adapter import (
    FOREIGN,
    HOOKS,
    CatchInner,
    CatchSlots,
    EmbedSlots,
    MaskAdapter,
    RootHead,
    Slots,
    Update,
    multiply,
)
from .probe import SHARDED, check_attachable, check_masks

# The first draft behind a row mixes what the mask and the root head predict. This is the root head's share: 0.2 was
# best on 96 answers of SmolLM2, of 0, 0.1, … 0.5.
ROOT_WEIGHT = 0.2


class AttachedModel(WeDLMGenerationMixin):
    """What a model can do while a mask adapter sits on it. Its class is this one and its own, the `base_class`."""

    mask_adapter: MaskAdapter
    base_class: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new model, as `type(model)(config)` and `type(model).from_pretrained(…)` ask for one, is the base's: a
        mask adapter is put on a model that is there."""
        return cls.base_class(*args, **kwargs)

    @property
    def has_mask_adapter(self) -> bool:  # type: ignore[override]
        """Whether decoding uses the mask adapter."""
        return self.mask_adapter.is_enabled

    @property
    def deepest(self) -> int:
        """Masks behind one row that the mask adapter is trained to predict."""
        return self.mask_adapter.settings.num_masks

    @property
    def mask_run(self) -> MaskRun:
        """What the rows are that the mask adapter drafts with."""
        return self.mask_adapter.run

    @property
    def drafts_from_root(self) -> bool:
        """Whether the root head drafts: once it has learned, and not for a model that keeps a state."""
        head = self.mask_adapter.root_head
        return head is not None and not keeps_state(self) and bool(head.up.any())

    def slots(self: Any, slots: int | torch.Tensor | None) -> Slots | None:
        """The slots of a forward: [`MaskAdapter.slots`].

        Raises:
            ValueError: under gradient checkpointing, which would compute the slots anew without the mask adapter.
        """
        if self.training and is_checkpointing(self):
            raise ValueError("Gradient checkpointing would compute the slots anew without the mask adapter.")
        if slots is not None or self.mask_adapter.root_head is not None:
            if hasattr(next(self.mask_adapter.parameters()), "full_tensor"):  # a DTensor
                raise ValueError(f"{SHARDED}: leave the adapter and these out of `fully_shard`, or decode as AR.")
            _watch_ends(self)
        found: Slots | None = self.mask_adapter.slots(slots, *self._row_format)
        return found

    @contextmanager
    def predicting(self: Any, slots: int | torch.Tensor | None) -> Iterator[Slots | None]:
        """Within this context, a forward takes the last rows of its input for slots, which are yielded."""
        found = self.slots(slots)
        with forward_as(slots=found):
            yield found

    @property
    def _is_packed(self: Any) -> bool:
        return isinstance(self.get_output_embeddings(), PackedLinear)

    @property
    def _row_format(self: Any) -> tuple[torch.dtype, bool]:
        """The dtype of rows, and whether layers are packed."""
        is_packed = self._is_packed
        # torch looks through all parameters for a dtype.
        return (torch.float32 if is_packed else self.dtype), is_packed

    def draft_hidden(
        self: Any, hidden: torch.Tensor, previous_ids: torch.Tensor, of_root: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The states that the head turns into drafts, once the tokens before the slots are known.

        Args:
            hidden: `(..., H)`, last hidden states of slots; what stands behind them is not read.
            previous_ids: `(..., 2)` int64, the two tokens before each slot in the order of the text: accepted ones,
                or drafts chosen just now.
            of_root: `(..., H)`, of the first slots behind their rows, what [`root_hidden`] makes of these rows. It
                weighs [`ROOT_WEIGHT`]: two that err apart are right more often than either.

        Returns:
            `(..., H)`; the hidden states themselves where the adapter has no previous-token head.
        """
        adapter = self.mask_adapter
        hidden = hidden[..., : adapter.hidden_size]
        if adapter.head is not None:
            found = adapter.matrices(*self._row_format)
            hidden = adapter.head(hidden, self.get_input_embeddings()(previous_ids), found.head)
        return hidden if of_root is None else torch.lerp(hidden, of_root.to(hidden), ROOT_WEIGHT)

    def root_hidden(self: Any, hidden: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """As [`draft_hidden`], without masks: `hidden` are the states that predicted the last of these tokens, with
        their inner states behind, if the root head reads them."""
        adapter = self.mask_adapter
        found = adapter.matrices(*self._row_format)
        return adapter.root_head(hidden, self.get_input_embeddings()(previous_ids), found.root_head)

    def root_shortlist(self) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
        """The tokens that the root head drafts among, `(S,)` int64, and what scores them: some rows of the head.
        `None` where single rows cannot be read."""
        return _frequent(self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copies and pickles are made of the class that a name can find."""
        parts: Any = super().__reduce_ex__(protocol)
        make, (_, *rest), *state = parts
        return _rebuilt, (self.base_class, make, *rest), *state


def _rebuilt(base: type, make: Any, *rest: Any) -> Any:
    made = make(base, *rest)
    made.__class__ = _attached(base)
    return made


@cache
def _attached(base: type) -> type:
    """The class of a `base` with a mask adapter. It has the base's name, which checkpoints state."""
    known = {"__module__": base.__module__, "__doc__": base.__doc__, "base_class": base}
    return type(base.__name__, (AttachedModel, base), known)


@torch.no_grad()
def _frequent(model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
    """See [`AttachedModel.root_shortlist`]."""
    head, adapter = model.get_output_embeddings(), model.mask_adapter
    is_packed, table = isinstance(head, PackedLinear), head_rows(head)
    if table is None and not is_packed:
        return None
    root_head = adapter.root_head
    changing = [each for each in (table, head.bias, root_head.tokens) if isinstance(each, torch.Tensor)]
    versions = [(each.data_ptr(), each.dtype, 0 if each.is_inference() else each._version) for each in changing]
    key = head, root_head, versions
    if adapter.frequent is None or adapter.frequent[0] != key:
        size = head.out_features if table is None else len(table)
        tokens = root_head.frequent(size).to(model.device)
        if not len(tokens):
            return None
        rows = (head.unpacked() if table is None else table)[tokens]
        matrix = near_matrix(rows) if is_packed else rows
        bias = None if head.bias is None else head.bias[tokens]

        def score(states: torch.Tensor) -> torch.Tensor:
            scores = multiply(states, matrix)
            return scores if bias is None else scores + bias

        adapter.frequent = key, (tokens, score)
    found: tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] = adapter.frequent[1]
    return found


def add_mask_adapter(model: Any, settings: MaskAdapterSettings | None = None) -> MaskAdapter:
    """Gives a model a new mask adapter to train, in float32, and freezes everything else.

    Args:
        model: a causal language model of transformers, as it was loaded; it stays the same object.
        settings: shape of the adapter. Without `target_modules`, the projection out of
            attention, or what a layer has in its place, and the last one of the MLP are updated.

    Raises:
        TypeError: for what is no model of transformers, as one that is compiled or wrapped.
        ValueError: for a model that has a mask adapter, whose architecture cannot carry one, and for targets that its
            layers do not have.
    """
    adapter = attach(model, settings or MaskAdapterSettings())
    train_alone(model)
    return adapter


def load_mask_adapter(
    model: Any,
    name: str | os.PathLike[str],
    *,
    any_base: bool = False,
    is_trainable: bool = False,
    mask_token_id: int | None = None,
    noise: str | None = None,
    **download_options: Any,
) -> None:
    """Puts a saved mask adapter on a model, ours or Uno's; PEFT is not needed. The model's own weights train on, if
    they do.

    Args:
        model: a causal language model of transformers, as it was loaded; it stays the same object.
        name: folder or Hub id of the adapter.
        any_base: take it also where the model's weights are not those that it was trained for, as those of a
            fine-tune: see [`compare_bases`].
        is_trainable: keep the adapter in float32, to be trained further, and freeze everything else.
        mask_token_id, noise: of an Uno adapter, see [`NoiseRun`]; default: the mask token that the model's config
            names, or else a tokenizer of the adapter or the model.
        download_options: `revision`, `subfolder`, `token`, … of the Hub.

    Raises:
        OSError: for missing or damaged files.
        TypeError, ValueError: as [`add_mask_adapter`]; for an adapter of another kind or of another base.
    """
    stored = read_adapter(name, **download_options)
    check_attachable(model)
    run = stored.draft_rows(model, mask_token_id, noise)
    if is_trainable and run is not None:
        raise ValueError(FOREIGN)
    stored.check_base(model, any_base=any_base)
    adapter = attach(model, stored.settings, run)
    try:
        adapter.load_state_dict(stored.weights)
    except RuntimeError as error:
        unload_mask_adapter(model)
        raise ValueError(f"The weights of {str(name)!r} do not fit its {ADAPTER_FILE}: {error}") from error
    if is_trainable:
        train_alone(model)
    else:
        # Packed, the adapter is copied anyway: its own weights stay as small as in their file, which has one dtype.
        stored_in = [weight.dtype for weight in stored.weights.values() if weight.is_floating_point()]
        adapter.to(stored_in[0] if model._is_packed else model.dtype).requires_grad_(False)
        if model._is_packed:  # or the first answer would wait while the copy is made
            with torch.no_grad():
                adapter.matrices(*model._row_format)
                if model.drafts_from_root:
                    model.root_shortlist()
            give_back_memory()


def save_mask_adapter(model: Any, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, which PEFT reads too, each file whole.

    Args:
        model: with a mask adapter; it may be a `PeftModel`.
        folder: made if it is not there.
        dtype: of the weights; default: the model's.
    """
    model = attached_in(model)
    adapter = model.mask_adapter
    adapter.check_own()
    weights = {name: tensor.detach() for name, tensor in adapter.state_dict().items()}
    for name, tensor in weights.items():
        tensor = tensor.to(dtype or model.dtype) if tensor.is_floating_point() else tensor
        weights[name] = tensor.cpu().contiguous()
    StoredMaskAdapter(adapter.settings, base_of(model), weights).write(folder, model.config.name_or_path or None)


def check_answers(model: Any, answers: Iterable[Mapping[str, Any]]) -> None:
    """Raises `ValueError` unless each answer has `prompt_ids` and `response_ids`, lists of tokens of the model."""
    size = base_embeddings(model).num_embeddings
    for number, answer in enumerate(answers):
        try:
            tokens = [*answer["prompt_ids"], *answer["response_ids"]]
            is_known = all(type(token) is int and 0 <= token < size for token in tokens)
        except (KeyError, TypeError):
            is_known = False
        if not is_known:
            raise ValueError(
                f"Answers must hold tokens of the model, 0 to {size - 1}, as lists `prompt_ids` and `response_ids`; "
                f"answer {number} is {str(answer)[:99]}."
            )


def add_root_head(model: Any, width: int) -> None:
    """Gives a mask adapter that has no root head a new one, of `width` hidden units."""
    model = attached_in(model)
    adapter = model.mask_adapter
    adapter.check_own()
    if adapter.root_head is None:
        layer = root_layer_of(model)
        adapter.root_head = RootHead(adapter.hidden_size, width, bool(layer)).to(adapter.mask_embedding.device)
        adapter.restate(root_width=width, root_layer=layer)
        _watch_inner(model)
        _keep_out_of_saves(model)


def unload_mask_adapter(model: Any) -> None:
    """Takes the mask adapter away: class, hooks and attributes are the base's again. The model may be a `PeftModel`
    with other adapters. Raises `ValueError` where there is none, or where it is PEFT's own."""
    outer, model = model, attached_in(model)
    if model is not outer and model.mask_adapter.peft_config is not None:
        raise ValueError(f"PEFT made the mask adapter of {type(outer).__name__}: call the `unload()` of that.")
    frozen, is_packed = model.mask_adapter.frozen, isinstance(model.get_output_embeddings(), PackedLinear)
    for name, parameter in model.named_parameters():
        if name in frozen and not is_packed:  # packed layers do not train
            parameter.requires_grad_(True)
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, HOOKS):
                    del hooks[key]
    del model.mask_adapter
    model._keys_to_ignore_on_save = {
        key for key in model._keys_to_ignore_on_save if not key.startswith("mask_adapter.")
    }
    model.__dict__.pop("_planners", None)
    model.__class__ = model.base_class


def train_alone(model: Any) -> None:
    """Freezes all but the mask adapter, which notes what [`unload_mask_adapter`] must thaw."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.mask_adapter.frozen = trained
    model.requires_grad_(False)
    model.mask_adapter.requires_grad_(True)


def attached_in(model: Any) -> Any:
    """The model that has the mask adapter."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, AttachedModel):
            return module
    raise ValueError(f"{type(model).__name__} has no mask adapter.")


@explained
def attach(model: Any, settings: MaskAdapterSettings, run: MaskRun | None = None) -> MaskAdapter:
    """Puts a mask adapter on a model, whose draft rows are masks by default. Raises `TypeError` and `ValueError` as
    [`add_mask_adapter`]."""
    check_attachable(model)
    warn_if_untested()
    check_masks(model)
    settings, targets = find_targets(model, settings)
    embedding = _mean_embedding(model) if run is None else None
    size: int = base_embeddings(model).embedding_dim
    adapter = MaskAdapter(settings, sizes_of(targets), size, embedding, run or ADAPTER_MASKS).to(model.device)
    for target, modules in targets.items():
        for index, module in enumerate(modules):
            module.register_forward_hook(Update(target, index))
    _watch_ends(model)
    base: Any = type(model)
    model.__class__ = _attached(base)
    model.mask_adapter = adapter
    _watch_inner(model)
    _keep_out_of_saves(model)
    return adapter


def _keep_out_of_saves(model: Any) -> None:
    """The base's own checkpoint stays the base's."""
    names = (f"mask_adapter.{name}" for name in model.mask_adapter.state_dict())
    model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), *names}


@torch.no_grad()
def _mean_embedding(model: Any) -> torch.Tensor:
    """What the slots' embedding begins with, `(H,)` float32: MASK's, or the mean of all tokens'."""
    embeddings, mask_id = base_embeddings(model), getattr(model.config, "mask_token_id", None)
    known = torch.arange(embeddings.num_embeddings) if mask_id is None else torch.tensor([mask_id])
    start: torch.Tensor = embeddings(known.to(model.device)).float().mean(0)
    return start


def _watch_ends(model: Any) -> None:
    """Hooks on embeddings and head, which may be others than before: resized, say."""
    embeddings, head = model.get_input_embeddings(), base_layer(model.get_output_embeddings())
    if EmbedSlots() not in embeddings._forward_hooks.values():
        embeddings.register_forward_hook(EmbedSlots())
    if CatchSlots() not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(CatchSlots())


def _watch_inner(model: Any) -> None:
    """A hook on the layer whose states the root head reads, and on no other."""
    for count, layer in enumerate(decoder_layers(model), 1):
        for key, hook in list(layer._forward_hooks.items()):
            if isinstance(hook, CatchInner):
                del layer._forward_hooks[key]
        if count == model.mask_adapter.settings.root_layer:
            layer.register_forward_hook(CatchInner())
