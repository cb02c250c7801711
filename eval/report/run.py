"""The work of `wedlm report`: prompts are decoded with each decoder in turn, and what was seen is written down."""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from ...checkpoints.files import write_text
from ...generation.settings import WINDOW_SETTINGS, WeDLMGenerationSettings
from ...generation.state import keeps_state
from ...modeling_wedlm import WeDLMForCausalLM
from ..compare import advice
from ..decoders import AR, BLOCK, EXACT, LOOKUP, WEDLM, Options, candidates
from ..measure import agreeing_tokens, environment, fingerprint, measure
from ..prompts import Prompt, answer_limit, encode_prompt
from ..table import COUNTED, TIMED, mark_same, summarise, summarise_tasks
from .page import ALL_TASKS, Report, write_report
from .request import ReportRequest


def run(
    request: ReportRequest,
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    source: str,
) -> Report:
    """Measure and write all files; `source` names the prompts. Raises `ValueError` for prompts that leave no room for
    an answer, and for what `generate` refuses."""
    encoded, notes = _chosen(request, model, tokenizer, prompts)
    options = candidates(_decoders(request, model), request.windows, request.thresholds, request.penalties)
    shared = {
        **request.settings,
        "max_new_tokens": request.max_new_tokens,
        "do_sample": request.temperature is not None,
    }
    shared |= {} if request.temperature is None else {"temperature": request.temperature}
    decoders = {name: {**own, **shared} for name, own in options.items()}
    torch.manual_seed(0)
    how: dict[str, Any] = {"batch_size": request.batch_size, "repeats": request.repeats, "title": "decoding"}
    rows = pd.DataFrame(measure(model, tokenizer, encoded, decoders, **how))
    is_greedy = request.temperature is None
    table = tabulate(_judged(mark_same(rows), model, encoded, is_greedy), is_greedy)
    settings = pd.DataFrame.from_dict(options, orient="index").reindex(columns=[*WINDOW_SETTINGS])
    overall = table.xs(ALL_TASKS, level="task")
    said = advice(overall, {name: {"model": model, **own} for name, own in decoders.items()})
    counts = Counter(prompt.task for prompt in encoded)
    report = Report(
        table=table.join(settings, on="decoder"),
        quality="right answers" if encoded[0].answers else "agreement with AR",
        picked=pick(table, options, request.max_loss),
        notes=[f"{name}: {text}" for name, text in said.items() if text] + notes,
        about={
            "command": shlex.join(["wedlm", *sys.argv[1:]]),
            "model": Path(request.model).name if Path(request.model).is_dir() else request.model,
            "weights": fingerprint(model, tokenizer)["weights"],
            "prompts": f"{', '.join(f'{count} {task}' for task, count in counts.items())} of {source}",
            "metric": request.metric or ", ".join(sorted({prompt.match for prompt in encoded})),
            "decoding": ", ".join(f"{name} = {value}" for name, value in shared.items()),
            "repeats": request.repeats,
            "batch_size": request.batch_size,
            "wedlm_hf": version("wedlm-hf"),
            **environment(model),
        },
    )
    if request.save_settings and report.picked:
        stored = vars(WeDLMGenerationSettings.from_generation_config(model.generation_config, model.config))
        chosen = {name: options[report.picked].get(name, stored[name]) for name in WINDOW_SETTINGS}
        write_settings(path := Path(request.model) / "generation_config.json", {**chosen, "masks_ready": True})
        report.notes.append(f"{path} now has {', '.join(f'{name} = {value}' for name, value in chosen.items())}.")
    write_report(report, request.output)
    return report


def _decoders(request: ReportRequest, model: WeDLMForCausalLM) -> Sequence[str]:
    """Those that are asked for, or else those that make sense for the model."""
    is_alone, has_state = request.batch_size == 1, keeps_state(model)
    if not is_alone and (has_state or LOOKUP in request.decoders):
        what = f"{type(model).__name__} keeps a state and" if has_state else f"`{LOOKUP}`"
        raise ValueError(f"{what} decodes one prompt at a time: leave `--batch-size` out, got {request.batch_size}.")
    if request.decoders:
        return request.decoders
    if has_state or getattr(model, "has_mask_adapter", False):
        return [*[LOOKUP] * (is_alone and not has_state), EXACT]
    return [BLOCK, WEDLM, EXACT]


