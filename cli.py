"""The command `wedlm`.

Imports of torch and of our own packages stand inside the functions: they take seconds, and `wedlm --help` needs none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

NANO = Path(__file__).parent / "examples" / "wedlm-nano"

DTYPES = ("auto", "float32", "bfloat16", "float16")

DEMO_PROMPTS = (
    "Count down from 97 to 61 by 4.",
    "Anna has 347 apples. Ben brings 85 more. Anna sells 218. How many apples does Anna have now?",
    "Sort from largest to smallest: 31, 7, 86, 12, 54, 23",
    "Turn this text into JSON: Clara is 34. She works as a pilot. She lives in Lisbon. Clara has a cat and a dog.",
    "Emma lives in Paris. Jack has a horse. Emma likes soup. Jack is 41 years old. Where does Emma live?",
    'Complete this Python code:\ndef count_equal(scores, limit):\n    """Count the scores equal to limit."""',
)

# Options that several commands have.
PromptsArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Default: the lines of standard input where it is piped, else a few built-in prompts."),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Checkpoint folder or Hub id; default: wedlm-nano.")
]
FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="Prompts, one a line; - is standard input.")]
StrategyOption = Annotated[str, typer.Option(help="wedlm, block or ar.")]
WindowSizeOption = Annotated[int | None, typer.Option(help="W, slots predicted at a time.")]
EntropyThresholdOption = Annotated[float | None, typer.Option(help="τ, nats: fill the masks below it.")]
DistancePenaltyOption = Annotated[float | None, typer.Option(help="λ, nats per position.")]
EntropyBudgetOption = Annotated[
    float | None, typer.Option(help="Nats; instead of τ: fill masks while their sum stays within it.")
]
VerificationOption = Annotated[
    str | None,
    typer.Option(help="none; exact: the output of AR decoding; typical: what AR finds plausible."),
]
AcceptanceEpsilonOption = Annotated[float | None, typer.Option(help="ε of --verification typical.")]
AcceptanceDeltaOption = Annotated[float | None, typer.Option(help="δ of --verification typical.")]
AdaptiveWindowOption = Annotated[
    bool | None, typer.Option(help="Let the window follow what it pays; default: with --verification exact.")
]
SlotCostOption = Annotated[
    float | None, typer.Option(help="For --adaptive-window: cost of one more slot; see `wedlm calibrate`.")
]
MaxNewTokensOption = Annotated[int | None, typer.Option(help="Longest answer, in tokens.")]
SampleOption = Annotated[bool, typer.Option("--sample", help="Draw tokens at random instead of the likeliest.")]
TemperatureOption = Annotated[float | None, typer.Option(help="Temperature; implies --sample.")]
SeedOption = Annotated[int, typer.Option(help="Seed of --sample.")]
RawOption = Annotated[bool, typer.Option("--raw", help="Continue the prompts as they are, without a chat template.")]
CompareOption = Annotated[bool, typer.Option(help="Decode each prompt with AR too, right after.")]
DeviceOption = Annotated[str | None, typer.Option(help="Such as cpu or cuda; default: cuda if there is one.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")]

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
    context: typer.Context,
    prompts: PromptsArgument = None,
    model: ModelOption = None,
    file: FileOption = None,
    strategy: StrategyOption = "wedlm",
    window_size: WindowSizeOption = None,
    entropy_threshold: EntropyThresholdOption = None,
    distance_penalty: DistancePenaltyOption = None,
    entropy_budget: EntropyBudgetOption = None,
    verification: VerificationOption = None,
    acceptance_epsilon: AcceptanceEpsilonOption = None,
    acceptance_delta: AcceptanceDeltaOption = None,
    adaptive_window: AdaptiveWindowOption = None,
    slot_cost: SlotCostOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    seed: SeedOption = 0,
    raw: RawOption = False,
    compare: CompareOption = True,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Answer prompts, streaming, and show what it took next to plain AR decoding of the same weights.

    Settings that are left out are those of the checkpoint's generation_config.json.
    """
    options = _decoding_options(context)
    with _errors_in_one_line():
        texts = _prompts(prompts or [], file)
        from .eval.compare import compare as compare_decoders

        loaded, tokenizer, raw = _load_to_decode(context, options)
        compare_decoders(loaded, tokenizer, texts, options, console=Console(), with_ar=compare, raw=raw, seed=seed)


