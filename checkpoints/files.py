"""Writing files: each appears whole or not at all, and whether it can be written is known before any work."""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file beside `path` to write to. At the end it replaces `path`; if anything goes wrong, it is removed.

    Folders on the way are made. A symbolic link stays one: its target is replaced. The new file has the permissions of
    the old one. What cannot be replaced, such as a device (`/dev/null`) or a FIFO, is itself what is yielded.
    """
    path = Path(path)
    if _is_stream(path):
        yield path
        return
    target = _link_target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield unfinished
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` as UTF-8 with Unix line ends, whole or not at all."""
    with written_whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def check_output(path: str | os.PathLike[str], others: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Raises `OSError`, before any work, for a file that cannot be written, and `ValueError` for a folder and for one
    of the `others` that the same command reads or writes."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; a file is to be written.")
    if _is_stream(path):
        return
    target = _link_target(path)
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


def _is_stream(path: Path) -> bool:
    """Whether there is something that is no file: a device, a FIFO, a socket."""
    return path.exists() and not path.is_dir() and not stat.S_ISREG(path.stat().st_mode)


def _link_target(path: Path) -> Path:
    """What a symbolic link leads to, else the path itself."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path
