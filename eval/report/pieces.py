"""The measurements of a report as pieces of work that are kept one by one.

Quality is decoded in batches, one setting after the other. Speed is measured in turn (A B A B …); a turn that was cut
off is repeated as a whole. An adaptive window depends on all sequences of a batch, so its decoders get their prompts
one at a time where quality is measured; prompt lookup takes one at a time anyway.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from huggingface_hub.utils import WeakFileLock
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ...checkpoints.files import write_text
from ...console.progress import stage
from ...modeling_wedlm import WeDLMForCausalLM
from ..decoders import AR, EXACT, LOOKUP, Options
from ..measure import Measured, agreeing_tokens, answer_entropy, batches_of, take_turns
from ..prompts import Prompt, answer_limit
from .request import ReportRequest

FILE = "measured.jsonl"


class Store:
    """Rows by the name of the piece of work that they came of, in one file of JSON lines (see [`opened`]).

    The first line says what decides the rows; each other line is a piece, appended when it is done. A last line that
    was cut off is dropped.
    """

    def __init__(self, path: Path, request: Mapping[str, Any], restart: bool):
        self.path = path
        self.request = json.loads(json.dumps(request))
        self.pieces: dict[str, list[Measured]] = {} if restart or not path.exists() else self._read()
        lines = [{"request": self.request}, *({"piece": name, "rows": rows} for name, rows in self.pieces.items())]
        write_text(path, "".join(map(_line, lines)))  # anew, so that no line is cut off in the middle

    def put(self, piece: str, rows: list[Measured]) -> None:
        """Keep the rows of a piece."""
        self.pieces[piece] = rows
        with open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(_line({"piece": piece, "rows": rows}))

    def _read(self) -> dict[str, list[Measured]]:
        otherwise = "choose another `--output`, or begin anew (--restart)."
        first, *lines = self.path.read_text(encoding="utf-8").split("\n")
        try:
            previous = json.loads(first)["request"]
            # What follows on the last line end is empty, or was cut off.
            pieces = {piece["piece"]: piece["rows"] for piece in map(json.loads, lines[:-1])}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{str(self.path)!r} is no file of partial results: {otherwise}") from None
        differing = [name for name in {**previous, **self.request} if previous.get(name) != self.request.get(name)]
        if differing:
            there, here = (json.dumps(one.get(differing[0]), ensure_ascii=False) for one in (previous, self.request))
            raise ValueError(
                f"{str(self.path.parent)!r} holds a report with another {', '.join(differing)} "
                f"({differing[0]}: {there:.60} there, {here:.60} now): ask for the same, {otherwise}"
            )
        return pieces


@contextmanager
def opened(folder: Path, request: Mapping[str, Any], *, restart: bool = False) -> Iterator[Store]:
    """The store of a folder, for one process at a time; `restart` begins anew, whatever the file holds. Raises
    `ValueError` for a file of another request or of another kind, and while another process writes to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(folder / ".lock", timeout=0.1))
        except TimeoutError as error:
            where = f"Another report is being made in {str(folder)!r}"
            raise ValueError(f"{where}: choose another `--output`.") from error
        store = Store(folder / FILE, request, restart)
        try:
            yield store
        finally:
            if not store.pieces:  # a request that was refused leaves nothing that another one could not go on from
                store.path.unlink()


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Part:
    """Prompts, and what decodes them."""

    name: str  # "sweep" or "headline"
    prompts: Sequence[Prompt]  # with their tokens
    decoders: Mapping[str, Options]  # keywords of `generate` by name, AR first
    timed: int  # prompts of each task
    batch_sizes: Sequence[int] = (1,)  # of the times
    is_compared: bool = False  # with each other alone: times are medians of fewer repeats


@dataclass(frozen=True)
class Piece:
    """Prompts of a part (indices) that some of its decoders (names) decode in turn, for their `kind`: quality or
    speed."""

    kind: str
    names: Sequence[str]
    batch: Sequence[int]
    repeat: int = 0

    def key(self, part: Part) -> str:
        """A name that does not change, but for decoders of the same names with other settings."""
        what = [{name: dict(part.decoders[name]) for name in self.names}, self.batch, self.repeat]
        return f"{part.name} {self.kind} {hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}"

    @property
    def calls(self) -> Sequence[Sequence[int]]:
        """The prompts that are decoded together."""
        is_alone = self.kind == "quality" and self.names[0].startswith((EXACT, LOOKUP))
        return [[index] for index in self.batch] if is_alone else [self.batch]


