"""Numbers and errors made of tables of measurements, against sums by hand."""

import json

import pandas as pd
import pytest
from tiny import tiny_model, tiny_tokenizer

from wedlm_hf import add_mask_adapter
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.adapters.model_card import acceptance_table, read_log
from wedlm_hf.eval import table as tables
from wedlm_hf.eval.decoders import DECODERS, candidates
from wedlm_hf.eval.measure import Decoding, Speed
from wedlm_hf.eval.prompts import Prompt
from wedlm_hf.eval.report.figure import draw_acceptance
from wedlm_hf.eval.table import COUNTED, TIMED, mark_same, per_prompt, resample, summarise, summarise_tasks

PROMPTS = 24
CONSTANTS = {
    "quality": 1.0, "same": True, "new_tokens": 20, "forwards": 20, "token_instances": 19, "seconds": 1.0,
    "task": "t", "batch_size": 1, "drafted_by_depth": [3, 2], "accepted_by_depth": [2, 1],
}  # fmt: skip


def rows(decoder, *, prompts=PROMPTS, repeats=1, **columns):
    """What a decoder leaves: numbers are constants, or functions of the prompt's index."""
    return [
        {"decoder": decoder, "prompt": index, "repeat": repeat, "tokens": [index]}
        | {name: value(index) if callable(value) else value for name, value in (CONSTANTS | columns).items()}
        for index in range(prompts)
        for repeat in range(repeats)
    ]


def test_ratios_follow_from_sums_and_errors_from_the_spread_over_prompts():
    wedlm = {"quality": lambda i: float(i % 4 > 0), "forwards": lambda i: 5 + 5 * (i % 2), "seconds": 0.5}
    found = summarise(pd.DataFrame(rows("ar") + rows("wedlm", **wedlm)), COUNTED + TIMED)
    assert list(found.index) == ["ar", "wedlm"]
    fast = found.loc["wedlm"]
    assert fast["quality"] == 0.75 and fast["tokens_per_forward"] == pytest.approx(20 / 7.5)
    assert fast["prefix_cacheability"] == 1 and fast["speed"] == 2
    assert fast["tokens_per_second"] == 40
    # √(p(1−p)/(n−1)), but for what 1000 resamples leave open.
    assert fast["quality_error"] == pytest.approx((0.75 * 0.25 / (PROMPTS - 1)) ** 0.5, rel=0.1)
    assert found.loc["ar"]["quality_error"] == 0
    few = summarise(pd.DataFrame(rows("ar", prompts=5)), COUNTED)
    assert pd.isna(few.loc["ar", "quality_error"])
    # Decoders are resampled with the same prompts.
    shared = {"quality": lambda i: float(i % 3 == 0)}
    made = resample(pd.DataFrame(rows("ar", **shared) + rows("wedlm", **shared)))["quality"]
    assert made.shape == (1001, 2) and made["ar"].nunique() > 1
    assert (made["ar"] == made["wedlm"]).all()


def test_times_are_medians_of_repeats_answers_are_compared_token_by_token_and_tasks_may_have_any_name():
    table = pd.DataFrame(rows("ar", prompts=2, repeats=3))
    table["seconds"] = [1.0, 9.0, 2.0, 5.0, 4.0, 0.0]
    assert per_prompt(table)["seconds"]["ar"].tolist() == [2.0, 4.0]
    table = pd.DataFrame(rows("ar") + rows("wedlm", forwards=lambda i: 10 if i % 2 else 20))
    table.at[PROMPTS + 3, "tokens"] = [3, 3]
    assert mark_same(table)["same"].tolist() == [index != PROMPTS + 3 for index in range(2 * PROMPTS)]
    table["task"] = ["all" if prompt % 2 else "a|b" for prompt in table["prompt"]]
    found = summarise_tasks(table, COUNTED)["tokens_per_forward"]
    assert (found["wedlm", "all"], found["wedlm", "a|b"]) == (2, 1)


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
    assert made["notes"][-1].startswith("Single prompts had ")


def test_the_speed_table_takes_more_turns_while_a_speed_is_impossible(adapted, monkeypatch):
    calls, measure = [], tables.measure

    def measured(*arguments, **options):
        lines = measure(*arguments, **options)
        calls.append(len(lines))
        return [line | {"seconds": 99.0 if line["decoder"] == "ar" else 1.0} for line in lines]

    monkeypatch.setattr(tables, "measure", measured)
    made = tables.speed_table(*adapted, SHORT[:1], max_new_tokens=6)
    assert len(calls) == 5 and len(made["measured"]) == sum(calls)
    assert dict(zip(made["columns"], made["rows"][-1], strict=True))["speed against AR"] == "99.00× (busy machine)"
    assert not any(note.startswith("Single prompts") for note in made["notes"])  # there is one


def test_all_combinations_are_tried_and_what_is_not_given_is_the_models():
    found = candidates(["block", "wedlm", "wedlm+exact"], windows=(4, 8), thresholds=(0.1, 0.2))
    assert len(found) == len({json.dumps(options) for options in found.values()}) == 1 + 4 + 4 + 1
    assert found["wedlm W=8 τ=0.1"] == {**DECODERS["wedlm"], "window_size": 8, "entropy_threshold": 0.1}
    assert found["wedlm+exact"] == DECODERS["wedlm+exact"]
    assert list(candidates(["wedlm"])) == ["ar", "wedlm"]
    for decoders, values, message in (
        (["beam"], {}, "Unknown decoder 'beam'"),
        (["wedlm"], {"windows": (0,)}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            candidates(decoders, **values)


def test_the_curve_has_a_row_for_each_evaluation_and_is_drawn(tmp_path):
    lines = [{"step": 1, "loss": 3.0, "mask_rows": 10}]
    for mask_rows in (1000, 5000):
        rates = {f"eval_tokens_per_forward_{kind}_{count}": 1 + mask_rows / 10_000 + count / 100
                 for kind in ("branch", "chain") for count in (1, 2)}  # fmt: skip
        lines.append({"step": mask_rows, "mask_rows": mask_rows} | rates)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "los')
    table = acceptance_table(read_log(path))
    assert table["columns"] == ["mask rows", "1 draft", "2 drafts"]
    assert table["rows"] == [["1,000", "1.11", "1.12"], ["5,000", "1.51", "1.52"]]
    draw_acceptance(read_log(path), tmp_path)
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    chains = [{"mask_rows": 7, "eval_tokens_per_forward_chain_1": 1.25}]  # of a model that keeps a state
    assert acceptance_table(chains) == {"columns": ["mask rows", "1 draft"], "rows": [["7", "1.25"]]}
