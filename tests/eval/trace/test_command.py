"""The command `wedlm trace`."""

import json
from pathlib import Path

import pytest
from tiny import tiny_tokenizer
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.eval.options import NANO
from wedlm_hf.eval.prompts import Prompt, encode, encode_prompt
from wedlm_hf.eval.trace import saved
from wedlm_hf.eval.trace.page import page
from wedlm_hf.modeling_wedlm.loading import load_model, load_tokenizer

PROMPT = "1, 2, 3"


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def wedlm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, stdin=""):
        result = CliRunner().invoke(cli.app, ["trace", *map(str, arguments)], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def test_the_command_writes_a_page_and_keeps_the_trace(wedlm, checkpoint, tmp_path):
    short = ("--model", checkpoint, "--max-new-tokens", 6, "--repeats", 1)
    code, output, errors = wedlm(*short, "--save", "kept/trace.json", "--raw", PROMPT)
    assert (code, "Error" in errors) == (0, False), errors
    assert output.splitlines()[-2:] == ["kept/trace.json", "build/trace.html"]
    assert "tokens per forward" in output
    kept = saved.load("kept/trace.json")
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    assert kept.recordings[0].prompt_tokens == encode_prompt(model, tokenizer, Prompt.of(PROMPT), raw=True).tokens
    assert (tmp_path / "build" / "trace.html").read_text() == page(kept)

    again = wedlm("--from", "kept/trace.json", "--output", "again.html", "--model", checkpoint)
    assert (again[0], again[2]) == (0, "")
    assert (tmp_path / "again.html").read_text() == page(kept)
    code, output, errors = wedlm("--from", "kept/trace.json", "--json", "--debug")
    assert (code, json.loads(output)["files"]) == (0, ["build/trace.html"]), errors
    code, output, errors = wedlm("--from", "kept/trace.json", "--terminal")
    assert code == 0 and "wedlm: forward 1" in output
    code, output, errors = wedlm(*short[:4], "--terminal", "--raw", PROMPT, "--no-compare")
    assert code == 0 and "wedlm: forward 1" in output and "ar:" not in output
    assert not (tmp_path / "build" / "trace.html").samefile(tmp_path / "again.html")


def test_a_conversation_of_a_file_is_traced(wedlm, checkpoint):
    turns = [{"role": role, "content": PROMPT} for role in ("user", "assistant", "user")]
    Path("chats.jsonl").write_text(json.dumps({"messages": turns}))
    short = ("--model", checkpoint, "--max-new-tokens", 2, "--repeats", 1, "--no-compare", "--file", "chats.jsonl")
    assert wedlm(*short, "--save", "trace.json")[0] == 0
    (recording,) = saved.load("trace.json").recordings
    assert recording.prompt_tokens == encode(tiny_tokenizer(), turns)
    assert recording.prompt == "\n".join([PROMPT] * 3)
    assert "Without a chat template, a row holds one turn, got 3." in wedlm(*short, "--raw")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "ar", "hi"], "`--strategy` must be wedlm or block, got 'ar'."),
        (["--from", "trace.json", "hi"], "PROMPTS: a saved trace (`--from`) is shown as it is, nothing is decoded."),
        (["--from", "trace.json", "--window-size", "4"], "`--window-size`: a saved trace"),
        (["--from", "trace.json", "--threads", "1"], "`--threads`: a saved trace"),
        (["--from", "missing.json"], "No such file or directory: 'missing.json'"),
        (["--pace", "1", "hi"], "`--pace`: goes with `--terminal`"),
        (["--from", "trace.json", "--output", "trace.json"], "'trace.json' is named twice"),
        (["--from", "trace.json", "--output", "./link.json"], "'link.json' is named twice"),
        (["--save", "a", "--output", "a", "hi"], "'a' is named twice"),
        (["--file", "trace.json", "--save", "trace.json"], "'trace.json' is named twice"),
        (["--output", ".", "hi"], "'.' is a folder; a file is to be written."),
        (["--save", "trace.json/x", "hi"], "The folder 'trace.json' cannot be written to"),
        (["--window-size", "0", "hi"], "`window_size` must be an integer of at least 1, got 0."),
        (["--from", "trace.json", "--model", NANO], "The trace was made with another model than"),
        ([" "], "A prompt must not be empty."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(wedlm, trace, arguments, message):
    saved.save(trace, "trace.json")
    Path("link.json").symlink_to("trace.json")
    code, output, errors = wedlm(*arguments)
    assert (code, output) == (2, "")
    assert saved.load("trace.json") == trace  # untouched
    assert message in errors and errors.startswith("Error: ") and errors.count("\n") == 1


def test_the_same_stream_may_take_page_and_trace(wedlm, checkpoint):
    code, output, _ = wedlm(
        "--model", checkpoint, "--max-new-tokens", 2, "--repeats", 1, "--save", "/dev/null", "-o", "/dev/null", "hi"
    )
    assert (code, output.splitlines()[-2:]) == (0, ["/dev/null", "/dev/null"])
    assert not Path("/dev/null").is_file()


def test_markup_in_paths_is_text(wedlm, trace):
    saved.save(trace, "[b]trace[/b].json")
    code, output, _ = wedlm("--from", "[b]trace[/b].json", "--output", "[/b].html", "--terminal")
    assert (code, output.splitlines()[-1]) == (0, "[/b].html") and Path("[/b].html").exists()
