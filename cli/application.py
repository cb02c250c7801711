"""The command line without its commands: how any of them starts and ends."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """Says in one line what is wrong with a request."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command.

        Raises:
            typer.Exit: with code 2 for a request that is wrong or cannot be honoured, 130 for Ctrl-C.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (OSError, ValueError, ImportError) as error:
            text = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode("utf-8")
            typer.echo(f"Error: {text}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("Stopped.", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    name="wedlm",
    help="WeDLM: diffusion language models that decode in parallel under causal attention.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs the command line. SIGTERM ends a command as Ctrl-C does: files stay whole, the cursor comes back.

    Raises:
        SystemExit: with the shell's codes for signals, 130 for Ctrl-C and 143 for SIGTERM.
    """
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def lost(unraisable: Any) -> None:
        """Python drops what is raised while it destroys an object: then once more, a moment later."""
        if received and isinstance(unraisable.exc_value, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main, [received[0]]).start()
        else:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = lost
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` and a script's `&` ask for
            signal.signal(number, stop)
    try:
        app()
    except (SystemExit, Exception, KeyboardInterrupt) as end:
        is_good = isinstance(end, SystemExit) and not end.code
        if is_good or not received:
            raise
        # Whatever the interrupted code has made of it.
        console(stderr=True).show_cursor()
        sys.exit(128 + received[0])


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(import_module("..", __package__).__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def console(stderr: bool = False) -> Console:
    """A console without markup (a path may hold `[/b]`) that shows its text where `COLUMNS` is 0, too."""
    sized = Console(stderr=stderr, markup=False)
    return sized if sized.width > 1 else Console(stderr=stderr, markup=False, width=80)
