"""A recorded generation; as JSON, whose fields are those of [`Trace`], and as one HTML file that replays it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).parent

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
    likeliest: list[tuple[int, float]] = field(default_factory=list)  # tokens and probabilities, descending


@dataclass(frozen=True)
class RecordedForward:
    """One forward and its outcome."""

    start: float  # since the call; the outcome counts as known when the next forward begins
    tokens: list[int]  # of its rows, in physical order
    positions: list[int]  # their logical positions
    kinds: str  # a letter for each row: c prompt, p pending, f filled out of order or drafted, m mask
    committed: int  # rows, from the left, whose keys and values entered the cache for good
    predictions: list[Prediction]  # of the masks, and of the next-token head where it follows on final tokens
    rejected: list[int]  # rows of the drafts that did not pass (verified decoding only)
    final: int  # new tokens that are final after this step


@dataclass(frozen=True)
class Run:
    """How one decoder answered one prompt."""

    name: Literal["wedlm", "block", "ar"]  # the strategy
    settings: dict[str, Any]  # those in effect
    tokens: list[int]  # new ones, the end token included
    pieces: list[str]  # the part of `text` that each brings; a character of several tokens comes with its last one
    text: str  # without special tokens
    steps: list[RecordedForward]  # one for each forward
    seconds: float  # of the whole call
    turns: list[float]  # seconds of the calls without a record; `start` and `seconds` are medians over them, if any
    stats: dict[str, int]  # as `generate` counts them, see COUNTS


@dataclass(frozen=True)
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


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A recorded generation."""

    format: Literal["wedlm-trace"] = "wedlm-trace"
    version: Literal[3] = 3
    model: str  # folder or Hub id
    fingerprint: dict[str, str]  # see `eval.measure.fingerprint`
    environment: dict[str, Any]  # versions and machine
    seed: int  # of sampling
    vocabulary: dict[str, str]  # text of every token that occurs, by id; lone bytes of a character as ⟨E2 82⟩
    special: list[int]  # ids of special tokens among them
    recordings: list[Recording]  # one for each prompt


def to_json(trace: Trace) -> str:
    """On one line."""
    return json.dumps(asdict(trace), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def page(trace: Trace) -> str:
    """The page's HTML, with the trace in it."""
    return render("page.html", trace=asdict(trace))


def render(name: str, *folders: Path, **values: Any) -> str:
    """A page made of a template, which may extend page.html, with its styles and scripts in it."""
    environment = Environment(loader=FileSystemLoader([*folders, FOLDER]), undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template(name).render(values)
