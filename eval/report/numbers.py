"""What a report makes of its table: summaries by decoder, task, batch size and setting, all with pandas."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from ...modeling_wedlm import WeDLMForCausalLM
from ..decoders import AR, DRAFT_THRESHOLD, EXACT, FIELDS
from ..measure import ar_logits
from ..prompts import Prompt
from ..table import COUNTED, TIMED, by_depth, mark_same, summarise, summarise_tasks


@dataclass(frozen=True)
class Numbers:
    """All that is shown."""

    headline: pd.DataFrame  # a row for each decoder: the metrics and their standard errors (`…_error`)
    tasks: pd.DataFrame  # metrics; index (decoder, task)
    batches: pd.DataFrame  # by (batch_size, decoder): speed, own cost, seconds to the first token, CUDA memory
    depths: pd.DataFrame  # of each decoder that tells, how many drafts were `drafted` and `accepted` at each `depth`
    sweep: pd.DataFrame  # a row for each setting (see [`sweep_numbers`]); empty if none were tried
    differences: list[dict[str, float]]  # of verified greedy answers that are not AR's (see [`find_differences`])
    table: pd.DataFrame  # the rows that all of this is made of

    @classmethod
    def of(
        cls,
        sweep_table: pd.DataFrame,
        sweep: pd.DataFrame,
        table: pd.DataFrame,
        prompts: Sequence[Prompt],
        model: WeDLMForCausalLM,
        is_greedy: bool = True,
    ) -> "Numbers":
        """From the rows of both parts; `prompts` are the headline's. Samples are not compared with AR's."""
        quality, alone = mark_same(table[table["kind"] == "quality"]), _alone(table)
        tasks = summarise_tasks(quality, COUNTED).join(summarise_tasks(alone, TIMED))

        def compared(frame: pd.DataFrame) -> pd.DataFrame:
            names = [] if is_greedy else [name for name in ("same", "same_error") if name in frame]
            return frame.assign(**dict.fromkeys(names, np.nan))

        return cls(
            headline=compared(_summary(quality, alone)),
            tasks=compared(tasks),
            batches=compared(_by_batch_size(table)),
            depths=by_depth(quality),
            sweep=compared(sweep),
            differences=find_differences(quality, prompts, model) if is_greedy else [],
            table=pd.concat([sweep_table, table]).drop(columns=["tokens", "drafted_by_depth", "accepted_by_depth"]),
        )

    def as_json(self) -> dict[str, Any]:
        """All but the rows."""
        frames = {name: frame for name, frame in vars(self).items() if name not in ("table", "differences")}
        made = {name: json.loads(frame.reset_index().to_json(orient="records")) for name, frame in frames.items()}
        return made | {"differences": self.differences}


def sweep_numbers(table: pd.DataFrame, settings: pd.DataFrame) -> pd.DataFrame:
    """A row for each of the settings (see [`settings_table`]) of a sweep: these, the metrics with standard errors,
    `loss` (points of quality lost to AR, on the task that loses most) and `on_front`: no other setting is as good in
    quality and in speed, and better in one."""
    quality = mark_same(table[table["kind"] == "quality"])
    summary = settings.join(_summary(quality, _alone(table)))
    by_task = summarise_tasks(quality, ["quality"])["quality"].unstack("task")
    summary["loss"] = (100 * (by_task.loc[AR] - by_task)).max(axis=1).round(9)
    summary["on_front"] = ~beaten(summary[["quality", "speed"]])
    return summary


def settings_table(named: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Columns `kind` (of those [`COMPARED`]) and the [`FIELDS`]; indexed by name."""
    named = {name: {FIELDS[1]: each.get(DRAFT_THRESHOLD), **each} for name, each in named.items()}
    table = pd.DataFrame.from_dict(named, orient="index").reindex(columns=["kind", *FIELDS]).rename_axis("decoder")
    return table.assign(kind=table.index.str.split().str[0])


def beaten(points: pd.DataFrame) -> pd.Series:
    """For each row, whether another is as good in every column and better in one."""
    values = points.to_numpy()
    dominates = (values[None] >= values[:, None]).all(-1) & (values[None] > values[:, None]).any(-1)
    return pd.Series(dominates.any(1), index=points.index)


def pick(summary: pd.DataFrame, max_loss: float, by: str) -> list[Any]:
    """The one rule by which settings are chosen: names of those whose `loss` is at most `max_loss`, the greatest `by`
    (another column of the summary) first."""
    good = summary[summary["loss"] <= max_loss + 1e-9]  # but for rounding
    return list(good.sort_values(by, ascending=False, kind="stable").index)


def _alone(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table["kind"] == "speed") & (table["batch_size"] == 1)]


def _summary(quality: pd.DataFrame, timed: pd.DataFrame) -> pd.DataFrame:
    made = summarise(quality, COUNTED).join(summarise(timed, TIMED))
    return made.assign(prompts=quality["prompt"].nunique(), timed=timed["prompt"].nunique())


def _by_batch_size(table: pd.DataFrame) -> pd.DataFrame:
    parts = {}
    for size, rows in table[table["kind"] == "speed"].groupby("batch_size"):
        rows = mark_same(rows)
        own = rows.groupby("decoder")
        seconds, peaks = own["first_token_seconds"].median(), own["peak_bytes"].max().replace(0, np.nan)
        parts[size] = summarise(rows, ["same", "tokens_per_forward", *TIMED])
        parts[size] = parts[size].assign(first_token_seconds=seconds, peak_bytes=peaks)
    return pd.concat(parts, names=["batch_size"])


def find_differences(table: pd.DataFrame, prompts: Sequence[Prompt], model: Any) -> list[dict[str, float]]:
    """Where verified greedy answers (rows with `tokens` and `same`) leave AR's, and how close AR's decision was there:
    in exact arithmetic never, but kernels of another width round differently, so near-ties can fall either way.

    For each answer that differs: `prompt`, `token` (the first new token that does, from 0), `gap` (between AR's two
    best logits there) and `spacing` (of neighbouring numbers of the model's dtype at the best logit).
    """
    reference = table[table["decoder"] == AR].set_index("prompt")["tokens"]
    found = []
    for row in table[(table["decoder"] == EXACT) & ~table["same"]].itertuples():
        wanted, pairs = reference[row.prompt], zip(reference[row.prompt], row.tokens, strict=False)
        place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:  # else one answer is the beginning of the other
            best, second = ar_logits(model, prompts[int(row.prompt)].tokens, wanted)[place].topk(2).values.tolist()
            spacing = torch.finfo(model.dtype).eps * 2.0 ** (math.frexp(best)[1] - 1)
            found.append({"prompt": int(row.prompt), "token": place, "gap": best - second, "spacing": spacing})
    return found
