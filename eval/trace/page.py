"""A trace as one HTML file that replays it: no other file, no network."""

from __future__ import annotations

import os
from pathlib import Path

from ..files import write_text
from .saved import Trace, to_json

TEMPLATE = Path(__file__).with_name("page.html")
PLACEHOLDER = "{{trace}}"


def page(trace: Trace) -> str:
    """The page's HTML. The trace lies in it as JSON without `<`, `>` and `&`: no text of it can end its element."""
    data = to_json(trace)
    for letter in "<>&\u2028\u2029":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACEHOLDER, data)


def write_page(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the page, whole or not at all."""
    write_text(path, page(trace))
