"""The work of `wedlm report`.

Settings are compared on *tuning* prompts (the *sweep*); the *headline* numbers are those of the stored or picked
settings on other prompts. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ...generation.settings_wedlm import WeDLMGenerationSettings
from ...modeling_wedlm import WeDLMForCausalLM
from ..decoders import AR, BLOCK, DECODERS, EXACT, TYPICAL, WEDLM, Options
from ..fingerprint import fingerprint
from ..measure import environment
from ..prompts import Prompt, answer_limit, encode_prompt, split_prompts
from ..sweep import FIELDS, configured, pick, settings_table, write_settings
from .numbers import Numbers, sweep_numbers
from .page import chosen_sentence, summary_sentences, write_report
from .pieces import Measurement, Part
from .request import MANAGED, ReportRequest
from .store import Store


def run(
    request: ReportRequest,
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    source: str,
    console: Console,
) -> dict[str, Any]:
    """Measure, or go on measuring, and write all files.

    Args:
        request: what is wanted.
        model: in evaluation mode.
        tokenizer: the model's.
        prompts: with answers all, or none.
        source: where they are from, for people.
        console: for progress and for what was found.

    Returns:
        the content of report.json.

    Raises:
        ValueError: for partial results of another request, for prompts that leave no room for an answer, and whatever
            `generate` refuses.
    """
    raw = request.raw or tokenizer.chat_template is None
    encoded = [encode_prompt(model, tokenizer, prompt, raw=raw) for prompt in prompts]
    tuning, others = split_prompts(encoded, request.sweep_count, request.count)
    decides = _decides(request, model, tokenizer, [tuning, others])
    common: Options = {**request.common_settings, "max_new_tokens": request.max_new_tokens, "do_sample": False}
    measurement = Measurement(model, tokenizer, request.repeats, request.batch_size, request.max_new_tokens)
    with Store(request.output, decides, restart=request.restart) as store:
        candidates = request.grid.candidates()
        timed = _first_of_each_task(tuning, request.sweep_timed)
        part = Part("sweep", tuning, {name: {**options, **common} for name, options in candidates.items()}, timed)
        sweep_table = measurement.run(part, "sweep, 1 of 2", store, console)
        sweep = sweep_numbers(sweep_table, settings_table(candidates))
        good = pick(sweep[sweep["kind"] == WEDLM], request.max_loss, "tokens_per_forward")
        picked = good[0] if good else None
        settings = _stored(model) if picked is None or not request.write else dict(sweep.loc[picked, list(FIELDS)])
        settings = {name: _plain(value) for name, value in settings.items()}
        headline = {
            name: {**options, **common} for name, options in _headline(request.grid.decoders, settings).items()
        }
        timed = _first_of_each_task(others, request.timed)
        part = Part("headline", others, headline, timed, request.timed_batch_sizes, is_costed=True)
        table = measurement.run(part, "headline, 2 of 2", store, console)
    numbers = Numbers.of(sweep_table, sweep, table, others, model)
    data = {
        "source": source,
        "has_answers": bool(others[0].answers),
        "counts": {"tuning": _counts(tuning), "headline": _counts(others)},
        "notes": _notes(request, model, encoded, [*tuning, *others]),
    }
    about = {**_about(request, decides), "data": data, "settings": settings, "picked": picked}
    report = write_report(about, numbers, request.output, request.figures, request.fill or ())
    for line in [*summary_sentences(about, numbers), chosen_sentence(about)]:
        console.print(line, highlight=False, soft_wrap=True)
    if request.write and picked is not None:
        write_settings(Path(request.model), settings)
        console.print(f"{Path(request.model) / 'generation_config.json'}: {picked}", highlight=False)
    console.print(str(request.output / "report.html"), style="dim", highlight=False, soft_wrap=True)
    return report


def _about(request: ReportRequest, decides: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, and where it was measured."""
    return {
        "command": shlex.join(["wedlm", *sys.argv[1:]]),
        "model": Path(request.model).name if Path(request.model).is_dir() else request.model,
        "weights": decides["model"],
        "environment": decides["machine"],
        "common_settings": request.common_settings,
        "timing": decides["measuring"],
        "max_loss": request.max_loss,
    }


def _headline(decoders: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Options]:
    """Keywords of each decoder, AR first."""
    made: dict[str, Options] = {AR: DECODERS[AR]}
    for decoder in DECODERS:
        if decoder in (BLOCK, WEDLM) and decoder in decoders:
            made[decoder] = configured(decoder, *(settings[name] for name in FIELDS))
        elif decoder in (TYPICAL, EXACT) and decoder in decoders:
            made[decoder] = DECODERS[decoder]  # needs no settings: the stored ones are for unverified decoding
    return made


def _stored(model: WeDLMForCausalLM) -> dict[str, Any]:
    stored = WeDLMGenerationSettings.from_generation_config(model.generation_config, model.config)
    return {name: getattr(stored, name) for name in FIELDS}


def _decides(
    request: ReportRequest,
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    parts: Sequence[Sequence[Prompt]],
) -> dict[str, Any]:
    """All that the rows depend on."""
    rows = [[asdict(prompt) for prompt in part] for part in parts]
    stored = model.generation_config.to_diff_dict()
    skipped = MANAGED | {"transformers_version", "_from_model_config"}
    measuring = ("timed", "sweep_timed", "repeats", "batch_size", "batch_sizes", "max_new_tokens")
    return {
        "model": fingerprint(model, tokenizer),
        "prompts": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
        "generation config": {name: value for name, value in sorted(stored.items()) if name not in skipped},
        "grid": asdict(request.grid),
        "settings": request.common_settings,
        "measuring": {name: getattr(request, name) for name in measuring},
        "machine": {"wedlm_hf": import_module("...", __package__).__version__, **environment(model)},
    }


def _notes(
    request: ReportRequest, model: WeDLMForCausalLM, prompts: Sequence[Prompt], used: Sequence[Prompt]
) -> list[str]:
    """What a reader of the numbers must know about the prompts."""
    distinct = len({prompt.text for prompt in prompts})
    limits = [answer_limit(model, len(prompt.tokens), request.max_new_tokens) for prompt in used]
    short = [limit for limit in limits if limit < request.max_new_tokens]
    notes = []
    if distinct < len(prompts):
        notes.append(f"{len(prompts) - distinct} of {len(prompts)} rows repeat a prompt and were left out.")
    if len(used) < distinct:
        notes.append(f"{len(used):,} of {distinct:,} prompts were used (--count, --sweep-count).")
    if short:
        notes.append(
            f"{len(short)} of {len(used)} prompts leave room for fewer than {request.max_new_tokens} new tokens in "
            f"the model's context, the longest one for {min(short)}: their answers may be cut, no others are."
        )
    return notes


def _first_of_each_task(prompts: Sequence[Prompt], count: int) -> list[int]:
    """Indices of the first `count` prompts of each task, the tasks in turn."""
    seen: dict[str, int] = {}
    places = []
    for index, prompt in enumerate(prompts):
        seen[prompt.task] = seen.get(prompt.task, 0) + 1
        places.append((seen[prompt.task], index))
    return [index for place, index in sorted(places) if place <= count]


def _counts(prompts: Sequence[Prompt]) -> dict[str, int]:
    tasks = [prompt.task for prompt in prompts]
    return {task: tasks.count(task) for task in dict.fromkeys(tasks)}


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's own, whole ones as integers."""
    value = float(value)
    return int(value) if value.is_integer() else value
