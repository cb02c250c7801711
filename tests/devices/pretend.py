"""A pretend accelerator: tensors that say they are on a device of their own, and are computed on the CPU.

It raises where tensors of two devices meet, as an accelerator would, but for CPU scalars of no dimension. It notes
where the host waits: where a value, or a shape that depends on values, comes from the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any

import torch
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
DIFFERENT = "Expected all tensors to be on the same device"


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _current is not None


BACKEND = SimpleNamespace(
    is_available=lambda: _current is not None, device_count=lambda: int(_current is not None),
    current_device=lambda: 0, is_initialized=lambda: True, _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None, get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)  # fmt: skip
_setup_privateuseone_for_python_backend(NAME, BACKEND, _Hook())
# Nothing is cast: `torch.autocast` is there, and changes nothing.
_CASTS = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_CASTS.fallback(torch.library.fallthrough_kernel)


class PretendTensor(torch.Tensor):
    """`inner`, a CPU tensor, as one of the device's."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

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


_current: Accelerator | None = None


@contextmanager
def accelerator() -> Iterator[Accelerator]:
    """The device is there."""
    global _current
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` comes by, too
    _current = Accelerator()
    try:
        with _current:
            yield _current
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
        _current = None


def _wait() -> None:
    if _current is not None:
        places = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk_stack(None)]
        ours = [place for place in places if place[0] != __file__ and "site-packages" not in place[0]]
        _current.waits.append(["{}:{} {}".format(*place) for place in ours])


def _mapped(value: Any, change: Any) -> Any:
    """A value with its tensors changed, those in its lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(_mapped(part, change) for part in value) if type(value) in (list, tuple) else value


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, PretendTensor) else tensor


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    packet, device = func.overloadpacket, kwargs.get("device")
    tensors: list[torch.Tensor] = []
    _mapped([*args, *kwargs.values()], tensors.append)
    ours = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    is_to_device = device is not None and torch.device(device).type == NAME
    if not ours and not is_to_device:
        return func(*args, **kwargs)
    is_to_cpu = bool(ours) and device is not None and not is_to_device
    if packet in COPYING:
        is_to_cpu = is_to_cpu or (packet is aten.copy_ and not isinstance(args[0], PretendTensor))
    elif ours:
        _check_devices(func, packet, args, tensors)
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != NAME:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generator.device.type}'")
    if packet in WAITING or (is_to_cpu and packet in COPYING) or (packet in INDEXING and _finds_places(packet, args)):
        _wait()
    inner_args, inner_kwargs = _mapped(args, _inner), {name: _mapped(value, _inner) for name, value in kwargs.items()}
    if is_to_device:
        inner_kwargs["device"] = torch.device("cpu")
    found = func(*inner_args, **inner_kwargs)
    if is_to_cpu:
        if packet is aten.copy_:
            return args[0]
        return found.clone() if any(found is tensor.inner for tensor in ours) else found
    if not ours:
        is_same = packet is aten._to_copy and any(found is tensor for tensor in tensors)
        return _mapped(found.clone() if is_same else found, PretendTensor)
    known = {id(tensor.inner): tensor for tensor in ours}
    found = _mapped(found, lambda tensor: known[id(tensor)] if id(tensor) in known else PretendTensor(tensor))
    return return_and_correct_aliasing(func, args, kwargs, found)


def _check_devices(func: Any, packet: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    is_into_ours = isinstance(args[0], PretendTensor)
    if packet in INDEXING and is_into_ours:
        tensors = [tensor for tensor in args[2:3] if isinstance(tensor, torch.Tensor)]  # places may come from the CPU
    others = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, PretendTensor) and tensor.ndim]
    if others:
        raise RuntimeError(f"{DIFFERENT}, but found at least two devices, {NAME}:0 and cpu! ({func}, {others})")
    if func._schema.name.endswith("_") and isinstance(args[0], torch.Tensor) and not is_into_ours:
        raise RuntimeError(f"{DIFFERENT}: {func} writes to cpu from {NAME}:0.")


def _finds_places(packet: Any, args: Any) -> bool:
    """Whether indexing looks for the places that a mask leaves."""
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    is_filled = packet in (aten.index_put_, aten.index_put, aten._index_put_impl_) and args[2].numel() == 1
    return bool(masks) and not (is_filled and len(masks) == len([index for index in args[1] if index is not None]))
