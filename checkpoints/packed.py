"""Models whose linear layers hold their weights in 16, 8 or 4 bits, on CPUs: which layers, and what is around them."""

import ctypes
import logging
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from time import thread_time
from typing import Any

import torch
from torch import nn

from .distance import distance_of
from .fuse import fuse
from .kernels import kernels_digest
from .matrices import FORMATS, Grouped, Table, can_pack, fits, has_levels, in_one_thread, multiply_alone
from .packed_layers import PackedEmbedding, PackedLinear, PackedNorm, Product, RowLinear, take_hooks
from .remembered import remembered

logger = logging.getLogger(__name__)

# What a choice of dtypes calls these layers, with the bits of a weight.
PACKED, EIGHT_BITS, FOUR_BITS = "packed", "8bit", "4bit"
PACKINGS = {PACKED: 16, EIGHT_BITS: 8, FOUR_BITS: 4}

# Layers of one module that read the same rows, as nearly all architectures name them; others are multiplied alone.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Weights, in entries, that no cache holds: of smaller models the format makes no difference, larger ones are sampled.
_LEAST_WEIGHTS = 2**24
# Of the weights that are no embeddings, the share in linear layers below which packing cannot help.
_LEAST_SHARE = 0.5
# Nats per token at which a text of 100 tokens is e times less likely.
FAR = 0.01
# How much less time than packed layers bfloat16 must take to be chosen: its rows are rounded to 8 bits at each layer.
_BFLOAT16_SHARE = 0.8
# Rows of a step of verified decoding with one draft, for which formats are timed: four bits may be the fastest for one
# row, and 16 for six.
_TIMED_ROWS = 6


def pack(model: nn.Module, bits: int = 16) -> nn.Module:
    """Gives a model packed linear layers, in place; its weights are freed one by one.

    In 4 bits, matrices that were read from a file of 4 bits keep the file's values, but for the scales of their
    groups, which are rounded ([`matrices`]), and what the file holds in more bits gets 8. Of a model in full
    precision, the values of a group are rounded to 16 levels, and the head gets 8 bits. A matrix that a format cannot
    hold gets the next one with more bits; one that none can hold stays as it is, in float32. How far the model is
    then from what it was is measured once, see [`distance_of`]; the log says it, and `packed_distance` holds it.

    What is no linear layer becomes float32, but for 16-bit embeddings, whose tables stay. The result is for inference:
    no parameter requires a gradient. `save_pretrained` writes the rounded weights, which load like any others. Of
    layers that PEFT wraps, the base's are packed. Where torch lacks the kernels, and where layers are packed already,
    the model is returned as it was.

    Args:
        model: on a CPU.
        bits: of a weight: 16, 8 or 4.

    Raises:
        ValueError: for other `bits`, for a model elsewhere than on a CPU, for quantized weights (those read from a
            GGUF file are not), for a model whose weights are mostly not in `nn.Linear`, and for one that is packed in
            other bits. It is left as it was. Whatever else ends the packing before its end, such as too little memory,
            leaves a model that refuses to compute.
    """
    if bits not in FORMATS:
        raise ValueError(f"`bits` must be one of {', '.join(map(str, FORMATS))}, got {bits!r}.")
    if not can_pack():
        return model
    if _refuse_half in model._forward_pre_hooks.values():
        _refuse_half(model, ())
    if is_packed(model):
        if (there := getattr(model, "packed_in", bits)) != bits:
            raise ValueError(f"The model is packed in {there} bits already: load it again to have {bits}.")
        return model
    _check_packable(model)
    if getattr(model, "quantization_method", None) == "gguf":
        forget_gguf(model)
    found = distance_of(model, bits, lambda: _pack(model, bits))
    give_back_memory()
    model.packed_distance = found  # type: ignore[assignment]
    if found is not None:
        is_far = bits < 16 and not found < FAR  # what 16 bits differ by, a model in bfloat16 differs from itself
        logger.log(
            logging.WARNING if is_far else logging.INFO,
            "Packed in %d bits, this model is %.2g nats per token from the unpacked one%s.",
            bits, found, ": it writes other texts; more bits are closer" if is_far else "",
        )  # fmt: skip
    return model


