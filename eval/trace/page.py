"""A trace as one HTML file that replays it: no other file, no network."""

from __future__ import annotations

import os
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..files import write_text
from .saved import Trace, to_json

FOLDER = Path(__file__).parent


def page(trace: Trace) -> str:
    """The page's HTML. The trace lies in it as JSON without `<`, `>` and `&`: no text of it can end its element."""
    return render("page.html", trace=escaped(to_json(trace)))


def render(name: str, *folders: Path, **values: str) -> str:
    """A page made of a template, which may extend page.html, with its styles and scripts in it; values are markup."""
    environment = Environment(loader=FileSystemLoader([*folders, FOLDER]), undefined=StrictUndefined)
    return environment.get_template(name).render(values)


def escaped(data: str) -> str:
    """JSON that can stand in a script element."""
    for letter in "<>&\u2028\u2029":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return data


def write_page(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the page, whole or not at all."""
    write_text(path, page(trace))
