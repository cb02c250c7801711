"""The measuring of `wedlm report`, in pieces that are kept: a run that was stopped goes on with the next piece.

Quality is decoded in batches, by one decoder after the other. Speed is that of one prompt at a time, all decoders in
turn (A B A B …); a turn that was cut off is taken again as a whole. Windows that adapt see all rows of a batch, so
such a decoder gets its prompts one at a time where quality is measured, too.

`N` prompts of a part, `T` of them timed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from ..generation.settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings
from ..modeling_wedlm import WeDLMForCausalLM
from .calibrate import agreeing_tokens
from .files import write_text
from .measure import Options, answer_entropy, batches_of_tasks, decode
from .sweep import AR
from .tasks import Sample, is_correct

SAVE_EVERY = 2.0  # seconds
ALONE = 4  # what one prompt alone costs in the progress bar, against its share of a batch


class Store:
    """Results of the pieces by name, kept in one JSON file that is written whole.

    Args:
        path: of the file.
        request: what decides the results, as JSON takes it.
        restart: begin anew, whatever the file holds.

    Raises:
        ValueError: if the file is of another request, or is no such file.
    """

    def __init__(self, path: Path, request: Mapping[str, Any], *, restart: bool = False):
        self.path = path
        self.request = json.loads(json.dumps(request))
        self.results: dict[str, Any] = {}
        self._saved_at = 0.0
        if restart or not path.exists():
            return
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            previous, self.results = stored["request"], stored["results"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{str(path)!r} is no file of partial results: choose another `--output`, or begin anew (--restart)."
            ) from None
        if differing := [
            name for name in {**previous, **self.request} if previous.get(name) != self.request.get(name)
        ]:
            name = differing[0]
            raise ValueError(
                f"{str(path.parent)!r} holds a report with another {', '.join(differing)} "
                f"({name}: {_short(previous.get(name))} there, {_short(self.request.get(name))} now): ask for the "
                "same, choose another `--output`, or begin anew (--restart)."
            )

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.results:  # a request that was refused leaves nothing that another one could not go on from
            self.save()

    def put(self, name: str, result: Any) -> None:
        """Keeps a result, on disk within [`SAVE_EVERY`] seconds or at the end."""
        self.results[name] = result
        if time.monotonic() - self._saved_at > SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Writes the file."""
        write_text(self.path, json.dumps({"request": self.request, "results": self.results}, ensure_ascii=False))
        self._saved_at = time.monotonic()


