"""The record of a generation, step by step, next to AR decoding of the same prompt at the same clock.

[`record`] decodes prompts and returns a [`Trace`]; [`save`] and [`load`] keep it as JSON, `{"format": "wedlm-trace",
"version": 1}` and the fields of the dataclasses below under their names. trace_page.py and trace_terminal.py show it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..generation.selection_wedlm import token_entropy
from ..generation.settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings
from ..generation.stats_wedlm import TraceStep
from ..modeling_wedlm import WeDLMForCausalLM
from .compare import default_limit
from .files import write_text
from .measure import ForwardCounter, Options, Score, encode_text, environment, now

FORMAT = "wedlm-trace"
VERSION = 1

# What a physical row of a forward held.
PROMPT, PENDING, FILLED, MASK = "cpfm"

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Prediction:
    """What a forward said of one logical position.

    Attributes:
        position: logical position, counted from the prompt's first token.
        by: `"mask"`: its own mask slot; `"ar"`: the next-token head at the position before.
        entropy: H, nats.
        token: a mask's: what it was filled with, or drafted under verification; the AR head's: the token that it made
            final. `None` if this forward left the position open.
    """

    position: int
    by: Literal["mask", "ar"]
    entropy: float
    token: int | None


@dataclass(frozen=True)
class Step:
    """One forward and what came of it.

    Attributes:
        start: when the forward began, seconds since the call. What it decided was known when the next one began.
        tokens: of its rows, in physical order.
        positions: their logical positions.
        kinds: a letter for each row: `c` prompt, `p` pending, `f` filled out of order or drafted, `m` mask.
        committed: rows, from the left, whose keys and values entered the cache for good.
        predictions: of the rows whose logits were computed, and that are masks or follow on final tokens.
        rejected: positions of the drafts that did not become final (verified decoding only).
        final: new tokens that are final after this step.
    """

    start: float
    tokens: list[int]
    positions: list[int]
    kinds: str
    committed: int
    predictions: list[Prediction]
    rejected: list[int]
    final: int


@dataclass(frozen=True)
class Run:
    """How one decoder answered one prompt.

    Attributes:
        name: `"wedlm"`, `"block"` or `"ar"`.
        settings: those in effect.
        tokens: new ones, the end token included.
        pieces: the part of `text` that each token brings; a character of several tokens comes with its last one.
        text: without special tokens.
        steps: one for each forward.
        seconds: of the whole call.
        timed_runs: `start` and `seconds` are medians of so many runs that recorded nothing.
        stats: `new_tokens`, `forwards`, `token_instances`, `drafted`, `accepted`, as `generate` counts them.
    """

    name: Literal["wedlm", "block", "ar"]
    settings: dict[str, Any]
    tokens: list[int]
    pieces: list[str]
    text: str
    steps: list[Step]
    seconds: float
    timed_runs: int
    stats: dict[str, int]

    @property
    def is_verified(self) -> bool:
        """Whether drafts are final only once the AR head accepts them."""
        return self.settings.get("verification", "none") != "none"

    @property
    def label(self) -> str:
        """The name as people know it."""
        return label_of(self.name, self.settings.get("verification", "none"))

    @property
    def ends(self) -> list[float]:
        """When the outcome of each forward was known, seconds since the call."""
        return [step.start for step in self.steps[1:]] + [self.seconds]


@dataclass(frozen=True)
class Recording:
    """One prompt and its answers: the parallel decoder's first, then, if it was asked for, AR's.

    Attributes:
        prompt: as it was given.
        prompt_tokens: as the model got it.
        runs: one for each decoder.
    """

    prompt: str
    prompt_tokens: list[int]
    runs: list[Run]


@dataclass(frozen=True)
class Trace:
    """What is saved.

    Attributes:
        model: folder or Hub id.
        fingerprint: see [`fingerprint`].
        environment: versions and machine.
        seed: of sampling.
        vocabulary: text of every token that occurs, by id; bytes that are no character of their own as `⟨E2 82⟩`.
        special: ids of special tokens among them.
        recordings: one for each prompt.
    """

    model: str
    fingerprint: dict[str, str]
    environment: dict[str, Any]
    seed: int
    vocabulary: dict[str, str]
    special: list[int]
    recordings: list[Recording]


# --- recording ----------------------------------------------------------------------------------------------------


def record(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    options: Options,
    *,
    model_name: str,
    with_ar: bool = True,
    raw: bool = False,
    seed: int = 0,
    repeats: int = 5,
    title: str = "",
) -> Trace:
    """Decode prompts and keep every step.

    Each prompt is decoded once to see its steps and `repeats` times, decoders taking turns, to see their times:
    recording costs time of its own, and so does a first call.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        prompts: at least one.
        options: keywords of `generate`, `strategy` among them.
        model_name: as it is shown.
        with_ar: AR decoding of the same prompt too, with the same options where they apply.
        raw: take prompts as they are, without the chat template.
        seed: of sampling, set anew for each prompt and decoder.
        repeats: timed runs, at least 1.
        title: shown with a progress bar on standard error, if any.

    Raises:
        ValueError: for a strategy that has no steps to show, and whatever `generate` refuses.
    """
    if options["strategy"] == "ar":
        raise ValueError("A trace shows parallel decoding: `strategy` must be 'wedlm' or 'block', got 'ar'.")
    encoded = [encode_text(model, tokenizer, prompt, raw) for prompt in prompts]
    recordings = []
    for prompt, tokens in track(
        list(zip(prompts, encoded, strict=True)), title, console=Console(stderr=True), disable=not title
    ):
        decoders = decoders_of(model, options, len(tokens), with_ar)
        seen = {name: _see(model, tokens, keywords, seed) for name, keywords in decoders.items()}
        turns = [
            {name: _Call(model, tokens, keywords, seed).clock for name, keywords in decoders.items()}
            for _ in range(repeats)
        ]
        runs = [
            _run(
                tokenizer, decoder, _shown_settings(model, keywords), seen[decoder], [turn[decoder] for turn in turns]
            )
            for decoder, keywords in decoders.items()
        ]
        recordings.append(Recording(prompt, tokens, runs))
    ids = {id_ for recording in recordings for id_ in _ids(recording)}
    return Trace(
        model=model_name,
        fingerprint=fingerprint(model, tokenizer),
        environment=dict(environment(model)),
        seed=seed,
        vocabulary={str(id_): token_text(tokenizer, id_) for id_ in sorted(ids)},
        special=sorted(ids & set(tokenizer.all_special_ids)),
        recordings=recordings,
    )


def decoders_of(
    model: WeDLMForCausalLM, options: Options, prompt_length: int, with_ar: bool
) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by decoder: the one that was asked for, then AR with what applies to it."""
    limit = default_limit(model, prompt_length)
    decoders = {options["strategy"]: {**limit, **options}}
    if with_ar:
        shared = {name: value for name, value in options.items() if name not in SETTING_NAMES}
        decoders["ar"] = {**limit, **shared, "strategy": "ar"}
    return decoders


