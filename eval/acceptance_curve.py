"""The acceptance curve of a mask adapter: tokens per forward against trained mask rows, of a training log.

    python -m wedlm_hf.eval.acceptance_curve LOG.jsonl FOLDER

prints the table and draws `FOLDER/acceptance.png`. `wedlm adapt` puts both into the model card.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from ..training.model_card import acceptance_table, read_log
from .report.figures import STYLE, Figure

BRANCHES, PLAIN, CHAIN = "branch", "branch_plain", "chain"
KINDS = {BRANCHES: "-", PLAIN: ":", CHAIN: "--"}  # line styles
NAMES = {BRANCHES: "branches", PLAIN: "without previous-token head", CHAIN: "chain"}


def draw_acceptance(log: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Draws `acceptance.png` into a folder: branches at each number of drafts; of the others, the largest number.

    Args:
        log: entries of a training log; those without `eval_tokens_per_forward_…` are left out.
    """
    prefix = "eval_tokens_per_forward_"
    points = {entry["mask_rows"]: entry for entry in log if f"{prefix}{BRANCHES}_1" in entry}
    entries = [points[rows] for rows in sorted(points)]
    names = {name.removeprefix(prefix).rpartition("_") for entry in entries for name in entry if prefix in name}
    drafts = {kind: sorted(int(count) for name, _, count in names if name == kind) for kind in KINDS}
    with matplotlib.rc_context(STYLE):
        drawing = Drawing(figsize=(7.2, 3.6), layout="constrained")
        axis = drawing.subplots()
        shades = matplotlib.colormaps["viridis"].resampled(len(drafts[BRANCHES]) + 1)
        for kind, counts in drafts.items():
            for index, count in enumerate(counts if kind == BRANCHES else counts[-1:]):
                values: list[Any] = [entry.get(f"{prefix}{kind}_{count}") for entry in entries]
                color = shades(index) if kind == BRANCHES else "#6b7280"
                label = f"{NAMES[kind]}, {count} draft{'s' * (count > 1)}"
                rows = [entry["mask_rows"] for entry in entries]
                axis.plot(rows, values, KINDS[kind], marker="o", markersize=3, color=color, label=label)
        axis.set(xlabel="mask rows trained", ylabel="tokens per forward", xlim=(0, None))
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    Figure("acceptance", "Acceptance curve", "", drawing).write_png(folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    log = read_log(options.log)
    table = acceptance_table(log)
    if not table["rows"]:
        parser.error(f"There is no evaluation in {str(options.log)!r}.")
    for row in (table["columns"], ["---"] * len(table["columns"]), *table["rows"]):
        print(f"| {' | '.join(row)} |")
    draw_acceptance(log, options.folder)


if __name__ == "__main__":
    main()
