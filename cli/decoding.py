"""Commands that decode: generate, report, serve."""

import shlex
import webbrowser
from dataclasses import replace
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
    loading_shown,
)
from .settings import checked

if TYPE_CHECKING:
    from ..eval.request import AnswerRequest

_WITHOUT_MASKS = (
    "{0} has no masks and decodes token by token, as with `--strategy ar` (`--set prompt_lookup_num_tokens=4` beside "
    "it drafts from the text). `wedlm adapt {0} OUT` trains a mask adapter for it."
)
REAL_MODEL = "--model build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --adapter examples/smollm2"
HostOption = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")]


@command(
    "wedlm generate 'Count from 5 to 50 by 5.'",
    "wedlm generate 'Count from 5 to 50 by 5.' --verification exact --set top_k=20",
    "wedlm generate --model my-wedlm --file prompts.txt --json > answers.json",
    "wedlm generate 'Count down from 97 to 61 by 4.' --trace page.html --trace trace.json",
)
def generate(
    prompts: PromptOptions,
    decoding: DecodingOptions,
    loading: LoadingOptions,
    model: ModelOption = None,
    compare: CompareOption = True,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Write every step: a page that replays it, or, to FILE.json, its data; may be repeated."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="With --trace: times are medians of so many runs.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts, streaming, and show the cost next to AR decoding of the same weights."""
    if trace and decoding.strategy == "ar":
        raise ValueError("A trace shows parallel decoding: `--strategy` must be wedlm or block, got 'ar'.")
    from ..checkpoints.files import check_output

    written = trace or []
    for place, path in enumerate(written):
        check_output(path, filter(None, [*written[place + 1 :], prompts.file]))
    loaded, tokenizer, request = _asked(prompts, decoding, loading, model, compare, needs_masks=bool(written))
    from ..eval import answers

    if model is None and prompts.prompts:
        about = "wedlm-nano is a toy: it answers questions as `wedlm generate` without a prompt shows them, no others."
        words = ["wedlm", "generate", prompts.prompts[0], *REAL_MODEL.split()]
        typer.echo(f"{about} A real model, in a clone, after `make real`:\n{shlex.join(words)}\n", err=True)
    out, results = console(quiet=as_json), dict[str, Any]()
    if not written:
        decodings = answers.compare(loaded, tokenizer, request, out)
    else:
        from ..checkpoints.files import write_text
        from ..eval.trace import page, record

        shown = record.record(
            loaded, tokenizer, request, model_name=model or NANO.name, repeats=repeats, title="tracing"
        )
        for path in written:
            write_text(path, page.to_json(shown) if path.suffix == ".json" else page.page(shown))
        decodings = record.decodings(shown)
        answers.show([recording.prompt for recording in shown.recordings], decodings, out)
        results = {"files": list(map(str, written))}
        out.print(*results["files"], sep="\n", highlight=False, soft_wrap=True)
    if as_json:
        results |= {"answers": answers.records(request.prompts, decodings), "decoders": answers.totals(decodings)}
        print_json(results)


def _asked(
    prompts: PromptOptions,
    decoding: DecodingOptions,
    loading: LoadingOptions,
    model: str | None,
    compare: bool,
    needs_masks: bool,
) -> tuple[Any, Any, "AnswerRequest"]:
    """The model, its tokenizer, and the request. A model without masks decodes as AR, unless they are asked for."""
    texts = prompts.read()
    with loading_shown(model):
        keywords = decoding.keywords()
        from ..eval.request import AnswerRequest
        from ..generation.settings import SETTING_NAMES

        asks = keywords["strategy"] == "block" or not keywords.keys() & {*SETTING_NAMES} <= {"strategy"}
        loaded, tokenizer = loading.load(model, needs_masks or asks)
    if keywords["strategy"] != "ar" and not hasattr(loaded, "has_mask_adapter"):
        keywords["strategy"] = "ar"
        typer.echo(_WITHOUT_MASKS.format(model), err=True)
    raw = prompts.raw or has_no_chat_template(tokenizer, model)
    return loaded, tokenizer, AnswerRequest(texts, keywords, compare, raw, decoding.seed)


@command(
    "wedlm report my-wedlm --file data.jsonl",
    "wedlm report my-wedlm --file data.jsonl --thresholds 0.1,0.2,0.4,0.8 --penalties 0,0.02,0.1 --save-settings",
    "wedlm report my-base --adapter my-adapter --file data.jsonl --metric number",
)
def report(request: ReportRequest, loading: LoadingOptions, as_json: JsonOption = False) -> None:
    """Speed and quality against AR decoding: one table, one figure, on one page."""
    need("The report", "eval", "matplotlib", "pandas", "tabulate", "evaluate")
    request = replace(request, settings=checked(request.settings))
    prompts, source = request.prompts()
    from ..eval.report.run import run

    loaded, tokenizer = loading.load(request.model)
    has_no_chat_template(tokenizer, request.model)
    made = run(request, loaded, tokenizer, prompts, source)
    out = console(stderr=as_json)
    out.print(made.markdown.partition("## ")[0], str(request.output / "report.html"), highlight=False, soft_wrap=True)
    if as_json:
        print_json(made.as_json())
    if request.save_settings and made.picked is None:
        raise typer.Exit(NO)


LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@command(
    "wedlm serve --open",
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
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve a model to OpenAI clients, and on a page in the browser: a conversation, a race of decoders, replays.

    The decoding options are for requests that do not choose for themselves.
    """
    need("Serving", "serve", "fastapi", "openai", "uvicorn")
    settings = decoding.keywords()
    from ..serving.server import build_app, run

    with listen(host, port) as (listening, address):  # refused here, before any weights are read
        with loading_shown(checkpoint):
            loaded, tokenizer = loading.load(checkpoint)
        import torch

        torch.manual_seed(decoding.seed)
        name = served_model_name or checkpoint or NANO.name
        app = build_app(name, loaded, tokenizer, settings, api_key, cors_origin or ())
        if api_key is None and host not in LOCAL_HOSTS:
            typer.echo("Everyone who reaches this address may ask: pass `--api-key`, or set WEDLM_API_KEY.", err=True)
        if open_page:
            webbrowser.open(address)  # which waits: the socket listens already
        run(app, listening, f"{name}: {address}/v1, and a page at {address}")
