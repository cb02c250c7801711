"""Training on a CPU."""

import os
import platform
import subprocess
import sys

import pytest

from wedlm_hf.training import cpu

FAULTS = f"""
import resource, runpy
import torch

def faults():
    for step in range(8):
        if step == 4:  # the heap has grown to what two tensors need
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        logits = torch.ones(9 * 2**20)  # more than the 32 MiB that glibc may keep by itself
        probabilities = logits + 1
        del logits, probabilities
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
runpy.run_path({cpu.__file__!r})["keep_freed_memory"]()  # the package's import takes long
print(faults())
"""


def faults(**environment: str) -> list[int]:
    """Pages that the system clears in four steps, each of which makes two tensors of 36 MiB and frees them: by
    default, and when freed memory is to be kept."""
    command = [sys.executable, "-c", FAULTS]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return [*map(int, run.stdout.split())]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_training_reuses_the_memory_of_large_tensors_unless_the_environment_says_otherwise() -> None:
    default, kept = faults()
    assert kept < default / 2
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") == pytest.approx([default, default], rel=0.25)
