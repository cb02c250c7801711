"""Figures of `wedlm report`, made from the content of report.json. Matplotlib, which draws them, is optional."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .files import written_whole
from .sweep import AR, BLOCK, STREAMING, TYPICAL, VERIFIED

COLORS = {AR: "#6b7280", BLOCK: "#c7922e", STREAMING: "#2f7fc8", TYPICAL: "#a855a0", VERIFIED: "#17966e"}
TASK_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccaa22", "#66ccee", "#aa3377", "#888888")
MARKERS = "osD^vP*X"
# Values of a setting, least first; they can be told apart on white and on black.
SHADES = ("#3fb0c0", "#2f8fd0", "#4a72d6", "#6f5ad0", "#9349bd", "#b43f8a")
INK, GRID = "#23272e", "#d4d7dc"  # become those of the page there
STYLE = {"font.size": 9.5, "axes.titlesize": 10, "svg.hashsalt": "wedlm", "svg.fonttype": "path"} | dict.fromkeys(
    ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK
)
QUALITY, FORWARDS, SPEED = "right answers, %", "tokens per forward", "speed against AR, ×"
AGREEMENT = "tokens that AR would choose, %"


@dataclass(frozen=True)
class Figure:
    """A drawing with its words.

    Attributes:
        name: of a file.
        title: in a few words.
        caption: how to read it.
        drawing: matplotlib's figure.
    """

    name: str
    title: str
    caption: str
    drawing: Any

    def svg(self) -> str:
        """For a page: ink and grid in the page's colours, no ids that another figure has."""
        text = io.StringIO()
        with import_module("matplotlib").rc_context(STYLE):
            self.drawing.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        svg = text.getvalue()[text.getvalue().index("<svg") :]
        svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\1{self.name}-", svg)
        svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"', r"\1\2", svg, count=1)
        label = f'role="img" aria-label="{self.title}"'
        return svg.replace("<svg", f"<svg {label}", 1).replace(INK, "currentColor").replace(GRID, "var(--grid)")

    def write_png(self, folder: Path) -> Path:
        """`<folder>/<name>.png`, on white."""
        path = folder / f"{self.name}.png"
        with written_whole(path) as unfinished, import_module("matplotlib").rc_context(STYLE):
            self.drawing.savefig(unfinished, format="png", dpi=160, facecolor="white", metadata={"Software": None})
        return path


def check_matplotlib() -> None:
    """Raises `ValueError` where it is missing."""
    if find_spec("matplotlib") is None:
        raise ValueError("The figures of the report need matplotlib: pip install 'wedlm-hf[eval]'.")


def figures(report: Mapping[str, Any]) -> list[Figure]:
    """All that the report has numbers for."""
    with import_module("matplotlib").rc_context(STYLE):
        made = [_front(report), _thresholds(report), _penalties(report), _block(report), _area(report)]
        made.append(_entropy(report))
    return [figure for figure in made if figure is not None]


def _front(report: Mapping[str, Any]) -> Figure:
    drawing, (axis,) = _canvas(1)
    rows = report["sweep"]["rows"]
    for decoder in dict.fromkeys(row["decoder"] for row in rows):
        own = [row for row in rows if row["decoder"] == decoder]
        axis.plot(*_xy(own, SPEED, QUALITY), "o", color=COLORS[decoder], alpha=0.55, markersize=5, label=decoder)
    front = sorted((row for row in rows if row["on_front"]), key=lambda row: row["speed"])
    axis.plot(*_xy(front, SPEED, QUALITY), color=INK, linewidth=1, zorder=1, label="Pareto front")
    for row in front:
        (x,), (y,) = _xy([row], SPEED, QUALITY)
        x_error, y_error = (row[f"{name}_error"] for name in ("speed", "quality"))
        if x_error is not None and y_error is not None:
            axis.errorbar(x, y, 100 * y_error, x_error, ecolor=GRID, elinewidth=1, zorder=0, fmt="none")
        axis.plot(x, y, "o", color=COLORS[row["decoder"]], markersize=6, markeredgecolor=INK, markeredgewidth=0.8)
    axis.set(xlabel=SPEED, ylabel=_quality_label(report))
    _legend(axis, ncols=3)
    return Figure(
        "front",
        "Quality against speed",
        "Each dot is one setting of the sweep. No setting beats those on the line in both; bars are standard errors.",
        drawing,
    )


