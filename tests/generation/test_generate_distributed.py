"""Generation in two processes: waiting for each other (`synced_gpus`), and tensor parallel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from generate_worker import LIMITS, SCENARIOS, STRATEGIES, decode
from tiny import tiny_model

WORKER = Path(__file__).with_name("generate_worker.py")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What each process answered, by scenario."""
    folder = tmp_path_factory.mktemp("two")
    checkpoint = folder / "checkpoint"
    tiny_model().save_pretrained(checkpoint)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*command, WORKER, checkpoint, folder], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return {
        scenario: [json.loads((folder / f"{scenario}-{rank}.json").read_text()) for rank in range(2)]
        for scenario in SCENARIOS
    }


@pytest.mark.slow
def test_processes_that_finish_early_keep_the_others_company(two_processes):
    first, second = two_processes["synced"]
    for strategy in STRATEGIES:
        for result, limit in zip((first, second), LIMITS, strict=True):
            assert result[strategy]["tokens"] == decode(tiny_model(), strategy, max_new_tokens=limit)
        assert first[strategy]["forwards"] == second[strategy]["forwards"]


@pytest.mark.slow
def test_tensor_parallel_models_decode_like_one_process(two_processes):
    first, second = two_processes["tp"]
    for strategy in STRATEGIES:
        expected = decode(tiny_model(), strategy, max_new_tokens=16)
        assert first[strategy]["tokens"] == second[strategy]["tokens"] == expected
