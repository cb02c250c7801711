"""`wedlm report`: the whole command on a tiny checkpoint, what it refuses, and how it goes on where it was stopped."""

import csv
import json
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
from tiny import MASK, edit, tiny_model, tiny_tokenizer, write_checkpoint
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.eval.decoders import DECODERS
from wedlm_hf.eval.measure import decode
from wedlm_hf.eval.prompts import encode, read_prompts, split_prompts
from wedlm_hf.eval.report import page as pages
from wedlm_hf.eval.report import run as running

SMALL = "--windows 4 --thresholds 0.5,5 --penalties 0,0.5 --draft-thresholds 5 --max-new-tokens 6 --repeats 2".split()
COUNTS = "--count 2 --sweep-count 1 --timed 1 --sweep-timed 1 --batch-sizes 1,2".split()
SETTINGS = 1 + 2 + 4 + 1  # ar, block, wedlm, wedlm+exact
NEW_FILES = {"report.html", "report.json", "report.md", "table.csv"}
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


def report(output, *arguments, counts=COUNTS):
    """What the command prints, in one line, and the numbers that it writes into a folder."""
    result = invoke(*arguments[:1], *SMALL, *counts, *arguments[1:], "--output", output)
    assert result.exit_code == 0, (result.output, result.exception)
    return " ".join(result.output.split()), json.loads((output / "report.json").read_text())


def by_decoder(report):
    return {row["decoder"]: row for row in report["headline"]}


