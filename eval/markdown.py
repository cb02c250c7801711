"""Measured numbers as tables, as Markdown, and their places in README.md and the model card.

A page marks a place by two comments: `<!-- measured: NAME -->` and `<!-- /measured -->`, each on a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .sweep import AR, STREAMING, VERIFIED

BLOCKS = ("summary", "tasks", "setup", "trends", "front")
_NUMBER = re.compile(r"([+−–\d-].{0,24})?")  # with its unit or error
_PLACE = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- /measured -->)", flags=re.DOTALL)


class Table(NamedTuple):
    """A header and rows of cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(report: Mapping[str, Any]) -> dict[str, Table]:
    """All tables of a report, by name.

    Args:
        report: the content of report.json.
    """
    rows = report["sweep"]["rows"]
    return {
        "summary": _summary(report),
        "tasks": _tasks(report),
        "trends": Table(
            ("what the paper reports", "by", "here", "numbers"),
            [[check[name] for name in ("claim", "measure", "verdict", "evidence")] for check in report["trends"]],
        ),
        "front": _settings(report, sorted((row for row in rows if row["on_front"]), key=lambda row: row["speed"])),
        "sweep": _settings(report, rows),
        "areas": Table(
            ("decoder", "area, AR = 1"),
            [(entry["decoder"], _with_error(entry["area"], entry["error"], 2)) for entry in report["areas"]],
        ),
        "entropy": Table(
            ("task", "entropy, nats", "tokens of an answer", "tokens per forward", "speed against AR"),
            [
                (
                    task,
                    "–" if row["entropy"] is None else f"{row['entropy']:.2g}",
                    _number(row["answer_tokens"], 0),
                    _number(row["tokens_per_forward"], 2),
                    _number(row["speed"], 2, "×"),
                )
                for task, row in sorted(report["entropy"]["tasks"].items(), key=lambda item: item[1]["entropy"])
            ],
        ),
    }


def blocks(report: Mapping[str, Any]) -> dict[str, str]:
    """The Markdown blocks that [`fill`] puts in place, by name, each ending in a line end.

    Args:
        report: the content of report.json.
    """
    made = tables(report)
    texts = {name: as_markdown(made[name]) for name in ("summary", "tasks", "trends", "front")}
    return texts | {"setup": f"{setup(report)}\n"}


def fill(text: str, made: Mapping[str, str]) -> str:
    """Replace the measured blocks of a Markdown text.

    Raises:
        ValueError: if the text has no such block, or one with a name that is not in `made`.
    """
    names = [match[2] for match in _PLACE.finditer(text)]
    unknown = sorted(set(names) - set(made))
    if not names or unknown:
        raise ValueError(
            "expected blocks <!-- measured: NAME --> … <!-- /measured --> with a name among "
            f"{', '.join(made)}, got {', '.join(unknown) or 'none'}"
        )
    return _PLACE.sub(lambda match: f"{match[1]}{made[match[2]]}{match[3]}", text)


def as_markdown(table: Table) -> str:
    """Aligned in its source too: columns with words to the left, numbers to the right."""
    header, rows = table
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    numeric = [all(_NUMBER.fullmatch(cell) for cell in column) for column in zip(*rows, strict=True)]
    numeric = [False, *(numeric or [True] * len(header))[1:]]

    def line(cells: Sequence[str]) -> str:
        fitted = zip(cells, widths, numeric, strict=True)
        return (
            f"| {' | '.join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in fitted)} |\n"
        )

    rules = ("-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, numeric, strict=True))
    return "".join([line(header), f"| {' | '.join(rules)} |\n", *map(line, rows)])


def quality_words(report: Mapping[str, Any]) -> str:
    """What quality is in this report."""
    return "right answers" if report["data"]["has_answers"] else "agreement with AR"


def setup(report: Mapping[str, Any]) -> str:
    """How the numbers of the summary came about, in one line."""
    settings, machine, data, timing = (report[name] for name in ("settings", "environment", "data", "timing"))
    wide = report["verified_settings"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    place = f"{threads} of {machine['processor']}" if machine["device"] == "cpu" else machine["device"]
    counts = sorted(set(data["counts"]["headline"].values()))
    count = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    quality = "" if data["has_answers"] else "Agreement with AR: share of tokens that AR would have chosen too. "
    # No seed decides which rows of a file are in which part.
    seed = f" (seed {data['seed'] + 1})" if data["seed"] is not None else f" of {data['source']}"
    return (
        f"Settings: window {settings['window_size']}, τ = {settings['entropy_threshold']:g}, "
        f"λ = {settings['distance_penalty']:g}; with verification window {wide['window_size']}, "
        f"τ = {wide['entropy_threshold']:g}; greedy. "
        f"{quality}Quality: {count} prompts of each task{seed} that no setting was picked on. "
        f"Speed: at most {timing['headline']} of them per task, one at a time, the decoders in turn, "
        f"median of {timing['repeats']}, {place}, {machine['dtype']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}. ±: standard error over prompts."
    )


def percent(row: Mapping[str, Any], *, error: bool = False) -> str:
    """Quality, of 100."""
    value, spread = 100 * row["quality"], row.get("quality_error")
    return f"{_with_error(value, None if spread is None else 100 * spread, 1) if error else f'{value:.1f}'} %"


def _summary(report: Mapping[str, Any]) -> Table:
    rows = [
        (
            name,
            percent(row, error=True),
            _number(row["tokens_per_forward"], 2),
            _number(row["prefix_cacheability"], 2),
            f"{row['tokens_per_second']:,.0f}",
            _with_error(row["speed"], row["speed_error"] if name != AR else None, 2) + "×",
        )
        for name, row in report["decoders"].items()
    ]
    header = ("decoder", quality_words(report), "tokens per forward", "prefix cacheability", "tokens/s")
    return Table((*header, "speed against AR"), rows)


def _tasks(report: Mapping[str, Any]) -> Table:
    by_decoder = {name: {**row["tasks"], "all": row} for name, row in report["decoders"].items()}
    shown = [name for name in (STREAMING, VERIFIED) if name in by_decoder]
    header = ["task", *(f"{name}: {quality_words(report)}" for name in (AR, *shown[:1]))]
    rows = [[task, *(percent(by_decoder[name][task]) for name in (AR, *shown[:1]))] for task in by_decoder[AR]]
    for name in shown:
        header += [f"{name}: tokens per forward", f"{name}: speed against AR"]
        for row in rows:
            scores = by_decoder[name][row[0]]
            row += [_number(scores["tokens_per_forward"], 2), _number(scores["speed"], 2, "×")]
    return Table(header, rows)


def _settings(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    header = ("decoder", "W", "τ", "λ", quality_words(report), "largest loss", "tokens per forward")
    cells = [
        (
            row["decoder"],
            *("" if row[name] is None else f"{row[name]:g}" for name in _FIELDS),
            percent(row, error=True),
            f"{row['largest_loss']:.1f}",
            _number(row["tokens_per_forward"], 2),
            _number(row["prefix_cacheability"], 2),
            _with_error(row["speed"], row["speed_error"] if row["decoder"] != AR else None, 2) + "×",
        )
        for row in rows
    ]
    return Table((*header, "prefix cacheability", "speed against AR"), cells)


_FIELDS = ("window_size", "entropy_threshold", "distance_penalty")


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def _with_error(value: float | None, error: float | None, digits: int) -> str:
    return _number(value, digits) + ("" if error is None or value is None else f" ± {error:.{digits}f}")
