"""Files of examples: each row with the place where it stands, so that whatever is wrong with it can be told by it."""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from datasets import Dataset, Features, IterableDataset, ReadInstruction, Value, load_dataset
from datasets.exceptions import DatasetGenerationError

from ..console.prompts import encoding_of, is_unicode

# A row of a JSON file stays the text that it is until it is read: a table would give the tool calls of one row the
# arguments of all others, as nulls.
_TEXT, _PLACE = "json_text", "json_place"
_WANTED = "each line must be a JSON object: "
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}


def load(name: str, split: str = "train", *, config_name: str | None = None, streaming: bool = False) -> Any:
    """Reads a JSONL, JSON, Parquet, CSV or TSV file, or a dataset of the Hub (or a folder that `datasets` reads). A
    file is one split, of any name; slices such as `"train[:100]"` hold there too. [`row_of`] reads rows of JSON files.
    Raises `OSError` for a file that is not there, and `ValueError` for a row that is no JSON object, with its place,
    and a `config_name` beside a file."""
    path = Path(name)
    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None and path.is_file():
        raise ValueError(f"A file of examples must end in {', '.join(_BUILDERS)}, got {name!r}.")
    if builder is None and not path.exists() and (path.is_absolute() or (path.suffix and "/" not in name)):
        raise FileNotFoundError(f"There is no file {name!r}, and files of examples end in {', '.join(_BUILDERS)}.")
    if builder is None:
        return load_dataset(name, config_name, split=split, streaming=streaming)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {name!r}.")
    if config_name is not None:
        here = f"not to the file {name!r}"
        raise ValueError(f"A configuration belongs to a dataset of the Hub, {here}: {config_name!r}.")
    split = re.sub(r"^\w+", "train", split)
    if builder == "json":
        return _load_rows(path, split, streaming)
    try:
        how = _as_text(path) if builder == "csv" else {}
        return load_dataset(builder, data_files=str(path), split=split, streaming=streaming, **how)
    except (DatasetGenerationError, StopIteration, ValueError) as error:
        if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
            raise _no_example(name) from None
        raise ValueError(f"{name}: cannot be read as {builder}: {error.__cause__ or error}") from error


def _as_text(path: Path) -> dict[str, Any]:
    """Settings of `load_dataset` with which every cell of a CSV file stays the text that it is; cells have commas,
    semicolons or tabs between them. Raises `ValueError` for a line with more cells than the first one, and for a name
    that is there twice."""
    with path.open("rb") as file:
        encoding = encoding_of(file.read(4))
    limit = csv.field_size_limit(2**31 - 1)  # texts may be long
    try:
        with path.open(encoding=encoding, newline="") as file:
            delimiter = _delimiter(file, path.suffix.lower())
            file.seek(0)
            rows = csv.reader(file, delimiter=delimiter)
            columns = next(rows, [])
            if double := sorted({name for name in columns if columns.count(name) > 1}):
                raise ValueError(f"the column {double[0]!r} is there twice")
            for row in rows:  # pandas would take the first cell of a longer row for its name, and move the others
                if len(row) > len(columns):
                    wanted = f"{len(columns)} cells, as the first line says"
                    raise ValueError(
                        f"line {rows.line_num} must have {wanted}, got {len(row)}. Quote text with {delimiter!r}"
                    )
    except csv.Error as error:
        raise ValueError(str(error)) from error
    finally:
        csv.field_size_limit(limit)
    features = Features({name: Value("string") for name in columns})
    return {"features": features, "keep_default_na": False, "encoding": encoding, "sep": delimiter}


def _delimiter(file: TextIO, suffix: str) -> str:
    """What stands between cells. Spreadsheets write semicolons or tabs into a `.csv` file, too, but a text may have
    them: they are delimiters where the first line has no comma, and the next one as many cells as it."""
    if suffix == ".tsv":
        return "\t"
    counts = {}
    for each in ",;\t":
        file.seek(0)
        header, row = [*islice(filter(None, csv.reader(file, delimiter=each)), 2), [], []][:2]
        counts[each] = len(header) if each == "," or len(header) == len(row) else 0
    return "," if counts[","] > 1 else max(counts, key=lambda each: counts[each])


def row_of(example: Mapping[str, Any], index: int, name: str) -> tuple[dict[str, Any], str, bool]:
    """What an example of the dataset of this name holds; where it stands, for messages; and whether it is JSON as it
    was written, so that a null in it is one."""
    if _PLACE in example:
        return json.loads(example[_TEXT]), example[_PLACE], True
    return dict(example), f"Example {index + 1} of the {name} dataset", False


def _load_rows(path: Path, split: str, streaming: bool) -> Dataset | IterableDataset:
    if streaming and split != "train":
        raise ValueError(f"A stream is read from its beginning: `dataset_split` cannot be a slice, got {split!r}.")
    if streaming:
        if not sum(1 for _ in _rows(str(path))):  # a wrong row is told before any work
            raise _no_example(path)
        return IterableDataset.from_generator(_rows, gen_kwargs={"path": str(path)})
    if next(_rows(str(path)), None) is None:
        raise _no_example(path)
    state = path.stat()  # which version of the file `datasets` has in its cache
    try:
        rows = Dataset.from_generator(
            _rows, gen_kwargs={"path": str(path), "version": (state.st_mtime_ns, state.st_size)}
        )
    except DatasetGenerationError as error:
        raise (error.__cause__ if isinstance(error.__cause__, ValueError) else error) from None
    parts = ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    return rows if split == "train" else rows.select([i for part in parts for i in range(part.from_, part.to)])


def _rows(path: str, version: Any = None) -> Iterator[dict[str, str]]:
    """The rows of a file of JSON Lines, or of one JSON array. Raises `ValueError` for one that is no JSON object."""
    with open(path, "rb") as file:
        encoding = encoding_of(file.read(4))
    # Of UTF-8, undecodable bytes become halves of surrogate pairs, so that the line is known in which they stand.
    with open(path, encoding=encoding, errors="surrogateescape") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if path.lower().endswith(".json") and line.lstrip().startswith("["):
                    items = _parsed(line + lines.read(), path, number)
                    for index, item in enumerate(items, start=1):
                        yield _row(item, json.dumps(item), f"{path}, example {index}")
                elif line.strip():
                    yield _row(_parsed(line.strip(), path, number), line.strip(), f"{path}:{number}")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: the text is not {encoding.upper()}. Save the file as UTF-8.") from None


def _parsed(text: str, path: str, first: int) -> Any:
    """The value of a line, or of the array that begins at line `first`."""
    try:
        if not is_unicode(text):
            raise ValueError("the text is not UTF-8. Save the file as UTF-8")
        return json.loads(text)
    except json.JSONDecodeError as error:
        place, line = f"{path}:{first + error.lineno - 1}", text.split("\n")[error.lineno - 1][:40]
        is_json = path.lower().endswith(".json") and not text.startswith("[")
        hint = " A .json file may also hold one array of objects." if is_json else ""
        raise ValueError(f"{place}: {_WANTED}{error.msg} at column {error.colno} of {line!r}.{hint}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{first}: {_WANTED}{error}.") from None


def _row(value: Any, text: str, place: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: {_WANTED}not an object, got {text[:40]!r}.")
    return {_PLACE: place, _TEXT: text}


def _no_example(name: Any) -> ValueError:
    return ValueError(f"{name}: there is no example in this file.")
