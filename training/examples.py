"""Examples made ready for training: read by their kind, shortened and counted, so that none is lost in silence."""

import logging
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, groupby
from typing import Any

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import maybe_convert_to_chatml

from .sft_config import WeDLMSFTConfig
from .streams import IGNORE_INDEX

logger = get_logger(__name__)

# Roles of ShareGPT's `conversations` whose names differ from those of chat templates.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_MARKS = ("labels", "assistant_masks", "completion_mask")
# Types of the columns of each kind but text: one of these for all of them.
_SHAPES: dict[str, tuple[tuple[type, ...], str]] = {
    "messages": ((list,), "a list of turns"),
    "conversations": ((list,), "a list of turns"),
    "prompt": ((str, list), "both strings, or both lists of turns"),
}


class Outcome(IntEnum):
    """What becomes of an example; the first two are trained on."""

    WHOLE = 0
    SHORTENED = 1
    TOO_LONG = 2
    UNSUPERVISED = 3


_MEANING = {
    Outcome.SHORTENED: "shortened to `max_length` (a cut answer is never taught to stop)",
    Outcome.TOO_LONG: "dropped: longer than `max_length` before anything to learn",
    Outcome.UNSUPERVISED: "dropped: nothing to learn (no assistant turn, or no supervised token)",
}


@dataclass
class DataReport:
    """How many examples of a dataset are trained on as they are, and what became of the others."""

    name: str
    outcomes: Counter[int]  # number of examples by [`Outcome`]

    @property
    def kept(self) -> int:
        """Examples that are trained on, the shortened ones included."""
        return self.outcomes[Outcome.WHOLE] + self.outcomes[Outcome.SHORTENED]

    def __str__(self) -> str:
        parts = [f"; {self.outcomes[outcome]} {text}" for outcome, text in _MEANING.items() if self.outcomes[outcome]]
        return f"{self.name} dataset: {self.outcomes.total()} examples{''.join(parts)}"


def first_example(dataset: Any, name: str) -> dict[str, Any]:
    """The first example. Raises `ValueError` for an empty dataset."""
    for example in dataset:
        return dict(example)
    raise ValueError(f"The {name} dataset is empty.")


def kind_of(example: Mapping[str, Any], text_field: str) -> str:
    """The column that says what kind of data an example is; empty where there is none."""
    kinds = ("input_ids", "messages", "conversations", "prompt", text_field)
    return next((name for name in kinds if example.get(name) is not None), "")


def read_example(
    example: Mapping[str, Any], index: int, *, name: str, kind: str, text_field: str, needs_assistant: bool
) -> dict[str, Any]:
    """The columns that an example of its kind is tokenised from, and no others: TRL might take them for its own. The
    kind (see [`kind_of`]) is that of the first example; `needs_assistant` says that assistant turns alone are
    supervised. Returns the columns, and `outcome`: `UNSUPERVISED` for a conversation without a turn to learn. Raises
    `ValueError` for an example that cannot be read, with its number and what is wrong."""
    where = f"Example {index + 1} of the {name} dataset"
    columns = sorted(column for column, value in example.items() if value is not None)
    if not kind:
        wanted = f"`messages` (or `conversations`), `prompt` and `completion`, `{text_field}`, or `input_ids`"
        raise ValueError(f"{where} has the columns {columns}. It needs {wanted}.")
    if kind_of(example, text_field) != kind:
        first = f"the first one has `{kind}`: all must be of one kind"
        raise ValueError(f"{where} has the columns {columns}, and {first}.")
    if kind == "input_ids":
        _check_tokens(example, where)
        kept = {column: example[column] for column in ("input_ids", *_MARKS, "seq_lengths") if column in example}
        return kept | {"outcome": Outcome.WHOLE}
    names = ("prompt", "completion") if kind == "prompt" else (kind,)
    parts: Any = {name: example.get(name) for name in names}
    allowed, wanted = _SHAPES.get(kind, ((str,), "a string"))
    if not any(all(isinstance(part, shape) for part in parts.values()) for shape in allowed):
        shown = f"{[*parts.values()] if kind == 'prompt' else example[kind]!r:.80}"
        raise ValueError(f"{where}: `{'` and `'.join(parts)}` must be {wanted}, got {shown}.")
    read: dict[str, Any] = maybe_convert_to_chatml(deepcopy(parts))
    conversation = [part for part in read.values() if isinstance(part, list)]
    for turn in chain.from_iterable(conversation):
        _check_turn(turn, kind, where)
    if index == 0 and [] in conversation:
        raise ValueError(f"{where} has no turn in `{kind}`.")
    is_learnable = [] not in conversation
    if needs_assistant and conversation:
        is_learnable = is_learnable and any(turn["role"] == "assistant" for turn in conversation[-1])
    if "tools" in example:
        read["tools"] = example["tools"]
    if "chat_template_kwargs" in example:  # null where another example of the file has some
        read["chat_template_kwargs"] = example["chat_template_kwargs"] or {}
    return read | {"outcome": Outcome.WHOLE if is_learnable else Outcome.UNSUPERVISED}


