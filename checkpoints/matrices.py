"""A matrix of weights in 16, 8 or 4 bits, and its product with float32 rows, on CPUs.

A CPU reads every weight once for each forward, so a decoder is about as fast as its weights are small. In each format
a row has the same bits whatever stands beside it.

    16 bits  float16, widened in registers, and products in float32
     8 bits  an integer times the scale of its group of 32 neighbours
     4 bits  one of 16 levels between the least and the largest weight of its group of 32 neighbours. GGUF's formats of
             four bits have such groups: their levels carry over.

Products are our [`kernels`]', which in 8 and 4 bits round rows to 15 bits in groups of 32, too. Where there are none,
and for matrices that they cannot hold, products are torch's: FBGEMM's in 16 bits; in 8 and 4, rows are rounded to
bfloat16, in which alone it is fast, and in 8 bits a scale is that of an output.
"""

import ctypes
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional as F

from .kernels import (
    GROUP,
    OUTPUTS,
    from_blocks,
    from_tiles,
    has_kernels,
    multiply_groups,
    pick_rows,
    to_blocks,
    to_tiles,
)

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

LARGEST = 65504  # float16: a layer with larger weights stays as it is
LEVELS, LANES = 15, 16  # of four bits: steps between levels, and outputs that torch's products take together
# How far, as a share of itself, a scale may be from what float16 makes of it: as bfloat16 is.
_SCALE_ROUNDING = 2**-8
_NOTHING = 2**-20  # of the largest scale
# Numbers of rows that are looked at one by one, and the largest step by which larger numbers are rounded up.
_LOOKED, _LARGEST_STEP = 48, 16
# How far a weight may lie from its level: so much of itself and of the group's largest, by the dtype that dequantized
# weights were rounded to, and no more than so much of the step. Further away, training moved it, which levels undo.
_ROUNDING, _NEAR = {torch.bfloat16: 1.1 * 2**-8, torch.float16: 1.1 * 2**-11, torch.float32: 2**-20}, 0.1
_SAMPLED = 64  # groups that show whether a matrix has levels
_AT_ONCE = 8192  # groups whose levels are looked for together: 1 MB, which stays in a cache


class Levels(NamedTuple):
    """A matrix whose groups have at most 16 equally spaced levels: weight = low + step * level."""

    level: torch.Tensor  # (out, in) uint8
    step: torch.Tensor  # (out, in / 32) float32
    low: torch.Tensor  # (out, in / 32) float32