class _Call:
    """One `generate` call and its clock: the start of each forward and the end, seconds since the call."""

    def __init__(self, model: WeDLMForCausalLM, prompt: list[int], options: Options, seed: int):
        ids = torch.tensor([prompt], device=model.device)
        untyped: Any = model
        torch.manual_seed(seed)
        with ForwardCounter(model) as counter:
            start = now(model)
            self.output = untyped.generate(
                ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options
            )
            end = now(model)
        self.clock = [moment - start for moment in (*counter.starts, end)]
        self.tokens: list[int] = self.output.sequences[0, len(prompt) :].tolist()
        self.forwards = counter.forwards
        self.token_instances = counter.slots - len(prompt)


@dataclass(frozen=True)
class _Seen:
    """A call that was recorded: its steps, without their times, and its counts."""

    call: _Call
    steps: list[Step]
    stats: dict[str, int]


def _see(model: WeDLMForCausalLM, prompt: list[int], options: Options, seed: int) -> _Seen:
    if options["strategy"] == "ar":
        entropies: list[float] = []

        def look(model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            entropies.append(token_entropy(output.logits[:, -1:].float()).item())

        hook = model.register_forward_hook(look)
        try:
            call = _Call(model, prompt, options, seed)
        finally:
            hook.remove()
        counts = _stats((len(call.tokens), call.forwards, call.token_instances, 0, 0))
        return _Seen(call, _ar_steps(prompt, call.tokens, entropies), counts)
    call = _Call(model, prompt, {**options, "output_trace": True}, seed)
    counts = _stats([getattr(call.output.stats, name).item() for name in STATS])
    seen = (counts["forwards"], counts["token_instances"])
    assert seen == (call.forwards, call.token_instances), f"{seen} were reported, {call.forwards} forwards were seen"
    return _Seen(call, _parallel_steps(prompt, call.tokens, call.output.trace, settings_of(model, options)), counts)


STATS = ("new_tokens", "forwards", "token_instances", "drafted", "accepted")


def _stats(counts: Sequence[int]) -> dict[str, int]:
    return dict(zip(STATS, counts, strict=True))


def label_of(name: str, verification: str) -> str:
    """A decoder's name as people know it."""
    label = {"ar": "AR", "wedlm": "WeDLM", "block": "Block-wise"}[name]
    return label if name == "ar" or verification == "none" else f"{label} + {verification} verification"


def settings_of(model: WeDLMForCausalLM, options: Options) -> WeDLMGenerationSettings:
    """Those in effect: the call's, else the checkpoint's, else the defaults."""
    stored = {name: getattr(model.generation_config, name, None) for name in SETTING_NAMES}
    stored["mask_token_id"] = stored["mask_token_id"] or model.config.mask_token_id
    given = {name: value for name, value in options.items() if name in SETTING_NAMES}
    return WeDLMGenerationSettings(**{name: value for name, value in (stored | given).items() if value is not None})


def _shown_settings(model: WeDLMForCausalLM, options: Options) -> dict[str, Any]:
    """Those of [`settings_of`] that mean something for the strategy, and the other keywords."""
    others = {name: value for name, value in options.items() if name not in SETTING_NAMES}
    if options["strategy"] == "ar":
        return {"strategy": "ar", **others}
    settings = {name: value for name, value in asdict(settings_of(model, options)).items() if name != "output_trace"}
    return {**settings, **others}


def _ar_steps(prompt: list[int], tokens: list[int], entropies: list[float]) -> list[Step]:
    """The first forward reads the prompt, each other one the last token."""
    steps = []
    for index, (token, entropy) in enumerate(zip(tokens, entropies, strict=True)):
        read = [tokens[index - 1]] if index else prompt
        position = len(prompt) + index
        steps.append(
            Step(
                start=0.0,
                tokens=read,
                positions=list(range(position - len(read), position)),
                kinds=(PENDING if index else PROMPT) * len(read),
                committed=len(read),
                predictions=[Prediction(position, "ar", round(entropy, 5), token)],
                rejected=[],
                final=index + 1,
            )
        )
    return steps


def _parallel_steps(
    prompt: list[int], tokens: list[int], trace: Sequence[TraceStep], settings: WeDLMGenerationSettings
) -> list[Step]:
    """Steps of the only row of a call."""
    sequence = prompt + tokens
    is_verified = settings.verification != "none"
    steps: list[Step] = []
    settled: set[int] = set()  # positions
    end = len(prompt)  # where final tokens end
    for step in trace:
        count = step.counts[0]
        read, positions = step.input_ids[0, -count:].tolist(), step.position_ids[0, -count:].tolist()

        def kind(position: int, token: int, end: int = end) -> str:
            if position < end:
                return PROMPT if position < len(prompt) else PENDING
            return MASK if token == settings.mask_token_id else FILLED  # a mask is never emitted

        kinds = "".join(map(kind, positions, read))
        decided = {len(prompt) + offset for offset in step.decided[0]}
        masks = {position for position, letter in zip(positions, kinds, strict=True) if letter == MASK}
        predictions = _predictions(step, masks, sequence, decided, end - 1 if is_verified else None)
        settled |= decided
        while end in settled and end < len(sequence):
            end += 1
        drafts = zip(positions, read, kinds, strict=True) if is_verified else []
        steps.append(
            Step(
                start=0.0,
                tokens=read,
                positions=positions,
                kinds=kinds,
                committed=step.committed[0],
                predictions=predictions,
                rejected=[
                    position
                    for position, token, letter in drafts
                    if letter == FILLED and (position >= end or sequence[position] != token)
                ],
                final=end - len(prompt),
            )
        )
    return steps


def _predictions(
    step: TraceStep, masks: set[int], sequence: list[int], decided: set[int], first_ar: int | None
) -> list[Prediction]:
    """What the rows with logits said, by position. `first_ar`: position of the first row that the AR head verifies."""
    width = step.logit_positions.shape[1]
    columns = (step.logit_positions, step.is_mask, step.entropy, step.filled, step.tokens)
    predictions = {}
    for position, is_mask, entropy, filled, token in list(zip(*(c[0].tolist() for c in columns), strict=True))[
        -min(width, step.counts[0]) :
    ]:
        entropy = round(entropy, 5)
        if is_mask:  # without a mask in play, the AR head of the last token fills the slot after it
            by: Literal["mask", "ar"] = "mask" if position in masks else "ar"
            # Under verification the AR head's token takes the slot of the leftmost mask, which drafts nothing then.
            is_taken = first_ar is not None and position in decided
            predictions[position, by] = Prediction(position, by, entropy, token if filled and not is_taken else None)
        elif first_ar is not None and position >= first_ar:
            position += 1
            final = sequence[position] if position in decided else None
            predictions[position, "ar"] = Prediction(position, "ar", entropy, final)
    return [predictions[key] for key in sorted(predictions)]


def _run(
    tokenizer: PreTrainedTokenizerBase,
    name: Any,
    settings: dict[str, Any],
    seen: _Seen,
    clocks: Sequence[list[float]],
) -> Run:
    """What was seen, with the medians of the clocks of the same forwards."""
    same = [clock for clock in clocks if len(clock) == len(seen.call.clock)]
    *starts, seconds = [round(median(moments), 7) for moments in zip(*(same or [seen.call.clock]), strict=True)]
    text = str(tokenizer.decode(seen.call.tokens, skip_special_tokens=True))
    return Run(
        name=name,
        settings=settings,
        tokens=seen.call.tokens,
        pieces=pieces_of(tokenizer, seen.call.tokens),
        text=text,
        steps=[replace(step, start=start) for step, start in zip(seen.steps, starts, strict=True)],
        seconds=seconds,
        timed_runs=len(same),
        stats=seen.stats,
    )


def totals(trace: Trace) -> dict[str, Score]:
    """Sums over prompts for each decoder."""
    scores: dict[str, Score] = {}
    for recording in trace.recordings:
        for run in recording.runs:
            agreeing = int(run.tokens == recording.runs[-1].tokens)
            counts = (run.stats["new_tokens"], run.stats["forwards"], run.stats["token_instances"])
            scores[run.name] = scores.get(run.name, Score()) + Score(1, 0, agreeing, *counts, run.seconds)
    return scores


# --- text ---------------------------------------------------------------------------------------------------------


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The part of the text that each token brings. Together they are the text without special tokens."""
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    pieces, written = [], 0
    for count in range(1, len(tokens) + 1):
        # A token may bring the first bytes of a character only, or change the end of what is there.
        prefix = str(tokenizer.decode(tokens[:count], skip_special_tokens=True)) if count < len(tokens) else text
        agreed = takewhile(lambda pair: pair[0] == pair[1], zip(prefix, text, strict=False))
        known = max(written, sum(1 for _ in agreed))
        pieces.append(text[written:known])
        written = known
    return pieces


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """How a token is shown by itself: its text, or its bytes where they are no whole characters."""
    text = str(tokenizer.decode([token]))
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if REPLACEMENT in text:
        values = [_BYTES.get(letter) for letter in piece]
        shown = piece if None in values else " ".join(f"{value:02X}" for value in values if value is not None)
        return f"⟨{shown.removeprefix('<0x').removesuffix('>')}⟩"
    if piece.startswith("▁") and not text.startswith(" "):
        return f" {text}"
    return text


_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""Byte-level tokenizers write bytes as these letters."""


def _ids(recording: Recording) -> set[int]:
    """Tokens that occur anywhere."""
    ids = set(recording.prompt_tokens)
    for run in recording.runs:
        ids.update(run.tokens)
        for step in run.steps:
            ids.update(step.tokens)
            ids.update(prediction.token for prediction in step.predictions if prediction.token is not None)
    return ids


# --- files --------------------------------------------------------------------------------------------------------


def fingerprint(model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Of `weights`, `config` and `tokenizer`, each 16 hexadecimal digits: what decides a model's answers."""
    weights = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        weights.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        weights.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    config = {name: value for name, value in model.config.to_dict().items() if name not in _WITHOUT_EFFECT}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    texts = {
        "config": json.dumps(config, sort_keys=True, default=str),
        "tokenizer": f"{vocabulary}\n{tokenizer.chat_template}",
    }
    digests = {"weights": weights} | {name: hashlib.sha256(text.encode()) for name, text in texts.items()}
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


_WITHOUT_EFFECT = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}


def check_model(trace: Trace, name: str, model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` unless the trace was made with this model."""
    there = fingerprint(model, tokenizer)
    other = [part for part, digest in trace.fingerprint.items() if there.get(part) != digest]
    if other:
        raise ValueError(
            f"The trace was made with another model than {name!r}: {' and '.join(other)} differ from those of "
            f"{trace.model!r}, with which it was made."
        )


def to_json(trace: Trace) -> str:
    """As it is saved, on one line."""
    data = {"format": FORMAT, "version": VERSION} | asdict(trace)
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write it, whole or not at all."""
    write_text(path, to_json(trace))


def load(path: str | os.PathLike[str]) -> Trace:
    """Read what [`save`] wrote.

    Raises:
        OSError: if it cannot be read.
        ValueError: for anything else than a whole and consistent trace of this version.
    """
    text = Path(path).read_bytes()
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f'it has no `"format": "{FORMAT}"`.')
        version = data.pop("version", None)
        if version != VERSION:
            raise ValueError(f"its version is {version!r}, this program reads {VERSION}.")
        trace: Trace = _build(Trace, data, "")
        for number, recording in enumerate(trace.recordings):
            for run in recording.runs:
                _check(recording, run, f"recordings[{number}], {run.name}")
        missing = {id_ for recording in trace.recordings for id_ in _ids(recording)} - set(map(int, trace.vocabulary))
        if missing or not trace.recordings:
            raise ValueError(f"vocabulary: no text for token {min(missing)}." if missing else "it has no recordings.")
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} is no trace: it is not JSON ({error}).") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no trace to be read: {error}") from error
    return trace


def _build(kind: Any, data: Any, where: str) -> Any:
    """A value of a type made of dataclasses, lists, dictionaries and JSON's own types. Raises `ValueError`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        _expect(isinstance(data, dict), where, "an object", data)
        hints = get_type_hints(kind)
        missing, unknown = hints.keys() - data.keys(), data.keys() - hints.keys()
        if missing or unknown:
            words = f"lacks {sorted(missing)}" if missing else f"has unknown {sorted(unknown)}"
            raise ValueError(f"{where or 'the file'} {words}.")
        return kind(**{name: _build(hint, data[name], f"{where}.{name}".lstrip(".")) for name, hint in hints.items()})
    if origin is list:
        _expect(isinstance(data, list), where, "a list", data)
        return [_build(arguments[0], value, f"{where}[{index}]") for index, value in enumerate(data)]
    if origin is dict:
        _expect(isinstance(data, dict), where, "an object", data)
        return {name: _build(arguments[1], value, f"{where}.{name}") for name, value in data.items()}
    if origin is Literal:
        _expect(data in arguments, where, f"one of {arguments}", data)
    elif origin is types.UnionType:  # of a type and None
        return None if data is None else _build(arguments[0], data, where)
    elif kind is float:
        _expect(
            type(data) in (int, float) and math.isfinite(data) and data >= 0, where, "a number of at least 0", data
        )
    elif kind is int:
        _expect(type(data) is int and data >= 0, where, "a whole number of at least 0", data)
    elif kind is str:
        _expect(isinstance(data, str), where, "text", data)
    return data


def _expect(holds: bool, where: str, what: str, data: Any) -> None:
    if not holds:
        shown = json.dumps(data)
        raise ValueError(f"{where} must be {what}, got {shown if len(shown) <= 40 else f'{shown[:40]}…'}.")


def _check(recording: Recording, run: Run, where: str) -> None:
    """Replays a run. Raises `ValueError` where its steps do not lead to its tokens."""
    for holds, message in (
        (replay(recording, run) == run.tokens, "the steps do not lead to the tokens"),
        ("".join(run.pieces) == run.text and len(run.pieces) == len(run.tokens), "the pieces are not the text"),
        (all(a <= b for a, b in pairwise([0.0, *run.ends])), "the clock runs backwards"),
        (run.stats == counts_of(run), f"the counts are not those of the steps, {counts_of(run)}"),
    ):
        if not holds:
            raise ValueError(f"{where}: {message}.")


def replay(recording: Recording, run: Run) -> list[int]:
    """The new tokens, rebuilt from what the steps filled and committed and from nothing else.

    Raises:
        ValueError: where a step contradicts an earlier one, or the prompt.
    """
    prompt, cached = recording.prompt_tokens, 0
    settled = dict(enumerate(prompt))
    filled: dict[int, int] = {}
    end = len(prompt)
    for number, step in enumerate(run.steps):
        rows = list(zip(step.positions, step.tokens, step.kinds, strict=False))
        if not len(step.positions) == len(step.tokens) == len(step.kinds) >= step.committed:
            raise ValueError(f"forward {number + 1} of {run.name}: rows of different lengths.")
        for position, token, kind in rows:
            if kind == FILLED and filled.get(position) != token:
                raise ValueError(f"forward {number + 1} of {run.name}: nothing filled position {position} so.")
        for prediction in step.predictions:
            if prediction.token is not None:
                filled[prediction.position] = prediction.token
                if prediction.by == "ar" or not run.is_verified:
                    settled[prediction.position] = prediction.token
        for position, token, _ in rows[: step.committed]:
            if position != cached or settled.get(position) != token:
                raise ValueError(f"forward {number + 1} of {run.name}: position {position} is cached out of turn.")
            cached += 1
        while end in settled and end < len(prompt) + step.final:
            end += 1
        if end != len(prompt) + step.final:
            raise ValueError(f"forward {number + 1} of {run.name}: position {end} is final, and nothing filled it.")
    return [settled[position] for position in range(len(prompt), end)]


def counts_of(run: Run) -> dict[str, int]:
    """What the steps add up to, to be compared with what `generate` counted."""
    drafts = [step.kinds.count(FILLED) if run.is_verified else 0 for step in run.steps]
    rejected = sum(len(step.rejected) for step in run.steps)
    rows = sum(len(step.kinds) - step.kinds.count(PROMPT) for step in run.steps)
    return _stats((len(run.tokens), len(run.steps), rows, sum(drafts), sum(drafts) - rejected))
