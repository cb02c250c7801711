"""Examples made ready for training: read, tokenised, shortened and counted in one pass, so that none is lost in
silence."""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from ..console.prompts import is_unicode
from .collator import supervised_of
from .log import get_logger
from .model import training_template
from .rows import row_of
from .sft_config import WeDLMSFTConfig
from .streams import IGNORE_INDEX
from .turns import Conversation, Span, alpaca_turns, read_tools, read_turn

logger = get_logger(__name__)

# Types of the columns of each kind but text: one of these for all of them.
_SHAPES: dict[str, tuple[tuple[type, ...], str]] = {
    "messages": ((list,), "a list of turns"),
    "conversations": ((list,), "a list of turns"),
    "prompt": ((str, list), "both strings, or both lists of turns"),
    "instruction": ((str,), "both strings"),
}
# What is read beside the column that says the kind, and of turns in all their kinds.
_BESIDE = {
    "input_ids": ("labels", "assistant_masks", "completion_mask", "seq_lengths", "document_ids"),
    "prompt": ("completion",),
    "instruction": ("input", "output", "history"),
}
_BESIDE_TURNS = ("tools", "chat_template_kwargs", "system")
_PICTURES = ("image", "images", "video", "videos", "audio", "audios")


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
    notes: Counter[str]  # number of examples by what else is not learnt of them

    @property
    def kept(self) -> int:
        """Examples that are trained on, the shortened ones included."""
        return self.outcomes[Outcome.WHOLE] + self.outcomes[Outcome.SHORTENED]

    def __str__(self) -> str:
        parts = [f"{self.outcomes[outcome]} {text}" for outcome, text in _MEANING.items() if self.outcomes[outcome]]
        parts += [f"in {count}, {note}" for note, count in self.notes.items()]
        count = self.outcomes.total()
        return "; ".join([f"{self.name} dataset: {count} example{'s' * (count != 1)}", *parts])


@dataclass(frozen=True)
class Reading:
    """How the examples of a dataset are read: by what its first one is."""

    name: str  # of the dataset, in messages
    kind: str  # the column that says what kind of data they are
    text_field: str
    is_chat: bool
    assistant_only: bool  # of a conversation, what the assistant wrote is supervised
    completion_only: bool
    formatting_func: Any = None

    @property
    def has_responses(self) -> bool:
        """Whether a response must end in the end token."""
        return self.assistant_only or self.completion_only


class Text(NamedTuple):
    """A text, and where its supervised part begins."""

    text: str
    begin: int
    where: str


class Marked(NamedTuple):
    """Tokens, which of them are supervised, and the lengths of the documents that their owner packed."""

    input_ids: list[int]
    supervised: list[bool]
    seq_lengths: list[int] | None = None


def first_example(dataset: Any, name: str) -> dict[str, Any]:
    """The first example. Raises `ValueError` for an empty dataset."""
    for example in dataset:
        return dict(example)
    raise ValueError(f"The {name} dataset is empty.")


def reading_of(dataset: Any, name: str, args: WeDLMSFTConfig, formatting_func: Any = None) -> Reading:
    """How a dataset is read. Raises `TypeError` for anything but a dataset, and `ValueError` for one that cannot be
    trained on, as far as its first example tells."""
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(f"The {name} dataset must be a `Dataset` or an `IterableDataset`, got {type(dataset)}.")
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            f"The {name} dataset has a transform (`with_transform`, `set_transform`), which would be applied once, "
            "not each time an example is read. Apply it by `map`, and pass what comes out."
        )
    example, where, keeps_nulls = row_of(first_example(dataset, name), 0, name)
    text_field = args.dataset_text_field
    kind = text_field if formatting_func else kind_of(example, text_field)
    is_turns = kind not in ("", "input_ids") and not formatting_func and isinstance(_listed(example[kind]), list)
    is_chat = is_turns or (kind == "instruction" and not formatting_func)
    assistant_only = is_chat if args.assistant_only_loss is None else bool(args.assistant_only_loss)
    completion_only = kind == "prompt" and args.completion_only_loss is not False
    if args.packing and args.packing_strategy == "bfd_split" and (assistant_only or completion_only):
        reason = "an answer without its question cannot be learnt"
        raise ValueError(f"`packing_strategy` must be 'bfd' for data with responses, got 'bfd_split': {reason}.")
    reading = Reading(name, kind, text_field, is_chat, assistant_only, completion_only, formatting_func)
    read = read_example(example, where, reading, keeps_nulls=keeps_nulls)
    if isinstance(read, Conversation) and not read.turns:
        raise ValueError(f"{where} has no turn in `{kind}`.")
    if args.assistant_only_loss and not is_chat:
        raise ValueError(f"{where} has `{kind}`: `assistant_only_loss` must be False for all but conversations.")
    return reading


