"""Training on a CPU: its memory, and whether it trains faster in bfloat16 than in float32, which is measured."""

import ctypes
import os
import platform
import time
from functools import lru_cache

import torch

FASTER = 1.2  # how many times as fast bfloat16 must be on a CPU, where it is not the default
ROWS, WIDTH, REPEATS = 256, 512, 5  # of the products that are timed: some milliseconds in all

# Of glibc's `mallopt`: how many pieces of memory are asked of the system one by one, and how many free bytes are kept.
MMAP_MAX, TRIM_THRESHOLD, MOST_BYTES = -4, -1, 2**31 - 1
# Variables by which people decide themselves.
SAID = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Has glibc keep, until the process ends, what a step frees for the next one. Elsewhere nothing changes.

    By default it gives each freed tensor of more than 32 MiB, such as the logits, back to the system, which then has
    to clear the next one page by page: on a virtual machine that can take as long as the arithmetic.
    """
    if set(SAID) & set(os.environ) or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(MMAP_MAX, 0)
    mallopt(TRIM_THRESHOLD, MOST_BYTES)


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