def _thresholds(report: Mapping[str, Any]) -> Figure | None:
    window, rows = _slice(report, STREAMING)
    if len({row["entropy_threshold"] for row in rows}) < 2:
        return None
    return Figure(
        "thresholds",
        "Effect of the entropy threshold τ",
        f"Streaming decoding without verification, W = {window}. Dashed: AR.",
        _lines(report, rows, "entropy_threshold", "τ, nats", "distance_penalty", "λ", (QUALITY, SPEED)),
    )


def _penalties(report: Mapping[str, Any]) -> Figure | None:
    window, rows = _slice(report, STREAMING)
    if len({row["distance_penalty"] for row in rows}) < 2:
        return None
    panels = (QUALITY, SPEED, "prefix cacheability")
    return Figure(
        "penalties",
        "Effect of the distance penalty λ",
        f"Streaming decoding without verification, W = {window}. Dashed: AR.",
        _lines(report, rows, "distance_penalty", "λ, nats per position", "entropy_threshold", "τ", panels),
    )


def _block(report: Mapping[str, Any]) -> Figure | None:
    window, rows = _slice(report, BLOCK)
    if len(rows) < 2:
        return None
    penalty = rows[0]["distance_penalty"]
    _, others = _slice(report, STREAMING)
    series = {
        STREAMING: ([row for row in others if row["distance_penalty"] == penalty], COLORS[STREAMING]),
        BLOCK: (rows, COLORS[BLOCK]),
    }
    return Figure(
        "block",
        "Streaming against block-wise decoding",
        f"W = {window}, λ = {penalty:g}, no verification. Dashed: AR. Bars are standard errors.",
        _panels(report, series, "entropy_threshold", "τ, nats", (QUALITY, SPEED), errors=True),
    )


def _area(report: Mapping[str, Any]) -> Figure | None:
    entries = [entry for entry in report["areas"] if entry["decoder"] != AR and entry["area"] is not None]
    if not entries:
        return None
    drawing, (axis,) = _canvas(1)
    for entry in entries:
        corners = [(0.0, entry["curve"][0][1]), *entry["curve"]]
        x, y = ([corner[place] for corner in corners] for place in (0, 1))
        color = COLORS[entry["decoder"]]
        axis.step(x, [100 * value for value in y], where="pre", color=color, label=entry["decoder"], linewidth=1.6)
        axis.plot(x[-1], 100 * y[-1], "o", color=color, markersize=5)
    axis.set(xlabel=FORWARDS, ylabel=f"best {_quality_label(report)}")
    axis.set_xlim(left=0)
    _legend(axis, ncols=2)
    return Figure(
        "area",
        "Accuracy–parallelism curves",
        "The best quality to be had with at least so many tokens per forward, among settings within 5 points of AR.",
        drawing,
    )


def _entropy(report: Mapping[str, Any]) -> Figure:
    text = report["entropy"]
    drawing, (axis,) = _canvas(1)
    floor = 1e-4
    for index, (task, mean) in enumerate(text["tasks"].items()):
        own = [row for row in text["prompts"] if row["task"] == task]
        color, marker = TASK_COLORS[index % len(TASK_COLORS)], MARKERS[index % len(MARKERS)]
        x, y = ([row[name] for row in own] for name in ("entropy", "tokens_per_forward"))
        axis.plot([max(floor, value) for value in x], y, marker, color=color, alpha=0.3, markersize=3, mew=0)
        place = max(floor, mean["entropy"]), mean["tokens_per_forward"]
        axis.plot(*place, marker, color=color, markersize=9, markeredgecolor=INK, label=task, zorder=3)
    axis.set_xscale("log")
    axis.set(xlabel="entropy of AR over its answer, nats per token", ylabel=FORWARDS)
    axis.set_ylim(bottom=0)
    _legend(axis, ncols=3)
    return Figure(
        "entropy",
        "Speed by entropy of the text",
        f"Decoder: {text['decoder']}. Small: a prompt; large: a task. An answer of n tokens has at most n. "
        "What lies below 10⁻⁴ is drawn there.",
        drawing,
    )