class Blocked:
    """A matrix in the order that [`kernels`] read, which give its products."""

    bits: int
    shape: tuple[int, ...]
    weight: torch.Tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not has_kernels():
            raise RuntimeError(
                "These packed layers are for kernels that this machine has not (it takes Linux, AVX2 and a C "
                "compiler): load the model and pack it here."
            )
        self.__dict__.update(state)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`(..., in)` to `(..., out)`, both float32."""
        return multiply_groups(rows, self.weight, self.shape[0], self.bits)


class Tiled(Blocked):
    """A matrix in 16 bits."""

    bits = 16

    def __init__(self, weight: torch.Tensor):
        self.weight, self.shape = to_tiles(weight.detach()), tuple(weight.shape)

    def unpacked(self) -> torch.Tensor:
        """The weights, `(out, in)` float16: a copy."""
        return from_tiles(self.weight, self.shape[0])


class Half:
    """A matrix in 16 bits, whose products are torch's."""

    bits = 16

    def __init__(self, weight: torch.Tensor):
        self.weight, self.shape = pack_matrix(weight), tuple(weight.shape)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`(..., in)` to `(..., out)`, both float32."""
        width, count = rows.shape[-1], rows.numel() // rows.shape[-1]
        extra = padded_rows(count) - count
        if not extra and rows.ndim > 1:
            product: torch.Tensor = multiply(rows, self.weight)
            return product
        flat = rows.reshape(-1, width)
        if extra:
            flat = torch.cat((flat, _zeros(extra, width)))
        # The rows that were added are cut off where they are: a view would take longer, several hundred times a step.
        found: torch.Tensor = multiply(flat, self.weight).resize_(*rows.shape[:-1], self.shape[0])
        return found

    def unpacked(self) -> torch.Tensor:
        """The weights, `(out, in)` float16: a copy."""
        weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(self.weight)[0]
        return weight.half()


class Grouped(Blocked):
    """A matrix in 8 or 4 bits, whose rows hold whole groups.

    Args:
        levels: `(out, in)`: int8 in 8 bits, uint8 in 4.
        scales: `(out, in / 32)` float32 each: the steps between levels, and in 4 bits the lowest level's weights.
    """

    def __init__(self, levels: torch.Tensor, *scales: torch.Tensor):
        self.bits, self.shape = 4 if levels.dtype == torch.uint8 else 8, tuple(levels.shape)
        self.weight = to_blocks(levels, *scales)

    @classmethod
    def of_four_bits(cls, levels: "Levels") -> "Grouped | None":
        """Such a matrix; `None` where this machine or float16 is not made for it."""
        return cls(*levels) if has_kernels() and _are_kept(levels.step, levels.low) else None

    @classmethod
    def of_eight_bits(cls, weight: torch.Tensor) -> "Grouped | None":
        """Such a matrix of weights, `(out, in)`; `None` where this machine or float16 is not made for it."""
        if weight.shape[1] % GROUP or not has_kernels():
            return None
        groups = weight.detach().float().unflatten(1, (-1, GROUP))
        step = groups.abs().amax(-1) / 127
        if not _are_kept(step):
            return None
        levels = groups / step.half().float().where(step > 0, 1.0)[..., None]
        return cls(levels.round_().clamp_(-127, 127).to(torch.int8).flatten(1), step)

    def unpacked(self) -> torch.Tensor:
        """The weights, `(out, in)` float32: a copy."""
        return from_blocks(self.weight, self.shape[0], self.bits)

    def is_exactly(self, weight: torch.Tensor) -> bool:
        """Whether these are the very weights, as those of a file in 8 bits are."""
        parts = zip(self.weight.split(_LOOKED), weight.split(_LOOKED * OUTPUTS), strict=True)
        return all(from_blocks(part, len(own), self.bits).equal(own.float()) for part, own in parts)


class Table:
    """The rows of an embedding, where the matrix of its tied head has its very weights, in 8 bits."""

    _whole: weakref.ref[torch.Tensor] | None = None

    def __init__(self, matrix: Grouped):
        self.matrix = matrix

    def __len__(self) -> int:
        return self.matrix.shape[0]

    def __getitem__(self, places: torch.Tensor) -> torch.Tensor:
        """`(...)` int64 to `(..., in)` float32."""
        return pick_rows(places, self.matrix.weight, len(self))

    def detach(self) -> torch.Tensor:
        """All rows, `(out, in)` float32: a copy, which is one and the same while somebody holds it."""
        if (found := None if self._whole is None else self._whole()) is None:
            found = self.matrix.unpacked()
            self._whole = weakref.ref(found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_whole": None}


def _are_kept(*scales: torch.Tensor) -> bool:
    """Whether float16 keeps the scales that matter about as bfloat16 does, which has larger and smaller ones."""

    def is_kept(each: torch.Tensor) -> bool:
        sizes = each.abs()
        return bool(((each.half() - each).abs() <= _SCALE_ROUNDING * sizes + _NOTHING * sizes.amax()).all())

    return all(map(is_kept, scales))


class Int8:
    """A matrix in 8 bits."""

    bits = 8

    def __init__(self, weight: torch.Tensor):
        weight, self.shape = weight.detach().float(), tuple(weight.shape)
        self.scale = (weight.abs().amax(1) / 127).bfloat16()
        steps = self.scale.float().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        self.weight = (weight / steps).round().clamp(-127, 127).to(torch.int8)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`(..., in)` to `(..., out)`, both float32."""
        found = torch._weight_int8pack_mm(_rounded(rows), self.weight, self.scale)
        return found.float().view(*rows.shape[:-1], self.shape[0])

    def unpacked(self) -> torch.Tensor:
        """The weights, `(out, in)` float32: a copy."""
        return self.weight.float() * self.scale.float()[:, None]