def kind_of(example: Mapping[str, Any], text_field: str) -> str:
    """The column that says what kind of data an example is; empty where there is none."""
    kinds = ("input_ids", "messages", "conversations", "prompt", "instruction", text_field)
    has_answer = example.get("output") is not None  # else an instruction is no example of Alpaca's
    found = (name for name in kinds if example.get(name) is not None and (name != "instruction" or has_answer))
    return next(found, "")


def _listed(value: Any) -> Any:
    """Turns, also where a table holds them as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(ValueError):
            return json.loads(value)
    return value


def unread_columns(example: Mapping[str, Any], reading: Reading) -> list[str]:
    """The columns of an example that hold something and are not read."""
    if reading.formatting_func is not None:
        return []
    read = {reading.kind, *_BESIDE.get(reading.kind, ()), *(_BESIDE_TURNS if reading.is_chat else ())}
    return sorted(name for name, value in example.items() if name not in read and value not in (None, "", [], {}))


def read_example(
    example: Mapping[str, Any], where: str, reading: Reading, *, keeps_nulls: bool
) -> Conversation | Text | Marked:
    """An example as it was written, checked; of its columns, those of its kind. Raises `ValueError` for one that
    cannot be read, with its place and what is wrong. For `keeps_nulls`, see [`row_of`]."""
    kind = reading.kind
    if reading.formatting_func is not None:
        example = {kind: reading.formatting_func(example)}
    columns = sorted(column for column, value in example.items() if value is not None)
    if not kind:
        wanted = (
            "`messages` (or `conversations`), `prompt` and `completion`, `instruction` and `output`, "
            f"`{reading.text_field}`, or `input_ids`"
        )
        raise ValueError(f"{where} has the columns {columns}. It needs {wanted}.")
    if kind_of(example, reading.text_field) != kind:
        first = f"the first one has `{kind}`: all must be of one kind"
        empty = sorted(example.keys() - set(columns))
        nulls = f" ({', '.join(empty)}: null)" if empty else ""
        raise ValueError(f"{where} has the columns {columns}{nulls}, and {first}.")
    if kind == "input_ids":
        return _marked(example, where)
    for name in _PICTURES:
        if example.get(name):
            raise ValueError(f"{where} has `{name}`, and only text is trained: leave the column out of the data.")
    names = {"prompt": ("prompt", "completion"), "instruction": ("instruction", "output")}.get(kind, (kind,))
    parts: list[Any] = [example.get(name) for name in names]
    if kind in ("messages", "conversations", "prompt"):
        parts = [_listed(part) for part in parts]
    allowed, wanted = _SHAPES.get(kind, ((str,), "a string"))
    if not any(all(isinstance(part, shape) for part in parts) for shape in allowed):
        shown = f"{parts[0] if len(parts) == 1 else parts!r:.80}"
        raise ValueError(f"{where}: `{'` and `'.join(names)}` must be {wanted}, got {shown}.")
    if kind == "instruction":
        parts = [alpaca_turns(example, where)]
    if isinstance(parts[0], str):
        return Text("".join(parts), len(parts[0]) if reading.completion_only else 0, where)
    turns = [[read_turn(turn, kind, where, keeps_nulls=keeps_nulls) for turn in part] for part in parts]
    if [] in turns and any(turns):  # of a prompt and a completion
        turns = [[]]
    kwargs = example.get("chat_template_kwargs") or {}  # null where another example of the file has some
    if not isinstance(kwargs, dict):
        raise ValueError(f"{where}: `chat_template_kwargs` must be an object, got {kwargs!r:.80}.")
    tools = read_tools(example.get("tools"), where, keeps_nulls=keeps_nulls)
    if (system := example.get("system")) and any(turns):
        if not isinstance(system, str) or (turns[0][:1] and turns[0][0]["role"] == "system"):
            wanted = "a text where no turn is the system's"
            raise ValueError(f"{where}: `system` must be {wanted}, got {system!r:.80}.")
        turns[0].insert(0, {"role": "system", "content": system})
    begin = len(turns[0]) if reading.completion_only else 0
    return Conversation([turn for part in turns for turn in part], begin, tools, kwargs, where)


def _marked(example: Mapping[str, Any], where: str) -> Marked:
    """Raises `ValueError` for tokens that are no integers, and for marks of another length."""
    try:
        tokens = torch.as_tensor(example["input_ids"])
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.zeros(0, 0)
    if tokens.ndim != 1 or (len(tokens) and tokens.is_floating_point()):
        raise ValueError(f"{where}: `input_ids` must be a list of integers, got {example['input_ids']!r:.80}.")
    if example.get("document_ids") is not None:
        raise ValueError(f"{where}: say the lengths of packed documents by `seq_lengths`, not by `document_ids`.")
    try:
        supervised = supervised_of(example, tokens)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Marked(tokens.tolist(), supervised.tolist(), example.get("seq_lengths"))


class Preparation:
    """Reads, tokenises, shortens and counts the examples of a run's datasets, map or iterable."""

    def __init__(self, args: WeDLMSFTConfig, formatting_func: Any = None):
        self.args, self.formatting_func = args, formatting_func
        # Of the datasets whose examples are all counted; those of a stream are counted as it is read.
        self.reports: dict[str, DataReport] = {}
        self._counts: dict[str, torch.Tensor] = {}  # examples by outcome

    def tokenize(
        self,
        dataset: Any,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        positions: int | None = None,
    ) -> Any:
        """A dataset of `input_ids` and `labels`, of at most `max_length` tokens, without the examples that nothing can
        be learnt from; counts and reports them. With "bfd_split" nothing is shortened: packing splits what is too
        long. Examples that their owner packed keep their `seq_lengths`, and are taken as they are. Raises `ValueError`
        for an example that cannot be read, where nothing is left, and where no whole response of a dataset that has
        some, not streamed, ends in the end token. Warns of one that is longer than the model's `positions`."""
        reading = reading_of(dataset, name, self.args, self.formatting_func)
        columns = list(first_example(dataset, name))
        is_packed = reading.kind == "input_ids" and "seq_lengths" in columns
        splits = self.args.packing and self.args.packing_strategy == "bfd_split"
        options = {
            "reading": reading,
            "tokenizer": tokenizer,
            "template": training_template(tokenizer) if reading.assistant_only else None,
            "max_length": None if splits or is_packed else self.args.max_length,
            "vocab_size": vocab_size,
        }
        numbers = List(Value("int64"))
        types = {"input_ids": numbers, "labels": numbers} | ({"seq_lengths": numbers} if is_packed else {})
        about = {"outcome": Value("int64"), "stops": Value("bool"), "notes": List(Value("string"))}
        features = Features(types | about)
        how = {"fn_kwargs": options, "with_indices": True, "remove_columns": columns, "features": features}
        if isinstance(dataset, Dataset):
            with PartialState().main_process_first():
                how |= {"num_proc": self.args.dataset_num_proc, "desc": f"Reading {name} dataset"}
                made = dataset.with_format(None).map(_make, **how)
            outcomes, stops = made["outcome"], made["stops"]
            self._report(name, Counter(outcomes), Counter(chain.from_iterable(made["notes"])))
            whole = [index for index, outcome in enumerate(outcomes) if outcome == Outcome.WHOLE]
            if reading.has_responses and whole and not any(stops[index] for index in whole):
                raise _never_stops(name, made[whole[0]]["labels"], tokenizer)
            longest = max(map(len, made["input_ids"]), default=0) + self.args.num_eos - 1
            if not splits and not is_packed and longest > (positions or longest):
                logger.warning(
                    f"The longest example of the {name} dataset has {longest} tokens with its end tokens, and the "
                    f"model {positions} positions: a smaller `max_length` shortens it."
                )
            made = made.select([i for i, outcome in enumerate(outcomes) if outcome <= Outcome.SHORTENED])
        else:  # in shared memory: data workers read the streams
            counts = self._counts[name] = torch.zeros(len(Outcome), dtype=torch.int64).share_memory_()
            made = dataset.map(_make, **how).filter(_count_and_keep, fn_kwargs={"counts": counts, "name": name})
        return made.select_columns(list(types))

    def report_streams(self) -> None:
        """Reports what has been read of the datasets that were not counted before."""
        for name in list(self._counts):
            self._report(name, Counter(dict(enumerate(self._counts.pop(name).tolist()))), Counter())

    def _report(self, name: str, outcomes: Counter[int], notes: Counter[str]) -> None:
        report = self.reports[name] = DataReport(name, outcomes, notes)
        if not report.kept:
            raise ValueError(f"There is nothing to train on. {str(report).capitalize()}.")
        is_whole = report.outcomes.total() == report.outcomes[Outcome.WHOLE] and not notes
        logger.log(logging.INFO if is_whole else logging.WARNING, str(report))


