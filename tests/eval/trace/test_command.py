"""The command `wedlm trace`."""

import json
from pathlib import Path

import pytest
from tiny import tiny_tokenizer, write_checkpoint
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.eval.prompts import encode

PROMPT = "1, 2, 3"


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), model)


@pytest.fixture
def wedlm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, stdin=""):
        result = CliRunner().invoke(cli.app, ["trace", *map(str, arguments)], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def test_the_command_writes_a_page_and_keeps_the_trace(wedlm, checkpoint):
    turns = [{"role": role, "content": PROMPT} for role in ("user", "assistant", "user")]
    Path("chats.jsonl").write_text(json.dumps({"messages": turns}))
    short = ("--model", checkpoint, "--max-new-tokens", 6, "--repeats", 1, "--file", "chats.jsonl")
    code, output, errors = wedlm(*short, "--save", "[b]/trace.json")
    assert (code, "Error" in errors) == (0, False), errors
    assert output.splitlines()[-2:] == ["[b]/trace.json", "build/trace.html"]
    assert "tokens per forward" in output
    kept = json.loads(Path("[b]/trace.json").read_text())
    (recording,) = kept["recordings"]
    assert recording["prompt_tokens"] == encode(tiny_tokenizer(), turns)
    assert recording["prompt"] == "\n".join([PROMPT] * 3)
    page = Path("build/trace.html").read_text()
    assert json.loads(page.split('<script id="trace" type="application/json">')[1].split("</script>")[0]) == kept