class Int4:
    """A matrix in 4 bits, whose rows hold whole groups."""

    bits = 4

    def __init__(self, levels: Levels):
        self.shape = tuple(levels.level.shape)
        # The kernel takes outputs by the sixteen, and computes (level - 8) * scale + zero.
        extra = -self.shape[0] % LANES
        level = F.pad(levels.level, (0, 0, 0, extra)).to(torch.int32)
        scale = torch.stack([levels.step, levels.low + 8 * levels.step], -1)
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(level, 1)
        self.scale = F.pad(scale, (0, 0, 0, 0, 0, extra)).transpose(0, 1).contiguous().bfloat16()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`(..., in)` to `(..., out)`, both float32."""
        found, out = self._product(_rounded(rows)), self.shape[0]
        found = found if found.shape[1] == out else found[:, :out]
        return found.float().view(*rows.shape[:-1], out)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scale)
        return found

    def unpacked(self) -> torch.Tensor:
        """The weights, `(out, in)` float32: a copy."""
        out, width = self.shape
        # The product with the identity is rounded to bfloat16, from which the level is read, and the weight is exact.
        rounded = torch.cat([self._product(rows) for rows in torch.eye(width).bfloat16().split(GROUP)]).T[:out].float()
        step, zero = (part.T[:out, :, None].float() for part in self.scale.unbind(-1))
        groups = rounded.reshape(out, -1, GROUP)
        level = ((groups - zero) / step.where(step != 0, 1.0)).round().clamp(-8, 7)
        return (level * step + zero).view(out, width)


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    """`(..., in)` to `(n, in)` bfloat16, one row behind the other as the kernels want them."""
    return rows.reshape(-1, rows.shape[-1]).to(torch.bfloat16, memory_format=torch.contiguous_format)


Matrix = Tiled | Half | Grouped | Int8 | Int4


def _in_sixteen_bits(weight: torch.Tensor) -> Matrix:
    return Tiled(weight) if has_kernels() else Half(weight)


def _in_eight_bits(weight: torch.Tensor) -> Matrix:
    return Grouped.of_eight_bits(weight) or Int8(weight)


def _in_four_bits(weight: torch.Tensor) -> Matrix:
    levels = own_levels(weight) or nearest_levels(weight)
    return Grouped.of_four_bits(levels) or Int4(levels)


FORMATS: dict[int, Callable[[torch.Tensor], Matrix]] = {16: _in_sixteen_bits, 8: _in_eight_bits, 4: _in_four_bits}


def near_matrix(weight: torch.Tensor) -> Matrix:
    """A matrix for products that need not be exact, as drafts need not, in the bits that are fastest for few rows."""
    return Grouped.of_eight_bits(weight) or _in_sixteen_bits(weight)


def fits(weight: torch.Tensor, bits: int) -> bool:
    """Whether a format can hold a matrix: all weights must be numbers, in four bits its rows whole groups, and in 16
    no weight may be too large."""
    largest = weight.detach().abs().max()
    if bits == 16:
        return bool(largest <= LARGEST)
    return bool(largest.isfinite()) and (bits == 8 or weight.shape[1] % GROUP == 0)


@torch.no_grad()
def nearest_levels(weight: torch.Tensor) -> Levels:
    """A matrix rounded to 16 levels between the least and the largest weight of each group."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low = groups.amin(-1)
    step = (groups.amax(-1) - low) / LEVELS
    # In place: memory for a matrix is dearer than what is computed in it.
    level = (groups - low[..., None]).div_(step.where(step > 0, 1.0)[..., None]).round_()
    return Levels(level.to(torch.uint8).flatten(1), step, low)


@torch.no_grad()
def has_levels(weight: torch.Tensor) -> bool:
    """Whether a matrix has levels already, as one has that was dequantized from 4 bits in groups of 32; a few of its
    groups tell."""
    return weight.shape[1] % GROUP == 0 and _levels_of(_some(weight.detach().reshape(-1, GROUP))) is not None


@torch.no_grad()
def own_levels(weight: torch.Tensor) -> Levels | None:
    """The levels that a matrix has already; `None` where it has none."""
    found = _levels_of(weight.detach().reshape(-1, GROUP)) if has_levels(weight) else None
    return None if found is None else Levels(*(each.view(len(weight), -1) for each in found))