def _never_stops(name: str, labels: list[int], tokenizer: PreTrainedTokenizerBase) -> ValueError:
    """For a dataset without a response that ends in the end token; names the token that ends this one, if any does."""
    special = {token: text for text, token in tokenizer.get_added_vocab().items()}
    last = next((special[label] for label in reversed(labels) if label in special), None)
    help = f"Pass the token that ends them: `eos_token={last!r}`"
    if last is None:
        help = "The chat template ends them in no special token: pass another one (`chat_template_path='chatml'`)"
    return ValueError(
        f"No response of the {name} dataset ends in the end token {tokenizer.eos_token!r}: the model would never "
        f"learn to stop. {help}."
    )


def _count_and_keep(example: Any, counts: torch.Tensor, name: str) -> bool:
    counts[example["outcome"]] += 1
    for note in example["notes"]:
        logger.warning_once(f"{name} dataset: {note}.")
    return bool(example["outcome"] <= Outcome.SHORTENED)


def _make(
    example: Mapping[str, Any],
    index: int,
    reading: Reading,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    max_length: int | None,
    vocab_size: int,
) -> dict[str, Any]:
    """The columns of a training example, its `outcome`, and whether a response `stops` by the end token. Raises
    `ValueError` for one that cannot be trained on."""
    example, where, keeps_nulls = row_of(example, index, reading.name)
    read = read_example(example, where, reading, keeps_nulls=keeps_nulls)
    unread = unread_columns(example, reading)
    notes = [f"these columns are not read: {', '.join(unread)}"] if unread else []
    marked = read if isinstance(read, Marked) else _tokenized(read, reading, tokenizer, template, notes)
    input_ids, supervised = marked.input_ids, marked.supervised
    if not 0 <= min(input_ids, default=0) <= max(input_ids, default=0) < vocab_size:
        raise ValueError(
            f"{where}: `input_ids` must lie in [0, {vocab_size}), the model's vocabulary, got {min(input_ids)} to "
            f"{max(input_ids)}: another tokenizer made them."
        )
    if tokenizer.mask_token_id in input_ids:
        raise ValueError(
            f"{where} holds the mask token, {tokenizer.mask_token!r}, which stands for a token that is not decided: "
            "write it otherwise, or leave the example out."
        )
    stops = _leave_out_trailing_space(input_ids, supervised, tokenizer)
    outcome = Outcome.WHOLE if any(supervised[1:]) else Outcome.UNSUPERVISED  # nothing predicts the first token
    if max_length is not None and len(input_ids) > max_length and outcome is Outcome.WHOLE:
        input_ids, supervised = input_ids[:max_length], supervised[:max_length]
        outcome = Outcome.SHORTENED if any(supervised[1:]) else Outcome.TOO_LONG
    labels = [token if mark else IGNORE_INDEX for token, mark in zip(input_ids, supervised, strict=True)]
    made = {"input_ids": input_ids, "labels": labels, "outcome": int(outcome), "stops": stops, "notes": notes}
    return made if marked.seq_lengths is None else made | {"seq_lengths": marked.seq_lengths, "outcome": 0}


