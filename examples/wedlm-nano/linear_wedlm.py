"""Linear layers that take a few rows at the pace of one, in float32 on a CPU."""

from collections.abc import Callable
from functools import lru_cache
from time import perf_counter

import torch
from torch import nn

# Rows that are few, for each thread and at most.
ROWS_PER_THREAD, MOST_ROWS = 4, 8
# Entries of a weight that is large: smaller ones stay in a core's own cache.
LEAST_WEIGHT = 2**18


class WeDLMLinear(nn.Linear):
    """Identical to [`torch.nn.Linear`] but for the last bits of few rows, float32, on a CPU, without gradients.

    BLAS libraries are made for one row and for many. With x Wᵀ they may need twice as long for 2 rows as for one, with
    (W xᵀ)ᵀ less than for one, which is taken where it is clearly faster. One row, and with it plain AR decoding of one
    sequence, stays as it is. (`benchmarks/few_rows.py` measures both.)
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        rows = input.numel() // self.in_features
        if not 1 < rows <= MOST_ROWS or not self._is_plain(input):
            return super().forward(input)
        threads = torch.get_num_threads()
        if rows > ROWS_PER_THREAD * threads or not _transposed_is_faster(threads):
            return super().forward(input)
        output = torch.mm(self.weight, input.reshape(rows, -1).t()).t().contiguous()
        if self.bias is not None:
            output += self.bias
        return output.view(*input.shape[:-1], -1)

    def _is_plain(self, input: torch.Tensor) -> bool:
        """Whether this is one product of large float32 matrices on a CPU, which nothing records or rewrites."""
        return (
            input.device.type == self.weight.device.type == "cpu"
            and input.dtype == self.weight.dtype == torch.float32
            and type(self.weight) is nn.Parameter  # neither sharded nor quantized
            and self.weight.numel() >= LEAST_WEIGHT
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cpu")
        )

    @classmethod
    def convert(cls, module: nn.Module) -> None:
        """Turns the plain linear layers of a module, which its parents built, into such ones."""
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = cls


@lru_cache
def _transposed_is_faster(threads: int) -> bool:
    """Whether (W xᵀ)ᵀ takes less than 0.7 of the time of x Wᵀ on this machine, for 3 rows and weights that no cache
    holds. The difference is large or none: a quick look is enough."""
    weights, x = torch.ones(8, 1024, 1024), torch.ones(3, 1024)
    products: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda weight: nn.functional.linear(x, weight),
        lambda weight: torch.mm(weight, x.t()),
    )
    best = [float("inf"), float("inf")]
    for _ in range(5):  # the shortest time: others may be those of other programs, or of threads that have to start
        for place, product in enumerate(products):
            began = perf_counter()
            for weight in weights:
                product(weight)
            best[place] = min(best[place], perf_counter() - began)
    return best[1] < 0.7 * best[0]
