"""How much memory a piece of work needs at its peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorBytes(TorchDispatchMode):
    """Follows the bytes of the tensors that operations make inside a `with` block, until they are freed.

    Tensors that were there before, weights among them, do not count, nor do views, and a buffer counts whole. What a
    kernel allocates and frees within itself is not seen.

    Attributes:
        held: bytes of each tensor that is there now, by its storage.
        bytes, peak: their sum, and the most that it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # What views return and in-place operations change was there before.
        if not any(result.alias_info for result in func._schema.returns):
            for tensor in tree_iter(output):
                if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.held:
                    self.held[storage._cdata] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._forget, storage._cdata)
        return output

    def _forget(self, key: int) -> None:
        self.bytes -= self.held.pop(key)


def peak_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """Bytes that `work` needs at its peak, beyond what was held before: the cache and everything in passing.

    On CUDA this is the allocator's own count, elsewhere that of [`TensorBytes`], which slows the work down several
    times: never time it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with TensorBytes() as counted:
        work()
    return counted.peak
