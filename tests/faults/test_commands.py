"""A sample of command_faults.py, which tries every command under every fault."""

import pytest
from command_faults import table


@pytest.mark.parametrize("fault", ["SIGINT", "SIGTERM", "limit", "pipe"])
def test_a_trace_that_is_cut_off_leaves_the_one_before_whole(fault):
    _, problems = table(trials=2, commands=["trace"], faults=[fault])
    assert not problems
