"""The functions of `kernels.c`, which is compiled where there are a C compiler and AVX2: products with matrices of 16,
8 and 4 bits, what stands around them in a decoder, and whole decoder layers.

torch's own products of 8 and 4 bits are fast on processors with AVX-512 alone, and a small operation of torch takes
longer to start than to compute. All rows are float32, and each has the same bits whatever stands beside it.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import torch
from torch.nn import functional as F

from .remembered import cache_folder

logger = logging.getLogger(__name__)

# Inputs whose weights share a scale, outputs whose weights lie together, and those of 16 bits.
GROUP, OUTPUTS, WIDE = 32, 8, 16
LANES = 8  # numbers that are computed together
_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ["-O3", "-ffp-contract=off", "-fPIC", "-fopenmp", "-mavx2", "-mfma", "-mf16c"]
_VNNI = ["-mavx512f", "-mavx512vl", "-mavx512vnni"]  # one instruction adds products of pairs
_PATIENCE = 60  # seconds for the compiler; it takes two
_LOCK = Lock()

Turns = tuple[torch.Tensor, torch.Tensor]
"""The cosines and sines that rotary embeddings turn rows by, `(..., D)` float32, without gaps."""


class _Strides(ctypes.Structure):
    _fields_ = [(f"stride{number}", ctypes.c_int64) for number in range(8)]


class _Memory(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "slots", "places", "ends")),
        ("of_each", ctypes.c_int64), ("longest", ctypes.c_int64), ("scaling", ctypes.c_float), ("strides", _Strides),
    ]  # fmt: skip


class _Update(ctypes.Structure):
    _fields_ = [
        ("down", ctypes.c_void_p), ("up", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("inner", "down_bits", "up_bits")),
    ]  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = [
        ("weights", ctypes.c_void_p * 4), ("biases", ctypes.c_void_p * 7), ("norms", ctypes.c_void_p * 4),
        ("head_norms", ctypes.c_void_p), ("eps", ctypes.c_float * 4), ("head_eps", ctypes.c_float),
        ("bits", ctypes.c_int32 * 4), *((name, ctypes.c_int32) for name in (
            "hidden", "queries", "keys", "head_width", "inner", "is_gelu",
        )),
    ]  # fmt: skip


# Of functions in the source: p a pointer, s the strides, i an int, f a float.
_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float, "s": ctypes.POINTER(_Strides)}
_ARGUMENTS = {
    "multiply_rows": "pppiiiii", "pick_rows": "pppiii", "norm_rows": "pppiifi", "turn_heads": "ppppiiiifi",
    "gate_rows": "ppiiii", "attend_rows": "ppppppiiiiiisfi", "begin_layer": "pppippppii", "end_layer": "pppipppii",
    "step_layers": "pppipppppiii",
}  # fmt: skip


def multiply_groups(rows: torch.Tensor, blocks: torch.Tensor, outputs: int, bits: int) -> torch.Tensor:
    """`(..., in)` to `(..., outputs)`, the product with a matrix that [`to_blocks`] gave, or [`to_tiles`]."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        found: torch.Tensor = torch.ops.wedlm_hf.multiply_groups(rows, blocks, outputs, bits)
        return found
    return _multiply(rows, blocks, outputs, bits)


