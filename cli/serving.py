"""Commands that serve a model: serve."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from ..eval.options import NANO, CheckpointArgument, DecodingOptions, LoadingOptions
from .application import command


@command(
    "wedlm serve my-wedlm --verification exact --port 8000",
    "wedlm serve my-base --adapter my-adapter --verification exact",
)
def serve(
    decoding: DecodingOptions,
    loading: LoadingOptions,
    checkpoint: CheckpointArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in requests; default: CHECKPOINT as it is written.")
    ] = None,
) -> None:
    """Serve a model to OpenAI clients on this machine: chat and text completions, streaming or not.

    The decoding options are for requests that do not choose for themselves.
    """
    if missing := [name for name in ("fastapi", "openai", "uvicorn") if find_spec(name) is None]:
        raise ValueError(f"Serving needs {', '.join(missing)}: pip install 'wedlm-hf[serve]'.")
    settings = decoding.keywords()
    from ..serving.server import build_app, listen, run

    with listen(host, port) as listening:  # refused here, before any weights are read
        loaded, tokenizer = loading.load(checkpoint)
        import torch

        torch.manual_seed(decoding.seed)
        name = served_model_name or checkpoint or NANO.name
        run(build_app(name, loaded, tokenizer, settings), listening, name)
