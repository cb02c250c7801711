"""Mask adapters in two processes, over gloo: one process's digits, a lost process, and what is refused."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from adapter_worker import SCENARIOS, main, save_start
from safetensors.torch import load_file
from test_adapt import write_base
from typer.testing import CliRunner

from wedlm_hf.cli import app

WORKER = str(Path(__file__).with_name("adapter_worker.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """Runs of a single process."""
    folder = tmp_path_factory.mktemp("one")
    save_start(folder)
    threads = torch.get_num_threads()
    main(folder, ["plain", "long"])
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    """Runs of all scenarios but the long one by two processes."""
    folder = tmp_path_factory.mktemp("two")
    save_start(folder)
    launch = [*TORCHRUN, WORKER, str(folder), *(name for name in SCENARIOS if name != "long")]
    result = subprocess.run(launch, env=ONE_THREAD, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-5000:]
    return folder


def log_of(folder: Path, name: str) -> list[dict[str, float]]:
    """What the trainer logged, but for times."""
    log = json.loads((folder / name / "log.json").read_text())
    kept = [
        {key: value for key, value in entry.items() if not re.search("second|runtime|minutes|flos|train_loss", key)}
        for entry in log
    ]
    # A clock says when it is evaluated, but for the last time.
    return [entry for entry in kept[:-2] if "loss" in entry] + kept[-2:]


def assert_same_run(one: Path, two: Path, name: str, reference: str, rel: float) -> None:
    """Losses, evaluations, counts, and the weights."""
    log, expected = log_of(two, name), log_of(one, reference)
    assert len(log) == len(expected) > 10
    for entry, other in zip(log, expected, strict=True):
        for key, value in other.items():  # numbers are rounded for the log
            assert entry[key] == pytest.approx(value, rel=rel, abs=2e-3), key
    weights, others = (
        load_file(folder / run / "adapter" / "adapter_model.safetensors")
        for folder, run in ((two, name), (one, reference))
    )
    for key, weight in others.items():
        torch.testing.assert_close(weights[key], weight, rtol=rel, atol=rel)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "resumed"])
def test_two_processes_train_and_evaluate_an_adapter_as_one(one_process, two_processes, name):
    assert_same_run(one_process, two_processes, name, "plain", rel=1e-4)


@pytest.mark.slow
def test_a_run_that_loses_a_process_goes_on_as_if_uninterrupted(one_process, tmp_path):
    save_start(tmp_path)
    launch, run = [*TORCHRUN, WORKER, str(tmp_path), "long"], tmp_path / "long"
    with subprocess.Popen(launch, env=ONE_THREAD) as launched:
        while not list(run.glob("checkpoint-*")):
            assert launched.poll() is None
            time.sleep(0.01)
        psutil.Process(launched.pid).children()[-1].kill()
    assert launched.returncode != 0 and not (run / "log.json").exists()
    subprocess.run(launch, env=ONE_THREAD, check=True, timeout=400)
    losses = [
        [entry["loss"] for entry in log_of(folder, "long") if "loss" in entry] for folder in (one_process, tmp_path)
    ]
    assert len(losses[0]) > 40 and losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"), [("fsdp", "is sharded. Drafting calls"), ("tp", "needs whole rows: load it")]
)
def test_sharded_and_split_bases_are_refused_with_the_reason(two_processes, name, reason):
    assert reason in (two_processes / f"{name}.txt").read_text()


def test_adapt_refuses_a_launcher_before_any_work(tmp_path, monkeypatch):
    base = write_base(tmp_path / "llama")
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun and accelerate set it
    result = CliRunner().invoke(app, ["adapt", str(base), str(tmp_path / "out"), "--minutes", "1"])
    assert result.exit_code == 2 and "is one process, got WORLD_SIZE=2: call it without a launcher" in result.output
    assert not (tmp_path / "out").exists()
