"""A sample of command_faults.py, which tries every command under every fault."""

import pytest
from command_faults import prepare, start, table


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
