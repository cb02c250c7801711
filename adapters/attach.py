"""Mask adapters on the model object that a person has: any causal language model of transformers, as it was loaded.

Nothing is converted or copied (docs/algorithm.md#mask-adapters). Hooks on some linear layers update the rows that are
slots, a hook on the embeddings gives slots their own, and one on the head notes their hidden states. The object's
class becomes a subclass of its own class, whose `generate` knows `strategy="wedlm"`; [`unload_mask_adapter`] gives it
back as it was.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoints.find import ADAPTER_FILE
from ..checkpoints.packed import PackedLinear, multiply, pack_matrix
from ..generation.attention import (
    ATTENTION_KINDS,
    DENSE_MASK_ATTENTION,
    StepAttention,
    implementation_of,
    layer_types,
)
from ..generation.cache import WindowCache
from ..generation.drafter import head_rows
from ..generation.mixin import WeDLMGenerationMixin
from ..generation.rows import Row, SequenceState, Tree, lay_out
from ..generation.state import keeps_state, prepare_chunks, short_chunks
from ..generation.versions import cache_name, explained, is_checkpointing, warn_if_untested
from .adapter_files import (
    MaskAdapterSettings,
    StoredMaskAdapter,
    base_embeddings,
    base_of,
    check_base,
)
from .mask_adapter import HOOKS, CatchInner, CatchSlots, EmbedSlots, MaskAdapter, RootHead, Slots, Update

# Single tokens that are read to see that a state is the same, and by how much of the largest logit theirs may differ.
SINGLES, LEAST_STATE = 8, 1e-4
TABLES = ("codegen", "gptj")  # model types whose rotary embeddings are a table
# Of the root head in drafts of first masks. On 96 fresh answers of SmolLM2 0.2 was best, of 0 to 0.5 by tenths.
ROOT_WEIGHT = 0.2
SHARDED = "Drafting calls the embeddings and the head by themselves, which FSDP does not allow"


class AttachedModel(WeDLMGenerationMixin):
    """What a model can do while a mask adapter sits on it. Its class is this one and its own."""

    mask_adapter: MaskAdapter

    @property
    def has_mask_adapter(self) -> bool:  # type: ignore[override]
        """Whether decoding uses the mask adapter."""
        return self.mask_adapter.is_enabled

    @property
    def deepest(self) -> int:
        """Masks behind one row that the mask adapter is trained to predict."""
        return self.mask_adapter.settings.num_masks

    @property
    def drafts_from_root(self) -> bool:
        """Whether the root head drafts: once it has learned, and not for a model that keeps a state."""
        head = self.mask_adapter.root_head
        return head is not None and not keeps_state(self) and bool(head.up.any())

    def predicting(self: Any, slots: int | torch.Tensor | None) -> AbstractContextManager[Slots | None]:
        """Within this context, a forward takes the last rows of its input for slots: [`MaskAdapter.predicting`].

        Raises:
            ValueError: under gradient checkpointing, which would compute the slots anew without the mask adapter.
        """
        if self.training and is_checkpointing(self):
            raise ValueError("Gradient checkpointing would compute the slots anew without the mask adapter.")
        if slots is not None or self.mask_adapter.root_head is not None:
            if hasattr(self.mask_adapter.mask_embedding, "full_tensor"):  # a DTensor
                raise ValueError(f"{SHARDED}: leave the adapter and these out of `fully_shard`, or decode as AR.")
            _watch_ends(self)
        return self.mask_adapter.predicting(slots, self.dtype, self._is_packed)

    @property
    def _is_packed(self: Any) -> bool:
        return isinstance(self.get_output_embeddings(), PackedLinear)

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
        hidden = hidden[..., : len(adapter.mask_embedding)]
        if adapter.head is not None:
            found = adapter.matrices(self.dtype, self._is_packed)
            hidden = adapter.head(hidden, self.get_input_embeddings()(previous_ids), found.head, found.multiply)
        return hidden if of_root is None else torch.lerp(hidden, of_root.to(hidden), ROOT_WEIGHT)

    def root_hidden(self: Any, hidden: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """As [`draft_hidden`], without masks: `hidden` are the states that predicted the last of these tokens, with
        their inner states behind, if the root head reads them."""
        adapter = self.mask_adapter
        found = adapter.matrices(self.dtype, self._is_packed)
        return adapter.root_head(hidden, self.get_input_embeddings()(previous_ids), found.root_head, found.multiply)

    def root_shortlist(self) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
        """The tokens that the root head drafts among, `(S,)` int64, and what scores them: some rows of the head.
        `None` where single rows cannot be read."""
        return _frequent(self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copies and pickles are made of the class that a name can find."""
        parts: Any = super().__reduce_ex__(protocol)
        make, (_, *rest), *state = parts
        return _rebuilt, (type(self).__bases__[1], make, *rest), *state


