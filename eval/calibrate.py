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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from transformers import PreTrainedTokenizerBase

from ..console.progress import track
from ..modeling_wedlm import WeDLMForCausalLM
from .ar_head import agreeing_tokens
from .decoders import AR, EXACT, WEDLM
from .measure import decode_call, measure, rates
from .options import CalibrationOptions
from .prompts import Prompt, split_prompts
from .sweep import beaten, configured, pick
from .table import mark_same, per_prompt

TIMED_REPEATS = 5
# How the slot cost is measured: so many tokens, one a step, with windows of these sizes.
COST_WINDOWS, COST_TOKENS, COST_REPEATS = (1, 4, 8, 16, 24), 32, 3

COLUMNS = {
    "agreement": ("agreement", "{:.2%}"),
    "checked": ("checked", "{:.2%}"),
    "same": ("same answers", "{:.0%}"),
    "tokens_per_forward": ("tok/fwd", "{:.2f}"),
    "speed": ("speed to AR", "{:.2f}×"),
}
"""Title and format of what is shown of the trials."""


@dataclass
class Calibration:
    """What [`calibrate`] found."""

    seconds_per_step: float  # a step of Q slots takes so long, and Q times as long as the next
    seconds_per_slot: float
    # A row for each setting: `agreement`, `same` (share of answers that are AR's), `tokens_per_forward`, `speed` (to
    # AR, by counts and slot cost), and `checked`, the agreement on the other prompts, where it was asked for.
    trials: pd.DataFrame
    chosen: str | None = None  # the fastest that is good enough on both parts
    settings: dict[str, Any] = field(default_factory=dict)  # of the chosen one, as the generation config takes them
    # Of AR and of the chosen one on the prompts that it was not picked on, taking turns.
    tokens_per_second: dict[str, float] = field(default_factory=dict)

    @property
    def slot_cost(self) -> float:
        """c, the setting."""
        return self.seconds_per_slot / self.seconds_per_step

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return vars(self) | {"trials": self.trials.reset_index(names="setting").to_dict("records")}


def measure_slot_cost(model: WeDLMForCausalLM, prompt: Sequence[int]) -> tuple[float, float]:
    """Seconds of a step, and of each of its slots, by decoding with several window sizes in turn.

    What a slot costs outside the forward (its entropy, the choice of its token) counts as well.
    """
    steps: list[tuple[int, float]] = []
    length = {"max_new_tokens": COST_TOKENS, "min_new_tokens": COST_TOKENS, "do_sample": False}
    for repeat, window in itertools.product(range(COST_REPEATS + 1), COST_WINDOWS):
        _, _, counter = decode_call(model, None, [list(prompt)], configured(WEDLM, window, 0.0, 0.0) | length)
        if repeat > 0:  # the first turn is a warm-up, and the first forward reads the prompt
            widths = [width for _, width in counter.shapes[1:]]
            steps += zip(widths, np.diff(counter.starts[1:]), strict=False)
    return fit_slot_cost(pd.DataFrame(steps, columns=["width", "seconds"]))


