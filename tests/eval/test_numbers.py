"""Numbers, errors, fronts and figures made of tables of measurements, against sums by hand and brute force."""

import json
import random

import pandas as pd
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from wedlm_hf import add_mask_adapter
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.adapters.model_card import acceptance_table, read_log
from wedlm_hf.eval import table as tables
from wedlm_hf.eval.decoders import DECODERS, candidates
from wedlm_hf.eval.measure import Decoding, Speed, decode
from wedlm_hf.eval.prompts import Prompt
from wedlm_hf.eval.report import page as pages
from wedlm_hf.eval.report.figures import draw_acceptance, figures
from wedlm_hf.eval.report.numbers import Numbers, find_differences, pick, settings_table, sweep_numbers
from wedlm_hf.eval.table import COUNTED, TIMED, mark_same, per_prompt, resample, summarise, summarise_tasks

PROMPTS = 24
GRID = candidates(windows=(4,), thresholds=(0.1, 0.2, 0.4), penalties=(0.0, 0.1), decoders=("block", "wedlm"))
CONSTANTS = {
    "quality": 1.0, "same": True, "new_tokens": 20, "forwards": 20, "token_instances": 19, "seconds": 1.0,
    "forward_seconds": 0.8, "task": "t", "batch_size": 1, "drafted_by_depth": [3, 2], "accepted_by_depth": [2, 1],
    "first_token_seconds": 0.1, "peak_bytes": 2**20,
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
    assert fast["prefix_cacheability"] == 1 and fast["speed"] == 2 and fast["own_cost"] == pytest.approx(-0.375)
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


def both_kinds(decoder, tasks=("even", "odd"), **columns):
    """The rows of a report: each prompt is measured for quality and for speed."""
    made = rows(decoder, task=lambda index: tasks[index % len(tasks)], **columns)
    return [row | {"kind": kind} for row in made for kind in ("quality", "speed")]


def swept(make, **options):
    """A sweep over GRID; `make(strategy, tau, lam)` gives columns of `rows`."""
    table = both_kinds("ar", **options)
    for name, keywords in GRID.items():
        if name != "ar":
            setting = (keywords[key] for key in ("strategy", "entropy_threshold", "distance_penalty"))
            table += both_kinds(name, **options, **make(*setting))
    return pd.DataFrame(table), settings_table(GRID)


def made(timed="even|odd|.*", **options):
    """All numbers of a report whose headline times prompts of tasks that match `timed`."""
    table, settings = swept(lambda *setting: {}, **options)
    headline = pd.DataFrame([row for name in ("ar", "wedlm", "wedlm+exact") for row in both_kinds(name, **options)])
    headline = headline[(headline["kind"] != "speed") | headline["task"].str.fullmatch(timed)]
    prompts = [Prompt.of(str(index)) for index in range(PROMPTS)]
    return Numbers.of(table, sweep_numbers(table, settings), headline, prompts, model=None)


def test_all_combinations_are_tried_and_block_with_the_middle_penalty():
    penalties = (0.0, 0.02, 0.1)
    found = candidates(windows=(4, 8), thresholds=(0.1, 0.2), penalties=penalties, draft_thresholds=(0.4,))
    assert len(found) == len({json.dumps(options) for options in found.values()}) == 1 + 4 + 12 + 2
    assert {options["distance_penalty"] for options in found.values() if options["strategy"] == "block"} == {0.02}
    table = settings_table(found)
    assert list(table["kind"].unique()) == ["ar", "block", "wedlm", "wedlm+exact"]
    assert table.loc["wedlm W=8 τ=0.1 λ=0.02", ["window_size", "entropy_threshold"]].tolist() == [8, 0.1]
    assert pd.isna(table.loc["wedlm+exact W=4 τ=0.4", "distance_penalty"])


def test_the_fastest_within_the_allowed_loss_come_first_and_the_loss_is_that_of_the_task_that_loses_most():
    numbers = {"speed": [1.0, 3.0, 2.0, 3.0], "loss": [0.0, 2.0, 1.0 + 1e-12, 1.0]}
    summary = pd.DataFrame(numbers, index=list("abcd"))
    assert (pick(summary, 1.0, "speed"), pick(summary, -1.0, "speed")) == (["d", "c", "a"], [])

    def make(strategy, tau, lam):
        return {"quality": lambda index: float(tau < 0.4 or index % 2 == 0), "forwards": round(2 / tau)}

    summary = sweep_numbers(*swept(make))
    assert summary.loc["wedlm W=4 τ=0.4 λ=0", "loss"] == 100
    assert summary.loc["wedlm W=4 τ=0.2 λ=0", "loss"] == 0


def test_the_front_is_what_brute_force_finds():
    rng = random.Random(1)
    drawn = swept(lambda *setting: {"quality": rng.randint(0, 10) / 10, "seconds": rng.randint(1, 9) / 10})
    points = sweep_numbers(*drawn)[["quality", "speed", "on_front"]].to_numpy().tolist()
    for quality, speed, on_front in points:
        as_good = [other[:2] for other in points if other[0] >= quality and other[1] >= speed]
        assert on_front == all(other == [quality, speed] for other in as_good)


def test_where_verified_output_parts_from_ar_both_best_logits_are_told():
    model, prompt = tiny_model(), [20, 40, 9, 31, 77]
    (wanted,) = decode(model, None, [prompt], {**DECODERS["ar"], "max_new_tokens": 8, "do_sample": False})
    other = [*wanted.tokens[:3], wanted.tokens[3] + 1]
    columns = {"decoder": ["ar", "wedlm+exact"], "prompt": [0, 0], "same": [True, False]}
    table = pd.DataFrame({**columns, "tokens": [wanted.tokens, other]})
    (difference,) = find_differences(table, [Prompt.of("", tokens=prompt)], model)
    logits = model(torch.tensor([prompt + wanted.tokens[:3]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert (difference["token"], difference["gap"]) == (3, pytest.approx(best - second, abs=1e-4))
    neighbour = torch.nextafter(torch.tensor(best), torch.tensor(float("inf")))
    assert difference["spacing"] == pytest.approx(float(neighbour - best))
    floats = table.astype({"prompt": float})  # as they are beside rows of whole batches, which have no prompt
    assert find_differences(floats, [Prompt.of("", tokens=prompt)], model) == [difference]
    assert find_differences(table.assign(same=True), [], model) == []


def test_differences_from_ar_are_told_in_steps_of_the_dtype():
    numbers = made()
    told = pages.Words({}, numbers).block("same")
    assert told == "Verified decoding gave AR’s own answer to all 24 prompts, token for token."
    numbers.headline.loc["wedlm+exact", "same"] = 22 / 24
    numbers.differences.extend([{"gap": 0.5, "spacing": 0.25}, {"gap": 0.0, "spacing": 0.25}])
    told = pages.Words({}, numbers).block("same")
    assert told.startswith("Verified answers part from AR’s on 2 of 24 prompts: ")
    assert "at most 2.0 steps of this dtype apart (median 1.0)" in told


def test_tasks_may_have_any_name_and_no_speed_where_none_of_their_prompts_was_timed():
    numbers = made(tasks=["all", "a|b", r"$\frac{$", "_hidden", "<b>&"])
    text = pages.as_markdown(pages.tables(numbers, "right answers")["tasks"])
    assert r"| a\|b " in text and r"| &lt;b&gt;&amp; " in text and text.count("\n") == 2 + 5 + 1
    for figure in figures(numbers, 4, "right answers"):
        assert figure.as_uri().startswith("data:image/svg+xml;base64,")
    cells = pages.tables(made(timed="even"), "right answers")["tasks"].set_index("task")["wedlm: speed against AR"]
    assert (cells["odd"], cells["even"], cells["all tasks"]) == ("–", "1.00×", "1.00×")


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
