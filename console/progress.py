"""Progress of long work on standard error: a bar with the time left on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

EVERY = 30.0  # seconds between two lines where there is no terminal that can redraw one

Item = TypeVar("Item")


class LongProgress(Progress):
    """[`rich.progress.Progress`] whose state is printed as plain lines where the console cannot redraw it."""

    def __init__(self, console: Console, *columns: ProgressColumn):
        bar = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        columns = columns or (*bar, TextColumn("elapsed, left"), TimeRemainingColumn())
        super().__init__(*columns, console=console, refresh_per_second=2, speed_estimate_period=120)
        self._printed = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """The parent's."""
        super().advance(task_id, advance)
        self.print_line(task_id)

    def print_line(self, task_id: TaskID) -> None:
        """Prints how far a task is where nothing is redrawn, if the last time was long ago."""
        now = time.monotonic()
        if self.console.is_interactive or now - self._printed < EVERY:
            return
        self._printed = now
        task = self._tasks[task_id]
        left = "" if task.time_remaining is None else f", about {timedelta(seconds=task.time_remaining)} left"
        note = f", {task.fields['note']}" if task.fields.get("note") else ""
        self.console.print(f"{task.description}: {task.percentage:.0f}%{note}{left}", highlight=False, markup=False)


Show = Callable[[float, str], None]
"""Shows which share of a stage is done, and a few words about it."""


@contextmanager
def stage(console: Console, title: str) -> Iterator[Show]:
    """Progress of work whose share is known. What was reached stays on the screen, whatever ends it."""
    note = TextColumn("{task.fields[note]}", table_column=Column())  # in lines where there is no room for one
    left = TextColumn("left"), TimeRemainingColumn(table_column=Column(no_wrap=True))
    with LongProgress(console, TextColumn("{task.description}:"), TaskProgressColumn(), note, *left) as progress:
        task = progress.add_task(title, total=1.0, note="")

        def show(share: float, note: str) -> None:
            progress.update(task, completed=min(share, 1.0), note=note)
            progress.print_line(task)

        yield show


def track(items: Iterable[Item], title: str) -> Iterator[Item]:
    """The items one by one, and how far this has come; nothing is shown without a title."""
    if not title:
        yield from items
        return
    listed = list(items)
    with LongProgress(Console(stderr=True)) as progress:
        task = progress.add_task(title, total=len(listed))
        for item in listed:
            yield item
            progress.advance(task)