def _chosen(
    request: ReportRequest, model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> tuple[list[Prompt], list[str]]:
    """The first prompts of each task with their tokens, and what a reader of the numbers must know about them."""
    different = list({prompt.text: prompt for prompt in reversed(prompts)}.values())[::-1]
    places: Counter[str] = Counter()
    chosen = []
    for prompt in different:
        if places[prompt.task] < request.count:
            chosen.append(encode_prompt(model, tokenizer, prompt, raw=request.raw or tokenizer.chat_template is None))
        places[prompt.task] += 1
    notes = []
    if len(different) < len(prompts):
        notes.append(f"{len(prompts) - len(different)} of {len(prompts)} rows repeat a prompt and were left out.")
    if len(chosen) < len(different):
        notes.append(f"{len(chosen):,} of {len(different):,} prompts were used (`--count`).")
    if len(chosen) < 50:
        notes.append(f"{len(chosen)} prompts are too few to decide by.")
    limits = [answer_limit(model, len(prompt.tokens), request.max_new_tokens) for prompt in chosen]
    if short := [limit for limit in limits if limit < request.max_new_tokens]:
        room = (
            f"fewer than {request.max_new_tokens} new tokens in the model's context, the longest one for {min(short)}"
        )
        notes.append(f"{len(short)} of {len(chosen)} prompts leave room for {room}: their answers may be cut.")
    return chosen, notes


def _judged(rows: pd.DataFrame, model: WeDLMForCausalLM, prompts: Sequence[Prompt], is_greedy: bool) -> pd.DataFrame:
    """With `quality`: how right an answer is or, where that is unknown, the share of tokens that AR would choose."""
    if prompts[0].answers:
        return rows.assign(quality=rows["right"].astype(float))
    shares = [
        # AR's own answer has them all: one forward over it may round otherwise than the steps that wrote it.
        1.0 if is_greedy and row.same else agreeing_tokens(model, prompts[row.prompt].tokens, row.tokens)
        / len(row.tokens)
        for row in rows[["same", "prompt", "tokens"]].itertuples()
    ]  # fmt: skip
    return rows.assign(quality=shares)


def tabulate(rows: pd.DataFrame, is_greedy: bool) -> pd.DataFrame:
    """Numbers and their standard errors by (decoder, task), of all tasks first; `loss` is points of quality lost to
    AR. Samples are not compared with AR's."""
    names = [name for name in (*COUNTED, *TIMED) if is_greedy or name != "same"]
    rows = mark_same(rows)
    table = summarise(rows, names).assign(task=ALL_TASKS).set_index("task", append=True)
    if rows["task"].nunique() > 1:
        table = pd.concat([table, summarise_tasks(rows, names)])
    ar = table["quality"].xs(AR, level="decoder")
    return table.assign(loss=(100 * (table.index.get_level_values("task").map(ar) - table["quality"])).round(9))


def pick(table: pd.DataFrame, options: Mapping[str, Options], max_loss: float) -> str | None:
    """The decoder with the most tokens per forward among those of unverified streaming decoding that lose at most
    `max_loss` points on every task; `None` if none does."""
    loss, speed = table["loss"].groupby("decoder").max(), table["tokens_per_forward"].xs(ALL_TASKS, level="task")
    good = [name for name in options if name.split()[0] == WEDLM and loss[name] <= max_loss]
    return max(good, key=lambda name: speed[name], default=None)


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Store settings in a generation_config.json; which strategy is used stays the caller's choice."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stored.pop("_from_model_config", None)  # with this flag, loading would drop our fields
    stored.pop("verification", None)  # commands ask whether the masks are ready
    write_text(path, json.dumps(stored | dict(settings), indent=2, sort_keys=True) + "\n")