@dataclass(frozen=True)
class Measurement:
    """A model, and how to measure with it."""

    model: WeDLMForCausalLM
    tokenizer: PreTrainedTokenizerBase
    request: ReportRequest
    store: Store
    console: Console

    def run(self, part: Part) -> pd.DataFrame:
        """Measure the pieces that the store lacks, with a progress bar; returns all lines of the part."""
        pieces = {piece.key(part): piece for piece in self._pieces(part)}
        left = {key: piece for key, piece in pieces.items() if key not in self.store.pieces}
        with stage(self.console, part.name) as show:
            if left:
                self._decode(part, Piece("warm-up", list(part.decoders), [0]))  # refuses what cannot be decoded
            for count, (key, piece) in enumerate(left.items(), len(pieces) - len(left)):
                show(count / len(pieces), "")
                about = {"part": part.name, "kind": piece.kind, "repeat": piece.repeat}
                self.store.put(key, [about | row for row in self._measure(part, piece)])
            show(1.0, "")
        return pd.DataFrame([row for key in pieces for row in self.store.pieces[key]])

    def _pieces(self, part: Part) -> Iterator[Piece]:
        """Times are compared within a turn: those of other decoders or settings are of another moment. Prompts that
        are timed alone need not be decoded again for their quality."""
        decoders, request = list(part.decoders), self.request
        alone = {index for batch in self._timed_batches(part, 1) for index in batch}
        for batch in batches_of(self.model, part.prompts, request.batch_size, request.max_new_tokens):
            if rest := [index for index in batch if index not in alone]:
                for name in decoders:
                    yield Piece("quality", [name], rest)
        for size in part.batch_sizes:
            batches = self._timed_batches(part, size)
            names = [name for name in decoders if name != LOOKUP or size == 1]
            # The time of a batch is a mean over its prompts: half as many repeats will do there, too.
            repeats = math.ceil(request.repeats / 2) if part.is_compared or size > 1 else request.repeats
            for batch in batches:
                for repeat in range(repeats):
                    yield Piece("speed", names, batch, repeat)

    def _measure(self, part: Part, piece: Piece) -> list[Measured]:
        rows = self._decode(part, piece)
        if piece.kind == "quality":
            return [row | self._judged(part, row) for row in rows]
        is_first = len(piece.batch) == 1 and piece.repeat == 0
        return [*rows, *(row | self._judged(part, row) for row in rows if is_first)]

    def _judged(self, part: Part, row: Measured) -> Measured:
        """Quality of an answer, and its entropy if it is AR's."""
        asked = self.model, part.prompts[row["prompt"]].tokens, row["tokens"]
        if row["right"] is not None:
            quality = float(row["right"])
        elif row["decoder"] == AR and self.request.temperature is None:
            quality = 1.0
        else:
            quality = agreeing_tokens(*asked) / row["new_tokens"]
        entropy = {"entropy": answer_entropy(*asked)} if row["decoder"] == AR else {}
        return {"kind": "quality", "quality": quality, **entropy}

    def _decode(self, part: Part, piece: Piece) -> list[Measured]:
        decoders = {name: part.decoders[name] for name in piece.names}
        # What is sampled again is the same, and other prompts draw other numbers.
        torch.manual_seed(int(piece.key(part)[-16:], 16))
        return [
            {name: value for name, value in row.items() if name != "text"}
            for call in piece.calls
            for row in take_turns(self.model, self.tokenizer, part.prompts, decoders, call)
        ]

    def _timed_batches(self, part: Part, size: int) -> list[list[int]]:
        """Full batches of the first prompts of each task, tasks in turn; few prompts fill the only one over and
        over."""
        places = pd.Series([prompt.task for prompt in part.prompts]).to_frame("task").groupby("task").cumcount()
        timed = [int(index) for index in places[places < part.timed].sort_values(kind="stable").index]
        wanted = self.request.max_new_tokens
        if size > 1:  # together with others, a prompt that leaves less room would shorten their answers
            lengths = {index: len(part.prompts[index].tokens) for index in timed}
            timed = [index for index in timed if answer_limit(self.model, lengths[index], wanted) == wanted] or timed
        if len(timed) < size:
            return [list(islice(cycle(timed), size))]
        return [timed[start : start + size] for start in range(0, len(timed) - size + 1, size)]
