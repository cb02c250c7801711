"""Loading runs no code of a checkpoint, waits for no Hub that is not there, and its errors are clear."""

import ast
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from tiny import edit, tiny_model, write_checkpoint
from transformers import AutoModelForCausalLM

from wedlm_hf import WeDLMForCausalLM, add_mask_adapter, save_mask_adapter
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.checkpoints import loading
from wedlm_hf.checkpoints.find import find_checkpoint
from wedlm_hf.checkpoints.loading import load_config_dict, load_model, load_tokenizer

NOWHERE = "http://127.0.0.1:9"  # refuses connections
LOADERS = [load_config_dict, load_model, load_tokenizer]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("original") / "checkpoint")


@pytest.fixture
def checkpoint(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_python_files_of_a_checkpoint_never_run_whatever_is_piped_in(checkpoint, file, monkeypatch, capsys):
    trap = checkpoint / "trap.py"
    trap.write_text(f"open({str(checkpoint / 'ran')!r}, 'w')\n")
    names = {"AutoConfig": "trap.A", "AutoModelForCausalLM": "trap.B", "AutoTokenizer": ["trap.C", "trap.C"]}
    edit(checkpoint / file, auto_map=names, tokenizer_class="TrapTokenizer")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    load_model(checkpoint)
    if file == "tokenizer_config.json":
        with pytest.raises(ValueError, match=r"needs Python code of its own, which is not run"):
            load_tokenizer(checkpoint)
    else:
        load_tokenizer(checkpoint)
    assert "Do you wish" not in "".join(capsys.readouterr()) and not (checkpoint / "ran").exists()


def test_without_a_connection_a_cached_hub_id_loads_and_another_fails_at_once(original, tmp_path):
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(original, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    code = """
import time
from wedlm_hf.checkpoints.loading import load_config_dict, load_model, load_tokenizer
start = time.monotonic()
print(load_config_dict("someone/tiny")["model_type"], load_tokenizer("someone/tiny").mask_token)
print(type(load_model("someone/tiny")).__name__, time.monotonic() - start < 10)
start = time.monotonic()
try:
    load_model("nobody/nothing")
except OSError as error:
    print(error, time.monotonic() - start < 10)
"""
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": NOWHERE, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("wedlm <|mask|>\nWeDLMForCausalLM True\n'nobody/nothing' is no folder"), done.stderr
    assert done.stdout.endswith(f"and {NOWHERE} cannot be reached. True\n")


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", ValueError, "The checkpoint must be a folder or a Hub id, got ''"),
        ("./missing", FileNotFoundError, r"There is no checkpoint folder './missing'\."),
        ("a/b/c", FileNotFoundError, r"There is no checkpoint folder 'a/b/c'\."),
        (__file__, NotADirectoryError, "got the file"),
        ("a b", ValueError, "a b"),
    ],
)
def test_a_name_that_cannot_be_a_checkpoint_is_refused(load, name, error, message):
    with pytest.raises(error, match=message):
        load(name)


def test_a_folder_without_its_files_or_with_pickled_weights_is_refused(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint' has no tokenizer\.json or vocab\.json or tokenizer\.mo"):
        load_tokenizer(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), checkpoint / "pytorch_model.bin")  # pickled weights are never read
    with pytest.raises(OSError, match="safetensors"):
        load_model(checkpoint)
    (checkpoint / "config.json").unlink()
    for load in LOADERS:
        with pytest.raises(FileNotFoundError, match=r"There is no checkpoint in '.*': it has no config\.json\."):
            load(checkpoint)
    with pytest.raises(FileNotFoundError, match=r"it has no weights\.gguf"):
        find_checkpoint(checkpoint, file="weights.gguf")


def test_peft_loads_the_folder_of_a_mask_adapter_with_its_base(original, tmp_path):
    model = WeDLMForCausalLM.from_pretrained(original)
    adapter = add_mask_adapter(model, MaskAdapterSettings(rank=2, head_width=8))
    save_mask_adapter(model, tmp_path)
    for cls in (WeDLMForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"call `wedlm_hf\.load_mask_adapter"):
            cls.from_pretrained(tmp_path)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in adapter.state_dict().items():
        assert torch.equal(loaded.mask_adapter.state_dict()[name], weight)


def test_every_other_module_loads_through_this_one():
    package = Path(loading.__file__).parents[1]
    # gguf.py has the arguments that `find_checkpoint` gives; without_package.py runs without the package.
    allowed = {"loading.py", "gguf.py", "without_package.py"}
    for folder in "checkpoints modeling_wedlm generation training adapters eval apps serving cli .".split():
        for file in (package / folder).glob("*.py" if folder == "." else "**/*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                    is_parent = ast.unparse(node.func).startswith("super()")
                    reads_nothing = node.args and ast.unparse(node.args[0]) == "None"
                    assert is_parent or reads_nothing or file.name in allowed, f"{file}:{node.lineno}"
