"""The figure of a report, and that of a mask adapter's training."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...checkpoints.files import written_whole
from ..decoders import AR, BLOCK, EXACT, LOOKUP, WEDLM

INK = "#777f8b"  # read on white as on black: figures have no ground of their own
COLORS = {AR: INK, LOOKUP: "#c2643f", BLOCK: "#c7922e", WEDLM: "#2f86d2", EXACT: "#17966e"}
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": INK,
    "svg.hashsalt": "wedlm",  # the same drawing is the same file
    **dict.fromkeys(
        ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"], INK
    ),
}
ACCEPTANCE = "eval_tokens_per_forward_"
DRAFTING = {"branch": ("branches", "-"), "chain": ("chain", "--")}  # names and line styles of the ways to draft


def draw_report(table: pd.DataFrame, quality: str) -> str:
    """Quality against speed, a dot for each decoder and setting, as the text of an SVG."""
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(6.4, 3.6), layout="constrained")
        axis = drawing.subplots()
        for kind, own in table.groupby(table.index.str.split().str[0], sort=False):
            errors = {"xerr": own["speed_error"], "yerr": 100 * own["quality_error"]}
            how = {"color": COLORS[str(kind)], "elinewidth": 0.6, "markersize": 5, "label": kind}
            axis.errorbar(own["speed"], 100 * own["quality"], **errors, fmt="o", **how)
        axis.set(xlabel="speed against AR, ×", ylabel=f"{quality}, %", xlim=(0, None))
        axis.set_ylim(top=min(axis.get_ylim()[1], 101))
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        text = io.StringIO()
        drawing.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()


def draw_acceptance(log: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Draws `acceptance.png` of a training log's evaluations into a folder: branches at each number of drafts; of the
    others, the largest number."""
    table = pd.DataFrame(log).set_index("mask_rows").filter(like=ACCEPTANCE).dropna(how="all")
    table = table[~table.index.duplicated(keep="last")].sort_index()
    table.columns = pd.MultiIndex.from_tuples(name.removeprefix(ACCEPTANCE).rsplit("_", 1) for name in table)
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(7.2, 3.6), layout="constrained")
        axis = drawing.subplots()
        for kind, (name, style) in DRAFTING.items():
            counts = sorted(table[kind], key=int) if kind in table else []
            shades = matplotlib.colormaps["viridis"].resampled(len(counts) + 2)
            for place, count in enumerate(counts if kind == "branch" else counts[-1:]):
                line, color = table[kind, count].dropna(), shades(place + 1) if kind == "branch" else INK
                label = f"{name}, {count} draft{'s' * (count != '1')} a step"
                axis.plot(line, style, marker="o", markersize=3, color=color, label=label)
                axis.annotate(f"{line.iloc[-1]:.2f}", (line.index[-1], line.iloc[-1]), (4, -3),
                              textcoords="offset points", fontsize=8, color=color)  # fmt: skip
        axis.set(
            xlabel="mask rows trained", ylabel="tokens per forward (AR decoding: 1)", xlim=(0, None), ylim=(1, None)
        )
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.legend(loc="center left", bbox_to_anchor=(1.04, 0.5))
        with written_whole(folder / "acceptance.png") as unfinished:
            drawing.savefig(unfinished, format="png", dpi=160, transparent=True, metadata={"Software": None})
