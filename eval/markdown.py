"""Measured numbers as Markdown, and their places in README.md and the model card.

A page marks a place by two comments: `<!-- measured: NAME -->` and `<!-- /measured -->`, each on a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

BLOCKS = ("summary", "tasks", "setup", "curve")
REFERENCE, STREAMING, VERIFIED, TYPICAL = "AR", "wedlm", "wedlm, verified", "wedlm, typical"
_PLACE = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- /measured -->)", flags=re.DOTALL)


def blocks(report: Mapping[str, Any], sweep: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The Markdown blocks that [`fill`] puts in place, by name, each ending in a line end.

    Args:
        report: the content of report.json.
        sweep: the content of sweep.json; without it there is no block `curve`.
    """
    made = {"summary": _summary(report), "tasks": _tasks(report), "setup": _setup(report)}
    if sweep is not None:
        made["curve"] = curve(sweep)
    return made


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


def curve(sweep: Mapping[str, Any]) -> str:
    """A table of all settings of a sweep, AR first, the chosen one in bold."""
    tasks = sweep["samples"]["tasks"]
    rows = [("AR", "", "", *_right_answers(sweep["reference"], tasks), "", "1.00")]
    for row in sweep["settings"]:
        setting = (f"{row[field]:g}" for field in ("entropy_threshold", "distance_penalty", "window_size"))
        speed = f"{row['pooled']['tokens_per_forward']:.2f}"
        cells = (*setting, *_right_answers(row, tasks), f"{row['largest_loss']:.1f}", speed)
        is_chosen = sweep["chosen"] is not None and sweep["chosen"].items() <= row.items()
        rows.append(tuple(f"**{cell}**" for cell in cells) if is_chosen else cells)
    return _table(("τ", "λ", "W", *tasks, "all", "largest loss", "tokens per forward"), rows)


def _summary(report: Mapping[str, Any]) -> str:
    rows = []
    for name, scores in report["quality"].items():
        # Counts are those of one prompt at a time: windows that adapt are smaller in a batch.
        quality, speed = scores["pooled"], report["speed"][name]["pooled"]
        rows.append(
            (
                name,
                _percent(quality),
                f"{speed['tokens_per_forward']:.2f}",
                f"{speed['prefix_cacheability']:.2f}",
                f"{speed['tokens_per_second']:,.0f}",
                _speed_ratio(report, name),
            )
        )
    header = ("decoder", "right answers", "tokens per forward", "prefix cacheability", "tokens/s", "speed against AR")
    return _table(header, rows)


def _tasks(report: Mapping[str, Any]) -> str:
    quality, speed = (
        {name: {**scores["tasks"], "all": scores["pooled"]} for name, scores in report[kind].items()}
        for kind in ("quality", "speed")
    )
    header = ["task", f"{REFERENCE}: right answers", f"{STREAMING}: right answers"]
    rows = [
        [task, _percent(quality[REFERENCE][task]), _percent(quality[STREAMING][task])] for task in quality[REFERENCE]
    ]
    for name in (STREAMING, VERIFIED):
        header += [f"{name}: tokens per forward", f"{name}: speed against AR"]
        for row in rows:
            task = row[0]
            row += [f"{speed[name][task]['tokens_per_forward']:.2f}", _speed_ratio(report, name, task)]
    return _table(header, rows)


def _setup(report: Mapping[str, Any]) -> str:
    settings, machine, samples = report["settings"], report["environment"], report["samples"]
    speed, wide = report["timing"], report["verified_settings"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    return (
        f"Settings: window {settings['window_size']}, τ = {settings['entropy_threshold']:g}, "
        f"λ = {settings['distance_penalty']:g}; with verification window {wide['window_size']} at most, "
        f"τ = {wide['entropy_threshold']:g}; greedy. "
        f"Quality: {samples['count']} fresh held-out prompts of each task (seed {samples['seed']}). "
        f"Speed: {speed['count']} of them per task, one at a time, the decoders in turn, "
        f"median of {speed['repeats']}, {threads} of {machine['processor']}, {machine['dtype']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}.\n"
    )


def _right_answers(scores: Mapping[str, Any], tasks: list[str]) -> list[str]:
    return [_percent(scores["tasks"][task]) for task in tasks] + [_percent(scores["pooled"])]


def _percent(score: Mapping[str, Any]) -> str:
    return f"{100 * score['accuracy']:.1f} %"


def _speed_ratio(report: Mapping[str, Any], name: str, task: str = "all") -> str:
    """Tokens/s against AR's."""
    speeds = []
    for decoder in (name, REFERENCE):
        scores = report["speed"][decoder]
        speeds.append((scores["pooled"] if task == "all" else scores["tasks"][task])["tokens_per_second"])
    return f"{speeds[0] / speeds[1]:.2f}×"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned in its source too: text in the first column, numbers in the others."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join([first.lstrip().ljust(widths[0]), *others])} |\n"

    rule = f"| {' | '.join(['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])])} |\n"
    return "".join([line(header), rule, *map(line, rows)])
