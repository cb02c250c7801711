"""Commands that open something to be used: demo."""

from __future__ import annotations

import webbrowser
from importlib.util import find_spec
from typing import Annotated

import typer

from ..eval.options import LoadingOptions, ModelOption
from .application import command


@command("wedlm demo", "wedlm demo --model my-wedlm --adapter my-adapter --port 8000")
def demo(
    loading: LoadingOptions,
    model: ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 7860,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """A page to try it on: AR and WeDLM answer your prompt side by side, on one clock, with every setting at hand."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ValueError("The demo needs starlette and uvicorn: pip install 'wedlm-hf[demo]'.")
    from ..apps.demo import serve

    def ready(address: str) -> None:
        typer.echo(f"{address}  (Ctrl-C stops it)")
        if host not in ("127.0.0.1", "::1", "localhost"):
            typer.echo("Whoever reaches this address can load any checkpoint that this machine can read.", err=True)
        if browser:
            webbrowser.open(address)

    loading.prepare()
    serve(loading, model, host=host, port=port, ready=ready)
