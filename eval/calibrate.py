"""The work of `wedlm calibrate`: the fastest decoding settings that agree with AR well enough on given prompts.

*Agreement* is the share of new tokens that AR decoding would have chosen after the same prefix, the decoder's own. It
is 1 exactly where the whole answer is AR's. It counts the places where the decoder chose otherwise; a comparison with
AR's answer token by token would count all that follows the first of them, whether it says the same or not.

*Speed* follows from counts, so that it does not depend on what else the machine does: a forward of Q slots takes the
time 1 + c·Q, and the slot cost c is measured first. Settings are picked on every other prompt and must hold on the
rest; only the outcome is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMForCausalLM
from .ar_head import agreeing_tokens
from .decoders import AR, EXACT, WEDLM
from .measure import ForwardCounter, decode, measure, rates
from .options import CalibrationOptions
from .progress import track
from .prompts import Prompt, split_prompts
from .sweep import beaten, configured, pick
from .table import mark_same, per_prompt

TIMED_REPEATS = 5
# How the slot cost is measured: so many tokens, one a step, with windows of these sizes.
COST_WINDOWS, COST_TOKENS, COST_REPEATS = (1, 4, 8, 16, 24), 32, 3

COLUMNS = (
    ("agreement", "agreement", "{:.2%}"),
    ("checked", "checked", "{:.2%}"),
    ("same", "same answers", "{:.0%}"),
    ("tokens_per_forward", "tok/fwd", "{:.2f}"),
    ("speed", "speed to AR", "{:.2f}×"),
)
"""What is shown of the trials: column, title, format."""


@dataclass(frozen=True)
class SlotCost:
    """A step of Q slots takes `fixed` + `slot` · Q seconds."""

    fixed: float
    slot: float

    @classmethod
    def fit(cls, seconds: pd.DataFrame) -> SlotCost:
        """A line through the median `seconds` of each `width`, which weighs as much as it has steps."""
        steps = seconds.groupby("width")["seconds"].agg(["median", "size"])
        slot, fixed = np.polyfit(steps.index, steps["median"], 1, w=steps["size"] ** 0.5)
        return cls(max(float(fixed), 1e-9), max(float(slot), 0.0))

    @property
    def relative(self) -> float:
        """c, the setting `slot_cost`."""
        return self.slot / self.fixed


@dataclass(frozen=True)
class Calibration:
    """What [`calibrate`] found.

    Attributes:
        cost: of forwards.
        trials: a row for each setting: `agreement`, `same` (share of answers that are AR's), `tokens_per_forward`,
            `speed` (against AR, by counts and slot cost), and `checked`, the agreement on the other prompts, where it
            was asked for.
        chosen: name of the fastest that is good enough on both parts; `None` if there is none.
        settings: of the chosen one, as the generation config takes them.
        tokens_per_second: of AR and of the chosen one on the prompts that it was not picked on, taking turns.
    """

    cost: SlotCost
    trials: pd.DataFrame
    chosen: str | None
    settings: Mapping[str, Any]
    tokens_per_second: Mapping[str, float]


def measure_slot_cost(model: WeDLMForCausalLM, prompt: Sequence[int]) -> SlotCost:
    """Time the steps of decoding with several window sizes, in turn.

    What a slot costs outside the forward (its entropy, the choice of its token) counts as well.
    """
    steps: list[tuple[int, float]] = []
    length = {"max_new_tokens": COST_TOKENS, "min_new_tokens": COST_TOKENS, "do_sample": False}
    for repeat, window in itertools.product(range(COST_REPEATS + 1), COST_WINDOWS):
        with ForwardCounter(model) as counter:
            decode(model, None, [list(prompt)], {**configured(WEDLM, window, 0.0, 0.0), **length})
        if repeat > 0:  # the first turn is a warm-up, and the first forward reads the prompt
            widths = [width for _, width in counter.shapes[1:]]
            steps += zip(widths, np.diff(counter.starts[1:]), strict=False)
    return SlotCost.fit(pd.DataFrame(steps, columns=["width", "seconds"]))


def calibrate(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    request: CalibrationOptions,
    *,
    title: str = "",
) -> Calibration:
    """Find the fastest settings of greedy decoding whose agreement with AR is wide enough.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        prompts: with their tokens; half of them are for picking, the others for checking.
        request: what is wanted. Verified decoding gets one prompt at a time, for its window adapts to all rows of a
            batch.
        title: shown with a progress bar on standard error, if any.

    Raises:
        ValueError: for fewer than two different prompts.
    """
    picking, checking = split_prompts(prompts)
    cost = measure_slot_cost(model, picking[0].tokens)
    limits = {"max_new_tokens": request.max_new_tokens, "do_sample": False}
    candidates = request.grid.candidates()
    greedy = {name: {**options, **limits} for name, options in candidates.items()}

    def tried(names: Sequence[str], part: Sequence[Prompt], title: str = "") -> pd.DataFrame:
        rows = []
        for name in track(names, title):
            size = 1 if name.startswith(EXACT) else request.batch_size
            rows += measure(model, tokenizer, part, {name: greedy[name]}, batch_size=size)
        return summarise_trials(model, part, rows, cost)

    trials = tried(list(greedy), picking, title).assign(checked=np.nan)
    most = 1 - request.agreement
    for name in pick(trials.drop(index=AR).eval("loss = 1 - agreement"), most, "speed"):
        trials.loc[name, "checked"] = tried([AR, name], checking).loc[name, "agreement"]
        if 1 - trials.loc[name, "checked"] <= most + 1e-9:
            break
    else:
        return Calibration(cost, trials, None, {}, {})
    both = {decoder: greedy[decoder] for decoder in (AR, name)}
    sums = per_prompt(pd.DataFrame(measure(model, tokenizer, checking, both, repeats=TIMED_REPEATS))).sum()
    settings = {**candidates[name], "slot_cost": round(cost.relative, 4)}
    settings.pop("strategy")  # which one is used stays the caller's choice
    return Calibration(cost, trials, name, settings, dict(sums["new_tokens"] / sums["seconds"]))


def summarise_trials(
    model: WeDLMForCausalLM, prompts: Sequence[Prompt], rows: Sequence[Mapping[str, Any]], cost: SlotCost
) -> pd.DataFrame:
    """A row for each setting, AR among them; see [`Calibration`]."""
    table = mark_same(pd.DataFrame(rows))
    answers = zip(table["prompt"], table["tokens"], strict=True)
    table["agreeing"] = [agreeing_tokens(model, prompts[index].tokens, tokens) for index, tokens in answers]
    groups = table.groupby("decoder", sort=False)
    sums = groups[["agreeing", "new_tokens", "forwards", "token_instances"]].sum()
    seconds = (sums["forwards"] + cost.relative * sums["token_instances"]) / sums["new_tokens"]
    return pd.DataFrame(
        {
            "agreement": sums["agreeing"] / sums["new_tokens"],
            "same": groups["same"].mean(),
            "tokens_per_forward": rates(sums)["tokens_per_forward"],
            "speed": seconds[AR] / seconds,
        }
    )


def trials_table(found: Calibration, agreement: float) -> Table:
    """AR, the settings that no other one beats in both agreement and speed, and those that were checked."""
    trials = found.trials
    best = ~beaten(trials[["agreement", "speed"]]) | trials["checked"].notna()
    columns = (Column(title, justify="right", no_wrap=True) for _, title, _ in COLUMNS)
    rows = Table("setting", *columns, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in [AR, *trials[best].drop(index=AR, errors="ignore").sort_values("speed", ascending=False).index]:
        trial = trials.loc[name]
        cells = ("" if pd.isna(trial[column]) else form.format(trial[column]) for column, _, form in COLUMNS)
        is_good = trial["agreement"] >= agreement
        rows.add_row(name, *cells, style="bold" if name == found.chosen else "" if is_good else "dim")
    return rows


def record(found: Calibration) -> dict[str, Any]:
    """What was found, as values that JSON has."""
    trials = found.trials.reset_index(names="setting").to_dict("records")
    return {
        "chosen": found.chosen,
        "settings": dict(found.settings),
        "tokens_per_second": dict(found.tokens_per_second),
        "seconds_per_step": found.cost.fixed,
        "seconds_per_slot": found.cost.slot,
        "trials": trials,
    }


def show(found: Calibration, agreement: float, console: Console) -> None:
    """Print what was found."""
    cost, speeds = found.cost, found.tokens_per_second
    console.print(
        f"A step takes {1000 * cost.fixed:.3f} ms and {1000 * cost.slot:.4f} ms for each slot: "
        f"slot_cost = {cost.relative:.2g}.",
        highlight=False,
    )
    console.print(trials_table(found, agreement))
    outcome = f"No setting agrees with AR on {100 * agreement:g} % of the tokens."
    if found.chosen is not None:
        outcome = (
            f"Chosen: {found.chosen}. On the prompts that it was not picked on: {speeds[found.chosen]:,.0f} tokens/s, "
            f"AR {speeds[AR]:,.0f}, {speeds[found.chosen] / speeds[AR]:.2f}×."
        )
    console.print(outcome, highlight=False)
