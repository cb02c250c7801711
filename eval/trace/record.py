"""Decodes prompts and keeps every step, next to AR decoding of the same prompts at the same clock."""

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import BaseStreamer

from ...console.progress import track
from ...console.streaming import REPLACEMENT, TextDecoder
from ...generation.sampling import token_entropy
from ...generation.settings import SETTING_NAMES, WeDLMGenerationSettings
from ...generation.trace import TraceStep, likeliest
from ...modeling_wedlm import WeDLMForCausalLM
from ..decoders import AR, Options
from ..measure import MOST_TURNS, Decoding, ForwardCounter, Speed, decode_call, environment, fingerprint, in_turn
from ..request import AnswerRequest
from .page import COUNTS, FILLED, MASK, PENDING, PROMPT, Prediction, RecordedForward, Recording, Run, Trace

Call = tuple[list[Decoding], Any, ForwardCounter]  # what [`decode_call`] returns
Noted = tuple[float, list[tuple[int, float]]]  # of a distribution: entropy, nats; likeliest tokens, probabilities
LEAST_SHARE = 0.001  # tokens of a lower probability are not kept among the likeliest
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # byte-level tokenizers write these letters


def record(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    request: AnswerRequest,
    *,
    model_name: str,
    repeats: int = 5,
    title: str = "",
) -> Trace:
    """Decode prompts and keep every step: see [`record_prompt`]. Raises `ValueError` for a strategy that has no steps
    to show, and whatever `generate` refuses."""
    if request.options["strategy"] == AR:
        raise ValueError("A trace shows parallel decoding: `strategy` must be 'wedlm' or 'block', got 'ar'.")
    recordings = []
    for prompt, tokens in track(request.encode(model, tokenizer), title):
        decoders = request.decoders(model, len(tokens))
        made = record_prompt(model, tokenizer, prompt, tokens, decoders, repeats=repeats, seed=request.seed)
        recordings.append(made)
    return trace_of(model, tokenizer, recordings, model_name=model_name, seed=request.seed)


def record_prompt(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    tokens: list[int],
    decoders: Mapping[str, Options],
    *,
    repeats: int,
    seed: int,
    processors: Callable[[], Any] | None = None,
    streamer: Callable[[str], BaseStreamer] | None = None,
    run: Callable[[Callable[[], Call]], Call] = lambda call: call(),
    between: Callable[[], None] | None = None,
) -> Recording:
    """Decode a prompt (text and tokens) with each decoder (keywords of `generate` by strategy), and keep every step.

    It is decoded once to record its steps and then `repeats` times, decoders in turn, to measure their times:
    recording takes time, and so does a first call. Without repeats, the times are those of the recorded call. While
    the speed is impossible (see [`Speed`]), up to five turns are taken.

    `processors` makes a logits processor for each call; `streamer` is called with the strategy before each recorded
    call, and what it returns gets the tokens as they come; `run` makes the calls, on another thread, say; `between`
    may use the model where tokens come, see [`decode_call`].
    """
    calls: dict[str, list[Call]] = {name: [] for name in decoders}
    noted: list[Noted] = []  # of AR decoding: all logits would take gigabytes

    def note(logits: torch.Tensor) -> None:
        last = logits[:, -1].float()
        noted.append((token_entropy(last).item(), _shares(*likeliest(last))[0]))

    for turn in itertools.count():
        if turn > repeats:  # recorded calls count only where there are no others
            own, *ar = (in_turn([call[0][0] for call in some[1:] or some]) for some in calls.values())
            if turn > MOST_TURNS or not ar or Speed.of(ar, [own]).is_possible:
                break
        for name, options in decoders.items():
            keywords = dict(options) | ({"output_trace": True} if not turn and name != AR else {})
            keywords |= {"logits_processor": [processors()]} if processors else {}
            stream = None if turn or streamer is None else streamer(name)
            how: dict[str, Any] = {"seed": seed, "note": note if not turn and name == AR else None, "between": between}
            calls[name].append(run(partial(decode_call, model, tokenizer, [tokens], keywords, stream, **how)))
    runs = [_run(model, tokenizer, options, tokens, calls[name], noted) for name, options in decoders.items()]
    return Recording(prompt, tokens, runs)


