"""Data for training: files and Hub datasets in, examples of `input_ids` and `labels` out, nothing lost in silence."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

# What becomes of an example.
WHOLE, SHORTENED, TOO_LONG, UNSUPERVISED = range(4)
FATES = {
    SHORTENED: "shortened to `max_length` (a cut answer is never taught to stop)",
    TOO_LONG: "dropped: longer than `max_length` before anything to learn",
    UNSUPERVISED: "dropped: nothing to learn (no assistant turn, or no supervised token)",
}


def load(name: str, split: str = "train", *, config_name: str | None = None, streaming: bool = False) -> Any:
    """Reads a JSONL, JSON or Parquet file, or a dataset of the Hub (or a folder that `datasets` can read).

    Args:
        name: path of a `.jsonl`, `.json` or `.parquet` file; else a folder or Hub id.
        split: of a folder or Hub id.
        config_name: of a Hub id.
        streaming: read while training instead of before.

    Raises:
        FileNotFoundError: for a file that is not there.
        ValueError: for a malformed line of a JSONL file, with its number.
    """
    path = Path(name)
    builder = _BUILDERS.get(path.suffix)
    if builder is None:
        return load_dataset(name, config_name, split=split, streaming=streaming)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {name!r}.")
    if path.suffix == ".jsonl" and (streaming or os.path.getsize(path) == 0):
        _check_jsonl(path)  # a stream would break off in the middle of training
    try:
        return load_dataset(builder, data_files=str(path), split="train", streaming=streaming)
    except (DatasetGenerationError, ValueError) as error:
        if path.suffix == ".jsonl":
            _check_jsonl(path)
        raise ValueError(f"{name}: cannot be read as {builder}: {error.__cause__ or error}") from error


def _check_jsonl(path: Path) -> None:
    """Raises `ValueError` with the number of the first line that is no JSON object."""
    rows = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: malformed JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: each line must be a JSON object, got {line.strip()[:60]!r}")
            rows += 1
    if not rows:
        raise ValueError(f"{path}: there is no example in this file.")


def first_example(dataset: Any, name: str) -> dict[str, Any]:
    """The first example.

    Raises:
        ValueError: for an empty dataset.
    """
    for example in dataset:
        return dict(example)
    raise ValueError(f"The {name} dataset is empty.")


def has_assistant_turn(example: Mapping[str, Any]) -> bool:
    """Whether a conversation has a turn to learn."""
    turns = example.get("completion") or example.get("messages") or []
    return any(turn["role"] == "assistant" for turn in turns)


def fit(
    example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int | None, vocab_size: int
) -> dict[str, list[int] | int | bool]:
    """One tokenised example, no longer than `max_length`, and what became of it.

    White space that a template writes behind an end token, and counts as the assistant's, is not supervised: a
    response ends in its end token.

    Returns:
        `input_ids`, `labels`, `fate`, and `stops`: whether a response ends in the end token.

    Raises:
        ValueError: for a token outside `[0, vocab_size)`.
    """
    input_ids, labels = list(example["input_ids"]), list(example["labels"])
    if not 0 <= min(input_ids, default=0) <= max(input_ids, default=0) < vocab_size:
        raise ValueError(
            f"`input_ids` must lie in [0, {vocab_size}), the model's vocabulary, got {min(input_ids)} to "
            f"{max(input_ids)}: another tokenizer made them."
        )
    stops = False
    end = len(labels)
    while end > 0:  # runs of supervised tokens, from the last one on
        if labels[end - 1] == IGNORE_INDEX:
            end -= 1
            continue
        start = end
        while start > 0 and labels[start - 1] != IGNORE_INDEX:
            start -= 1
        closed = next((i for i in range(end - 1, start - 1, -1) if input_ids[i] == tokenizer.eos_token_id), None)
        if closed is not None and not str(tokenizer.decode(input_ids[closed + 1 : end])).strip():
            labels[closed + 1 : end] = [IGNORE_INDEX] * (end - closed - 1)
            stops = True
        end = start
    fate = WHOLE if any(label != IGNORE_INDEX for label in labels[1:]) else UNSUPERVISED
    if max_length is not None and len(input_ids) > max_length and fate == WHOLE:
        input_ids, labels = input_ids[:max_length], labels[:max_length]
        fate = SHORTENED if any(label != IGNORE_INDEX for label in labels[1:]) else TOO_LONG
    return {"input_ids": input_ids, "labels": labels, "fate": fate, "stops": stops}


@dataclass
class DataReport:
    """How many examples of a dataset are trained on as they are, and what became of the others.

    Attributes:
        name: of the dataset.
        fates: number of examples by fate.
    """

    name: str
    fates: Counter[int]

    @property
    def dropped(self) -> int:
        """Examples that are not trained on."""
        return self.fates[TOO_LONG] + self.fates[UNSUPERVISED]

    @property
    def kept(self) -> int:
        """Examples that are trained on, the shortened ones included."""
        return self.fates[WHOLE] + self.fates[SHORTENED]

    def __str__(self) -> str:
        parts = [f"{self.fates[fate]} {text}" for fate, text in FATES.items() if self.fates[fate]]
        return f"{self.name} dataset: {self.fates.total()} examples" + "".join(f"; {part}" for part in parts)


__all__ = ["DataReport", "Dataset", "IterableDataset", "first_example", "fit", "has_assistant_turn", "load"]
