"""Writing files: each appears whole or not at all, and whether it can be written is known before any work."""

import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError


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
        unfinished.touch()
        mode = stat.S_IMODE((target if target.exists() else unfinished).stat().st_mode)
        yield unfinished
        unfinished.chmod(mode)  # safetensors makes files that their owner alone can read
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def folder_written_whole(target: Path) -> Iterator[Path]:
    """A folder whose content becomes `target`'s at the end, or is removed if anything goes wrong. A new folder appears
    by one rename. One that is there already may be a mount point, a link's target or the working folder of a shell: it
    stays, and its files are moved into it, config.json last."""
    is_there = target.is_dir()
    unfinished = (target if is_there else target.parent) / f".{target.name}.{uuid.uuid4().hex}"
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if is_there:
            for file in sorted(unfinished.iterdir(), key=lambda file: file.name == "config.json"):
                os.replace(file, target / file.name)
        else:
            os.replace(unfinished, target)
    except SafetensorError as error:  # what safetensors raises for a full disk
        raise OSError(f"The weights cannot be written into {str(target)!r}: {error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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


def check_new_folder(folder: Path) -> None:
    """Raises `FileExistsError` for a path that is neither new nor an empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"The output folder must be new or empty, got {str(folder)!r}.")


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Make sure that files can be written into a folder, which need not be there yet. Raises `OSError` otherwise."""
    there = _first_there(folder)
    reason = "" if there.is_dir() else "is no folder"
    try:  # to root all folders look writable, those of /proc too
        TemporaryFile(dir=there).close()
    except OSError as error:
        reason = reason or f"is read-only ({error.strerror})"
    if reason:
        raise OSError(f"The folder {str(folder)!r} cannot be written to: {str(there)!r} {reason}.")


def check_room(folder: str | os.PathLike[str], size: int) -> None:
    """Raises `OSError` unless the disk of a folder, which need not be there yet, has so many bytes free."""
    there = _first_there(folder)
    if (free := shutil.disk_usage(there).free) < size:
        raise OSError(
            f"About {size / 1e9:.1f} GB are needed, and {str(there)!r} has {free / 1e9:.1f} GB free: make room, or "
            "choose a folder on another disk."
        )


def _first_there(folder: str | os.PathLike[str]) -> Path:
    """The folder, or the nearest above it that exists."""
    path = Path(folder).absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def _is_stream(path: Path) -> bool:
    """Whether there is something that is no file: a device, a FIFO, a socket."""
    return path.exists() and not path.is_dir() and not stat.S_ISREG(path.stat().st_mode)


def _link_target(path: Path) -> Path:
    """What a symbolic link leads to, else the path itself."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path
