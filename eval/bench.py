"""The work of `wedlm bench`: what every way of decoding costs, on the same weights and prompts, in one process.

The decoders take turns on each batch (A B A B …); times are medians over the repeats. What would disturb the clock
runs apart from it: the time to the first token, the peak of memory, and where verified output parts from AR's. Ratios
within one run mean something on a busy machine; times alone do not.

`B` prompts decoded together.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..generation.settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings
from ..modeling_wedlm import WeDLMForCausalLM
from .bench_show import draw, show
from .bench_subject import SEED_OF_PROMPTS, Prompt, Subject
from .files import write_text
from .measure import (
    LONGEST_ANSWER,
    Decoder,
    Decoding,
    ForwardCounter,
    Options,
    Score,
    decode,
    endless,
    environment,
    now,
    pad_left,
    pooled,
    take_turns,
    typical,
)
from .memory import peak_bytes
from .vllm_baseline import VllmDecoder

AR, VERIFIED, VLLM = "ar", "wedlm+exact", "vllm ar"
DECODERS: dict[str, Options] = {
    AR: {"strategy": "ar"},
    "block": {"strategy": "block", "verification": "none", "adaptive_window": None},
    "wedlm": {"strategy": "wedlm", "verification": "none"},
    VERIFIED: {"strategy": "wedlm", "verification": "exact", "entropy_budget": None},
    "wedlm+typical": {"strategy": "wedlm", "verification": "typical", "entropy_budget": None},
}
LONG = (256, 4096)
LAST_STEPS = 64


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        batch_sizes: each at least 1.
        decoders: among [`DECODERS`]; AR comes first, named or not.
        settings: for the decoders other than AR, in place of the checkpoint's.
        max_new_tokens: of each answer.
        temperature: of sampling; `None` is greedy.
        seed: of sampling, and of random weights and prompts.
        repeats: times are medians of so many.
        is_long: whether [`scaling`] is measured too.
        vllm_python: interpreter that has vLLM, if that is measured too.

    Raises:
        ValueError: for anything else.
    """

    batch_sizes: Sequence[int] = (1, 4, 16)
    decoders: Sequence[str] = tuple(DECODERS)
    settings: Options = field(default_factory=dict)
    max_new_tokens: int = LONGEST_ANSWER
    temperature: float | None = None
    seed: int = 0
    repeats: int = 5
    is_long: bool = False
    vllm_python: str | None = None

    def __post_init__(self) -> None:
        for kind, given, known in (
            ("decoder", self.decoders, list(DECODERS)),
            ("setting", self.settings, list(SETTING_NAMES)),
        ):
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"Unknown {kind} {unknown[0]!r}: choose among {', '.join(known)}.")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"Batch sizes must be at least 1, got {', '.join(map(str, self.batch_sizes)) or 'none'}.")
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"`temperature` must be above 0, got {self.temperature}; without it, decoding is greedy.")
        if find_spec("matplotlib") is None:
            raise ValueError("The picture needs matplotlib: pip install 'wedlm-hf[eval]'.")
        for options in self.options(self.max_new_tokens).values():
            WeDLMGenerationSettings(**{name: options[name] for name in options if name in SETTING_NAMES})

    def options(self, max_new_tokens: int) -> dict[str, Options]:
        """Keywords of `generate` for each decoder, AR first."""
        shared: Options = {"max_new_tokens": max_new_tokens, "do_sample": self.temperature is not None}
        if self.temperature is not None:
            shared = {**shared, "temperature": self.temperature}
        return {
            name: {**(self.settings if name != AR else {}), **DECODERS[name], **shared}
            for name in [AR, *(name for name in self.decoders if name != AR)]
        }


def run(subject: Subject, request: Request, output: Path, console: Console) -> dict[str, Any]:
    """Measure, print tables, and write bench.json and bench.png to the folder `output`.

    Raises:
        ValueError: whatever `generate` refuses, and if there is no vLLM where it is asked for.
    """
    model, tokenizer, prompts = subject.model, subject.tokenizer, subject.prompts
    longest = max(len(prompt.tokens) for prompt in prompts)
    limit = max(1, min(request.max_new_tokens, model.config.max_position_embeddings - longest))
    options = request.options(limit)
    settings = WeDLMGenerationSettings.from_generation_config(model.generation_config, model.config)
    with ExitStack() as stack:
        vllm = None
        if request.vllm_python is not None:
            console.print("Starting vLLM, which may take minutes.", style="dim")
            vllm = stack.enter_context(
                VllmDecoder(
                    model,
                    tokenizer,
                    python=request.vllm_python,
                    max_new_tokens=limit,
                    longest=longest + limit,
                    temperature=request.temperature,
                    seed=request.seed,
                )
            )
        results = [
            entry
            for batch_size in request.batch_sizes
            for entry in bench(
                model,
                tokenizer,
                prompts,
                options,
                batch_size=batch_size,
                repeats=request.repeats,
                seed=request.seed,
                vllm=vllm,
                title=f"batch size {batch_size}",
            )
        ]
        vllm_version = vllm.version if vllm else None
    seed = request.seed
    report = {
        "command": shlex.join(["wedlm", *sys.argv[1:]]),
        "model": subject.name,
        "environment": environment(model) | {"parameters": model.num_parameters(), "vllm": vllm_version},
        "settings": asdict(settings),
        "decoders": options,
        "prompts": {
            "count": len(prompts),
            "longest": longest,
            "tasks": sorted({prompt.task for prompt in prompts}),
            "seed": SEED_OF_PROMPTS if prompts[0].sample else None,
        },
        "temperature": request.temperature,
        "seed": seed,
        "repeats": request.repeats,
        "results": results,
        "scaling": scaling(model, prompts[0], options, repeats=request.repeats, seed=seed) if request.is_long else [],
    }
    write_text(output / "bench.json", json.dumps(report, indent=1) + "\n")
    draw(report, output / "bench.png")
    show(report, console)
    console.print(f"{output / 'bench.json'}, {output / 'bench.png'}", style="dim", highlight=False, soft_wrap=True)
    return report


