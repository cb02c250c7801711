"""`wedlm report`: the whole command on a tiny checkpoint, what it refuses, and how it goes on where it was stopped."""

import csv
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from tiny import MASK, tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.eval import markdown, report_figures, report_measure
from wedlm_hf.eval.fingerprint import fingerprint
from wedlm_hf.eval.measure import answer_entropy, decode, encode
from wedlm_hf.eval.report_data import builtin_data, file_data
from wedlm_hf.eval.sweep import DECODERS, Grid
from wedlm_hf.eval.tasks import TASKS, generate_samples

SMALL = "--windows 4 --thresholds 0.5,5 --penalties 0,0.5 --draft-thresholds 5 --max-new-tokens 6 --repeats 2".split()
COUNTS = "--count 2 --sweep-count 1 --timed 1 --sweep-timed 1".split()
SETTINGS = 1 + 2 + 4 + 1 + 1  # AR, block, wedlm, typical, verified
NEW_FILES = {"measured.json", "report.csv", "report.html", "report.json"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / "copied"))


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


def succeed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return " ".join(result.output.split())


def refused(*arguments) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def read(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """A finished report on built-in tasks."""
    folder = tmp_path_factory.mktemp("report")
    figures = folder / "figures"
    text = succeed(checkpoint, *SMALL, *COUNTS, "--output", folder / "out", "--figures", figures, "--seed", 7)
    return folder / "out", figures, text


# --- what it writes -----------------------------------------------------------------------------------------------


def test_it_writes_a_page_json_csv_and_figures(made):
    folder, figures, text = made
    assert {path.name for path in folder.iterdir()} == NEW_FILES
    report = read(folder)
    assert list(report["decoders"]) == list(DECODERS)
    assert len(report["sweep"]["rows"]) == SETTINGS
    assert report["data"]["counts"] == {"tuning": dict.fromkeys(TASKS, 1), "headline": dict.fromkeys(TASKS, 2)}
    ar = report["decoders"]["AR"]
    assert (ar["tokens_per_forward"], ar["speed"], ar["prompts"], ar["timed"]) == (1, 1, 12, 6)
    assert {"torch", "transformers", "threads", "wedlm_hf"} <= set(report["environment"])
    names = {"front", "thresholds", "penalties", "block", "area", "entropy"}
    drawn = {path.stem: path for path in figures.iterdir()}
    assert set(drawn) <= names and {"front", "thresholds", "penalties", "block", "entropy"} <= set(drawn)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.values())
    assert "times AR’s speed" in text and "report.html" in text


def test_counts_are_those_of_decoding_each_prompt_alone(made, checkpoint):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.suppress_tokens = [MASK]
    samples = builtin_data(2, 1, 7).headline
    limits = {"max_new_tokens": 6, "do_sample": False}
    stored = {"strategy": "wedlm", **limits}
    wide = {**stored, "verification": "exact", "window_size": 16, "entropy_threshold": 0.8}
    for name, options in {"AR": {"strategy": "ar", **limits}, "wedlm": stored, "wedlm, verified": wide}.items():
        alone = [decode(model, tokenizer, [encode(tokenizer, s.messages)], options)[0] for s in samples]
        row = read(made[0])["decoders"][name]
        tokens, forwards = sum(len(d.tokens) for d in alone), sum(d.forwards for d in alone)
        assert row["tokens_per_forward"] == pytest.approx(tokens / forwards, rel=1e-5)
        instances = sum(d.token_instances for d in alone)
        assert row["prefix_cacheability"] == pytest.approx(min(1, tokens / instances), rel=1e-5)
    assert read(made[0])["decoders"]["wedlm, verified"]["agreement"] == 1


def test_entropies_are_those_of_the_distributions_that_ar_chose_from(checkpoint):
    model = tiny_model()
    prompt = [20, 40, 9, 31]
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    rows = torch.cat(output.logits).log_softmax(-1)
    wanted = -(rows.exp() * rows).sum(-1).mean()
    assert answer_entropy(model, prompt, output.sequences[0, 4:].tolist()) == pytest.approx(float(wanted), rel=1e-4)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.links, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src", "xlink:href", "srcset", "action"):
                self.links.append(value)


def test_the_page_needs_nothing_from_outside_and_no_two_figures_share_an_id(made):
    html = (made[0] / "report.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(html)
    assert "svg" in page.tags and "script" not in page.tags and "link" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"url\((?!#)|@import", html)
    report = read(made[0])
    for check in report["trends"]:
        assert check["verdict"] in html
    assert report["command"] in html.replace("&#39;", "'")
    assert str(report["environment"]["torch"]) in html


