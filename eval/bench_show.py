"""What `wedlm bench` shows: tables, a sentence and a picture, made from the content of bench.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .files import written_whole

LEGEND = (
    "B: batch size. tok/s: new tokens per second. to AR: against AR decoding. tok/fwd: tokens per forward. "
    "p_cache: prefix cacheability. first: ms to the first token. own: time outside the forwards / time inside. "
    "same: answers that are AR's. MiB: peak memory beyond the weights."
)
COLORS = ("#6b7280", "#c7a252", "#3b82c4", "#1f9e77", "#b3589a", "#d1604d")
PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None], str], ...] = (
    ("speed against AR decoding", lambda entry: entry["speed_to_ar"], "{:.2f}×"),
    ("new tokens per forward", lambda entry: entry["tokens_per_forward"], "{:.1f}"),
    ("own cost of the loop, % of the forwards", lambda entry: _percent(entry.get("own_cost")), "{:.0f}"),
    ("time to the first token, ms", lambda entry: 1000 * median(entry["time_to_first_token"]), "{:.0f}"),
    ("peak memory beyond the weights, MiB", lambda entry: _mebibytes(entry), "{:.1f}"),
)


def results_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each batch size and decoder."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "B": lambda entry: str(entry["batch_size"]),
        "decoder": lambda entry: str(entry["decoder"]),
        "tok/s": lambda entry: f"{entry['tokens_per_second']:,.0f}",
        "to AR": lambda entry: f"{entry['speed_to_ar']:.2f}×",
        "tok/fwd": lambda entry: f"{entry['tokens_per_forward']:.2f}",
        "p_cache": lambda entry: f"{entry['prefix_cacheability']:.2f}",
        "first": lambda entry: f"{1000 * median(entry['time_to_first_token']):.1f}",
        "own": lambda entry: _share(entry.get("own_cost")),
        "same": lambda entry: _share(entry["agreement"]),
        "MiB": lambda entry: f"{entry['peak_bytes'] / 2**20:,.1f}" if "peak_bytes" in entry else "–",
    }
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), caption=LEGEND, caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == "decoder" else "right", no_wrap=True)
    previous = None
    for entry in results:
        if previous not in (None, entry["batch_size"]):
            table.add_section()
        previous = entry["batch_size"]
        table.add_row(*(cell(entry) for cell in columns.values()))
    return table


def tasks_table(results: Sequence[Mapping[str, Any]]) -> Table | None:
    """Speed against AR on each task, at batch size 1; `None` where there is one task only."""
    entries = [entry for entry in results if len(entry.get("tasks", ())) > 1]
    if not entries:
        return None
    table = Table("to AR, batch 1", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for task in [*entries[0]["tasks"], "all"]:
        table.add_column(task, justify="right", no_wrap=True)
    for entry in entries:
        speeds = [task["speed_to_ar"] for task in entry["tasks"].values()]
        table.add_row(entry["decoder"], *(f"{speed:.2f}×" for speed in [*speeds, entry["speed_to_ar"]]))
    return table


def scaling_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each decoder and length."""
    decoders = list(dict.fromkeys(entry["decoder"] for entry in entries))
    table = Table("decoder", box=SIMPLE_HEAD)
    for name in ("tokens", "ms/step", "forward", "outside", "slots", "MiB", "cache MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in sorted(entries, key=lambda entry: (decoders.index(entry["decoder"]), entry["new_tokens"])):
        total, inside = 1000 * entry["seconds_per_step"], 1000 * entry["forward_seconds_per_step"]
        table.add_row(
            entry["decoder"],
            f"{entry['new_tokens']:,}",
            *(f"{value:.3f}" for value in (total, inside, total - inside)),
            f"{entry['slots_per_step']:.0f}",
            *(f"{entry[part] / 2**20:,.1f}" for part in ("peak_bytes", "cache_bytes")),
        )
    return table


def partings_line(results: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on where verified answers are not AR's, empty if all are."""
    entries = [entry for entry in results if "partings" in entry and entry["agreement"] < 1]
    if not entries:
        return ""
    found = [parting for entry in entries for parting in entry["partings"]]
    differing = sum(entry["prompts"] - entry["agreeing"] for entry in entries)
    line = f"Verified output parts from AR's in {differing} of {sum(entry['prompts'] for entry in entries)} answers"
    if not found:
        return f"{line}."
    gaps = [parting["gap"] / parting["spacing"] for parting in found]
    return (
        f"{line}: forwards of another width round differently, and there AR's two best logits lie at most "
        f"{max(gaps):.1f} steps of this dtype apart (median {median(gaps):.1f})."
    )


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the tables of a report."""
    console.print(results_table(report["results"]))
    if (tasks := tasks_table(report["results"])) is not None:
        console.print(tasks)
    if report["scaling"]:
        console.print(scaling_table(report["scaling"]))
    if line := partings_line(report["results"]):
        console.print(line, highlight=False)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Bars for each measure, grouped by batch size, and the speed on each task at batch size 1.

    Args:
        report: the content of bench.json.
        path: of the PNG.
    """
    # An optional dependency, looked up by name so that type checking does not need it either.
    new_figure = import_module("matplotlib.figure").Figure
    results: list[Mapping[str, Any]] = report["results"]
    decoders = list(dict.fromkeys(entry["decoder"] for entry in results))
    colors = dict(zip(decoders, COLORS, strict=False))
    figure = new_figure(figsize=(15, 7.6), layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    sizes = list(dict.fromkeys(entry["batch_size"] for entry in results))
    for axis, (title, value, label) in zip(axes, PANELS, strict=False):
        heights = {
            decoder: [value(entry) for size in sizes for entry in results if _is(entry, decoder, size)]
            for decoder in decoders
        }
        _bars(axis, [f"batch {size}" for size in sizes], heights, colors, label)
        axis.set_title(title, loc="left", fontsize=11)
    alone = {entry["decoder"]: entry["tasks"] for entry in results if "tasks" in entry}
    if alone:
        tasks = list(next(iter(alone.values())))
        heights = {decoder: [scores[task]["speed_to_ar"] for task in tasks] for decoder, scores in alone.items()}
        _bars(axes[-1], tasks, heights, colors, "{:.1f}")
        axes[-1].set_title("speed against AR decoding by task, batch 1", loc="left", fontsize=11)
    else:
        axes[-1].axis("off")
    for axis in (axes[0], axes[-1]):
        if axis.axison:
            axis.axhline(1, color="black", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=11)
    figure.suptitle(caption(report), x=0.01, ha="left", fontsize=12)
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=140, metadata={"Software": None})


def caption(report: Mapping[str, Any]) -> str:
    """What was measured on what, in one line."""
    machine = report["environment"]
    way = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    cpu = f"{machine['processor']}, {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    place = cpu if machine["device"] == "cpu" else machine["device"]
    return f"{report['model']}: {way}, {machine['dtype']}, {place}, median of {report['repeats']}"


def _bars(
    axis: Any,
    groups: Sequence[str],
    heights: Mapping[str, Sequence[float | None]],
    colors: Mapping[str, str],
    label: str,
) -> None:
    """One bar for each decoder in each group, its value above it; `None` leaves a gap."""
    width = 0.84 / len(heights)
    for index, (decoder, values) in enumerate(heights.items()):
        places = [group + (index - (len(heights) - 1) / 2) * width for group in range(len(groups))]
        bars = axis.bar(places, [value or 0 for value in values], width * 0.92, color=colors[decoder], label=decoder)
        texts = ["" if value is None else label.format(value) for value in values]
        crowded = len(groups) * len(heights) > 18
        axis.bar_label(bars, texts, padding=2, fontsize=6.5 if crowded else 8, color="#333333")
    axis.set_xticks(range(len(groups)), groups)
    axis.tick_params(length=0)
    axis.margins(y=0.12)
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _is(entry: Mapping[str, Any], decoder: str, size: int) -> bool:
    return bool(entry["decoder"] == decoder and entry["batch_size"] == size)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _mebibytes(entry: Mapping[str, Any]) -> float | None:
    return entry["peak_bytes"] / 2**20 if "peak_bytes" in entry else None