@dataclass(frozen=True)
class Part:
    """Prompts and what decodes them.

    Attributes:
        name: of the part.
        title: for the progress bar.
        samples: N of them.
        prompts: their tokens.
        decoders: keywords of `generate` by name, AR first.
        timed: indices of the T samples that are timed.
    """

    name: str
    title: str
    samples: Sequence[Sample]
    prompts: Sequence[list[int]]
    decoders: Mapping[str, Options]
    timed: Sequence[int]

    @property
    def turn(self) -> str:
        """Names those who take turns: times of another turn are of another moment, and never set against these."""
        return hashlib.sha256("\n".join(self.decoders).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Measured:
    """What came of a part.

    Attributes:
        tasks: of the N samples.
        timed: indices of the T that were timed.
        counts: by decoder, `(N, 5)` float64: quality (0 to 1), whether the answer is AR's, new tokens, forwards, token
            instances.
        times: by decoder, `(T, 2)` float64: new tokens, and seconds (the median of the repeats).
        entropies: of the AR head over AR's answer, mean over its tokens, nats; `(N,)`.
    """

    tasks: Sequence[str]
    timed: Sequence[int]
    counts: Mapping[str, torch.Tensor]
    times: Mapping[str, torch.Tensor]
    entropies: torch.Tensor


@dataclass(frozen=True)
class Bench:
    """A model and how to measure with it.

    Attributes:
        model: in evaluation mode.
        tokenizer: the model's.
        batch_size: samples decoded together where time does not count.
        repeats: times are medians of so many.
        has_answers: quality is right or wrong; else it is the share of new tokens that AR decoding would have chosen
            after the same prefix.
    """

    model: WeDLMForCausalLM
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    repeats: int
    has_answers: bool

    def run(self, part: Part, store: Store, console: Console) -> Measured:
        """Measure what the store does not have yet, with a progress bar."""
        pieces = list(self._pieces(part))
        done = [piece for piece in pieces if all(name in store.results for name in piece.names)]
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        left = (TextColumn("elapsed, left"), TimeRemainingColumn())
        with Progress(*columns, *left, console=console, speed_estimate_period=120) as bar:
            task = bar.add_task(
                part.title, total=sum(piece.cost for piece in pieces), completed=sum(piece.cost for piece in done)
            )
            if len(done) < len(pieces):
                for options in part.decoders.values():  # a warm-up, which also refuses what cannot be decoded
                    decode(self.model, self.tokenizer, [part.prompts[0]], options)
            for piece in pieces:
                if any(name not in store.results for name in piece.names):
                    for name, result in zip(piece.names, self._measure(piece, part, store), strict=True):
                        store.put(name, result)
                    bar.advance(task, piece.cost)
        return self._collect(part, store)

    def _pieces(self, part: Part) -> Iterator[_Piece]:
        for batch in batches_of_tasks([sample.task for sample in part.samples], self.batch_size):
            for decoder, options in part.decoders.items():
                cost = len(batch) * (ALONE if _is_adaptive(options) else 1)
                yield _Piece((f"{part.name} quality, {decoder}, {batch[0]}",), cost, batch, (decoder,))
        for index in part.timed:
            for repeat in range(self.repeats):
                names = tuple(
                    f"{part.name} speed {part.turn}, {decoder}, {index}, {repeat}" for decoder in part.decoders
                )
                yield _Piece(names, ALONE * len(names), [index], tuple(part.decoders), is_timed=True)

    def _measure(self, piece: _Piece, part: Part, store: Store) -> list[Any]:
        prompts = [part.prompts[index] for index in piece.samples]
        if piece.is_timed:
            runs = (decode(self.model, self.tokenizer, prompts, part.decoders[name])[0] for name in piece.decoders)
            return [[len(run.tokens), run.seconds] for run in runs]
        (name,) = piece.decoders
        options = part.decoders[name]
        together = [[prompt] for prompt in prompts] if _is_adaptive(options) else [prompts]
        answers = [answer for batch in together for answer in decode(self.model, self.tokenizer, batch, options)]
        wanted = store.results.get(f"{part.name} quality, {AR}, {piece.samples[0]}", {}).get("answers")
        rows = []
        for place, (index, prompt, answer) in enumerate(zip(piece.samples, prompts, answers, strict=True)):
            if self.has_answers:
                quality = float(is_correct(part.samples[index], answer.text))
            elif name == AR:
                quality = 1.0
            else:
                quality = agreeing_tokens(self.model, prompt, answer.tokens) / len(answer.tokens)
            agrees = name == AR or answer.tokens == wanted[place]
            rows.append([quality, int(agrees), len(answer.tokens), answer.forwards, answer.token_instances])
        result: dict[str, Any] = {"rows": rows}
        if name == AR:
            result["answers"] = [answer.tokens for answer in answers]
            pairs = zip(prompts, answers, strict=True)
            result["entropies"] = [answer_entropy(self.model, prompt, answer.tokens) for prompt, answer in pairs]
        return [result]

    def _collect(self, part: Part, store: Store) -> Measured:
        batches = batches_of_tasks([sample.task for sample in part.samples], self.batch_size)
        order = torch.tensor([index for batch in batches for index in batch]).argsort()

        def gathered(decoder: str, field: str) -> torch.Tensor:
            kept = [store.results[f"{part.name} quality, {decoder}, {batch[0]}"][field] for batch in batches]
            return torch.tensor([row for rows in kept for row in rows], dtype=torch.float64)[order]

        def timed(decoder: str, index: int) -> list[float]:
            kept = [
                store.results[f"{part.name} speed {part.turn}, {decoder}, {index}, {r}"] for r in range(self.repeats)
            ]
            return [kept[0][0], median(seconds for _, seconds in kept)]

        return Measured(
            tasks=[sample.task for sample in part.samples],
            timed=part.timed,
            counts={name: gathered(name, "rows") for name in part.decoders},
            times={
                name: torch.tensor([timed(name, index) for index in part.timed], dtype=torch.float64)
                for name in part.decoders
            },
            entropies=gathered(AR, "entropies"),
        )


@dataclass(frozen=True)
class _Piece:
    """A batch under one decoder, or one turn of all decoders on a timed prompt. Its results are called `names`."""

    names: tuple[str, ...]
    cost: int
    samples: Sequence[int]
    decoders: tuple[str, ...]
    is_timed: bool = False


def _is_adaptive(options: Options) -> bool:
    settings = {name: value for name, value in options.items() if name in SETTING_NAMES}
    return WeDLMGenerationSettings(**settings).is_adaptive


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
