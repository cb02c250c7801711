"""The layers of a decoder, as they are found in a model of any family: those that a mask adapter updates."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..generation.state import keeps_state
from .adapter_files import MaskAdapterSettings, base_embeddings


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    # A tower of images may have as many.
    for module in (*model.get_decoder().modules(), *model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    name = type(model).__name__
    raise ValueError(f"{name} cannot carry a mask adapter: it has no list of its {count} decoder layers.")


def find_targets(model: Any, settings: MaskAdapterSettings) -> tuple[MaskAdapterSettings, dict[str, list[nn.Module]]]:
    """Settings whose target modules and root layer are known, and the linear layers of each target. Raises
    `ValueError` for layers that are not there."""
    layers = decoder_layers(model)
    root_layer = root_layer_of(model) if settings.root_layer is None else settings.root_layer
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


def sizes_of(targets: Mapping[str, Sequence[Any]]) -> list[tuple[int, int, int]]:
    """Of each target, the number of layers that have it, and rows and columns of its weights. Raises `ValueError`
    where these differ from layer to layer."""
    sizes = []
    for target, modules in targets.items():
        shapes = {(module.out_features, module.in_features) for module in modules}
        if len(shapes) > 1:
            raise ValueError(f"`target_modules` names {target!r}, of different sizes in the layers: {sorted(shapes)}.")
        sizes.append((len(modules), *shapes.pop()))
    return sizes


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
    found = [base_layer(module) for name, module in layer.named_modules() if _is_named(name, target)]
    if len(found) != 1 or not _is_linear(found[0]):
        problem = "which no decoder layer has" if not found else "which is no linear layer"
        problem = "which is not the name of one layer alone" if len(found) > 1 else problem
        raise ValueError(f"`target_modules` names {target!r}, {problem}.")
    return found[0]


def _is_linear(module: nn.Module) -> bool:
    """Whether rows are multiplied with a matrix: `nn.Linear`, or what quantizers put in its place."""
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(size, int) for size in sizes) and not hasattr(module, "base_layer")


def base_layer(module: Any) -> Any:
    """The layer itself; of one that PEFT wraps, the base's own."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def root_layer_of(model: Any) -> int:
    """How many decoder layers make the inner state of a new root head; 0 where their states have another size than
    the head's."""
    size: int = model.config.get_text_config(decoder=True).hidden_size
    is_alike = size == base_embeddings(model).embedding_dim
    return 3 * len(decoder_layers(model)) // 4 if is_alike else 0


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model.eval()` within this context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