def _tokenized(
    read: Conversation | Text,
    reading: Reading,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    notes: list[str],
) -> Marked:
    if isinstance(read, Text):
        eos = str(tokenizer.eos_token)
        text = read.text if read.text.endswith(eos) else read.text + eos
        spans = [(read.begin, len(text))]
    elif not read.turns:
        return Marked([], [])
    else:
        text, spans = read.text(tokenizer, template, reading.assistant_only, notes)
    if not is_unicode(text):
        raise ValueError(f"{read.where} holds half of a surrogate pair, which is no text.")
    encoding = tokenizer(text, add_special_tokens=isinstance(read, Text), return_offsets_mapping=True, verbose=False)
    places: list[Span] = encoding["offset_mapping"]
    supervised = [False] * len(places)
    for begin, end in spans:
        inside = [i for i, place in enumerate(places) if place[0] < end and place[1] > begin]
        if inside:
            supervised[inside[0] : inside[-1] + 1] = [True] * (inside[-1] + 1 - inside[0])
            if places[inside[0]][0] < begin and reading.completion_only:
                notes.append(
                    "a token holds the end of the prompt and the beginning of the completion; it is learnt whole. End "
                    "prompts at the end of a token, a line for example"
                )
    return Marked(list(encoding["input_ids"]), supervised)


def _leave_out_trailing_space(input_ids: list[int], supervised: list[bool], tokenizer: Any) -> bool:
    """Takes white space and special tokens that a template writes behind an end token, and counts as the assistant's,
    out of what is supervised. Whether a response stops by the end token."""
    stops = False
    for is_supervised, run in groupby(range(len(supervised)), lambda place: supervised[place]):
        places = list(run)
        closed, end = max((i for i in places if input_ids[i] == tokenizer.eos_token_id), default=-1), places[-1] + 1
        if not is_supervised or closed < 0:
            continue
        behind = tokenizer.decode(input_ids[closed + 1 : end], skip_special_tokens=True)
        if not str(behind).strip():
            supervised[closed + 1 : end] = [False] * (end - closed - 1)
            stops = True
    return stops