@app.command()
def trace(
    context: typer.Context,
    prompts: PromptsArgument = None,
    model: ModelOption = None,
    file: FileOption = None,
    strategy: StrategyOption = "wedlm",
    window_size: WindowSizeOption = None,
    entropy_threshold: EntropyThresholdOption = None,
    distance_penalty: DistancePenaltyOption = None,
    entropy_budget: EntropyBudgetOption = None,
    verification: VerificationOption = None,
    acceptance_epsilon: AcceptanceEpsilonOption = None,
    acceptance_delta: AcceptanceDeltaOption = None,
    adaptive_window: AdaptiveWindowOption = None,
    slot_cost: SlotCostOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    seed: SeedOption = 0,
    raw: RawOption = False,
    compare: CompareOption = True,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; default: build/trace.html, none with --terminal.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="JSON file to keep the trace in.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Show this saved trace; --model checks that it is that model's.")
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show it here: live, or again if it is saved, or written to a page.")
    ] = False,
    pace: Annotated[float, typer.Option(min=0, help="For --terminal: seconds that a forward stays in view.")] = 0.1,
    repeats: Annotated[int, typer.Option(min=1, help="The clock shows medians of so many runs.")] = 5,
) -> None:
    """See it decode: a page that replays a generation step by step, AR decoding beside it at the same clock."""
    with _errors_in_one_line():
        _check_trace_options(context)
        if output is None and not terminal:
            output = Path("build/trace.html")
        for path in (output, save):
            if path is not None:
                _check_file(path)
        from .eval.trace import check_model, load, record, totals
        from .eval.trace import save as save_trace

        if source is not None:
            shown = load(source)
            if model is not None:
                check_model(shown, model, *_load(model, _prepare_device(device, threads)))
        else:
            options = _decoding_options(context)
            texts = _prompts(prompts or [], file)
            loaded, tokenizer, raw = _load_to_decode(context, options)
            if output is None and save is None:
                from .eval.trace_terminal import decode_in_terminal

                how: dict[str, Any] = {"with_ar": compare, "raw": raw, "seed": seed, "pace": pace}
                decode_in_terminal(loaded, tokenizer, texts, options, Console(), **how)
                return
            name = model or NANO.name
            how = {"with_ar": compare, "raw": raw, "seed": seed, "repeats": repeats, "title": "tracing"}
            shown = record(loaded, tokenizer, texts, options, model_name=name, **how)
        if save is not None:
            save_trace(shown, save)
        if output is not None:
            from .eval.trace_page import write_page

            write_page(shown, output)
        console = Console()
        if terminal:
            from .eval.trace_terminal import replay_in_terminal

            replay_in_terminal(shown, console, pace=pace)
        from .eval.compare import comparison_table

        console.print(comparison_table(totals(shown)))
        for path in (save, output):
            if path is not None:
                typer.echo(path)


