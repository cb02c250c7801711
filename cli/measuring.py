"""Commands that measure decoding: calibrate, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console.prompts import PROMPT_FILE
from ..eval.options import CalibrationOptions, LoadingOptions, RawOption, has_no_chat_template, read_prompt_file
from ..eval.report.request import ReportRequest
from .application import NO, STOPPED, JsonOption, command, console, print_json


@command(
    "wedlm calibrate my-wedlm --file prompts.txt --agreement 0.99 --write",
    "wedlm calibrate my-wedlm --file prompts.txt --json > settings.json",
)
def calibrate(
    loading: LoadingOptions,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or Hub id.")],
    file: Annotated[Path, typer.Option("--file", "-f", help=f"{PROMPT_FILE}; - is standard input.")],
    options: CalibrationOptions,
    raw: RawOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest settings that agree with AR decoding well enough on your own prompts."""
    from ..eval.calibrate import calibrate as find_settings
    from ..eval.calibrate import show
    from ..eval.prompts import encode_prompt, split_prompts
    from ..eval.sweep import write_settings

    prompts, _ = read_prompt_file(file)
    split_prompts(prompts)  # refused here, before any weights are read
    if options.write and not Path(model).is_dir():
        raise ValueError(f"`--write` needs a checkpoint folder, got {model!r}.")
    loaded, tokenizer = loading.load(model)
    raw = raw or has_no_chat_template(tokenizer, model)
    encoded = [encode_prompt(loaded, tokenizer, prompt, raw=raw) for prompt in prompts]
    found = find_settings(loaded, tokenizer, encoded, options, title="settings")
    show(found, options.agreement, console(quiet=as_json))
    if as_json:
        print_json(found.as_json())
    if found.chosen is None:
        raise typer.Exit(NO)
    if options.write:
        write_settings(Path(model), found.settings)


@command(
    "wedlm report my-wedlm --file data.jsonl",
    "wedlm report my-wedlm --file data.jsonl --write --fill my-wedlm/README.md",
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
        kept = f"Stopped; what was measured is kept in {request.output}. The same command goes on from here."
        typer.echo(kept, err=True)
        raise typer.Exit(STOPPED) from None
    if as_json:
        typer.echo((request.output / "report.json").read_text(encoding="utf-8"))
    if request.write and picked is None:
        raise typer.Exit(NO)
