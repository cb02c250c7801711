"""Training curves: what `WeDLMSFTTrainer` (or any `Trainer`) logged, drawn from its trainer_state.json."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .files import written_whole

STATE = "trainer_state.json"
FORMATS = (".png", ".svg")
COLORS = ("#2f7fc8", "#c7922e", "#17966e", "#a855a0")
SHADES = (
    "#9fd0f5",
    "#6bb3ea",
    "#3f93da",
    "#2374bd",
    "#145590",
    "#0a3a66",
    "#061f3a",
)  # of an ordered family of metrics
STYLE = {"font.size": 9.5, "svg.hashsalt": "wedlm", "svg.fonttype": "path"}
Points = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Panel:
    """One plot of each run.

    Attributes:
        title: what it shows.
        unit: of its vertical axis.
        pattern: of the names of its metrics, as a whole; `eval_` stands for any evaluation set.
        labels: of its metrics in the legend, in order; none: the group of the pattern tells them apart.
        label: of a group, where there are no labels.
    """

    title: str
    unit: str
    pattern: str
    labels: tuple[tuple[str, str], ...] = ()
    label: str = "{}"


PANELS = (
    Panel(
        "training loss",
        "nats per token",
        "loss|ar_nll|mask_nll",
        (("loss", "loss (Eq. 10)"), ("ar_nll", "next token"), ("mask_nll", "masked tokens")),
    ),
    Panel(
        "held-out loss",
        "nats per token",
        "eval_(?:loss|ar_nll|elbo_nll)",
        (("eval_loss", "loss"), ("eval_ar_nll", "next token"), ("eval_elbo_nll", "block-wise bound")),
    ),
    Panel("held-out loss by masked share of the block", "nats per token", r"eval_mask_nll_ratio_(\d+)", (), "≤ {} %"),
    Panel("held-out accuracy by offset in the block", "", r"eval_accuracy_offset_(\d+(?:_\d+)?)", (), "{}"),
    Panel(
        "tokens per forward, held-out prompts", "", "eval_tokens_per_forward", (("eval_tokens_per_forward", "wedlm"),)
    ),
    Panel(
        "throughput",
        "tokens per second",
        "tokens_per_second|supervised_tokens_per_second",
        (("tokens_per_second", "all"), ("supervised_tokens_per_second", "supervised")),
    ),
)


@dataclass(frozen=True)
class Run:
    """What one run logged about its training and about one evaluation set.

    Attributes:
        name: of the run, and of the evaluation set where there are several.
        metrics: steps and values of each metric; those of the evaluation set begin with `eval_`.
    """

    name: str
    metrics: dict[str, Points]

    def lines(self, panel: Panel) -> dict[str, Points]:
        """The lines of a panel by their labels, in order; none where nothing was logged."""
        found = {name: match for name in self.metrics if (match := re.fullmatch(panel.pattern, name))}
        if panel.labels:
            return {label: self.metrics[name] for name, label in panel.labels if name in found}
        ordered = sorted((int(match[1].split("_")[0]), match[1], name) for name, match in found.items())
        return {panel.label.format(group.replace("_", "–")): self.metrics[name] for _, group, name in ordered}

    def missing(self) -> list[str]:
        """Titles of the panels that nothing was logged for."""
        return [panel.title for panel in PANELS if not self.lines(panel)]


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads the logs of runs: a run for each path, or for each evaluation set of it.

    Args:
        paths: trainer_state.json files, or folders of runs; where one has no such file, its newest
            checkpoint's is taken.

    Raises:
        FileNotFoundError: for a path without a log.
        ValueError: for what is no trainer's state, and for a log without anything to draw.
    """
    files = [_state_file(path) for path in paths]
    names = [str(path.parent if path.name == STATE else path) for path in paths]
    if len({Path(name).name for name in names}) == len(names):
        names = [Path(name).name or name for name in names]
    return [run for name, file in zip(names, files, strict=True) for run in _read(name, file)]


def _state_file(path: Path) -> Path:
    if path.is_file():
        return path
    checkpoints = [
        file for file in path.glob(f"checkpoint-*/{STATE}") if file.parent.name.rpartition("-")[2].isdigit()
    ]
    # A run that was resumed leaves the state of its first end behind.
    files = [file for file in (path / STATE, *checkpoints) if file.is_file()]
    if files:
        return max(files, key=_step_of)
    raise FileNotFoundError(
        f"There is no {STATE} in {str(path)!r} or in a checkpoint of it: pass the `output_dir` of a training run."
    )