def _check_turn(turn: Any, kind: str, where: str) -> None:
    """Raises `ValueError` for anything but a turn in ChatML; makes text of its parts, and renames ShareGPT's roles."""
    is_turn = isinstance(turn, dict) and isinstance(turn.get("role"), str)
    if not is_turn or (turn.get("content") is None and not turn.get("tool_calls")):
        keys = "`from` and `value`" if kind == "conversations" else "`role` and `content`"
        raise ValueError(f"{where}: each turn of `{kind}` needs {keys}: {turn!r:.80}.")
    text = turn.get("content")
    if isinstance(text, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in text):
        text = "".join(str(part.get("text") or "") for part in text)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: `content` of each turn must be text, got {text!r:.80}.")
    turn["content"] = text
    if kind == "conversations":
        turn["role"] = _ROLES.get(turn["role"], turn["role"])


def _check_tokens(example: Mapping[str, Any], where: str) -> None:
    """Raises `ValueError` for tokens that are no integers, and for marks of another length."""
    try:
        tokens = torch.as_tensor(example["input_ids"])
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.zeros(0, 0)
    if tokens.ndim != 1 or (len(tokens) and tokens.is_floating_point()):
        raise ValueError(f"{where}: `input_ids` must be a list of integers, got {example['input_ids']!r:.80}.")
    if example.get("document_ids") is not None:
        raise ValueError(f"{where}: say the lengths of packed documents by `seq_lengths`, not by `document_ids`.")
    for column in _MARKS:
        marks = example.get(column)
        if marks is not None and not (hasattr(marks, "__len__") and len(marks) == len(tokens)):
            wanted = f"a list as long as `input_ids`, {len(tokens)} entries"
            raise ValueError(f"{where}: `{column}` must be {wanted}, got {marks!r:.80}.")


def fit_example(
    example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int | None, vocab_size: int
) -> dict[str, list[int] | int | bool]:
    """One tokenised example of at most `max_length` tokens, its `outcome`, and if a response `stops` by the end token.

    White space that a template writes behind it, and counts as the assistant's, is not supervised. Raises `ValueError`
    for a token outside `[0, vocab_size)`."""
    input_ids, labels = list(example["input_ids"]), list(example["labels"])
    if not 0 <= min(input_ids, default=0) <= max(input_ids, default=0) < vocab_size:
        raise ValueError(
            f"`input_ids` must lie in [0, {vocab_size}), the model's vocabulary, got {min(input_ids)} to "
            f"{max(input_ids)}: another tokenizer made them."
        )
    stops = False
    for is_supervised, run in groupby(range(len(labels)), lambda place: labels[place] != IGNORE_INDEX):
        places = list(run)
        closed, end = max((i for i in places if input_ids[i] == tokenizer.eos_token_id), default=-1), places[-1] + 1
        if is_supervised and closed >= 0 and not str(tokenizer.decode(input_ids[closed + 1 : end])).strip():
            labels[closed + 1 : end] = [IGNORE_INDEX] * (end - closed - 1)
            stops = True
    outcome = Outcome.WHOLE if _is_supervised(labels) else Outcome.UNSUPERVISED
    if max_length is not None and len(input_ids) > max_length and outcome is Outcome.WHOLE:
        input_ids, labels = input_ids[:max_length], labels[:max_length]
        outcome = Outcome.SHORTENED if _is_supervised(labels) else Outcome.TOO_LONG
    return {"input_ids": input_ids, "labels": labels, "outcome": outcome, "stops": stops}


def _is_supervised(labels: list[int]) -> bool:
    """Whether there is a token to learn: nothing predicts the first."""
    return any(label != IGNORE_INDEX for label in labels[1:])


