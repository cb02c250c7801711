"""`wedlm push`: what is checked before a folder goes to the Hub, and what an upload changes there."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, get_peft_model
from tiny import edit, tiny_tokenizer, write_checkpoint
from typer.testing import CliRunner

from wedlm_hf import WeDLMForCausalLM, add_mask_adapter, cli, save_mask_adapter
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.apps import push

OWN = "---\nlicense: mit\n---\n\n# Mine\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(*words):
    return CliRunner().invoke(cli.app, ["push", *map(str, words)])


def test_a_dry_run_generates_in_a_process_without_this_package_and_leaves_the_folder_alone(folder):
    before = contents(folder)
    result = command(folder, "someone/model", "--license", "mit", "--dry-run", "--json")
    assert (result.exit_code, contents(folder)) == (0, before), result.stderr
    found = json.loads(result.stdout)
    assert found == {"checked": found["checked"], "files": sorted(before), "uploaded_to": None}
    assert int(found["checked"].split()[0]) > 24 and "in a process without this package" in found["checked"]


@pytest.mark.slow
def test_a_lora_is_checked_on_its_base_and_a_mask_token_of_another_tokenizer_is_refused(folder, saved, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(WeDLMForCausalLM.from_pretrained(saved), LoraConfig(target_modules="all-linear", r=2))
    model.save_pretrained(tmp_path / "lora")
    assert "in a process without this package" in push.check(tmp_path / "lora", str(saved))
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"without this package: .*mask tokens of tokenizer and model differ: ids"):
        push.check(folder)


def test_a_mask_adapter_is_tried_on_its_base(saved, tmp_path):
    model = WeDLMForCausalLM.from_pretrained(saved)
    add_mask_adapter(model, MaskAdapterSettings(rank=2, target_modules=("o_proj",), head_width=8))
    save_mask_adapter(model, tmp_path)
    assert push.check(tmp_path) == f"24 tokens on {saved}."


def test_code_that_is_not_this_versions_is_not_run(folder, monkeypatch):
    monkeypatch.setattr(push.subprocess, "run", lambda *_, **__: pytest.fail("it was run"))
    for change in ("\nprint('other')\n", None):
        path = folder / "sampling_wedlm.py"
        path.write_text(path.read_text() + change) if change else path.unlink()
        with pytest.raises(ValueError, match=r"sampling_wedlm.py' is missing or not this version's: load the model"):
            push.check(folder)


def test_a_card_needs_a_licence_which_an_option_states(folder):
    with pytest.raises(ValueError, match="The card states no `license`: pass `--license`"):
        push.card(folder, "someone/model")
    text = push.card(folder, "someone/model", "apache-2.0")
    assert ModelCard(text).data.license == "apache-2.0"
    assert text.count('from_pretrained("someone/model"') == 2
    assert not push.is_written_by_a_person(text)
    (folder / "README.md").write_text(OWN)
    assert push.card(folder, "someone/model").split() == OWN.split()
    (folder / "README.md").unlink()
    assert "# model\n" in push.card(folder, "someone/model", "mit")


def test_an_adapter_needs_a_card_of_its_own_and_a_base_that_others_can_load(tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no README.md: write one, with a `license` at its top"):
        push.card(tmp_path, "someone/adapter")
    text = "---\nlicense: mit\nbase_model: /home/me/model\ntags:\n- base_model:adapter:/home/me/model\n- lora\n---\n\n"
    code = f'AutoModel.from_pretrained("model")\nload_mask_adapter(model, "{tmp_path.name}")\n'
    (tmp_path / "README.md").write_text(text + code)
    for base, message in {
        "/home/me/model": "names a base of this machine, '/home/me/model', which nobody else can load",
        "gpt2": r"names its base 'gpt2', without an owner, .* write the Hub id .* OWNER/NAME",
    }.items():
        file.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
        with pytest.raises(ValueError, match=message):
            push.card(tmp_path, "someone/adapter")
    edit(file, base_model_name_or_path="someone/model")
    made = push.card(tmp_path, "someone/adapter")
    assert "/home/me" not in made and 'load_mask_adapter(model, "someone/adapter")' in made
    assert 'AutoModel.from_pretrained("someone/model")' in made
    assert (ModelCard(made).data.base_model, ModelCard(made).data.tags) == ("someone/model", ["lora"])


def test_without_a_connection_nothing_goes(folder, monkeypatch):
    monkeypatch.setattr(push, "check", lambda *_: "all good")
    monkeypatch.setattr(push, "is_hub_reachable", lambda: False)
    result = command(folder, "someone/model", "--license", "mit")
    assert (result.exit_code, result.stdout) == (2, "Checked: all good\n")
    assert "cannot be reached: nothing was uploaded" in result.stderr


class Hub:
    """A Hub in a folder; the calls are checked against the signatures of `HfApi`."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.api = create_autospec(HfApi, instance=True)
        self.api.create_repo.return_value = SimpleNamespace(repo_id="someone/model")
        for name in ("hf_hub_download", "upload_folder", "upload_file"):
            getattr(self.api, name).side_effect = getattr(self, name)

    def hf_hub_download(self, repo_id, filename, **_):
        if not (self.folder / filename).exists():
            raise EntryNotFoundError(filename)
        return str(self.folder / filename)

    def upload_folder(self, *, folder_path, ignore_patterns, delete_patterns, create_pr, **_):
        for name in filter_repo_objects([*contents(self.folder)], allow_patterns=delete_patterns):
            (self.folder / name).unlink()
        for name in filter_repo_objects([*contents(folder_path)], ignore_patterns=ignore_patterns):
            (self.folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder_path / name, self.folder / name)
        url, revision = ("https://hub/pull/1", "refs/pr/1") if create_pr else (None, None)
        return SimpleNamespace(commit_url="https://hub/commit", pr_url=url, pr_revision=revision)

    def upload_file(self, *, path_or_fileobj, path_in_repo, **_):
        (self.folder / path_in_repo).write_bytes(path_or_fileobj)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(push, "is_hub_reachable", lambda: True)
    monkeypatch.setattr(push, "HfApi", lambda: hub.api)
    return hub