def give_back_memory() -> None:
    """Gives back to the system what was freed; glibc keeps it: twice what a small model takes."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _pack(model: nn.Module, bits: int) -> None:
    """Replaces the layers of a model that can be packed."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {id(module.weight): module.weight for module in embeddings}
    packable = {id(module.weight) for module in model.modules() if type(module) is nn.Linear} - tables.keys()
    # Those that scale their rows, as Gemma's, stay what they are, in float32, before heads share their tables.
    scaled = {id(module.weight) for module in embeddings if type(module) is not nn.Embedding}
    guard = model.register_forward_pre_hook(_refuse_half)
    for parameter in model.parameters():
        if id(parameter) not in packable:  # out of the checkpoint's file, which may be mapped into memory as one
            dtype = torch.float32 if id(parameter) in scaled else parameter.dtype
            parameter.data = parameter.data.to(dtype, copy=True)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    _find(model, places)
    modules = {key: getattr(*found[0]) for key, found in places.items()}
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=multiply_alone) as threads:
        formats = _choose_formats(model, modules, bits, threads)
        plain = [name for key in modules if formats[key] is None for _, name in places.pop(key)]

        def replacements(group: Sequence[list[tuple[nn.Module, str]]]) -> Sequence[nn.Module]:
            return _packed([getattr(*found[0]) for found in group], tables, formats)

        groups = _groups(places, formats)
        del modules  # so that each is freed when it is packed
        for group, packed in zip(groups, threads.map(replacements, groups), strict=True):
            for found, module in zip(group, packed, strict=True):
                for parent, name in found:
                    setattr(parent, name, module)
    _share_tables(model)
    _use_fused_norms(model.float().requires_grad_(False))
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = RowLinear
    fuse(model)
    model.packed_in = bits  # type: ignore[assignment]
    guard.remove()
    if plain:
        listed = ", ".join(dict.fromkeys(plain))
        logger.warning(
            "%d linear layers have weights that no number of bits holds and stay in float32: %s.", len(plain), listed
        )


def _refuse_half(model: nn.Module, args: Any) -> None:
    raise ValueError(f"This {type(model).__name__} is packed by halves: packing it was stopped. Load it again.")


def _check_packable(model: nn.Module) -> None:
    """Raises `ValueError` as [`pack`]."""
    devices = {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]}
    if devices - {"cpu"}:
        raise ValueError(f"Layers are packed on a CPU, and the model is on {', '.join(sorted(devices))!r}.")
    if _is_quantized(model):
        raise ValueError(f"The weights of this {type(model).__name__} are quantized: load the model with a dtype.")
    if (share := _linear_share(model)) < _LEAST_SHARE:
        raise ValueError(
            f"nn.Linear layers hold {share:.0%} of the weights of this {type(model).__name__}: packing them would not "
            "make it faster."
        )


def _is_quantized(model: nn.Module) -> bool:
    """Whether a model's weights are not plain numbers: by a method of transformers, or by a library itself, such as
    torchao, whose weights are tensors of another kind."""
    is_dequantized = getattr(model, "quantization_method", None) == "gguf"
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    are_plain = all(type(weight.data) is torch.Tensor and weight.is_floating_point() for weight in weights)
    return not are_plain or (bool(getattr(model, "is_quantized", False)) and not is_dequantized)


def _choose_formats(
    model: nn.Module, modules: Mapping[int, Any], bits: int, threads: ThreadPoolExecutor
) -> dict[int, int | None]:
    """The bits of each layer, by its `id`; `None` where it stays as it is."""
    layers = {key: module.weight for key, module in modules.items() if type(module) is nn.Linear}
    wanted = dict.fromkeys(modules, bits)
    if bits == 4:
        of_file = dict(zip(layers, threads.map(has_levels, layers.values()), strict=True))
        if any(of_file.values()):
            wanted |= {key: 4 if has else 8 for key, has in of_file.items()}
        else:
            wanted[id(getattr(model, "get_output_embeddings", lambda: None)())] = 8

    def chosen(key: int) -> int | None:
        return next((tried for tried in sorted(FORMATS) if tried >= wanted[key] and fits(layers[key], tried)), None)

    return dict.fromkeys(modules, 16) | dict(zip(layers, threads.map(chosen, layers), strict=True))