def test_the_csv_has_a_line_for_each_setting_and_task(made):
    with open(made[0] / "report.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == (SETTINGS + len(DECODERS)) * (1 + len(TASKS))
    report = read(made[0])
    (line,) = (
        line for line in lines if (line["part"], line["decoder"], line["task"]) == ("headline", "wedlm", "json")
    )
    assert float(line["tokens_per_forward"]) == report["decoders"]["wedlm"]["tasks"]["json"]["tokens_per_forward"]


def test_pages_are_filled_once_and_for_good(made, checkpoint, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- measured: {name} -->\n<!-- /measured -->\n" for name in markdown.BLOCKS))
    folder = Path(shutil.copytree(made[0], tmp_path / "out"))
    succeed(checkpoint, *SMALL, *COUNTS, "--seed", 7, "--output", folder, "--fill", page)
    text = page.read_text(encoding="utf-8")
    assert "| wedlm, verified |" in text and "Lower τ is more accurate" in text
    assert markdown.fill(text, markdown.blocks(read(folder))) == text


@pytest.mark.slow
def test_picked_settings_are_stored_and_are_those_of_the_headline(copied, tmp_path):
    before = json.loads((copied / "generation_config.json").read_text())
    (copied / "generation_config.json").write_text(json.dumps({**before, "entropy_budget": 1.0}))
    arguments = [copied, *SMALL, *COUNTS, "--output", tmp_path / "out", "--max-loss", 100, "--write"]
    succeed(*arguments)
    report, stored = read(tmp_path / "out"), json.loads((copied / "generation_config.json").read_text())
    rows = [row for row in report["sweep"]["rows"] if row["decoder"] == "wedlm"]
    best = max(rows, key=lambda row: row["tokens_per_forward"])
    for field in ("window_size", "entropy_threshold", "distance_penalty"):
        assert stored[field] == report["settings"][field] == best[field]
    assert report["sweep"]["chosen"] == best["name"]
    assert "entropy_budget" not in stored and before.items() <= stored.items()


@pytest.mark.slow
def test_where_no_setting_is_good_enough_none_is_stored(copied, tmp_path, monkeypatch):
    monkeypatch.setattr("wedlm_hf.eval.report.choose", lambda *args: None)
    before = (copied / "generation_config.json").read_bytes()
    result = invoke(copied, *SMALL, *COUNTS, "--output", tmp_path / "out", "--write")
    assert result.exit_code == 1
    assert "No setting of unverified streaming decoding loses at most 1 points" in " ".join(result.stderr.split())
    assert (copied / "generation_config.json").read_bytes() == before
    assert (tmp_path / "out" / "report.html").exists()


# --- stopped, and gone on with ------------------------------------------------------------------------------------


def counting(monkeypatch, stop_at=None):
    """The number of calls of `decode` so far, in a list; call number `stop_at` is interrupted."""
    calls = [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == stop_at:
            raise KeyboardInterrupt
        return decode(*args, **kwargs)

    monkeypatch.setattr(report_measure, "decode", counted)
    return calls


def without_times(report):
    def strip(value):
        if isinstance(value, dict):
            timed = ("speed", "tokens_per_second", "on_front", "command", "trends")
            return {key: strip(item) for key, item in value.items() if not key.startswith(timed)}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(report)


@pytest.mark.slow
def test_a_stopped_report_goes_on_and_ends_as_if_it_had_never_stopped(made, checkpoint, tmp_path, monkeypatch):
    arguments = [checkpoint, *SMALL, *COUNTS, "--seed", 7, "--output", tmp_path / "out"]
    calls = counting(monkeypatch)
    succeed(*arguments[:-1], tmp_path / "whole")
    whole = calls[0]
    warm_up = SETTINGS + len(DECODERS)
    for stop_at in (SETTINGS + 20, SETTINGS + 70):
        calls = counting(monkeypatch, stop_at)
        result = invoke(*arguments)
        assert result.exit_code == 130, result.output
        assert "The same command goes on from here" in result.stderr
        assert not (tmp_path / "out" / "report.json").exists()
    calls = counting(monkeypatch)
    succeed(*arguments)
    assert calls[0] < whole - 60 and calls[0] > warm_up
    assert without_times(read(tmp_path / "out")) == without_times(read(made[0]))
    calls = counting(monkeypatch)
    succeed(*arguments)
    assert calls[0] == 0  # all is there: only the files are written


def test_a_turn_of_the_clock_that_was_cut_off_is_taken_again_as_a_whole(checkpoint, tmp_path, monkeypatch):
    arguments = [checkpoint, *SMALL, *COUNTS, "--output", tmp_path / "out"]
    quality = SETTINGS + SETTINGS * len(TASKS)  # with the warm-up; one prompt a task
    counting(monkeypatch, quality + 3)
    assert invoke(*arguments).exit_code == 130
    results = json.loads((tmp_path / "out" / "measured.json").read_text())["results"]
    assert results and not [name for name in results if "speed" in name]


@pytest.mark.slow
def test_partial_results_of_another_request_are_refused_unless_dropped(made, checkpoint, copied, tmp_path):
    folder = Path(shutil.copytree(made[0], tmp_path / "out"))
    before = (folder / "measured.json").read_bytes()
    arguments = [*SMALL, *COUNTS, "--output", folder]
    assert "holds a report with another prompts" in refused(checkpoint, *arguments, "--seed", 8)
    assert "another grid" in refused(checkpoint, *arguments, "--seed", 7, "--windows", 5)
    other = tiny_model(seed=1)
    other.generation_config.suppress_tokens = [MASK]
    other.save_pretrained(copied)
    message = refused(copied, *arguments, "--seed", 7)
    assert "another model" in message and "begin anew (--restart)" in message
    assert (folder / "measured.json").read_bytes() == before
    succeed(copied, *arguments, "--seed", 7, "--restart")
    assert read(folder)["weights"]["weights"] == fingerprint(other, tiny_tokenizer())["weights"]
    (folder / "measured.json").write_text("{")
    assert "is no file of partial results" in refused(copied, *arguments, "--seed", 7)


def test_pages_without_measured_blocks_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cli.LoadingOptions, "load", lambda *args: pytest.fail("weights were read"))
    page = tmp_path / "page.md"
    for text in ("no block", "<!-- measured: curve -->\n<!-- /measured -->"):
        page.write_text(text)
        message = refused("--output", tmp_path / "out", "--fill", page)
        assert "with a name among summary, tasks, setup, trends, front, got" in message


def test_an_output_folder_that_cannot_be_written_to_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cli.LoadingOptions, "load", lambda *args: pytest.fail("weights were read"))
    (tmp_path / "file").touch()
    for option in ("--output", "--figures"):
        rest = [] if option == "--output" else ["--output", tmp_path / "out"]
        message = refused(option, tmp_path / "file" / "out", *rest)
        assert "cannot be written to" in message and "file/out" in message


def test_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(report_figures, "find_spec", lambda name: None)
    assert "need matplotlib: pip install 'wedlm-hf[eval]'" in refused("--output", tmp_path / "out")


def test_a_typo_in_a_keyword_is_refused_before_anything_is_measured(checkpoint, tmp_path):
    message = refused(checkpoint, *SMALL, *COUNTS, "--output", tmp_path / "out", "--set", "repetition_penaltyy=1.0")
    assert "repetition_penaltyy" in message
    assert not (tmp_path / "out").exists()


# --- the user's own data ------------------------------------------------------------------------------------------


def rows(*items):
    return "".join(json.dumps(item) + "\n" for item in items)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "There is no prompt in 'data.jsonl'"),
        (rows({"prompt": "a"}) + "\n{oops\n", "data.jsonl, line 3: this is no JSON"),
        (rows(["a"]), "data.jsonl, line 1: a row must be a JSON object"),
        (rows({"prompt": "a"}, {"text": "b"}), "line 2: a row needs either `messages` or `prompt`, got text"),
        (rows({"prompt": "a", "messages": []}), "line 1: a row needs either `messages` or `prompt`"),
        (rows({"prompt": " "}), "line 1: `prompt` must be a text that is not empty"),
        (rows({"prompt": "a", "answer": 3}), "line 1: `answer` must be a text, got 3"),
        (rows({"messages": [{"role": "user"}]}), "line 1: `messages` must be a list of objects"),
        (rows({"messages": [{"role": "assistant", "content": "b"}]}), "must be the user's .*, got assistant"),
        (rows({"prompt": "a", "answer": "b"}, {"prompt": "c"}), "line 2: there is no `answer`, though line 1 has one"),
        (rows({"prompt": "a"}, {"prompt": "c", "answer": "b"}), "line 1: there is no `answer`, though line 2 has one"),
        (rows({"prompt": "a"}, {"prompt": "a"}), "needs two different prompts of a task at least"),
    ],
)
def test_malformed_rows_are_named_by_file_and_line(text, message):
    with pytest.raises(ValueError, match=message):
        file_data("data.jsonl", text, 10, 10)


