"""The command `wedlm`: what each command is called and takes; the work is done in the sub-packages.

Imports of torch and of what needs it stand inside the functions: they take seconds, and `wedlm --help` needs none.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import is_dataclass, replace
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.models import OptionInfo

from .eval.options import (
    NANO,
    DecodingOptions,
    LoadingOptions,
    PromptOptions,
    RawOption,
    SetOption,
    has_no_chat_template,
    parse_settings,
    read_text,
)

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Checkpoint folder or Hub id; default: wedlm-nano.")
]
ModelArgument = Annotated[str | None, typer.Argument(help="Checkpoint folder or Hub id; default: wedlm-nano.")]
CompareOption = Annotated[bool, typer.Option(help="Decode each prompt with AR too, right after.")]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command of a function that has parameters of dataclass types: their fields become its options.

    A field is `Annotated[type, typer.Option(…)]`, as a parameter would be. The first line of the dataclass's docstring
    is the title of their panel in `--help`.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group: Any = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            groups[parameter.name] = group
            parameters += [_in_panel(field, group) for field in _fields(group)]
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in _fields(kind)})
        command(**values)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # where typer looks
    return run


def _fields(group: type) -> list[inspect.Parameter]:
    return list(inspect.signature(group, eval_str=True).parameters.values())


def _in_panel(field: inspect.Parameter, group: type) -> inspect.Parameter:
    kind, info = get_args(field.annotation)
    info = copy(info)
    if isinstance(info, OptionInfo):
        info.rich_help_panel = (group.__doc__ or "").partition("\n")[0].rstrip(".")
    return field.replace(annotation=Annotated[kind, info])


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
        except (OSError, ValueError) as error:
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


@app.command()
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


@app.command()
@with_options
def trace(
    context: typer.Context,
    prompts: PromptOptions,
    decoding: DecodingOptions,
    loading: LoadingOptions,
    model: ModelOption = None,
    compare: CompareOption = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; default: build/trace.html, none with --terminal.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="JSON file to keep the trace in.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Show this saved trace; --model checks that it is that model's.")
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Replay it here, too.")] = False,
    pace: Annotated[float, typer.Option(min=0, help="For --terminal: seconds that a forward stays in view.")] = 0.1,
    repeats: Annotated[int, typer.Option(min=1, help="The clock shows medians of so many runs.")] = 5,
) -> None:
    """See it decode: a page that replays a generation step by step, AR decoding beside it at the same clock."""
    _check_trace_options(context)
    if output is None and not terminal:
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
        request = Request(texts, keywords, compare, raw, decoding.seed)
        name = model or NANO.name
        shown = record(loaded, tokenizer, request, model_name=name, repeats=repeats, title="tracing")
    if save is not None:
        save_trace(shown, save)
    if output is not None:
        write_page(shown, output)
    console = _console()
    if terminal:
        replay_in_terminal(shown, console, pace=pace)
    console.print(comparison_table(decodings(shown)))
    for path in (save, output):
        if path is not None:
            typer.echo(path)


@app.command()
@with_options
def bench(
    loading: LoadingOptions,
    model: ModelArgument = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Your prompts, one a line; default: built-in tasks.")
    ] = None,
    raw: RawOption = False,
    random: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Random weights and prompts instead: qwen3-0.6b or 86m.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each built-in task.")] = 8,
    batch_sizes: Annotated[str, typer.Option(metavar="LIST", help="Prompts decoded together.")] = "1,4,16",
    decoders: Annotated[
        str, typer.Option(metavar="LIST", help="AR is always among them.")
    ] = "ar,block,wedlm,wedlm+exact,wedlm+typical",
    settings: SetOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 160,
    temperature: Annotated[float | None, typer.Option(help="Sample at it; default: greedy.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling and of random weights.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Times are medians of so many.")] = 5,
    long: Annotated[
        bool, typer.Option("--long", help="Time and memory of a step after 256 and after 4,096 new tokens, too.")
    ] = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="vLLM's AR decoding of the same weights, too.")] = False,
    vllm_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python that has vLLM, if not this one; implies --vllm.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")] = Path("build/bench"),
) -> None:
    """Measure speed and memory of every way of decoding, taking turns on the same weights and prompts."""
    from .eval.bench import Request, run
    from .eval.bench_subject import checkpoint_subject, random_subject

    if random is not None and (model is not None or file is not None):
        raise ValueError("`--random` brings its own weights and prompts: leave MODEL and `--file` out.")
    request = Request(
        batch_sizes=_numbers("--batch-sizes", batch_sizes, int),
        decoders=decoders.split(","),
        settings=parse_settings(settings),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        repeats=repeats,
        is_long=long,
        vllm_python=vllm_python or (sys.executable if vllm else None),
    )
    texts = None if file is None else PromptOptions(file=file).read()
    if random is not None:
        subject = random_subject(random, loading.prepare(), loading.dtype, max(request.batch_sizes), seed)
    else:
        checkpoint = model or str(NANO)
        loaded, tokenizer = loading.load(checkpoint)
        raw = raw or (texts is not None and has_no_chat_template(tokenizer, checkpoint))
        subject = checkpoint_subject(loaded, tokenizer, checkpoint, texts, raw=raw, count=count)
    run(subject, request, output, _console())


@app.command()
@with_options
def calibrate(
    loading: LoadingOptions,
    model: Annotated[str, typer.Argument(help="Checkpoint folder or Hub id.")],
    file: Annotated[Path, typer.Option("--file", "-f", help="Your prompts, one a line; - is standard input.")],
    agreement: Annotated[
        float, typer.Option(help="Wanted share of new tokens that AR decoding would have chosen too.")
    ] = 0.99,
    write: Annotated[
        bool, typer.Option("--write", help="Store the settings in the checkpoint's generation_config.json.")
    ] = False,
    raw: RawOption = False,
    windows: Annotated[str, typer.Option(metavar="LIST", help="W to try.")] = "4,8,16",
    thresholds: Annotated[str, typer.Option(metavar="LIST", help="τ to try, nats.")] = "0.1,0.2,0.4,0.8",
    penalties: Annotated[str, typer.Option(metavar="LIST", help="λ to try, nats per position.")] = "0.02,0.1",
    budgets: Annotated[str, typer.Option(metavar="LIST", help="Entropy budgets to try, nats.")] = "0.1,0.4,1.6",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 160,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together where time does not count.")] = 8,
) -> None:
    """Find the fastest settings that agree with AR decoding well enough on your own prompts."""
    from .eval.calibrate import Grid, check_request, run_calibration, show
    from .eval.measure import encode_text
    from .eval.sweep import write_settings

    grid = Grid(
        windows=_numbers("--windows", windows, int),
        thresholds=_numbers("--thresholds", thresholds, float),
        penalties=_numbers("--penalties", penalties, float),
        budgets=_numbers("--budgets", budgets, float),
    )
    texts = PromptOptions(file=file).read()
    check_request(len(texts), agreement)
    if write and not Path(model).is_dir():
        raise ValueError(f"`--write` needs a checkpoint folder, got {model!r}.")
    loaded, tokenizer = loading.load(model)
    raw = raw or has_no_chat_template(tokenizer, model)
    found = run_calibration(
        loaded,
        tokenizer,
        [encode_text(loaded, tokenizer, text, raw) for text in texts],
        agreement=agreement,
        grid=grid,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        title="settings",
    )
    show(found, agreement, _console())
    if found.chosen is None:
        raise typer.Exit(1)
    if write:
        write_settings(Path(model), found.settings())


@app.command()
@with_options
def report(
    loading: LoadingOptions,
    model: ModelArgument = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Your data: .jsonl with `messages` or `prompt`, perhaps `answer` and `task`; else one prompt a line; "
            "- is standard input. Default: built-in tasks.",
        ),
    ] = None,
    raw: RawOption = False,
    output: Annotated[
        Path, typer.Option(help="Folder for report.html, report.json, report.csv and partial results.")
    ] = Path("build/report"),
    windows: Annotated[str, typer.Option(metavar="LIST", help="W of the sweep.")] = "6,16",
    thresholds: Annotated[str, typer.Option(metavar="LIST", help="τ, nats.")] = "0.1,0.2,0.4,0.6,0.8,1.0",
    penalties: Annotated[str, typer.Option(metavar="LIST", help="λ, nats per position.")] = "0,0.02,0.1",
    draft_thresholds: Annotated[str, typer.Option(metavar="LIST", help="τ of drafts to verify, nats.")] = "0.4,0.8",
    decoders: Annotated[
        str, typer.Option(metavar="LIST", help="AR is always among them.")
    ] = "block,wedlm,wedlm+typical,wedlm+exact",
    count: Annotated[int, typer.Option(min=1, help="Headline prompts of each task.")] = 100,
    sweep_count: Annotated[int, typer.Option(min=1, help="Other prompts of each task, for the sweep.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the built-in prompts.")] = 1,
    timed: Annotated[int, typer.Option(min=1, help="Headline prompts of each task that are timed.")] = 10,
    sweep_timed: Annotated[int, typer.Option(min=1, help="Prompts of each task that are timed in the sweep.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times are medians of so many.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together where time does not count.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 160,
    settings: SetOption = None,
    max_loss: Annotated[
        float, typer.Option(min=0, help="Points that a picked setting may lose to AR on a task.")
    ] = 1.0,
    write: Annotated[
        bool, typer.Option("--write", help="Store the picked settings in the checkpoint; the headline shows them.")
    ] = False,
    fill: Annotated[
        list[Path] | None, typer.Option(help="Markdown file whose measured blocks are replaced; may be repeated.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures as PNG.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Drop what the output folder holds.")] = False,
) -> None:
    """One page on speed and quality against AR decoding, by a sweep over the settings; can be stopped and resumed."""
    from .eval.report import Request, run
    from .eval.report_data import builtin_data, file_data
    from .eval.sweep import Grid, decoders_named

    checkpoint = model or str(NANO)
    if write and not Path(checkpoint).is_dir():
        raise ValueError(f"`--write` needs a checkpoint folder, got {checkpoint!r}.")
    request = Request(
        output=output,
        grid=Grid(
            windows=_numbers("--windows", windows, int),
            thresholds=_numbers("--thresholds", thresholds, float),
            penalties=_numbers("--penalties", penalties, float),
            draft_thresholds=_numbers("--draft-thresholds", draft_thresholds, float),
            decoders=decoders_named(decoders.split(",")),
        ),
        timed=timed,
        sweep_timed=sweep_timed,
        repeats=repeats,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        max_loss=max_loss,
        settings=parse_settings(settings),
        write_to=Path(checkpoint) if write else None,
        fill_files=fill or (),
        figure_folder=figures,
        restart=restart,
        raw=raw,
    )
    if file is None:
        data = builtin_data(count, sweep_count, seed)
    else:
        data = file_data("standard input" if str(file) == "-" else str(file), read_text(file), count, sweep_count)
    loaded, tokenizer = loading.load(checkpoint)
    if not raw and has_no_chat_template(tokenizer, checkpoint):
        request = replace(request, raw=True)
    name = Path(checkpoint).name if Path(checkpoint).is_dir() else checkpoint
    console = _console(stderr=True)
    try:
        made = run(loaded, tokenizer, name, data, request, seed=seed if file is None else None, console=console)
    except KeyboardInterrupt:
        typer.echo(f"Stopped; what was measured is kept in {output}. The same command goes on from here.", err=True)
        raise typer.Exit(130) from None
    if write and made["sweep"]["chosen"] is None:
        raise typer.Exit(1)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(context: typer.Context) -> None:
    """Fine-tune from a recipe: wedlm train RECIPE.yaml --setting value …; --help lists the settings."""
    if find_spec("trl") is None:
        raise ValueError("Training needs trl: pip install 'wedlm-hf[train]'.")
    from .training.train import main as run_training

    run_training(context.args)


@app.command()
def curves(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of training runs, or trainer_state.json files; several side by side.")
    ],
    output: Annotated[Path, typer.Option(help="Picture to write, .png or .svg.")] = Path("curves.png"),
) -> None:
    """Draw training curves from a trainer's log: losses, accuracy by offset, tokens per forward, throughput."""
    from .eval.curves import draw, load_runs

    loaded = load_runs(runs)
    draw(loaded, output)
    for run in loaded:
        if missing := run.missing():
            typer.echo(f"{run.name} has not logged: {', '.join(missing)}.")
    typer.echo(f"Wrote {output}.")


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


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """Numbers with commas between them, each once, ascending. Raises `ValueError` for anything else."""
    try:
        return sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"`{option}` takes numbers with commas between them, got {text!r}.") from None


def _console(stderr: bool = False) -> Console:
    """A console without markup (a path may hold `[/b]`) that shows its text where `COLUMNS` is 0, too."""
    console = Console(stderr=stderr, markup=False)
    return console if console.width > 1 else Console(stderr=stderr, markup=False, width=80)


if __name__ == "__main__":
    main()