def _lines(
    report: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    x: str,
    x_label: str,
    by: str,
    symbol: str,
    panels: Sequence[str],
) -> Any:
    """A line for each value of the field `by` over the field `x`, in each of the panels."""
    values = sorted({row[by] for row in rows})
    step = (len(SHADES) - 1) / max(1, len(values) - 1)
    shades = [SHADES[min(len(SHADES) - 1, round(index * step))] for index in range(len(values))]
    series = {
        f"{symbol} = {value:g}": ([row for row in rows if row[by] == value], shade)
        for value, shade in zip(values, shades, strict=True)
    }
    return _panels(report, series, x, x_label, panels)


def _panels(
    report: Mapping[str, Any],
    series: Mapping[str, tuple[Sequence[Mapping[str, Any]], str]],
    x: str,
    x_label: str,
    panels: Sequence[str],
    *,
    errors: bool = False,
) -> Any:
    drawing, axes = _canvas(len(panels))
    reference = report["sweep"]["rows"][0]
    for axis, panel in zip(axes, panels, strict=True):
        name, value = _VALUES[panel]
        axis.axhline(value(reference), color=COLORS[AR], linestyle=(0, (4, 3)), linewidth=1)
        for place, (label, (rows, color)) in enumerate(series.items()):
            places = [row[x] for row in rows]
            heights = [value(row) for row in rows]
            # Where two decoders agree, the first one shows on both sides of the second.
            size, width = (6.5, 3.0) if errors and not place else (4.5, 1.5)
            axis.plot(
                places, heights, MARKERS[place] + "-", color=color, markersize=size, linewidth=width, label=label
            )
            if errors and all(row[f"{name}_error"] is not None for row in rows):
                bars = [100 * row["quality_error"] if panel == QUALITY else row[f"{name}_error"] for row in rows]
                axis.errorbar(places, heights, bars, ecolor=color, elinewidth=1, fmt="none", alpha=0.6)
        axis.set_ylabel(_quality_label(report) if panel == QUALITY else panel)
        if panel != QUALITY:
            axis.set_ylim(bottom=0)
    axes[-1].set_xlabel(x_label)
    _legend(axes[0], ncols=min(3, len(series)))
    return drawing


_VALUES: dict[str, tuple[str, Callable[[Mapping[str, Any]], float]]] = {
    QUALITY: ("quality", lambda row: 100 * float(row["quality"])),
    SPEED: ("speed", lambda row: float(row["speed"])),
    FORWARDS: ("tokens_per_forward", lambda row: float(row["tokens_per_forward"])),
    "prefix cacheability": ("prefix_cacheability", lambda row: float(row["prefix_cacheability"])),
}


def _slice(report: Mapping[str, Any], decoder: str) -> tuple[int, list[Mapping[str, Any]]]:
    """The window that the figures show, the headline's if the sweep has it, and the rows of a decoder with it."""
    rows = [row for row in report["sweep"]["rows"] if row["decoder"] == decoder]
    windows = {row["window_size"] for row in rows}
    wanted = report["settings"]["window_size"]
    window = wanted if wanted in windows else max(windows, default=wanted)
    return window, [row for row in rows if row["window_size"] == window]


def _xy(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    return [_VALUES[x][1](row) for row in rows], [_VALUES[y][1](row) for row in rows]


def _quality_label(report: Mapping[str, Any]) -> str:
    return QUALITY if report["data"]["has_answers"] else AGREEMENT


def _canvas(panels: int) -> tuple[Any, Sequence[Any]]:
    """A figure as wide as a phone, with panels below each other over the same x."""
    # Looked up by name so that type checking does not need it either.
    drawing = import_module("matplotlib.figure").Figure(figsize=(4.8, 1.5 + 2.05 * panels), layout="constrained")
    axes = drawing.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    for axis in axes:
        axis.grid(color=GRID, linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return drawing, axes


def _legend(axis: Any, ncols: int) -> None:
    """Above the axes, where no line can be."""
    axis.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=ncols, frameon=False, fontsize=8.5, borderaxespad=0.2,
        columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip
