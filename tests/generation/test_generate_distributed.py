"""Generation in two processes: waiting for each other (`synced_gpus`), and tensor parallel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from generate_worker import LIMITS, STRATEGIES, decode
from tiny import tiny_model

WORKER = Path(__file__).with_name("generate_worker.py")


def two_processes(folder, scenario):
    checkpoint = folder / "checkpoint"
    tiny_model().save_pretrained(checkpoint)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, WORKER, checkpoint, folder, scenario], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"{scenario}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_processes_that_finish_early_keep_the_others_company(tmp_path):
    first, second = two_processes(tmp_path, "synced")
    for strategy in STRATEGIES:
        for result, limit in zip((first, second), LIMITS, strict=True):
            assert result[strategy]["tokens"] == decode(tiny_model(), strategy, max_new_tokens=limit)
        assert first[strategy]["forwards"] == second[strategy]["forwards"]


@pytest.mark.slow
def test_tensor_parallel_models_decode_like_one_process(tmp_path):
    first, second = two_processes(tmp_path, "tp")
    for strategy in STRATEGIES:
        expected = decode(tiny_model(), strategy, max_new_tokens=16)
        assert first[strategy]["tokens"] == second[strategy]["tokens"] == expected
