"""What a mask adapter gives: AR and verified decoding of the same prompts, in turn, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMForCausalLM
from .decoders import AR, DECODERS, EXACT
from .measure import Row, environment, measure
from .prompts import Prompt

COLUMNS = ["decoder", "tokens per forward", "tokens/s", "speed against AR", "answers equal to AR's"]


def measure_adapter(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    repeats: int = 1,
    title: str = "",
) -> dict[str, Any]:
    """Greedy AR and verified decoding, a prompt at a time.

    Args:
        model: in evaluation mode, with its mask adapter.
        tokenizer: the model's.
        prompts: tokens of each.
        max_new_tokens: longest answer.
        repeats: how often each prompt is decoded by each decoder.
        title: shown with a progress bar on standard error, if any.

    Returns:
        `caption`, `columns` and `rows` of a table, and the measured rows as `measured`.
    """
    shared = {"do_sample": False, "max_new_tokens": max_new_tokens, "repetition_penalty": 1.0}
    decoders = {name: {**DECODERS[name], **shared} for name in (AR, EXACT)}
    encoded = [Prompt.of("", tokens=tokens) for tokens in prompts]
    rows = measure(model, tokenizer, encoded, decoders, repeats=repeats, title=title)
    where = environment(model)
    caption = (
        f"{len(prompts)} prompts, one at a time, greedy, at most {max_new_tokens} tokens; {where['dtype']} on "
        f"{where['device']} ({where['processor']}, {where['threads']} threads), torch {where['torch']}."
    )
    return {"caption": caption, "columns": COLUMNS, "rows": _lines(rows), "measured": rows}


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line of the table for each decoder."""
    ar = {(row["prompt"], row["repeat"]): row for row in rows if row["decoder"] == AR}
    lines, ar_speed = [], 0.0
    for name in (AR, EXACT):
        mine = [row for row in rows if row["decoder"] == name]
        tokens = sum(row["new_tokens"] for row in mine)
        speed = tokens / sum(row["seconds"] for row in mine)
        ar_speed = ar_speed or speed
        same = sum(row["tokens"] == ar[row["prompt"], row["repeat"]]["tokens"] for row in mine)
        lines.append(
            [
                name,
                f"{tokens / sum(row['forwards'] for row in mine):.2f}",
                f"{speed:.1f}",
                f"{speed / ar_speed:.2f}x",
                f"{same} of {len(mine)}",
            ]
        )
    return lines
