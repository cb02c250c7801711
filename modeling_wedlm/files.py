"""Writing files: each appears whole or not at all."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file beside `path` to write to. At the end it replaces `path`; if anything goes wrong, it is removed.

    Folders on the way are made. A symbolic link stays one: its target is replaced. The new file has the permissions of
    the old one. What cannot be replaced, such as a device (`/dev/null`) or a FIFO, is itself what is yielded.
    """
    path = Path(path)
    if is_stream(path):
        yield path
        return
    target = link_target(path)
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


def is_stream(path: Path) -> bool:
    """Whether there is something that is no file: a device, a FIFO, a socket."""
    return path.exists() and not path.is_dir() and not stat.S_ISREG(path.stat().st_mode)


def link_target(path: Path) -> Path:
    """What a symbolic link leads to, else the path itself."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path