def _multiply(rows: torch.Tensor, blocks: torch.Tensor, outputs: int, bits: int) -> torch.Tensor:
    rows, width, size = rows.contiguous(), rows.shape[-1], blocks.shape[1] * (1 if bits == 16 else GROUP)
    if rows.dtype != torch.float32 or width != size or not rows.is_cpu:
        wanted = f"rows of {size} float32 numbers"
        raise ValueError(f"This matrix multiplies {wanted} on a CPU, got {width} of {rows.dtype} on {rows.device}.")
    found = rows.new_empty(*rows.shape[:-1], outputs)
    pointers = rows.data_ptr(), blocks.data_ptr(), found.data_ptr()
    if _library().multiply_rows(*pointers, rows.numel() // width, outputs, width, bits, torch.get_num_threads()):
        raise MemoryError(f"No memory is left for rows of {tuple(rows.shape)}.")
    return found


def pick_rows(places: torch.Tensor, blocks: torch.Tensor, outputs: int) -> torch.Tensor:
    """`(..., in)` float32, the weights of some outputs `(...)` int64, of a matrix in 8 bits that [`to_blocks`] gave.
    Raises `IndexError` for an output that it has not."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        found: torch.Tensor = torch.ops.wedlm_hf.pick_rows(places, blocks, outputs)
        return found
    return _pick(places, blocks, outputs)


def _pick(places: torch.Tensor, blocks: torch.Tensor, outputs: int) -> torch.Tensor:
    if places.dtype not in (torch.int32, torch.int64) or not places.is_cpu:
        raise TypeError(f"Rows have integers for numbers, on a CPU, got {places.dtype} on {places.device}.")
    places, width = places.long().contiguous(), blocks.shape[1] * GROUP
    found = torch.empty(*places.shape, width, dtype=torch.float32, device="cpu")
    if _library().pick_rows(places.data_ptr(), blocks.data_ptr(), found.data_ptr(), places.numel(), outputs, width):
        raise IndexError(f"There are {outputs} rows, got {int(places.min())} to {int(places.max())}.")
    return found


def takes(rows: torch.Tensor) -> bool:
    """Whether the kernels below can be used: on a CPU, outside of autocast; they have no gradients, and torch cannot
    compile them or trace them."""
    is_plain = rows.dtype == torch.float32 and rows.is_cpu and not (rows.requires_grad and torch.is_grad_enabled())
    is_followed = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu")
    return is_plain and not is_followed and has_kernels()  # asked anew where a model was copied to another machine


def norm_rows(rows: torch.Tensor, factor: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of `(..., width)`, with a factor `(width,)`. The width is a multiple of [`LANES`]."""
    rows = rows.contiguous()
    found, width = torch.empty_like(rows), rows.shape[-1]
    pointers = rows.data_ptr(), factor.data_ptr(), found.data_ptr()
    _library().norm_rows(*pointers, rows.numel() // width, width, eps, torch.get_num_threads())
    return found


def turn_heads(rows: torch.Tensor, turns: Turns, heads: int, factors: torch.Tensor | None, eps: float) -> None:
    """Turns the first heads of `(..., width of all heads)` by rotary embeddings, in place.

    Args:
        turns: `(..., D)`, D a multiple of twice [`LANES`].
        heads: how many are turned.
        factors: `(heads, D)`, of an RMSNorm of each head before it is turned.
    """
    cosines, sines = turns
    pointers = rows.data_ptr(), cosines.data_ptr(), sines.data_ptr(), None if factors is None else factors.data_ptr()
    width, stride = cosines.shape[-1], rows.shape[-1]
    _library().turn_heads(*pointers, rows.numel() // stride, heads, width, stride, eps, torch.get_num_threads())


def gate_rows(rows: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """`(..., 2 * width)` to `(..., width)`: the SiLU of the first half times the second, or the GELU by its tanh. The
    width is a multiple of [`LANES`]."""
    width = rows.shape[-1] // 2
    found = rows.new_empty(*rows.shape[:-1], width)
    count = rows.numel() // (2 * width)
    _library().gate_rows(rows.data_ptr(), found.data_ptr(), count, width, is_gelu, torch.get_num_threads())
    return found


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    seen: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of rows, each by itself, so that a row has the same bits whatever attends beside it.

    Args:
        query: `(B, H, Q, D)`, D a multiple of [`LANES`]; a row of one sequence stands as far from the next one as from
            the first of the next sequence.
        key, value: `(B, H / G, K, D)`.
        scaling: of the scores.
        seen: places of the keys that rows see, one row's behind the other's, and where each row's begin,
            `(B * Q + 1,)`; int32 both. `None`: all keys.

    Returns:
        `(B, Q, H, D)`.
    """
    sequences, heads, rows, width = query.shape
    longest = key.shape[2]
    found = query.new_empty(sequences, rows, heads, width)
    steps = query.stride(2), query.stride(1), *key.stride()[:3], *value.stride()[:3]
    places, ends = (None, None) if seen is None else (seen[0].data_ptr(), seen[1].data_ptr())
    if _library().attend_rows(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), places, ends, found.data_ptr(), sequences * rows, rows,
        heads, heads // key.shape[1], longest, width, _Strides(*steps), scaling, torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError(f"No memory is left for {sequences * rows} rows and {longest} keys.")
    return found


class LayerKernels:
    """The kernels of a decoder layer: of all of it, or of both sides where a cache stores keys and values by itself.

    Args:
        matrices: of queries, keys and values; of attention's output; of gate and up; of the MLP's output.
        biases: of each linear layer in them, seven; `None` where it has none.
        norms: the factors `(H,)` of the RMSNorms before and behind attention, before and behind the MLP, and
            `(queries + keys, D)` of those of heads; `None` where there is none.
        eps: of the norms.
        heads: how many have queries, and how many have keys.
        is_gelu: whether the gate is a GELU by its tanh; else it is a SiLU.
    """

    def __init__(
        self,
        matrices: Sequence[Any],
        biases: Sequence[torch.Tensor | None],
        norms: Sequence[torch.Tensor | None],
        eps: Sequence[float],
        heads: tuple[int, int],
        is_gelu: bool,
    ) -> None:
        joint, output, gates, _ = matrices
        self.width, self.hidden = joint.shape[0], output.shape[0]
        self._held = [matrix.weight for matrix in matrices], list(biases), list(norms)
        *factors, of_heads = map(_pointer, norms)
        *own_eps, head_eps = eps
        weights = tuple(matrix.weight.data_ptr() for matrix in matrices)
        self._layer = _Layer(
            weights, tuple(map(_pointer, biases)), tuple(factors), of_heads, tuple(own_eps), head_eps,
            tuple(matrix.bits for matrix in matrices), self.hidden, *heads, output.shape[1] // heads[0],
            gates.shape[0] // 2, is_gelu,
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)

    def begin(self, rows: torch.Tensor, turns: Turns, updates: "Updates | None") -> torch.Tensor:
        """Queries, keys and values of rows `(..., H)`, turned, side by side: `(..., width)`."""
        found = rows.new_empty(*rows.shape[:-1], self.width)
        return self._run("begin_layer", rows, updates, *(turn.data_ptr() for turn in turns), found)

    def end(self, rows: torch.Tensor, attended: torch.Tensor, updates: "Updates | None") -> torch.Tensor:
        """What the layer makes of its rows `(..., H)` and of what was attended, `(..., all queries)`: `(..., H)`."""
        return self._run("end_layer", rows, updates, attended.data_ptr(), torch.empty_like(rows))

    def _run(self, name: str, rows: torch.Tensor, updates: "Updates | None", *others: Any) -> torch.Tensor:
        found: torch.Tensor
        *pointers, found = others
        own = (None, None, 0) if updates is None else updates.arguments
        count, threads = rows.numel() // self.hidden, torch.get_num_threads()
        function = getattr(_library(), name)
        if function(self._address, *own, rows.data_ptr(), *pointers, found.data_ptr(), count, threads):
            raise MemoryError(f"No memory is left for rows of {tuple(rows.shape)}.")
        return found


def step_layers(
    layers: Sequence[LayerKernels],
    rows: torch.Tensor,
    turns: Turns,
    memories: Sequence[_Memory],
    updates: Sequence["Updates | None"],
) -> list[torch.Tensor]:
    """What each of several layers gives, one behind the other, on rows `(B, Q, H)`: attention too, by what
    [`memory_of`] gave for each."""
    with torch.inference_mode(False):  # tensors whose versions tell of changes
        found = [torch.empty(rows.shape, dtype=torch.float32, device="cpu") for _ in layers]
    many = ctypes.c_void_p * len(layers)
    own = [(None, None, 0) if each is None else each.arguments for each in updates]
    _, masks, masked = next((each for each in own if each[0] is not None), own[0])
    pointers = rows.data_ptr(), turns[0].data_ptr(), turns[1].data_ptr(), (_Memory * len(layers))(*memories)
    if _library().step_layers(
        many(*(layer._address for layer in layers)), many(*(each[0] for each in own)), masks, masked, *pointers,
        many(*(each.data_ptr() for each in found)), len(layers), rows.numel() // rows.shape[-1],
        torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError(f"No memory is left for rows of {tuple(rows.shape)}.")
    return found


def memory_of(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    longest: int,
    scaling: float,
    seen: tuple[torch.Tensor, torch.Tensor] | None,
) -> _Memory:
    """Where a cache holds keys and values, and what rows see of them, for [`step_layers`].

    Args:
        keys, values: `(B, heads, C, D)` float32.
        slots: `(B, Q)` int64, where those of each row go.
        longest: how many keys rows see without `seen`.
        scaling, seen: as those of [`attend_rows`].
    """
    places, ends = (None, None) if seen is None else (seen[0].data_ptr(), seen[1].data_ptr())
    pointers = keys.data_ptr(), values.data_ptr(), slots.data_ptr(), places, ends
    strides = _Strides(0, 0, *keys.stride()[:3], *values.stride()[:3])
    return _Memory(*pointers, slots.shape[1], longest, scaling, strides)


class Updates:
    """Low-rank updates of some rows, for [`LayerKernels`].

    Args:
        pairs: for each linear layer of [`LayerKernels`] two matrices that the kernels multiply with, `(inner, in)` and
            `(out, inner)`; `None` where there is none.
        places: `(M,)` int32, of the rows among all.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any] | None], places: torch.Tensor) -> None:
        own = (_Update * len(pairs))()
        for update, pair in zip(own, pairs, strict=True):
            if pair is not None:
                down, up = pair
                update.down, update.up = down.weight.data_ptr(), up.weight.data_ptr()
                update.inner, update.down_bits, update.up_bits = down.shape[0], down.bits, up.bits
        self._held = pairs, places, own
        self.arguments = ctypes.addressof(own), places.data_ptr(), len(places)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@torch.no_grad()
def to_blocks(levels: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    """A matrix in the order that the kernels read, `(out / 8, in / 32, bytes of a block)` uint8: see `kernels.c`.

    Args:
        levels: `(out, in)`: int8 in 8 bits, uint8 in 4.
        scales: `(out, in / 32)` each: steps, and in 4 bits the lows, which become float16.
    """
    padded = [F.pad(each, (0, 0, 0, -len(levels) % OUTPUTS)) for each in (levels, *scales)]
    quads = padded[0].view(-1, OUTPUTS, levels.shape[1] // GROUP, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if levels.dtype == torch.uint8:
        low, high = quads.chunk(2, 2)
        quads = low | high << 4
    halves = [each.half().unflatten(0, (-1, OUTPUTS)).transpose(1, 2).contiguous() for each in padded[1:]]
    return torch.cat([quads.flatten(2).view(torch.uint8), *(half.view(torch.uint8) for half in halves)], -1)


def from_blocks(blocks: torch.Tensor, outputs: int, bits: int) -> torch.Tensor:
    """The weights in such blocks, `(outputs, in)` float32."""
    size = bits * GROUP * OUTPUTS // 8
    levels, halves = blocks[..., :size], blocks[..., size:].contiguous().view(torch.float16).float()
    levels = torch.cat((levels & 15, levels >> 4), -1) if bits == 4 else levels.contiguous().view(torch.int8)
    groups = levels.unflatten(-1, (-1, OUTPUTS, 4)).permute(0, 3, 1, 2, 4).flatten(3)  # (tiles, outputs, groups, 32)
    step, *low = (half.transpose(1, 2)[..., None] for half in halves.split(OUTPUTS, -1))
    weights = groups * step
    return (weights + low[0] if low else weights).flatten(0, 1).flatten(1)[:outputs]


@torch.no_grad()
def to_tiles(weight: torch.Tensor) -> torch.Tensor:
    """A matrix `(out, in)` in the order that the kernels read, `(out / 16, in, 16)` float16."""
    padded = F.pad(weight.to(torch.float16), (0, 0, 0, -len(weight) % WIDE))
    return padded.view(-1, WIDE, weight.shape[1]).transpose(1, 2).contiguous()


def from_tiles(tiles: torch.Tensor, outputs: int) -> torch.Tensor:
    """The weights in such tiles, `(outputs, in)` float16: a copy."""
    return tiles.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()


def kernels_digest() -> str | None:
    """What tells these kernels from others, in whose time something was measured; `None` where there are none."""
    return hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16] if has_kernels() else None


def has_kernels() -> bool:
    """Whether this machine has the kernels; where it has not, the log says why."""
    with _LOCK:
        return _has_kernels()


@lru_cache
def _has_kernels() -> bool:
    try:
        _check()
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        logger.info("Products of packed layers are torch's own: %s", getattr(error, "stderr", None) or error)
        return False
    name = "wedlm_hf::multiply_groups"
    torch.library.define(name, "(Tensor rows, Tensor blocks, int outputs, int bits) -> Tensor")
    torch.library.impl(name, "CPU")(_multiply)
    torch.library.register_fake(name)(lambda rows, blocks, outputs, bits: rows.new_empty(*rows.shape[:-1], outputs))
    name = "wedlm_hf::pick_rows"
    torch.library.define(name, "(Tensor places, Tensor blocks, int outputs) -> Tensor")
    torch.library.impl(name, "CPU")(_pick)
    torch.library.register_fake(name)(
        lambda places, blocks, outputs: places.new_empty(*places.shape, blocks.shape[1] * GROUP, dtype=torch.float32)
    )
    return True


@lru_cache
def _library() -> Any:
    """The functions of `kernels.c`. Raises `OSError` and `subprocess.SubprocessError` where it cannot be had."""
    capability, instructions = torch.backends.cpu.get_cpu_capability(), _instructions()
    if capability not in ("AVX2", "AVX512") or not instructions >= {"avx2", "fma", "f16c"}:
        raise OSError(f"the kernels are for Linux on processors with AVX2, and this one is {capability}.")
    if (threads := next(Path(torch.__file__).with_name("lib").glob("libgomp*"), None)) is None:
        raise OSError("the kernels share the threads of torch's own libgomp, which this torch has not.")
    has_vnni = capability == "AVX512" and instructions >= {"avx512vl", "avx512_vnni"}
    flags = [*_FLAGS, *(_VNNI if has_vnni else ())]
    compiler = shlex.split(os.environ.get("CC") or "cc")
    key = hashlib.sha256(
        repr((compiler, flags, platform.libc_ver(), str(threads), _SOURCE.read_bytes())).encode()
    ).hexdigest()
    path = cache_folder() / f"kernels-{key[:16]}.so"
    if _is_whole(path):
        library = ctypes.CDLL(str(path))
    else:
        with TemporaryDirectory() as folder:
            compiled, part = Path(folder, path.name), str(Path(folder, "kernels.o"))
            compiling = [*compiler, *flags, "-c", str(_SOURCE), "-o", part]
            linking = [*compiler, "-shared", "-Wl,--no-undefined", part, str(threads), "-lm", "-o", str(compiled)]
            for command in (compiling, linking):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE)
            content = compiled.read_bytes()
            with suppress(OSError):  # a disk that is full: compiled again next time
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # of this process alone on all hosts
                unfinished.write_bytes(content + hashlib.sha256(content).digest())
                unfinished.replace(path)
            library = ctypes.CDLL(str(compiled))
    for name, kinds in _ARGUMENTS.items():
        getattr(library, name).argtypes = [_KINDS[kind] for kind in kinds]
    return library


def _is_whole(path: Path) -> bool:
    """Whether a compiled file is there, with its digest behind: loading a part of one would end the process."""
    with suppress(OSError):
        content = path.read_bytes()
        return hashlib.sha256(content[:-32]).digest() == content[-32:]
    return False


def _instructions() -> set[str]:
    """What Linux says that all of its processors can do."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("flags"):
                return set(line.split())
    return set()


def _check() -> None:
    """Raises `OSError` if the kernels compute something else on this machine."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-127, 128, (7, 2 * GROUP), generator=generator).float()
    rows[:, ::GROUP] = 127  # these rows are rounded to themselves: 128 levels to a number
    weight = torch.randint(-64, 65, (40, 2 * GROUP), generator=generator).float()
    for count in (1, len(rows)):
        if not _multiply(rows[:count], to_tiles(weight), len(weight), 16).equal(rows[:count] @ weight.T):
            raise OSError(f"what this machine's compiler made of {_SOURCE.name} computes something else.")
    for bits, dtype, least, beyond in ((8, torch.int8, -127, 128), (4, torch.uint8, 0, 16)):
        levels = torch.randint(least, beyond, (11, 2 * GROUP), generator=generator).to(dtype)
        scales = torch.rand(1 if bits == 8 else 2, 11, 2, generator=generator).mul(8).round().div(8)
        blocks = to_blocks(levels, *scales)
        if not _multiply(rows, blocks, len(levels), bits).equal(rows @ from_blocks(blocks, len(levels), bits).T):
            raise OSError(f"what this machine's compiler made of {_SOURCE.name} computes something else.")
