"""Progress: a bar with the time left on a terminal, plain lines elsewhere, and nothing unasked."""

import io

import pytest
from rich.console import Console

from wedlm_hf.console import progress
from wedlm_hf.console.progress import stage, track


def shown_on(width=100, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    with stage(console, "measuring") as show:
        for share in (0.25, 0.5, 0.75, 1.0):
            show(share, "")
    return console.file.getvalue()


def test_a_terminal_gets_a_bar_and_a_file_a_line_now_and_then():
    text = shown_on(force_terminal=True, force_interactive=True)
    assert "━" in text and "left" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert shown_on(force_terminal=False).count("measuring") == 1  # what was reached


@pytest.mark.parametrize("terminal", [False, True])
def test_a_file_and_a_dumb_terminal_get_plain_lines(monkeypatch, terminal):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setenv("TERM", "dumb")
    lines = shown_on(width=24, force_terminal=terminal, color_system=None).splitlines()  # a log has no width
    assert [line.partition(",")[0] for line in lines[:4]] == [f"measuring: {share}%" for share in (25, 50, 75, 100)]
    assert "about 0:00:" in lines[1] and lines[1].endswith("left")
    assert "\x1b" not in "".join(lines)


def test_without_a_title_nothing_is_shown(capsys):
    assert list(track(range(3), "")) == list(track(iter(range(3)), "counting")) == [0, 1, 2]
    assert "counting" in capsys.readouterr().err