def _packed(
    modules: Sequence[Any], tables: Mapping[int, torch.Tensor], formats: Mapping[int, int | None]
) -> Sequence[nn.Module]:
    """What replaces an embedding, or linear layers that read the same rows. `tables` are the weights of embeddings, by
    their `id`: a tied head keeps its own, for single rows."""
    if type(modules[0]) is nn.Embedding:
        return [PackedEmbedding(modules[0])]
    shared = [tables.get(id(module.weight)) for module in modules]
    product = Product([module.weight for module in modules], formats[id(modules[0])] or 16)
    return [
        PackedLinear(module, None if table is None else table.detach(), product, part)
        for part, (module, table) in enumerate(zip(modules, shared, strict=True))
    ]


def forget_gguf(model: Any) -> None:
    """Lets a model that transformers read from a GGUF file be cast, packed and saved: its weights are dequantized."""
    model.is_quantized, model.hf_quantizer = False, None
    model.__dict__.pop("quantization_method", None)
    vars(model.config).pop("quantization_config", None)


def _find(module: nn.Module, places: dict[int, list[tuple[nn.Module, str]]]) -> None:
    """Adds to `places` where below `module` each linear layer and each embedding is."""
    # Of a layer that PEFT wraps, the base's: what it adds is read as it is.
    names = ["base_layer"] if hasattr(module, "get_base_layer") else list(module._modules)
    for name in names:
        child = module._modules[name]
        if type(child) in (nn.Embedding, nn.Linear) and "forward" not in vars(child):
            places.setdefault(id(child), []).append((module, name))
        elif child is not None:
            _find(child, places)


def _groups(
    places: Mapping[int, list[tuple[nn.Module, str]]], formats: Mapping[int, int | None]
) -> list[list[list[tuple[nn.Module, str]]]]:
    """The places of layers that are multiplied together."""
    alone = {(id(parent), name): found for found in places.values() if len(found) == 1 for parent, name in found}
    groups: list[list[list[tuple[nn.Module, str]]]] = []
    grouped: set[int] = set()
    for parent, first in [found[0] for found in alone.values()]:
        for names in _TOGETHER:
            group = [alone.get((id(parent), name)) for name in names] if first == names[0] else [None]
            found = [pair for pair in group if pair is not None]
            layers = [getattr(*pair[0]) for pair in found]
            if len(found) == len(group) and len({(layer.in_features, formats[id(layer)]) for layer in layers}) == 1:
                groups.append(found)
                grouped.update(map(id, layers))
    return groups + [[found] for key, found in places.items() if key not in grouped]


def _share_tables(model: nn.Module) -> None:
    """Lets embeddings read their rows from tied heads that hold the very numbers."""
    embeddings = [each for each in model.modules() if isinstance(each, PackedEmbedding) and each.max_norm is None]
    for head in [each for each in model.modules() if isinstance(each, PackedLinear) and each.bits == 8]:
        rows, matrix = head.rows, head.product.matrix
        if isinstance(rows, torch.Tensor) and isinstance(matrix, Grouped) and matrix.is_exactly(rows):
            head.rows = Table(matrix)
            for embedding in embeddings:
                if embedding.table is None and embedding.weight.data_ptr() == rows.data_ptr():
                    embedding.read_from(head.rows)


@torch.no_grad()
def _use_fused_norms(model: nn.Module) -> None:
    """Gives a float32 model norms of fewer operations, where they have the very same bits."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if not type(norm).__name__.endswith("RMSNorm"):
                continue
            weight: Any = getattr(norm, "weight", None)
            eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
            is_vector = isinstance(weight, nn.Parameter) and weight.ndim == 1
            if len(norm.state_dict()) != 1 or not is_vector or not eps:
                continue
            rows = torch.randn(8, *weight.shape)
            for fused in (PackedNorm(weight, eps, added).train(norm.training) for added in (0.0, 1.0)):
                if norm.forward(rows).equal(fused.normed(rows, fused.factor, eps)):
                    take_hooks(fused, norm)
                    setattr(module, name, fused)
                    break


def _linear_share(model: nn.Module) -> float:
    """The share of the model's weights, embeddings apart, that `nn.Linear` layers hold."""
    sizes = {id(weight): weight.numel() for weight in model.parameters()}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = {id(module.weight) for module in model.modules() if type(module) is nn.Linear} - tables
    all_sizes = sum(size for name, size in sizes.items() if name not in tables)
    return sum(sizes[name] for name in layers) / max(all_sizes, 1)


