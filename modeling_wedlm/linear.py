"""Linear layers that take a few rows at the pace of one, in float32 on a CPU.

BLAS libraries are made for one row and for many. With x Wᵀ they may need twice as long for 2 rows as for one, with
(W xᵀ)ᵀ less than for one, which is taken where it is clearly faster (`benchmarks/few_rows.py` measures both). One
row, and with it plain AR decoding of one sequence, stays as it is.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from time import thread_time

import torch
from torch import nn

# Rows that are few, for each thread and at most.
ROWS_PER_THREAD, MOST_ROWS = 4, 8
# Entries of a weight that is large: smaller ones stay in a core's own cache.
LEAST_WEIGHT = 2**18


def speed_up_few_rows(module: nn.Module) -> None:
    """Gives each linear layer of a module [`few_rows_linear`] for its forward.

    The layers stay plain ones: what replaces or wraps these, as quantizers and PEFT do, knows them by their type.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            # Unlike a method that is bound to it, this can be pickled with the layer.
            layer.forward = partial(few_rows_linear, layer)  # type: ignore[method-assign]


def few_rows_linear(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """`(..., in_features)` to `(..., out_features)`, as the layer's own forward but for the last bits of few rows."""
    if not _is_plain(layer, input):
        return nn.Linear.forward(layer, input)
    rows = input.shape[:-1].numel()
    is_few = 1 < rows <= min(MOST_ROWS, ROWS_PER_THREAD * torch.get_num_threads())
    if not is_few or not _transposed_is_faster():
        return nn.Linear.forward(layer, input)
    output = torch.mm(layer.weight, input.reshape(rows, input.shape[-1]).t()).t().contiguous()
    if layer.bias is not None:
        output += layer.bias
    return output.view(*input.shape[:-1], -1)


def _is_plain(layer: nn.Linear, input: torch.Tensor) -> bool:
    """Whether this is one product of large float32 matrices on a CPU, which nothing records or rewrites."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # no number of rows may become part of the graph
        return False
    weight = layer.weight
    return (
        not torch.is_grad_enabled()
        and weight.numel() >= LEAST_WEIGHT
        and input.dtype == weight.dtype == torch.float32
        and input.device.type == weight.device.type == "cpu"
        and type(weight) is nn.Parameter  # neither sharded nor quantized
        and not torch.is_autocast_enabled("cpu")
    )


@lru_cache
def _transposed_is_faster() -> bool:
    """Whether (W xᵀ)ᵀ takes less than 0.7 of the time of x Wᵀ on this machine, for 2 rows and weights that no cache
    holds. In one thread's own time, so that other programs do not count; the difference is large or none."""
    weights, x = (torch.ones(shape, dtype=torch.float32, device="cpu") for shape in ((8, 1024, 1024), (2, 1024)))
    products: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda weight: nn.functional.linear(x, weight),
        lambda weight: torch.mm(weight, x.t()),
    )
    best, threads = [float("inf"), float("inf")], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(5):
            for place, product in enumerate(products):
                began = thread_time()
                for weight in weights:
                    product(weight)
                best[place] = min(best[place], thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return best[1] < 0.7 * best[0]
