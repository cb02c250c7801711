"""Commands that decode: generate, chat, trace, report, demo, serve."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checkpoints import NANO
from ..eval.report.request import ReportRequest
from .application import NO, command, console, listen, need, print_json
from .options import (
    CheckpointArgument,
    CompareOption,
    DecodingOptions,
    JsonOption,
    LoadingOptions,
    ModelOption,
    PromptOptions,
    has_no_chat_template,
)

if TYPE_CHECKING:
    from ..eval.request import AnswerRequest

HostOption = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")]


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
    """Answer prompts, streaming, and show the cost next to AR decoding of the same weights."""
    loaded, tokenizer, request = _asked(prompts, decoding, loading, model, compare)
    from ..apps import generate as answers

    if model is None and prompts.prompts:
        from ..apps.smollm2 import how_to_try

        about = "wedlm-nano is a toy: it answers questions as `wedlm generate` without a prompt shows them, no others."
        typer.echo(f"{about} A real model:\n{how_to_try(prompts.prompts[0])}\n", err=True)
    decodings = answers.compare(loaded, tokenizer, request, console(quiet=as_json))
    if as_json:
        print_json({"answers": answers.records(request.prompts, decodings), "decoders": answers.totals(decodings)})


def _asked(
    prompts: PromptOptions, decoding: DecodingOptions, loading: LoadingOptions, model: str | None, compare: bool
) -> tuple[Any, Any, "AnswerRequest"]:
    """The model, its tokenizer, and the request."""
    keywords, texts = decoding.keywords(), prompts.read()
    from ..eval.request import AnswerRequest

    loaded, tokenizer = loading.load(model)
    raw = prompts.raw or has_no_chat_template(tokenizer, model)
    return loaded, tokenizer, AnswerRequest(texts, keywords, compare, raw, decoding.seed)


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
        about = "wedlm-nano answers prompts one by one, of six kinds: type /reset before the next."
        typer.echo(f"{about} `wedlm chat MODEL` talks with another model.", err=True)
    run(Conversation(loaded, tokenizer, keywords, system), console())


@command(
    "wedlm trace 'Count down from 97 to 61 by 4.' --output page.html",
    "wedlm trace 'Count down from 97 to 61 by 4.' --verification exact --save trace.json",
)
def trace(
    prompts: PromptOptions,
    decoding: DecodingOptions,
    loading: LoadingOptions,
    model: ModelOption = None,
    compare: CompareOption = True,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("build/trace.html"),
    save: Annotated[Path | None, typer.Option(help="JSON file for what the page shows.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times are medians of so many runs.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """See it decode: a page that replays a generation step by step, AR decoding beside it at the same clock."""
    if decoding.strategy == "ar":
        raise ValueError("A trace shows parallel decoding: `--strategy` must be wedlm or block, got 'ar'.")
    from ..checkpoints.files import check_output

    written = [path for path in (save, output) if path is not None]
    for path in written:
        check_output(path, [other for other in (*written, prompts.file) if other is not None and other is not path])
    from ..apps import generate as answers
    from ..checkpoints.files import write_text
    from ..eval.trace import page, record

    loaded, tokenizer, request = _asked(prompts, decoding, loading, model, compare)
    name = model or NANO.name
    shown = record.record(loaded, tokenizer, request, model_name=name, repeats=repeats, title="tracing")
    if save is not None:
        write_text(save, page.to_json(shown))
    write_text(output, page.page(shown))
    out, decodings, names = console(quiet=as_json), record.decodings(shown), list(map(str, written))
    out.print(answers.comparison_table(decodings))
    out.print(*names, sep="\n", highlight=False, soft_wrap=True)
    if as_json:
        print_json({"files": names, "decoders": answers.totals(decodings)})


@command(
    "wedlm report my-wedlm --file data.jsonl",
    "wedlm report my-wedlm --file data.jsonl --save-settings",
    "wedlm report my-base --adapter my-adapter --file data.jsonl --sweep-count 0 --decoders ar+lookup,wedlm+exact",
)
def report(request: ReportRequest, loading: LoadingOptions, as_json: JsonOption = False) -> None:
    """One page on speed and quality against AR decoding, by a sweep over the settings."""
    from ..eval.report.run import run

    prompts, source = request.prompts()
    loaded, tokenizer = loading.load(request.model)
    has_no_chat_template(tokenizer, request.model)
    picked = run(request, loaded, tokenizer, prompts, source, console(stderr=True))
    if as_json:
        typer.echo((request.output / "report.json").read_text(encoding="utf-8"))
    if request.save_settings and picked is None:
        raise typer.Exit(NO)


LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@command("wedlm demo", "wedlm demo --model my-wedlm --adapter my-adapter --port 8000")
def demo(
    loading: LoadingOptions,
    model: ModelOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 7860,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """A page to try it on: AR and WeDLM answer your prompt side by side, on one clock, with all settings."""
    need("The demo", "demo", "starlette", "uvicorn")
    from ..apps.demo import make_server

    is_local = host in LOCAL_HOSTS
    with listen(host, port) as (listening, address):
        server = make_server(loading.load, model, loading.adapter, is_local)
        typer.echo(f"{address}  (Ctrl-C stops it)")
        if not is_local:
            typer.echo("Everyone who reaches this address can load any checkpoint on this machine.", err=True)
        if browser:
            webbrowser.open(address)
        server.run(sockets=[listening])


@command(
    "wedlm serve my-wedlm --verification exact --port 8000",
    "wedlm serve my-base --adapter my-adapter --verification exact",
)
def serve(
    decoding: DecodingOptions,
    loading: LoadingOptions,
    checkpoint: CheckpointArgument = None,
    host: HostOption = "localhost",
    port: PortOption = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in requests; default: MODEL as it is written.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="WEDLM_API_KEY", help="Key that requests must have. Without one, all may ask."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of pages that may ask from a browser, or * for all; may be repeated."),
    ] = None,
) -> None:
    """Serve a model to OpenAI clients on this machine: chat and text completions, streaming or not.

    The decoding options are for requests that do not choose for themselves.
    """
    need("Serving", "serve", "fastapi", "openai", "uvicorn")
    settings = decoding.keywords()
    from ..serving.server import build_app, run

    with listen(host, port) as (listening, address):  # refused here, before any weights are read
        loaded, tokenizer = loading.load(checkpoint)
        import torch

        torch.manual_seed(decoding.seed)
        name = served_model_name or checkpoint or NANO.name
        app = build_app(name, loaded, tokenizer, settings, api_key, cors_origin or ())
        if api_key is None and host not in LOCAL_HOSTS:
            typer.echo("Everyone who reaches this address may ask: pass `--api-key`, or set WEDLM_API_KEY.", err=True)
        run(app, listening, f"{name}: {address}/v1")
