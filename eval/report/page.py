"""What a report writes: one template, as Markdown and as a page without outside resources; JSON and CSV."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markdown_it import MarkdownIt

from ...checkpoints.files import write_text
from ..decoders import AR, EXACT, FIELDS, LOOKUP, WEDLM
from ..table import TITLES, cells
from .figures import figures
from .numbers import Numbers

MOST_DEPTHS = 8
ALL_TASKS = "all tasks"


class Words:
    """The text of a report, in Markdown: the template and what it is filled with."""

    def __init__(self, report: Mapping[str, Any], numbers: Numbers):
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._markdown = environment.get_template("report.md.jinja")
        self._page = environment.get_template("report.html")
        speeds = cells(numbers.headline, ["speed"])["speed"].to_dict()
        self.facts = {
            "report": report,
            "speeds": speeds,
            "is_busy": any("(" in text for text in speeds.values()),  # an impossible one says so
            "headline": numbers.headline.to_dict("index"),
            "is_compared": bool(numbers.headline["same"].notna().all()),  # with AR's answers, token for token
            "steps": pd.DataFrame(numbers.differences, columns=["gap", "spacing"]).eval("gap / spacing"),
        }

    def markdown(self, tables: Mapping[str, str], drawn: Sequence[Any] = ()) -> str:
        """All of it, with these tables and figures."""
        text = self._markdown.render(self.facts, tables=tables, figures=drawn)
        return re.sub("\n{3,}", "\n\n", text)

    def page(self, tables: Mapping[str, str], drawn: Sequence[Any]) -> str:
        """The same as HTML."""
        body = MarkdownIt("commonmark", {"html": True}).enable("table").render(self.markdown(tables, drawn))
        return self._page.render(model=self.facts["report"]["model"], body=body)

    def block(self, name: str) -> str:
        """Sentences by themselves: `summary`, `same` or `chosen`."""
        return "".join(self._markdown.blocks[name](self._markdown.new_context(self.facts))).strip()


def write_report(about: Mapping[str, Any], numbers: Numbers, folder: Path, figure_folder: Path | None) -> Words:
    """Write report.json, .md and .html, table.csv, and the figures that were asked for."""
    quality = "right answers" if about["data"]["has_answers"] else "agreement with AR"
    report = {**about, **numbers.as_json()}
    words = Words(report, numbers)
    drawn = figures(numbers, about["settings"]["window_size"], quality)
    shown = {name: as_markdown(made) for name, made in tables(numbers, quality).items()}
    write_text(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / "table.csv", numbers.table.to_csv(index=False))
    write_text(folder / "report.html", words.page(shown, drawn))
    write_text(folder / "report.md", words.markdown(shown))
    if figure_folder is not None:
        for figure in drawn:
            figure.write_png(figure_folder)
    return words


def tables(numbers: Numbers, quality: str) -> dict[str, pd.DataFrame]:
    """All tables of a report, their cells as texts; `quality` says what quality is."""
    main, errors = ["quality", "tokens_per_forward", "prefix_cacheability"], ["quality", "speed"]
    timed = ["tokens_per_second", "speed", "first_token_seconds", "own_cost", "same"]
    timed += ["peak_bytes"] * bool(numbers.batches["peak_bytes"].notna().any())
    headline, depths = numbers.headline, numbers.depths
    shares = (depths["accepted"] / depths["drafted"]).unstack("depth").iloc[:, :MOST_DEPTHS]
    # AR's quality by task, then that of the others with their speeds; the last line is that of all tasks together.
    tasks = pd.concat([numbers.tasks, headline.assign(task=ALL_TASKS).set_index("task", append=True)])
    by_task = cells(tasks, ["quality", "tokens_per_forward", "speed"])
    shown = [name for name in (WEDLM, EXACT, LOOKUP) if name in headline.index]
    columns = [(name, "quality") for name in (AR, *shown[:1])]
    columns += [(name, column) for name in shown for column in ("tokens_per_forward", "speed")]
    titles = TITLES | {"quality": quality}
    made = {
        "summary": cells(headline, [*main, "tokens_per_second", "speed"], errors).reset_index(),
        "tasks": pd.DataFrame(
            {f"{name}: {titles[key]}": by_task.loc[name][key] for name, key in columns}
        ).reset_index(),
        "batches": cells(numbers.batches, timed).reset_index(),
        "depths": shares.map("{:.2f}".format, "ignore").fillna("–").rename(columns=str).reset_index(),
    }
    if len(sweep := numbers.sweep):
        settings = sweep[[*FIELDS]].map("{:g}".format, "ignore").astype(object).fillna("")
        settings.columns = list("Wτλ")
        settings.insert(0, "decoder", sweep["kind"])
        settings = settings.join(cells(sweep, ["quality", "loss", *main[1:], "speed"], errors))
        made |= {
            "front": settings.loc[sweep[sweep["on_front"]].sort_values("speed", kind="stable").index],
            "sweep": settings,
        }

    def title(column: str) -> str:
        return titles.get(column, column.replace("_", " "))

    return {name: table.rename(columns=title) for name, table in made.items()}


def as_markdown(table: pd.DataFrame) -> str:
    """Words to the left, numbers to the right; what Markdown would take for a column's end or for HTML is escaped."""
    escaped = table.map(_escaped).rename(columns=_escaped)
    align = ["left" if name in ("decoder", "task") else "right" for name in escaped.columns]
    return str(escaped.to_markdown(index=False, colalign=align, disable_numparse=True)) + "\n"


def _escaped(cell: object) -> str:
    return html.escape(str(cell), quote=False).replace("|", r"\|")