def trace_of(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    recordings: list[Recording],
    *,
    model_name: str,
    seed: int,
    digests: dict[str, str] | None = None,
) -> Trace:
    """Recordings with what they need to be read; `digests` are the model's [`fingerprint`], where it is known."""
    ids = set[int]().union(*(recording.token_ids for recording in recordings))
    return Trace(
        model=model_name,
        fingerprint=fingerprint(model, tokenizer) if digests is None else digests,
        environment=dict(environment(model)),
        seed=seed,
        vocabulary={str(token): token_text(tokenizer, token) for token in sorted(ids)},
        special=sorted(ids & set(tokenizer.all_special_ids)),
        recordings=recordings,
    )


def _run(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    options: Options,
    prompt: list[int],
    calls: Sequence[Call],
    noted: Sequence[Noted],
) -> Run:
    """What the first call recorded, with the medians of the clocks of the others' same forwards."""
    ((decoding,), output, counter), *timed = calls
    clocks = [call[2].moments for call in timed if len(call[2].moments) == len(counter.moments)]
    *starts, seconds = [round(median(moments), 7) for moments in zip(*(clocks or [counter.moments]), strict=True)]
    stored: Any = options.get("generation_config")
    shown = {"strategy": options["strategy"], **(stored.to_diff_dict() if stored else {})}
    shown |= {name: value for name, value in options.items() if name not in (*SETTING_NAMES, "generation_config")}
    if options["strategy"] == AR:
        steps = _ar_steps(prompt, decoding.tokens, starts, noted)
        counts = (len(decoding.tokens), decoding.forwards, decoding.token_instances, 0, 0)
    else:
        settings = settings_in_effect(model, options)
        shown |= {name: value for name, value in vars(settings).items() if name != "output_trace"}
        steps = _parallel_steps(prompt, decoding.tokens, starts, output.trace, settings)
        counts = tuple(getattr(output.stats, name).item() for name in COUNTS)
    return Run(
        name=options["strategy"],
        # JSON has no infinity, which τ may be, and no objects.
        settings=json.loads(json.dumps(shown, default=str), parse_constant=lambda _: sys.float_info.max),
        tokens=decoding.tokens,
        pieces=pieces_of(tokenizer, decoding.tokens),
        text=decoding.text,
        steps=steps,
        seconds=seconds,
        turns=[round(call[0][0].seconds, 7) for call in timed],
        stats=dict(zip(COUNTS, counts, strict=True)),
    )


def settings_in_effect(model: WeDLMForCausalLM, options: Options) -> WeDLMGenerationSettings:
    """Those that `generate` decodes with, with these keywords. Raises `ValueError` for what it refuses."""
    rest = {name: value for name, value in options.items() if name != "generation_config"}
    config = model._prepare_generation_config(options.get("generation_config"), **rest)[0]
    needs_mask_token = not model.has_mask_adapter
    return WeDLMGenerationSettings.from_generation_config(config, model.config, needs_mask_token=needs_mask_token)


def _ar_steps(
    prompt: list[int], tokens: list[int], starts: list[float], noted: Sequence[Noted]
) -> list[RecordedForward]:
    """The first forward reads the prompt, each other one the last token."""
    steps, sequence, first = [], prompt + tokens, 0
    for final, (start, (entropy, shares)) in enumerate(zip(starts, noted, strict=True), 1):
        end = len(prompt) + final - 1
        positions, kinds = list(range(first, end)), (PENDING if first else PROMPT) * (end - first)
        predictions = [Prediction(end, "ar", round(entropy, 5), sequence[end], shares)]
        read = sequence[first:end]
        steps.append(RecordedForward(start, read, positions, kinds, len(read), predictions, [], final))
        first = end
    return steps


def _shares(tokens: torch.Tensor, probabilities: torch.Tensor) -> list[list[tuple[int, float]]]:
    """For each row, its likeliest tokens and their probabilities, without the negligible ones; both `(n, k)`."""
    return [
        [(token, round(share, 4)) for token, share in zip(*row, strict=True) if share >= LEAST_SHARE]
        for row in zip(tokens.tolist(), probabilities.tolist(), strict=True)
    ]


