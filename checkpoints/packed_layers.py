"""Modules of packed models: linear layers whose weights are held in 16, 8 or 4 bits, and what stands beside them."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from .kernels import LANES, has_kernels, norm_rows, takes
from .matrices import FORMATS, Matrix, Table

HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


class RowLinear(nn.Linear):
    """An `nn.Linear` beside packed ones, such as a LoRA's, whose rows have the same bits whatever stands beside them.

    As one product, some CPUs' float32 kernels round a row by how many there are, and layers of few bits magnify that.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`, each row by a product of its own."""
        rows = input.reshape(-1, 1, self.in_features)
        found = torch.bmm(rows, self.weight.T.expand(len(rows), -1, -1)).view(*input.shape[:-1], self.out_features)
        return found if self.bias is None else found + self.bias


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
        self,
        layer: nn.Linear,
        rows: torch.Tensor | Table | None = None,
        product: "Product | None" = None,
        part: int = 0,
    ):
        super().__init__()
        self.in_features, self.out_features, self.rows = layer.in_features, layer.out_features, rows
        self.training = layer.training
        take_hooks(self, layer)
        bias = layer.bias
        own = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)
        self.register_parameter("bias", own)
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
        check_rows(input)
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


def check_rows(rows: torch.Tensor) -> None:
    """Raises what packed layers raise for rows that they do not take: `TypeError` or `RuntimeError`."""
    if rows.dtype != torch.float32:
        raise TypeError(f"Packed layers take float32 rows, got {rows.dtype}.")
    if rows.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("Packed layers have no gradients. To train, load the model with a dtype.")


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
    """An `nn.Embedding` beside packed layers: its rows come out in float32, whatever its table is stored in.

    Attributes:
        table: of a tied head, which holds the same numbers in 8 bits, in place of a table of its own.
    """

    table: Table | None

    def __init__(self, embedding: nn.Embedding):
        nn.Module.__init__(self)
        self.__dict__.update({**vars(embedding), "_parameters": {}, "_buffers": {}, "table": None})
        if embedding.weight.dtype == torch.float32:
            self.weight = embedding.weight
        else:  # no parameter: the dtype of a model is that of its first one
            self.register_buffer("weight", embedding.weight.detach())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(...)` int64 to `(..., embedding_dim)` float32."""
        return super().forward(input).float() if self.table is None else self.table[input]

    def read_from(self, table: Table) -> None:
        """From now on, its rows are the table's."""
        self.table = table
        del self.weight

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.table is not None:
            return self.table.detach()
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.table is not None:
            destination[f"{prefix}weight"] = self.table.detach()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedEmbedding":
        _refuse_change(fn)  # before anything of a model is moved: its embeddings come first
        return self


@lru_cache
def _terms(eps: float, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        return torch.tensor([eps], device="cpu"), torch.tensor([float(width)], device="cpu")


class PackedNorm(nn.RMSNorm):
    """An `nn.RMSNorm` of one kernel or of five small operations, where torch's own takes nine on a CPU.

    Args:
        weight: `(H,)`.
        eps: is added to the mean square.
        added: to each weight before it multiplies: 1 in Gemma's norms, and in Qwen3.5's.
    """

    eps: float

    def __init__(self, weight: nn.Parameter, eps: float, added: float = 0.0):
        super().__init__(weight.shape, eps, device="meta")
        self.weight, self._added = weight, added
        self._factor: tuple[int, torch.Tensor] | None = None  # the version of the weight that it was made of
        self.has_kernels = has_kernels() and len(weight) % LANES == 0

    @property
    def factor(self) -> torch.Tensor:
        """`(H,)`, what the normed rows are multiplied by."""
        if not self._added:
            weight: torch.Tensor = self._parameters["weight"]  # type: ignore[assignment]
            return weight
        if self.weight.requires_grad and torch.is_grad_enabled():
            return self._added + self.weight
        version = 0 if self.weight.is_inference() else self.weight._version
        if self._factor is None or self._factor[0] != version:
            self._factor = version, (self._added + self.weight).detach()
        return self._factor[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., H)` float32, both."""
        factor, weight = self.factor, self.weight
        is_known = self.has_kernels and factor.dtype == torch.float32 and factor.is_contiguous()
        is_frozen = not (weight.requires_grad and torch.is_grad_enabled())
        if is_known and is_frozen and x.shape[-1] == len(factor) and takes(x):
            return norm_rows(x, factor, self.eps)
        return self.normed(x, factor, self.eps)

    @staticmethod
    def normed(x: torch.Tensor, factor: torch.Tensor, eps: float) -> torch.Tensor:
        """The same by torch, with another factor."""
        terms = _terms(eps, x.shape[-1])
        return (x * torch.addcdiv(terms[0], (x * x).sum(-1, keepdim=True), terms[1]).rsqrt_()).mul_(factor)


def _refuse_change(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raises `ValueError` if `fn`, which `nn.Module.to` applies to each tensor, gives another dtype or device."""
    found = fn(torch.empty(0, dtype=torch.float32, device="cpu"))
    if found.dtype != torch.float32 or found.device.type != "cpu":
        raise ValueError(
            f"A packed model computes in float32 on a CPU and cannot become {found.dtype} on {found.device.type!r}: "
            "load it again with a dtype, and move that."
        )


def take_hooks(module: nn.Module, other: nn.Module) -> None:
    """Gives a module the hooks of the one that it replaces."""
    for name in HOOKS:
        setattr(module, name, getattr(other, name))
