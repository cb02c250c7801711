"""Damaged checkpoints: whatever happened to a file, loading and decoding work or end with one clear error."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import edit, stock_twin, tiny_model, tiny_tokenizer

from wedlm_hf import convert
from wedlm_hf.checkpoints.loading import load_model, load_tokenizer

VALUES = [None, -1, 0, 1, 3, 1.5, float("nan"), 10**9, "x", "", [], {}, [1], {"a": 1}, True, False, "float16", [[]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """A checkpoint in one file, the same in several, a stock model, and a place for a damaged copy."""
    root = tmp_path_factory.mktemp("checkpoints")
    whole, sharded, stock = root / "whole", root / "sharded", root / "stock"
    tiny_model().save_pretrained(whole)
    tiny_model().save_pretrained(sharded, max_shard_size="20KB")
    stock_twin(tiny_model(), "sdpa").save_pretrained(stock)
    for folder in (whole, sharded, stock):
        tiny_tokenizer().save_pretrained(folder)
        trap = folder / "trap.py"
        trap.write_text(f"open({str(root / 'ran')!r}, 'w')\n")
    return [whole, sharded, stock, root / "damaged", root / "ran"]


def copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))


def damage(folder: Path, kind: str, data: st.DataObject) -> None:
    """One file is cut, emptied, has bits flipped, holds what another one does, or says something else in a field."""
    files = files_of(folder)
    file = data.draw(st.sampled_from(files), label="file")
    content = file.read_bytes()
    if kind == "field" and file.suffix == ".json":
        file.write_text(json.dumps(changed(json.loads(content), data)))
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "swap":
        file.write_bytes(data.draw(st.sampled_from(files), label="other").read_bytes())
    elif kind == "flip":
        flipped = bytearray(content)
        for place in data.draw(st.lists(st.integers(0, min(len(content), 3000) - 1), min_size=1, max_size=20)):
            flipped[place] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(bytes(flipped))
    else:
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1), label="kept")])


def changed(root: object, data: st.DataObject) -> object:
    """JSON with another value at one place, or without it."""
    node = root
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return root
        key = data.draw(st.sampled_from(keys), label="key")
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
            continue
        if data.draw(st.integers(0, 3)) == 0:
            del node[key]
        else:
            node[key] = data.draw(st.sampled_from(VALUES), label="value")
        return root


def attempt(folder: Path, *, is_stock: bool) -> str:
    """The message, if it fails."""
    try:
        if is_stock:
            convert(folder)
        else:
            model, tokenizer = load_model(folder), load_tokenizer(folder)
            chat = [{"role": "user", "content": "3 + 4"}]
            template = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            inputs = tokenizer.apply_chat_template(chat, **template)
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
    [
        ("config.json", "{", "config.json' is no JSON: "),
        ("config.json", "[]", "config.json' must hold a JSON object."),
        ("config.json", "[" * 100_000, "config.json' is no JSON: "),
        ("generation_config.json", "{", "generation_config.json' is no JSON: "),
        ("generation_config.json", '{"eos_token_id": "x"}', "`eos_token_id` of generation_config.json must be an in"),
        ("generation_config.json", '{"eos_token_id": [2, null]}', "an integer or a list of integers, got [2, "),
        ("tokenizer_config.json", '"', "tokenizer_config.json' is no JSON: "),
        ("tokenizer.json", "{", "The tokenizer of "),
        ("chat_template.jinja", "{% for", "cannot be read: TemplateSyntaxError"),
        ("chat_template.jinja", "{{ mesages[0].content }}", "cannot be read: UndefinedError: 'mesages' is undefined"),
        ("model.safetensors.index.json", "", "model.safetensors.index.json' is no JSON: "),
    ],
)
def test_the_error_names_what_is_damaged(folders, file, text, message):
    _, sharded, _, damaged, _ = folders
    copied(sharded, damaged)
    (damaged / file).write_text(text)
    found = attempt(damaged, is_stock=False)
    assert message in found and "\n" not in found


def drop_weights(file: Path) -> None:
    kept = {name: weight for name, weight in load_file(file).items() if "layers.1.mlp" not in name}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda file: edit(file.with_name("config.json"), intermediate_size=7),
            "weights of other shapes than its con",
        ),
        (lambda file: file.write_bytes(file.read_bytes()[:9000]), "are damaged or truncated: Error while deserializ"),
        (lambda file: file.unlink(), "no file named model.safetensors"),
        (drop_weights, "lacks 3 of the weights that "),
    ],
)
def test_weights_that_do_not_fit_are_an_error_of_one_line(folders, harm, message):
    whole, _, _, damaged, _ = folders
    harm(copied(whole, damaged) / "model.safetensors")
    assert message in attempt(damaged, is_stock=False)


def test_a_template_that_refuses_a_chat_of_its_own_accord_is_not_damaged(folders):
    whole, _, _, damaged, _ = folders
    copied(whole, damaged)
    (damaged / "chat_template.jinja").write_text("{{ raise_exception('Begin with a system message.') }}")
    assert load_tokenizer(damaged).chat_template
