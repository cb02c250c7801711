"""Progress of long work on standard error: a bar with the time left on a terminal, elsewhere a line now and then."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

EVERY = 30.0  # seconds between two lines where there is no terminal that can redraw one

Item = TypeVar("Item")
Show = Callable[[float, str], None]
"""Shows which share of a stage is done, and a few words about it."""


@contextmanager
def stage(console: Console, title: str) -> Iterator[Show]:
    """Progress of work whose share is known. What was reached stays on the screen, whatever ends it."""
    columns = (
        TextColumn("{task.description}:"),
        TaskProgressColumn(),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[note]}", table_column=Column()),  # in lines where there is no room for one
        TextColumn("left"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    printed = time.monotonic()
    with Progress(*columns, console=console, refresh_per_second=2, speed_estimate_period=120) as progress:
        name = progress.add_task(title, total=1.0, note="")

        def show(share: float, note: str) -> None:
            nonlocal printed
            progress.update(name, completed=min(share, 1.0), note=note)
            if console.is_interactive or time.monotonic() - printed < EVERY:
                return
            printed, (task,) = time.monotonic(), progress.tasks
            about = f", {note}" if note else ""
            left = "" if task.time_remaining is None else f", about {timedelta(seconds=task.time_remaining)} left"
            line = f"{title}: {task.percentage:.0f}%{about}{left}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield show


def track(items: Iterable[Item], title: str) -> Iterator[Item]:
    """The items one by one, and how far this has come; nothing is shown without a title."""
    if not title:
        yield from items
        return
    listed = list(items)
    with stage(Console(stderr=True), title) as show:
        for count, item in enumerate(listed, 1):
            yield item
            show(count / len(listed), "")
