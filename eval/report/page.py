"""What a report writes: one template, as Markdown and as a page without outside resources; JSON, CSV, and measured
tables in Markdown files of the user's."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markdown_it import MarkdownIt

from ..decoders import AR, EXACT, WEDLM
from ..files import write_text
from ..sweep import FIELDS
from .figures import figures
from .numbers import AREA_LOSS, TITLES, Numbers

BLOCKS = ("summary", "tasks", "batches", "setup", "front")
ALL_TASKS = "all tasks"
_PLACE = re.compile(r"(<!-- measured: (\w+) -->\n)(.*?)(<!-- /measured -->)", flags=re.DOTALL)

FORMATS = {
    "quality": (100, 1, " %"),
    "same": (100, 0, " %"),
    "own_cost": (100, 0, " %"),
    "tokens_per_second": (1, 0, ""),
    "speed": (1, 2, "×"),
    "first_token_seconds": (1000, 1, ""),
    "peak_bytes": (2**-20, 1, ""),
    "answer_tokens": (1, 0, ""),
}
"""Factor, digits and unit; of other names, two digits."""


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
        correlations = numbers.prompts.corr("spearman", numeric_only=True)["entropy"]
        own = [name for name in correlations.index if name.startswith("tokens_per_forward")]
        self.facts = {
            "report": report,
            "headline": numbers.headline.to_dict("index"),
            "steps": pd.DataFrame(numbers.differences, columns=["gap", "spacing"]).eval("gap / spacing"),
            "correlations": {name.partition(", ")[2]: correlations[name] for name in own},
            "area_loss": f"{100 * AREA_LOSS:g}",
            "no_area": bool(numbers.areas["area"].isna().any()),
        }

    def markdown(self, tables: Mapping[str, str], drawn: Sequence[Any] = ()) -> str:
        """All of it, with these tables and figures."""
        return self._markdown.render(self.facts, tables=tables, figures=drawn)

    def page(self, tables: Mapping[str, str], drawn: Sequence[Any]) -> str:
        """The same as HTML."""
        body = MarkdownIt("commonmark", {"html": True}).enable("table").render(self.markdown(tables, drawn))
        return self._page.render(model=self.facts["report"]["model"], body=body)

    def block(self, name: str) -> str:
        """Sentences by themselves: `summary`, `same` or `chosen`."""
        return "".join(self._markdown.blocks[name](self._markdown.new_context(self.facts))).strip()


def write_report(
    about: Mapping[str, Any], numbers: Numbers, folder: Path, figure_folder: Path | None, fill_files: Sequence[Path]
) -> Words:
    """Write report.json, .csv, .md and .html, table.csv, and the figures and blocks that were asked for."""
    quality = "right answers" if about["data"]["has_answers"] else "agreement with AR"
    report = {**about, **numbers.as_json()}
    words = Words(report, numbers)
    drawn = figures(numbers, about["settings"]["window_size"], quality)
    shown = {name: as_markdown(made) for name, made in tables(numbers, quality).items()}
    markdown = words.markdown(shown)
    write_text(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / "report.csv", summary_csv(numbers))
    write_text(folder / "table.csv", numbers.table.to_csv(index=False))
    write_text(folder / "report.html", words.page(shown, drawn))
    write_text(folder / "report.md", markdown)
    if figure_folder is not None:
        for figure in drawn:
            figure.write_png(figure_folder)
    for path in fill_files:
        write_text(path, fill(path.read_text(encoding="utf-8"), blocks_of(markdown)))
    return words


def tables(numbers: Numbers, quality: str) -> dict[str, pd.DataFrame]:
    """All tables of a report, their cells as texts; `quality` says what quality is."""
    main = ["quality", "tokens_per_forward", "prefix_cacheability"]
    errors = ["quality", "speed", "area"]
    symbols = dict(zip(FIELDS, "Wτλ", strict=True))
    sweep = numbers.sweep.sort_values("speed", kind="stable")
    cells = _cells(sweep, [*main, "speed"], errors)
    values = sweep[[*FIELDS]].map("{:g}".format, "ignore").fillna("").rename(columns=symbols)
    settings = values.assign(decoder=sweep["kind"], loss=sweep["loss"].map("{:.1f}".format)).join(cells)
    settings = settings[["decoder", *"Wτλ", "quality", "loss", *main[1:], "speed"]]
    settings = settings.rename(columns={"loss": "largest loss"})
    texts = numbers.prompts.groupby("task").mean().sort_values("entropy")
    made = {
        "summary": _cells(numbers.headline, [*main, "tokens_per_second", "speed"], errors).reset_index(),
        "tasks": _tasks(numbers, quality),
        "batches": _cells(
            numbers.batches, ["tokens_per_second", "speed", "first_token_seconds", "own_cost", "same", "peak_bytes"]
        ).reset_index(),
        "front": settings[sweep["on_front"]],
        "sweep": settings.loc[numbers.sweep.index],
        "areas": _cells(numbers.areas, ["area"], errors).reset_index(),
        "entropy": _cells(texts, texts.columns).assign(entropy=texts["entropy"].map("{:.2g}".format)).reset_index(),
    }
    titles = TITLES | {"quality": quality}
    return {
        name: table.rename(columns=lambda column: titles.get(column, column.replace("_", " ")))
        for name, table in made.items()
    }


def _cells(rows: pd.DataFrame, names: Sequence[str], with_errors: Sequence[str] = ()) -> pd.DataFrame:
    """Values as texts, some with their standard errors; those of AR's own speed have none."""
    made = {}
    for name in names:
        errors = rows[f"{name}_error"] if name in with_errors else pd.Series(index=rows.index, dtype=float)
        if name == "speed":
            errors = errors.where(rows["speed"] != 1)
        made[name] = [_cell(name, *pair) for pair in zip(rows[name], errors, strict=True)]
    return pd.DataFrame(made, index=rows.index)


