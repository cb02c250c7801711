"""The grid of settings, fronts, same answers and figures of a report, on made-up tables."""

import json
import random

import pandas as pd
import pytest
import torch
from tiny import tiny_model

from wedlm_hf.adapters.model_card import acceptance_table, read_log
from wedlm_hf.eval.decoders import DECODERS, candidates
from wedlm_hf.eval.measure import decode
from wedlm_hf.eval.prompts import Prompt
from wedlm_hf.eval.report.figures import draw_acceptance, figures
from wedlm_hf.eval.report.numbers import Numbers, find_differences, pick, settings_table, sweep_numbers
from wedlm_hf.eval.report.page import Words, as_markdown, tables
from wedlm_hf.eval.table import mark_same

PROMPTS = 24
GRID = candidates(windows=(4,), thresholds=(0.1, 0.2, 0.4), penalties=(0.0, 0.1), decoders=("block", "wedlm"))


TASKS = ["all", "a|b", r"$\frac{$", "_hidden"]


def rows(decoder, *, prompts=PROMPTS, quality=1.0, tokens=20, forwards=20, seconds=1.0, tasks=("even", "odd")):
    """What a decoder leaves; numbers are constants or functions of the prompt's index."""
    made = []
    for index in range(prompts):
        got = [value(index) if callable(value) else value for value in (quality, tokens, forwards, seconds)]
        counts = {"new_tokens": got[1], "forwards": got[2], "token_instances": 2 * got[1]}
        shared = {"decoder": decoder, "prompt": index, "task": tasks[index % len(tasks)], "batch_size": 1, **counts}
        shared |= {"seconds": got[3], "forward_seconds": 0.8 * got[3], "tokens": [index], "repeat": 0}
        shared |= {"drafted_by_depth": [3, 2], "accepted_by_depth": [2, 1]}
        made += [shared | {"kind": "quality", "quality": got[0]}]
        made += [shared | {"kind": "speed", "first_token_seconds": 0.1, "peak_bytes": 2**20}]
    return made


def swept(make, **options):
    """A sweep over GRID; `make(strategy, tau, lam)` gives keywords of `rows`."""
    table = rows("ar", **options)
    for name, keywords in GRID.items():
        if name != "ar":
            setting = (keywords[key] for key in ("strategy", "entropy_threshold", "distance_penalty"))
            table += rows(name, **options, **make(*setting))
    return pd.DataFrame(table), settings_table(GRID)


def made(make=lambda *setting: {}, timed="even|odd|.*", **options):
    """All numbers of a report whose headline times prompts of tasks that match `timed`."""
    table, settings = swept(make, **options)
    headline = pd.DataFrame([row for name in ("ar", "wedlm", "wedlm+exact") for row in rows(name, **options)])
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


def test_the_fastest_within_the_allowed_loss_come_first():
    numbers = {"speed": [1.0, 3.0, 2.0, 3.0], "loss": [0.0, 2.0, 1.0 + 1e-12, 1.0]}
    summary = pd.DataFrame(numbers, index=list("abcd"))
    assert (pick(summary, 1.0, "speed"), pick(summary, -1.0, "speed")) == (["d", "c", "a"], [])


def test_the_front_is_what_brute_force_finds():
    rng = random.Random(1)
    shares = {}

    def make(*setting):
        share, seconds = shares.setdefault(setting, (rng.randint(0, 10) / 10, rng.randint(1, 9) / 10))
        return {"quality": share, "seconds": seconds}

    summary = sweep_numbers(*swept(make))
    points = summary[["quality", "speed", "on_front"]].to_dict("records")
    for row in points:
        beaten = any(
            (other["quality"] > row["quality"] and other["speed"] >= row["speed"])
            or (other["quality"] >= row["quality"] and other["speed"] > row["speed"])
            for other in points
        )
        assert row["on_front"] != beaten


def test_the_loss_of_a_setting_is_that_of_the_task_that_loses_most():
    def make(strategy, tau, lam):
        return {"quality": lambda index: float(tau < 0.4 or index % 2 == 0), "forwards": round(2 / tau)}

    summary = sweep_numbers(*swept(make))
    assert summary.loc["wedlm W=4 τ=0.4 λ=0", "loss"] == 100
    assert summary.loc["wedlm W=4 τ=0.2 λ=0", "loss"] == 0


