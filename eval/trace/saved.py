"""A recorded generation, and its form as JSON: the fields of [`Trace`].

What is read is checked twice: its form against the types of the dataclasses, its content by a replay of the steps.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ...generation.settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings
from ..decoders import AR, decoder_name
from ..files import write_text
from ..options import is_unicode

FORMAT: dict[str, Any] = {"format": "wedlm-trace", "version": 1}

# What a physical row of a forward held.
PROMPT, PENDING, FILLED, MASK = "cpfm"

COUNTS = ("new_tokens", "forwards", "token_instances", "drafted", "accepted")


def is_setting(value: Any, levels: int = 2) -> bool:
    """Whether a setting can be kept: number, text, truth value, null, or a list of those or of such lists."""
    if isinstance(value, list):
        return levels > 0 and all(is_setting(part, levels - 1) for part in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int) or (isinstance(value, str) and is_unicode(value))


def _check_setting(value: Any) -> Any:
    if not is_setting(value):
        raise ValueError("a setting is a number, text, true, false, null or a list of them")
    return value


_FORM = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Nats = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Setting = Annotated[Any, AfterValidator(_check_setting)]


@dataclass(frozen=True, config=_FORM)
class Prediction:
    """What a forward predicted for one position."""

    position: Count  # logical, counted from the prompt's first token
    by: Literal["mask", "ar"]  # its own mask slot, or the next-token head at the position before
    entropy: Nats  # H
    token: Count | None  # filled or drafted by a mask, made final by the AR head; None: the position stays open
    likeliest: list[tuple[Count, Share]] = field(default_factory=list)  # tokens and probabilities, descending


@dataclass(frozen=True, config=_FORM)
class Step:
    """One forward and its outcome."""

    start: Seconds  # since the call; the outcome counts as known when the next forward begins
    tokens: list[Count]  # of its rows, in physical order
    positions: list[Count]  # their logical positions
    kinds: str  # a letter for each row: c prompt, p pending, f filled out of order or drafted, m mask
    committed: Count  # rows, from the left, whose keys and values entered the cache for good
    predictions: list[Prediction]  # of the masks, and of the next-token head where it follows on final tokens
    rejected: list[Count]  # positions of the drafts that did not become final (verified decoding only)
    final: Count  # new tokens that are final after this step


@dataclass(frozen=True, config=_FORM)
class Run:
    """How one decoder answered one prompt."""

    name: Literal["wedlm", "block", "ar"]  # the strategy
    settings: dict[str, Setting]  # those in effect
    tokens: list[Count]  # new ones, the end token included
    pieces: list[str]  # the part of `text` that each brings; a character of several tokens comes with its last one
    text: str  # without special tokens
    steps: list[Step]  # one for each forward
    seconds: Seconds  # of the whole call
    timed_runs: Count  # `start`, `seconds`: medians of so many calls that recorded nothing; 0: the recorded one's
    stats: dict[str, Count]  # as `generate` counts them, see COUNTS

    @property
    def is_verified(self) -> bool:
        """Whether drafts are final only once the AR head accepts them."""
        return self.label != self.name

    @property
    def label(self) -> str:
        """The decoder's name."""
        return decoder_name(self.name, str(self.settings.get("verification", "none")))

    @property
    def ends(self) -> list[float]:
        """When the outcome of each forward was known, seconds since the call."""
        return [step.start for step in self.steps[1:]] + [self.seconds]


@dataclass(frozen=True, config=_FORM)
class Recording:
    """One prompt and its answers: the parallel decoder's first, then, if it was asked for, AR's."""

    prompt: str  # as it was given
    prompt_tokens: list[Count]  # as the model got it
    runs: list[Run]

    @property
    def token_ids(self) -> set[int]:
        """All that occur anywhere."""
        steps = [step for run in self.runs for step in run.steps]
        guesses = [guess for step in steps for guess in step.predictions]
        predicted = {guess.token for guess in guesses if guess.token is not None}
        predicted.update(token for guess in guesses for token, _ in guess.likeliest)
        answers = [run.tokens for run in self.runs]
        return predicted.union(self.prompt_tokens, *answers, *(step.tokens for step in steps))


@dataclass(frozen=True, config=_FORM)
class Trace:
    """What is saved."""

    format: Literal["wedlm-trace"]
    version: Literal[1]
    model: str  # folder or Hub id
    fingerprint: dict[str, str]  # see `eval.fingerprint`
    environment: dict[str, Setting]  # versions and machine
    seed: Count  # of sampling
    vocabulary: dict[str, str]  # text of every token that occurs, by id; lone bytes of a character as ⟨E2 82⟩
    special: list[Count]  # ids of special tokens among them
    recordings: list[Recording]  # one for each prompt


