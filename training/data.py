"""Data for training: files and Hub datasets in, examples of `input_ids` and `labels` out, nothing lost in silence."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
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
        split: of a folder or Hub id, such as `"train[:100]"`. A file is one split, of any name; slices hold there too.
        config_name: of a Hub id.
        streaming: read while training instead of before.

    Raises:
        FileNotFoundError: for a file that is not there.
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
        # A stream would break off in the middle of training, and pyarrow reads any bytes as text.
        _check_jsonl(path, parse=streaming or os.path.getsize(path) == 0)
    try:
        return load_dataset(builder, data_files=str(path), split=re.sub(r"^\w+", "train", split), streaming=streaming)
    except (DatasetGenerationError, ValueError) as error:
        if path.suffix == ".jsonl":
            _check_jsonl(path, parse=True)
        if "corresponds to no data" in str(error):
            raise ValueError(f"{name}: there is no example in this file.") from None
        raise ValueError(f"{name}: cannot be read as {builder}: {error.__cause__ or error}") from error


def _check_jsonl(path: Path, *, parse: bool) -> None:
    """Raises `ValueError` with the number of the first line that is not UTF-8 or, if asked to, no JSON object."""
    rows = 0
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8: {error}") from None
            if not parse or not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: malformed JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: each line must be a JSON object, got {line.strip()[:60]!r}")
            rows += 1
    if parse and not rows:
        raise ValueError(f"{path}: there is no example in this file.")


def first_example(dataset: Any, name: str) -> dict[str, Any]:
    """The first example.

    Raises:
        ValueError: for an empty dataset.
    """
    for example in dataset:
        return dict(example)
    raise ValueError(f"The {name} dataset is empty.")


def kind_of(example: Mapping[str, Any], text_field: str) -> str:
    """The column that says what kind of data an example is; empty where there is none."""
    kinds = ("input_ids", "messages", "conversations", "prompt", text_field)
    return next((name for name in kinds if example.get(name) is not None), "")


def check_example(example: Mapping[str, Any], number: int, name: str, kind: str, text_field: str) -> None:
    """Refuses an example that cannot be tokenised, by its number.

    Args:
        example: of any kind that is trained on.
        number: of the example, from 1 on.
        name: of the dataset.
        kind: see [`kind_of`]; that of the first example.
        text_field: name of the column of raw text.

    Raises:
        ValueError: with what is wrong.
    """
    where = f"Example {number} of the {name} dataset"
    columns = sorted(column for column, value in example.items() if value is not None)
    if not kind:
        raise ValueError(
            f"{where} has the columns {columns}. It needs `messages` (or `conversations`), `prompt` and `completion`, "
            f"`{text_field}`, or `input_ids`."
        )
    if kind_of(example, text_field) != kind:
        raise ValueError(
            f"{where} has the columns {columns}, and the first one has `{kind}`: all must be of one kind."
        )
    if kind == "input_ids":
        _check_tokens(example, where)
        return
    for column in ("prompt", "completion") if kind == "prompt" else (kind,):
        value = example.get(column)
        if isinstance(value, str) and kind in ("prompt", text_field):
            continue
        if not isinstance(value, list) or kind == text_field:
            wanted = {text_field: "a string", "prompt": "a string or a list of turns"}.get(kind, "a list of turns")
            raise ValueError(f"{where}: `{column}` must be {wanted}, got {value!r:.80}.")
        role, content = ("from", "value") if kind == "conversations" else ("role", "content")
        for turn in value:
            is_turn = isinstance(turn, Mapping) and turn.get(role) is not None
            if not is_turn or (turn.get(content) is None and not turn.get("tool_calls")):
                raise ValueError(f"{where}: each turn of `{column}` needs `{role}` and `{content}`: {turn!r:.80}.")


def _check_tokens(example: Mapping[str, Any], where: str) -> None:
    try:
        tokens = torch.as_tensor(example["input_ids"])
    except (TypeError, ValueError):
        tokens = torch.zeros(0, 0)
    if tokens.ndim != 1 or (len(tokens) and tokens.is_floating_point()):
        raise ValueError(f"{where}: `input_ids` must be a list of integers, got {example['input_ids']!r:.80}.")
    if example.get("document_ids") is not None:
        raise ValueError(f"{where}: say the lengths of packed documents by `seq_lengths`, not by `document_ids`.")
    for column in ("labels", "assistant_masks", "completion_mask"):
        if example.get(column) is not None and len(example[column]) != len(tokens):
            counts = f"{len(example[column])} and {len(tokens)} entries"
            raise ValueError(f"{where}: `{column}` must be as long as `input_ids`, got {counts}.")


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
