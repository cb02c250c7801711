"""Numbers and errors made of the table of measurements, against sums by hand."""

import pandas as pd
import pytest

from wedlm_hf.eval.table import COUNTED, TIMED, per_prompt, resample, summarise, summarise_tasks

PROMPTS = 24


def rows(decoder, *, prompts=PROMPTS, repeats=1, **columns):
    """Constants, or functions of the prompt's index."""
    base = {"quality": 1.0, "same": True, "new_tokens": 20, "forwards": 20, "token_instances": 19}
    base |= {"seconds": 1.0, "forward_seconds": 0.8, "task": "t"}
    return [
        {"decoder": decoder, "prompt": index, "repeat": repeat}
        | {name: value(index) if callable(value) else value for name, value in (base | columns).items()}
        for index in range(prompts)
        for repeat in range(repeats)
    ]


def test_ratios_follow_from_sums_and_errors_from_the_spread_over_prompts():
    table = pd.DataFrame(
        rows("ar") + rows("wedlm", quality=lambda i: float(i % 4 > 0), forwards=lambda i: 5 + 5 * (i % 2), seconds=0.5)
    )
    found = summarise(table, COUNTED + TIMED)
    assert list(found.index) == ["ar", "wedlm"]
    fast = found.loc["wedlm"]
    assert fast["quality"] == 0.75 and fast["tokens_per_forward"] == pytest.approx(20 / 7.5)
    assert fast["prefix_cacheability"] == 1 and fast["speed"] == 2 and fast["own_cost"] == pytest.approx(-0.375)
    assert fast["tokens_per_second"] == 40
    # √(p(1−p)/(n−1)), but for what 1000 resamples leave open.
    assert fast["quality_error"] == pytest.approx((0.75 * 0.25 / (PROMPTS - 1)) ** 0.5, rel=0.1)
    assert found.loc["ar"]["quality_error"] == 0


def test_decoders_are_resampled_with_the_same_prompts():
    shared = {"quality": lambda i: float(i % 3 == 0)}
    made = resample(pd.DataFrame(rows("ar", **shared) + rows("wedlm", **shared)))["quality"]
    assert made.shape == (1001, 2) and made["ar"].nunique() > 1
    assert (made["ar"] == made["wedlm"]).all()


def test_times_are_medians_of_the_repeats_of_a_prompt():
    table = pd.DataFrame(rows("ar", prompts=2, repeats=3))
    table["seconds"] = [1.0, 9.0, 2.0, 5.0, 4.0, 0.0]
    assert per_prompt(table)["seconds"]["ar"].tolist() == [2.0, 4.0]


def test_too_few_prompts_give_no_error():
    assert pd.isna(summarise(pd.DataFrame(rows("ar", prompts=5)), COUNTED).loc["ar", "quality_error"])


def test_tasks_have_their_own_lines_whatever_they_are_called():
    table = pd.DataFrame(rows("ar") + rows("wedlm", forwards=lambda i: 10 if i % 2 else 20))
    table["task"] = ["all" if prompt % 2 else "a|b" for prompt in table["prompt"]]
    found = summarise_tasks(table, COUNTED)
    assert found.loc[("wedlm", "all"), "tokens_per_forward"] == 2
    assert found.loc[("wedlm", "a|b"), "tokens_per_forward"] == 1
