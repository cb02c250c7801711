"""`wedlm push`: what is checked before a folder goes to the Hub, and what an upload changes there."""

import json
import shutil
import types
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.apps.push import checks, upload
from wedlm_hf.apps.push.request import PushRequest

OWN = "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# Mine\n"
NAMES = ["files", "code", "tokenizer", "answers", "card"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny_tokenizer().save_pretrained(folder)
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def in_process(monkeypatch):
    """Answers "without this package" come from this process: quick, for tests of the other checks."""

    def answer(request, is_model):
        model, _ = checks._load(request, is_model)
        tokenizer = checks.load_tokenizer(checks._source(request, is_model))
        inputs = [tokenizer(prompt, return_tensors="pt") for prompt in checks.PROMPTS]
        answers = {
            name: [model.generate(**each, **options)[0, each["input_ids"].shape[1] :].tolist() for each in inputs]
            for name, options in checks._calls(request, is_model).items()
        }
        return {"prompts": [each["input_ids"][0].tolist() for each in inputs], "answers": answers}

    monkeypatch.setattr(checks, "_without_package", answer)


def push(*words, code=0):
    """{name: check} of a dry run."""
    result = CliRunner().invoke(cli.app, ["push", *map(str, words), "--dry-run", "--json"])
    assert result.exit_code == code, (result.stdout, result.stderr)
    results = json.loads(result.stdout)
    assert results["uploaded_to"] is None
    return {check["name"]: check for check in results["checks"]} | {"uploaded": results["files"]}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- checks ---------------------------------------------------------------------------------------------------------


def test_a_model_answers_the_same_in_a_process_without_this_package(folder):
    before = contents(folder)
    found = push(folder, "someone/model", "--license", "mit")
    assert list(found) == [*NAMES, "uploaded"]
    assert "in a process without this package, each the same as with it" in found["answers"]["found"]
    assert {"config.json", "model.safetensors", "modeling_wedlm.py", "tokenizer.json"} <= set(found["uploaded"])
    assert contents(folder) == before


def test_an_adapter_answers_the_same_on_the_code_of_its_base(saved, tmp_path):
    model = tiny_model()
    model.config.name_or_path = "someone/model"
    torch.manual_seed(0)
    model.add_mask_adapter(MaskAdapterSettings(rank=2, target_modules=("o_proj",), head_width=8))
    model.save_mask_adapter(tmp_path)
    shutil.copytree(saved, tmp_path / "base")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "answers.jsonl").touch()
    (tmp_path / "README.md").write_text(OWN.replace("transformers", "peft") + "\n")
    found = push(tmp_path, "someone/adapter", code=1)
    assert found["uploaded"] == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert [name for name in NAMES if name in found and not found[name]["is_good"]] == ["card"]
    assert "It names no `base_model`" in found["card"]["found"]
    assert "ar; wedlm, verified" in found["answers"]["found"]


def test_code_that_is_not_this_versions_is_not_run_unless_asked_for(folder, monkeypatch):
    monkeypatch.setattr(checks, "_without_package", lambda *_: pytest.fail("it was run"))
    path = folder / "sampling_wedlm.py"
    path.write_text(path.read_text() + "\nprint('other')\n")
    found = push(folder, "someone/model", "--license", "mit", code=1)
    assert found["code"]["found"].startswith("sampling_wedlm.py: missing or not as in this version")
    assert "its code was not run" in found["answers"]["found"]
    monkeypatch.setattr(checks, "_without_package", lambda *_: "SyntaxError: no")
    found = push(folder, "someone/model", "--license", "mit", "--trust-remote-code", code=1)
    assert found["code"]["is_good"]
    assert found["answers"]["found"] == "None in a process without this package: SyntaxError: no"


def test_a_checkpoint_that_names_no_code_is_a_problem(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    found = push(folder, "someone/model", "--license", "mit", code=1)
    assert "`auto_map` is None" in found["code"]["found"]


def test_other_tokens_without_this_package_are_a_problem(folder, in_process, monkeypatch):
    given = checks._without_package

    def other(request, is_model):
        found = given(request, is_model)
        found["answers"]["wedlm"][0][3] += 1
        return found

    monkeypatch.setattr(checks, "_without_package", other)
    found = push(folder, "someone/model", "--license", "mit", code=1)
    assert found["answers"]["found"] == "Others without this package (wedlm)."


def test_pickles_and_damaged_weights_are_problems_and_what_a_training_leaves_is_left_out(folder, in_process):
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "_lock", ".hidden"):
        (folder / name).touch()
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "model.safetensors").touch()
    found = push(folder, "someone/model", "--license", "mit")
    assert not {name for name in found["uploaded"] if name.endswith((".bin", ".pt", ".pth"))}
    assert [name for name in found["uploaded"] if name.endswith(".safetensors")] == ["model.safetensors"]
    (folder / "pytorch_model.bin").touch()
    (folder / "extra.safetensors").write_bytes(b"\x00" * 9)
    found = push(folder, "someone/model", "--license", "mit", code=1)
    assert "pytorch_model.bin: pickled files can run code" in found["files"]["found"]
    assert "extra.safetensors is damaged" in found["files"]["found"]


def test_a_mask_token_of_another_tokenizer_is_a_problem(folder, in_process):
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    assert "Its mask token is id" in push(folder, "someone/model", "--license", "mit", code=1)["tokenizer"]["found"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("license: mit\n", "It states no `license`"),
        ("pipeline_tag: text-generation\n", "`pipeline_tag` must be 'text-generation', got None."),
        ("library_name: transformers\n", "`library_name` must be 'transformers', got None."),
    ],
)
def test_metadata_that_a_card_lacks_is_named(folder, in_process, changed, message):
    (folder / "README.md").write_text(OWN.replace(changed, ""))
    assert message in push(folder, "someone/model", code=1)["card"]["found"]


