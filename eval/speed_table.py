"""The table of a report without the report: AR, prompt lookup and verified decoding of the same prompts, in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMForCausalLM
from .decoders import AR, COMPARED, EXACT, LOOKUP
from .measure import Measured, environment, measure
from .prompts import Prompt
from .speed import MOST_TURNS
from .table import TITLES, cells, mark_same, summarise

COLUMNS = ["tokens_per_forward", "tokens_per_second", "speed", "same"]


def speed_table(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt | Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    batch_size: int = 1,
    title: str = "",
    others: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Decodes the prompts with each decoder in turn, and again while a speed is above the tokens per forward, at most
    five times.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        prompts: with their tokens, or these alone.
        max_new_tokens: longest answer.
        temperature: of sampling; greedy by default.
        batch_size: prompts of one task decoded together; prompt lookup takes one at a time and is left out of others.
        title: shown with a progress bar on standard error, if any.
        others: models by name, such as this one in other dtypes, whose plain `generate` takes its turn as well.

    Returns:
        `caption`, `columns` and `rows` of a table; `tokens_per_second` of each decoder; `depths`, the share of
        verified decoding's drafts that passed at each depth; and the measurements as `measured`.
    """
    is_greedy = temperature is None
    shared = {"max_new_tokens": max_new_tokens, "repetition_penalty": 1.0, "do_sample": not is_greedy}
    shared |= {} if temperature is None else {"temperature": temperature}
    names = (AR, *[LOOKUP] * (batch_size == 1), EXACT)
    decoders = {name: {"model": other, **shared} for name, other in (others or {}).items()}
    decoders |= {name: {**COMPARED[name], **shared} for name in names}
    encoded = [one if isinstance(one, Prompt) else Prompt.of("", tokens=one) for one in prompts]
    measured: list[Measured] = []
    for repeat in range(MOST_TURNS):
        turn = measure(model, tokenizer, encoded, decoders, batch_size=batch_size, title=title)
        measured += [line | {"repeat": repeat} for line in turn]
        found = summarise(mark_same(pd.DataFrame(measured)), COLUMNS)
        if not (found["speed"] > found["tokens_per_forward"] + 1e-9).any():
            break
    texts, where = cells(found, COLUMNS if is_greedy else COLUMNS[:-1]), environment(model)
    together = "one at a time" if batch_size == 1 else f"{batch_size} at a time"
    own = [line for line in measured if line["decoder"] == EXACT]
    drafted, accepted = (
        pd.DataFrame(dict(enumerate(line[f"{kind}_by_depth"])) for line in own).sum()
        for kind in ("drafted", "accepted")
    )
    return {
        "caption": f"{len(prompts)} prompts, {together}, {'greedy' if is_greedy else f'temperature {temperature:g}'}, "
        f"at most {max_new_tokens} tokens; {where['dtype']} on {where['device']} ({where['processor']}, "
        f"{where['kernels']}, {where['threads']} threads), torch {where['torch']}.",
        "columns": ["decoder", *(TITLES[name] for name in texts)],
        "rows": [[str(name), *line] for name, line in zip(texts.index, texts.to_numpy().tolist(), strict=True)],
        "tokens_per_second": found["tokens_per_second"].to_dict(),
        "depths": (accepted / drafted).tolist(),
        "measured": measured,
    }