def is_packed(model: nn.Module) -> bool:
    """Whether a model has packed layers."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def format_of(model: nn.Module) -> str:
    """The name of a model's format: one of [`PACKINGS`], or its dtype."""
    bits = getattr(model, "packed_in", 16)
    names = {number: name for name, number in PACKINGS.items()}
    return names[bits] if is_packed(model) else str(model.dtype).removeprefix("torch.")


def count_weights(model: nn.Module) -> int:
    """The number of a model's weights, packed ones too."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear) and module.rows is None]
    tables = [module for module in model.modules() if isinstance(module, PackedEmbedding) and not module._parameters]
    sizes = [tensor.numel() for tensor in model.parameters()] + [x.in_features * x.out_features for x in packed]
    return sum(sizes) + sum(table.num_embeddings * table.embedding_dim for table in tables)


def use_fastest(model: nn.Module) -> str | torch.dtype:
    """Gives a model on a CPU the format in which its linear layers take the least time on this machine.

    Its own dtype, packed layers and bfloat16 are timed with some of its weights, for six rows: a step of verified
    decoding with one draft. Models that fit in a cache keep their own. bfloat16 rounds every row to 8 bits, so that
    the same text takes luck: it must be clearly faster. Four bits are tried where the weights were read from a file of
    four bits. The choice is remembered for layers of these sizes (see [`remembered`]). Returns one of [`PACKINGS`], or
    the dtype.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    own = layers[0].weight.dtype if layers else torch.float32
    sample: list[nn.Linear] = []
    while layers and sum(layer.weight.numel() for layer in sample) < _LEAST_WEIGHTS:
        sample.append(layers.pop(0))
    if not layers or _is_quantized(model):
        return own
    with_packed = _linear_share(model) >= _LEAST_SHARE and can_pack()
    names = {str(name): name for name in _candidates(sample, with_packed)}
    key = [_TIMED_ROWS, kernels_digest(), *names, [[layer.out_features, layer.in_features] for layer in sample]]
    choice = names[remembered("formats", key, names.__contains__, lambda: str(_fastest(sample, list(names.values()))))]
    if choice in PACKINGS:
        del layers, sample[:]  # so that each is freed when it is packed
        pack(model, PACKINGS[choice])
    elif choice != own:
        model.to(choice)
    return choice


def _fastest(sample: list[nn.Linear], names: Sequence[str | torch.dtype]) -> str | torch.dtype:
    """The format in which these layers take the least time."""
    seconds = in_one_thread(lambda: _seconds({name: _in_format(sample, name) for name in names}))
    choice = min(names, key=lambda name: seconds[name] / (_BFLOAT16_SHARE if name == torch.bfloat16 else 1))
    listed = ", ".join(f"{name} {1000 * taken:.1f}" for name, taken in seconds.items())
    logger.info("Linear layers are %s (ms for %d rows of a sample: %s).", choice, _TIMED_ROWS, listed)
    return choice


def _candidates(sample: list[nn.Linear], with_packed: bool) -> list[str | torch.dtype]:
    """The formats that can be chosen, the layers' own first."""
    packings = [PACKED] if with_packed else []
    if with_packed and all(has_levels(layer.weight) for layer in sample):
        packings.append(FOUR_BITS)
    return list(dict.fromkeys([sample[0].weight.dtype, *packings, torch.bfloat16]))


def _in_format(sample: list[nn.Linear], name: str | torch.dtype) -> Sequence[nn.Module]:
    """The layers in a format."""
    if isinstance(name, str):
        return [PackedLinear(layer, product=Product([layer.weight], PACKINGS[name])) for layer in sample]
    return sample if name == sample[0].weight.dtype else [deepcopy(layer).to(name) for layer in sample]


@torch.no_grad()
def _seconds(formats: Mapping[Any, Sequence[Any]]) -> dict[Any, float]:
    """The least time of each format's layers."""
    best = dict.fromkeys(formats, float("inf"))
    for _ in range(5):
        for name, layers in formats.items():
            dtype = torch.float32 if name in PACKINGS else name
            rows = {width: torch.ones(_TIMED_ROWS, width, dtype=dtype) for width in {x.in_features for x in layers}}
            began = thread_time()
            for layer in layers:
                layer(rows[layer.in_features])
            best[name] = min(best[name], thread_time() - began)
    return best