@app.command()
def bench(
    model: Annotated[str | None, typer.Argument(help="Checkpoint folder or Hub id; default: wedlm-nano.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Your prompts, one a line; default: built-in tasks.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take them as they are, without a chat template.")] = False,
    random: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Random weights and prompts instead: qwen3-0.6b or 86m.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each built-in task.")] = 8,
    batch_sizes: Annotated[str, typer.Option(metavar="LIST", help="Prompts decoded together.")] = "1,4,16",
    decoders: Annotated[
        str, typer.Option(metavar="LIST", help="AR is always among them.")
    ] = "ar,block,wedlm,wedlm+exact,wedlm+typical",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Instead of the checkpoint's setting."),
    ] = None,
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
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda; default: cuda if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")] = Path("build/bench"),
) -> None:
    """Measure speed and memory of every way of decoding, taking turns on the same weights and prompts."""
    with _errors_in_one_line():
        from .eval.bench import Request, run
        from .eval.bench_subject import checkpoint_subject, random_subject

        if random is not None and (model is not None or file is not None):
            raise ValueError("`--random` brings its own weights and prompts: leave MODEL and `--file` out.")
        request = Request(
            batch_sizes=_numbers("--batch-sizes", batch_sizes, int),
            decoders=decoders.split(","),
            settings=_settings(settings or []),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            repeats=repeats,
            is_long=long,
            vllm_python=vllm_python or (sys.executable if vllm else None),
        )
        texts = None if file is None else _prompts([], file)
        device = _prepare_device(device, threads)
        if random is not None:
            subject = random_subject(random, device, dtype, max(request.batch_sizes), seed)
        else:
            checkpoint = model or str(NANO)
            loaded, tokenizer = _load(checkpoint, device, dtype)
            raw = raw or (texts is not None and _has_no_chat_template(tokenizer, checkpoint))
            subject = checkpoint_subject(loaded, tokenizer, checkpoint, texts, raw=raw, count=count)
        run(subject, request, output, Console())


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or Hub id.")],
    file: Annotated[Path, typer.Option("--file", "-f", help="Your prompts, one a line; - is standard input.")],
    agreement: Annotated[
        float, typer.Option(help="Wanted share of new tokens that AR decoding would have chosen too.")
    ] = 0.99,
    write: Annotated[
        bool, typer.Option("--write", help="Store the settings in the checkpoint's generation_config.json.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without a chat template.")] = False,
    windows: Annotated[str, typer.Option(metavar="LIST", help="W to try.")] = "4,8,16",
    thresholds: Annotated[str, typer.Option(metavar="LIST", help="τ to try, nats.")] = "0.1,0.2,0.4,0.8",
    penalties: Annotated[str, typer.Option(metavar="LIST", help="λ to try, nats per position.")] = "0.02,0.1",
    budgets: Annotated[str, typer.Option(metavar="LIST", help="Entropy budgets to try, nats.")] = "0.1,0.4,1.6",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 160,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together where time does not count.")] = 8,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda; default: cuda if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
) -> None:
    """Find the fastest settings that agree with AR decoding well enough on your own prompts."""
    with _errors_in_one_line():
        from .eval.calibrate import Grid, check_request, run_calibration, show
        from .eval.measure import encode_text
        from .eval.sweep import write_settings

        grid = Grid(
            windows=_numbers("--windows", windows, int),
            thresholds=_numbers("--thresholds", thresholds, float),
            penalties=_numbers("--penalties", penalties, float),
            budgets=_numbers("--budgets", budgets, float),
        )
        texts = _prompts([], file)
        check_request(len(texts), agreement)
        if write and not Path(model).is_dir():
            raise ValueError(f"`--write` needs a checkpoint folder, got {model!r}.")
        loaded, tokenizer = _load(model, _prepare_device(device, threads))
        raw = raw or _has_no_chat_template(tokenizer, model)
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
        show(found, agreement, Console())
        if found.chosen is None:
            raise typer.Exit(1)
        if write:
            write_settings(Path(model), found.settings())


@app.command()
def report(
    model: Annotated[str | None, typer.Argument(help="Checkpoint folder or Hub id; default: wedlm-nano.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Your data: .jsonl with `messages` or `prompt`, perhaps `answer` and `task`; else one prompt a line; "
            "- is standard input. Default: built-in tasks.",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without a chat template.")] = False,
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
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Keyword of `generate` for every decoder, AR too."),
    ] = None,
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
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda; default: cuda if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
) -> None:
    """One page on speed and quality against AR decoding, by a sweep over the settings; can be stopped and resumed."""
    with _errors_in_one_line():
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
            settings=_settings(settings or []),
            write_to=Path(checkpoint) if write else None,
            fill_files=fill or (),
            figure_folder=figures,
            restart=restart,
            raw=raw,
        )
        if file is None:
            data = builtin_data(count, sweep_count, seed)
        else:
            text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
            data = file_data("standard input" if str(file) == "-" else str(file), text, count, sweep_count)
        loaded, tokenizer = _load(checkpoint, _prepare_device(device, threads), dtype)
        if not raw and _has_no_chat_template(tokenizer, checkpoint):
            request = replace(request, raw=True)
        name = Path(checkpoint).name if Path(checkpoint).is_dir() else checkpoint
        console = Console(stderr=True)
        try:
            made = run(loaded, tokenizer, name, data, request, seed=seed if file is None else None, console=console)
        except KeyboardInterrupt:
            typer.echo(
                f"Stopped; what was measured is kept in {output}. The same command goes on from here.", err=True
            )
            raise typer.Exit(130) from None
        if write and made["sweep"]["chosen"] is None:
            raise typer.Exit(1)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(context: typer.Context) -> None:
    """Fine-tune from a recipe: wedlm train [recipe.yaml] [--setting value …]; --help lists the settings."""
    with _errors_in_one_line():
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

    with _errors_in_one_line():
        loaded = load_runs(runs)
        draw(loaded, output)
    for run in loaded:
        if missing := run.missing():
            typer.echo(f"{run.name} has not logged: {', '.join(missing)}.")
    typer.echo(f"Wrote {output}.")


