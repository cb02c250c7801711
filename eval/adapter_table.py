"""What a mask adapter gives, beside AR decoding and what transformers offers without an adapter: on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMForCausalLM
from .decoders import AR, COMPARED, EXACT, LOOKUP
from .measure import environment, measure, rates
from .prompts import Prompt
from .table import mark_same

COLUMNS = ["decoder", "tokens per forward", "tokens/s", "speed against AR", "answers equal to AR's"]


def measure_adapter(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt | Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    batch_size: int = 1,
    title: str = "",
) -> dict[str, Any]:
    """AR, transformers' prompt lookup and verified decoding of the same prompts, in turn.

    Args:
        model: in evaluation mode, with its mask adapter.
        tokenizer: the model's.
        prompts: with their tokens, or these alone.
        max_new_tokens: longest answer.
        temperature: of sampling; greedy by default.
        batch_size: prompts of one task decoded together; prompt lookup takes one at a time and is left out of others.
        title: shown with a progress bar on standard error, if any.

    Returns:
        `caption`, `columns` and `rows` of a table; `tasks`, the same rows for each task; `depths`, of verified
        decoding the share of drafts that passed at each place of a run; and the measured rows as `measured`.
    """
    is_greedy = temperature is None
    shared = {"max_new_tokens": max_new_tokens, "repetition_penalty": 1.0, "do_sample": not is_greedy}
    shared |= {} if temperature is None else {"temperature": temperature}
    names = (AR, *[LOOKUP] * (batch_size == 1), EXACT)
    decoders = {name: {**COMPARED[name], **shared} for name in names}
    encoded = [one if isinstance(one, Prompt) else Prompt.of("", tokens=one) for one in prompts]
    rows = measure(model, tokenizer, encoded, decoders, batch_size=batch_size, title=title)
    table, where = pd.DataFrame(rows), environment(model)
    together = "one at a time" if batch_size == 1 else f"{batch_size} at a time"
    drafted, accepted = (
        pd.DataFrame(
            dict(enumerate(counts)) for counts in table.loc[table["decoder"] == EXACT, f"{kind}_by_depth"]
        ).sum()
        for kind in ("drafted", "accepted")
    )
    return {
        "caption": f"{len(prompts)} prompts, {together}, {'greedy' if is_greedy else f'temperature {temperature:g}'}, "
        f"at most {max_new_tokens} tokens; {where['dtype']} on {where['device']} ({where['processor']}, "
        f"{where['threads']} threads), torch {where['torch']}.",
        "columns": COLUMNS,
        "rows": _lines(table, is_greedy),
        "tasks": {str(task): _lines(own, is_greedy) for task, own in table.groupby("task", sort=False)},
        "depths": (accepted / drafted).tolist(),
        "measured": rows,
    }


def _lines(table: pd.DataFrame, is_greedy: bool) -> list[list[str]]:
    """A line of the table for each decoder."""
    names = ["new_tokens", "forwards", "token_instances", "seconds", "same"]
    sums = mark_same(table).groupby("decoder", sort=False)[names].sum()
    sums = sums.assign(**rates(sums))
    count, reference = table["prompt"].nunique(), sums.loc[AR, "tokens_per_second"]
    return [
        [
            str(line.Index),
            f"{line.tokens_per_forward:.2f}",
            f"{line.tokens_per_second:.1f}",
            f"{line.tokens_per_second / reference:.2f}x",
            f"{line.same:.0f} of {count}" if is_greedy else "another draw",
        ]
        for line in sums.itertuples()
    ]