def batches_of(prompts: Sequence[Prompt], batch_size: int) -> list[list[Prompt]]:
    """Batches in order, all of one size: the last one is filled up from the start."""
    count = math.ceil(len(prompts) / batch_size)
    endless = cycle(prompts)
    return [list(islice(endless, batch_size)) for _ in range(count)]


def bench(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[Prompt],
    options: Mapping[str, Options],
    *,
    batch_size: int,
    repeats: int,
    seed: int,
    vllm: VllmDecoder | None = None,
    title: str = "",
) -> list[dict[str, Any]]:
    """Measure every decoder at one batch size.

    Args:
        model: in evaluation mode.
        tokenizer: the model's; without one, texts are empty and a single batch is decoded.
        prompts: at least one.
        options: keywords of `generate` by decoder, AR first.
        batch_size: B.
        repeats: times that each batch is decoded by each decoder.
        seed: of sampling, the same for each batch, decoder and repeat.
        vllm: takes turns with the others.
        title: shown with a progress bar on standard error, if any.

    Returns:
        one entry for each decoder, as JSON takes it: the pooled [`Score`], `speed_to_ar`, `prefix_agreement` (share of
        AR's tokens before an answer's first difference), `repeats` (seconds of each), `time_to_first_token`
        (seconds, of each repeat), `peak_bytes`; `tasks` at batch size 1; `partings` of verified greedy answers.
    """
    batches = batches_of(prompts if tokenizer else prompts[:batch_size], batch_size)
    tokens = [[prompt.tokens for prompt in batch] for batch in batches]
    decoders: dict[str, Decoder] = {
        name: partial(decode, model, tokenizer, options=keywords, seed=seed) for name, keywords in options.items()
    }
    if vllm is not None:
        decoders[VLLM] = vllm
    runs = list(take_turns(decoders, tokens, repeats=repeats, title=title))
    is_greedy = not options[AR].get("do_sample", False)
    reference = [typical([run[AR] for run in batch_runs]) for batch_runs in runs]
    ar_scores = _scores(batches, reference, reference)
    entries = []
    for name in decoders:
        decodings = [typical([run[name] for run in batch_runs]) for batch_runs in runs]
        scores = _scores(batches, decodings, reference)
        total = pooled(scores)
        entry: dict[str, Any] = {
            "batch_size": batch_size,
            "decoder": name,
            **total.to_dict(),
            "speed_to_ar": total.tokens_per_second / pooled(ar_scores).tokens_per_second,
            "prefix_agreement": _prefix_agreement(decodings, reference),
            "repeats": [
                {
                    part: sum(getattr(decoding, part) for batch_runs in runs for decoding in batch_runs[repeat][name])
                    for part in ("seconds", "forward_seconds")
                }
                for repeat in range(repeats)
            ],
        }
        if batch_size == 1:
            entry["tasks"] = {
                task: {**score.to_dict(), "speed_to_ar": score.tokens_per_second / ar_scores[task].tokens_per_second}
                for task, score in scores.items()
            }
        if name == VERIFIED and is_greedy:
            entry["partings"] = [
                parting
                for batch, wanted, got in zip(tokens, reference, decodings, strict=True)
                for parting in partings(model, tokenizer, batch, options[AR], wanted, got)
            ]
        entries.append(entry)
    for _ in range(repeats):
        for entry in entries:
            if entry["decoder"] == VLLM:
                assert vllm is not None
                seconds = vllm(tokens[0], max_new_tokens=1)[0].seconds * batch_size
            else:
                seconds = seconds_to_first_token(model, tokenizer, tokens[0], options[entry["decoder"]], seed)
            entry.setdefault("time_to_first_token", []).append(seconds)
    for entry in entries:
        if entry["decoder"] in options:
            work = partial(decoders[entry["decoder"]], tokens[0])
            entry["peak_bytes"] = peak_bytes(work, model.device)
    return entries


