"""Finds the decoding settings of a checkpoint: the fastest unverified ones that answer as well as AR decoding.

What it does: decodes held-out prompts of every task with AR and under each combination of window size W, entropy
threshold τ and distance penalty λ; keeps the settings that lose at most `--max-loss` points to AR on every task; picks
the one with the most tokens per forward. It writes sweep.json and sweep.png (needs matplotlib), and with `--write` the
settings into the checkpoint's generation_config.json. These are *tuning* prompts: `wedlm_hf.eval.report` measures the
outcome on others.

    python -m wedlm_hf.eval.sweep --model examples/wedlm-nano --output examples/wedlm-nano/results --write

Hardware: about a quarter of an hour on one CPU core for wedlm-nano.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .files import write_text, written_whole
from .markdown import curve
from .measure import LONGEST_ANSWER, Options, Score, as_dicts, command_line, environment, load, measure, pooled
from .tasks import TASKS, generate_samples

REFERENCE = "ar"


@dataclass(frozen=True)
class Setting:
    """One combination of settings of unverified streaming decoding; the fields are keywords of `generate`."""

    window_size: int
    entropy_threshold: float
    distance_penalty: float

    def __str__(self) -> str:
        return f"W={self.window_size} τ={self.entropy_threshold:g} λ={self.distance_penalty:g}"

    @property
    def options(self) -> Options:
        """The keywords, with the strategy."""
        return {"strategy": "wedlm", "verification": "none"} | asdict(self)


def largest_loss(scores: Mapping[str, Score], reference: Mapping[str, Score]) -> float:
    """Points of accuracy lost to the reference on the task where most are lost; below 0 if all tasks gain."""
    return max(100 * (reference[task].accuracy - scores[task].accuracy) for task in reference)


def choose(
    results: Mapping[Setting, Mapping[str, Score]], reference: Mapping[str, Score], max_loss: float
) -> Setting | None:
    """The setting with the most tokens per forward among those that lose at most `max_loss` points on every task.

    Args:
        results: scores by setting and task.
        reference: AR's scores by task.
        max_loss: points, i.e. percent of the prompts of a task.
    """
    good = [setting for setting, scores in results.items() if largest_loss(scores, reference) <= max_loss + 1e-9]
    return max(good, key=lambda setting: pooled(results[setting]).tokens_per_forward, default=None)


def write_settings(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Store settings in a checkpoint's generation_config.json, whole or not at all, and remove those that are None;
    which strategy is used stays the caller's choice."""
    path = checkpoint / "generation_config.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stored.pop("_from_model_config", None)  # with this flag, loading would drop our fields
    stored = {name: value for name, value in (stored | dict(settings)).items() if settings.get(name, 0) is not None}
    write_text(path, json.dumps(stored, indent=2, sort_keys=True) + "\n")


