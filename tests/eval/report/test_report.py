"""`wedlm report`: the whole command on a tiny checkpoint, what it finds, writes and says, and what it refuses."""

import csv
import json
import re
import shutil
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from tiny import MASK, edit, tiny_model, tiny_tokenizer, write_checkpoint
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.eval.decoders import DECODERS, candidates
from wedlm_hf.eval.measure import decode
from wedlm_hf.eval.prompts import encode
from wedlm_hf.eval.report import run as running
from wedlm_hf.eval.report.figure import INK
from wedlm_hf.eval.report.page import ALL_TASKS, Report, write_report
from wedlm_hf.eval.report.run import pick, tabulate

SMALL = "--count 2 --max-new-tokens 6".split()
NEW_FILES = {"report.html", "report.md", "table.csv", "figure.svg"}
TASKS = ("counting", "sorting", "chat")


def rows(*items):
    return "".join(json.dumps(item) + "\n" for item in items)


ASKED = [(f"{task} {index}, {9 - index}", str(index), task) for task in TASKS for index in range(4)]
DATA = rows(*({"prompt": prompt, "answer": answer, "task": task} for prompt, answer, task in ASKED))


def timeless_model(**options):
    """Whose counts depend on no clock."""
    model = tiny_model(**options)
    model.generation_config.suppress_tokens = [MASK]
    model.generation_config.slot_cost = 0.04
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Brings its own prompts along."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(folder, timeless_model())
    (folder / "tasks.jsonl").write_text(DATA)
    return folder


@pytest.fixture
def copied(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / "copied"))


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


