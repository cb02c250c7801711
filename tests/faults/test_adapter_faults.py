"""Damaged and hostile files of mask adapters and of the runs that train them: one clear error each."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_adapt import SMALL, write_base
from test_branches import adapted
from tiny import edit, tiny_model

from wedlm_hf import load_mask_adapter, save_mask_adapter
from wedlm_hf.adapters import adapt as adapting
from wedlm_hf.adapters.adapt import AdaptConfig, adapt
from wedlm_hf.adapters.answers import read_answers, read_user_prompts


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_mask_adapter(adapted(), folder)
    return folder


@pytest.fixture
def saved(adapter, tmp_path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "adapter"))


def refused(folder: Path, message: str, error: type[Exception] = ValueError) -> None:
    model = tiny_model()
    with pytest.raises(error, match=message):
        load_mask_adapter(model, folder)
    assert not model.has_mask_adapter and all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LORA"}, "is no mask adapter: its `peft_type` is 'LORA'"),
        ({"rank": "4"}, "must state `rank`, a whole number; got '4'"),
        ({"rank": None}, "must state `rank`, a whole number; got None"),
        ({"rank": 10**12}, "do not fit its adapter_config.json: `rank` 1000000000000"),
        ({"rank": 0}, "needs a `rank` of at least 1"),
        ({"head_width": -1}, "at least 0"),
        ({"head_width": 10**12}, "do not fit its adapter_config.json: .* `head_width` 1000000000000"),
        ({"head_width": True}, "must state `head_width`, a whole number; got True"),
        ({"rank": 4.5}, "must state `rank`, a whole number; got 4.5"),
        ({"target_modules": ["o_proj", "../x"]}, "'../x', which no decoder layer has"),
        ({"num_masks": 0}, "`num_masks` of at least 1"),
        ({"num_masks": "4"}, "may state `num_masks`, a whole number; got '4'"),
        ({"root_width": 16}, "do not fit its adapter_config.json: .*`root_width` 16"),
        ({"layers_to_transform": [0, "1"]}, "may state `layers_to_transform`, a list of whole numbers; got"),
        ({"layers_to_transform": 0}, "may state `layers_to_transform`, a list of whole numbers; got 0"),
        ({"layers_to_transform": [-1]}, "counts layers from 0 and names each once"),
        ({"layers_to_transform": [0, 0]}, "counts layers from 0 and names each once"),
        ({"target_modules": "o_proj"}, "must state `target_modules`, a list of names; got 'o_proj'"),
        ({"target_modules": [["o_proj"]]}, "a list of names"),
        ({"target_modules": []}, "a list of names"),
        ({"target_modules": ["o_proj", "o_proj"]}, "named once each"),
        ({"target_modules": ["o_proj", "forward"]}, "'forward', which no decoder layer has"),
        ({"target_modules": ["o_proj", "input_layernorm"]}, "'input_layernorm', which is no linear layer"),
    ],
)
def test_an_adapter_config_that_makes_no_sense_is_refused(saved, changes, message):
    edit(saved / "adapter_config.json", **changes)
    refused(saved, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda name, tensor: None if "head" in name else tensor, "do not fit"),
        (lambda name, tensor: None if "mask_embedding" in name else tensor, r"do not fit .*\n.*mask_embedding"),
        (lambda name, tensor: tensor.fill_(3e38), "beyond float16's largest"),
        (lambda name, tensor: tensor.fill_(float("nan")), "NaN"),
        (lambda name, tensor: tensor.fill_(float("inf")), "infinite"),
        (lambda name, tensor: tensor.to(torch.int8), "must be floating point"),
    ],
)
def test_weights_that_are_none_are_refused(saved, changed, message):
    file = saved / "adapter_model.safetensors"
    found = {name: changed(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, file)
    refused(saved, message)


def test_damaged_and_missing_files_are_named(saved):
    weights = saved / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(saved, "damaged or truncated", OSError)
    (saved / "adapter_config.json").write_text("{")
    refused(saved, "is damaged", OSError)
    refused(saved / "nowhere", "nowhere", OSError)


def test_prompts_that_can_be_read_only_once_are_refused(tmp_path):
    os.mkfifo(tmp_path / "prompts")
    for path in (tmp_path / "prompts", Path("/dev/null")):
        with pytest.raises(ValueError, match="The prompts must be a file, since a run that goes on reads it again"):
            read_user_prompts(path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"null"])
@pytest.mark.parametrize("name", ["adapt.json", "state.json"])
def test_a_damaged_file_of_an_earlier_run_is_named(tmp_path, monkeypatch, name, content):
    base, config, work = write_base(tmp_path / "llama"), AdaptConfig(tokens=10, **SMALL), tmp_path / "out" / "work"
    work.mkdir(parents=True)
    if name == "state.json":
        (work / "adapt.json").write_text(json.dumps({"format": adapting.FORMAT} | config.identity(str(base))))
    (work / name).write_bytes(content)
    monkeypatch.setattr(adapting, "load_model", None)  # no work is begun
    with pytest.raises(ValueError, match=f"{name}' is damaged: choose a new folder"):
        adapt(base, tmp_path / "out", config)
    assert (work / name).read_bytes() == content


def test_a_run_ends_although_a_full_disk_cut_off_a_line_of_its_log(tmp_path):
    base, prompts, out = write_base(tmp_path / "llama"), tmp_path / "prompts.txt", tmp_path / "out"
    log = out / "work" / "training" / "log.jsonl"
    adapt(base, out, AdaptConfig(tokens=30, prompts=prompts, **SMALL))
    whole, cut = log.read_bytes(), b'{"step": 3, "lo'
    log.write_bytes(whole + cut)
    adapt(base, out, AdaptConfig(tokens=60, prompts=prompts, **SMALL))
    first, *others = log.read_bytes().removeprefix(whole).splitlines()
    assert first == cut and others and all(map(json.loads, others))


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", "{}", '{"prompt_ids": 3, "response_ids": [4]}', '{"prompt_ids": [1], "response_ids": ""}']
)
def test_a_damaged_line_of_answers_is_named(tmp_path, line):
    good = json.dumps({"prompt_ids": [5], "response_ids": [6], "greedy": True, "batch": 0})
    own, work = tmp_path / "own.jsonl", tmp_path / "out" / "work"
    own.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(
        ValueError, match=r"^Line 2 of '.*own\.jsonl' must be an object with the lists .*_ids` of whole numbers\.$"
    ):
        read_answers(own)
    work.mkdir(parents=True)
    own.rename(work / "answers.jsonl")
    base = write_base(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"answers\.jsonl' is damaged: delete it"):
        adapt(base, tmp_path / "out", AdaptConfig(tokens=10, prompts=tmp_path / "prompts.txt", **SMALL))
