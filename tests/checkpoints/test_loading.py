"""Loading runs no code of a checkpoint and waits for no Hub that is not there. Whatever happened to a file, it works
or ends with one clear error."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, edit, stock_twin, tiny_model, tiny_tokenizer, write_checkpoint
from transformers import AutoModelForCausalLM

from wedlm_hf import WeDLMForCausalLM, add_mask_adapter, convert, save_mask_adapter
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
    (checkpoint / "trap.py").write_text(f"open({str(checkpoint / 'ran')!r}, 'w')\n")
    names = {"AutoConfig": "trap.A", "AutoModelForCausalLM": "trap.B", "AutoTokenizer": ["trap.C", "trap.C"]}
    edit(checkpoint / file, auto_map=names, tokenizer_class="TrapTokenizer")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    load_model(checkpoint)
    refused = pytest.raises(ValueError, match=r"needs Python code of its own, which is not run")
    with refused if file == "tokenizer_config.json" else nullcontext():
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
def test_a_name_that_cannot_be_a_checkpoint_is_refused(load):
    for name, error, message in (
        ("", ValueError, "The checkpoint must be a folder or a Hub id, got ''"),
        ("./missing", FileNotFoundError, r"There is no checkpoint folder './missing'\."),
        ("a/b/c", FileNotFoundError, r"There is no checkpoint folder 'a/b/c'\."),
        (__file__, NotADirectoryError, "got the file"),
        ("a b", ValueError, "a b"),
    ):
        with pytest.raises(error, match=message):
            load(name)


def test_a_folder_without_its_files_or_with_pickled_weights_is_refused(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint' has no tokenizer\.json or vocab\.json or tokenizer\.mo"):
        load_tokenizer(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), checkpoint / "pytorch_model.bin")  # pickled weights are never read
    with pytest.raises(OSError, match=r"has its weights as pytorch_model\.bin alone: .* so it is never read\."):
        load_model(checkpoint)
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(checkpoint)  # as the message says
    assert load_model(checkpoint).config.vocab_size == VOCAB_SIZE
    (checkpoint / "config.json").unlink()
    for load in LOADERS:
        with pytest.raises(FileNotFoundError, match=r"There is no checkpoint in '.*': it has no config\.json\."):
            load(checkpoint)
    with pytest.raises(FileNotFoundError, match=r"it has no weights\.gguf"):
        find_checkpoint(checkpoint, file="weights.gguf")
    (checkpoint / "work").mkdir()
    (checkpoint / "work" / "adapt.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="`wedlm adapt` has not finished there; the same command goes on"):
        load_model(checkpoint)


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
    # gguf.py has the arguments that `find_checkpoint` gives; without_package.py runs without the package;
    # merge.py reads an adapter's settings, no weights, and tells what fails as loading.py does.
    allowed = {"loading.py", "gguf.py", "without_package.py", "merge.py"}
    for folder in "checkpoints modeling_wedlm generation training adapters eval serving cli .".split():
        for file in (package / folder).glob("*.py" if folder == "." else "**/*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                    is_parent = ast.unparse(node.func).startswith("super()")
                    reads_nothing = node.args and ast.unparse(node.args[0]) == "None"
                    assert is_parent or reads_nothing or file.name in allowed, f"{file}:{node.lineno}"


# --- damaged files --------------------------------------------------------------------------------------------------

VALUES = [None, -1, 0, 1, 3, 1.5, float("nan"), 10**9, "x", "", [], {}, [1], {"a": 1}, True, False, "float16", [[]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """A checkpoint in one file, the same in several, a stock model, and a place for a damaged copy."""
    root = tmp_path_factory.mktemp("checkpoints")
    whole, sharded, stock = (root / name for name in ("whole", "sharded", "stock"))
    tiny_model().save_pretrained(whole)
    tiny_model().save_pretrained(sharded, max_shard_size="20KB")
    stock_twin(tiny_model(), "sdpa").save_pretrained(stock)
    for folder in (whole, sharded, stock):
        tiny_tokenizer().save_pretrained(folder)
        (folder / "trap.py").write_text(f"open({str(root / 'ran')!r}, 'w')\n")
    return [whole, sharded, stock, root / "damaged", root / "ran"]


def copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def damage(folder: Path, kind: str, data: st.DataObject) -> None:
    """One file is cut, emptied, has bits flipped, holds what another one does, or says something else in a field."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))
    file = data.draw(st.sampled_from(files), label="file")
    content = file.read_bytes()
    if kind == "field" and file.suffix == ".json":
        content = json.dumps(changed(json.loads(content), data)).encode()
    elif kind == "swap":
        content = data.draw(st.sampled_from(files), label="other").read_bytes()
    elif kind == "flip":
        content = bytearray(content)
        for place in data.draw(st.lists(st.integers(0, min(len(content), 3000) - 1), min_size=1, max_size=20)):
            content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        content = content[: data.draw(st.integers(0, 0 if kind == "empty" else len(content) - 1), label="kept")]
    file.write_bytes(content)


