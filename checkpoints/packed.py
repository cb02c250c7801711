"""Models whose linear layers hold their weights in 16, 8 or 4 bits, on CPUs: which layers, and what is around them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn

from .matrices import FORMATS, Matrix, can_pack, fits, has_levels, in_one_thread, multiply_alone
from .matrices import multiply as multiply  # 16-bit matrices that belong to no layer
from .matrices import pack_matrix as pack_matrix
from .remembered import remembered

logger = logging.getLogger(__name__)

# What a choice of dtypes calls these layers, with the bits of a weight.
PACKED, EIGHT_BITS, FOUR_BITS = "packed", "8bit", "4bit"
PACKINGS = {PACKED: 16, EIGHT_BITS: 8, FOUR_BITS: 4}

# Layers of one module that read the same rows, as nearly all architectures name them; others are multiplied alone.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
# Weights, in entries, that no cache holds: of smaller models the format makes no difference, larger ones are sampled.
_LEAST_WEIGHTS = 2**24
# Of the weights that are no embeddings, the share in linear layers below which packing cannot help.
_LEAST_SHARE = 0.5
# How much less time than packed layers bfloat16 must take to be chosen: its rows are rounded to 8 bits at each layer.
_BFLOAT16_SHARE = 0.8


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference whose weights are held once, in one of the [`FORMATS`].

    Rows are float32, and have the same bits whatever stands beside them. It is no `nn.Linear`: what looks for these to
    read their weights, such as PEFT, must not take it for one. Hooks are kept.

    Args:
        layer: whose weights are rounded.
        rows: `(out_features, in_features)`, the table of a tied embedding: where single rows can be read.
        product: that gives the layer's outputs as its part number `part`. Default: one of the layer alone, in 16 bits.
    """

    def __init__(
        self, layer: nn.Linear, rows: torch.Tensor | None = None, product: "Product | None" = None, part: int = 0
    ):
        super().__init__()
        self.in_features, self.out_features, self.rows = layer.in_features, layer.out_features, rows
        self.training = layer.training
        _take_hooks(self, layer)
        bias = layer.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)
        self.product, self.part = product or Product([layer.weight]), part

    @property
    def bits(self) -> int:
        """Of a weight."""
        return self.product.matrix.bits

    @property
    def rounds_rows(self) -> bool:
        """Whether rows are rounded before they are multiplied: a small difference between two rows then grows."""
        return self.bits < 16

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` float32 to `(..., out_features)` float32. Other dtypes and gradients are refused."""
        if input.dtype != torch.float32:
            raise TypeError(f"Packed layers take float32 rows, got {input.dtype}.")
        if input.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("Packed layers have no gradients. To train, load the model with a dtype.")
        output = self.product(input, self.part)
        return output if self.bias is None else output.add_(self.bias)

    def unpacked(self) -> torch.Tensor:
        """The weights, `(out_features, in_features)` float16, or float32 of fewer bits: a copy."""
        return self.product.matrix.unpacked().split(self.product.sizes)[self.part]

    def extra_repr(self) -> str:
        """What `print` shows."""
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{features}, bias={self.bias is not None}, bits={self.bits}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "A packed layer has no `weight`; `unpacked()` gives a copy. To merge, resize or train weights, load "
                "the model with a dtype."
            )
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.unpacked() if self.rows is None else self.rows.detach()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedLinear":
        _refuse_change(fn)
        return super()._apply(fn, recurse)


class Product:
    """The product of rows with the weights, `(out_features, in_features)`, of one layer or of several.

    Small products take as long to start as to compute. So the first of several layers to get some rows computes for
    all, and the others take what is theirs.
    """

    def __init__(self, weights: Sequence[torch.Tensor], bits: int = 16):
        self.sizes = [len(weight) for weight in weights]
        weight = weights[0] if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
        self.matrix: Matrix = FORMATS[bits](weight)
        self._left: tuple[torch.Tensor, int, dict[int, torch.Tensor]] | None = None  # of the last rows, to be taken

    def __call__(self, rows: torch.Tensor, part: int) -> torch.Tensor:
        """`(..., in_features)` float32 to the `(..., out_features)` of one layer."""
        if len(self.sizes) == 1:
            return self.matrix(rows)
        version = 0 if rows.is_inference() else rows._version
        left = self._left
        if left is not None and left[0] is rows and left[1] == version:
            found = left[2].pop(part, None)
            if not left[2]:
                self._left = None
            if found is not None:
                return found
        outputs = dict(enumerate(torch.split_with_sizes(self.matrix(rows), self.sizes, -1)))
        found = outputs.pop(part)
        self._left = rows, version, outputs
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_left": None}


class PackedEmbedding(nn.Embedding):
    """An `nn.Embedding` beside packed layers: its rows come out in float32, whatever its table is stored in."""

    def __init__(self, embedding: nn.Embedding):
        nn.Module.__init__(self)
        self.__dict__.update({**vars(embedding), "_parameters": {}, "_buffers": {}})
        if embedding.weight.dtype == torch.float32:
            self.weight = embedding.weight
        else:  # no parameter: the dtype of a model is that of its first one
            self.register_buffer("weight", embedding.weight.detach())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(...)` int64 to `(..., embedding_dim)` float32."""
        return super().forward(input).float()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedEmbedding":
        _refuse_change(fn)  # before anything of a model is moved: its embeddings come first
        return self


class PackedNorm(nn.RMSNorm):
    """An `nn.RMSNorm` of five small operations, where torch's own takes nine on a CPU."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__(weight.shape, eps, device="meta")
        self.weight = weight
        self._terms = torch.tensor([eps]), torch.tensor([float(len(weight))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., H)` float32, both."""
        eps, count = self._terms
        return (x * torch.addcdiv(eps, (x * x).sum(-1, keepdim=True), count).rsqrt_()).mul_(self.weight)


def _refuse_change(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raises `ValueError` if `fn`, which `nn.Module.to` applies to each tensor, gives another dtype or device."""
    found = fn(torch.empty(0, dtype=torch.float32, device="cpu"))
    if found.dtype != torch.float32 or found.device.type != "cpu":
        raise ValueError(
            f"A packed model computes in float32 on a CPU and cannot become {found.dtype} on {found.device.type!r}: "
            "load it again with a dtype, and move that."
        )


def pack(model: nn.Module, bits: int = 16) -> nn.Module:
    """Gives a model packed linear layers, in place; its weights are freed one by one.

    In 4 bits, matrices that were read from a file of 4 bits keep the file's values, but for the scales of their
    groups, which are rounded to bfloat16 (0.2 %), and what the file holds in more bits gets 8. Of a model in full
    precision, the values of a group are rounded to 16 levels, and the head gets 8 bits. A matrix that a format cannot
    hold gets the next one with more bits; one that 16 bits cannot hold stays as it is, in float32.

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
            other bits. It is left as it was.
    """
    if bits not in FORMATS:
        raise ValueError(f"`bits` must be one of {', '.join(map(str, FORMATS))}, got {bits!r}.")
    if not can_pack():
        return model
    if is_packed(model):
        if (there := getattr(model, "packed_in", bits)) != bits:
            raise ValueError(f"The model is packed in {there} bits already: load it again to have {bits}.")
        return model
    _check_packable(model)
    if getattr(model, "quantization_method", None) == "gguf":
        forget_gguf(model)
    tables = {id(module.weight): module.weight for module in model.modules() if type(module) is nn.Embedding}
    packable = {id(module.weight) for module in model.modules() if type(module) is nn.Linear} - tables.keys()
    for parameter in model.parameters():
        if id(parameter) not in packable:  # out of the checkpoint's file, which may be mapped into memory as one
            parameter.data = parameter.data.clone()
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
    _use_fused_norms(model.float().requires_grad_(False))
    model.packed_in = bits  # type: ignore[assignment]
    if plain:
        listed = ", ".join(dict.fromkeys(plain))
        logger.warning("%d linear layers have weights beyond float16 and stay in float32: %s.", len(plain), listed)
    return model


def _check_packable(model: nn.Module) -> None:
    """Raises `ValueError` as [`pack`]."""
    devices = {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]}
    if devices - {"cpu"}:
        raise ValueError(f"Layers are packed on a CPU, and the model is on {', '.join(sorted(devices))!r}.")
    if (share := _linear_share(model)) < _LEAST_SHARE:
        raise ValueError(
            f"nn.Linear layers hold {share:.0%} of the weights of this {type(model).__name__}: packing them would not "
            "make it faster."
        )
    is_dequantized = getattr(model, "quantization_method", None) == "gguf"
    if getattr(model, "is_quantized", False) and not is_dequantized:
        raise ValueError(f"The weights of this {type(model).__name__} are quantized: load the model with a dtype.")


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


@torch.no_grad()
def _use_fused_norms(model: nn.Module) -> None:
    """Gives a float32 model norms of fewer operations, where they have the very same bits."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            weight: Any = getattr(norm, "weight", None)
            eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
            is_vector = isinstance(weight, nn.Parameter) and weight.ndim == 1
            if not type(norm).__name__.endswith("RMSNorm") or len(norm.state_dict()) != 1 or not is_vector or not eps:
                continue
            fused, rows = PackedNorm(weight, eps).train(norm.training), torch.randn(8, *weight.shape)
            if norm.forward(rows).equal(fused.forward(rows)):
                _take_hooks(fused, norm)
                setattr(module, name, fused)


def _take_hooks(module: nn.Module, other: nn.Module) -> None:
    for name in _HOOKS:
        setattr(module, name, getattr(other, name))


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
    tables = [module._buffers.get("weight") for module in model.modules() if isinstance(module, PackedEmbedding)]
    tensors = [*model.parameters(), *(table for table in tables if table is not None)]
    return sum(tensor.numel() for tensor in tensors) + sum(x.in_features * x.out_features for x in packed)


def use_fastest(model: nn.Module) -> str | torch.dtype:
    """Gives a model on a CPU the format in which its linear layers take the least time on this machine.

    Its own dtype, packed layers and bfloat16 are timed with some of its weights, for one row, as plain decoding has
    them, and for eight, as verified decoding has. Models that fit in a cache keep their own. bfloat16 rounds every row
    to 8 bits, so that the same text takes luck: it must be clearly faster. Four bits are tried where the weights were
    read from a file of four bits. The choice is remembered for layers of these sizes (see [`remembered`]). Returns one
    of [`PACKINGS`], or the dtype.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    own = layers[0].weight.dtype if layers else torch.float32
    sample: list[nn.Linear] = []
    while layers and sum(layer.weight.numel() for layer in sample) < _LEAST_WEIGHTS:
        sample.append(layers.pop(0))
    if not layers:
        return own
    with_packed = _linear_share(model) >= _LEAST_SHARE and can_pack()
    names = {str(name): name for name in _candidates(sample, with_packed)}
    key = [*names, [[layer.out_features, layer.in_features] for layer in sample]]
    choice = names[remembered("formats", key, set(names), lambda: str(_fastest(sample, list(names.values()))))]
    if choice in PACKINGS:
        del layers, sample[:]  # so that each is freed when it is packed
        pack(model, PACKINGS[choice])
    elif choice != own:
        model.to(choice)
    return choice


def faster_dtype(device: torch.device) -> str:
    """The dtype in which a device multiplies matrices of many rows faster: some CPUs compute in bfloat16, others
    emulate it."""
    if device.type == "cuda":
        return "bfloat16"
    seconds = {}
    for name in ("float32", "bfloat16"):
        matrix, runs = torch.randn(512, 1024, dtype=getattr(torch, name)), []
        for _ in range(5):
            began = perf_counter()
            matrix @ matrix.T
            runs.append(perf_counter() - began)
        seconds[name] = min(runs)
    return min(seconds, key=lambda name: seconds[name])


def _fastest(sample: list[nn.Linear], names: Sequence[str | torch.dtype]) -> str | torch.dtype:
    """The format in which these layers take the least time."""
    seconds = in_one_thread(lambda: _seconds({name: _in_format(sample, name) for name in names}))
    choice = min(names, key=lambda name: seconds[name] / (_BFLOAT16_SHARE if name == torch.bfloat16 else 1))
    listed = ", ".join(f"{name} {1000 * taken:.1f}" for name, taken in seconds.items())
    logger.info("Linear layers are %s (ms for 1 and 8 rows of a sample: %s).", choice, listed)
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
    """The least time of each format's layers for one row and for eight."""
    best: dict[Any, dict[int, float]] = {name: {1: float("inf"), 8: float("inf")} for name in formats}
    for _ in range(3):
        for name, layers in formats.items():
            dtype = torch.float32 if name in PACKINGS else name
            for count, least in best[name].items():
                rows = {layer.in_features: torch.ones(count, layer.in_features, dtype=dtype) for layer in layers}
                began = thread_time()
                for layer in layers:
                    layer(rows[layer.in_features])
                best[name][count] = min(least, thread_time() - began)
    return {name: sum(times.values()) for name, times in best.items()}
