"""The command line without its commands: how any of them starts and ends.

Exit codes: 0 done; 1 the answer is no (nothing good enough was found, a check failed), or an unexpected failure; 2 the
request is wrong or cannot be honoured; as shells say it, 130 after Ctrl-C, 141 after a closed pipe, 143 after SIGTERM.
"""

import inspect
import json
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version as version_of
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from .options import UsageError, with_options

NO, WRONG, STOPPED, PIPE_CLOSED = 1, 2, 130, 141  # exit codes

_DEBUG = "wedlm_hf.debug"
_PATIENCE = 0.5  # seconds


class _Commands(TyperGroup):
    """Says in one line what is wrong with a request. Raises [`typer.Exit`] with the exit code, unless it is 0."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Reads the words before the command."""
        if os.environ.get("COLUMNS") in ("0", "1"):  # of a terminal that does not know its size
            del os.environ["COLUMNS"]
        with _reported({}):
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        with _reported(ctx.meta):
            return super().invoke(ctx)


@contextmanager
def _reported(meta: dict[str, Any]) -> Iterator[None]:
    """Says what went wrong inside, with `--debug` by a traceback too, and ends with the exit code for it."""
    try:
        try:
            yield
        finally:
            _flush()
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:
        _silence()
        raise typer.Exit(PIPE_CLOSED) from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # which rich has made of it
            raise typer.Exit(PIPE_CLOSED) from None
        raise
    except KeyboardInterrupt as stop:
        typer.echo(str(stop) or "Stopped.", err=True)
        raise typer.Exit(STOPPED) from None
    except UsageError as error:
        name = error.ctx.command_path if error.ctx else "wedlm"
        message = error.format_message().replace("Value error, ", "").rstrip(".")  # typer checks choices by pydantic
        _fail(f"{message}. `{name} --help` says what there is.", WRONG, meta)
    except (OSError, ValueError, ImportError) as error:
        _fail(" ".join([str(error), *_notes(error)]), WRONG, meta)
    except Exception as error:
        hint = "" if meta.get(_DEBUG) else " `--debug` shows where."
        text = " ".join([f"{type(error).__name__}: {str(error).rstrip('.')}.", *_notes(error)])
        _fail(f"{text}{hint}", NO, meta)


def _notes(error: Exception) -> list[str]:
    """What was added to an exception on its way."""
    return getattr(error, "__notes__", [])


def _fail(message: str, code: int, meta: dict[str, Any]) -> NoReturn:
    if meta.get(_DEBUG):
        traceback.print_exc()
    text = " ".join(message.split()).encode("utf-8", "backslashreplace").decode("utf-8")
    typer.echo(f"Error: {text}", err=True)
    raise typer.Exit(code)


def _flush() -> None:
    """Writes the buffered output. Python does so too late for an error to be reported. Raises `OSError`."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence()
        raise OSError(f"The output cannot be written: {error}.") from None


def _silence() -> None:
    """Discards what Python would still write when it ends: the reader of the output has closed it."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


app = typer.Typer(
    cls=_Commands,
    name="wedlm",
    help="WeDLM: diffusion language models that decode in parallel under causal attention.",
    epilog="Examples:\n\nwedlm generate 'Count from 5 to 50 by 5.'\n\nwedlm generate --help",
    pretty_exceptions_enable=False,
)


def command(*examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a function to the commands, with `examples` of calls at the end of its `--help`. Its parameters become
    options (see [`with_options`])."""
    title = "Example:" if len(examples) == 1 else "Examples:"
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption)

    def add(function: Callable[..., None]) -> Callable[..., None]:
        run = with_options(function, debug)  # the callback of `debug` handles it
        return app.command(epilog="\n\n".join((title, *map(escape, examples))))(run)

    return add


def main() -> None:
    """Runs the command line and ends the process with its exit code. SIGTERM ends a command as Ctrl-C does: files stay
    whole, the cursor comes back."""
    os.environ.setdefault("TQDM_DELAY", "3")  # seconds: what takes less shows no bar
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it warns of a kernel it may lack
    received: list[int] = []
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has no letter for τ
    try:
        with _stopped_by_signals(received):
            app()
    except (SystemExit, Exception, KeyboardInterrupt) as end:
        is_good = isinstance(end, SystemExit) and not end.code
        if is_good or not received:
            raise
        # The signal decides the exit code, whatever exception the interrupted code has turned it into.
        console(stderr=True).show_cursor()
        sys.exit(128 + received[0])


@contextmanager
def _stopped_by_signals(received: list[int]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise `KeyboardInterrupt`, and are added to `received`.

    Python drops what is raised while it destroys an object, and other people's code may drop it, too. So it is raised
    again every moment, except in code that handles it already.
    """

    def stop(number: int, frame: object) -> None:
        received.append(number)
        _insist_every(_PATIENCE)
        raise KeyboardInterrupt

    def insist(number: int, frame: object) -> None:
        handled = sys.exc_info()[1]  # of the code that is running: its `except`, `finally` and `with` clean up
        while handled is not None and not isinstance(handled, KeyboardInterrupt):
            handled = handled.__context__
        if handled is None:
            raise KeyboardInterrupt

    def drop(unraisable: Any) -> None:
        if not (received and isinstance(unraisable.exc_value, KeyboardInterrupt)):
            sys.__unraisablehook__(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, drop
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, insist)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as `nohup` and a script's `&` ask for
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _insist_every(0)  # last, so that none is left that would end the process while Python shuts down
        sys.unraisablehook = hook


def _insist_every(seconds: float) -> None:
    """Has SIGALRM sent at this interval; 0 for no more. Windows has none."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def _set_debug(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[_DEBUG] = True


DebugOption = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, is_eager=True, help="Show where an error comes from.")
]


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: DebugOption = False,
) -> None:
    if version:
        typer.echo(version_of("wedlm-hf"))
        raise typer.Exit
    if context.invoked_subcommand is None and (text := context.get_help()):  # typer may have printed it itself
        typer.echo(text)


def need(what: str, extra: str, *packages: str) -> None:
    """Raises `ValueError` for packages that are not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ValueError(f"{what} needs {', '.join(missing)}: pip install '.[{extra}]' in the clone.")


@contextmanager
def listen(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A socket that takes connections, and its address for clients. Raises `OSError` for a host that is not there or
    a port in use."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"Cannot listen on `--host {host} --port {port}`: {error}.") from None
    with listening:
        name, number = listening.getsockname()[:2]
        yield listening, f"http://{f'[{name}]' if ':' in name else name}:{number}"


def console(stderr: bool = False, quiet: bool = False) -> Console:
    """A console without markup: a path may hold `[/b]`. A quiet one is for commands that were asked for `--json`."""
    return Console(stderr=stderr, markup=False, quiet=quiet)


def print_json(results: Any) -> None:
    """Prints the results of a command for machines. Numbers that are not finite are null."""
    text = json.dumps(results, default=lambda value: value.item())  # of numpy
    finite = json.loads(text, parse_constant=lambda not_finite: None)
    typer.echo(json.dumps(finite, ensure_ascii=False))
