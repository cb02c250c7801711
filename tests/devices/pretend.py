"""A pretend accelerator: tensors that say they are on a device of their own, and are computed on the CPU.

It raises where tensors of two devices meet, as an accelerator would, but for CPU scalars of no dimension. It notes
where the host waits: where a value, or a shape that depends on values, comes from the device.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _DummyPrivateUse1Hook, _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten
# The shape of what they give depends on values, or they give a value.
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.nonzero_numpy, aten.masked_select, aten._unique2, aten.unique_dim,
    aten.unique_consecutive, aten.equal, aten.is_nonzero, aten.bincount, aten.histc,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
COPYING = {aten._to_copy, aten.copy_}


class _Backend:
    """What `torch.pretend` must have."""

    def is_available(self) -> bool:
        return _is_on

    def device_count(self) -> int:
        return int(_is_on)

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _is_on


_is_on = False
_setup_privateuseone_for_python_backend(NAME, _Backend(), _Hook())
# Nothing is cast: `torch.autocast` is there, and changes nothing.
_CASTS = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_CASTS.fallback(torch.library.fallthrough_kernel)


class PretendTensor(torch.Tensor):
    """`inner`, a CPU tensor, as one of the device's."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "PretendTensor":
        found = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        found.inner = inner
        return found

    def __repr__(self, **kwargs: Any) -> str:
        return f"PretendTensor({self.inner})"

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("can't convert pretend:0 device type tensor to numpy.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Accelerator(TorchDispatchMode):
    """Makes new tensors on the device where that is asked for.

    Attributes:
        device: its device.
        waits: where the host waited: the innermost lines of this package's code, the last one first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device(NAME, 0)
        self.waits: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def wait(self) -> None:
        frames = reversed(traceback.extract_stack())
        self.waits.append([f"{f.filename}:{f.lineno} {f.name}" for f in frames if "site-packages" not in f.filename])


_current: Accelerator | None = None


@contextmanager
def accelerator() -> Iterator[Accelerator]:
    """The device is there."""
    global _current, _is_on
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` comes by, too
    _current, _is_on = Accelerator(), True
    try:
        with _current:
            yield _current
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
        _current, _is_on = None, False


def _wait() -> None:
    if _current is not None:
        _current.wait()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [one for one in flat if isinstance(one, torch.Tensor)]
    ours = [one for one in tensors if isinstance(one, PretendTensor)]
    packet = func.overloadpacket
    device = kwargs.get("device")
    is_to_device = device is not None and torch.device(device).type == NAME
    if not ours and not is_to_device:
        return func(*args, **kwargs)
    is_to_cpu = bool(ours) and device is not None and not is_to_device
    if packet in COPYING:
        is_to_cpu = is_to_cpu or (packet is aten.copy_ and not isinstance(args[0], PretendTensor))
    elif device is None or ours:
        _check_devices(func, packet, args, tensors, ours)
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != NAME:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generator.device.type}'")
    if packet in WAITING or (is_to_cpu and packet in COPYING) or (packet in INDEXING and _finds_places(packet, args)):
        _wait()
    inner_args, inner_kwargs = pytree.tree_unflatten(
        [one.inner if isinstance(one, PretendTensor) else one for one in flat], spec
    )
    if is_to_device:
        inner_kwargs["device"] = torch.device("cpu")
    found = func(*inner_args, **inner_kwargs)
    if is_to_cpu:
        if packet is aten.copy_:
            return args[0]
        return found.clone() if any(found is one.inner for one in ours) else found
    if not ours:
        if packet is aten._to_copy and any(found is one for one in tensors):
            found = found.clone()
        return pytree.tree_map_only(torch.Tensor, PretendTensor, found)
    known = {id(one.inner): one for one in ours}
    found = pytree.tree_map_only(
        torch.Tensor, lambda one: known[id(one)] if id(one) in known else PretendTensor(one), found
    )
    return return_and_correct_aliasing(func, args, kwargs, found)


def _check_devices(func: Any, packet: Any, args: Any, tensors: list[Any], ours: list[Any]) -> None:
    others = [one for one in tensors if not isinstance(one, PretendTensor) and one.ndim]
    if others and packet in INDEXING and isinstance(args[0], PretendTensor):
        others = [one for one in args[2:3] if isinstance(one, torch.Tensor) and not isinstance(one, PretendTensor)]
        others = [one for one in others if one.ndim]  # places may come from the CPU
    if others and ours:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
            f"({func}, shapes {[tuple(one.shape) for one in tensors]})"
        )
    in_place = func._schema.name.endswith("_") and isinstance(args[0], torch.Tensor)
    if in_place and ours and not isinstance(args[0], PretendTensor):
        raise RuntimeError(f"Expected all tensors to be on the same device: {func} writes to cpu from {NAME}:0.")


def _finds_places(packet: Any, args: Any) -> bool:
    """Whether indexing looks for the places that a mask leaves."""
    masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
    is_filled = packet in (aten.index_put_, aten.index_put, aten._index_put_impl_) and args[2].numel() == 1
    return bool(masks) and not (is_filled and len(masks) == len([one for one in args[1] if one is not None]))
