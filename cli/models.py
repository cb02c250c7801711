"""Commands that make models and send them to the Hub: convert, train, adapt, merge, push."""

import re
import shlex
import sys
import warnings
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..adapters.adapt_config import AdaptConfig
from .application import app, command, console, need, print_json
from .options import JsonOption

OutputArgument = Annotated[Path, typer.Argument(metavar="OUTPUT_DIR", help="Folder to write to; new or empty.")]


@command(
    "wedlm convert Qwen/Qwen2.5-0.5B my-wedlm",
    "wedlm convert SmolLM2-135M-Instruct.Q4_1.gguf my-wedlm",
)
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or Hub id of a checkpoint, or a GGUF file.")],
    output_dir: OutputArgument,
    mask_token: Annotated[
        str | None, typer.Option(help="Text of the mask token; default: the tokenizer's own, else <|mask|>.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Name of a GGUF file in that folder or Hub id.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a WeDLM checkpoint of a Llama, Mistral, Qwen2, Qwen2.5 or Qwen3 model: its weights, and a mask token."""
    from transformers.utils.logging import disable_progress_bar

    from ..modeling_wedlm.convert import convert as convert_checkpoint

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bar()
    conversion = convert_checkpoint(source, output_dir, mask_token=mask_token, revision=revision, gguf_file=gguf_file)
    if as_json:
        print_json({"output_dir": str(output_dir), **conversion.record()})
    else:
        typer.echo(f"{output_dir}: {conversion}")


@app.command(  # TRL's parser reads its arguments, and has a `--debug` of its own
    epilog="Example:\n\nwedlm train recipe.yaml --model my-wedlm --dataset chats.jsonl --output_dir out",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(context: typer.Context, as_json: JsonOption = False) -> None:
    """Fine-tune from a recipe: wedlm train RECIPE.yaml --setting value …; --help lists the settings.

    Settings of the command line replace those of the recipe. --json prints the results as one JSON object and nothing
    else.
    """
    need("Training", "train", "accelerate", "datasets", "filelock", "peft", "trl")
    from ..training.train import main as run_training

    warnings.filterwarnings("ignore", "'pin_memory' argument")  # on a machine without a GPU

    words = [re.sub(r"^(-m|--model)(?==|$)", "--model_name_or_path", word) for word in context.args]
    found: list[dict[str, Any]] = []
    help_texts = {"description": context.command.help, "epilog": context.command.epilog}
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # transformers prints its log there
        run_training(words, **help_texts, report=found.append if as_json else None)
    if found:
        print_json(found[0])


@command(
    "wedlm adapt HuggingFaceTB/SmolLM2-135M-Instruct my-adapter --minutes 60",
    "wedlm adapt my-model my-adapter --tokens 200000 --prompts prompts.txt",
    "wedlm adapt my-model better --minutes 60 --from my-adapter --answers my-adapter/work/answers.jsonl",
)
def adapt(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Folder or Hub id of a checkpoint, or a GGUF file.")],
    output_dir: Annotated[
        Path,
        typer.Argument(metavar="OUTPUT_DIR", help="Folder for the adapter; new, empty, or of a run to go on with."),
    ],
    config: AdaptConfig,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a mask adapter: any AR model's own text in fewer forwards, from nothing but the model.

    May be stopped at any moment: the same command goes on. Needs a budget, --minutes or --tokens.
    """
    need("`wedlm adapt`", "train", "accelerate", "filelock", "matplotlib", "pandas")
    import torch

    from ..adapters.adapt import adapt as train_adapter
    from ..eval.report.figure import draw_acceptance
    from ..eval.table import speed_table

    if threads is not None:
        torch.set_num_threads(threads)
    measure, progress = partial(speed_table, title="AR and verified decoding in turn"), console(stderr=True)
    try:
        made = train_adapter(base, output_dir, config, measure=measure, draw=draw_acceptance, console=progress)
    except KeyboardInterrupt:
        said = f"Stopped; what was done is kept in {output_dir}. The same command goes on from here."
        raise KeyboardInterrupt(said) from None
    if as_json:
        print_json(made)
        return
    out = console()
    if rows := made["table"].get("rows"):
        table = Table(*made["table"]["columns"], box=SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        out.print(table)
        out.print(*made["table"].get("notes", ()), sep="\n", highlight=False)
    trial = shlex.join(("wedlm", "generate", "Why is the sky blue?", "--model", str(output_dir)))
    said = f"The adapter and its model card are in {output_dir}; a larger budget goes on from there. To try it:"
    out.print(said, trial, sep="\n", highlight=False, soft_wrap=True)


@command("wedlm merge my-wedlm my-lora merged")
def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Folder or Hub id of the WeDLM checkpoint.")],
    lora: Annotated[str, typer.Argument(metavar="LORA", help="Folder or Hub id of the LoRA.")],
    output_dir: OutputArgument,
) -> None:
    """Write a checkpoint of a model with a LoRA merged into its weights. Commands that decode take the LoRA itself."""
    from ..adapters.loading import load_adapted
    from ..checkpoints.files import check_new_folder
    from ..modeling_wedlm.convert import write_checkpoint

    check_new_folder(output_dir)
    model, tokenizer = load_adapted(base, lora)
    if model.has_mask_adapter:
        raise ValueError(f"{lora!r} is a mask adapter, which cannot be merged: it acts on slots of a window alone.")
    write_checkpoint(output_dir.absolute(), model, tokenizer, base)
    typer.echo(f"{output_dir}: {base} with {lora}")
