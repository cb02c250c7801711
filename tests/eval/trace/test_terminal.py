"""A trace replays in a terminal, and as plain lines where there is none."""

import io
import re
from collections import Counter

import pytest
from rich.console import Console

from wedlm_hf.eval.trace.terminal import replay_in_terminal
from wedlm_hf.eval.trace.text import printable

SETTINGS = {
    "greedy": {"entropy_threshold": 1.5},
    "one at a time": {"entropy_threshold": 0.0, "distance_penalty": 0.3},
    "block": {"strategy": "block", "entropy_threshold": 1.5},
    "exact": {"verification": "exact", "entropy_threshold": 3.0, "adaptive_window": False},
}


def written(show, terminal=False, width=120, **options):
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, color_system="standard" if terminal else None
    )
    show(console, **options)
    return console.file.getvalue()


def test_without_a_terminal_a_replay_is_one_line_for_each_forward(trace):
    text = written(lambda console: replay_in_terminal(trace, console))
    assert "\x1b" not in text
    for recording in trace.recordings:
        for run in recording.runs:
            assert f"{run.label}: {len(run.tokens)} tokens in {len(run.steps)} forwards" in text
    lines = [line for line in text.splitlines() if line.startswith("wedlm: forward ")]
    assert len(lines) == sum(len(recording.runs[0].steps) for recording in trace.recordings)
    first = trace.recordings[0].runs[0]
    assert f"final {''.join(first.pieces[: first.steps[0].final])!r}" in lines[0]


def test_a_terminal_shows_all_of_the_answer(trace):
    text = written(lambda console: replay_in_terminal(trace, console, pace=0.0001), terminal=True)
    assert "\x1b" in text
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text)
    run = trace.recordings[0].runs[0]
    assert printable(run.text).split("\n")[0][:20] in plain
    assert f"{len(run.tokens)} tokens, forward {len(run.steps)}, " in plain
    assert "of the measured speed" in text


@pytest.mark.parametrize("name", SETTINGS)
def test_lines_tell_the_window_after_each_forward(recorded, name):
    trace = recorded(SETTINGS[name], with_ar=False)
    (run,) = trace.recordings[0].runs
    text = written(lambda console: replay_in_terminal(trace, console), width=500)
    lines = [line for line in text.splitlines() if ": forward " in line]
    assert len(lines) == len(run.steps)
    for index, line in enumerate(lines[:-1]):
        kinds = Counter(run.steps[index + 1].kinds)
        window = line.split("  window ")[1] if "  window " in line else ""
        assert window.split(" ").count("_") == kinds["m"], line
    assert text.splitlines()[-1].startswith(f"{run.label}: {len(run.tokens)} tokens in {len(run.steps)} forwards")
