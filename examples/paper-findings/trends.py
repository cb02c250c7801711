"""What of the paper's findings on decoding a model shows: effects of τ and λ (Fig. 4a-b), streaming against block-wise
decoding (Fig. 4c), speed by entropy of the text (§6.6).

    python examples/paper-findings/trends.py                                       # wedlm-nano and its prompts
    python examples/paper-findings/trends.py --model my-wedlm --file data.jsonl --windows 16

Decodes prompts with all settings in turn, and prints a Markdown table. Differences are
between decoders on the same prompts (bootstrap over prompts, Student's t); "clearly" is at 95 %, for single pairs over
all of them together (Bonferroni).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from scipy import stats

from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.checkpoints import NANO
from wedlm_hf.eval.decoders import AR, BLOCK, EXACT, WEDLM, candidates
from wedlm_hf.eval.measure import answer_entropy, default_threads, measure
from wedlm_hf.eval.prompts import encode_prompt, read_prompts, read_tasks
from wedlm_hf.eval.table import LEAST_PROMPTS, RESAMPLES, resample, standard_error

HOLDS, LARGELY, MIXED, OPEN, FAILS, MISSING = (
    "holds",
    "holds on average",
    "mixed",
    "not decided",
    "does not hold",
    "not measured",
)
SEVERAL = 2.0
Pair = tuple[str, str]
"""Two settings, the first of which should have more."""


@dataclass(frozen=True)
class Metric:
    """What two settings are compared by: a column of the resampled metrics, and their difference in `unit`."""

    words: str
    column: str
    difference: Callable[[pd.Series, pd.Series], pd.Series]
    unit: str


QUALITY = Metric("quality", "quality", lambda a, b: 100 * (a - b), " points")
FORWARDS = Metric("tokens per forward", "tokens_per_forward", lambda a, b: 100 * np.log(a / b), " %")
CLOCK = Metric("tokens/s", "tokens_per_second", lambda a, b: 100 * np.log(a / b), " %")
CACHE = Metric("prefix cacheability", "prefix_cacheability", lambda a, b: 100 * (a - b), " points")


def check(table: pd.DataFrame, claim: str, metric: Metric, pairs: Sequence[Pair]) -> dict[str, str]:
    """Whether in every pair the first setting has more than the second.

    *holds*: clearly so in every pair. *holds on average*: the mean difference is clearly so, no pair is clearly
    against it. *mixed*: the mean is, but a pair is against it. *does not hold*: the mean is clearly against it, or
    there is no difference at all. *not decided*: anything else.
    """
    row = {"what the paper reports": claim, "by": metric.words}
    if not pairs:
        return row | {"here": MISSING, "numbers": "No two settings show it."}
    count, made = table["prompt"].nunique(), resample(table)[metric.column]
    differences = pd.DataFrame({str(pair): metric.difference(made[pair[0]], made[pair[1]]) for pair in pairs})
    together = differences.mean(axis=1)
    critical = stats.t.ppf(1 - 0.025 / len(pairs), count - 1)
    signs = [_sign(differences[name], critical, count, len(pairs)) for name in differences]
    usual, error = stats.t.ppf(0.975, count - 1), standard_error(together, count)
    overall = _sign(together, usual, count, 1)
    if np.isnan(error):
        verdict = OPEN
    elif overall == 1:
        verdict = MIXED if -1 in signs else HOLDS if set(signs) == {1} else LARGELY
    else:
        verdict = OPEN if overall == 0 else FAILS
    numbers = f"{together.iloc[0]:+.1f}{metric.unit} on average"
    numbers += f"; fewer than {LEAST_PROMPTS} prompts" if np.isnan(error) else f" (± {usual * error:.1f})"
    words = {1: "clearly for it", -1: "clearly against it", 0: "within the noise", None: "with no difference at all"}
    counts = [f"{signs.count(sign)} {word}" for sign, word in words.items() if signs.count(sign)]
    return row | {"here": verdict, "numbers": f"{numbers}; of {len(pairs)} comparisons {', '.join(counts)}"}


def _sign(resampled: pd.Series, critical: float, count: int, comparisons: int) -> int | None:
    """1: clearly more; −1: clearly less; 0: within the noise; `None`: no difference at all."""
    difference, error = resampled.iloc[0], standard_error(resampled, count)
    if difference == 0 and error == 0:
        return None
    if not abs(difference) > critical * error:
        return 0
    if error == 0 and 2.0 ** (1 - count) >= 0.05 / comparisons:  # all prompts alike: no more than a test of signs
        return 0
    return 1 if difference > 0 else -1


def pairs_of(settings: pd.DataFrame) -> dict[str, list[Pair]]:
    """The pairs that the claims are about.

    Args:
        settings: columns `kind`, `W`, `τ` and `λ`; indexed by name.
    """
    found: dict[str, list[Pair]] = {"accurate": [], "slow": [], "streaming": [], "penalised": []}
    names = {tuple(row): name for name, row in settings[["kind", "W", "τ", "λ"]].iterrows()}
    for (kind, window, tau, penalty), name in names.items():
        if kind != WEDLM:
            continue
        higher = [key for key in names if key[:2] == (kind, window) and key[3] == penalty and key[2] > tau]
        if higher:
            following = names[min(higher, key=lambda key: key[2])]
            found["accurate"].append((name, following))
            found["slow"].append((following, name))
        if (block := names.get((BLOCK, window, tau, penalty))) is not None:
            found["streaming"].append((name, block))
        if penalty > 0 and (free := names.get((WEDLM, window, tau, 0.0))) is not None:
            found["penalised"].append((name, free))
    return found


def check_entropy(table: pd.DataFrame, decoder: str) -> list[dict[str, str]]:
    """Sets the third of the prompts with the least entropy against the third with the most, by tokens per forward and
    by speed against AR."""
    ar, own = (table[table["decoder"] == name].set_index("prompt") for name in (AR, decoder))
    entropy = ar["entropy"]
    speed = (ar["seconds"] / ar["new_tokens"]) / (own["seconds"] / own["new_tokens"])
    counts = pd.DataFrame({"entropy": entropy, "above": own["new_tokens"], "below": own["forwards"]})
    clock = pd.DataFrame({"entropy": entropy.loc[speed.index], "above": speed, "below": 1.0})
    return [
        _compare_thirds(counts, f"tokens per forward, {decoder}", ""),
        _compare_thirds(clock, f"speed against AR, {decoder}", "×"),
    ]


def _compare_thirds(prompts: pd.DataFrame, words: str, unit: str) -> dict[str, str]:
    """Compares Σ above / Σ below of the thirds."""
    claim = f"Low-entropy text decodes several times (≥ {SEVERAL:g}×) faster than high-entropy text"
    row = {"what the paper reports": claim, "by": words}
    third = len(prompts) // 3
    if third < LEAST_PROMPTS or prompts["entropy"].nunique() == 1:
        needed = f"It takes {3 * LEAST_PROMPTS} prompts of different entropy"
        return row | {"here": MISSING, "numbers": f"{needed}, there are {prompts['entropy'].nunique()}."}
    ordered = prompts.sort_values("entropy", kind="stable")
    parts = [ordered.iloc[:third], ordered.iloc[-third:]]
    rng, speeds = np.random.default_rng(0), []
    for part in parts:
        drawn = rng.multinomial(third, np.full(third, 1 / third), size=RESAMPLES)
        weights = np.vstack([np.ones(third), drawn])
        speeds.append((weights @ part["above"]) / (weights @ part["below"]))
    ratio = speeds[0] / speeds[1]
    low, high = np.quantile(ratio[1:], [0.025, 0.975])
    correlation = stats.spearmanr(prompts["entropy"], prompts["above"] / prompts["below"]).statistic
    means = [part["entropy"].mean() for part in parts]
    return row | {
        "here": HOLDS if low >= SEVERAL else FAILS if high < SEVERAL else OPEN,
        "numbers": f"{speeds[0][0]:.2f}{unit} in the third with the least entropy ({means[0]:.2g} nats), "
        f"{speeds[1][0]:.2f}{unit} in the third with the most ({means[1]:.2g} nats): {ratio[0]:.2f} times as fast "
        f"(95 %: {low:.2f} to {high:.2f}); rank correlation {correlation:+.2f} over {len(prompts)} prompts",
    }


def trends(table: pd.DataFrame) -> pd.DataFrame:
    """All checks of rows of [`measure`] with `quality` and AR's `entropy`; decoders are named by their settings."""
    names = pd.Series(table["decoder"].unique())
    form = r"^(?P<kind>\S+)(?: W=(?P<W>\S+))?(?: τ=(?P<τ>\S+))?(?: λ=(?P<λ>\S+))?$"
    settings = names.str.extract(form).set_index(names)
    settings[["W", "τ", "λ"]] = settings[["W", "τ", "λ"]].astype(float)
    pairs = pairs_of(settings)
    cacheability = check(table, "λ > 0 raises prefix cacheability", CACHE, pairs["penalised"])
    if pairs["penalised"]:  # at the same τ, λ also takes fills away, and masks that wait are processed again
        also = check(table, "", FORWARDS, pairs["penalised"])
        cacheability["numbers"] += f"; tokens per forward {also['numbers']}"
    rows = [
        check(table, "Lower τ is more accurate", QUALITY, pairs["accurate"]),
        check(table, "Lower τ is slower", FORWARDS, pairs["slow"]),
        check(table, "Lower τ is slower", CLOCK, pairs["slow"]),
        check(table, "Streaming is faster than block-wise at every τ", FORWARDS, pairs["streaming"]),
        check(table, "Streaming is faster than block-wise at every τ", CLOCK, pairs["streaming"]),
        cacheability,
    ]
    fastest = settings.index[settings["kind"] == WEDLM][:1]
    for decoder in (EXACT, *fastest):
        rows += check_entropy(table, decoder)
    return pd.DataFrame(rows)


