"""An adapter in the commands: `--adapter`, the folder that `wedlm adapt` writes, and the table of what it gives."""

import json
import shutil

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.eval.adapter_table import measure_adapter
from wedlm_hf.eval.options import LoadingOptions
from wedlm_hf.eval.prompts import Prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An adapter with its base beside it."""
    folder = tmp_path_factory.mktemp("adapter")
    model = tiny_model()
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    model.add_mask_adapter(MaskAdapterSettings(rank=2, head_width=4))
    model.save_mask_adapter(folder)
    return folder


def test_a_folder_with_adapter_and_base_is_loaded_as_both(folder):
    by_option, _ = LoadingOptions(adapter=str(folder)).load(str(folder / "base"))
    by_folder, _ = LoadingOptions().load(str(folder))
    for name, parameter in by_option.named_parameters():
        assert torch.equal(parameter, by_folder.get_parameter(name)), name
    assert by_folder.has_mask_adapter


def test_with_an_adapter_verified_decoding_is_the_default_and_what_is_stored_stays(folder):
    assert LoadingOptions().load(str(folder))[0].generation_config.verification == "exact"
    base, _ = LoadingOptions().load(str(folder / "base"))
    assert getattr(base.generation_config, "verification", None) is None
    base.generation_config.verification = "typical"
    base.save_pretrained(folder / "typical")
    tiny_tokenizer().save_pretrained(folder / "typical")
    model, _ = LoadingOptions(adapter=str(folder)).load(str(folder / "typical"))
    assert model.generation_config.verification == "typical"


def test_an_adapter_alone_names_its_base(folder, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / name, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(folder / "base")})
    )
    assert LoadingOptions().load(str(tmp_path))[0].has_mask_adapter
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="does not say which model it belongs to"):
        LoadingOptions().load(str(tmp_path))


def test_a_command_says_that_there_is_no_adapter(folder, tmp_path):
    command = ["generate", "hi", "--model", str(folder / "base"), "--adapter", str(tmp_path)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 2 and "adapter_config.json" in result.stderr


@pytest.mark.filterwarnings("error::FutureWarning:wedlm_hf", "error::DeprecationWarning:wedlm_hf")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["ar", "ar+lookup", "wedlm+exact"]),
        ({"batch_size": 2}, ["ar", "wedlm+exact"]),
        ({"temperature": 0.7}, ["ar", "ar+lookup", "wedlm+exact"]),
    ],
)
def test_the_table_has_what_was_measured(folder, options, names):
    model, tokenizer = LoadingOptions().load(str(folder))
    prompts = [Prompt.of("", tokens=[5, 6, 7 + index], task="ab"[index % 2]) for index in range(4)]
    made = measure_adapter(model, tokenizer, prompts, max_new_tokens=12, **options)
    assert [row[0] for row in made["rows"]] == names
    assert {task: [row[0] for row in rows] for task, rows in made["tasks"].items()} == {"a": names, "b": names}
    exact = [row for row in made["measured"] if row["decoder"] == "wedlm+exact"]
    pooled = sum(row["new_tokens"] for row in exact) / sum(row["forwards"] for row in exact)
    assert made["rows"][-1][1] == f"{pooled:.2f}"
    assert made["rows"][-1][-1] == ("another draw" if "temperature" in options else "4 of 4")
    lookup = [row for row in made["measured"] if row["decoder"] == "ar+lookup"]
    assert all(row["forwards"] <= row["new_tokens"] for row in lookup)