def test_a_licence_for_a_card_of_a_persons_own_is_refused(folder, in_process):
    (folder / "README.md").write_text(OWN)
    result = CliRunner().invoke(cli.app, ["push", str(folder), "someone/model", "--license", "mit", "--dry-run"])
    assert result.exit_code == 2
    assert "README.md was written by a person" in result.stderr


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_model_or_adapter_is_refused(name, tmp_path):
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(cli.app, ["push", str(tmp_path / name), "someone/model"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert repr(str(tmp_path / name)) in result.stderr


def test_what_is_found_is_printed_line_by_line_and_without_a_connection_nothing_goes(folder, in_process, monkeypatch):
    monkeypatch.setattr(upload, "is_hub_reachable", lambda: False)
    result = CliRunner().invoke(cli.app, ["push", str(folder), "someone/model", "--license", "mit"])
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["ok", name] for name in NAMES]
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "cannot be reached: nothing was uploaded" in result.stderr


# --- uploads --------------------------------------------------------------------------------------------------------


class Hub:
    """A Hub in a folder; the calls are checked against the signatures of `HfApi`."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.api = create_autospec(HfApi, instance=True)
        self.api.create_repo.return_value = types.SimpleNamespace(repo_id="someone/model")
        self.api.list_repo_files.side_effect = lambda *_, **__: [path.name for path in folder.iterdir()]
        self.api.hf_hub_download.side_effect = self.download
        self.api.create_commit.side_effect = self.commit

    def download(self, repo_id, filename, **_):
        if not (self.folder / filename).exists():
            raise EntryNotFoundError(filename)
        return str(self.folder / filename)

    def commit(self, repo_id, operations, *, create_pr, **_):
        for each in operations:
            target = self.folder / each.path_in_repo
            if type(each).__name__ == "CommitOperationDelete":
                target.unlink()
            elif isinstance(each.path_or_fileobj, bytes):
                target.write_bytes(each.path_or_fileobj)
            else:
                shutil.copyfile(each.path_or_fileobj, target)
        return types.SimpleNamespace(
            pr_url="https://hub/pull/1" if create_pr else None, commit_url="https://hub/commit"
        )


@pytest.fixture
def hub(tmp_path):
    return Hub(tmp_path / "hub")


def uploaded(folder, hub, **options):
    request = PushRequest(folder, "someone/model", **{"license": "mit"} | options)
    package = checks.check_folder(request, lambda check: None)
    assert package.is_good, package.checks
    return upload.upload(request, package, hub.api)


def test_an_upload_is_one_commit_and_replaces_older_weights_and_code(folder, hub, in_process):
    for name in ("model-00001-of-00002.safetensors", "old_wedlm.py", "mine.txt"):
        (hub.folder / name).touch()
    assert uploaded(folder, hub, message="First") == "https://hub/commit"
    hub.api.create_commit.assert_called_once()
    assert hub.api.create_commit.call_args.kwargs["commit_message"] == "First"
    hub.api.create_branch.assert_not_called()
    names = {path.name for path in hub.folder.iterdir()}
    assert names == {str(path) for path in contents(folder)} | {"mine.txt"}
    card = ModelCard((hub.folder / "README.md").read_text())
    assert card.data.license == "mit"
    assert 'from_pretrained("someone/model"' in card.text
    assert (hub.folder / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_branch_is_made_where_there_is_none_and_all_is_read_and_written_there(folder, hub, in_process):
    hub.api.revision_exists.side_effect = [False, True]
    for _ in range(2):
        assert uploaded(folder, hub, revision="trial") == "https://hub/commit"
        for call in (hub.api.hf_hub_download, hub.api.list_repo_files, hub.api.create_commit):
            assert call.call_args.kwargs["revision"] == "trial"
    hub.api.create_branch.assert_called_once_with("someone/model", branch="trial")


@pytest.mark.parametrize("revision", [None, "trial"])
def test_a_pull_request_needs_no_branch_of_its_own_and_its_address_is_told(folder, hub, in_process, revision):
    hub.api.revision_exists.return_value = False
    assert uploaded(folder, hub, create_pr=True, revision=revision) == "https://hub/pull/1"
    assert hub.api.create_commit.call_args.kwargs["revision"] == revision
    hub.api.create_branch.assert_not_called()


def test_an_upload_replaces_the_card_of_an_earlier_one_and_keeps_a_persons_own(folder, hub, in_process):
    uploaded(folder, hub)
    uploaded(folder, hub, license="apache-2.0")
    assert ModelCard((hub.folder / "README.md").read_text()).data.license == "apache-2.0"
    (hub.folder / "README.md").write_text(OWN)
    uploaded(folder, hub)
    assert (hub.folder / "README.md").read_text() == OWN
    uploaded(folder, hub, overwrite_card=True)
    assert "# model\n" in (hub.folder / "README.md").read_text()


def test_of_two_cards_that_people_wrote_neither_is_lost_unasked(folder, hub, in_process):
    (hub.folder / "README.md").write_text(OWN)
    local = OWN.replace("Mine", "Local")
    (folder / "README.md").write_text(local)
    with pytest.raises(ValueError, match="pass `--overwrite-card`"):
        uploaded(folder, hub, license=None)
    hub.api.create_commit.assert_not_called()
    (hub.folder / "README.md").write_text(local)
    uploaded(folder, hub, license=None)
    assert (hub.folder / "README.md").read_text() == local