def test_rows_of_a_file_are_shared_between_the_parts_and_no_prompt_is_in_both():
    text = rows(*({"prompt": f"{task}{i // 2}", "answer": "x", "task": task} for task in "ab" for i in range(20)))
    data = file_data("data.jsonl", text, 3, 2)
    assert data.counts() == {"tuning": {"a": 2, "b": 2}, "headline": {"a": 3, "b": 3}}
    assert not {s.prompt for s in data.tuning} & {s.prompt for s in data.headline}
    assert data.has_answers
    assert data.notes == [
        "20 of 40 rows repeat a prompt and were left out.",
        "10 of 20 prompts were used (--count, --sweep-count).",
    ]
    assert data.digest != file_data("data.jsonl", text.replace('"x"', '"y"'), 3, 2).digest


def test_built_in_headline_prompts_are_none_of_those_that_settings_are_compared_on():
    data = builtin_data(40, 30, 1)
    assert data.counts() == {"tuning": dict.fromkeys(TASKS, 30), "headline": dict.fromkeys(TASKS, 40)}
    assert not {s.prompt for s in data.tuning} & {s.prompt for s in data.headline}
    assert [s for s in data.tuning if s.task == "chat"] == list(generate_samples("chat", 30, 1, "heldout"))


def test_prompts_without_answers_are_judged_by_agreement_with_ar(checkpoint, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Sort {i}, {9 - i}\n" for i in range(8)))
    succeed(checkpoint, *SMALL, "--file", path, "--output", tmp_path / "out")
    report = read(tmp_path / "out")
    assert report["data"]["counts"] == {"tuning": {"prompts": 4}, "headline": {"prompts": 4}}
    assert report["decoders"]["AR"]["quality"] == report["decoders"]["wedlm, verified"]["quality"] == 1
    qualities = [row["quality"] for row in report["sweep"]["rows"] if row["decoder"] == "wedlm"]
    assert 0 < max(qualities) < 1
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "agreement with AR, no answers being known" in html and "right answers" not in html


@pytest.mark.slow
def test_answers_of_a_file_decide_what_is_right(checkpoint, tmp_path):
    prompts = [f"Sort {i}, {9 - i}" for i in range(8)]
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.suppress_tokens = [MASK]
    limits = {"strategy": "ar", "max_new_tokens": 6, "do_sample": False}
    data = []
    for index, prompt in enumerate(prompts):
        (decoding,) = decode(model, tokenizer, [encode(tokenizer, [{"role": "user", "content": prompt}])], limits)
        data.append({"prompt": prompt, "answer": "no" if index == 2 else f" {decoding.text} ", "task": "mine"})
    path = tmp_path / "data.jsonl"
    path.write_text(rows(*data))
    succeed(checkpoint, *SMALL, "--file", path, "--output", tmp_path / "out")
    assert read(tmp_path / "out")["decoders"]["AR"]["quality"] == 0.75  # the headline has rows 0, 2, 4, 6
    path.write_text(rows(*({**row, "answer": "no"} for row in data)))
    succeed(checkpoint, *SMALL, "--file", path, "--output", tmp_path / "none")
    report = read(tmp_path / "none")
    assert {entry["area"] for entry in report["areas"]} == {None}
    assert "AR has no right answer" in (tmp_path / "none" / "report.html").read_text(encoding="utf-8")


def test_a_checkpoint_without_a_chat_template_continues_plain_prompts_and_refuses_conversations(copied, tmp_path):
    (copied / "chat_template.jinja").unlink()
    path = tmp_path / "data.jsonl"
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    path.write_text(rows({"messages": turns}, *({"prompt": f"Sort {i}"} for i in range(4))))
    message = refused(copied, *SMALL, "--file", path, "--output", tmp_path / "out")
    assert "Without a chat template, a row holds one turn, got 3" in message
    path.write_text(rows(*({"prompt": f"Sort {i}"} for i in range(4))))
    succeed(copied, *SMALL, "--file", path, "--output", tmp_path / "out")


# --- the grid -----------------------------------------------------------------------------------------------------


def test_the_grid_has_every_combination_and_block_the_middle_penalty():
    grid = Grid(windows=(4, 8), thresholds=(0.1, 0.2), penalties=(0.0, 0.02, 0.1), draft_thresholds=(0.4,))
    candidates = grid.candidates()
    assert len(candidates) == 1 + 4 + 12 + 2 + 2
    assert next(iter(candidates)) == "AR"
    assert {o["distance_penalty"] for o in candidates.values() if o["strategy"] == "block"} == {0.02}
    assert len({json.dumps(options) for options in candidates.values()}) == len(candidates)


def test_a_prompt_that_two_tasks_share_is_in_one_part_alone():
    rows = [{"prompt": text, "task": task} for task, texts in (("a", "xyv"), ("b", "yxw")) for text in texts]
    data = file_data("rows.jsonl", "\ufeff" + "\n".join(map(json.dumps, rows)), 9, 9)
    parts = [{sample.prompt for sample in part} for part in (data.tuning, data.headline)]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == set("xyvw")
