"""The replay of a trace in a terminal, or as plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from .saved import FILLED, MASK, PROMPT, Recording, Run, Trace
from .text import GROUP_STYLES, printable

SIDE_BY_SIDE = 100
"""Columns from which on two panes fit beside each other."""


def replay_in_terminal(trace: Trace, console: Console, *, pace: float = 0.1) -> None:
    """Show every recording of a trace, its decoders at the same clock; where there is no terminal, a line for each
    forward, at once.

    Args:
        pace: seconds that a typical forward of the last decoder (AR's, where there is one) stays in view; 0 is the
            speed that was measured.
    """
    for recording in trace.recordings:
        console.print(Text(f"› {printable(recording.prompt)}", "bold"), soft_wrap=True)
        # When the outcome of each forward was known, whose it was, and how many that run had then.
        moments = [(end, run, count) for run in recording.runs for count, end in enumerate(run.ends, 1)]
        moments.sort(key=lambda moment: moment[0])
        if console.is_terminal:
            slowest = recording.runs[-1]
            stretch = max(1.0, pace * len(slowest.steps) / slowest.seconds) if pace else 1.0
            console.print(Text(f"{1 / stretch:.2g} of the measured speed", "dim"))
            panes: dict[str, Panel] = {run.name: _panel(trace, recording, run, 0) for run in recording.runs}
            now = 0.0
            with Live(_arranged(panes, console), console=console, refresh_per_second=20) as live:
                for moment, run, count in moments:
                    time.sleep((moment - now) * stretch)
                    now = moment
                    panes[run.name] = _panel(trace, recording, run, count)
                    live.update(_arranged(panes, console))
        else:
            for _, run, count in moments:
                console.print(Text(_line(trace, recording, run, count)), soft_wrap=True)
        for run in recording.runs:
            result = f"{run.label}: {len(run.tokens)} tokens in {len(run.steps)} forwards, {run.seconds:.3f} s"
            console.print(Text(result), soft_wrap=True)


def _arranged(panes: Mapping[str, Panel], console: Console) -> RenderableType:
    if len(panes) == 1 or console.width < SIDE_BY_SIDE:
        return Group(*panes.values())
    return Columns(list(panes.values()), width=console.width // len(panes) - 1, expand=True)


def _panel(trace: Trace, recording: Recording, run: Run, count: int) -> Panel:
    """What a run has after `count` of its forwards, for a terminal."""
    text = Text()
    for number in range(count):
        text.append(printable(_new_text(run, number)), GROUP_STYLES[number % len(GROUP_STYLES)])
    for slot in _window(trace, run, count):
        text.append(*("░", "dim") if slot is None else (printable(slot).replace("\n", "⏎"), "black on yellow"))
    if order := _order(recording, run, count):
        text.append(f"\n\n{order}", "dim")
    tokens, seconds = (run.steps[count - 1].final, run.ends[count - 1]) if count else (0, 0.0)
    rate = f", {tokens / count:.2f} a forward" if count else ""
    counts = Text(f"{tokens} tokens, forward {count}{rate}, {seconds:.3f} s")
    return Panel(text, title=Text(run.label), subtitle=counts, title_align="left", subtitle_align="left")


def _line(trace: Trace, recording: Recording, run: Run, count: int) -> str:
    """The same for a file or a pipe: the last forward, what it made final, and the window."""
    text = f"{run.label}: forward {count}, {run.ends[count - 1]:.3f} s:"
    if order := _order(recording, run, count):
        text += f"  read {order}"
    text += f"  final {_new_text(run, count - 1)!r}"
    if window := _window(trace, run, count):
        text += f"  window {' '.join('_' if slot is None else repr(slot) for slot in window)}"
    return text


def _new_text(run: Run, index: int) -> str:
    """What a forward made final."""
    return "".join(run.pieces[run.steps[index - 1].final if index else 0 : run.steps[index].final])


def _window(trace: Trace, run: Run, count: int) -> list[str | None]:
    """Slots after `count` forwards, in logical order: text of a filled one, `None` for a mask."""
    if count == len(run.steps):
        return []
    step = run.steps[count]
    rows = sorted(zip(step.positions, step.tokens, step.kinds, strict=True))
    slots = [(token, kind) for _, token, kind in rows if kind in (FILLED, MASK)]
    return [None if kind == MASK else trace.vocabulary[str(token)] for token, kind in slots]


def _order(recording: Recording, run: Run, count: int) -> str:
    """Positions of the last forward's rows in physical order, a bar where masks begin; empty for AR."""
    if not count or run.name == "ar":
        return ""
    words = ["prompt"] if PROMPT in run.steps[count - 1].kinds else []
    for position, kind in zip(run.steps[count - 1].positions, run.steps[count - 1].kinds, strict=True):
        if kind == MASK and "|" not in words:
            words.append("|")
        if kind != PROMPT:
            words.append(str(position - len(recording.prompt_tokens)))
    return " ".join(words)
