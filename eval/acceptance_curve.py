"""The acceptance curve of a mask adapter: tokens per forward against trained mask rows, of a training log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from .report.figures import STYLE, Figure

PREFIX = "eval_tokens_per_forward_"
KINDS = {"branch": ("branches", "-"), "chain": ("chain", "--")}
"""Names and line styles of the ways to draft."""


def draw_acceptance(log: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Draws `acceptance.png` of a training log's evaluations into a folder: branches at each number of drafts; of the
    others, the largest number."""
    table = pd.DataFrame(log).set_index("mask_rows").filter(like=PREFIX).dropna(how="all")
    table = table[~table.index.duplicated(keep="last")].sort_index()
    table.columns = pd.MultiIndex.from_tuples(name.removeprefix(PREFIX).rsplit("_", 1) for name in table)
    with matplotlib.rc_context(STYLE):
        drawing = Drawing(figsize=(7.2, 3.6), layout="constrained")
        axis = drawing.subplots()
        for kind, (name, style) in KINDS.items():
            counts = sorted(table[kind], key=int) if kind in table else []
            shades = matplotlib.colormaps["viridis"].resampled(len(counts) + 1)
            for place, count in enumerate(counts if kind == "branch" else counts[-1:]):
                color = shades(place) if kind == "branch" else "#6b7280"
                label = f"{name}, {count} draft{'s' * (count != '1')}"
                axis.plot(table[kind, count], style, marker="o", markersize=3, color=color, label=label)
        axis.set(xlabel="mask rows trained", ylabel="tokens per forward", xlim=(0, None))
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    Figure("acceptance", "Acceptance curve", "", drawing).write_png(folder)
