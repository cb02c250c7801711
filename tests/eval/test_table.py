"""Numbers and errors made of the table of measurements, against sums by hand; the table that `wedlm adapt` shows."""

import pandas as pd
import pytest
from tiny import tiny_model, tiny_tokenizer

from wedlm_hf import add_mask_adapter
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.eval import table as tables
from wedlm_hf.eval.measure import Decoding, Speed
from wedlm_hf.eval.prompts import Prompt
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
    few = summarise(pd.DataFrame(rows("ar", prompts=5)), COUNTED)
    assert pd.isna(few.loc["ar", "quality_error"])


def test_decoders_are_resampled_with_the_same_prompts():
    shared = {"quality": lambda i: float(i % 3 == 0)}
    made = resample(pd.DataFrame(rows("ar", **shared) + rows("wedlm", **shared)))["quality"]
    assert made.shape == (1001, 2) and made["ar"].nunique() > 1
    assert (made["ar"] == made["wedlm"]).all()


def test_times_are_medians_of_the_repeats_of_a_prompt():
    table = pd.DataFrame(rows("ar", prompts=2, repeats=3))
    table["seconds"] = [1.0, 9.0, 2.0, 5.0, 4.0, 0.0]
    assert per_prompt(table)["seconds"]["ar"].tolist() == [2.0, 4.0]


def test_tasks_have_their_own_lines_whatever_they_are_called():
    table = pd.DataFrame(rows("ar") + rows("wedlm", forwards=lambda i: 10 if i % 2 else 20))
    table["task"] = ["all" if prompt % 2 else "a|b" for prompt in table["prompt"]]
    found = summarise_tasks(table, COUNTED)["tokens_per_forward"]
    assert (found["wedlm", "all"], found["wedlm", "a|b"]) == (2, 1)


# --- speeds ---------------------------------------------------------------------------------------------------------


def test_a_speed_compares_times_of_as_many_tokens_and_says_where_it_is_impossible():
    ar, own = Decoding([1] * 10, "", 10, 9, 10.0), Decoding([1] * 5, "", 2, 9, 2.0)
    assert Speed.of([ar], [own]) == Speed(ratio=2.5, limit=2.5)
    assert [str(Speed(ratio, 2.5)) for ratio in (2.0, 2.5, 2.6)] == ["2.00×", "2.50×", "2.60× (busy machine)"]


@pytest.fixture(scope="module")
def adapted():
    model = tiny_model()
    add_mask_adapter(model, MaskAdapterSettings(rank=2, head_width=4))
    return model, tiny_tokenizer()


SHORT = [Prompt.of("", tokens=[5, 6, 7 + index], task="ab"[index % 2]) for index in range(4)]


@pytest.mark.filterwarnings("error::FutureWarning:wedlm_hf", "error::DeprecationWarning:wedlm_hf")
@pytest.mark.parametrize("options", [{}, {"batch_size": 2, "temperature": 0.7}], ids=str)
def test_the_speed_table_has_what_was_measured(adapted, options, monkeypatch):
    monkeypatch.setattr(tables, "MOST_TURNS", 1)  # a busy machine takes more turns, and medians over them are no sums
    made = tables.speed_table(*adapted, SHORT, max_new_tokens=12, **options)
    names = ["ar", "wedlm+exact"] if "batch_size" in options else ["ar", "ar+lookup", "wedlm+exact"]
    assert [line[0] for line in made["rows"]] == names
    exact = [line for line in made["measured"] if line["decoder"] == "wedlm+exact"]
    pooled = sum(line["new_tokens"] for line in exact) / sum(line["forwards"] for line in exact)
    cells = dict(zip(made["columns"], made["rows"][-1], strict=True))
    assert cells["tokens per forward"] == f"{pooled:.2f}"
    assert cells.get("same answers") == (None if "temperature" in options else "100 %")
    lookup = [line for line in made["measured"] if line["decoder"] == "ar+lookup"]
    assert all(line["forwards"] <= line["new_tokens"] for line in lookup)


def test_the_speed_table_takes_more_turns_while_a_speed_is_impossible(adapted, monkeypatch):
    calls = []

    def measured(*arguments, **options):
        lines = measure(*arguments, **options)
        calls.append(len(lines))
        return [line | {"seconds": 99.0 if line["decoder"] == "ar" else 1.0} for line in lines]

    measure = tables.measure
    monkeypatch.setattr(tables, "measure", measured)
    made = tables.speed_table(*adapted, SHORT[:1], max_new_tokens=6)
    assert len(calls) == 5 and len(made["measured"]) == sum(calls)
    assert dict(zip(made["columns"], made["rows"][-1], strict=True))["speed against AR"] == "99.00× (busy machine)"