def test_answers_are_the_same_token_for_token():
    table = pd.DataFrame(rows("ar") + rows("wedlm"))
    table = table[table["kind"] == "quality"].reset_index(drop=True)
    table.at[PROMPTS + 3, "tokens"] = [3, 3]
    marked = mark_same(table)
    assert marked["same"].tolist() == [index != PROMPTS + 3 for index in range(2 * PROMPTS)]


def test_where_verified_output_parts_from_ar_both_best_logits_are_told():
    model, prompt = tiny_model(), [20, 40, 9, 31, 77]
    (wanted,) = decode(model, None, [prompt], {**DECODERS["ar"], "max_new_tokens": 8, "do_sample": False})
    other = [*wanted.tokens[:3], wanted.tokens[3] + 1]
    table = pd.DataFrame(
        {"decoder": ["ar", "wedlm+exact"], "prompt": [0, 0], "tokens": [wanted.tokens, other], "same": [True, False]}
    )
    (difference,) = find_differences(table, [Prompt.of("", tokens=prompt)], model)
    logits = model(torch.tensor([prompt + wanted.tokens[:3]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert difference["token"] == 3
    assert difference["gap"] == pytest.approx(best - second, abs=1e-4)
    neighbour = torch.nextafter(torch.tensor(best), torch.tensor(float("inf")))
    assert difference["spacing"] == pytest.approx(float(neighbour - best))
    floats = table.astype({"prompt": float})  # as they are beside rows of whole batches, which have no prompt
    assert find_differences(floats, [Prompt.of("", tokens=prompt)], model) == [difference]
    assert find_differences(table.assign(same=True), [], model) == []


def test_differences_from_ar_are_told_in_steps_of_the_dtype():
    def same_sentence(numbers):
        return Words({}, numbers).block("same")

    numbers = made()
    assert same_sentence(numbers) == "Verified decoding gave AR’s own answer to all 24 prompts, token for token."
    numbers.headline.loc["wedlm+exact", "same"] = 22 / 24
    numbers.differences.extend([{"gap": 0.5, "spacing": 0.25}, {"gap": 0.0, "spacing": 0.25}])
    assert same_sentence(numbers).startswith("Verified answers part from AR’s on 2 of 24 prompts: ")
    assert "at most 2.0 steps of this dtype apart (median 1.0)" in same_sentence(numbers)


def test_tasks_may_have_any_name():
    numbers = made(tasks=TASKS)
    text = as_markdown(tables(numbers, "right answers")["tasks"])
    assert r"| a\|b " in text and text.count("\n") == 2 + 4 + 1
    for figure in figures(numbers, 4, "right answers"):
        assert figure.as_uri().startswith("data:image/svg+xml;base64,")


def test_a_task_without_timed_prompts_has_no_speed():
    cells = tables(made(timed="even"), "right answers")["tasks"].set_index("task")["wedlm: speed against AR"]
    assert (cells["odd"], cells["even"], cells["all tasks"]) == ("–", "1.00×", "1.00×")


def test_markup_in_names_is_text():
    table = as_markdown(pd.DataFrame({"task": ["<b>&|"]}))
    assert r"| &lt;b&gt;&amp;\| |" in table


def test_the_curve_has_a_row_for_each_evaluation_and_is_drawn(tmp_path):
    lines = [{"step": 1, "loss": 3.0, "mask_rows": 10}]
    for rows in (1000, 5000):
        rates = {f"eval_tokens_per_forward_{kind}_{count}": 1 + rows / 10_000 + count / 100
                 for kind in ("branch", "chain") for count in (1, 2)}  # fmt: skip
        lines.append({"step": rows, "mask_rows": rows} | rates)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "los')
    table = acceptance_table(read_log(path))
    assert table["columns"] == ["mask rows", "1 draft", "2 drafts"]
    assert table["rows"] == [["1,000", "1.11", "1.12"], ["5,000", "1.51", "1.52"]]
    draw_acceptance(read_log(path), tmp_path)
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    chains = [{"mask_rows": 7, "eval_tokens_per_forward_chain_1": 1.25}]  # of a model that keeps a state
    assert acceptance_table(chains) == {"columns": ["mask rows", "1 draft"], "rows": [["7", "1.25"]]}
