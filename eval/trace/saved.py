"""A recorded generation, and its form as JSON: the fields of [`Trace`].

What is read is checked twice: its form against the types of the dataclasses, its content against the hash that was
saved with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..decoders import decoder_name
from ..files import write_text

# What a physical row of a forward held.
PROMPT, PENDING, FILLED, MASK = "cpfm"

COUNTS = ("new_tokens", "forwards", "token_instances", "drafted", "accepted")

_FORM = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=_FORM)
class Prediction:
    """What a forward predicted for one position."""

    position: int  # logical, counted from the prompt's first token
    by: Literal["mask", "ar"]  # its own mask slot, or the next-token head at the position before
    entropy: float  # H, nats
    token: int | None  # filled or drafted by a mask, made final by the AR head; None: the position stays open
    likeliest: list[tuple[int, float]] = field(default_factory=list)  # tokens and probabilities, descending


@dataclass(frozen=True, config=_FORM)
class Step:
    """One forward and its outcome."""

    start: float  # since the call; the outcome counts as known when the next forward begins
    tokens: list[int]  # of its rows, in physical order
    positions: list[int]  # their logical positions
    kinds: str  # a letter for each row: c prompt, p pending, f filled out of order or drafted, m mask
    committed: int  # rows, from the left, whose keys and values entered the cache for good
    predictions: list[Prediction]  # of the masks, and of the next-token head where it follows on final tokens
    rejected: list[int]  # positions of the drafts that did not become final (verified decoding only)
    final: int  # new tokens that are final after this step


@dataclass(frozen=True, config=_FORM)
class Run:
    """How one decoder answered one prompt."""

    name: Literal["wedlm", "block", "ar"]  # the strategy
    settings: dict[str, Any]  # those in effect
    tokens: list[int]  # new ones, the end token included
    pieces: list[str]  # the part of `text` that each brings; a character of several tokens comes with its last one
    text: str  # without special tokens
    steps: list[Step]  # one for each forward
    seconds: float  # of the whole call
    timed_runs: int  # `start`, `seconds`: medians of so many calls that recorded nothing; 0: the recorded one's
    stats: dict[str, int]  # as `generate` counts them, see COUNTS

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
    prompt_tokens: list[int]  # as the model got it
    runs: list[Run]

    @property
    def token_ids(self) -> set[int]:
        """All that occur anywhere."""
        found = {*self.prompt_tokens}
        for run in self.runs:
            found.update(run.tokens, *(step.tokens for step in run.steps))
            for guess in (guess for step in run.steps for guess in step.predictions):
                found.update([] if guess.token is None else [guess.token], (token for token, _ in guess.likeliest))
        return found


@dataclass(frozen=True, config=_FORM, kw_only=True)
class Trace:
    """What is saved."""

    format: Literal["wedlm-trace"] = "wedlm-trace"
    version: Literal[1] = 1
    model: str  # folder or Hub id
    fingerprint: dict[str, str]  # see `eval.fingerprint`
    environment: dict[str, Any]  # versions and machine
    seed: int  # of sampling
    vocabulary: dict[str, str]  # text of every token that occurs, by id; lone bytes of a character as ⟨E2 82⟩
    special: list[int]  # ids of special tokens among them
    recordings: list[Recording]  # one for each prompt
    hash: str = ""  # of a saved trace: SHA-256 of the JSON that it has without one


def to_json(trace: Trace) -> str:
    """As it is saved, on one line."""
    return json.dumps(asdict(trace), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _hashed(trace: Trace) -> str:
    return hashlib.sha256(to_json(trace).encode()).hexdigest()


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write it, whole or not at all."""
    write_text(path, to_json(replace(trace, hash=_hashed(trace))))


def load(path: str | os.PathLike[str]) -> Trace:
    """Read what [`save`] wrote.

    Raises:
        OSError: if it cannot be read.
        ValueError: for anything else than a whole and unchanged trace of this version.
    """
    try:
        saved = TypeAdapter(Trace).validate_json(Path(path).read_bytes())
        trace = replace(saved, hash="")
        if saved.hash != _hashed(trace):
            raise ValueError("it was changed since it was saved")
    except ValueError as error:
        why = first_of(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{str(path)!r} is no trace to be read: {why}.") from error
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
