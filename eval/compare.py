"""Decoders side by side: how many answers are right, how many tokens a forward and a second give."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMForCausalLM
from .decoders import AR, BLOCK, LOOKUP, WEDLM, Options, decoder_of
from .measure import measure
from .metrics import judge
from .prompts import Prompt, encode_prompt
from .table import summarise

SHOWN = {"right": "quality", "tokens_per_forward": "tokens_per_forward", "tokens_per_second": "tokens_per_second"}
LEAST_LOSS = 0.02  # of right answers: what is lost below that is no reason to say something


def compare(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    decoders: Mapping[str, Options],
    *,
    metric: str | None = None,
    batch_size: int = 1,
    repeats: int = 1,
    title: str = "",
) -> list[dict[str, Any]]:
    """Decode all prompts with each decoder in turn, in one process, as [`measure`] does.

    Args:
        model: what decodes.
        prompts: with the answers that are right; those without tokens get them by the chat template.
        decoders: keywords of `generate` by name; `model` among them is another model with the same tokenizer.
        metric: what decides how right a reply is (see [`judge`]); default: each prompt's own rule.
        batch_size: prompts of one task that are decoded together.
        repeats: times are medians of so many.
        title: of a progress bar on standard error.

    Returns:
        For each decoder: `decoder`, `right` (0 to 1; `None` where no answers are known), `tokens_per_forward`,
        `tokens_per_second`, the standard errors over prompts of these three (`…_error`; `None` for fewer than six
        prompts), and `advice`: why the row is worse than AR decoding and what to do, if it is.

    Raises:
        ValueError: for a metric that cannot judge, before anything is decoded; for prompts that leave no room for an
            answer, and for what `generate` refuses.
    """
    asked = judged_by(metric, prompts)
    encoded = [prompt if prompt.tokens else encode_prompt(model, tokenizer, prompt) for prompt in asked]
    measured = measure(model, tokenizer, encoded, decoders, batch_size=batch_size, repeats=repeats, title=title)
    table = pd.DataFrame(measured)
    found = summarise(table.assign(quality=table["right"].astype(float)), list(SHOWN.values()))
    said = advice(found, {name: {"model": model, **options} for name, options in decoders.items()})
    columns = {f"{shown}{end}": found[f"{name}{end}"] for shown, name in SHOWN.items() for end in ("", "_error")}
    rows = pd.DataFrame(columns).astype(object).where(lambda values: values.notna(), None)
    return [{"decoder": str(name), **row.to_dict(), "advice": said[str(name)]} for name, row in rows.iterrows()]


def judged_by(metric: str | None, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, with another rule by which replies are right. Raises `ValueError` for one that cannot judge."""
    if metric is None:
        return list(prompts)
    judge(metric)
    if not all(prompt.answers for prompt in prompts):
        raise ValueError(f"`metric={metric!r}` needs an `answer` to each prompt to compare replies with.")
    return [replace(prompt, match=metric) for prompt in prompts]


def advice(found: pd.DataFrame, decoders: Mapping[str, Options]) -> dict[str, str]:
    """For each decoder, why unverified decoding is wrong or slow and what to do; empty where it is neither, and where
    there is no AR decoding of the same model beside it. `found` is a [`summarise`] with quality and speeds, `decoders`
    are keywords of `generate`, `model` among them."""
    kinds = {name: _kind(options) for name, options in decoders.items()}
    ar = {decoders[name]["model"]: found.loc[name] for name in reversed(kinds) if kinds[name] == AR}
    return {
        name: _advice(found.loc[name], ar[options["model"]])
        if kinds[name] in (WEDLM, BLOCK) and options["model"] in ar
        else ""
        for name, options in decoders.items()
    }


def _kind(options: Options) -> str:
    """Which of the decoders these keywords mean; what they leave open is as the model's generation config says."""
    if "prompt_lookup_num_tokens" in options:
        return LOOKUP
    stored = getattr(options["model"].generation_config, "strategy", None)
    return decoder_of({"strategy": stored or AR, **options}, options["model"])


def _advice(own: Mapping[str, float], ar: Mapping[str, float]) -> str:
    said, lost = [], ar["quality"] - own["quality"]
    spread = own["quality_error"]
    if lost > max(LEAST_LOSS, 2 * spread if spread == spread else 0):  # a NaN differs from itself
        said.append(
            f"{100 * lost:.0f} points below AR: the masks, which learn later than the AR head, do not know this task "
            "yet. Decode with `verification='exact'`, which gives AR's answers; or train longer; or lower "
            "`entropy_threshold`."
        )
    if own["tokens_per_forward"] < 1.05:
        said.append(
            f"{own['tokens_per_forward']:.2f} tokens per forward gain nothing over AR: the masks are seldom sure. "
            "Train longer, or raise `entropy_threshold` and lower `distance_penalty` at the price of right answers."
        )
    elif own["tokens_per_second"] < ar["tokens_per_second"]:
        said.append(
            "Slower than AR though it has fewer forwards: rows are dear on this machine. Try a smaller `window_size`, "
            "or packed weights on a CPU."
        )
    return " ".join(said)