def plot(sweep: Mapping[str, Any], path: Path) -> None:
    """Draw right answers and tokens per forward over τ, and against each other; a line for each window and penalty.

    Args:
        sweep: the content of sweep.json.
        path: of the PNG.
    """
    # An optional dependency, looked up by name so that type checking does not need it either.
    new_figure = import_module("matplotlib.figure").Figure

    def points(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
        return {
            "entropy threshold τ, nats": [row["entropy_threshold"] for row in rows],
            "right answers, %": [100 * row["pooled"]["accuracy"] for row in rows],
            "tokens per forward": [row["pooled"]["tokens_per_forward"] for row in rows],
        }

    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(sweep["settings"], key=lambda row: row["entropy_threshold"]):
        lines.setdefault(f"W = {row['window_size']}, λ = {row['distance_penalty']:g}", []).append(row)
    chosen = [row for row in sweep["settings"] if sweep["chosen"] and sweep["chosen"].items() <= row.items()]
    (ar_accuracy,), (ar_speed,) = list(points([sweep["reference"] | {"entropy_threshold": 0}]).values())[1:]

    figure = new_figure(figsize=(12, 3.6), layout="constrained")
    tau, accuracy, speed = points([])
    for axis, (x, y) in zip(figure.subplots(1, 3), ((tau, accuracy), (tau, speed), (speed, accuracy)), strict=True):
        for label, rows in lines.items():
            axis.plot(points(rows)[x], points(rows)[y], marker="o", markersize=3.5, label=label)
        if x == tau:
            axis.axhline(ar_accuracy if y == accuracy else ar_speed, color="black", linestyle="--", label="AR")
        else:
            axis.plot(ar_speed, ar_accuracy, marker="o", color="black", linestyle="none", label="AR")
        for row in chosen:
            star = points([row])
            axis.plot(star[x], star[y], marker="*", markersize=13, color="black", linestyle="none", label="chosen")
        axis.set(xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if y == speed:
            axis.set_ylim(bottom=0)
            axis.legend(frameon=False, fontsize="small")
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=150, metadata={"Software": None})


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of values with commas between them."""

    def parse(text: str) -> list[Any]:
        try:
            return sorted({kind(part) for part in text.split(",")})
        except ValueError:
            raise typer.BadParameter(f"expected numbers with commas between them, got {text!r}") from None

    return parse


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")],
    output: Annotated[Path, typer.Option(help="Folder for sweep.json and sweep.png.")],
    taus: Annotated[Any, typer.Option(parser=_listed(float), metavar="LIST", help="Entropy thresholds, nats.")] = (
        "0.05,0.1,0.2,0.3,0.4,0.6,0.8,1.0"
    ),
    lambdas: Annotated[Any, typer.Option(parser=_listed(float), metavar="LIST", help="Distance penalties.")] = (
        "0.02,0.1"
    ),
    windows: Annotated[Any, typer.Option(parser=_listed(int), metavar="LIST", help="Window sizes.")] = "16",
    count: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the tuning prompts.")] = 1,
    max_loss: Annotated[float, typer.Option(min=0, help="Points that a task may lose to AR.")] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 50,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Store the chosen settings in the checkpoint.")] = False,
) -> None:
    """Sweep the settings of unverified streaming decoding and pick the best."""
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("the picture needs matplotlib: pip install 'wedlm-hf[eval]'", param_hint="--output")
    if threads is not None:
        torch.set_num_threads(threads)
    loaded, tokenizer = load(model)
    samples = [sample for task in TASKS for sample in generate_samples(task, count, seed, "heldout")]
    grid = [Setting(*values) for values in itertools.product(windows, taus, lambdas)]
    settings: dict[str, Options] = {REFERENCE: {"strategy": "ar"}} | {
        str(setting): setting.options for setting in grid
    }
    limits = {"max_new_tokens": LONGEST_ANSWER, "do_sample": False}
    scores = measure(
        loaded,
        tokenizer,
        samples,
        {name: {**options, **limits} for name, options in settings.items()},
        batch_size=batch_size,
        title=f"{len(samples)} prompts, {len(settings)} settings",
    )
    reference = scores[REFERENCE]
    results = {setting: scores[str(setting)] for setting in grid}
    chosen = choose(results, reference, max_loss)
    sweep = {
        "command": command_line("sweep"),
        "environment": environment(loaded),
        "samples": {"split": "heldout", "seed": seed, "count": count, "tasks": list(TASKS)},
        "max_loss": max_loss,
        "reference": as_dicts(reference),
        "settings": [
            {**asdict(setting), "largest_loss": round(largest_loss(scores, reference), 4), **as_dicts(scores)}
            for setting, scores in results.items()
        ],
        "chosen": chosen and asdict(chosen),
    }
    write_text(output / "sweep.json", json.dumps(sweep, indent=1) + "\n")
    plot(sweep, output / "sweep.png")
    typer.echo(curve(sweep))
    if chosen is None:
        typer.echo(f"No setting loses at most {max_loss:g} points to AR on every task: nothing chosen.", err=True)
        raise typer.Exit(1)
    if write:
        write_settings(model, asdict(chosen))


if __name__ == "__main__":
    typer.run(main)
