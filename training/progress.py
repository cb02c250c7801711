"""How far a long stage has come, and the time it still takes."""

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

_EVERY = 30.0  # seconds between lines where there is no terminal to redraw


class Progress:
    """One line about a stage: redrawn on a terminal, printed now and then elsewhere.

    Args:
        console: where to.
        name: of the stage.
    """

    def __init__(self, console: Console, name: str):
        self.name, self._console = name, console
        self._first: tuple[float, float] | None = None
        self._printed = -_EVERY
        self._line = Text(name)
        self._live = Live(self._line, console=console, auto_refresh=False) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def show(self, share: float, note: str) -> None:
        """Says that this share of the stage is done, 0 to 1."""
        now = time.monotonic()
        self._first = self._first or (now, share)
        seconds, gained = now - self._first[0], share - self._first[1]
        left = f", about {_span(seconds * (1 - share) / gained)} left" if gained > 0 and share < 1 else ""
        self._line = Text(f"{self.name}: {share:.0%}, {note}{left}")
        if self._live is not None:
            self._live.update(self._line, refresh=True)
        elif now - self._printed >= _EVERY:
            self._print(now)

    def close(self) -> None:
        """Leaves the last line on the screen."""
        if self._live is not None:
            self._live.stop()
        else:
            self._print(time.monotonic())

    def _print(self, now: float) -> None:
        self._printed = now
        self._console.print(self._line, soft_wrap=True)


def _span(seconds: float) -> str:
    """A span of time in words of the size that matters."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