def _cell(name: str, value: float, error: float = float("nan")) -> str:
    factor, digits, unit = FORMATS.get(name, (1, 2, ""))
    if pd.isna(value):
        return "–"
    spread = "" if pd.isna(error) else f" ± {factor * error:.{digits}f}"
    return f"{factor * value:,.{digits}f}{spread}{unit}"


def _tasks(numbers: Numbers, quality: str) -> pd.DataFrame:
    """AR's quality, then that of the others with their speeds; the last line is that of all tasks together."""
    shown = [name for name in (WEDLM, EXACT) if name in numbers.headline.index]
    columns = [(name, "quality") for name in (AR, *shown[:1])]
    columns += [(name, column) for name in shown for column in ("tokens_per_forward", "speed")]
    tasks, titles = numbers.tasks.loc[AR].index, TITLES | {"quality": quality}
    made = {"task": [*tasks, ALL_TASKS]}
    for name, column in columns:
        values = [*numbers.tasks.loc[name].loc[tasks, column], numbers.headline.loc[name, column]]
        made[f"{name}: {titles[column]}"] = [_cell(column, value) for value in values]
    return pd.DataFrame(made)


def as_markdown(table: pd.DataFrame) -> str:
    """Words to the left, numbers to the right; what Markdown would take for a column's end or for HTML is escaped."""
    escaped = table.map(_escaped).rename(columns=_escaped)
    align = ["left" if name in ("decoder", "task") else "right" for name in escaped.columns]
    return str(escaped.to_markdown(index=False, colalign=align, disable_numparse=True)) + "\n"


def _escaped(cell: object) -> str:
    return html.escape(str(cell), quote=False).replace("|", r"\|")


def blocks_of(text: str) -> dict[str, str]:
    """What stands in the measured blocks of a Markdown text, by name."""
    return {match[2]: match[3] for match in _PLACE.finditer(text)}


def check_blocks(files: Sequence[Path]) -> None:
    """Raises `ValueError` for files without places for the [`BLOCKS`]."""
    for path in files:
        try:
            fill(path.read_text(encoding="utf-8"), dict.fromkeys(BLOCKS, ""))
        except ValueError as error:
            raise ValueError(f"`--fill {path}`: {error}.") from None


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Replace what stands between `<!-- measured: NAME -->` and `<!-- /measured -->`, each on a line of its own.

    Raises:
        ValueError: if the text has no such place, or one with a name that is not in `blocks`.
    """
    names = blocks_of(text)
    unknown = sorted(set(names) - set(blocks))
    if not names or unknown:
        raise ValueError(
            "expected blocks <!-- measured: NAME --> … <!-- /measured --> with a name among "
            f"{', '.join(blocks)}, got {', '.join(unknown) or 'none'}"
        )
    return _PLACE.sub(lambda match: f"{match[1]}{blocks[match[2]]}{match[4]}", text)


def summary_csv(numbers: Numbers) -> str:
    """A line for each part, decoder, setting and task; that of all tasks together names none."""
    headline = numbers.headline.reset_index().assign(part="headline")
    tasks = numbers.tasks.reset_index().assign(part="headline")
    sweep = numbers.sweep.assign(part="sweep").rename(columns={"kind": "decoder"})
    lines = pd.concat([headline, tasks, sweep], ignore_index=True)
    first = ["part", "decoder", *FIELDS, "task"]
    return str(lines[[*first, *(name for name in lines if name not in first)]].to_csv(index=False))