def _scores(
    batches: Sequence[Sequence[Prompt]], decodings: Sequence[list[Decoding]], reference: Sequence[list[Decoding]]
) -> dict[str, Score]:
    """Sums by task."""
    scores: dict[str, Score] = {}
    for batch, answers, wanted in zip(batches, decodings, reference, strict=True):
        for prompt, decoding, other in zip(batch, answers, wanted, strict=True):
            agrees = decoding.tokens == other.tokens
            score = Score.of(decoding, correct=prompt.judges(decoding.text), agrees=agrees)
            scores[prompt.task] = scores.get(prompt.task, Score()) + score
    return scores


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences share from their start."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _prefix_agreement(decodings: Sequence[list[Decoding]], reference: Sequence[list[Decoding]]) -> float:
    pairs = [
        (got.tokens, wanted.tokens)
        for answers, others in zip(decodings, reference, strict=True)
        for got, wanted in zip(answers, others, strict=True)
    ]
    return sum(common_prefix(*pair) for pair in pairs) / sum(len(wanted) for _, wanted in pairs)


def partings(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[list[int]],
    options: Options,
    reference: Sequence[Decoding],
    decodings: Sequence[Decoding],
) -> list[dict[str, float]]:
    """Where verified greedy answers leave AR's, and how close AR's decision was there.

    In exact arithmetic there are none. Kernels of another width round differently, so near-ties can fall either way.

    Args:
        model, tokenizer, prompts, options: of the AR decoding, which is run once more where there is a parting.
        reference: AR's answers.
        decodings: the others'.

    Returns:
        for each answer that differs: `token` (the first new token that does, from 0), `gap` (between AR's two best
        logits there) and `spacing` (the distance of neighbouring numbers of the model's dtype at the best logit).
    """
    places = {
        row: common_prefix(wanted.tokens, got.tokens)
        for row, (wanted, got) in enumerate(zip(reference, decodings, strict=True))
        if wanted.tokens != got.tokens
    }
    if not places:
        return []
    untyped: Any = model
    output = untyped.generate(
        **pad_left(prompts, (tokenizer.pad_token_id if tokenizer else None) or 0, model.device),
        **options,
        output_logits=True,
        return_dict_in_generate=True,
    )
    found = []
    for row, token in places.items():
        if token >= len(output.logits):  # one answer is the beginning of the other, as for vLLM's rule of the end
            continue
        best, second = output.logits[token][row].float().topk(2).values.tolist()
        spacing = torch.finfo(model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(best), 1e-30)))
        found.append({"token": token, "gap": best - second, "spacing": spacing})
    return found


class _FirstTokenSeen(Exception):
    """There is a new token, and no more is wanted."""


class _UntilFirstToken(BaseStreamer):
    """Ends generation at the first new token."""

    def __init__(self) -> None:
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen and value.numel():
            raise _FirstTokenSeen
        self.prompt_seen = True

    def end(self) -> None:
        pass


def seconds_to_first_token(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[list[int]],
    options: Options,
    seed: int,
) -> float:
    """From the call of `generate` until a streamer has the first token of every row."""
    start = now(model)
    with suppress(_FirstTokenSeen):
        decode(model, tokenizer, prompts, options, _UntilFirstToken(), seed=seed)
    return now(model) - start


def scaling(
    model: WeDLMForCausalLM,
    prompt: Prompt,
    options: Mapping[str, Options],
    *,
    lengths: Sequence[int] = LONG,
    repeats: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Time and memory of a step at the end of a short and of a long answer; what the answers say does not matter.

    Args:
        model: in evaluation mode; its context may be shorter.
        prompt: to go on from.
        options: keywords of `generate` by decoder; their `max_new_tokens` is not used.
        lengths: new tokens.
        repeats: the decoders and lengths take turns so often.
        seed: of sampling.

    Returns:
        for each decoder and length: `seconds_per_step` and `forward_seconds_per_step` (medians over the last steps,
        then over the repeats), `slots_per_step`, `peak_bytes` and `cache_bytes` (keys and values of all tokens).
    """
    config: Any = model.config
    kv_numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    cases = [(name, length) for length in lengths for name in options]
    steps: dict[tuple[str, int], list[tuple[float, float, float]]] = {case: [] for case in cases}
    entries = []
    with endless(model):
        for _ in range(repeats):
            for name, length in cases:
                with ForwardCounter(model) as counter:
                    decode(model, None, [prompt.tokens], {**options[name], "max_new_tokens": length}, seed=seed)
                gaps = [end - start for start, end in zip(counter.starts, counter.starts[1:], strict=False)]
                inside, widths = counter.spans[:-1], [width for _, width in counter.shapes[:-1]]
                last = [median(values[-LAST_STEPS:]) for values in (gaps, inside, widths)]
                steps[name, length].append((last[0], last[1], last[2]))
        for name, length in cases:
            keywords = {**options[name], "max_new_tokens": length}
            work = partial(decode, model, None, [prompt.tokens], keywords, seed=seed)
            total, inside, slots = (median(values) for values in zip(*steps[name, length], strict=True))
            entries.append(
                {
                    "decoder": name,
                    "new_tokens": length,
                    "seconds_per_step": total,
                    "forward_seconds_per_step": inside,
                    "slots_per_step": slots,
                    "peak_bytes": peak_bytes(work, model.device),
                    "cache_bytes": kv_numbers * model.dtype.itemsize * (len(prompt.tokens) + length),
                }
            )
    return entries
