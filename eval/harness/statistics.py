"""What decoding and likelihoods cost and gave, by task: made of a record for each answer, and shown as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from ...generation.settings import WeDLMGenerationSettings
from ..measure import rates

COUNTS = ("new_tokens", "forwards", "token_instances")

Columns = Mapping[str, tuple[str, str]]
"""Title and format of each column that is shown."""

_DECODING: Columns = {
    "prompts": ("prompts", ",.0f"),
    "new_tokens": ("tokens", ",.0f"),
    "forwards": ("forwards", ",.0f"),
    "tokens_per_forward": ("tokens/forward", ".2f"),
    "prefix_cacheability": ("cacheability", ".2f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
}
_LIKELIHOOD: Columns = {
    "requests": ("requests", ",.0f"),
    "tokens": ("tokens", ",.0f"),
    "elbo_per_token": ("ELBO", ".4f"),
    "elbo_per_token_standard_error": ("standard error", ".4f"),
    "ar_per_token": ("AR head", ".4f"),
}


def by_task(records: Sequence[Mapping[str, Any]], statistics: Callable[[Any], pd.DataFrame]) -> dict[str, Any]:
    """Statistics of all records together and of those of each task."""
    table = pd.DataFrame(records)
    pooled, tasks = (
        statistics(rows.groupby("task", sort=False)).to_dict("index") for rows in (table.assign(task=""), table)
    )
    return {"pooled": pooled[""], "tasks": tasks}


def decoding_statistics(groups: Any) -> pd.DataFrame:
    """A row for each group: sums over its prompts, and what follows from them."""
    sums = groups[[*COUNTS, "seconds"]].sum()
    return sums.assign(prompts=groups.size(), **rates(sums))


def likelihood_statistics(groups: Any) -> pd.DataFrame:
    """A row for each group: sums over its requests, nats, and nats a token."""
    sums = groups[["requests", "tokens", "elbo", "variance", "ar"]].sum()
    sums["elbo_standard_error"] = sums.pop("variance") ** 0.5
    names = ["elbo", "elbo_standard_error", "ar"]
    per_token = sums[names].div(sums["tokens"], axis=0)
    titles = ["elbo_per_token", "elbo_per_token_standard_error", "ar_per_token"]
    return sums.join(per_token.set_axis(titles, axis=1))


def show(results: Mapping[str, Any]) -> None:
    """Prints the statistics of decoding and of likelihoods as Markdown tables, like the harness' own."""
    config = results["config"]
    if statistics := config.get("decoding_statistics"):
        decoding = config["decoding"]
        is_one = "strategy" in decoding
        words = _in_words(WeDLMGenerationSettings(**decoding)) if is_one else "each task with settings of its own"
        print(f"Decoding: {words}\n{_markdown(statistics, _DECODING)}")
    if "tasks" in (elbo := config.get("likelihood", {})):
        title = f"Block ELBO: {elbo['samples']} samples, B = {elbo['block_size']}, seed {elbo['seed']}; nats a token"
        print(f"{title}\n{_markdown(elbo, _LIKELIHOOD)}")


def _markdown(statistics: Mapping[str, Any], columns: Columns) -> str:
    table = pd.DataFrame.from_dict({**statistics["tasks"], "all": statistics["pooled"]}, orient="index")
    titles, formats = zip(*columns.values(), strict=True)
    shown = table[[*columns]].astype(float).set_axis(titles, axis=1).rename_axis("task")
    return str(shown.to_markdown(floatfmt=("", *formats)))


def _in_words(settings: WeDLMGenerationSettings) -> str:
    if settings.strategy == "ar":
        return "strategy ar"
    return (
        f"strategy {settings.strategy}, verification {settings.verification}, "
        f"W {'up to' if settings.is_adaptive else '='} {settings.window_size}, "
        f"τ = {settings.entropy_threshold:g}, λ = {settings.distance_penalty:g}"
    )
