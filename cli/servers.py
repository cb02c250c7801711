"""Commands that run until they are stopped: demo, serve."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from ..eval.options import NANO, LoadingOptions
from .application import command, need
from .groups import ModelOption
from .options import CheckpointArgument, DecodingOptions

HostOption = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")]


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
    from ..apps.demo import serve

    def ready(address: str) -> None:
        typer.echo(f"{address}  (Ctrl-C stops it)")
        if host not in ("127.0.0.1", "::1", "localhost"):
            typer.echo("Everyone who reaches this address can load any checkpoint on this machine.", err=True)
        if browser:
            webbrowser.open(address)

    loading.prepare()
    serve(loading, model, host=host, port=port, ready=ready)


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
) -> None:
    """Serve a model to OpenAI clients on this machine: chat and text completions, streaming or not.

    The decoding options are for requests that do not choose for themselves.
    """
    need("Serving", "serve", "fastapi", "openai", "uvicorn")
    settings = decoding.keywords()
    from ..serving.server import build_app, listen, run

    with listen(host, port) as listening:  # refused here, before any weights are read
        loaded, tokenizer = loading.load(checkpoint)
        import torch

        torch.manual_seed(decoding.seed)
        name = served_model_name or checkpoint or NANO.name
        run(build_app(name, loaded, tokenizer, settings), listening, name)
