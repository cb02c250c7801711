"""Speeds: a ratio of times with its range, and the table that `wedlm adapt` and `make real` show."""

import pytest
from tiny import tiny_model, tiny_tokenizer

from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.eval import table as tables
from wedlm_hf.eval.measure import Decoding
from wedlm_hf.eval.prompts import Prompt
from wedlm_hf.eval.speed import Speed, speed_of, speed_text


@pytest.mark.parametrize(
    ("ar", "own", "text", "is_known"),
    [
        ([[2.0]], [[1.0]], "2.00×", True),
        ([[9.0]], [[1.0]], "9.00× (busy machine)", False),
        ([[9.0, 3.0]], [[1.0, 1.0]], "6.00× (3.00–9.00)", False),
        ([[9.0, 9.0, 9.0]], [[1.0, 1.0, 1.0]], "9.00× (busy machine)", True),
        ([[9.0, 2.0, 2.1]], [[1.0, 1.0, 1.0]], "2.10×", True),
        ([[9.0], [9.0]], [[1.0], [2.0]], "6.00× (4.50–9.00)", False),
    ],
)
def test_a_speed_above_the_tokens_per_forward_has_its_range(ar, own, text, is_known):
    speed = Speed.of(ar, own, 4.0)
    assert (str(speed), speed.is_known) == (text, is_known)
    assert speed.low <= speed.ratio <= speed.high


def test_a_speed_compares_times_of_as_many_tokens():
    ar, own = Decoding([1] * 10, "", 10, 9, 10.0), Decoding([1] * 5, "", 2, 9, 2.0)
    assert speed_of([ar], [own]) == Speed(2.5, 2.5, 2.5, 2.5)
    assert speed_text(2.5, 2.5, 2.5, 2.5) == "2.50×"


@pytest.fixture(scope="module")
def adapted():
    model = tiny_model()
    model.add_mask_adapter(MaskAdapterSettings(rank=2, head_width=4))
    return model, tiny_tokenizer()


PROMPTS = [Prompt.of("", tokens=[5, 6, 7 + index], task="ab"[index % 2]) for index in range(4)]


@pytest.mark.filterwarnings("error::FutureWarning:wedlm_hf", "error::DeprecationWarning:wedlm_hf")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["ar", "ar+lookup", "wedlm+exact"]),
        ({"batch_size": 2}, ["ar", "wedlm+exact"]),
        ({"temperature": 0.7}, ["ar", "ar+lookup", "wedlm+exact"]),
    ],
)
def test_the_table_has_what_was_measured(adapted, options, names):
    made = tables.speed_table(*adapted, PROMPTS, max_new_tokens=12, **options)
    assert [line[0] for line in made["rows"]] == names
    exact = [line for line in made["measured"] if line["decoder"] == "wedlm+exact"]
    pooled = sum(line["new_tokens"] for line in exact) / sum(line["forwards"] for line in exact)
    cells = dict(zip(made["columns"], made["rows"][-1], strict=True))
    assert cells["tokens per forward"] == f"{pooled:.2f}"
    assert cells.get("same answers") == (None if "temperature" in options else "100 %")
    lookup = [line for line in made["measured"] if line["decoder"] == "ar+lookup"]
    assert all(line["forwards"] <= line["new_tokens"] for line in lookup)


def test_the_table_takes_more_turns_while_a_speed_is_impossible(adapted, monkeypatch):
    calls = []

    def measured(*arguments, **options):
        lines = measure(*arguments, **options)
        calls.append(len(lines))
        return [line | {"seconds": 99.0 if line["decoder"] == "ar" else 1.0} for line in lines]

    measure = tables.measure
    monkeypatch.setattr(tables, "measure", measured)
    made = tables.speed_table(*adapted, PROMPTS[:1], max_new_tokens=6)
    assert len(calls) == 5 and len(made["measured"]) == sum(calls)
    assert dict(zip(made["columns"], made["rows"][-1], strict=True))["speed against AR"] == "99.00× (busy machine)"
