"""Code and card beside saved weights: loaded where our package is out of reach, saved there, pushed to the Hub."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from huggingface_hub import ModelCard, ModelCardData
from tiny import edit, tiny_config, tiny_model, tiny_tokenizer, write_checkpoint, write_stock_checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_relative_import_files

import wedlm_hf
from wedlm_hf import WeDLMConfig, WeDLMForCausalLM, WeDLMModel, convert
from wedlm_hf.checkpoints import card
from wedlm_hf.checkpoints.card import is_written_by_a_person, model_card, provenance, read_card, signed, write_card
from wedlm_hf.modeling_wedlm.hub import AUTO_MAP, hub_files

SETTINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 12, "strategy": "wedlm", "window_size": 4},
    {"max_new_tokens": 12, "strategy": "block", "window_size": 4},
    {"max_new_tokens": 12, "strategy": "wedlm", "verification": "exact"},
]
PROMPT = "Count from 1 to 9:"
MOST_LINES = 5075
VARIANTS = {"qwen3": "1GB", "qwen2.5": "40KB"}  # style of the weights, largest size of a file

# Runs in a process of its own that cannot import our package: for every job, load, generate, save.
CLEAN_PROCESS = """
import gc, json, sys

gc.disable()  # what is imported stays

sys.modules["wedlm_hf"] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
results = []
for job in json.loads(sys.argv[1]):
    model = AutoModelForCausalLM.from_pretrained(job["source"], trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    tokenizer = AutoTokenizer.from_pretrained(job["source"], trust_remote_code=True)
    inputs = tokenizer(job["prompt"], return_tensors="pt")
    results.append([model.generate(**inputs, **settings)[0].tolist() for settings in job["settings"]])
    try:
        model.generate(**inputs, strategy="wedlm", output_trace=True)
    except ValueError as error:
        assert "needs the package `wedlm-hf`" in str(error)
    else:
        raise AssertionError("not refused")
    assert model(**inputs, targets=inputs["input_ids"]).loss > 0  # training travels
    if job["target"]:
        model.save_pretrained(job["target"], max_shard_size=job["shards"])
        tokenizer.save_pretrained(job["target"])
    assert type(AutoConfig.from_pretrained(job["source"], trust_remote_code=True)) is type(model.config)
    backbone = AutoModel.from_pretrained(job["source"], trust_remote_code=True)
    assert type(backbone) is type(model.model)
assert [name for name in sys.modules if name.split(".")[0] == "wedlm_hf"] == ["wedlm_hf"]  # None
print(json.dumps(results))
"""


# Interpreters with other versions of the packages: what `make` sets up, and what the variable names.
ROOT = Path(wedlm_hf.__file__).parent
PYTHONS = [str(ROOT / name / "bin/python") for name in (".venv", ".venv-lowest", ".venv-newest")]
PYTHONS += os.environ.get("WEDLM_OTHER_PYTHONS", "").split(os.pathsep)
HERE = Path(sys.prefix).resolve()
OTHERS = [each for each in PYTHONS if os.path.exists(each) and Path(each).parents[1].resolve() != HERE]


def run_clean_process(jobs: list[dict[str, Any]], folder: Path, python: str = sys.executable) -> list[list[list[int]]]:
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_MODULES_CACHE")}
    environment = kept | {"HF_MODULES_CACHE": str(folder / "code"), "HF_HUB_OFFLINE": "1"}
    command = [python, "-I", "-c", CLEAN_PROCESS, json.dumps(jobs)]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def answers(model: WeDLMForCausalLM) -> list[list[int]]:
    """To the prompt, with each of the settings."""
    inputs = tiny_tokenizer()(PROMPT, return_tensors="pt")
    return [model.generate(**inputs, **settings)[0].tolist() for settings in SETTINGS]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_three_generations_are_byte_identical_and_generate_without_our_package(tmp_path):
    # Begin with what was read from files: transformers notes that in tokenizer_config.json, and orders shards by it.
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    expected = []
    for style, shards in VARIANTS.items():
        tiny_model(style).save_pretrained(tmp_path / style / "0")
        model = WeDLMForCausalLM.from_pretrained(tmp_path / style / "0")
        model.save_pretrained(tmp_path / style / "1", max_shard_size=shards)
        tokenizer.save_pretrained(tmp_path / style / "1")
        expected.append(answers(model))
    jobs = [
        {"source": str(tmp_path / style / str(generation)), "shards": shards, "prompt": PROMPT, "settings": SETTINGS,
         "target": str(tmp_path / style / str(generation + 1)) if generation < 3 else None}
        for generation in (1, 2, 3)
        for style, shards in VARIANTS.items()
    ]  # fmt: skip
    assert run_clean_process(jobs, tmp_path / "process") == 3 * expected
    for style in VARIANTS:
        first, second, third = (contents(tmp_path / style / str(generation)) for generation in (1, 2, 3))
        del first["README.md"]  # the card is the installed package's work
        assert first == second == third
        assert not any(file.endswith((".bin", ".pt")) for file in first)
    assert len([file for file in first if file.endswith(".safetensors")]) > 3


@pytest.mark.parametrize("python", OTHERS or [sys.executable])  # which others come back to
def test_checkpoints_travel_to_other_versions_of_the_packages_and_back(tmp_path, python):
    """By the code beside them alone, in the layout of today and in the published one."""
    folders = {layout: write_checkpoint(tmp_path / layout) for layout in ("today", "published")}
    base = {"rope_theta": 10_000.0, "rope_parameters": ..., "rope_scaling": None}
    edit(folders["published"] / "config.json", **base, torch_dtype="float32", dtype=..., transformers_version="4.51.0")
    expected = answers(tiny_model())
    common = {"shards": "1GB", "prompt": PROMPT, "settings": SETTINGS}
    there = [common | {"source": str(folder), "target": f"{folder}-back"} for folder in folders.values()]
    assert run_clean_process(there, tmp_path / "there", python) == 2 * [expected]
    for folder in folders.values():
        assert answers(WeDLMForCausalLM.from_pretrained(f"{folder}-back")) == expected
    if python != sys.executable:
        back = [common | {"source": f"{folder}-back", "target": None} for folder in folders.values()]
        assert run_clean_process(back, tmp_path / "here") == 2 * [expected]


def assert_holds_the_bundle(files: dict[str, bytes]) -> None:
    assert {name: text.decode() for name, text in files.items() if name.endswith(".py")} == hub_files()
    assert json.loads(files["config.json"])["auto_map"] == AUTO_MAP


def test_model_backbone_and_config_all_bring_the_whole_bundle_which_is_flat_and_small(tmp_path):
    """What no import of the model's file reaches is neither loaded by the Hub's loader nor saved by what it loads."""
    for name, saved in {"model": tiny_model(), "backbone": tiny_model().model, "config": tiny_config()}.items():
        saved.save_pretrained(tmp_path / name)
        assert_holds_the_bundle(contents(tmp_path / name))
    assert type(AutoConfig.from_pretrained(tmp_path / "config")) is WeDLMConfig
    assert type(AutoModel.from_pretrained(tmp_path / "backbone")) is WeDLMModel
    files = hub_files()
    reached = {Path(path).name for path in get_relative_import_files(tmp_path / "config" / "modeling_wedlm.py")}
    assert reached | {"modeling_wedlm.py"} == files.keys()
    for name, text in files.items():
        assert name.endswith("_wedlm.py")
        assert not re.search(r"^\s*(from|import)\s+\.\.", text, flags=re.MULTILINE), name
    assert sum(text.count("\n") for text in files.values()) <= MOST_LINES
    for target, cls in zip(AUTO_MAP.values(), (WeDLMConfig, WeDLMModel, WeDLMForCausalLM), strict=True):
        assert target == f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


@pytest.fixture
def hub(monkeypatch):
    """A Hub: `hub.card` is the card in the repository, `hub.commits` the files of each upload."""
    hub = SimpleNamespace(card=None, commits=[])

    class Api:
        def create_repo(self, repo_id, **_):
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, operations, **_):
            hub.commits.append({each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations})

    def card_of(repo_id, tags=None, token=None):
        return ModelCard(hub.card or str(ModelCard.from_template(ModelCardData(tags=tags or []))))

    for module in (transformers.utils.hub, transformers.modeling_utils, transformers.configuration_utils):
        monkeypatch.setattr(module, "hf_api", Api)
        monkeypatch.setattr(module, "create_and_tag_model_card", card_of, raising=False)
    return hub


def test_pushes_upload_the_bundle_and_a_card_with_the_name_in_it_but_keep_a_persons_own(tmp_path, hub):
    model, config = tiny_model(), str(tmp_path / "config")
    model.push_to_hub("someone/tiny", tags=["mine"])
    uploaded = hub.commits[0]["README.md"].decode()
    assert uploaded.count('from_pretrained("someone/tiny"') == 2
    assert "mine" in ModelCard(uploaded).data.tags
    hub.card = OWN
    (tmp_path / "README.md").write_text("# Local\n")
    model.save_pretrained(tmp_path, push_to_hub=True, repo_id="someone/tiny")
    assert (tmp_path / "README.md").read_text() == "# Local\n"
    model.push_to_hub("someone/tiny")
    model.config.push_to_hub("someone/tiny")
    for _ in range(2):  # again into the same folder: what a folder held before is not left out
        model.config.save_pretrained(config, push_to_hub=True)
    assert len(hub.commits) == 6
    for commit in hub.commits[:5]:
        assert_holds_the_bundle(commit)
    assert hub_files().keys() <= hub.commits[5].keys()
    assert ["model.safetensors" in commit for commit in hub.commits] == [True] * 3 + [False] * 3
    assert all(b"# Mine" in commit["README.md"] for commit in hub.commits[1:3])


# --- cards ---------------------------------------------------------------------------------------------------------


OWN = "---\nlicense: mit\nlanguage: fr\nbase_model: some/base\n---\n\n# Mine\n"
SAID = "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
SAID += "This model card has been automatically generated."


def test_the_card_of_a_saved_model_states_its_metadata_and_shows_code_that_runs(tmp_path, monkeypatch, capsys):
    tiny_tokenizer().save_pretrained(tmp_path)
    model = tiny_model()
    model.generation_config.max_length = 512
    model.save_pretrained(tmp_path)
    text = read_card(tmp_path)
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.base_model) == ("transformers", "text-generation", None)
    assert {"wedlm", "diffusion-language-model"} <= set(data.tags)
    assert "wedlm report FOLDER" in text and "apply_chat_template" in text
    monkeypatch.chdir(tmp_path)
    exec(text.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out


def test_a_card_names_the_base_and_its_licence_over_conversion_and_training(tmp_path, monkeypatch):
    stock = write_stock_checkpoint(tmp_path / "stock")
    (stock / "README.md").write_text(OWN)
    convert(stock, tmp_path / "converted")
    WeDLMForCausalLM.from_pretrained(tmp_path / "converted").save_pretrained(tmp_path / "tuned")
    for folder in ("converted", "tuned"):
        data = ModelCard(read_card(tmp_path / folder)).data
        assert (data.base_model, data.license, data.language) == ("some/base", "mit", "fr")
    # And so is a model of the Hub.
    monkeypatch.setattr(card, "try_to_load_from_cache", lambda *_: str(stock / "README.md"))
    assert provenance("some/model") == ("some/model", {"license": "mit", "language": "fr"})
    for name in ("", "a/b/c", "./folder", "model"):
        assert provenance(name) == (None, {})


def test_who_writes_a_card_warns_of_paths_of_this_machine_and_of_a_base_that_nobody_else_can_load(tmp_path, caplog):
    for base, said in {str(tmp_path): "nobody else can load", "gpt2": "'gpt2', which nobody", "you/model": ""}.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        write_card(
            tmp_path, signed("# An adapter\n\nSee https://huggingface.co/docs/peft, a/b/c and /no/such/place.\n")
        )
        assert (said in caplog.text) and bool(caplog.text) == bool(said)
        caplog.clear()
    write_card(tmp_path, signed(f"---\nbase_model: {tmp_path}\n---\n# An adapter\n"))
    assert f"README.md names {tmp_path}, a path of this machine" in caplog.text


def test_a_card_that_was_written_here_is_replaced_and_an_edited_one_is_not(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    ours = read_card(tmp_path)
    changed = model_card(model, tmp_path, metadata={"license": "mit"})
    assert write_card(tmp_path, changed) and read_card(tmp_path) == changed != ours
    assert not is_written_by_a_person(ours.replace("\n", "\r\n"))
    for own in (OWN, ours + "More words.\n", ours.replace("Nothing yet", "| a | table |"), ours.replace("wedlm", "x")):
        (tmp_path / "README.md").write_text(own)
        model.save_pretrained(tmp_path)
        assert read_card(tmp_path) == own and not write_card(tmp_path, ours)


def test_an_empty_form_is_no_persons_own_and_a_filled_one_is():
    described = ModelCard.from_template(ModelCardData(tags=["x"]), model_description=SAID)
    of_peft = f"{ModelCard.from_template(ModelCardData())}\n### Framework versions\n\n- PEFT 0.21.0\n"
    for form in (str(described), of_peft):
        assert not is_written_by_a_person(form)
        assert is_written_by_a_person(form.replace("[More Information Needed]", "Me", 1))
    assert not is_written_by_a_person(None) and not is_written_by_a_person(" \n")


def test_what_a_person_saves_is_loaded_by_the_installed_code_and_transformers_asks_nothing(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, tiny_model(masks_trained=True))
    bundle = list(tmp_path.glob("*_wedlm.py"))
    assert len(bundle) == len(hub_files())
    for file in bundle:
        file.write_text("raise RuntimeError('code of the folder was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked"))
    for auto, kind in ((AutoConfig, WeDLMConfig), (AutoModel, WeDLMModel), (AutoModelForCausalLM, WeDLMForCausalLM)):
        assert type(auto.from_pretrained(tmp_path)) is kind
    assert AutoTokenizer.from_pretrained(tmp_path)("5").input_ids