def _rebuilt(base: type, make: Any, *rest: Any) -> Any:
    return make(_attached(base), *rest)


@cache
def _attached(base: type) -> type:
    """The class of a `base` with a mask adapter. It has the base's name, which checkpoints state."""
    return type(base.__name__, (AttachedModel, base), {"__module__": base.__module__, "__doc__": base.__doc__})


@torch.no_grad()
def _frequent(model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
    """See [`AttachedModel.root_shortlist`]."""
    head, adapter = model.get_output_embeddings(), model.mask_adapter
    is_packed, table = isinstance(head, PackedLinear), head_rows(head)
    if table is None and not is_packed:
        return None
    root_head = adapter.root_head
    changing = [each for each in (table, head.bias, root_head.tokens) if each is not None]
    versions = [(each.data_ptr(), each.dtype, 0 if each.is_inference() else each._version) for each in changing]
    key = head, root_head, versions
    if adapter.frequent is None or adapter.frequent[0] != key:
        size = head.out_features if table is None else len(table)
        tokens = root_head.frequent(size).to(model.device)
        if not len(tokens):
            return None
        rows = (head.unpacked() if table is None else table)[tokens]
        product, matrix = (multiply, pack_matrix(rows)) if is_packed else (nn.functional.linear, rows)
        bias = None if head.bias is None else head.bias[tokens]

        def score(states: torch.Tensor) -> torch.Tensor:
            scores = product(states, matrix)
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
    **download_options: Any,
) -> None:
    """Puts a saved mask adapter on a model; PEFT is not needed. The model's own weights train on, if they do.

    Args:
        model: a causal language model of transformers, as it was loaded; it stays the same object.
        name: folder or Hub id of the adapter.
        any_base: take it also where the model's weights are not those that it was trained for (a fine-tuned base,
            say): answers are still the model's own, but fewer drafts may be accepted.
        is_trainable: keep the adapter in float32, to be trained further, and freeze everything else.
        download_options: `revision`, `token`, … of the Hub.

    Raises:
        OSError: for missing or damaged files.
        TypeError, ValueError: as [`add_mask_adapter`]; for an adapter of another kind or of another base.
    """
    stored = StoredMaskAdapter.read(name, **download_options)
    check_attachable(model)
    check_base(model, stored.base, any_base=any_base)
    adapter = attach(model, stored.settings)
    try:
        adapter.load_state_dict(stored.weights)
    except RuntimeError as error:
        unload_mask_adapter(model)
        raise ValueError(f"The weights of {str(name)!r} do not fit its {ADAPTER_FILE}: {error}") from error
    if is_trainable:
        train_alone(model)
    else:
        adapter.to(model.dtype).requires_grad_(False)