def table_of(folder):
    with open(folder / "table.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """A finished report on the prompts of the checkpoint: its folder, its figures, what was printed, its numbers."""
    folder = tmp_path_factory.mktemp("report")
    return folder / "out", folder / "figures", *report(folder / "out", checkpoint, "--figures", folder / "figures")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Figures take most of the time of a small report: those of `made` are enough."""
    monkeypatch.setattr(pages, "figures", lambda *args: [])


def test_without_a_sweep_all_prompts_are_the_headlines_and_prompt_lookup_is_compared_alone(checkpoint, tmp_path):
    decoders = ["--decoders", "ar+lookup,wedlm+exact", "--sweep-count", 0, "--count", 3]
    text, found = report(tmp_path, checkpoint, *decoders)
    markdown = (tmp_path / "report.md").read_text()
    assert "Verified decoding:" in text and "setting of unverified" not in text
    assert "\n\n\n" not in markdown
    assert list(by_decoder(found)) == ["ar", "wedlm+exact", "ar+lookup"]
    assert found["data"]["counts"] == {"tuning": {}, "headline": dict.fromkeys(TASKS, 3)}
    assert found["sweep"] == [] and "## Settings" not in markdown and "tuning" not in markdown
    assert "ar+lookup: tokens per forward" in markdown
    sizes = [(row["batch_size"], row["decoder"]) for row in found["batches"]]
    assert sizes == [(1, "ar"), (1, "wedlm+exact"), (1, "ar+lookup"), (2, "ar"), (2, "wedlm+exact")]
    depths = [row for row in found["depths"] if row["decoder"] == "wedlm+exact"]
    assert [row["depth"] for row in depths] == [*range(1, len(depths) + 1)] and depths[0]["drafted"] > 0
    assert depths[0]["accepted"] >= depths[-1]["accepted"]


def test_samples_are_not_compared_with_ars_token_for_token(checkpoint, tmp_path):
    unanswered = rows(*({"task": "chat", "prompt": f"Write about {index}."} for index in range(4)))
    (tmp_path / "data.jsonl").write_text(unanswered)
    sampled = ["--temperature", 0.9, "--decoders", "wedlm+exact", "--file", tmp_path / "data.jsonl"]
    text, found = report(tmp_path / "out", checkpoint, *sampled)
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert by_decoder(found)["wedlm+exact"]["same"] is None and found["differences"] == []
    assert {row["same"] for row in found["sweep"]} == {None}
    assert by_decoder(found)["ar"]["quality"] < 1  # its own samples are not the likeliest tokens
    assert "temperature 0.9" in markdown and "greedy;" not in markdown and "Verified decoding" in text


def test_it_writes_figures_json_csv_and_a_page_that_needs_nothing_from_outside(made):
    folder, figures, text, found = made
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == NEW_FILES
    assert list(by_decoder(found)) == list(DECODERS)
    assert len(found["sweep"]) == SETTINGS
    assert found["data"]["counts"] == {"tuning": dict.fromkeys(TASKS, 1), "headline": dict.fromkeys(TASKS, 2)}
    ar = by_decoder(found)["ar"]
    assert (ar["tokens_per_forward"], ar["speed"], ar["prompts"], ar["timed"]) == (1, 1, 6, 3)
    assert by_decoder(found)["wedlm+exact"]["same"] == 1 and found["differences"] == []
    assert {"torch", "transformers", "threads", "wedlm_hf"} <= set(found["environment"])
    drawn = {path.stem: path for path in figures.iterdir()}
    assert set(drawn) == {"front", "thresholds", "penalties", "block", "batches"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.values())
    assert "AR’s speed" in text and "report.html" in text
    html = (folder / "report.html").read_text(encoding="utf-8")
    links = re.findall(r'\b(?:href|src|srcset|action)="([^"]*)"', html)
    assert links and all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert not re.search(r"<script|<link|url\((?!#)|@import", html)
    assert found["command"] in html.replace("&#39;", "'")
    assert str(found["environment"]["torch"]) in html


def test_every_decoder_is_timed_at_every_batch_size(made):
    entries = made[3]["batches"]
    assert [(e["batch_size"], e["decoder"]) for e in entries] == [*product((1, 2), DECODERS)]
    ar = {e["batch_size"]: e["tokens_per_second"] for e in entries if e["decoder"] == "ar"}
    for entry in entries:
        assert entry["speed"] == pytest.approx(entry["tokens_per_second"] / ar[entry["batch_size"]], 1e-3)
        assert entry["own_cost"] > 0 and entry["first_token_seconds"] > 0
        assert entry["same"] == 1 if entry["decoder"] in ("ar", "wedlm+exact") else 0 <= entry["same"] <= 1
    keys = ("part", "kind", "batch_size")
    timed = [row for row in table_of(made[0]) if [row[key] for key in keys] == ["headline", "speed", "2"]]
    assert len(timed) == len(DECODERS) * 2 * 1  # prompts of the only batch; of 2 repeats, half in batches
    assert all(float(row["seconds"]) > float(row["forward_seconds"]) > 0 for row in timed)


def test_answers_of_a_file_decide_what_is_right_and_picked_settings_are_stored_and_are_those_of_the_headline(
    copied, tmp_path, monkeypatch
):
    model, tokenizer, data = timeless_model(), tiny_tokenizer(), []
    limits = {"strategy": "ar", "max_new_tokens": 6, "do_sample": False}
    for index in range(8):
        prompt = f"Sort {index}, {9 - index}"
        (decoding,) = decode(model, tokenizer, [encode(tokenizer, [{"role": "user", "content": prompt}])], limits)
        data.append({"prompt": prompt, "answer": "no" if index == 2 else f" {decoding.text} ", "task": "mine"})
    (tmp_path / "data.jsonl").write_text(rows(*data))
    config = copied / "generation_config.json"
    before = json.loads(config.read_text())
    edit(config, _from_model_config=True)  # with this flag, transformers would drop our fields when it loads them
    asked = ["--decoders", "wedlm", "--file", tmp_path / "data.jsonl", "--max-loss", 100, "--save-settings"]
    text, found = report(tmp_path / "out", copied, *asked, counts=["--batch-sizes", 1])
    assert by_decoder(found)["ar"]["quality"] == 0.75  # the headline has rows 0, 2, 4, 6
    stored, used = json.loads(config.read_text()), AutoModelForCausalLM.from_pretrained(copied).generation_config
    best = max((row for row in found["sweep"] if row["kind"] == "wedlm"), key=lambda row: row["tokens_per_forward"])
    for field in ("window_size", "entropy_threshold", "distance_penalty"):
        assert stored[field] == getattr(used, field) == found["settings"][field] == best[field]
    assert found["picked"] == best["decoder"] and before.items() <= stored.items()
    assert f"generation_config.json now has window_size = {best['window_size']:g}" in text

    monkeypatch.setattr(running, "pick", lambda *args: [])  # no setting is good enough
    kept = config.read_bytes()
    arguments = [copied, *SMALL, *COUNTS, "--decoders", "wedlm", "--output", tmp_path / "none", "--save-settings"]
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "No setting of unverified streaming decoding loses at most 1 points" in " ".join(result.stderr.split())
    assert config.read_bytes() == kept and (tmp_path / "none" / "report.html").exists()


def test_prompts_without_answers_are_judged_by_agreement_with_ar(checkpoint, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Sort {i}, {9 - i}\n" for i in range(8)))
    asked = ["--file", path, "--decoders", "wedlm,wedlm+exact"]
    _, found = report(tmp_path / "out", checkpoint, *asked, counts=["--batch-sizes", 1, "--timed", 1])
    assert found["data"]["counts"] == {"tuning": {"prompts": 4}, "headline": {"prompts": 4}}
    assert by_decoder(found)["ar"]["quality"] == by_decoder(found)["wedlm+exact"]["quality"] == 1
    assert 0 < max(row["quality"] for row in found["sweep"] if row["kind"] == "wedlm") < 1
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "agreement with AR, no answers being known" in html and "right answers" not in html


def test_a_long_prompt_shortens_its_own_answer_alone_and_is_noted(copied, tmp_path):
    model = timeless_model(max_position_embeddings=40)
    model.generation_config.eos_token_id = None
    model.save_pretrained(copied)
    tokenizer, path = tiny_tokenizer(), tmp_path / "prompts.txt"
    texts = ["long " * 8 + "long", *(f"Sort {index}" for index in range(3))]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    assert 34 < lengths[0] < 40 and max(lengths[1:]) < 34
    path.write_text("\n".join(texts))
    asked = ["--raw", "--decoders", "wedlm", "--file", path]
    _, found = report(tmp_path / "out", copied, *asked, counts=["--batch-sizes", "1,2"])
    table = [row for row in table_of(tmp_path / "out") if (row["part"], row["kind"]) == ("headline", "quality")]
    assert {(row["prompt"], float(row["new_tokens"])) for row in table} == {("0", 40 - lengths[0]), ("1", 6)}
    (note,) = found["data"]["notes"]
    assert note.startswith("1 of 4 prompts leave room for fewer than 6 new tokens in the model's context")


def test_rows_of_a_file_are_shared_between_the_parts_and_no_prompt_is_in_both():
    text = rows(*({"prompt": f"{task}{i // 2}", "answer": "x", "task": task} for task in "ab" for i in range(20)))
    tuning, others = split_prompts(read_prompts("data.jsonl", text), 2, 3)
    assert [p.task for p in tuning] == ["a"] * 2 + ["b"] * 2 and [p.task for p in others] == ["a"] * 3 + ["b"] * 3
    assert not {p.text for p in tuning} & {p.text for p in others}
    with pytest.raises(ValueError, match=r"two different prompts of a task at least, .* got 1 in 1 task"):
        split_prompts(read_prompts("data.jsonl", rows({"prompt": "a"}, {"prompt": "a"})))
    # A prompt that two tasks share is in one part alone.
    pairs = [{"prompt": text, "task": task} for task, texts in (("a", "xyv"), ("b", "yxw")) for text in texts]
    parts = split_prompts(read_prompts("rows.jsonl", "\ufeff" + rows(*pairs)))
    first, second = ({prompt.text for prompt in part} for part in parts)
    assert not first & second and first | second == set("xyvw")