def _some(groups: torch.Tensor) -> torch.Tensor:
    return groups[:: max(1, len(groups) // _SAMPLED)]


def _levels_of(groups: torch.Tensor) -> Levels | None:
    """The levels of groups `(n, 32)`, the steps between them and the lowest; `None` if a group has no such levels."""
    parts = groups.split(_AT_ONCE)

    def is_held(held: torch.Tensor, dtype: torch.dtype) -> bool:
        return held.equal(held.to(dtype).to(held.dtype))

    fitting = (
        share for dtype, share in _ROUNDING.items() if all(is_held(part, dtype) for part in (_some(groups), *parts))
    )
    if (rounding := next(fitting, None)) is None:  # some are no numbers, or have more bits
        return None
    found = []
    for part in parts:
        if (levels := _levels_in(part, rounding)) is None:
            return None
        found.append(levels)
    return Levels(*map(torch.cat, zip(*found, strict=True)))


def _levels_in(groups: torch.Tensor, rounding: float) -> Levels | None:
    """As [`_levels_of`], where rounding moved a weight by such a share of its size at most."""
    groups = groups.float()
    low, largest = groups.amin(-1), groups.amax(-1)
    spread, sizes = largest - low, torch.maximum(largest, -low)
    level, step, error = torch.empty_like(groups), torch.ones_like(low), torch.full_like(low, torch.inf)
    left: Any = slice(None)
    for count in range(LEVELS, 0, -1):
        tried = spread[left] / count
        above = groups[left] - low[left, None]
        places = above / tried.where(tried > 0, 1.0)[:, None]
        found = places.round()
        far = places.sub_(found).abs_().amax(-1) * tried
        if count == LEVELS:
            level, step, error = found, tried, far
        else:
            better = far < error[left]
            level[left[better]], step[left[better]], error[left[better]] = found[better], tried[better], far[better]
        # Nearly all groups hold their first and last level: the others are looked at again.
        left = (error > _NEAR * step / 100).nonzero().flatten()
        if not len(left):
            break
    step = step.where(step > 0, 1.0)
    # Of nearly all groups, the largest error says that none is too large.
    left = (error > torch.minimum(rounding * sizes, _NEAR * step)).nonzero().flatten()
    above = groups[left] - low[left, None]
    far = (level[left] * step[left, None]).sub_(above).abs_()
    near = (groups[left].abs() + sizes[left, None]).mul_(rounding).clamp_(max=(_NEAR * step[left])[:, None])
    return None if bool((far > near).any()) else Levels(level.to(torch.uint8), step, low)


def multiply_alone() -> None:
    """Lets the current thread multiply matrices without the help of others.

    On a busy machine threads wait for each other far longer than they work. `torch.set_num_threads` would not do:
    threads that start meanwhile would inherit it for good.
    """
    torch.get_num_threads()  # the first call in a thread sets the number
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(str(next(Path(torch.__file__).with_name("lib").glob("*torch_cpu.*"), None)))
        library.omp_set_num_threads(1)
        library.MKL_Set_Num_Threads_Local(1)


def in_one_thread(function: Callable[[], _Result]) -> _Result:
    """What the function returns, in a thread of its own: see [`multiply_alone`]."""
    with ThreadPoolExecutor(1, initializer=multiply_alone) as thread:
        return thread.submit(function).result()


# The kernels.

multiply: Any = getattr(getattr(torch.ops.quantized, "linear_dynamic_fp16", None), "default", None)
multiply = getattr(multiply, "_op", multiply)  # called through Python's dispatcher, a product takes 5 µs more


def pack_matrix(weight: torch.Tensor) -> Any:
    """The matrix, `(out, in)`, as float16 in the order that the kernels read; for [`multiply`]."""
    return torch.ops.quantized.linear_prepack_fp16(weight.detach().float().contiguous(), None)


@lru_cache
def can_pack() -> bool:
    """Whether this torch has the kernels; where it has not, says so once in the log."""
    try:
        pack_matrix(torch.ones(1, 1, device="cpu"))
    except (AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        logger.warning("Linear layers stay as they are: this torch has no FBGEMM kernels (%s).", reason)
        return False
    return True


def padded_rows(count: int) -> int:
    """The number of rows, `count` or more, in whose product each row has the bits that it always has.

    Kernels are made for some numbers of rows, and others are cut into those. Which of them give a row other bits is
    looked at once, on this machine: with AVX2 they are those whose last piece has one or two rows.
    """
    fitting, step = _fitting_rows()
    return fitting[count - 1] if 0 < count <= len(fitting) else -(-count // step) * step


@lru_cache(maxsize=64)
def _zeros(rows: int, width: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(rows, width, dtype=torch.float32, device="cpu")


@lru_cache
def _fitting_rows() -> tuple[tuple[int, ...], int]:
    """For each small number of rows the least one that fits, and the step of larger ones."""
    return in_one_thread(_look_at_rows)


@torch.no_grad()
def _look_at_rows() -> tuple[tuple[int, ...], int]:
    # Two blocks of inner dimension, and an output that is no multiple of any kernel's width.
    generator = torch.Generator().manual_seed(0)
    shape: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    weight, row = pack_matrix(torch.randn(43, 600, **shape)), torch.randn(1, 600, **shape)
    found = [multiply(row.repeat(count, 1), weight) for count in range(1, _LOOKED + 1)]
    choices = []
    for kind in torch.cat([rows[:1] for rows in found]).unique(dim=0):
        fits = [bool((rows == kind).all()) for rows in found]
        steps = [step for step in range(1, _LARGEST_STEP + 1) if all(fits[step - 1 :: step])]
        choices += [(steps[0], [count for count, is_fit in enumerate(fits, 1) if is_fit])] if steps else []
    if choices:
        step, sizes = min(choices)
        return tuple(min(size for size in sizes if size >= count) for count in range(1, sizes[-1] + 1)), step
    logger.warning("With this processor's kernels the last bits of a row depend on the number of rows beside it.")
    return (), 1
