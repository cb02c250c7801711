"""What `wedlm report` writes from the content of report.json: a page without outside resources, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from .markdown import Table, percent, setup, tables
from .report_figures import COLORS, Figure
from .report_stats import AREA_LOSS, FAILS, HOLDS, LARGELY, METRICS, MISSING, MIXED, OPEN
from .sweep import AR, FIELDS, STREAMING, VERIFIED

VERDICTS = {HOLDS: "good", LARGELY: "good", MIXED: "open", OPEN: "open", MISSING: "open", FAILS: "bad"}


def page(report: Mapping[str, Any], drawn: Sequence[Figure]) -> str:
    """The whole page as HTML."""
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(template).render(
        report=report,
        tables=tables(report),
        figures=drawn,
        summary=summary(report),
        setup=setup(report),
        chosen=chosen(report),
        comparisons=_comparisons,
        tuning=_counts(report, "tuning"),
        area_loss=f"{100 * AREA_LOSS:g}",
        no_area=any(entry["area"] is None for entry in report["areas"]),
        details=_details(report),
        colors=COLORS,
        verdicts=VERDICTS,
    )


def summary(report: Mapping[str, Any]) -> list[str]:
    """What a reader in a hurry takes along, one sentence each."""
    rows = report["decoders"]
    words = "right answers" if report["data"]["has_answers"] else "agreement with AR, no answers being known"
    lines = [
        f"{_NAMES[name]}: {rows[name]['speed']:.2f} times AR’s speed, {percent(rows[name])} {words} "
        f"(AR {percent(rows[AR])})."
        for name in (VERIFIED, STREAMING)
        if name in rows
    ]
    prompts = rows[AR]["prompts"]
    if prompts < FEW_PROMPTS:
        lines.append(f"These rest on {prompts} prompts: too few to decide by.")
    by_verdict = {verdict: sum(check["verdict"] == verdict for check in report["trends"]) for verdict in VERDICTS}
    found = ", ".join(f"“{verdict}” {count}" for verdict, count in by_verdict.items() if count)
    return [*lines, f"{len(report['trends'])} checks of what the paper reports: {found}."]


FEW_PROMPTS = 50


_NAMES = {VERIFIED: "Verified decoding", STREAMING: "Streaming decoding without verification"}


def chosen(report: Mapping[str, Any]) -> str:
    """Which settings the sweep picks, in one sentence."""
    name, allowed = report["sweep"]["chosen"], report["sweep"]["max_loss"]
    limit = f"at most {allowed:g} points to AR on every task"
    if name is None:
        fewest = min(report["data"]["counts"]["tuning"].values())
        coarse = (
            f" With {fewest} prompts of a task, one answer is {100 / fewest:.1f} points."
            if fewest * allowed < 100
            else ""
        )
        return f"No setting of unverified streaming decoding loses {limit}.{coarse}"
    return f"The fastest setting of unverified streaming decoding, by tokens per forward, that loses {limit}: {name}."


def as_csv(report: Mapping[str, Any]) -> str:
    """One line for each part, decoder, setting and task (`all` for all of them)."""
    text = io.StringIO()
    columns = ["part", "decoder", *FIELDS, "task", "prompts", "timed", *METRICS]
    writer = csv.DictWriter(
        text, [*columns, *(f"{name}_error" for name in METRICS)], extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    headline = [{"decoder": name, **row} for name, row in report["decoders"].items()]
    for part, rows in (("headline", headline), ("sweep", report["sweep"]["rows"])):
        for row in rows:
            for task, values in {"all": row, **row["tasks"]}.items():
                fixed = {name: row.get(name) for name in ("decoder", *FIELDS)}
                writer.writerow({"part": part, "task": task, **values, **fixed})
    return text.getvalue()


def _comparisons(check: Mapping[str, Any]) -> Table:
    signs = {1: "for it", -1: "against it", 0: "within the noise", None: "no difference"}
    rows = [
        (
            entry["label"],
            f"{entry['difference']:+.3g}",
            "–" if entry["error"] is None else f"{entry['error']:.2g}",
            signs[entry["sign"]],
        )
        for entry in check["comparisons"]
    ]
    return Table(("", "difference", "standard error", ""), rows)


def _counts(report: Mapping[str, Any], part: str) -> str:
    counts = report["data"]["counts"][part]
    return ", ".join(f"{count} {task}" for task, count in counts.items())


def _details(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, data, timing = report["environment"], report["data"], report["timing"]
    parts = "by turns" if data["seed"] is None else f"seeds {data['seed']} and {data['seed'] + 1}"
    return [
        ("model", f"{report['model']}, weights {report['weights']}, {machine['dtype']}"),
        ("prompts", f"{data['source']}, {parts}, no prompt in both parts"),
        ("for the sweep", f"{_counts(report, 'tuning')}; {timing['sweep']} per task are timed"),
        ("for the headline", f"{_counts(report, 'headline')}; {timing['headline']} per task are timed"),
        *(("note", note) for note in data["notes"]),
        (
            "speed",
            f"one prompt at a time, all decoders in turn, median of {timing['repeats']}; new tokens over wall clock",
        ),
        ("quality", f"batches of {timing['batch_size']}; decoders with adaptive windows one at a time"),
        ("decoding", f"greedy, at most {timing['max_new_tokens']} new tokens"),
        ("settings of all", ", ".join(f"{k} = {v}" for k, v in report["common_settings"].items()) or "none"),
        ("errors", "standard errors, by 1,000 resamples of the prompts"),
        (
            "machine",
            f"{machine['device']}, {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads",
        ),
        (
            "versions",
            f"wedlm-hf {machine['wedlm_hf']}, torch {machine['torch']}, transformers {machine['transformers']}, "
            f"Python {machine['python']}",
        ),
    ]