DECODING_OPTIONS = (
    "strategy",
    "window_size",
    "entropy_threshold",
    "distance_penalty",
    "entropy_budget",
    "verification",
    "acceptance_epsilon",
    "acceptance_delta",
    "adaptive_window",
    "slot_cost",
    "max_new_tokens",
    "temperature",
)


def _decoding_options(context: typer.Context) -> dict[str, Any]:
    """Keywords of `generate` that were given on the command line."""
    given = {name: context.params[name] for name in DECODING_OPTIONS if context.params[name] is not None}
    return given | ({"do_sample": True} if context.params["sample"] or "temperature" in given else {})


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
            {"device", "threads"} & given if params["model"] else set()
        )
        refuse(given - about_it, "a saved trace (`--from`) is shown as it is, nothing is decoded.")
    elif params["strategy"] == "ar":
        raise ValueError("A trace shows parallel decoding: `--strategy` must be wedlm or block, got 'ar'.")
    if not params["terminal"]:
        refuse(given & {"pace"}, "goes with `--terminal`; the page has its own speed.")
    elif params["source"] is None and params["output"] is None and params["save"] is None:
        refuse(given & {"repeats"}, "decoding is shown live, once; `--save` or `--output` time it.")


def _check_file(path: Path) -> None:
    """Makes the folder of a file to be written. Raises `OSError` and `ValueError` if it cannot be written there."""
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; a file is to be written.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"There is no writing in the folder {str(path.parent)!r}.")


def _load_to_decode(context: typer.Context, options: dict[str, Any]) -> tuple[Any, Any, bool]:
    """Model and tokenizer of a command with generate's options, and whether prompts are taken as they are."""
    from .generation.settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings

    # Refused here, before gigabytes of weights are read.
    WeDLMGenerationSettings(**{name: value for name, value in options.items() if name in SETTING_NAMES})
    given = context.params
    checkpoint = given["model"] or str(NANO)
    model, tokenizer = _load(checkpoint, _prepare_device(given["device"], given["threads"]))
    return model, tokenizer, given["raw"] or _has_no_chat_template(tokenizer, checkpoint)


def _prepare_device(device: str | None, threads: int | None) -> str:
    """Sets the number of CPU threads; returns the device, which is there. Raises `ValueError` for one that is not."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"`--device {device}` is not available: {error}") from error
    return device


def _load(checkpoint: str, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Model and tokenizer of a folder or a Hub id. Raises `OSError` and `ValueError` for what cannot be loaded."""
    if not Path(checkpoint).is_dir() and (checkpoint.startswith((".", "~")) or Path(checkpoint).is_absolute()):
        raise FileNotFoundError(f"There is no checkpoint folder {checkpoint!r}.")
    from .eval.measure import load

    if dtype not in DTYPES:
        raise ValueError(f"`--dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    try:
        return load(checkpoint, device, dtype)
    except OSError as error:
        if Path(checkpoint).is_dir():
            raise
        raise OSError(f"{checkpoint!r} is no folder here and cannot be loaded as a Hub id: {error}") from error


def _has_no_chat_template(tokenizer: Any, checkpoint: str) -> bool:
    """Says so where it has none."""
    if tokenizer.chat_template is not None:
        return False
    typer.echo(f"{checkpoint!r} has no chat template: the prompts are continued as they are.", err=True)
    return True


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """Numbers with commas between them, each once, ascending. Raises `ValueError` for anything else."""
    try:
        return sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"`{option}` takes numbers with commas between them, got {text!r}.") from None


def _settings(given: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs; a value is JSON, or else text. Raises `ValueError` for anything else."""
    settings = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"`--set` takes NAME=VALUE, got {pair!r}.")
        try:
            settings[name.replace("-", "_")] = json.loads(value.lower() if value in ("True", "False") else value)
        except json.JSONDecodeError:
            settings[name.replace("-", "_")] = value
    return settings


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
