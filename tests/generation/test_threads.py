"""Waiting threads sleep beside other programs, though torch was imported first, and spin on a quiet machine."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from wedlm_hf.generation import threads

pytestmark = pytest.mark.skipif(threads._starter() is None, reason="OpenMP is not libgomp, or was told how to wait")

# Seconds that other threads than this one compute while it pauses between two products.
PROGRAM = f"""
import torch  # before anything of ours could set a variable that OpenMP reads
import sys, time
sys.path.append({str(Path(threads.__file__).parent)!r})  # the package's import takes long
import threads
threads.PAUSE = threads.LINGER = 0.01
others = 0  # cores
threads._watch.usage.look = lambda: others
torch.set_num_threads(2)
rows, weight = torch.ones(8, 512), torch.ones(512, 2048)
def wasted():
    rows @ weight
    begin, own = time.process_time(), time.thread_time()
    for _ in range(40):
        rows @ weight
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            pass
    return time.process_time() - begin - (time.thread_time() - own)
with threads.sleeping_beside_others():
    time.sleep(0.1)
    quiet, others = wasted(), 64
    time.sleep(0.3)
    busy = wasted()
time.sleep(0.3)
print(quiet, busy, wasted())
"""


def test_threads_sleep_beside_others_and_spin_on_a_quiet_machine_and_afterwards():
    environment = {name: value for name, value in os.environ.items() if name not in threads.SAID}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, env=environment | {"OMP_NUM_THREADS": "2"})
    assert result.returncode == 0, result.stderr
    quiet, busy, after = map(float, result.stdout.split())
    assert busy < quiet / 2 and busy < after / 2


@pytest.fixture
def told(monkeypatch):
    """Teams that were begun, and a setter of what others use."""
    begun = []
    monkeypatch.setattr(threads, "_starter", lambda: begun.append)
    monkeypatch.setattr(threads, "_watch", threads._Watch())
    monkeypatch.setattr(threads, "PAUSE", 0.01)
    monkeypatch.setattr(threads, "LINGER", 0.02)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return lambda cores: monkeypatch.setattr(threads._watch.usage, "look", lambda: cores), begun


def teams():
    return sum(isinstance(thread, threads._Team) for thread in threading.enumerate())


def wait_for(count):
    end = time.monotonic() + 20
    while teams() != count and time.monotonic() < end:
        time.sleep(0.01)
    assert teams() == count


def test_a_team_comes_and_goes_with_what_others_use_and_with_the_last_who_decodes(told):
    use, begun = told
    use(0.4)
    with threads.sleeping_beside_others():
        time.sleep(0.1)
        assert teams() == 0
        use(0.6)
        wait_for(1)
        use(0.0)
        wait_for(0)
        use(2.0)
        with threads.sleeping_beside_others():
            wait_for(1)
        time.sleep(0.1)
        assert teams() == 1
    wait_for(0)
    assert begun == [3, 3]


def test_decoding_is_inside(told, monkeypatch):
    use, begun = told
    use(2.0)
    for settings in ({}, {"strategy": "wedlm"}):
        begun.clear()
        tiny_model().generate(torch.tensor([[5, 6]]), max_new_tokens=3, **settings)
        wait_for(0)
        assert begun


def test_what_others_use_is_all_that_runs_on_these_cores_but_this_process():
    usage = threads._Usage()
    program = "import time\nend = time.monotonic() + 60\nprint(flush=True)\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        other.stdout.readline()  # it runs
        time.sleep(0.2)
        usage.look()
        time.sleep(1)
        used = usage.look()
        other.kill()
    assert used > 0.2


@pytest.mark.parametrize("name", threads.SAID)
def test_the_environment_goes_first(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert threads._starter.__wrapped__() is None