def main(
    model: str = str(NANO),
    file: Path | None = None,
    count: Annotated[int, typer.Option(help="Prompts of each task.")] = 30,
    windows: Annotated[list[int], typer.Option(help="W to try, slots; may be repeated.")] = [6, 16],  # noqa: B006
    thresholds: Annotated[list[float], typer.Option(help="τ to try, nats.")] = [0.1, 0.2, 0.4, 0.6, 0.8, 1.0],  # noqa: B006
    penalties: Annotated[list[float], typer.Option(help="λ to try, nats per position.")] = [0.0, 0.02, 0.1],  # noqa: B006
    max_new_tokens: int = 256,
) -> None:
    """Decode with all settings and print the checks as a Markdown table."""
    loaded, tokenizer = load_adapted(model, None)
    torch.set_num_threads(default_threads(loaded.eval()))
    prompts = read_tasks(Path(model)) if file is None else read_prompts(file.name, file.read_text(encoding="utf-8"))
    places = pd.Series([prompt.task for prompt in prompts]).to_frame("task").groupby("task").cumcount()
    chosen = [prompts[place] for place in places.index[places < count]]
    encoded = [encode_prompt(loaded, tokenizer, prompt) for prompt in chosen]
    named = candidates([BLOCK, WEDLM, EXACT], windows, thresholds, penalties)
    decoders = {name: {**own, "max_new_tokens": max_new_tokens, "do_sample": False} for name, own in named.items()}
    table = pd.DataFrame(measure(loaded, tokenizer, encoded, decoders, title="decoding"))
    entropy = [
        answer_entropy(loaded, encoded[row.prompt].tokens, row.tokens) if row.decoder == AR else None
        for row in table.itertuples()
    ]
    print(trends(table.assign(quality=table["right"].astype(float), entropy=entropy)).to_markdown(index=False))


if __name__ == "__main__":
    typer.run(main)
