"""The command `wedlm`: what each command is called and takes; the work is done in the sub-packages.

Imports of torch and of what needs it stand inside the functions: they take seconds, and `wedlm --help` needs none.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from .eval.options import (
    NANO,
    CalibrationOptions,
    CompareOption,
    DecodingOptions,
    LoadingOptions,
    PromptOptions,
    RawOption,
    TraceOptions,
    has_no_chat_template,
    read_prompt_file,
    with_options,
)
from .eval.report.request import ReportRequest
from .training.adapt_config import AdaptConfig

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Checkpoint folder or Hub id; default: wedlm-nano.")
]


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
        _console(stderr=True).show_cursor()
        sys.exit(128 + received[0])


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


@app.command(epilog="Example: wedlm convert Qwen/Qwen2.5-0.5B my-wedlm")
def convert(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of a checkpoint, or a GGUF file.")],
    output_dir: Annotated[Path, typer.Argument(help="Folder to write to; new or empty.")],
    mask_token: Annotated[
        str | None, typer.Option(help="Text of the mask token; default: the tokenizer's own, else <|mask|>.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Name of a GGUF file in that folder or Hub id.")] = None,
) -> None:
    """Make a WeDLM checkpoint of a Llama, Mistral, Qwen2, Qwen2.5 or Qwen3 model: its weights, and a mask token."""
    from .modeling_wedlm import convert as convert_checkpoint

    conversion = convert_checkpoint(source, output_dir, mask_token=mask_token, revision=revision, gguf_file=gguf_file)
    typer.echo(f"{output_dir}: {conversion}")


@app.command(epilog="Example: wedlm generate 'Count from 5 to 50 by 5.' --verification exact --set top_k=20")
@with_options
def generate(
    prompts: PromptOptions,
    decoding: DecodingOptions,
    loading: LoadingOptions,
    model: ModelOption = None,
    compare: CompareOption = True,
) -> None:
    """Answer prompts, streaming, and show what it took next to plain AR decoding of the same weights."""
    keywords = decoding.keywords()
    texts = prompts.read()
    from .eval.trace.answers import compare as compare_decoders
    from .eval.trace.record import Request

    loaded, tokenizer = loading.load(model)
    raw = prompts.raw or has_no_chat_template(tokenizer, model)
    compare_decoders(loaded, tokenizer, Request(texts, keywords, compare, raw, decoding.seed), _console())


@app.command(epilog="Example: wedlm trace 'Count down from 97 to 61 by 4.' --output page.html")
@with_options
def trace(
    context: typer.Context,
    prompts: PromptOptions,
    decoding: DecodingOptions,
    shown_as: TraceOptions,
    loading: LoadingOptions,
    model: ModelOption = None,
) -> None:
    """See it decode: a page that replays a generation step by step, AR decoding beside it at the same clock."""
    _check_trace_options(context)
    output, save, source = shown_as.output, shown_as.save, shown_as.source
    if output is None and not shown_as.terminal:
        output = Path("build/trace.html")
    from .eval.files import check_output

    files = [path for path in (output, save, source, prompts.file) if path is not None]
    for path in (output, save):
        if path is not None:
            check_output(path, [other for other in files if other is not path])
    from .eval.trace.answers import comparison_table
    from .eval.trace.page import write_page
    from .eval.trace.record import Request, check_model, decodings, record
    from .eval.trace.saved import load
    from .eval.trace.saved import save as save_trace
    from .eval.trace.terminal import replay_in_terminal

    if source is not None:
        shown = load(source)
        if model is not None:
            check_model(shown, model, *loading.load(model))
    else:
        keywords = decoding.keywords()
        texts = prompts.read()
        loaded, tokenizer = loading.load(model)
        raw = prompts.raw or has_no_chat_template(tokenizer, model)
        request = Request(texts, keywords, shown_as.compare, raw, decoding.seed)
        name = model or NANO.name
        shown = record(loaded, tokenizer, request, model_name=name, repeats=shown_as.repeats, title="tracing")
    if save is not None:
        save_trace(shown, save)
    if output is not None:
        write_page(shown, output)
    console = _console()
    if shown_as.terminal:
        replay_in_terminal(shown, console, pace=shown_as.pace)
    console.print(comparison_table(decodings(shown)))
    for path in (save, output):
        if path is not None:
            typer.echo(path)


@app.command(epilog="Example: wedlm calibrate my-wedlm --file prompts.txt --agreement 0.99 --write")
@with_options
def calibrate(
    loading: LoadingOptions,
    model: Annotated[str, typer.Argument(help="Checkpoint folder or Hub id.")],
    file: Annotated[Path, typer.Option("--file", "-f", help="Your prompts, one a line; - is standard input.")],
    options: CalibrationOptions,
    raw: RawOption = False,
) -> None:
    """Find the fastest settings that agree with AR decoding well enough on your own prompts."""
    from .eval.calibrate import calibrate as find_settings
    from .eval.calibrate import show
    from .eval.prompts import encode_prompt, split_prompts
    from .eval.sweep import write_settings

    prompts, _ = read_prompt_file(file)
    split_prompts(prompts)  # refused here, before any weights are read
    if options.write and not Path(model).is_dir():
        raise ValueError(f"`--write` needs a checkpoint folder, got {model!r}.")
    loaded, tokenizer = loading.load(model)
    raw = raw or has_no_chat_template(tokenizer, model)
    encoded = [encode_prompt(loaded, tokenizer, prompt, raw=raw) for prompt in prompts]
    found = find_settings(loaded, tokenizer, encoded, options, title="settings")
    show(found, options.agreement, _console())
    if found.chosen is None:
        raise typer.Exit(1)
    if options.write:
        write_settings(Path(model), found.settings)


@app.command(epilog="Example: wedlm report my-wedlm --file data.jsonl")
@with_options
def report(request: ReportRequest, loading: LoadingOptions) -> None:
    """One page on speed and quality against AR decoding, by a sweep over the settings; can be stopped and resumed."""
    from .eval.report.run import run

    prompts, source = request.prompts()
    loaded, tokenizer = loading.load(request.model)
    has_no_chat_template(tokenizer, request.model)
    try:
        picked = run(request, loaded, tokenizer, prompts, source, _console(stderr=True))
    except KeyboardInterrupt:
        kept = f"Stopped; what was measured is kept in {request.output}. The same command goes on from here."
        typer.echo(kept, err=True)
        raise typer.Exit(130) from None
    if request.write and picked is None:
        raise typer.Exit(1)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(context: typer.Context) -> None:
    """Fine-tune from a recipe: wedlm train RECIPE.yaml --setting value …; --help lists the settings."""
    if find_spec("trl") is None:
        raise ValueError("Training needs trl: pip install 'wedlm-hf[train]'.")
    from .training.train import main as run_training

    run_training(context.args)


@app.command(epilog="Example: wedlm adapt HuggingFaceTB/SmolLM2-135M-Instruct my-adapter --minutes 60")
@with_options
def adapt(
    base: Annotated[str, typer.Argument(help="Folder or Hub id of a checkpoint, or a GGUF file.")],
    output_dir: Annotated[Path, typer.Argument(help="Folder for the adapter; new, empty, or of a run to go on with.")],
    config: AdaptConfig,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
) -> None:
    """Train a mask adapter: any AR model's own text in fewer forwards, from nothing but the model.

    May be stopped at any moment: the same command goes on. Needs a budget, --minutes or --tokens.
    """
    import torch

    from .eval.adapter_table import measure_adapter
    from .training.adapt import adapt as train_adapter

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        train_adapter(base, output_dir, config, measure=measure_adapter, console=_console(stderr=True))
    except KeyboardInterrupt:
        typer.echo(f"Stopped; what was done is kept in {output_dir}. The same command goes on from here.", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"The adapter and its model card are in {output_dir}.")


def _check_trace_options(context: typer.Context) -> None:
    """Raises `ValueError` for options of `wedlm trace` that have no meaning beside the others."""
    given = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    params = context.params

    def refuse(names: set[str], why: str) -> None:
        if names:
            shown = ", ".join("PROMPTS" if name == "prompts" else f"`--{name.replace('_', '-')}`" for name in names)
            raise ValueError(f"{shown}: {why}")

    if params["source"] is not None:
        about_it = {"source", "output", "terminal", "pace", "model"} | (
            {"dtype", "device", "threads"} & given if params["model"] else set()
        )
        refuse(given - about_it, "a saved trace (`--from`) is shown as it is, nothing is decoded.")
    elif params["strategy"] == "ar":
        raise ValueError("A trace shows parallel decoding: `--strategy` must be wedlm or block, got 'ar'.")
    if not params["terminal"]:
        refuse(given & {"pace"}, "goes with `--terminal`; the page has its own speed.")


def _console(stderr: bool = False) -> Console:
    """A console without markup (a path may hold `[/b]`) that shows its text where `COLUMNS` is 0, too."""
    console = Console(stderr=stderr, markup=False)
    return console if console.width > 1 else Console(stderr=stderr, markup=False, width=80)


if __name__ == "__main__":
    main()
