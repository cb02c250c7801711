"""What the linear layers of a decoder take by the number of rows: packed, in bfloat16 and in float32.

    python benchmarks/linear_rows.py --threads 2
    python benchmarks/linear_rows.py --model Qwen3-1.7B --layers 3

Random weights in the shapes of real models, all layers and the head. Larger models are sampled: some layers are timed,
and their time is multiplied. The formats take turns; medians of the milliseconds. `--own-time` counts the time of one
thread alone, which other programs on the machine do not change.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter, thread_time

import torch
from torch import nn

from wedlm_hf.checkpoints.matrices import in_one_thread
from wedlm_hf.checkpoints.packed import PackedLinear

# Hidden size, width of the MLP, layers, width of all queries, of all keys, and vocabulary.
SHAPES = {
    "SmolLM2-135M": (576, 1536, 30, 576, 192, 49152),
    "Qwen3-0.6B": (1024, 3072, 28, 2048, 1024, 151936),
    "Qwen3-1.7B": (2048, 6144, 28, 2048, 1024, 151936),
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES], default="SmolLM2-135M")
    parser.add_argument("--layers", type=int, help="how many are timed; default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--own-time", action="store_true", help="one thread's own time")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.own_time else options.threads)
    print(torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads", options.model)
    if options.own_time:
        in_one_thread(lambda: measure(options, thread_time))
    else:
        measure(options, perf_counter)


@torch.no_grad()
def measure(options: argparse.Namespace, clock: Callable[[], float]) -> None:
    """Prints the table."""
    hidden, width, layers, queries, keys, vocabulary = SHAPES[options.model]
    timed = min(options.layers or layers, layers)
    block = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    block += [(hidden, width), (hidden, width), (width, hidden)]
    print("| rows | packed | bfloat16 | float32 |\n|---:|---:|---:|---:|")
    plain = [[nn.Linear(*shape, bias=False) for shape in part] for part in (block * timed, [(hidden, vocabulary)])]
    formats: dict[torch.dtype, list[list[nn.Module]]] = {
        torch.float16: [[PackedLinear(layer) for layer in part] for part in plain],
        torch.bfloat16: [[_as_bfloat16(layer) for layer in part] for part in plain],
        torch.float32: [[*part] for part in plain],
    }
    for count in options.rows:
        taken: dict[torch.dtype, list[float]] = {name: [] for name in formats}
        for _ in range(options.repeats):
            for name, (decoder, head) in formats.items():
                dtype = torch.bfloat16 if name == torch.bfloat16 else torch.float32
                rows = {size: torch.randn(count, size).to(dtype) for size in (hidden, queries, width)}
                marks = [clock()]
                for part in (decoder, head):
                    for layer in part:
                        layer(rows[layer.in_features])
                    marks.append(clock())
                seconds = [after - before for before, after in pairwise(marks)]
                taken[name].append(seconds[0] * layers / timed + seconds[1])
        print(f"| {count} | {' | '.join(f'{1000 * median(times):.1f}' for times in taken.values())} |", flush=True)


def _as_bfloat16(layer: nn.Linear) -> nn.Linear:
    other = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    other.weight = nn.Parameter(layer.weight.bfloat16())
    return other


if __name__ == "__main__":
    main()
