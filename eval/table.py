"""The numbers made of the table of measurements, whose rows are those of [`measure`], with `quality`, 0 to 1, and
`same`, whether the answer is AR's.

Errors come from a bootstrap over prompts: each resample draws as many prompts as there are, with replacement, the same
ones for every decoder, so that differences between decoders are differences on the same prompts.

`N` prompts, `D` decoders, `R` resamples; row 0 of R + 1 is that of the prompts as they are.
"""

import html
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from ..generation.state import keeps_state
from ..modeling_wedlm import WeDLMForCausalLM
from .decoders import AR, COMPARED, EXACT, LOOKUP
from .measure import MOST_TURNS, Measured, Speed, environment, measure, rates
from .prompts import Prompt

RESAMPLES = 1000
LEAST_PROMPTS = 6  # fewer give no standard error

SUMS = ["quality", "same", "new_tokens", "forwards", "token_instances", "seconds"]
COUNTED = ["quality", "same", "tokens_per_forward", "prefix_cacheability"]
SHORT = ["tokens_per_forward", "tokens_per_second", "speed", "same"]
TIMED = ["tokens_per_second", "speed"]

TITLES = {
    "tokens_per_forward": "tokens per forward",
    "prefix_cacheability": "prefix cacheability",
    "tokens_per_second": "tokens/s",
    "speed": "speed against AR",
    "same": "same answers",
    "loss": "largest loss",
}
"""Columns in words, for tables and axes; other names are words already."""

FORMATS = {
    "quality": (100, ".1f", " %"),
    "same": (100, ".0f", " %"),
    "tokens_per_second": (1, ".0f", ""),
    "speed": (1, ".2f", "×"),
    "loss": (1, ".1f", ""),
}
"""Factor, format and unit; of other names, two digits."""


def mark_same(table: pd.DataFrame) -> pd.DataFrame:
    """With `same`: whether an answer (`tokens`) is AR's to the same prompt, token for token."""
    reference = table[table["decoder"] == AR].drop_duplicates("prompt").set_index("prompt")["tokens"]
    pairs = zip(table["tokens"], table["prompt"].map(reference), strict=True)
    return table.assign(same=[tokens == wanted for tokens, wanted in pairs])


def per_prompt(table: pd.DataFrame) -> pd.DataFrame:
    """Medians over the repeats: a row for each prompt, columns (sum, decoder) with the decoders in their order."""
    names = [name for name in SUMS if name in table]
    wide = table.astype(dict.fromkeys(names, float)).groupby(["prompt", "decoder"], sort=False)[names].median()
    columns = pd.MultiIndex.from_product([names, table["decoder"].unique()])
    return wide.unstack("decoder").reindex(columns=columns)


