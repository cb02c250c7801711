"""Progress of long work on standard error: a bar with the time left on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

EVERY = 30.0  # seconds between two lines where there is no terminal that can redraw one

Item = TypeVar("Item")


class LongProgress(Progress):
    """[`rich.progress.Progress`] whose state is printed as plain lines where the console cannot redraw it."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        times = (TextColumn("elapsed, left"), TimeRemainingColumn())
        super().__init__(*columns, *times, console=console, refresh_per_second=2, speed_estimate_period=120)
        self._printed = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """The parent's."""
        super().advance(task_id, advance)
        now = time.monotonic()
        if self.console.is_interactive or now - self._printed < EVERY:
            return
        self._printed = now
        task = self._tasks[task_id]
        left = "" if task.time_remaining is None else f", about {timedelta(seconds=task.time_remaining)} left"
        self.console.print(f"{task.description}: {task.percentage:.0f}%{left}", highlight=False)


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
