"""Threads that decode with one model at once, and a sample of what command_faults.py tries with every command."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_faults import prepare, start, table
from test_branches import adapted
from test_generation import generate, prompts_of
from tiny import tiny_model

DECODERS = [{"entropy_threshold": 1.0}, {"verification": "exact"}]


@pytest.mark.parametrize("make", [tiny_model, adapted], ids=["plain", "mask adapter"])
def test_eight_threads_on_one_model_answer_as_one_does(make):
    model, prompts = make(), [prompts_of(lengths, seed) for seed in range(2) for lengths in ([4], [2, 7])]
    calls = [(rows, options) for rows in prompts for options in DECODERS]

    def answer(call):
        return generate(model, call[0], **call[1], max_new_tokens=8)[1]

    expected = [answer(call) for call in calls]
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns every few lines
    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(answer, calls * 3)) == expected * 3
    finally:
        sys.setswitchinterval(switch_interval)


def test_a_trace_that_is_cut_off_leaves_the_one_before_whole():
    _, problems = table(trials=1, commands=["trace"], faults=["SIGTERM", "limit"])
    assert not problems


@pytest.mark.parametrize("limit", [300, 100_000])  # the config, the weights
def test_weights_that_do_not_fit_on_the_disk_are_said_in_one_line_and_leave_nothing(tmp_path, limit):
    prepare(tmp_path)
    before = sorted(tmp_path.iterdir())
    run = start(["convert", "stock", "new"], tmp_path, limit=limit)
    run.wait()
    assert run.code == 2
    assert b"File too large" in run.output and run.output.count(b"Error: ") == 1 and b"Traceback" not in run.output
    assert sorted(tmp_path.iterdir()) == before