def _step_of(file: Path) -> int:
    """The last that it logged, the folder's for a checkpoint; what cannot be read counts as newest, and is told."""
    number = file.parent.name.rpartition("-")[2]
    if file.parent.name.startswith("checkpoint-") and number.isdigit():
        return int(number)
    try:
        log = json.loads(file.read_text(encoding="utf-8"))["log_history"]
        return max((int(entry["step"]) for entry in log), default=0)
    except (ValueError, TypeError, KeyError):
        return sys.maxsize


def _read(name: str, file: Path) -> list[Run]:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: malformed JSON: {error}") from None
    log = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(log, list):
        raise ValueError(f"{file} is no trainer's state: it has no list `log_history`.")
    metrics: dict[str, Points] = {}
    for number, entry in enumerate(log, start=1):
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise ValueError(
                f"{file}: entry {number} of `log_history` must be an object with a `step`, got {entry!r}."
            )
        for key, value in entry.items():
            if isinstance(value, int | float) and key != "step":
                steps, values = metrics.setdefault(key, ([], []))
                steps.append(entry["step"])
                values.append(value)
    sets = list(dict.fromkeys(match[1] for key in metrics if (match := re.fullmatch(r"eval_(?:(.+)_)?ar_nll", key))))
    runs = []
    for evaluated in sets or [None]:
        prefix = f"eval_{evaluated}_" if evaluated else "eval_"
        own = {
            f"eval_{key.removeprefix(prefix)}" if key.startswith(prefix) else key: points
            for key, points in metrics.items()
            if key.startswith(prefix) or not key.startswith("eval_")
        }
        runs.append(Run(f"{name}: {evaluated}" if evaluated else name, own))
    if not any(run.lines(panel) for run in runs for panel in PANELS):
        raise ValueError(
            f"{file}: nothing to draw was logged in {len(log)} entries up to step {state.get('global_step', 0)}: see "
            "`logging_steps` and `eval_strategy`."
        )
    return runs


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draws every panel that a run has something for; several runs stand side by side on common vertical axes.

    Raises:
        ValueError: for a file name that ends neither in .png nor in .svg, or without matplotlib.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"`--output` must end in .png or .svg, got {str(path)!r}.")
    if find_spec("matplotlib") is None:
        raise ValueError("The curves need matplotlib: pip install 'wedlm-hf[eval]'.")
    panels = [panel for panel in PANELS if any(run.lines(panel) for run in runs)]
    alone = len(runs) == 1
    columns = min(3, len(panels)) if alone else len(runs)
    rows = -(-len(panels) // columns) if alone else len(panels)
    # An optional dependency, looked up by name so that type checking does not need it either.
    with import_module("matplotlib").rc_context(STYLE):
        size = (4.6 * columns, 3.1 * rows + 0.4)
        figure = import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
        axes = figure.subplots(
            rows, columns, squeeze=False, sharex="all" if alone else "col", sharey=False if alone else "row"
        )
        places = (
            [(panel, runs[0]) for panel in panels] if alone else [(panel, run) for panel in panels for run in runs]
        )
        for axis, (panel, run) in zip(axes.flatten(), places, strict=False):
            _plot(axis, panel, run)
            axis.set_title(panel.title if alone else f"{run.name}: {panel.title}", loc="left", fontsize=10)
            axis.tick_params(labelbottom=True)
        for axis in axes.flatten()[: len(places)]:  # only now: axes that share a scale have all their lines
            axis.set_ylim(bottom=0)
        for axis in axes.flatten()[len(places) :]:
            axis.axis("off")
        if alone:
            figure.suptitle(runs[0].name, x=0.01, ha="left", fontsize=12)
        with written_whole(path) as unfinished:
            metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
            figure.savefig(unfinished, format=path.suffix[1:], dpi=140, facecolor="white", metadata=metadata)


def _plot(axis: Any, panel: Panel, run: Run) -> None:
    lines = run.lines(panel)
    if not lines:
        axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", va="center", color="#888888")
    shades = [SHADES[round(index * (len(SHADES) - 1) / max(len(lines) - 1, 1))] for index in range(len(lines))]
    for (label, (steps, values)), color in zip(lines.items(), COLORS if panel.labels else shades, strict=False):
        axis.plot(
            steps, values, color=color, label=label, linewidth=1.6, marker="o" if len(steps) < 16 else None, ms=3
        )
    axis.set(xlabel="optimizer step", ylabel=panel.unit)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axis.legend(frameon=False, fontsize=8.5, ncols=2 if len(lines) > 4 else 1)