def resample(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Metrics of every decoder on the prompts and on R resamples of them: `(R + 1, D)` for each that the columns
    allow. Speeds are relative to [`AR`], where it is among the decoders."""
    wide = per_prompt(table)
    count = len(wide)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    weights = np.vstack([np.ones(count), drawn])
    sums = {
        name: pd.DataFrame(weights @ wide[name].to_numpy(), columns=wide[name].columns)
        for name in wide.columns.get_level_values(0).unique()
    }
    made = {name: sums[name] / count for name in ("quality", "same") if name in sums} | rates(sums)
    if "seconds" in sums and AR in sums["seconds"]:
        made["speed"] = made["tokens_per_second"].div(made["tokens_per_second"][AR], axis=0)
    return made


def standard_error(resampled: pd.DataFrame | pd.Series, count: int) -> Any:
    """Of what was computed on R resamples of `count` prompts (see [`resample`]); NaN for few prompts."""
    correction = np.nan if count < LEAST_PROMPTS else (count / (count - 1)) ** 0.5
    return resampled.iloc[1:].std() * correction


def summarise(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """A line for each decoder: the metrics of these names, and their standard errors (`…_error`)."""
    count, made = table["prompt"].nunique(), resample(table)
    columns: dict[str, Any] = {}
    for name in names:
        if name in made:
            columns |= {name: made[name].iloc[0], f"{name}_error": standard_error(made[name], count)}
    return pd.DataFrame(columns).rename_axis("decoder")


def summarise_tasks(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """As [`summarise`], for each task; index (decoder, task)."""
    parts = {task: summarise(rows, names) for task, rows in table.groupby("task", sort=False)}
    return pd.concat(parts, names=["task", "decoder"]).swaplevel()


def cells(lines: pd.DataFrame, names: Sequence[str], with_errors: Sequence[str] = ()) -> pd.DataFrame:
    """Values as texts, some with their standard errors. A speed above the tokens per forward says so instead."""
    blank = pd.Series(np.nan, index=lines.index)

    def cell(name: str, value: float, error: float) -> str:
        factor, form, unit = FORMATS.get(name, (1, ".2f", ""))
        spread = "" if pd.isna(error) or (name, value) == ("speed", 1) else f" ± {factor * error:{form}}"
        return "–" if pd.isna(value) else f"{factor * value:,{form}}{spread}{unit}"

    made = {}
    for name in names:
        errors = lines[f"{name}_error"] if name in with_errors else blank
        made[name] = [cell(name, *pair) for pair in zip(lines[name], errors, strict=True)]
    if "speed" in made and "tokens_per_forward" in lines:
        numbers = zip(lines["speed"], lines["tokens_per_forward"], made["speed"], strict=True)
        speeds = [(Speed(speed, limit), text) for speed, limit, text in numbers]
        made["speed"] = [text if speed.is_possible else str(speed) for speed, text in speeds]
    return pd.DataFrame(made, index=lines.index)


def as_markdown(table: pd.DataFrame) -> str:
    """Words to the left, numbers to the right; what Markdown would take for a column's end or for HTML is escaped."""
    escaped = table.map(_escaped).rename(columns=_escaped)
    align = ["left" if name in ("decoder", "task") else "right" for name in escaped.columns]
    return str(escaped.to_markdown(index=False, colalign=align, disable_numparse=True)) + "\n"


def _escaped(cell: object) -> str:
    return html.escape(str(cell), quote=False).replace("|", r"\|")


def speed_table(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt | Sequence[int]],
    max_new_tokens: int = 128,
    *,
    temperature: float | None = None,
    batch_size: int = 1,
    title: str = "",
    others: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Decodes the prompts (with their tokens, or these alone) with each decoder in turn, and again while a speed is
    impossible, at most five times.

    A temperature samples; greedy is the default. Prompt lookup is left out of batches, and if a model keeps a state.
    Of `others`, models by name such as this one in other dtypes, plain `generate` takes its turn as well. Returns
    `caption`, `columns` and `rows` of a table; `tokens_per_second` of each decoder; `depths`, the share of verified
    decoding's drafts that passed at each depth; the measurements as `measured`; and `notes`, sentences.
    """
    is_greedy = temperature is None
    shared = {"max_new_tokens": max_new_tokens, "repetition_penalty": 1.0, "do_sample": not is_greedy}
    shared |= {} if temperature is None else {"temperature": temperature}
    names = (AR, *[LOOKUP] * (batch_size == 1 and not keeps_state(model)), EXACT)
    decoders = {name: {"model": other, **shared} for name, other in (others or {}).items()}
    decoders |= {name: {**COMPARED[name], **shared} for name in names}
    encoded = [prompt if isinstance(prompt, Prompt) else Prompt.of("", tokens=prompt) for prompt in prompts]
    measured: list[Measured] = []
    for repeat in range(MOST_TURNS):
        turn = measure(model, tokenizer, encoded, decoders, batch_size=batch_size, title=title)
        measured += [line | {"repeat": repeat} for line in turn]
        found = summarise(mark_same(pd.DataFrame(measured)), SHORT)
        if all(Speed(*pair).is_possible for pair in zip(found["speed"], found["tokens_per_forward"], strict=True)):
            break
    shown = SHORT if is_greedy else SHORT[:-1]
    texts, where = cells(found, shown, with_errors=("tokens_per_forward", "speed")), environment(model)
    apart = getattr(model, "packed_distance", None)
    unpacked = "" if apart is None else f", {apart:.2g} nats (KL) a token from unpacked,"
    together = "one at a time" if batch_size == 1 else f"{batch_size} at a time"
    exact = [line for line in measured if line["decoder"] == EXACT]
    drafted, accepted = (
        map(sum, zip_longest(*(line[f"{name}_by_depth"] for line in exact), fillvalue=0))
        for name in ("drafted", "accepted")
    )
    return {
        "caption": f"{len(prompts)} prompts, {together}, {'greedy' if is_greedy else f'temperature {temperature:g}'}, "
        f"at most {max_new_tokens} tokens; {where['dtype']}{unpacked} on {where['device']} ({where['processor']}, "
        f"{where['kernels']}, {where['threads']} threads), torch {where['torch']}. ± is the "
        "standard error over prompts.",
        "columns": ["decoder", *(TITLES[name] for name in texts)],
        "rows": [[str(name), *line] for name, line in zip(texts.index, texts.to_numpy().tolist(), strict=True)],
        "tokens_per_second": found["tokens_per_second"].to_dict(),
        "depths": [passed / tried for passed, tried in zip(accepted, drafted, strict=True)],
        "measured": measured,
        "notes": _notes(found, pd.DataFrame(measured)),
    }


def _notes(found: pd.DataFrame, measured: pd.DataFrame) -> list[str]:
    """What a [`speed_table`] says, in sentences: against prompt lookup, and how much prompts differ."""
    notes, speed = [], found["speed"]
    if LOOKUP in speed:
        better = "prompt lookup gains as much or more so far"
        if max(speed[EXACT], speed[LOOKUP]) <= 1:
            better = "neither gains here so far"
        elif speed[EXACT] > speed[LOOKUP]:
            better = "the adapter gains more"
        notes.append(
            f"Prompt lookup, which needs no adapter: {speed[LOOKUP]:.2f} times the speed of AR on these prompts; "
            f"verified decoding: {speed[EXACT]:.2f} times. So {better}."
        )
    wide = per_prompt(measured)
    single = wide["new_tokens"][EXACT] / wide["forwards"][EXACT]
    if len(single) > 1:
        notes.append(f"Single prompts had {single.min():.2f} to {single.max():.2f} tokens per forward.")
    return notes
