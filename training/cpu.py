"""Whether a CPU trains faster in bfloat16 than in float32: that depends on its instructions, so it is measured."""

import time
from functools import lru_cache

import torch

ROWS, WIDTH, REPEATS = 256, 512, 5  # of the products that are timed: some milliseconds in all


@lru_cache(maxsize=1)
def bf16_speedup() -> float:
    """How many times as fast as in float32 this machine multiplies matrices in bfloat16, as training does."""

    def seconds(dtype: torch.dtype) -> float:
        rows, weights = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
        found = []
        for _ in range(REPEATS + 1):  # the first prepares the kernel
            begin = time.perf_counter()
            rows @ weights
            found.append(time.perf_counter() - begin)
        return min(found[1:])

    return seconds(torch.float32) / seconds(torch.bfloat16)


def cpu_note(is_bf16: bool) -> str:
    """In which format a CPU trains, and how that compares with the other one."""
    speed = bf16_speedup()
    times = max(speed, 1 / speed)
    fast, slow = ("bfloat16", "float32") if speed > 1 else ("float32", "bfloat16")
    chosen = "bfloat16" if is_bf16 else "float32"
    return f"On the CPU, in {chosen}: {fast} multiplies {times:.1f} times as fast as {slow} here."