def changed(node: dict | list, data: st.DataObject) -> dict | list:
    """JSON with another value at one place, or without it."""
    if not node:
        return node
    key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))), label="key")
    if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
        node[key] = changed(node[key], data)
    elif data.draw(st.integers(0, 3)) == 0:
        del node[key]
    else:
        node[key] = data.draw(st.sampled_from(VALUES), label="value")
    return node


def attempt(folder: Path, *, is_stock: bool) -> str:
    """The message, if it fails."""
    try:
        if is_stock:
            convert(folder)
        else:
            model, tokenizer = load_model(folder), load_tokenizer(folder)
            template = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            inputs = tokenizer.apply_chat_template([{"role": "user", "content": "3 + 4"}], **template)
            if inputs["input_ids"].numel() and inputs["input_ids"].shape[1] < 100:
                model.generate(**inputs, strategy="wedlm", max_new_tokens=3)
    except (OSError, ValueError) as error:
        return str(error) or repr(error)
    return ""


@settings(max_examples=75)
@given(st.integers(0, 2), st.sampled_from(["cut", "empty", "flip", "swap", "field", "field"]), st.data())
def test_a_damaged_file_is_a_clear_error_and_runs_no_code(folders, which, kind, data):
    *sources, damaged, ran = folders
    copied(sources[which], damaged)
    damage(damaged, kind, data)
    attempt(damaged, is_stock=which == 2)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [("config.json", "{", "config.json' is no JSON: "),
     ("config.json", "[]", "config.json' must hold a JSON object."),
     ("config.json", "[" * 100_000, "config.json' is no JSON: "),
     ("generation_config.json", "{", "generation_config.json' is no JSON: "),
     ("generation_config.json", '{"eos_token_id": "x"}', "`eos_token_id` of generation_config.json must be an in"),
     ("generation_config.json", '{"eos_token_id": [2, null]}', "an integer or a list of integers, got [2, "),
     ("tokenizer_config.json", '"', "tokenizer_config.json' is no JSON: "),
     ("tokenizer.json", "{", "The tokenizer of "),
     ("chat_template.jinja", "{% for", "cannot be read: TemplateSyntaxError"),
     ("chat_template.jinja", "{{ mesages[0].content }}", "cannot be read: UndefinedError: 'mesages' is undefined"),
     ("model.safetensors.index.json", "", "model.safetensors.index.json' is no JSON: ")],
)  # fmt: skip
def test_the_error_names_what_is_damaged(folders, file, text, message):
    _, sharded, _, damaged, _ = folders
    copied(sharded, damaged)
    (damaged / file).write_text(text)
    found = attempt(damaged, is_stock=False)
    assert message in found and "\n" not in found


def drop_weights(file: Path) -> None:
    kept = {name: weight for name, weight in load_file(file).items() if "layers.1.mlp" not in name}
    save_file(kept, file, metadata={"format": "pt"})


def test_weights_that_do_not_fit_are_an_error_of_one_line(folders):
    whole, _, _, damaged, _ = folders
    for harm, message in (
        (lambda file: edit(file.with_name("config.json"), intermediate_size=7), "weights of other shapes than its"),
        (lambda file: file.write_bytes(file.read_bytes()[:9000]), "are damaged or truncated: Error while deserializ"),
        (lambda file: file.unlink(), "no file named model.safetensors"),
        (drop_weights, "lacks 3 of the weights that "),
    ):
        harm(copied(whole, damaged) / "model.safetensors")
        assert message in attempt(damaged, is_stock=False)


def test_a_template_that_refuses_a_chat_of_its_own_accord_is_not_damaged(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception('Begin with a system message.') }}")
    assert load_tokenizer(checkpoint).chat_template