def report(output, *arguments):
    """What the command prints, in one line, and its numbers."""
    result = invoke(*arguments[:1], *SMALL, *arguments[1:], "--output", output, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return " ".join(result.stderr.split()), json.loads(result.stdout)


def by_decoder(found, task=ALL_TASKS):
    return {row["decoder"]: row for row in found["rows"] if row["task"] == task}


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """A finished report on the prompts of the checkpoint: its folder, what was printed, its numbers."""
    folder = tmp_path_factory.mktemp("report")
    return folder, *report(folder, checkpoint, "--thresholds", "0.5,5", "--windows", "4", "--repeats", 2)


def test_one_table_has_a_row_for_each_decoder_setting_and_task_in_markdown_as_in_csv(made):
    folder, _, found = made
    names = ["ar", "block W=4 τ=0.5", "block W=4 τ=5", "wedlm W=4 τ=0.5", "wedlm W=4 τ=5", "wedlm+exact"]
    assert [(row["task"], row["decoder"]) for row in found["rows"]] == [*product((ALL_TASKS, *TASKS), names)]
    ar, exact = (by_decoder(found)[name] for name in ("ar", "wedlm+exact"))
    assert (ar["tokens_per_forward"], ar["speed"], ar["loss"], exact["same"]) == (1, 1, 0, 1)
    assert by_decoder(found)["wedlm W=4 τ=5"]["entropy_threshold"] == 5 and exact["window_size"] is None
    with open(folder / "table.csv", encoding="utf-8") as file:
        stored = list(csv.DictReader(file))
    assert [float(row["tokens_per_forward"]) for row in stored] == [row["tokens_per_forward"] for row in found["rows"]]
    shown = re.findall(r"^\| (\S.*?) +\| (\w+) +\|", (folder / "report.md").read_text(), flags=re.MULTILINE)
    assert shown[1:] == [(row["decoder"], row["task"]) for row in found["rows"]]


def test_it_is_one_page_that_needs_nothing_from_outside_with_a_figure_that_is_read_on_white_and_on_black(made):
    folder, text, found = made
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == NEW_FILES
    page, figure = ((folder / name).read_text(encoding="utf-8") for name in ("report.html", "figure.svg"))
    assert not re.search(r'<script|<link|@import|url\((?!#)|(?:href|src)="(?!#)', page)
    assert "prefers-color-scheme: dark" in page and "currentColor" in page and INK not in page
    assert found["about"]["command"] in page.replace("&#39;", "'") and str(found["about"]["torch"]) in page
    drawn = {element.get("style", "") for element in ElementTree.fromstring(figure).iter()}
    colors = {color for style in drawn for color in re.findall(r"(?:fill|stroke): (#\w{6})", style)}

    def contrast(color, ground):  # WCAG's
        def light(code):
            parts = [int(code[place : place + 2], 16) / 255 for place in (1, 3, 5)]
            parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
            return 0.05 + 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

        one, other = sorted((light(color), light(ground)))
        return other / one

    assert INK in colors and not colors & {"#ffffff", "#000000"}
    assert all(contrast(color, ground) > 2.5 for color in colors for ground in ("#ffffff", "#15181c")), colors
    assert "report.html" in text and "tokens per forward" in text


def test_a_decoder_that_is_wrong_says_what_to_do(copied, tmp_path):
    model, tokenizer, data = timeless_model(), tiny_tokenizer(), []
    limits = {"strategy": "ar", "max_new_tokens": 6, "do_sample": False}
    for index in range(8):
        prompt = f"Sort {index}, {9 - index}"
        (decoding,) = decode(model, tokenizer, [encode(tokenizer, [{"role": "user", "content": prompt}])], limits)
        data.append({"prompt": prompt, "answer": "no" if index == 2 else f" {decoding.text} "})
    (tmp_path / "data.jsonl").write_text(rows(*data))
    asked = ["--file", tmp_path / "data.jsonl", "--count", 8, "--thresholds", "0,9", "--windows", 6]
    text, found = report(tmp_path / "out", copied, *asked)
    assert by_decoder(found)["ar"]["quality"] == by_decoder(found)["wedlm+exact"]["quality"] == 7 / 8
    said = {note.partition(":")[0]: note for note in found["notes"]}
    assert "points below AR: " in said["wedlm W=6 τ=9"] and "verification='exact'" in said["wedlm W=6 τ=9"]
    assert "1.00 tokens per forward gain nothing" in said["wedlm W=6 τ=0"] and "ar" not in said
    assert "| task" not in text and "8 prompts are too few" in text
    assert found["picked"] is None and "keeps AR's quality: none" in text


def test_picked_settings_are_stored_and_say_that_the_masks_are_ready(copied, tmp_path, monkeypatch):
    config = copied / "generation_config.json"
    before = json.loads(config.read_text())
    edit(config, _from_model_config=True)  # with this flag, transformers would drop our fields when it loads them
    asked = ["--decoders", "wedlm", "--windows", "3,4", "--penalties", "0.5", "--max-loss", 100, "--save-settings"]
    text, found = report(tmp_path / "out", copied, *asked)
    stored, used = json.loads(config.read_text()), AutoModelForCausalLM.from_pretrained(copied).generation_config
    unverified = [row for row in found["rows"] if row["task"] == ALL_TASKS and row["decoder"] != "ar"]
    best = max(unverified, key=lambda row: row["tokens_per_forward"])
    assert found["picked"] == best["decoder"] and before.items() <= stored.items()
    assert stored["window_size"] == used.window_size == best["window_size"] and stored["distance_penalty"] == 0.5
    assert stored["entropy_threshold"] is not None and stored["masks_ready"] and "verification" not in stored
    assert f"generation_config.json now has window_size = {best['window_size']:g}" in text

    monkeypatch.setattr(running, "pick", lambda *args: None)  # no setting is good enough
    kept = config.read_bytes()
    result = invoke(copied, *SMALL, "--decoders", "wedlm", "--output", tmp_path / "none", "--save-settings")
    assert result.exit_code == 1 and "keeps AR's quality: none" in " ".join(result.stdout.split())
    assert config.read_bytes() == kept and (tmp_path / "none" / "report.html").exists()


def test_prompts_without_answers_are_judged_by_agreement_with_ar_and_no_metric_can_judge_them(checkpoint, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Sort {i}, {9 - i}\n" for i in range(8)))
    asked = ["--file", path, "--decoders", "wedlm,wedlm+exact,ar+lookup", "--count", 4]
    tried = ["--windows", 4, "--thresholds", "0.5,5", "--penalties", "0,0.5"]
    _, found = report(tmp_path / "out", checkpoint, *asked, *tried)
    quality = {name: row["quality"] for name, row in by_decoder(found).items()}
    assert quality["ar"] == quality["wedlm+exact"] == quality["ar+lookup"] == 1
    assert 0 < max(quality[name] for name in quality if name.startswith("wedlm W")) < 1
    assert "agreement with AR" in (tmp_path / "out" / "report.md").read_text()
    refused = invoke(checkpoint, "--file", path, "--metric", "number", "--output", tmp_path / "no")
    assert refused.exit_code == 2 and "`metric='number'` needs an `answer` to each prompt" in refused.stderr


def test_ars_own_answer_agrees_with_ar_however_one_forward_over_it_rounds(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("wedlm_hf.eval.report.run.agreeing_tokens", lambda *given: 0)
    (tmp_path / "prompts.txt").write_text("Sort 1, 9\n")
    asked = ["--file", tmp_path / "prompts.txt", "--decoders", "wedlm+exact", "--count", 1]
    _, found = report(tmp_path / "out", checkpoint, *asked)
    assert by_decoder(found)["wedlm+exact"]["quality"] == 1


def test_samples_are_not_compared_with_ars_token_for_token(checkpoint, tmp_path):
    (tmp_path / "data.jsonl").write_text(rows(*({"prompt": f"Write about {index}."} for index in range(4))))
    sampled = ["--temperature", 0.9, "--decoders", "wedlm+exact", "--file", tmp_path / "data.jsonl"]
    _, found = report(tmp_path / "out", checkpoint, *sampled)
    assert "same" not in found["rows"][0] and by_decoder(found)["ar"]["quality"] < 1  # not the likeliest tokens
    assert "temperature = 0.9" in found["about"]["decoding"]


def test_another_metric_judges_all_rows_and_batches_decode_together(checkpoint, tmp_path):
    (tmp_path / "data.jsonl").write_text(rows(*({"prompt": f"{i}", "answer": "x 42"} for i in range(4))))
    asked = ["--file", tmp_path / "data.jsonl", "--batch-size", 2, "--metric"]
    _, found = report(tmp_path / "out", checkpoint, *asked, "number")
    assert found["about"]["metric"] == "number" and found["about"]["batch_size"] == 2
    refused = invoke(checkpoint, *asked, tmp_path / "none", "--output", tmp_path / "no")
    assert refused.exit_code == 2 and "There is no metric" in refused.stderr
    together = invoke(checkpoint, *asked[:-1], "--decoders", "ar+lookup", "--output", tmp_path / "no")
    assert together.exit_code == 2 and "`ar+lookup` decodes one prompt at a time" in together.stderr


def test_a_long_prompt_shortens_its_own_answer_alone_and_is_noted(copied, tmp_path):
    model = timeless_model(max_position_embeddings=40)
    model.generation_config.eos_token_id = None
    model.save_pretrained(copied)
    tokenizer, path = tiny_tokenizer(), tmp_path / "prompts.txt"
    texts = ["long " * 8 + "long", *(f"Sort {index}" for index in range(3)), "Sort 0"]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    assert 34 < lengths[0] < 40 and max(lengths[1:]) < 34
    path.write_text("\n".join(texts))
    _, found = report(
        tmp_path / "out", copied, "--raw", "--decoders", "wedlm+exact", "--file", path, "--batch-size", 2
    )
    repeated, used, few, short = found["notes"]
    assert repeated.startswith("1 of 5 rows repeat a prompt") and used.startswith("2 of 4 prompts were used")
    assert few.startswith("2 prompts are too few")
    assert short.startswith("1 of 2 prompts leave room for fewer than 6 new tokens in the model's context")


def test_the_fastest_within_the_allowed_loss_is_picked_by_the_task_that_loses_most():
    def decoded(name, quality, forwards):
        return [
            {"decoder": name, "prompt": index, "repeat": 0, "task": "ab"[index % 2], "tokens": [index], "right": None,
             "quality": quality[index % 2], "new_tokens": 20, "forwards": forwards, "token_instances": 19,
             "seconds": 1.0}
            for index in range(8)
        ]  # fmt: skip

    named = {"ar": (1, 1, 20), "wedlm W=1": (1, 0.5, 4), "wedlm W=2": (0.9, 0.9, 5), "wedlm W=3": (1, 1, 6)}
    measured = [row for name, (a, b, forwards) in named.items() for row in decoded(name, (a, b), forwards)]
    measured += decoded("wedlm+exact", (1, 1), 2)
    table = tabulate(pd.DataFrame(measured), is_greedy=True)
    assert table.loc[("wedlm W=1", "b"), "loss"] == 50 and table.loc[("wedlm W=1", ALL_TASKS), "loss"] == 25
    options = candidates(["wedlm"], windows=(1, 2, 3)) | {"wedlm+exact": {}}
    assert [pick(table, options, most) for most in (0, 5, 10, 50)] == ["wedlm W=3"] * 2 + ["wedlm W=2", "wedlm W=1"]
    assert pick(table.drop(index="wedlm W=3", level="decoder"), {"ar": {}, "wedlm W=1": {}}, 1) is None


def test_tasks_may_have_any_name(tmp_path):
    tasks = ["a|b", r"$\frac{$", "_hidden", "<b>&</table>"]
    measured = [
        {"decoder": name, "prompt": place, "repeat": 0, "task": task, "tokens": [1], "quality": 1.0, "new_tokens": 2,
         "forwards": 2, "token_instances": 1, "seconds": 1.0}
        for name in DECODERS for place, task in enumerate(tasks)
    ]  # fmt: skip
    table = tabulate(pd.DataFrame(measured), is_greedy=True)
    made = Report(table, "right answers", None, [], {"model": "m <i>", "command": "wedlm report"})
    write_report(made, tmp_path)
    assert r"| a\|b " in made.markdown and made.markdown.count("\n| ") == 1 + len(DECODERS) * 5
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("</table>") == 1 and "&lt;b&gt;&amp;&lt;/table&gt;" in page
    assert page.index("</table>") < page.index("<svg") < page.index("How it was measured")
    assert MarkdownIt().render(made.markdown)
