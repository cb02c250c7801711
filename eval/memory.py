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
        bytes: held now.
        peak: the most that was held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # What views return and in-place operations change was there before.
        if not any(result.alias_info for result in func._schema.returns):
            for tensor in tree_iter(output):
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor.untyped_storage())
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


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
