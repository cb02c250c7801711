"""A recorded generation, and its form as JSON: `{"format": "wedlm-trace", "version": 1}` and the fields below.

What is read is checked twice: its form against the types of the dataclasses, its content by a replay of the steps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from ...generation.settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings
from ..files import write_text
from ..options import is_unicode

FORMAT = {"format": "wedlm-trace", "version": 1}

# What a physical row of a forward held.
PROMPT, PENDING, FILLED, MASK = "cpfm"

COUNTS = ("new_tokens", "forwards", "token_instances", "drafted", "accepted")


@dataclass(frozen=True)
class Prediction:
    """What a forward predicted for one position."""

    position: int  # logical, counted from the prompt's first token
    by: Literal["mask", "ar"]  # its own mask slot, or the next-token head at the position before
    entropy: float  # H, nats
    token: int | None  # filled or drafted by a mask, made final by the AR head; None: the position stays open


@dataclass(frozen=True)
class Step:
    """One forward and its outcome."""

    start: float  # seconds since the call; the outcome counts as known when the next forward begins
    tokens: list[int]  # of its rows, in physical order
    positions: list[int]  # their logical positions
    kinds: str  # a letter for each row: c prompt, p pending, f filled out of order or drafted, m mask
    committed: int  # rows, from the left, whose keys and values entered the cache for good
    predictions: list[Prediction]  # of the masks, and of the next-token head where it follows on final tokens
    rejected: list[int]  # positions of the drafts that did not become final (verified decoding only)
    final: int  # new tokens that are final after this step


@dataclass(frozen=True)
class Run:
    """How one decoder answered one prompt."""

    name: Literal["wedlm", "block", "ar"]  # the strategy
    settings: dict[str, Any]  # those in effect
    tokens: list[int]  # new ones, the end token included
    pieces: list[str]  # the part of `text` that each brings; a character of several tokens comes with its last one
    text: str  # without special tokens
    steps: list[Step]  # one for each forward
    seconds: float  # of the whole call
    timed_runs: int  # `start` and `seconds` are medians of so many calls that recorded nothing
    stats: dict[str, int]  # as `generate` counts them, see COUNTS

    @property
    def is_verified(self) -> bool:
        """Whether drafts are final only once the AR head accepts them."""
        return bool(self.settings.get("verification", "none") != "none")

    @property
    def label(self) -> str:
        """The decoder's name as it is shown."""
        name = {"ar": "AR", "wedlm": "WeDLM", "block": "Block-wise"}[self.name]
        return f"{name} + {self.settings['verification']} verification" if self.is_verified else name

    @property
    def ends(self) -> list[float]:
        """When the outcome of each forward was known, seconds since the call."""
        return [step.start for step in self.steps[1:]] + [self.seconds]


@dataclass(frozen=True)
class Recording:
    """One prompt and its answers: the parallel decoder's first, then, if it was asked for, AR's."""

    prompt: str  # as it was given
    prompt_tokens: list[int]  # as the model got it
    runs: list[Run]

    @property
    def token_ids(self) -> set[int]:
        """All that occur anywhere."""
        steps = [step for run in self.runs for step in run.steps]
        predicted = {
            prediction.token for step in steps for prediction in step.predictions if prediction.token is not None
        }
        answers = [run.tokens for run in self.runs]
        return predicted.union(self.prompt_tokens, *answers, *(step.tokens for step in steps))


@dataclass(frozen=True)
class Trace:
    """What is saved."""

    model: str  # folder or Hub id
    fingerprint: dict[str, str]  # see `eval.fingerprint`
    environment: dict[str, Any]  # versions and machine
    seed: int  # of sampling
    vocabulary: dict[str, str]  # text of every token that occurs, by id; lone bytes of a character as ⟨E2 82⟩
    special: list[int]  # ids of special tokens among them
    recordings: list[Recording]  # one for each prompt


def to_json(trace: Trace) -> str:
    """As it is saved, on one line."""
    return json.dumps(FORMAT | asdict(trace), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
        trace = _with_form(Trace, _without_format(json.loads(data)), "")
        _check(trace)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} is no trace: it is not JSON ({error}).") from error
    except RecursionError as error:
        raise ValueError(f"{str(path)!r} is no trace: its JSON is nested too deeply.") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no trace to be read: {error}") from error
    return trace


# --- form ---------------------------------------------------------------------------------------------------------


def _without_format(data: Any) -> Any:
    if not isinstance(data, dict) or data.get("format") != FORMAT["format"]:
        raise ValueError(f'it has no `"format": "{FORMAT["format"]}"`.')
    if data.get("version") != FORMAT["version"]:
        raise ValueError(f"its version is {data.get('version')!r}, this program reads {FORMAT['version']}.")
    return {name: value for name, value in data.items() if name not in FORMAT}


def is_setting(value: Any, levels: int = 2) -> bool:
    """Whether a setting can be kept: number, text, truth value, null, or a list of those or of such lists."""
    if isinstance(value, list):
        return levels > 0 and all(is_setting(part, levels - 1) for part in value)
    return value is None or type(value) is bool or _is_text(value) or _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_unicode(value)


_VALUES: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
    float: (lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
    str: (_is_text, "text"),
    list: (lambda value: isinstance(value, list), "a list"),
    dict: (lambda value: isinstance(value, dict), "an object"),
    Any: (is_setting, "a number, text, true, false, null or a list of them"),
}
"""The JSON value that stands for a type, as a test and in words."""


def _with_form(kind: Any, data: Any, where: str) -> Any:
    """`data` as a value of a type made of dataclasses and those in `_VALUES`. Raises `ValueError`."""
    base, arguments = get_origin(kind) or kind, get_args(kind)
    if base is Literal:
        return data if data in arguments else _refuse(where, f"one of {arguments}", data)
    if type(None) in arguments:  # a type, or null
        return None if data is None else _with_form(arguments[0], data, where)
    holds, what = _VALUES[dict if is_dataclass(base) else base]
    if not holds(data):
        _refuse(where, what, data)
    if base is list:
        return [_with_form(arguments[0], value, f"{where}[{index}]") for index, value in enumerate(data)]
    if base is dict:
        return {name: _with_form(arguments[1], value, f"{where}.{name}") for name, value in data.items()}
    if not is_dataclass(base):
        return data
    hints = get_type_hints(base)
    missing, unknown = sorted(hints.keys() - data.keys()), sorted(data.keys() - hints.keys())
    if missing or unknown:
        raise ValueError(f"{where or 'the file'} {f'lacks {missing}' if missing else f'has unknown {unknown}'}.")
    return kind(**{name: _with_form(hint, data[name], f"{where}.{name}".lstrip(".")) for name, hint in hints.items()})


def _refuse(where: str, what: str, data: Any) -> NoReturn:
    shown = json.dumps(data)
    raise ValueError(f"{where} must be {what}, got {shown if len(shown) <= 40 else f'{shown[:40]}…'}.")


# --- content ------------------------------------------------------------------------------------------------------

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
    if run.name != "ar":
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
