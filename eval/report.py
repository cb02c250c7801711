"""The work of `wedlm report`: how good and how fast a checkpoint decodes, against AR decoding of the same weights.

A *sweep* over strategy, verification, W, τ and λ on tuning prompts shows what each setting costs and picks one; the
*headline* numbers are those of the stored or picked settings on other prompts. See [`Bench`] for how it is measured,
report_stats.py for what is made of it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ..generation import WeDLMGenerationSettings
from ..modeling_wedlm import WeDLMForCausalLM
from .files import write_text, written_whole
from .fingerprint import fingerprint
from .markdown import BLOCKS, blocks, fill
from .measure import LONGEST_ANSWER, Options, encode, encode_text, environment
from .report_data import Data
from .report_figures import check_matplotlib, figures
from .report_measure import Bench, Part, Store
from .report_page import as_csv, chosen, page, summary
from .report_stats import EntropyEffect, Sample, areas, sweep_rows, trends
from .sweep import AR, BLOCK, DECODERS, FIELDS, STREAMING, VERIFIED, Grid, choose, configured, write_settings
from .tasks import Sample as Prompt

# Verified decoding loses nothing to wide windows and bold drafts; the stored settings are for unverified decoding.
WIDE: Options = {"window_size": 16, "entropy_threshold": 0.8}
RESULTS = "measured.json"


@dataclass(frozen=True)
class Request:
    """What to measure and where to write it. Checked when it is made, before any weights are read.

    Attributes:
        output: folder for report.html, report.json, report.csv and the partial results.
        grid: of the sweep.
        timed: prompts of each task that are timed in the headline part.
        sweep_timed: the same in the sweep.
        repeats: times are medians of so many.
        batch_size: prompts decoded together where time does not count.
        max_new_tokens: of each answer.
        max_loss: points of quality that a picked setting may lose to AR on a task.
        settings: keywords of `generate` for every decoder, AR too.
        write_to: checkpoint folder that the picked settings are stored in; the headline is then theirs.
        fill_files: Markdown files whose measured blocks are replaced.
        figure_folder: folder for the figures as PNG.
        restart: drop partial results.
        raw: prompts as they are, without a chat template.

    Raises:
        OSError: for a folder that cannot be written to, and for files to fill that cannot be read.
        ValueError: for anything else.
    """

    output: Path
    grid: Grid = field(default_factory=Grid)
    timed: int = 10
    sweep_timed: int = 2
    repeats: int = 5
    batch_size: int = 50
    max_new_tokens: int = LONGEST_ANSWER
    max_loss: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    write_to: Path | None = None
    fill_files: Sequence[Path] = ()
    figure_folder: Path | None = None
    restart: bool = False
    raw: bool = False

    def __post_init__(self) -> None:
        check_matplotlib()
        if managed := [name for name in self.settings if name in _MANAGED | _COUNTED_ON]:
            raise ValueError(f"`--set {managed[0]}` is decided by the report: leave it out.")
        for path in self.fill_files:
            try:
                fill(path.read_text(encoding="utf-8"), dict.fromkeys(BLOCKS, ""))
            except ValueError as error:
                raise ValueError(f"`--fill {path}`: {error}.") from None
        for folder in (self.output, self.figure_folder):
            if folder is not None:
                try:
                    with written_whole(folder / ".probe") as probe:
                        probe.touch()
                    (folder / ".probe").unlink()
                except OSError as error:
                    raise OSError(f"The folder {str(folder)!r} cannot be written to: {error}.") from error


_MANAGED = {"strategy", "verification", "entropy_budget", "adaptive_window", "output_trace", *FIELDS}
_MANAGED |= {"max_new_tokens", "do_sample"}
_COUNTED_ON = {"num_beams", "use_cache", "return_dict_in_generate", "eos_token_id"}  # by what counts and cuts answers


def run(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    data: Data,
    request: Request,
    *,
    seed: int | None,
    console: Console,
) -> dict[str, Any]:
    """Measure, or go on measuring, and write all files.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        name: of the model, for people.
        data: prompts.
        request: what is wanted.
        seed: of built-in prompts; `None` for those of a file.
        console: for progress and for what was found.

    Returns:
        the content of report.json.

    Raises:
        ValueError: for partial results of another request, for prompts that leave no room for an answer, and whatever
            `generate` refuses.
    """
    parts = {"sweep": data.tuning, "headline": data.headline}
    prompts = {part: [_tokens(model, tokenizer, s, request.raw) for s in samples] for part, samples in parts.items()}
    room = model.config.max_position_embeddings - max(len(tokens) for part in prompts.values() for tokens in part)
    limit = max(1, min(request.max_new_tokens, room))
    common: Options = {**request.settings, "max_new_tokens": limit, "do_sample": False}
    stored = WeDLMGenerationSettings.from_generation_config(model.generation_config, model.config)
    machine = {"wedlm_hf": import_module("..", __package__).__version__, **environment(model)}
    decides = {
        "model": fingerprint(model, tokenizer),
        "prompts": data.digest,
        "chat template": None if request.raw else tokenizer.chat_template,
        "generation config": _other_settings(model),
        "grid": asdict(request.grid),
        "settings": dict(request.settings),
        "limits": {"max_new_tokens": limit, "raw": request.raw},
        "measuring": {name: getattr(request, name) for name in ("timed", "sweep_timed", "repeats", "batch_size")},
        "machine": machine,
    }
    bench = Bench(model, tokenizer, request.batch_size, request.repeats, data.has_answers)
    with Store(request.output / RESULTS, decides, restart=request.restart) as store:

        def measured(part: str, timed: int, decoders: Mapping[str, Options]) -> Sample:
            options = {name: {**keywords, **common} for name, keywords in decoders.items()}
            places = _first_of_each_task(parts[part], timed)
            title = f"{part}, {list(parts).index(part) + 1} of {len(parts)}"
            return Sample(bench.run(Part(part, title, parts[part], prompts[part], options, places), store, console))

        candidates = request.grid.candidates()
        sweep = measured("sweep", request.sweep_timed, candidates)
        rows = sweep_rows(sweep, candidates)
        picked = choose(rows, rows[0], request.max_loss)
        is_picked = request.write_to is not None and picked is not None
        settings = {key: picked[key] if picked and is_picked else getattr(stored, key) for key in FIELDS}
        budget = None if is_picked else stored.entropy_budget
        headline = _headline(request.grid.decoders, settings, budget)
        by_name = dict(headline.values())
        sample = measured("headline", request.timed, by_name)
    # The verified one's window is wide: a narrow one caps what low entropy could give.
    shown = [name for name in (VERIFIED, STREAMING) if name in headline] or [next(reversed(headline))]
    texts = [EntropyEffect(sample, name, headline[name][0]) for name in shown]
    report = {
        "command": shlex.join(["wedlm", *sys.argv[1:]]),
        "model": name,
        "weights": decides["model"],
        "environment": machine,
        "data": {
            "source": data.source,
            "seed": seed,
            "counts": data.counts(),
            "has_answers": data.has_answers,
            "notes": list(data.notes),
        },
        "settings": {**settings, "entropy_budget": budget},
        "verified_settings": WIDE,
        "common_settings": dict(request.settings),
        "timing": {
            "headline": request.timed,
            "sweep": request.sweep_timed,
            "repeats": request.repeats,
            "batch_size": request.batch_size,
            "max_new_tokens": limit,
        },
        "decoders": {kind: sample.row(key) for kind, (key, _) in headline.items()},
        "trends": [check.to_dict() for check in trends(sweep, rows, texts)],
        "areas": areas(sweep, rows),
        "entropy": texts[0].to_dict(),
        "sweep": {
            "grid": asdict(request.grid),
            "max_loss": request.max_loss,
            "chosen": picked and picked["name"],
            "rows": rows,
        },
    }
    write_report(report, request)
    for line in [*summary(report), chosen(report)]:
        console.print(line, highlight=False, soft_wrap=True)
    if request.write_to is not None and picked is not None:
        write_settings(request.write_to, {**{key: picked[key] for key in FIELDS}, "entropy_budget": None})
        console.print(f"{request.write_to / 'generation_config.json'}: {picked['name']}", highlight=False)
    console.print(str(request.output / "report.html"), style="dim", highlight=False, soft_wrap=True)
    return report


def write_report(report: Mapping[str, Any], request: Request) -> None:
    """Write report.json, report.csv, report.html, the figures and the Markdown blocks that were asked for."""
    # Through JSON, so that page and blocks are made from what the file holds.
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    report = json.loads(text)
    drawn = figures(report)
    write_text(request.output / "report.json", text)
    write_text(request.output / "report.csv", as_csv(report))
    write_text(request.output / "report.html", page(report, drawn))
    if request.figure_folder is not None:
        for figure in drawn:
            figure.write_png(request.figure_folder)
    made = blocks(report)
    for path in request.fill_files:
        write_text(path, fill(path.read_text(encoding="utf-8"), made))


@torch.no_grad()
def _headline(
    decoders: Sequence[str], settings: Mapping[str, Any], budget: float | None
) -> dict[str, tuple[str, Options]]:
    """Name of the measurement and keywords of each decoder, AR first."""
    made: dict[str, tuple[str, Options]] = {AR: (AR, DECODERS[AR])}
    for decoder in DECODERS:
        if decoder in (BLOCK, STREAMING) and decoder in decoders:
            window, threshold, penalty = (settings[key] for key in FIELDS)
            made[decoder] = configured(decoder, window, threshold, penalty, budget)
        elif decoder != AR and decoder in decoders:
            made[decoder] = configured(decoder, WIDE["window_size"], WIDE["entropy_threshold"], None)
    return made


def _tokens(model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, sample: Prompt, raw: bool) -> list[int]:
    if raw:
        if len(sample.messages) > 1:
            raise ValueError(f"Without a chat template, a row holds one turn, got {len(sample.messages)}.")
        return encode_text(model, tokenizer, sample.prompt, raw)
    tokens = encode(tokenizer, sample.messages)
    context = model.config.max_position_embeddings
    if len(tokens) >= context:
        raise ValueError(
            f"A prompt needs 1 to {context - 1} tokens for this model, got {len(tokens)}: {sample.prompt[:40]!r}…"
        )
    return tokens


def _first_of_each_task(samples: Sequence[Prompt], count: int) -> list[int]:
    """Indices of the first `count` samples of each task."""
    seen: dict[str, int] = {}
    places = []
    for index, sample in enumerate(samples):
        seen[sample.task] = seen.get(sample.task, 0) + 1
        if seen[sample.task] <= count:
            places.append(index)
    return places


def _other_settings(model: WeDLMForCausalLM) -> dict[str, Any]:
    """What the generation config holds beside the settings that are part of every measurement's name."""
    stored = model.generation_config.to_diff_dict()
    skipped = _MANAGED | {"transformers_version", "_from_model_config"}
    return {name: value for name, value in sorted(stored.items()) if name not in skipped}