def uploaded(folder, hub, license="mit", **options):
    return push.upload(folder, "someone/model", push.card(folder, "someone/model", license), **options)


def test_an_upload_replaces_older_weights_and_code_and_leaves_out_what_a_training_left(folder, hub):
    wanted = set(contents(folder))
    left = ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "_lock", ".hidden", "checkpoint-3/x.safetensors")
    for name in left:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    for name in ("model-00001-of-00002.safetensors", "old_wedlm.py", "mine.txt"):
        (hub.folder / name).touch()
    assert uploaded(folder, hub, message="First") == "https://hub/commit"
    assert hub.api.upload_folder.call_args.kwargs["commit_message"] == "First"
    hub.api.create_branch.assert_not_called()
    assert set(contents(hub.folder)) == wanted | {"mine.txt"}
    assert contents(hub.folder)["model.safetensors"] == contents(folder)["model.safetensors"]
    assert ModelCard((hub.folder / "README.md").read_text()).data.license == "mit"


def test_a_branch_and_a_pull_request_get_the_files_and_the_card_which_replaces_an_earlier_one_but_no_persons(
    folder, hub
):
    assert uploaded(folder, hub, revision="trial") == "https://hub/commit"
    hub.api.create_branch.assert_called_once_with("someone/model", branch="trial", exist_ok=True)
    assert uploaded(folder, hub, license="apache-2.0", create_pr=True) == "https://hub/pull/1"
    revisions = [call.kwargs["revision"] for call in hub.api.upload_file.call_args_list]
    assert revisions == ["trial", "refs/pr/1"]
    assert ModelCard((hub.folder / "README.md").read_text()).data.license == "apache-2.0"
    (hub.folder / "README.md").write_text(OWN)
    uploaded(folder, hub)
    assert (hub.folder / "README.md").read_text() == OWN