def _parallel_steps(
    prompt: list[int],
    tokens: list[int],
    starts: list[float],
    trace: Sequence[TraceStep],
    settings: WeDLMGenerationSettings,
) -> list[RecordedForward]:
    """Steps of the only row of a call."""
    sequence, is_verified = dict(enumerate(prompt + tokens)), settings.verification != "none"
    steps: list[RecordedForward] = []
    settled: set[int] = set()  # positions
    end = len(prompt)  # where final tokens end

    def kind_of(position: int, is_mask: bool) -> str:
        if position < end:
            return PROMPT if position < len(prompt) else PENDING
        return MASK if is_mask else FILLED

    for step, start in zip(trace, starts, strict=True):
        count = step.counts[0]
        read, positions = step.input_ids[0, -count:].tolist(), step.position_ids[0, -count:].tolist()
        # Not by their token: where an adapter embeds the masks, there may be none.
        are_masks = [False] * (count - step.is_mask.shape[1]) + step.is_mask[0, -count:].tolist()
        kinds = "".join(map(kind_of, positions, are_masks))
        decided = {len(prompt) + offset: sequence.get(len(prompt) + offset) for offset in step.decided[0]}
        rows = dict(zip(positions, kinds, strict=True))
        predictions = _predictions(step, rows, decided, end - 1 if is_verified else None)
        settled |= decided.keys()
        while end in settled and end in sequence:
            end += 1
        drafts = [row for row, kind in enumerate(kinds) if is_verified and kind == FILLED]
        rejected = [row for row in drafts if row not in step.accepted[0]]
        committed, final = step.committed[0], end - len(prompt)
        steps.append(RecordedForward(start, read, positions, kinds, committed, predictions, rejected, final))
    return steps


def _predictions(
    step: TraceStep, rows: Mapping[int, str], decided: Mapping[int, int | None], first_ar: int | None
) -> list[Prediction]:
    """What the rows with logits said, by position: `rows`, the kinds of the physical rows, and `decided`, the tokens
    that the step settled, are too. From `first_ar` on, the AR head verifies; `None` without verification."""
    count = min(step.logit_positions.shape[1], step.counts[0])
    columns = (step.logit_positions, step.is_mask, step.entropy, step.filled, step.tokens)
    shares = _shares(step.likeliest[0, -count:], step.probabilities[0, -count:])
    found: dict[tuple[int, str], Prediction] = {}
    numbers = zip(*(column[0, -count:].tolist() for column in columns), shares, strict=True)
    for position, is_mask, entropy, filled, token, likely in numbers:
        # Without a mask among the rows, the AR head of the last token fills the slot after it.
        by: Literal["mask", "ar"] = "mask" if is_mask and rows.get(position) == MASK else "ar"
        if is_mask:
            # Under verification the AR head's token takes the slot of the leftmost mask, which drafts nothing then.
            chosen = token if filled and (first_ar is None or position not in decided) else None
        elif first_ar is not None and position >= first_ar:
            position += 1
            chosen = decided.get(position)
        else:
            continue
        found[position, by] = Prediction(position, by, round(entropy, 5), chosen, likely)
    return [found[key] for key in sorted(found)]


def decodings(trace: Trace) -> dict[str, list[Decoding]]:
    """What each decoder answered and what it cost, by its name, for each prompt."""
    found: dict[str, list[Decoding]] = {}
    for run in (run for recording in trace.recordings for run in recording.runs):
        counts = (run.stats["forwards"], run.stats["token_instances"])
        found.setdefault(run.name, []).append(Decoding(run.tokens, run.text, *counts, run.seconds))
    return found


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The part of the text, without special tokens, that each token brings."""
    decoder = TextDecoder(lambda some: str(tokenizer.decode(some, skip_special_tokens=True)))
    pieces = [decoder.feed(token) for token in tokens]
    # The beginning of a character that did not come goes with the last one.
    return [*pieces[:-1], *(piece + decoder.rest() for piece in pieces[-1:])]


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """How a token is shown by itself: its text, or its bytes where they are no whole characters."""
    text = str(tokenizer.decode([token]))
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if REPLACEMENT in text:
        values = [_BYTES.get(letter) for letter in piece]
        shown = piece if None in values else " ".join(f"{value:02X}" for value in values)
        return f"⟨{shown.removeprefix('<0x').removesuffix('>')}⟩"
    return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text
