"""The command that measures decoding: report."""

from __future__ import annotations

import typer

from ..eval.options import LoadingOptions
from ..eval.report.request import ReportRequest
from .application import NO, STOPPED, command, console
from .options import JsonOption, has_no_chat_template


@command(
    "wedlm report my-wedlm --file data.jsonl",
    "wedlm report my-wedlm --file data.jsonl --save-settings --fill my-wedlm/README.md",
    "wedlm report my-base --adapter my-adapter --file data.jsonl --sweep-count 0 --decoders ar+lookup,wedlm+exact",
)
def report(request: ReportRequest, loading: LoadingOptions, as_json: JsonOption = False) -> None:
    """One page on speed and quality against AR decoding, by a sweep over the settings; can be stopped and resumed."""
    from ..eval.report.run import run

    prompts, source = request.prompts()
    loaded, tokenizer = loading.load(request.model)
    has_no_chat_template(tokenizer, request.model)
    try:
        picked = run(request, loaded, tokenizer, prompts, source, console(stderr=True))
    except KeyboardInterrupt:
        kept = f"Stopped; the measurements are kept in {request.output}. The same command goes on from here."
        typer.echo(kept, err=True)
        raise typer.Exit(STOPPED) from None
    if as_json:
        typer.echo((request.output / "report.json").read_text(encoding="utf-8"))
    if request.save_settings and picked is None:
        raise typer.Exit(NO)
