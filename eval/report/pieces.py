"""The measurements of a report, piece by piece.

Quality is decoded in batches, one setting after the other. Speed is measured in turn (A B A B …). An
adaptive window depends on all sequences of a batch, so its decoders get their prompts one at a time where quality is
measured; prompt lookup takes one at a time anyway.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import pandas as pd
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ...console.progress import stage
from ...modeling_wedlm import WeDLMForCausalLM
from ..decoders import AR, EXACT, LOOKUP, Options
from ..measure import Measured, agreeing_tokens, answer_entropy, batches_of, take_turns
from ..prompts import Prompt, answer_limit
from .request import ReportRequest


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

    def seed(self, part: Part) -> int:
        """Of what is sampled: another one for other prompts, settings and repeats."""
        what = [{name: dict(part.decoders[name]) for name in self.names}, self.batch, self.repeat]
        return int(hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16], 16)

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
    console: Console

    def run(self, part: Part) -> pd.DataFrame:
        """Measure a part, with a progress bar; returns its lines."""
        pieces, rows = list(self._pieces(part)), []
        with stage(self.console, part.name) as show:
            self._decode(part, Piece("warm-up", list(part.decoders), [0]))  # refuses what cannot be decoded
            for count, piece in enumerate(pieces):
                show(count / len(pieces), "")
                about = {"part": part.name, "kind": piece.kind, "repeat": piece.repeat}
                rows += [about | row for row in self._measure(part, piece)]
            show(1.0, "")
        return pd.DataFrame(rows)

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
        torch.manual_seed(piece.seed(part))
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
