"""Training on a CPU."""

import os
import platform
import subprocess
import sys

import pytest

from wedlm_hf.training import cpu

FAULTS = """
import resource
import torch
{call}
for step in range(12):
    if step == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    logits = torch.ones(2**24)
    probabilities = logits + 1
    del logits, probabilities
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
CALL = f"import runpy; runpy.run_path({cpu.__file__!r})['keep_freed_memory']()"  # the package's import takes long


def faults(call: str, **environment: str) -> int:
    """Pages that the system clears in ten steps, each of which makes two tensors of 64 MiB and frees them."""
    command = [sys.executable, "-c", FAULTS.format(call=call)]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_training_reuses_the_memory_of_large_tensors_unless_the_environment_says_otherwise() -> None:
    default = faults("")
    assert faults(CALL) < default / 2
    assert faults(CALL, MALLOC_TRIM_THRESHOLD_="131072") == pytest.approx(default, rel=0.25)
