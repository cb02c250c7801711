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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMForCausalLM
from .decoders import AR, EXACT, WEDLM, Options
from .measure import ForwardCounter, agreeing_tokens, decode, measure, without_end_token
from .prompts import LONGEST_ANSWER, Prompt, split_prompts
from .sweep import Grid, configured, pick
from .table import per_prompt

TIMED_REPEATS = 5
# How the slot cost is measured: so many tokens, one a step, with windows of these sizes.
COST_WINDOWS, COST_TOKENS, COST_REPEATS = (1, 4, 8, 16, 24), 32, 3


@dataclass(frozen=True)
class CalibrationRequest:
    """What to look for, and where.

    Attributes:
        agreement: wanted, above 0, at most 1.
        grid: settings to try.
        max_new_tokens: of each answer.
        batch_size: prompts decoded together where settings are compared; verified decoding gets one at a time, for
            its window adapts to all rows of a batch.

    Raises:
        ValueError: for a wanted agreement that is out of range.
    """

    agreement: float = 0.99
    grid: Grid = field(
        default_factory=lambda: Grid((4, 8, 16), (0.1, 0.2, 0.4, 0.8), (0.02, 0.1), (0.4, 1.0), (WEDLM, EXACT))
    )
    max_new_tokens: int = LONGEST_ANSWER
    batch_size: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.agreement <= 1:
            raise ValueError(f"The wanted agreement must be above 0 and at most 1, got {self.agreement}.")

    def with_grid(self, **values: Sequence[Any]) -> CalibrationRequest:
        """The same with other values in the grid."""
        return replace(self, grid=replace(self.grid, **values))


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
    with without_end_token(model):
        for repeat, window in itertools.product(range(COST_REPEATS + 1), COST_WINDOWS):
            options = {**configured(WEDLM, window, 0.0, 0.0), "max_new_tokens": COST_TOKENS, "do_sample": False}
            with ForwardCounter(model) as counter:
                decode(model, None, [list(prompt)], options)
            if repeat == 0:
                continue  # a warm-up
            widths = [width for _, width in counter.shapes]
            # Without the prefill.
            steps += zip(widths[1:], np.diff(counter.starts[1:]), strict=False)
    return SlotCost.fit(pd.DataFrame(steps, columns=["width", "seconds"]))


def calibrate(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    request: CalibrationRequest,
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
    cost = measure_slot_cost(model, picking[0].tokens)
    limits: Options = {"max_new_tokens": request.max_new_tokens, "do_sample": False}
    candidates = {name: {**options, **limits} for name, options in request.grid.candidates().items()}

    def tried(names: Sequence[str], part: Sequence[Prompt], title: str = "") -> pd.DataFrame:
        rows = []
        for name in track(names, title, console=Console(stderr=True), disable=not title):
            size = 1 if name.startswith(EXACT) else request.batch_size
            rows += measure(model, tokenizer, part, {name: candidates[name]}, batch_size=size)
        return summarise_trials(model, part, rows, cost)

    trials = tried(list(candidates), picking, title).assign(checked=np.nan)
    chosen, speeds = None, {}
    wanted = 1 - request.agreement
    for name in pick(trials.drop(index=AR).eval("loss = 1 - agreement"), wanted, "speed"):
        trials.loc[name, "checked"] = tried([AR, name], checking).loc[name, "agreement"]
        if 1 - trials.loc[name, "checked"] <= wanted + 1e-9:
            chosen = name
            break
    if chosen is not None:
        both = {name: candidates[name] for name in (AR, chosen)}
        sums = per_prompt(pd.DataFrame(measure(model, tokenizer, checking, both, repeats=TIMED_REPEATS))).sum()
        speeds = dict(sums["new_tokens"] / sums["seconds"])
    settings = {} if chosen is None else {**request.grid.candidates()[chosen], "slot_cost": round(cost.relative, 4)}
    settings.pop("strategy", None)
    return Calibration(cost, trials, chosen, settings, speeds)


def summarise_trials(
    model: WeDLMForCausalLM, prompts: Sequence[Prompt], rows: Sequence[Mapping[str, Any]], cost: SlotCost
) -> pd.DataFrame:
    """A row for each setting, AR among them; see [`Calibration`]."""
    table = pd.DataFrame(rows)
    table["agreeing"] = [
        agreeing_tokens(model, prompts[row["prompt"]].tokens, row["tokens"]) for row in table.to_dict("records")
    ]
    reference = table[table["decoder"] == AR].set_index("prompt")["tokens"]
    table["same"] = [row.tokens == reference[row.prompt] for row in table.itertuples()]
    sums = table.groupby("decoder", sort=False)[["agreeing", "new_tokens", "forwards", "token_instances"]].sum()
    seconds = (sums["forwards"] + cost.relative * sums["token_instances"]) / sums["new_tokens"]
    return pd.DataFrame(
        {
            "agreement": sums["agreeing"] / sums["new_tokens"],
            "same": table.groupby("decoder", sort=False)["same"].mean(),
            "tokens_per_forward": sums["new_tokens"] / sums["forwards"],
            "speed": seconds[AR] / seconds,
        }
    )


def trials_table(found: Calibration, agreement: float) -> Table:
    """AR, the settings that no other one beats in both agreement and speed, and those that were checked."""
    trials = found.trials
    points = trials[["agreement", "speed"]].to_numpy()
    beaten = ((points[None] >= points[:, None]).all(-1) & (points[None] > points[:, None]).any(-1)).any(1)
    shown = trials[~beaten | trials["checked"].notna() | (trials.index == AR)].sort_values("speed", ascending=False)
    rows = Table("setting", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("agreement", "checked", "same answers", "tok/fwd", "speed to AR"):
        rows.add_column(name, justify="right", no_wrap=True)
    for name, trial in sorted(shown.iterrows(), key=lambda item: item[0] != AR):
        rows.add_row(
            str(name),
            f"{trial['agreement']:.2%}",
            "" if pd.isna(trial["checked"]) else f"{trial['checked']:.2%}",
            f"{trial['same']:.0%}",
            f"{trial['tokens_per_forward']:.2f}",
            f"{trial['speed']:.2f}×",
            style="bold" if name == found.chosen else "" if trial["agreement"] >= agreement else "dim",
        )
    return rows


def show(found: Calibration, agreement: float, console: Console) -> None:
    """Print what was found."""
    cost = found.cost
    console.print(
        f"A step takes {1000 * cost.fixed:.3f} ms and {1000 * cost.slot:.4f} ms for each slot: "
        f"slot_cost = {cost.relative:.2g}.",
        highlight=False,
    )
    console.print(trials_table(found, agreement))
    if found.chosen is None:
        console.print(f"No setting agrees with AR on {100 * agreement:g} % of the tokens.", highlight=False)
        return
    chosen, ar = (found.tokens_per_second[name] for name in (found.chosen, AR))
    console.print(
        f"Chosen: {found.chosen}. On the prompts that it was not picked on: {chosen:,.0f} tokens/s, AR {ar:,.0f}, "
        f"{chosen / ar:.2f}×.",
        highlight=False,
    )
