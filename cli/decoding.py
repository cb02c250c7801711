"""Commands that decode: generate, chat, trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..eval.options import (
    NANO,
    CheckpointArgument,
    CompareOption,
    DecodingOptions,
    LoadingOptions,
    ModelOption,
    PromptOptions,
    TraceOptions,
    has_no_chat_template,
)
from .application import JsonOption, command, console, print_json

if TYPE_CHECKING:
    from ..eval.trace.record import Request


@command(
    "wedlm generate 'Count from 5 to 50 by 5.'",
    "wedlm generate 'Count from 5 to 50 by 5.' --verification exact --set top_k=20",
    "wedlm generate --model my-wedlm --file prompts.txt --json > answers.json",
)
def generate(
    prompts: PromptOptions,
    decoding: DecodingOptions,
    loading: LoadingOptions,
    model: ModelOption = None,
    compare: CompareOption = True,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts, streaming, and show what it took next to plain AR decoding of the same weights."""
    loaded, tokenizer, request = _asked(prompts, decoding, loading, model, compare)
    from ..eval.trace import answers

    decodings = answers.compare(loaded, tokenizer, request, console(quiet=as_json))
    if as_json:
        print_json({"answers": answers.records(request.prompts, decodings), "decoders": answers.totals(decodings)})


def _asked(
    prompts: PromptOptions, decoding: DecodingOptions, loading: LoadingOptions, model: str | None, compare: bool
) -> tuple[Any, Any, Request]:
    """The model, its tokenizer, and what is to be decoded."""
    keywords, texts = decoding.keywords(), prompts.read()
    from ..eval.trace.record import Request

    loaded, tokenizer = loading.load(model)
    raw = prompts.raw or has_no_chat_template(tokenizer, model)
    return loaded, tokenizer, Request(texts, keywords, compare, raw, decoding.seed)


@command(
    "wedlm chat",
    "wedlm chat my-wedlm --verification exact --system 'Answer in one sentence.'",
    "wedlm chat my-base --adapter my-adapter --verification exact",
)
def chat(
    decoding: DecodingOptions,
    loading: LoadingOptions,
    checkpoint: CheckpointArgument = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Talk with a model: answers stream, and the cache is kept from turn to turn. /help lists what can be done."""
    keywords = decoding.keywords()
    import torch

    from ..apps.chat import run
    from ..apps.conversation import Conversation

    loaded, tokenizer = loading.load(checkpoint)
    if tokenizer.chat_template is None:
        name = checkpoint or NANO.name
        raise ValueError(f"{name!r} has no chat template: `wedlm generate --raw` continues texts with it.")
    torch.manual_seed(decoding.seed)
    if checkpoint is None:
        note = (
            "wedlm-nano answers prompts one by one, of six kinds: type /reset before the next. wedlm chat CHECKPOINT "
        )
        typer.echo(f"{note}talks with a model of yours.", err=True)
    run(Conversation(loaded, tokenizer, keywords, system), console())


@command(
    "wedlm trace 'Count down from 97 to 61 by 4.' --output page.html",
    "wedlm trace 'Count down from 97 to 61 by 4.' --terminal",
    "wedlm trace 'Count down from 97 to 61 by 4.' --save trace.json; wedlm trace --from trace.json",
)
def trace(
    context: typer.Context,
    prompts: PromptOptions,
    decoding: DecodingOptions,
    shown_as: TraceOptions,
    loading: LoadingOptions,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """See it decode: a page that replays a generation step by step, AR decoding beside it at the same clock."""
    _check_trace_options(context)
    output, save, source = shown_as.output, shown_as.save, shown_as.source
    if output is None and not shown_as.terminal:
        output = Path("build/trace.html")
    from ..eval.files import check_output

    written = [path for path in (save, output) if path is not None]
    files = [*written, *(path for path in (source, prompts.file) if path is not None)]
    for path in written:
        check_output(path, [other for other in files if other is not path])
    from ..eval.trace import answers, page, record, saved, terminal

    if source is not None:
        shown = saved.load(source)
        if model is not None:
            record.check_model(shown, model, *loading.load(model))
    else:
        loaded, tokenizer, request = _asked(prompts, decoding, loading, model, shown_as.compare)
        name = model or NANO.name
        shown = record.record(loaded, tokenizer, request, model_name=name, repeats=shown_as.repeats, title="tracing")
    if save is not None:
        saved.save(shown, save)
    if output is not None:
        page.write_page(shown, output)
    out = console(quiet=as_json)
    if shown_as.terminal:
        terminal.replay_in_terminal(shown, out, pace=shown_as.pace)
    decodings, names = record.decodings(shown), list(map(str, written))
    out.print(answers.comparison_table(decodings))
    out.print(*names, sep="\n", highlight=False, soft_wrap=True)
    if as_json:
        print_json({"files": names, "decoders": answers.totals(decodings)})


def _check_trace_options(context: typer.Context) -> None:
    """Raises `ValueError` for options of `wedlm trace` that have no meaning beside the others."""
    params, given = context.params, dict[str, str]()
    for one in context.command.params:
        if one.name and str(context.get_parameter_source(one.name)).endswith("COMMANDLINE"):
            given[one.name] = f"`{one.opts[0]}`" if one.opts[0].startswith("-") else one.opts[0].upper()

    def refuse(names: set[str], why: str) -> None:
        if shown := [given[name] for name in given if name in names]:
            raise ValueError(f"{', '.join(shown)}: {why}")

    if params["source"] is not None:
        about_it = {"source", "output", "terminal", "pace", "model", "as_json", "debug"}
        about_it |= {"dtype", "device", "threads"} if params["model"] else set()
        refuse(given.keys() - about_it, "a saved trace (`--from`) is shown as it is, nothing is decoded.")
    elif params["strategy"] == "ar":
        raise ValueError("A trace shows parallel decoding: `--strategy` must be wedlm or block, got 'ar'.")
    if params["terminal"]:
        refuse({"as_json"}, "goes without `--terminal`.")
    else:
        refuse({"pace"}, "goes with `--terminal`; the page has its own speed.")