def to_json(trace: Trace) -> str:
    """As it is saved, on one line."""
    return json.dumps(asdict(trace), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write it, whole or not at all."""
    write_text(path, to_json(trace))


def load(path: str | os.PathLike[str]) -> Trace:
    """Read what [`save`] wrote.

    Raises:
        OSError: if it cannot be read.
        ValueError: for anything else than a whole and consistent trace of this version.
    """
    data = Path(path).read_bytes()
    try:
        trace = TypeAdapter(Trace).validate_json(data)
        _check(trace)
    except ValidationError as error:
        raise ValueError(f"{str(path)!r} is no trace to be read: {first_of(error)}.") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no trace to be read: {error}") from error
    return trace


def first_of(error: ValidationError) -> str:
    """Where the form is another one, what is wanted there, and what was found."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    shown = repr(first["input"])
    got = f", got {shown if len(shown) <= 40 else f'{shown[:40]}…'}"
    what = first["msg"].removeprefix("Value error, ")
    is_told = first["type"] in ("missing", "json_invalid")
    return f"{where or 'the file'}: {what[0].lower()}{what[1:]}{'' if is_told else got}"


_SHOWN = {
    "fingerprint": {"weights", "config", "tokenizer"},
    "environment": {"device", "threads", "torch", "transformers", "dtype"},
    "settings": {"window_size", "entropy_threshold", "distance_penalty", "verification"},
}
"""Keys that are needed to show a trace, or to compare its model."""


def _check(trace: Trace) -> None:
    """Raises `ValueError` for a trace that cannot be shown, or that contradicts itself."""
    _expect(trace.recordings, "it has no recordings")
    for name in ("fingerprint", "environment"):
        missing = sorted(_SHOWN[name] - getattr(trace, name).keys())
        _expect(not missing, f"{name} lacks {missing}")
    for number, recording in enumerate(trace.recordings):
        names = [run.name for run in recording.runs]
        usual = names in (["wedlm"], ["block"], ["wedlm", "ar"], ["block", "ar"])
        _expect(usual, f"recordings[{number}].runs must be wedlm's or block's, then perhaps ar's, got {names}")
        for run in recording.runs:
            try:
                _check_run(recording, run)
            except ValueError as error:
                raise ValueError(f"recordings[{number}], {run.name}: {error}") from None
    needed = {str(token) for recording in trace.recordings for token in recording.token_ids}
    absent = min(map(int, needed - trace.vocabulary.keys()), default=None)
    _expect(absent is None, f"vocabulary: no text for token {absent}")


def _check_run(recording: Recording, run: Run) -> None:
    if run.name != AR:
        missing = sorted(_SHOWN["settings"] - run.settings.keys())
        _expect(not missing, f"settings lacks {missing}")
        WeDLMGenerationSettings(**{name: run.settings[name] for name in SETTING_NAMES if name in run.settings})
    _expect(recording.prompt_tokens and run.steps, "there is no prompt, or no step")
    tokens, counts = replay(recording, run)
    _expect(tokens == run.tokens, "the steps do not lead to the tokens")
    _expect(len(run.pieces) == len(tokens) and "".join(run.pieces) == run.text, "the pieces are not the text")
    _expect(run.seconds > 0 and all(a <= b for a, b in pairwise([0.0, *run.ends])), "the clock runs backwards")
    _expect(run.stats == counts, f"the counts are not those of the steps, {counts}")


def replay(recording: Recording, run: Run) -> tuple[list[int], dict[str, int]]:
    """The new tokens and the counts, rebuilt from the rows of the steps and what they filled and committed.

    Raises:
        ValueError: where a step contradicts an earlier one, or the prompt.
    """
    settled = dict(enumerate(recording.prompt_tokens))
    filled: dict[int, int] = {}
    cached, start, counts = 0, len(settled), dict.fromkeys(COUNTS, 0)
    for number, step in enumerate(run.steps, 1):
        here = f"forward {number}:"
        widths = {len(step.positions), len(step.tokens), len(step.kinds)}
        _expect(len(widths) == 1 and step.committed <= max(widths), f"{here} rows of different lengths")
        _expect(set(step.kinds) <= {PROMPT, PENDING, FILLED, MASK}, f"{here} rows of kinds {step.kinds!r}")
        rows = list(zip(step.positions, step.tokens, step.kinds, strict=True))
        read = {position: token for position, token, kind in rows if kind == FILLED}
        for position, token in read.items():
            _expect(filled.get(position) == token, f"{here} nothing filled position {position} so")
        _expect(read.keys() >= set(step.rejected), f"{here} what was no draft is rejected")
        for prediction in step.predictions:
            if prediction.token is not None:
                filled[prediction.position] = prediction.token
                if prediction.by == "ar" or not run.is_verified:
                    settled[prediction.position] = prediction.token
        for position, token, _ in rows[: step.committed]:
            in_turn = position == cached and settled.get(position) == token
            _expect(in_turn, f"{here} position {position} is cached out of turn")
            cached += 1
        while (end := start + counts["new_tokens"]) in settled and end < start + step.final:
            counts["new_tokens"] += 1
        _expect(end == start + step.final, f"{here} position {end} is final, and nothing filled it")
        counts["forwards"] += 1
        counts["token_instances"] += len(rows) - step.kinds.count(PROMPT)
        if run.is_verified:
            counts["drafted"] += len(read)
            counts["accepted"] += len(read) - len(step.rejected)
    return [settled[start + offset] for offset in range(counts["new_tokens"])], counts


def _expect(holds: object, message: str) -> None:
    if not holds:
        raise ValueError(f"{message}.")
