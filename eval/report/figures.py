"""Figures of a report, and of the training log of a mask adapter."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from ...checkpoints.files import written_whole
from ..decoders import AR, BLOCK, EXACT, LOOKUP, WEDLM
from ..table import TITLES
from .numbers import Numbers

COLORS = {AR: "#6b7280", LOOKUP: "#b3593f", BLOCK: "#c7922e", WEDLM: "#2f7fc8", EXACT: "#17966e"}
MARKERS = "osD^vP*X"
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#d4d7dc",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "wedlm",  # the same drawing is the same file
}
LABELS = TITLES | {
    "speed": "speed against AR, ×",
    "entropy_threshold": "τ, nats",
    "distance_penalty": "λ, nats per position",
    "batch_size": "prompts decoded together",
}

ACCEPTANCE = "eval_tokens_per_forward_"
DRAFTING = {"branch": ("branches", "-"), "chain": ("chain", "--")}  # names and line styles of the ways to draft


@dataclass(frozen=True)
class Figure:
    """A drawing with its words."""

    name: str  # of a file
    title: str  # in a few words
    caption: str  # how to read it
    drawing: Drawing

    def as_uri(self) -> str:
        """An SVG for `<img src=…>`, which needs no other file."""
        data = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.drawing.savefig(data, format="svg", facecolor="white", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(data.getvalue()).decode()}"

    def write_png(self, folder: Path) -> None:
        """`<folder>/<name>.png`."""
        with written_whole(folder / f"{self.name}.png") as unfinished, matplotlib.rc_context(STYLE):
            self.drawing.savefig(unfinished, format="png", dpi=160, facecolor="white", metadata={"Software": None})


def figures(numbers: Numbers, window: int, quality: str) -> list[Figure]:
    """All that there are numbers for; those of one window show that of the headline, or else the widest of the sweep.
    `quality` says what quality is."""
    with matplotlib.rc_context(STYLE):
        labels = {**LABELS, "quality": f"{quality}, %"}
        batches = numbers.batches.reset_index().astype({"batch_size": str})
        drawing = _lines(batches, "batch_size", "decoder", ["tokens_per_second", "speed"], {}, labels)
        caption = "All decoders in turn on the same prompts, tasks mixed."
        made = [Figure("batches", "Speed by batch size", caption, drawing)]
        if len(sweep := numbers.sweep):
            sweep = sweep.assign(**{name: 100 * sweep[name] for name in ("quality", "quality_error")})
            windows = sweep["window_size"].dropna().unique()
            shown = window if window in windows or not len(windows) else max(windows)
            effects = _effects(sweep[sweep["window_size"] == shown], dict(sweep.loc[AR]), labels)
            made = [_front(sweep, labels), *effects, *made]
        return made


def _front(sweep: pd.DataFrame, labels: dict[str, str]) -> Figure:
    drawing, (axis,) = _canvas()
    front = sweep[sweep["on_front"]].sort_values("speed")
    axis.plot(front["speed"], front["quality"], color="black", linewidth=1, zorder=1, label="Pareto front")
    errors = front["quality_error"], front["speed_error"]
    axis.errorbar(front["speed"], front["quality"], *errors, fmt="none", ecolor="#d4d7dc")
    for kind, own in sweep.groupby("kind", sort=False):
        axis.plot(own["speed"], own["quality"], "o", color=COLORS[str(kind)], alpha=0.7, markersize=5, label=kind)
    axis.set(xlabel=labels["speed"], ylabel=labels["quality"])
    _end_at_all(axis)
    _legend(axis)
    caption = "Each dot is one setting. No setting beats those on the line in both; bars are standard errors."
    return Figure("front", "Quality against speed", caption, drawing)


def _effects(rows: pd.DataFrame, ar: Mapping[str, float], labels: Mapping[str, str]) -> list[Figure]:
    """What τ, λ and the way of refilling do, for one window."""
    wedlm, block = (rows[rows["kind"] == kind] for kind in (WEDLM, BLOCK))
    penalty, tau = block["distance_penalty"].max(), "entropy_threshold"
    beside = pd.concat([wedlm[wedlm["distance_penalty"] == penalty], block]) if len(block) > 1 else block
    about = f"W = {rows['window_size'].max():g}, no verification. Dashed: AR."
    panels, three = ["quality", "speed"], ["quality", "speed", "prefix_cacheability"]
    title, caption = "Streaming against block-wise decoding", f"λ = {penalty:g}, {about} Bars are standard errors."
    wanted = [
        ("thresholds", "Effect of the entropy threshold τ", about, wedlm, tau, "distance_penalty", panels),
        ("penalties", "Effect of the distance penalty λ", about, wedlm, "distance_penalty", tau, three),
        ("block", title, caption, beside, tau, "kind", panels),
    ]
    return [
        Figure(name, title, caption, _lines(some, x, by, shown, ar, labels))
        for name, title, caption, some, x, by, shown in wanted
        if some[x].nunique() > 1
    ]


def _lines(
    rows: pd.DataFrame, x: str, by: str, panels: Sequence[str], ar: Mapping[str, float], labels: Mapping[str, str]
) -> Drawing:
    """A line for each value of the column `by` over the column `x`, in each of the panels; `ar` has the heights of
    AR's line, where there is one."""
    drawing, axes = _canvas(len(panels))
    symbol = {"distance_penalty": "λ = ", "entropy_threshold": "τ = "}.get(by, "")
    shades = matplotlib.colormaps["viridis"].resampled(rows[by].nunique() + 1)
    for axis, panel in zip(axes, panels, strict=True):
        if panel in ar:
            axis.axhline(ar[panel], color=COLORS[AR], linestyle=(0, (4, 3)), linewidth=1)
        for place, (value, own) in enumerate(rows.groupby(by, sort=bool(symbol))):
            label = f"{symbol}{value:g}" if symbol else str(value)
            errors = own[f"{panel}_error"] if by == "kind" else None
            color = COLORS.get(label, shades(place))
            axis.errorbar(own[x], own[panel], errors, marker=MARKERS[place % 8], ms=5, color=color, label=label)
        axis.set_ylabel(labels[panel])
        if panel == "quality":
            _end_at_all(axis)
        else:
            axis.set_ylim(bottom=0)
    axes[-1].set_xlabel(labels[x])
    _legend(axes[0])
    return drawing


