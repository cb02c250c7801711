"""Rows of measurements that outlast the process: a report that was stopped goes on with what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.utils import WeakFileLock

from ..files import write_text
from ..measure import Measured

FILE = "measured.jsonl"


class Store:
    """Rows by the name of the piece of work that they came of, in one file of JSON lines.

    The first line says what decides the rows; each other line is a piece, appended when it is done. A last line that
    was cut off is dropped. See [`opened`] for arguments and errors.
    """

    def __init__(self, path: Path, request: Mapping[str, Any], restart: bool):
        self.path = path
        self.request = json.loads(json.dumps(request))
        self.pieces: dict[str, list[Measured]] = {} if restart or not path.exists() else self._read()
        lines = [{"request": self.request}, *({"piece": name, "rows": rows} for name, rows in self.pieces.items())]
        write_text(path, "".join(map(_line, lines)))  # anew, so that no line is cut off in the middle

    def put(self, piece: str, rows: list[Measured]) -> None:
        """Keep the rows of a piece."""
        self.pieces[piece] = rows
        with open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(_line({"piece": piece, "rows": rows}))

    def _read(self) -> dict[str, list[Measured]]:
        otherwise = "choose another `--output`, or begin anew (--restart)."
        first, *lines = self.path.read_text(encoding="utf-8").split("\n")
        try:
            previous = json.loads(first)["request"]
            # What follows on the last line end is empty, or was cut off.
            pieces = {piece["piece"]: piece["rows"] for piece in map(json.loads, lines[:-1])}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{str(self.path)!r} is no file of partial results: {otherwise}") from None
        differing = [name for name in {**previous, **self.request} if previous.get(name) != self.request.get(name)]
        if differing:
            there, here = (json.dumps(one.get(differing[0]), ensure_ascii=False) for one in (previous, self.request))
            raise ValueError(
                f"{str(self.path.parent)!r} holds a report with another {', '.join(differing)} "
                f"({differing[0]}: {there:.60} there, {here:.60} now): ask for the same, {otherwise}"
            )
        return pieces


@contextmanager
def opened(folder: Path, request: Mapping[str, Any], *, restart: bool = False) -> Iterator[Store]:
    """The store of a folder, for one process at a time.

    Args:
        folder: of the file.
        request: what decides the rows, as JSON takes it.
        restart: begin anew, whatever the file holds.

    Raises:
        ValueError: if the file is of another request, or is no such file, and while another process writes to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(folder / ".lock", timeout=0.1))
        except TimeoutError as error:
            where = f"Another report is being made in {str(folder)!r}"
            raise ValueError(f"{where}: choose another `--output`.") from error
        store = Store(folder / FILE, request, restart)
        try:
            yield store
        finally:
            if not store.pieces:  # a request that was refused leaves nothing that another one could not go on from
                store.path.unlink()


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