class Preparation:
    """Reads, fits and counts the examples of a run's datasets, map or iterable."""

    def __init__(self, args: WeDLMSFTConfig):
        self.args = args
        # Of the datasets whose examples are all counted; those of a stream are counted as it is read.
        self.reports: dict[str, DataReport] = {}
        self._counts: dict[str, torch.Tensor] = {}  # examples by outcome

    def check_first(self, dataset: Any, name: str) -> dict[str, Any]:
        """The keywords of [`read_example`] for a dataset. Raises `ValueError` if its first example cannot be read."""
        example, text_field = first_example(dataset, name), self.args.dataset_text_field
        kind = kind_of(example, text_field)
        if self.args.assistant_only_loss is None:  # chat data
            self.args.assistant_only_loss = bool(kind) and isinstance(example[kind], list) and kind != "input_ids"
        reading: dict[str, Any] = {"name": name, "kind": kind, "text_field": text_field}
        reading["needs_assistant"] = self.args.assistant_only_loss
        read_example(example, 0, **reading)
        return reading

    def read(self, dataset: Any, name: str) -> Any:
        """Checks each example, leaves it the columns of its kind, and drops conversations without a turn to learn; of
        each dataset of a dictionary. Raises `ValueError` for an example that cannot be read, and where nothing is
        left."""
        if dataset is None or isinstance(dataset, dict):
            return dataset and {name: self.read(part, name) for name, part in dataset.items()}
        reading, columns = self.check_first(dataset, name), list(first_example(dataset, name))
        how = {"with_indices": True, "remove_columns": columns}
        return self._apply(read_example, reading, dataset, name, is_last=False, **how)

    def fit(
        self, dataset: Any, name: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int, has_responses: bool
    ) -> Any:
        """Shortens tokenised examples to `max_length`, drops what cannot be learnt, counts, and reports. With
        "bfd_split" nothing is shortened: packing splits what is too long. Raises `ValueError` where nothing is left,
        and where no whole response of a dataset that `has_responses`, not streamed, ends in the end token."""
        splits = self.args.packing and self.args.packing_strategy == "bfd_split"
        limit = None if splits else self.args.max_length
        fitting = {"tokenizer": tokenizer, "max_length": limit, "vocab_size": vocab_size}
        dataset = self._apply(fit_example, fitting, dataset, name, is_last=True)
        if has_responses and isinstance(dataset, Dataset):
            stops = [stops for stops, outcome in zip(dataset["stops"], dataset["outcome"], strict=True) if not outcome]
            if stops and not any(stops):
                raise ValueError(
                    f"No response of the {name} dataset ends in the end token {tokenizer.eos_token!r}: the model "
                    "would never learn to stop. Pass the token that ends them as `eos_token` (for ChatML: "
                    "'<|im_end|>')."
                )
        return dataset

    def report_streams(self) -> None:
        """Reports what has been read of the datasets that were not counted before."""
        for name in list(self._counts):
            self._report(name)

    def _apply(self, make: Any, options: Any, dataset: Any, name: str, *, is_last: bool, **how: Any) -> Any:
        """Makes each example, leaves out what cannot be trained on, and counts it; the last time, counts and reports
        what is left, too."""
        if name not in self._counts:  # in shared memory: data workers read the streams
            self._counts[name] = torch.zeros(len(Outcome), dtype=torch.int64).share_memory_()
        counts = self._counts[name]
        if not isinstance(dataset, Dataset):
            dataset = dataset.map(make, fn_kwargs=options, **how)
            return dataset.filter(_count_and_keep, fn_kwargs={"counts": counts, "count_kept": is_last})
        how |= {"desc": f"{'Fitting' if is_last else 'Reading'} {name} dataset"}
        with PartialState().main_process_first():
            dataset = dataset.map(make, fn_kwargs=options, num_proc=self.args.dataset_num_proc, **how)
            outcomes = torch.tensor(dataset["outcome"], dtype=torch.int64)
            dataset = dataset.filter(lambda outcome: outcome <= Outcome.SHORTENED, input_columns="outcome")
        counted = outcomes if is_last else outcomes[outcomes > Outcome.SHORTENED]
        counts += torch.bincount(counted, minlength=len(counts))
        if is_last or not len(dataset):
            self._report(name)
        return dataset

    def _report(self, name: str) -> None:
        report = self.reports[name] = DataReport(name, Counter(dict(enumerate(self._counts.pop(name).tolist()))))
        if not report.kept:
            raise ValueError(f"There is nothing to train on. {str(report).capitalize()}.")
        is_whole = report.outcomes.total() == report.outcomes[Outcome.WHOLE]
        logger.log(logging.INFO if is_whole else logging.WARNING, str(report))


def _count_and_keep(example: Any, counts: torch.Tensor, count_kept: bool) -> bool:
    is_kept = bool(example["outcome"] <= Outcome.SHORTENED)
    if count_kept or not is_kept:
        counts[example["outcome"]] += 1
    return is_kept