def fit_slot_cost(seconds: pd.DataFrame) -> tuple[float, float]:
    """A line through the median `seconds` of each `width`, which weighs as much as it has steps: its height at 0 and
    its slope."""
    steps = seconds.groupby("width")["seconds"].agg(["median", "size"])
    slot, fixed = np.polyfit(steps.index, steps["median"], 1, w=steps["size"] ** 0.5)
    return max(float(fixed), 1e-9), max(float(slot), 0.0)


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
        request: what is wanted.
        title: shown with a progress bar on standard error, if any.

    Raises:
        ValueError: for fewer than two different prompts.
    """
    picking, checking = split_prompts(prompts)
    settings = request.candidates()
    limits = {"max_new_tokens": request.max_new_tokens, "do_sample": False}
    greedy = {name: options | limits for name, options in settings.items()}
    fixed, slot = measure_slot_cost(model, picking[0].tokens)

    def tried(names: Sequence[str], part: Sequence[Prompt], title: str = "") -> pd.DataFrame:
        rows = []
        for name in track(names, title):
            size = 1 if name.startswith(EXACT) else request.batch_size  # its window adapts to all rows of a batch
            rows += measure(model, tokenizer, part, {name: greedy[name]}, batch_size=size)
        return summarise_trials(model, part, rows, slot / fixed)

    found = Calibration(fixed, slot, tried(list(greedy), picking, title).assign(checked=np.nan))
    most = 1 - request.agreement
    for name in pick(found.trials.drop(index=AR).eval("loss = 1 - agreement"), most, "speed"):
        found.trials.loc[name, "checked"] = agreement = tried([AR, name], checking).loc[name, "agreement"]
        if 1 - agreement <= most + 1e-9:
            both = {decoder: greedy[decoder] for decoder in (AR, name)}
            rows = measure(model, tokenizer, checking, both, repeats=TIMED_REPEATS)
            sums = per_prompt(pd.DataFrame(rows)).sum()
            found.chosen, found.tokens_per_second = name, dict(sums["new_tokens"] / sums["seconds"])
            found.settings = settings[name] | {"slot_cost": round(found.slot_cost, 4)}
            del found.settings["strategy"]  # which one is used stays the caller's choice
            break
    return found


def summarise_trials(
    model: WeDLMForCausalLM, prompts: Sequence[Prompt], rows: Sequence[Mapping[str, Any]], slot_cost: float
) -> pd.DataFrame:
    """A row for each setting, AR among them; see [`Calibration`]."""
    table = mark_same(pd.DataFrame(rows))
    answers = zip(table["prompt"], table["tokens"], strict=True)
    table["agreeing"] = [agreeing_tokens(model, prompts[index].tokens, tokens) for index, tokens in answers]
    groups = table.groupby("decoder", sort=False)
    sums = groups[["agreeing", "new_tokens", "forwards", "token_instances"]].sum()
    seconds = (sums["forwards"] + slot_cost * sums["token_instances"]) / sums["new_tokens"]
    return pd.DataFrame(
        {
            "agreement": sums["agreeing"] / sums["new_tokens"],
            "same": groups["same"].mean(),
            "tokens_per_forward": rates(sums)["tokens_per_forward"],
            "speed": seconds[AR] / seconds,
        }
    )


def show(found: Calibration, agreement: float, console: Console) -> None:
    """Print the slot cost, the trials and the outcome. The trials are AR, the settings that no other one beats in both
    agreement and speed, and those that were checked."""
    console.print(
        f"A step takes {1000 * found.seconds_per_step:.3f} ms and {1000 * found.seconds_per_slot:.4f} ms for each "
        f"slot: slot_cost = {found.slot_cost:.2g}.",
        highlight=False,
    )
    trials = found.trials[~beaten(found.trials[["agreement", "speed"]]) | found.trials["checked"].notna()]
    columns = (Column(title, justify="right", no_wrap=True) for title, _ in COLUMNS.values())
    table = Table("setting", *columns, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in [AR, *trials.drop(index=AR, errors="ignore").sort_values("speed", ascending=False).index]:
        trial = found.trials.loc[name]
        cells = ("" if pd.isna(trial[key]) else form.format(trial[key]) for key, (_, form) in COLUMNS.items())
        style = "bold" if name == found.chosen else "" if trial["agreement"] >= agreement else "dim"
        table.add_row(name, *cells, style=style)
    console.print(table)
    outcome = f"No setting agrees with AR on {100 * agreement:g} % of the tokens."
    if found.chosen is not None:
        own, ar = (found.tokens_per_second[name] for name in (found.chosen, AR))
        outcome = (
            f"Chosen: {found.chosen}. On the prompts that it was not picked on: {own:,.0f} tokens/s, "
            f"AR {ar:,.0f}, {own / ar:.2f}×."
        )
    console.print(outcome, highlight=False)
