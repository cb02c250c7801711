"""Measures a checkpoint's stored decoding settings, and verified decoding, on prompts that no setting was tuned on.

What it does: decodes held-out prompts of every task with AR, block-wise, streaming, typical and verified decoding;
scores the answers (in batches), then times some of the prompts (one at a time, the four in turn, medians). It writes
report.json. Prompts of a sweep.json in the same folder are left out. `--fill FILE.md`, which may be repeated, puts the
numbers into their places in a Markdown file (see markdown.py).

    python -m wedlm_hf.eval.report --model examples/wedlm-nano --output examples/wedlm-nano/results \
        --threads 2 --fill README.md --fill examples/wedlm-nano/README.md

Hardware: a few minutes on two CPU cores for wedlm-nano.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..generation import WeDLMGenerationSettings
from .files import write_text
from .markdown import BLOCKS, REFERENCE, STREAMING, TYPICAL, VERIFIED, blocks, fill
from .measure import LONGEST_ANSWER, Options, as_dicts, command_line, environment, load, measure
from .tasks import TASKS, Sample, generate_samples

# Verified decoding loses nothing to wide windows and bold drafts; the stored settings are for unverified decoding.
WIDE: Options = {"window_size": 16, "entropy_threshold": 0.8}

DECODERS: dict[str, Options] = {
    REFERENCE: {"strategy": "ar"},
    "block": {"strategy": "block", "verification": "none"},
    STREAMING: {"strategy": "wedlm", "verification": "none"},
    TYPICAL: {"strategy": "wedlm", "verification": "typical", **WIDE},
    VERIFIED: {"strategy": "wedlm", "verification": "exact", **WIDE},
}


def fresh_samples(task: str, count: int, seed: int, used: set[str]) -> list[Sample]:
    """Held-out samples whose prompts are not among `used`.

    Raises:
        ValueError: if the task has too few prompts.
    """
    samples = generate_samples(task, count + len(used), seed, "heldout")
    return list(islice((sample for sample in samples if sample.prompt not in used), count))


def tuning_prompts(sweep: Mapping[str, Any] | None) -> set[str]:
    """The prompts that a sweep saw."""
    if sweep is None:
        return set()
    made = sweep["samples"]
    return {
        sample.prompt
        for task in made["tasks"]
        for sample in generate_samples(task, made["count"], made["seed"], made["split"])
    }


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")],
    output: Annotated[Path, typer.Option(help="Folder for report.json; may hold a sweep.json.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 2,
    timed: Annotated[int, typer.Option(min=1, help="Prompts of each task that are timed.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each of these is decoded.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together where time does not count.")] = 50,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    fill_files: Annotated[
        list[Path] | None, typer.Option("--fill", help="Markdown file whose measured blocks are replaced.")
    ] = None,
) -> None:
    """Measure quality and speed of a checkpoint under its stored settings."""
    sweep_path = output / "sweep.json"
    sweep = json.loads(sweep_path.read_text(encoding="utf-8")) if sweep_path.exists() else None
    try:
        texts = {path: path.read_text(encoding="utf-8") for path in fill_files or ()}
        for text in texts.values():
            fill(text, dict.fromkeys(BLOCKS if sweep else BLOCKS[:-1], ""))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--fill") from None
    if threads is not None:
        torch.set_num_threads(threads)
    loaded, tokenizer = load(model)
    used = tuning_prompts(sweep)
    samples = {task: fresh_samples(task, count, seed, used) for task in TASKS}
    limits = {"max_new_tokens": LONGEST_ANSWER, "do_sample": False}
    decoders = {name: {**options, **limits} for name, options in DECODERS.items()}
    quality = measure(
        loaded,
        tokenizer,
        [sample for group in samples.values() for sample in group],
        decoders,
        batch_size=batch_size,
        title="quality",
    )
    speed = measure(
        loaded,
        tokenizer,
        [sample for group in samples.values() for sample in group[:timed]],
        decoders,
        repeats=repeats,
        title="speed",
    )
    settings = WeDLMGenerationSettings.from_generation_config(loaded.generation_config, loaded.config)
    report = {
        "command": command_line("report"),
        "environment": environment(loaded),
        "samples": {"split": "heldout", "seed": seed, "count": count, "tasks": list(TASKS)},
        "settings": {
            name: getattr(settings, name) for name in ("window_size", "entropy_threshold", "distance_penalty")
        },
        "verified_settings": WIDE,
        "timing": {"count": timed, "repeats": repeats, "batch_size": 1},
        "quality": {name: as_dicts(scores) for name, scores in quality.items()},
        "speed": {name: as_dicts(scores) for name, scores in speed.items()},
    }
    write_text(output / "report.json", json.dumps(report, indent=1) + "\n")
    made = blocks(report, sweep)
    for path, text in texts.items():
        write_text(path, fill(text, made))
    typer.echo(made["summary"])
    typer.echo(made["tasks"])


if __name__ == "__main__":
    typer.run(main)
