"""What x Wᵀ and (W xᵀ)ᵀ take for few rows, by the number of rows: what `few_rows_linear` chooses between.

    python benchmarks/few_rows.py --threads 2

The matrices of a decoder of SmolLM2-135M's shape, 30 layers and a head, are multiplied by the same rows, both ways in
turn; medians of the milliseconds of all of them.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch.nn import functional as F

SHAPES = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)] * 30 + [(49152, 576)]
WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x Wᵀ": F.linear,
    "(W xᵀ)ᵀ": lambda x, weight: torch.mm(weight, x.t()).t().contiguous(),
}


@torch.no_grad()
def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    weights = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    print(f"| rows | {' | '.join(f'{way}, ms' for way in WAYS)} |\n|---:|---:|---:|")
    for rows in (1, 2, 3, 4, 6, 8, 12, 16):
        inputs = {width: torch.randn(rows, width, dtype=dtype) for width in (576, 1536)}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            for way, product in WAYS.items():
                began = perf_counter()
                for weight in weights:
                    product(inputs[weight.shape[1]], weight)
                times[way].append(perf_counter() - began)
        print(f"| {rows} | {' | '.join(f'{1000 * median(taken):.1f}' for taken in times.values())} |", flush=True)


if __name__ == "__main__":
    main()
