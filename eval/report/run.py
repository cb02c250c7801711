"""The work of `wedlm report`.

Settings are compared on *tuning* prompts (the *sweep*); the *headline* numbers are those of the stored or picked
settings on other prompts.
"""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ...checkpoints.files import write_text
from ...generation.settings import WeDLMGenerationSettings
from ...generation.state import keeps_state
from ...modeling_wedlm import WeDLMForCausalLM
from ..decoders import BLOCK, COMPARED, FIELDS, WEDLM, configured
from ..measure import environment, fingerprint
from ..prompts import Prompt, answer_limit, encode_prompt, split_prompts
from .numbers import Numbers, pick, settings_table, sweep_numbers
from .page import write_report
from .pieces import Measurement, Part
from .request import ReportRequest

TIMING = ("timed", "sweep_timed", "repeats", "batch_size", "batch_sizes", "max_new_tokens", "temperature")


def run(
    request: ReportRequest,
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    source: str,
    console: Console,
) -> str | None:
    """Measure and write all files; `source` says where the prompts are from. Returns the name of
    the settings that were picked; `None` where none is good enough.

    Raises:
        ValueError: for prompts that leave no room for an answer, and whatever `generate` refuses.
    """
    request = replace(request, batch_sizes=_batch_sizes(request, model, console))
    raw = request.raw or tokenizer.chat_template is None
    encoded = [encode_prompt(model, tokenizer, prompt, raw=raw) for prompt in prompts]
    tuning, others = split_prompts(encoded, request.sweep_count, request.count)
    candidates = request.candidates()
    measurement = Measurement(model, tokenizer, request, console)
    tried = settings_table(candidates)
    sweep, sweep_table, picked = tried.iloc[:0], pd.DataFrame(), None
    if tuning:
        swept = Part("sweep", tuning, request.common(candidates), request.sweep_timed, is_compared=True)
        sweep_table = measurement.run(swept)
        sweep = sweep_numbers(sweep_table, tried)
        picked = next(iter(pick(sweep[sweep["kind"] == WEDLM], request.max_loss, "tokens_per_forward")), None)
    stored = WeDLMGenerationSettings.from_generation_config(model.generation_config, model.config)
    chosen = candidates[picked] if request.save_settings and picked else vars(stored)
    settings = {name: chosen[name] for name in FIELDS}
    headline = {  # verified decoding needs no settings: the stored ones are for unverified decoding
        name: configured(name, *settings.values()) if name in (BLOCK, WEDLM) else keywords
        for name, keywords in COMPARED.items()
        if name in tried["kind"].unique()
    }
    shown = Part("headline", others, request.common(headline), request.timed, request.batch_sizes)
    table = measurement.run(shown)
    data = {"source": source} | _data(request, model, encoded, {"tuning": tuning, "headline": others})
    about = _conditions(request, model, tokenizer) | {"settings": settings, "picked": picked, "data": data}
    numbers = Numbers.of(sweep_table, sweep, table, others, model, request.temperature is None)
    words = write_report(about, numbers, request.output, request.figures)
    said = [words.block("summary"), words.block("chosen")]
    if request.save_settings and picked:
        write_settings(path := Path(request.model) / "generation_config.json", settings)
        said.append(f"{path} now has {', '.join(f'{name} = {value:g}' for name, value in settings.items())}.")
    for text in filter(None, said):
        console.print(text, highlight=False, soft_wrap=True)
    console.print(str(request.output / "report.html"), style="dim", highlight=False, soft_wrap=True)
    return picked


def _conditions(request: ReportRequest, model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a reader needs to measure the same again."""
    return {
        "command": shlex.join(["wedlm", *sys.argv[1:]]),
        "model": Path(request.model).name if Path(request.model).is_dir() else request.model,
        "weights": fingerprint(model, tokenizer),
        "environment": {"wedlm_hf": version("wedlm-hf"), **environment(model)},
        "common_settings": request.settings,
        "timing": {name: getattr(request, name) for name in TIMING},
        "max_loss": request.max_loss,
    }


def _batch_sizes(request: ReportRequest, model: WeDLMForCausalLM, console: Console) -> tuple[int, ...]:
    """Those that are timed. A model that keeps a state decodes one sequence at a time."""
    sizes = tuple(sorted({1, *request.batch_sizes}))
    if not keeps_state(model) or sizes == (1,):
        return sizes
    if request.batch_sizes != ReportRequest.batch_sizes:
        wanted = "keeps a state and decodes one sequence at a time: leave `--batch-sizes` out"
        raise ValueError(f"{type(model).__name__} {wanted}, got {sizes[-1]}.")
    console.print("The model keeps a state: prompts are timed one at a time.", style="dim", highlight=False)
    return (1,)


def _data(
    request: ReportRequest, model: WeDLMForCausalLM, prompts: Sequence[Prompt], parts: Mapping[str, Sequence[Prompt]]
) -> dict[str, Any]:
    """How many prompts of each task are in each part, and what a reader of the numbers must know about them."""
    distinct, used = len({prompt.text for prompt in prompts}), [prompt for some in parts.values() for prompt in some]
    limits = [answer_limit(model, len(prompt.tokens), request.max_new_tokens) for prompt in used]
    short = [limit for limit in limits if limit < request.max_new_tokens]
    notes = []
    if distinct < len(prompts):
        notes.append(f"{len(prompts) - distinct} of {len(prompts)} rows repeat a prompt and were left out.")
    if len(used) < distinct:
        notes.append(f"{len(used):,} of {distinct:,} prompts were used (--count, --sweep-count).")
    if short:
        room = (
            f"fewer than {request.max_new_tokens} new tokens in the model's context, the longest one for {min(short)}"
        )
        cut = f"{len(short)} of {len(used)} prompts leave room for {room}"
        notes.append(f"{cut}: their answers may be cut, no others are.")
    counts = {name: dict(Counter(prompt.task for prompt in some)) for name, some in parts.items()}
    return {"has_answers": bool(used[0].answers), "counts": counts, "notes": notes}


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Store settings in a generation_config.json; which strategy is used stays the caller's choice."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stored.pop("_from_model_config", None)  # with this flag, loading would drop our fields
    write_text(path, json.dumps(stored | dict(settings), indent=2, sort_keys=True) + "\n")
