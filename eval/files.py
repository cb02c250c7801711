"""Writing files: each appears whole or not at all, and whether it can be written is known before any work."""

import os
from collections.abc import Iterable
from pathlib import Path

from ..modeling_wedlm.files import is_stream, link_target, write_text, written_whole

__all__ = ["check_folder", "check_output", "write_text", "written_whole"]


def check_output(path: str | os.PathLike[str], others: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Raises `OSError`, before any work, for a file that cannot be written, and `ValueError` for a folder and for one
    of the `others` that the same command reads or writes."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; a file is to be written.")
    if is_stream(path):
        return
    target = link_target(path)
    if any(os.path.realpath(path) == os.path.realpath(other) for other in others):
        raise ValueError(f"{str(path)!r} is named twice: what is read or written there would be lost.")
    check_folder(target.parent)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Make sure that files can be written into a folder, which need not be there yet. Raises `OSError` otherwise."""
    path = Path(folder).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "is read-only" if there.is_dir() else "is no folder"
        raise OSError(f"The folder {str(folder)!r} cannot be written to: {str(there)!r} {reason}.")
