"""Files and Hub datasets of examples; a line that cannot be read is named."""

import json
import re
from pathlib import Path
from typing import Any

from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load(name: str, split: str = "train", *, config_name: str | None = None, streaming: bool = False) -> Any:
    """Reads a JSONL, JSON or Parquet file, or a dataset of the Hub (or a folder that `datasets` can read).

    Args:
        name: path of a `.jsonl`, `.json` or `.parquet` file; else a folder or Hub id.
        split: such as `"train[:100]"`. A file is one split, of any name; slices hold there too.
        config_name: of a Hub id.
        streaming: read while training instead of before.

    Raises:
        OSError: for a file that is not there.
        ValueError: for a malformed line of a JSONL file, with its number, and a `config_name` beside a file.
    """
    path = Path(name)
    builder = _BUILDERS.get(path.suffix)
    if builder is None and path.is_file():
        raise ValueError(f"A file of examples must end in {', '.join(_BUILDERS)}, got {name!r}.")
    if builder is None:
        return load_dataset(name, config_name, split=split, streaming=streaming)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {name!r}.")
    if config_name is not None:
        raise ValueError(
            f"A configuration belongs to a dataset of the Hub, not to the file {name!r}: {config_name!r}."
        )
    if path.suffix == ".jsonl":
        _check_lines(path)
    try:
        return load_dataset(builder, data_files=str(path), split=re.sub(r"^\w+", "train", split), streaming=streaming)
    except (DatasetGenerationError, ValueError) as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"{name}: there is no example in this file.") from None
        raise ValueError(f"{name}: cannot be read as {builder}: {error.__cause__ or error}") from error


def _check_lines(path: Path) -> None:
    """Raises `ValueError` with the number of the first line that is no JSON object: pyarrow names none."""
    examples = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    example = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}:{number}: malformed JSON: {error}") from None
                if not isinstance(example, dict):
                    raise ValueError(f"{path}:{number}: each line must be a JSON object, got {example!r:.60}")
                examples += 1
    if not examples:
        raise ValueError(f"{path}: there is no example in this file.")