def _end_at_all(axis: Axes) -> None:
    """No axis of a share goes past 100 %, but for half a marker."""
    axis.set_ylim(top=min(axis.get_ylim()[1], 101))


def _canvas(panels: int = 1) -> tuple[Drawing, Sequence[Axes]]:
    """A figure as wide as a phone, with panels below each other over the same x."""
    drawing = Drawing(figsize=(4.8, 1.5 + 2.05 * panels), layout="constrained")
    return drawing, list(drawing.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])


def _legend(axis: Axes) -> None:
    """Above the axes, where no line can be."""
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, columnspacing=1.2, handletextpad=0.5)


def draw_acceptance(log: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Draws `acceptance.png` of a training log's evaluations into a folder: branches at each number of drafts; of the
    others, the largest number."""
    table = pd.DataFrame(log).set_index("mask_rows").filter(like=ACCEPTANCE).dropna(how="all")
    table = table[~table.index.duplicated(keep="last")].sort_index()
    table.columns = pd.MultiIndex.from_tuples(name.removeprefix(ACCEPTANCE).rsplit("_", 1) for name in table)
    with matplotlib.rc_context(STYLE):
        drawing = Drawing(figsize=(7.2, 3.6), layout="constrained")
        axis = drawing.subplots()
        for kind, (name, style) in DRAFTING.items():
            counts = sorted(table[kind], key=int) if kind in table else []
            shades = matplotlib.colormaps["viridis"].resampled(len(counts) + 1)
            for place, count in enumerate(counts if kind == "branch" else counts[-1:]):
                color = shades(place) if kind == "branch" else "#6b7280"
                label = f"{name}, {count} draft{'s' * (count != '1')}"
                axis.plot(table[kind, count], style, marker="o", markersize=3, color=color, label=label)
        axis.set(xlabel="mask rows trained", ylabel="tokens per forward", xlim=(0, None), ylim=(1, None))
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    Figure("acceptance", "Acceptance curve", "", drawing).write_png(folder)
