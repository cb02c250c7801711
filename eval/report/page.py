"""What a report writes: one table as CSV and Markdown, one figure, one page without outside resources."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd
from markdown_it import MarkdownIt

from ...checkpoints.files import write_text
from ..table import TITLES, as_markdown, cells
from .figure import INK, draw_report

ALL_TASKS = "all"
_SHOWN = ("quality", "tokens_per_forward", "prefix_cacheability", "tokens_per_second", "speed", "same")
_WORDS = (
    "± is the standard error over prompts. *Tokens per forward*: new tokens for each forward of the model, 1 in AR "
    "decoding (plain `generate`). *Prefix cacheability*: new tokens for each token that went through the model. "
    "*Same answers*: token for token AR's."
)


@dataclass(frozen=True)
class Report:
    """What was measured."""

    table: pd.DataFrame  # numbers and their errors by (decoder, task), of all tasks first; the settings
    quality: str  # what quality is
    picked: str | None  # the decoder of [`pick`]
    notes: list[str]  # what a reader must know, among it what to do about decoders that are wrong or slow
    about: Mapping[str, Any]  # what a reader needs to measure the same again

    @property
    def texts(self) -> pd.DataFrame:
        """The table as it is read; without a column of tasks where there is one."""
        shown = [name for name in _SHOWN if name in self.table and self.table[name].notna().any()]
        made = cells(self.table, shown, with_errors=("quality", "speed")).reset_index()
        if made["task"].nunique() == 1:
            made = made.drop(columns="task")
        return made.rename(columns=TITLES | {"quality": self.quality})

    @property
    def markdown(self) -> str:
        """All of it but the figure."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        about = "".join(f"- {name.replace('_', ' ')}: {value}\n" for name, value in self.about.items() if value)
        best = f"`{self.picked}`" if self.picked else "none"
        return (
            f"# {self.about['model']}\n\n{as_markdown(self.texts)}\n{_WORDS}\n\n{notes}"
            f"- Unverified streaming setting with the most tokens per forward that keeps AR's quality: {best}.\n\n"
            f"## How it was measured\n\n{about}"
        )

    def as_json(self) -> dict[str, Any]:
        """Rows of the table and the rest."""
        rows = self.table.reset_index().astype(object).where(lambda values: values.notna(), None).to_dict("records")
        return {"rows": rows, "picked": self.picked, "notes": self.notes, "about": dict(self.about)}


def write_report(report: Report, folder: Path) -> None:
    """Write table.csv, figure.svg, report.md, and report.html with all of it."""
    figure = draw_report(report.table.xs(ALL_TASKS, level="task"), report.quality)
    write_text(folder / "table.csv", report.table.to_csv())
    write_text(folder / "figure.svg", figure)
    write_text(folder / "report.md", report.markdown)
    head, rest = MarkdownIt("commonmark", {"html": False}).enable("table").render(report.markdown).split("</table>", 1)
    drawn = figure[figure.index("<svg") :].replace(INK, "currentColor")  # as dark or light as the page's text
    page = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    body = f"{head}</table>\n<figure>{drawn}</figure>{rest}"
    write_text(folder / "report.html", page.substitute(title=report.about["model"], body=body))
