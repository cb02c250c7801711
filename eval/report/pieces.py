"""The measurements of a report as pieces of work that are kept one by one.

Quality is decoded in batches, one setting after the other. Speed is taken in turn (A B A B …); a turn that was cut off
is taken again as a whole. Decoders whose window adapts look at all rows of a batch, so they get their prompts one at a
time where quality is measured.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import pandas as pd
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ...modeling_wedlm import WeDLMForCausalLM
from ..ar_head import agreeing_tokens, answer_entropy
from ..decoders import AR, EXACT, Options
from ..measure import Row, batches_of, take_turns
from ..memory import peak_bytes
from ..progress import LongProgress
from ..prompts import Prompt, answer_limit
from .request import ReportRequest
from .store import Store

ALONE = 4  # what one prompt alone costs in the progress bar, against its share of a batch

Piece = tuple[str, int, Callable[[], list[Row]]]
"""A name, which does not change; its cost, for the progress bar; its work."""


@dataclass(frozen=True)
class Part:
    """Prompts, and what decodes them.

    Attributes:
        name: `"sweep"` or `"headline"`.
        prompts: with their tokens.
        decoders: keywords of `generate` by name, AR first.
        timed: how many prompts of each task are timed.
        batch_sizes: of the times.
        is_compared: whether settings are only compared with each other: their times are medians of fewer repeats, and
            memory is not measured.
    """

    name: str
    prompts: Sequence[Prompt]
    decoders: Mapping[str, Options]
    timed: int
    batch_sizes: Sequence[int] = (1,)
    is_compared: bool = False

    def key(self, kind: str, *names: str) -> str:
        """Tells decoders with these settings from those of the same names with others."""
        options = {name: dict(self.decoders[name]) for name in names}
        return f"{self.name} {kind} {hashlib.sha256(json.dumps(options).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Measurement:
    """A model, and how to measure with it."""

    model: WeDLMForCausalLM
    tokenizer: PreTrainedTokenizerBase
    request: ReportRequest
    store: Store
    console: Console

    def run(self, part: Part) -> pd.DataFrame:
        """Measure what the store does not have yet, with a progress bar; the rows of all pieces of the part."""
        pieces = list(self._pieces(part))
        left = [piece for piece in pieces if piece[0] not in self.store.pieces]
        total, rest = (sum(cost for _, cost, _ in some) for some in (pieces, left))
        with LongProgress(self.console) as bar:
            task = bar.add_task(part.name, total=total, completed=total - rest)
            if left:
                self._decode(part, part.decoders, [0])  # a warm-up, which also refuses what cannot be decoded
            for name, cost, work in left:
                self.store.put(name, [{"part": part.name} | row for row in work()])
                bar.advance(task, cost)
        return pd.DataFrame([row for name, _, _ in pieces for row in self.store.pieces[name]])

    def _pieces(self, part: Part) -> Iterator[Piece]:
        """Times are compared within a turn: those of other decoders or settings are of another moment."""
        limit = self.request.max_new_tokens
        for batch in batches_of(self.model, part.prompts, self.request.batch_size, limit):
            for name in part.decoders:
                cost = len(batch) * (ALONE if _is_adaptive(name) else 1)
                yield f"{part.key('quality', name)} {name} {batch[0]}", cost, partial(self._quality, part, name, batch)
        turn = part.key("speed", *part.decoders)
        for size in part.batch_sizes:
            batches = self._timed_batches(part, size)
            cost = round(ALONE * size**0.5)
            # The time of a batch is a mean over its prompts: half as many repeats will do there, too.
            fewer = part.is_compared or size > 1
            repeats = math.ceil(self.request.repeats / 2) if fewer else self.request.repeats
            for number, batch in enumerate(batches):
                for repeat in range(repeats):
                    name = f"{turn} {size} {number} {repeat}"
                    yield name, cost * len(part.decoders), partial(self._speed, part, batch, repeat)
            for name in () if part.is_compared else part.decoders:
                yield (
                    f"{part.key('memory', name)} {name} {size}",
                    2 * cost,
                    partial(self._memory, part, name, batches[0]),
                )

    def _decode(self, part: Part, decoders: Mapping[str, Options], batch: Sequence[int]) -> list[Row]:
        rows = take_turns(self.model, self.tokenizer, part.prompts, decoders, batch)
        left_out = {"text", "drafted_by_depth", "accepted_by_depth"}
        return [{name: value for name, value in row.items() if name not in left_out} for row in rows]

    def _quality(self, part: Part, name: str, batch: Sequence[int]) -> list[Row]:
        decoder = {name: part.decoders[name]}
        together = [[index] for index in batch] if _is_adaptive(name) else [batch]
        rows = [row | {"kind": "quality"} for some in together for row in self._decode(part, decoder, some)]
        for row in rows:
            asked = self.model, part.prompts[row["prompt"]].tokens, row["tokens"]
            if row["right"] is None:
                row["quality"] = 1.0 if name == AR else agreeing_tokens(*asked) / row["new_tokens"]
            else:
                row["quality"] = float(row["right"])
            if name == AR:
                row["entropy"] = answer_entropy(*asked)
        return rows

    def _speed(self, part: Part, batch: Sequence[int], repeat: int) -> list[Row]:
        return [row | {"kind": "speed", "repeat": repeat} for row in self._decode(part, part.decoders, batch)]

    def _memory(self, part: Part, name: str, batch: Sequence[int]) -> list[Row]:
        work = partial(self._decode, part, {name: part.decoders[name]}, batch)
        used = peak_bytes(work, self.model.device)
        return [{"kind": "memory", "decoder": name, "batch_size": len(batch), "peak_bytes": used}]

    def _timed_batches(self, part: Part, size: int) -> list[list[int]]:
        """Full batches of the timed prompts, tasks mixed; few prompts fill the only one over and over."""
        timed = _first_of_each_task(part.prompts, part.timed)
        wanted = self.request.max_new_tokens
        lengths = {index: len(part.prompts[index].tokens) for index in timed}
        roomy = [index for index in timed if answer_limit(self.model, lengths[index], wanted) == wanted]
        timed = roomy if size > 1 and roomy else timed
        if len(timed) < size:
            return [list(islice(cycle(timed), size))]
        return [timed[start : start + size] for start in range(0, len(timed) - size + 1, size)]


def _first_of_each_task(prompts: Sequence[Prompt], count: int) -> list[int]:
    """Indices of the first `count` prompts of each task, the tasks in turn."""
    places = pd.Series([prompt.task for prompt in prompts]).to_frame("task").groupby("task").cumcount()
    return [int(index) for index in places[places < count].sort_values(kind="stable").index]


def _is_adaptive(name: str) -> bool:
    return name.split()[0] == EXACT
