"""The measurements of a report as pieces of work that are kept one by one.

Quality is decoded in batches, one setting after the other. Speed is taken in turn (A B A B …); a turn that was cut off
is taken again as a whole. Decoders whose window adapts look at all rows of a batch, so they get their prompts one at a
time where quality is measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from ...modeling_wedlm import WeDLMForCausalLM
from ..decoders import AR, EXACT, Options
from ..measure import Row, agreeing_tokens, answer_entropy, batches_of, decode_rows, seconds_to_first_token
from ..memory import peak_bytes
from ..prompts import Prompt, answer_limit
from .store import Store

ALONE = 4  # what one prompt alone costs in the progress bar, against its share of a batch


@dataclass(frozen=True)
class Part:
    """Prompts and what decodes them.

    Attributes:
        name: `"sweep"` or `"headline"`.
        prompts: with their tokens.
        decoders: keywords of `generate` by name, AR first.
        timed: indices of the prompts that are timed.
        batch_sizes: of the times.
        is_costed: whether the time to the first token and the peak of memory are measured, too.
    """

    name: str
    prompts: Sequence[Prompt]
    decoders: Mapping[str, Options]
    timed: Sequence[int]
    batch_sizes: Sequence[int] = (1,)
    is_costed: bool = False

    def key(self, *names: str) -> str:
        """Tells decoders with these settings from those of the same names with others."""
        options = {name: dict(self.decoders[name]) for name in names}
        return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Piece:
    """A piece of work with a name of its own; `cost` is for the progress bar."""

    name: str
    cost: int
    work: Callable[[], list[Row]]


@dataclass(frozen=True)
class Measurement:
    """A model and how to measure with it.

    Attributes:
        model: in evaluation mode.
        tokenizer: the model's.
        repeats: of each time.
        batch_size: prompts decoded together where time does not count.
        max_new_tokens: of each answer.
    """

    model: WeDLMForCausalLM
    tokenizer: PreTrainedTokenizerBase
    repeats: int
    batch_size: int
    max_new_tokens: int

    def run(self, part: Part, title: str, store: Store, console: Console) -> pd.DataFrame:
        """Measure what the store does not have yet, with a progress bar; the rows of all pieces of the part."""
        pieces = list(self.pieces(part))
        left = [piece for piece in pieces if piece.name not in store.pieces]
        total, rest = (sum(piece.cost for piece in some) for some in (pieces, left))
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        times = (TextColumn("elapsed, left"), TimeRemainingColumn())
        with Progress(*columns, *times, console=console, speed_estimate_period=120) as bar:
            task = bar.add_task(title, total=total, completed=total - rest)
            if left:
                for name in part.decoders:  # a warm-up, which also refuses what cannot be decoded
                    self._decode(part, name, [0])
            for piece in left:
                store.put(piece.name, piece.work())
                bar.advance(task, piece.cost)
        return pd.DataFrame([row for piece in pieces for row in store.pieces[piece.name]])

    def pieces(self, part: Part) -> Iterator[Piece]:
        """All work of a part, by names that do not change.

        Times are compared within a turn: those of other decoders or settings are of another moment.
        """
        turn = part.key(*part.decoders)
        for batch in batches_of(self.model, part.prompts, self.batch_size, self.max_new_tokens):
            for name in part.decoders:
                cost = len(batch) * (ALONE if _is_adaptive(name) else 1)
                title = f"{part.name} quality, {name} {part.key(name)}, {batch[0]}"
                yield Piece(title, cost, partial(self._quality, part, name, batch))
        for size in part.batch_sizes:
            batches = self._timed_batches(part, size)
            for number, batch in enumerate(batches):
                for repeat in range(self.repeats):
                    name = f"{part.name} speed {turn}, {size}, {number}, {repeat}"
                    cost = round(ALONE * size**0.5 * len(part.decoders))
                    yield Piece(name, cost, partial(self._turn, part, batch, repeat))
            if part.is_costed:
                for repeat in range(self.repeats):
                    name = f"{part.name} first token {turn}, {size}, {repeat}"
                    yield Piece(name, len(part.decoders), partial(self._first_tokens, part, batches[0], repeat))
                for decoder in part.decoders:
                    name = f"{part.name} memory, {decoder} {part.key(decoder)}, {size}"
                    yield Piece(name, round(2 * ALONE * size**0.5), partial(self._memory, part, decoder, batches[0]))

    def _decode(self, part: Part, name: str, batch: Sequence[int]) -> list[Row]:
        shared = {"part": part.name, "decoder": name, "batch_size": len(batch)}
        rows = decode_rows(self.model, self.tokenizer, part.prompts, batch, part.decoders[name])
        return [shared | {key: value for key, value in row.items() if key != "text"} for row in rows]

    def _quality(self, part: Part, name: str, batch: Sequence[int]) -> list[Row]:
        together = [[index] for index in batch] if _is_adaptive(name) else [batch]
        rows = [row for some in together for row in self._decode(part, name, some)]
        for row in rows:
            prompt = part.prompts[row["prompt"]].tokens
            if row["right"] is None:
                agreeing = len(row["tokens"]) if name == AR else agreeing_tokens(self.model, prompt, row["tokens"])
                row["quality"] = agreeing / len(row["tokens"])
            else:
                row["quality"] = float(row["right"])
            if name == AR:
                row["entropy"] = answer_entropy(self.model, prompt, row["tokens"])
            row["kind"] = "quality"
        return rows

    def _turn(self, part: Part, batch: Sequence[int], repeat: int) -> list[Row]:
        rows: list[Row] = []
        reference: dict[int, list[int]] = {}
        for name in part.decoders:
            for place, row in enumerate(self._decode(part, name, batch)):
                tokens = row.pop("tokens")
                same = reference.setdefault(place, tokens) == tokens
                rows.append(row | {"kind": "speed", "repeat": repeat, "same": same})
        return rows

    def _timed_batches(self, part: Part, size: int) -> list[list[int]]:
        """Full batches of the timed prompts, tasks mixed; few prompts fill the only one over and over."""
        wanted = self.max_new_tokens
        roomy = [
            index
            for index in part.timed
            if answer_limit(self.model, len(part.prompts[index].tokens), wanted) == wanted
        ]
        timed = part.timed if size == 1 or not roomy else roomy
        if len(timed) < size:
            return [list(islice(cycle(timed), size))]
        return [list(timed[start : start + size]) for start in range(0, len(timed) - size + 1, size)]

    def _first_tokens(self, part: Part, batch: Sequence[int], repeat: int) -> list[Row]:
        prompts = [list(part.prompts[index].tokens) for index in batch]
        shared = {"part": part.name, "kind": "first token", "batch_size": len(batch), "repeat": repeat}
        return [
            shared | {"decoder": name, "first_token_seconds": seconds_to_first_token(self.model, prompts, options)}
            for name, options in part.decoders.items()
        ]

    def _memory(self, part: Part, name: str, batch: Sequence[int]) -> list[Row]:
        used = peak_bytes(partial(self._decode, part, name, batch), self.model.device)
        return [{"part": part.name, "kind": "memory", "decoder": name, "batch_size": len(batch), "peak_bytes": used}]


def _is_adaptive(name: str) -> bool:
    return name.split()[0] == EXACT
