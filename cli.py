"""The command `wedlm`.

Imports of torch and of our own packages stand inside the functions: they take seconds, and `wedlm --help` needs none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

NANO = Path(__file__).parent / "examples" / "wedlm-nano"

DEMO_PROMPTS = (
    "Count down from 97 to 61 by 4.",
    "Anna has 347 apples. Ben brings 85 more. Anna sells 218. How many apples does Anna have now?",
    "Sort from largest to smallest: 31, 7, 86, 12, 54, 23",
    "Turn this text into JSON: Clara is 34. She works as a pilot. She lives in Lisbon. Clara has a cat and a dog.",
    "Emma lives in Paris. Jack has a horse. Emma likes soup. Jack is 41 years old. Where does Emma live?",
    'Complete this Python code:\ndef count_equal(scores, limit):\n    """Count the scores equal to limit."""',
)

app = typer.Typer(
    name="wedlm",
    help="WeDLM: diffusion language models that decode in parallel under causal attention.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(import_module(".", __package__).__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of a Qwen2, Qwen2.5 or Qwen3 checkpoint.")],
    output_dir: Annotated[Path, typer.Argument(help="Folder to write to; new or empty.")],
    mask_token: Annotated[
        str | None, typer.Option(help="Text of the mask token; default: the tokenizer's own, else <|mask|>.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
) -> None:
    """Make a WeDLM checkpoint from a Qwen2, Qwen2.5 or Qwen3 one: the same weights, and a mask token."""
    from .modeling_wedlm import convert as convert_checkpoint

    with _errors_in_one_line():
        conversion = convert_checkpoint(source, output_dir, mask_token=mask_token, revision=revision)
    typer.echo(f"{output_dir}: {conversion}")


@app.command()
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Default: the lines of standard input where it is piped, else a few built-in prompts."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Checkpoint folder or Hub id; default: wedlm-nano.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Prompts, one a line; - is standard input.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="wedlm, block or ar.")] = "wedlm",
    window_size: Annotated[int | None, typer.Option(help="W, slots predicted at a time.")] = None,
    entropy_threshold: Annotated[float | None, typer.Option(help="τ, nats: fill the masks below it.")] = None,
    distance_penalty: Annotated[float | None, typer.Option(help="λ, nats per position.")] = None,
    verification: Annotated[str | None, typer.Option(help="none, or exact for the output of AR decoding.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random instead of the likeliest.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Temperature; implies --sample.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of --sample.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts as they are, without a chat template.")
    ] = False,
    compare: Annotated[bool, typer.Option(help="Decode each prompt with AR too, right after.")] = True,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda; default: cuda if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
) -> None:
    """Answer prompts, streaming, and show what it took next to plain AR decoding of the same weights.

    Settings that are left out are those of the checkpoint's generation_config.json.
    """
    chosen: dict[str, Any] = {
        "strategy": strategy,
        "window_size": window_size,
        "entropy_threshold": entropy_threshold,
        "distance_penalty": distance_penalty,
        "verification": verification,
        "max_new_tokens": max_new_tokens,
        "do_sample": True if sample or temperature is not None else None,
        "temperature": temperature,
    }
    options = {name: value for name, value in chosen.items() if value is not None}
    with _errors_in_one_line():
        texts = _prompts(prompts or [], file)
        _answer(
            texts, model or str(NANO), options, raw=raw, with_ar=compare, seed=seed, device=device, threads=threads
        )


def _answer(
    prompts: list[str],
    checkpoint: str,
    options: dict[str, Any],
    *,
    raw: bool,
    with_ar: bool,
    seed: int,
    device: str | None,
    threads: int | None,
) -> None:
    """The work of `wedlm generate`."""
    if not Path(checkpoint).is_dir() and (checkpoint.startswith((".", "~")) or Path(checkpoint).is_absolute()):
        raise FileNotFoundError(f"There is no checkpoint folder {checkpoint!r}.")
    import torch

    from .eval.compare import compare
    from .eval.measure import load
    from .generation.settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings

    # Refused here, before gigabytes of weights are read.
    WeDLMGenerationSettings(**{name: value for name, value in options.items() if name in SETTING_NAMES})
    if threads is not None:
        torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"`--device {device}` is not available: {error}") from error
    try:
        model, tokenizer = load(checkpoint, device)
    except OSError as error:
        if Path(checkpoint).is_dir():
            raise
        raise OSError(f"{checkpoint!r} is no folder here and cannot be loaded as a Hub id: {error}") from error
    if not raw and tokenizer.chat_template is None:
        typer.echo(f"{checkpoint!r} has no chat template: the prompts are continued as they are.", err=True)
        raw = True
    compare(model, tokenizer, prompts, options, console=Console(), with_ar=with_ar, raw=raw, seed=seed)


def _prompts(given: list[str], file: Path | None) -> list[str]:
    """The prompts on the command line and in the file, or else those that are piped in, or else the built-in ones.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for a file without prompts, and for an empty prompt.
    """
    if any(not prompt.strip() for prompt in given):
        raise ValueError("A prompt must not be empty.")
    if file is not None:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        lines = _lines(text)
        if not lines:
            raise ValueError(f"There is no prompt in {'standard input' if str(file) == '-' else repr(str(file))}.")
        return given + lines
    if not given and sys.stdin is not None and not sys.stdin.isatty():
        given = _lines(sys.stdin.read())
    return given or list(DEMO_PROMPTS)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Turns what is wrong with the request into one line on standard error and exit code 2."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    main()