def save_mask_adapter(model: Any, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, which PEFT reads too, each file whole.

    Args:
        model: with a mask adapter; it may be a `PeftModel`.
        folder: made if it is not there.
        dtype: of the weights; default: the model's.
    """
    model = attached_in(model)
    adapter = model.mask_adapter
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
    if adapter.root_head is None:
        size, device, layer = len(adapter.mask_embedding), adapter.mask_embedding.device, _root_layer(model)
        adapter.root_head = RootHead(size, width, bool(layer)).to(device)
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
    model.__class__ = type(model).__bases__[1]


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
def attach(model: Any, settings: MaskAdapterSettings) -> MaskAdapter:
    """Puts a mask adapter on a model. Raises `TypeError` and `ValueError` as [`add_mask_adapter`]."""
    check_attachable(model)
    warn_if_untested()
    check_masks(model)
    settings, targets = _targets(model, settings)
    adapter = MaskAdapter(settings, _sizes(targets), _mean_embedding(model))
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


def _targets(model: Any, settings: MaskAdapterSettings) -> tuple[MaskAdapterSettings, dict[str, list[nn.Module]]]:
    """Settings whose target modules and root layer are known, and the linear layers of each target. Raises
    `ValueError` for layers that are not there."""
    layers = decoder_layers(model)
    root_layer = _root_layer(model) if settings.root_layer is None else settings.root_layer
    settings = replace(settings, root_layer=root_layer if settings.root_width else 0)
    if root_layer > len(layers):
        raise ValueError(f"`root_layer` is {settings.root_layer}; {type(model).__name__} has {len(layers)} layers.")
    if max(settings.layers_to_transform, default=0) >= len(layers):
        raise ValueError(
            f"`layers_to_transform` names layer {max(settings.layers_to_transform)}; {type(model).__name__} has the "
            f"layers 0 to {len(layers) - 1}."
        )
    updated = [layers[index] for index in settings.layers_to_transform] or list(layers)
    if not settings.target_modules:
        names = [name for name in output_projections(model) if any(_has(layer, name) for layer in updated)]
        settings = replace(settings, target_modules=tuple(names))
    lacking = [name for name in settings.target_modules if not any(_has(layer, name) for layer in updated)]
    if settings.layers_to_transform and (lacking or not settings.target_modules):
        raise ValueError(
            f"None of the layers {list(settings.layers_to_transform)} of {type(model).__name__} has the linear layer "
            f"{lacking[0] if lacking else output_projections(model)[0]!r}."
        )
    return settings, {target: _target_modules(model, updated, target) for target in settings.target_modules}


def _sizes(targets: Mapping[str, Sequence[Any]]) -> list[tuple[int, int, int]]:
    """Of each target, the number of layers that have it, and rows and columns of its weights. Raises `ValueError`
    where these differ from layer to layer."""
    sizes = []
    for target, modules in targets.items():
        shapes = {(module.out_features, module.in_features) for module in modules}
        if len(shapes) > 1:
            raise ValueError(f"`target_modules` names {target!r}, of different sizes in the layers: {sorted(shapes)}.")
        sizes.append((len(modules), *shapes.pop()))
    return sizes


@torch.no_grad()
def _mean_embedding(model: Any) -> torch.Tensor:
    """What the slots' embedding begins with, `(H,)` float32: MASK's, or the mean of all tokens'."""
    embeddings, mask_id = base_embeddings(model), getattr(model.config, "mask_token_id", None)
    known = torch.arange(embeddings.num_embeddings) if mask_id is None else torch.tensor([mask_id])
    start: torch.Tensor = embeddings(known.to(model.device)).float().mean(0)
    return start


def _watch_ends(model: Any) -> None:
    """Hooks on embeddings and head, which may be others than before: resized, say."""
    embeddings, head = model.get_input_embeddings(), _base_layer(model.get_output_embeddings())
    if EmbedSlots() not in embeddings._forward_hooks.values():
        embeddings.register_forward_hook(EmbedSlots())
    if CatchSlots() not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(CatchSlots())


def _root_layer(model: Any) -> int:
    """How many decoder layers make the inner state of a new root head; 0 where their states have another size than
    the head's."""
    size: int = model.config.get_text_config(decoder=True).hidden_size
    is_alike = size == base_embeddings(model).embedding_dim
    return 3 * len(decoder_layers(model)) // 4 if is_alike else 0


def _watch_inner(model: Any) -> None:
    """A hook on the layer whose states the root head reads, and on no other."""
    for count, layer in enumerate(decoder_layers(model), 1):
        for key, hook in list(layer._forward_hooks.items()):
            if isinstance(hook, CatchInner):
                del layer._forward_hooks[key]
        if count == model.mask_adapter.settings.root_layer:
            layer.register_forward_hook(CatchInner())


def check_attachable(model: Any) -> None:
    """Raises `TypeError` or `ValueError`, with the reason, for a model that cannot carry a mask adapter."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        is_wrapped = hasattr(model, "module") or hasattr(model, "get_base_model")
        inner = "a compiled" if name == "OptimizedModule" else "a wrapped" if is_wrapped else "no"
        raise TypeError(
            f"A mask adapter sits on a causal language model of transformers; {name} is {inner} one. Attach the "
            "adapter first, to the plain model, and compile or wrap it then."
        )
    if isinstance(model, AttachedModel):
        raise ValueError(f"{name} has a mask adapter already: call `unload_mask_adapter(model)` first.")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError(f"{name} is compiled: attach the mask adapter before `model.compile()`.")
    away = [key for key, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if away:
        raise ValueError(
            f"{len(away)} weights of {name} are on the device 'meta' (offloaded, or not loaded yet), {away[0]} among "
            "them: load the whole model into memory first."
        )
    if any(type(module).__name__.startswith("FSDP") for module in model.modules()):
        raise ValueError(f"{name} is sharded. {SHARDED}.")
    if any(type(parameter.data).__name__ == "DTensor" for parameter in model.parameters()):
        raise ValueError(
            f"{name} is split over processes by tensor parallelism, and a mask adapter needs whole rows: load it "
            "without `tp_plan` and `tp_size`."
        )
    if why := _unfit(model):
        raise ValueError(f"{name} cannot carry a mask adapter: {why}.")


def _unfit(model: Any) -> str | None:
    """Why masks cannot be predicted with this architecture."""
    config = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and masks stand behind the tokens of a decoder alone"
    if config.model_type == "moshi":
        return "its prompts see further back than the sliding window of its cache"
    if model.get_output_embeddings() is None or not hasattr(model, "generate"):
        return "it has no language modelling head"
    thresholds = {getattr(getattr(module, "state", None), "threshold", 0) for module in model.modules()}
    if largest := max(thresholds):  # of bitsandbytes' 8 bits: larger activations are multiplied apart, for all rows
        instead = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
        return f"its 8-bit layers give a row other numbers beside others (llm_int8_threshold={largest}); use {instead}"
    if keeps_state(model):  # its rows are in the order of the text: what matters is seen, see `check_masks`
        return None
    if odd := sorted(set(layer_types(config)) - set(ATTENTION_KINDS)):
        return f"its layers choose what a row sees in a way of their own ({', '.join(odd)})"
    if getattr(config.get_text_config(decoder=True), "alibi", False):
        return "its positions are ALiBi's, which count keys instead of logical positions"
    is_rotary = any("Rotary" in type(module).__name__ for module in model.modules())
    if config.model_type in TABLES:
        return "its rotary embeddings are a table, behind whose end no mask can stand"
    if not is_rotary:
        return "it has no rotary position embeddings, which alone let a token lie anywhere"
    return None


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    # A tower of images may have as many.
    for module in (*model.get_decoder().modules(), *model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    name = type(model).__name__
    raise ValueError(f"{name} cannot carry a mask adapter: it has no list of its {count} decoder layers.")


def output_projections(model: Any) -> tuple[str, ...]:
    """Names of the linear layers that write into the residual stream: out of attention, and out of the MLP.

    They are found by what they do: within each part of a decoder layer, the linear layer that runs last on all rows
    and gives hidden states. A forward of two tokens tells the order. One layer tells for all, but where some keep a
    state and others attend.
    """
    layers = decoder_layers(model)
    hidden_size = base_embeddings(model).embedding_dim
    last: dict[tuple[int, str], str] = {}

    def note(index: int, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.shape == (1, 2, hidden_size):
                part = index, name.partition(".")[0]
                last.pop(part, None)
                last[part] = name

        return hook

    handles = [
        module.register_forward_hook(note(index, name))
        for index, layer in enumerate(layers if keeps_state(model) else layers[:1])
        for name, module in _base_modules(layer)
        if _is_linear(module)
    ]
    try:
        with torch.no_grad(), evaluating(model):
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    names = list(dict.fromkeys(name.removesuffix(".base_layer") for name in last.values()))
    names = [name for name in names if _has_one_size(model, name)]  # a layer of experts may follow a dense one
    if not names:
        raise ValueError(f"The layers of {type(model).__name__} have no linear layer alike that gives hidden states.")
    short = [name.rpartition(".")[2] for name in names]
    is_clear = len(set(short)) == len(short) and all(_has_one_size(model, name) for name in short)
    return tuple(short if is_clear else names)


def _base_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules below a layer, without those that PEFT adds to layers of the base."""
    wrapped = [f"{name}." for name, module in layer.named_modules() if hasattr(module, "get_base_layer")]
    for name, module in layer.named_modules():
        if all(not name.startswith(prefix) or name == f"{prefix}base_layer" for prefix in wrapped):
            yield name, module


def _has_one_size(model: Any, target: str) -> bool:
    try:
        modules = _target_modules(model, decoder_layers(model), target)
    except ValueError:
        return False
    return len({(module.out_features, module.in_features) for module in modules}) == 1


def check_masks(model: Any) -> None:
    """Raises `ValueError` for a model that does not attend by the masks of a step.

    Two tokens in the cache, then a token, a wrong draft and a right one, and masks, must give at the right draft what
    four tokens alone give. Where attention takes no masks as tensors, there is no wrong draft. For a model that keeps
    a state, see [`_check_states`].
    """
    if keeps_state(model):
        _check_states(model)
        return
    device, name = model.device, type(model).__name__
    rows = [Row(3, 2, -1), Row(4, 3, 0), Row(None, 4, 1), Row(None, 5, 2)]
    if implementation_of(model) in DENSE_MASK_ATTENTION:
        rows = [Row(3, 2, -1), Row(2, 3, 0), Row(4, 3, 0), Row(None, 4, 0), Row(None, 5, 2)]
    try:
        with torch.no_grad(), evaluating(model):
            expected = model(input_ids=torch.tensor([[1, 2, 3, 4]], device=device), use_cache=False).logits[:, -1]
            logits, _ = decode_step(model, [1, 2], rows)
    except Exception as error:
        raise ValueError(f"{name} cannot carry a mask adapter: a forward with masks fails: {error!r}.") from error
    right = rows.index(next(row for row in rows if row.token == 4))
    if not is_close(logits[:, right], expected, model):
        raise ValueError(
            f"{name} cannot carry a mask adapter: its attention does not follow the masks of a step (its logits "
            f"differ by {(logits[:, right] - expected).abs().max():.1e} of {expected.abs().max():.1e})."
        )


def _check_states(model: Any) -> None:
    """Raises `ValueError` for a model whose state cannot be read with several tokens, or not forget them.

    Tokens are read as decoding reads them, and must give what the whole text gives: several behind a first part, with
    masks, in a forward that is forgotten; the same and one more, once it is; one by one.
    """
    name, known, single = type(model).__name__, 5, "single tokens, one by one,"
    reads = (
        (known, 3, 2, "several tokens behind others in one forward"),
        (known, 4, 0, "tokens behind a forward that was forgotten"),
        *((known + 4 + place, 1, 0, single) for place in range(SINGLES)),
    )
    tokens = [*range(1, known + 5 + SINGLES)]
    try:
        with torch.no_grad(), evaluating(model):
            expected = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
            prepare_chunks(model)
            cache = WindowCache()
            cache.open([tokens], model.device, model.config)
            found = [_read(model, cache, tokens[:known], 0, 0)]
            found += [_read(model, cache, tokens[: at + count], at, masks) for at, count, masks, _ in reads]
    except Exception as error:
        raise ValueError(
            f"{name} cannot carry a mask adapter: it keeps a state, and a forward on that fails: {error!r}."
        ) from error
    for (at, count, _, what), logits in zip(reads, found[1:], strict=True):
        if not is_close(logits, right := expected[:, at : at + count], model, LEAST_STATE):
            raise ValueError(
                f"{name} cannot carry a mask adapter: it keeps a state, and {what} give other logits than the same "
                f"text at once (they differ by {(logits - right).abs().max():.1e} of {right.abs().max():.1e})."
            )


def _read(model: Any, cache: WindowCache, tokens: list[int], known: int, masks: int) -> torch.Tensor:
    """Logits of tokens behind the first `known` ones, `(1, T, V)`; with masks behind, the forward is forgotten."""
    sequence = SequenceState(0, tokens, len(tokens), known, 1)
    count = sequence.pending
    guesses = (Row(None, len(tokens) + place, count - 1 + place) for place in range(masks))
    sequence.rows = Tree([*sequence.pending_rows, *guesses])
    step = lay_out([sequence], [0], 0, model.device)
    cache.announce(step)
    inputs = {"input_ids": step.input_ids, "position_ids": step.position_ids, cache_name(model): cache}
    with cache.forgetting() if masks else nullcontext(), short_chunks() if known else nullcontext():
        logits: torch.Tensor = model(**inputs, use_cache=True).logits
    cache.commit([[] if masks else [*range(count)]])
    return logits[:, :count]


def decode_step(model: Any, known: list[int], rows: list[Row], slots: int | None = None) -> tuple[torch.Tensor, Any]:
    """Logits `(1, T, V)` of rows behind tokens that lie in a cache, as decoding computes them.

    With a number of `slots`, the last rows are slots, and what is known of them is returned too.
    """
    cache, attention = WindowCache(), StepAttention(model)
    sequence = SequenceState(0, known, len(known), 0, 1)
    cache.open([[*known, 0]], model.device, model.config)
    for part, count in ((sequence.pending_rows, None), (rows, slots)):
        sequence.rows = Tree(part)
        step = lay_out([sequence], [0], 0, model.device)
        cache.announce(step)
        masks = attention.masks(step, step.position_ids)
        with nullcontext() if count is None else model.predicting(count) as found, attention.reading():
            logits = model(
                input_ids=step.input_ids, attention_mask=masks, position_ids=step.position_ids,
                use_cache=True, **{cache_name(model): cache},
            ).logits  # fmt: skip
        sequence.committed = len(known)
        cache.commit([[*range(len(known))]])
    return logits, found


def is_close(found: torch.Tensor, expected: torch.Tensor, model: Any, least: float = 1e-3) -> bool:
    """Whether a model computed the same rows, `(..., H)`, in two ways: in 32 bits, but for `least` of the largest.

    Matrices of other shapes round differently, another expert may be chosen and activations may be quantized. In 16
    bits, some rows of several may then differ by anything; a mask that is not followed makes most rows differ.
    """
    difference = found.float() - expected.float()
    if model.dtype in (torch.float32, torch.float64) and not getattr(model, "is_quantized", False):
        return bool(difference.abs().max() <= least * expected.abs().max())
    distances = (difference.norm(dim=-1) / expected.float().norm(dim=-1)).flatten().sort().values
    return bool(distances[len(distances) // 2] <= 0.25)  # the upper median: one row of two may not differ


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model.eval()` within this context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _is_linear(module: nn.Module) -> bool:
    """Whether rows are multiplied with a matrix: `nn.Linear`, or what quantizers put in its place."""
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(size, int) for size in sizes) and not hasattr(module, "base_layer")


def _base_layer(module: Any) -> Any:
    """The layer itself; of one that PEFT wraps, the base's own."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _target_modules(model: Any, layers: nn.ModuleList | list[nn.Module], target: str) -> list[Any]:
    """The linear layers that `target` names: one of each decoder layer, or where a state is kept, of those with it."""
    having = [layer for layer in layers if _has(layer, target)]
    return [_linear(layer, target) for layer in (having if having and keeps_state(model) else layers)]


def _has(layer: nn.Module, target: str) -> bool:
    return any(_is_named(name, target) for name, _ in layer.named_modules())


def _is_named(name: str, target: str) -> bool:
    return name == target or ("." not in target and name.rpartition(".")[2] == target)


def _linear(layer: nn.Module, target: str) -> Any:
    """The linear layer of a decoder layer that `target` names: its whole path, or the last part of it."""
    found = [_base_layer(module) for name, module in layer.named_modules() if _is_named(name, target)]
    if len(found) != 1 or not _is_linear(found[0]):
        problem = "which no decoder layer has" if not found else "which is no linear layer"
        problem = "which is not the name of one layer alone" if len(found) > 1 else problem
        raise ValueError(f"`target_modules` names {target!r}, {problem}.")
    return found[0]
