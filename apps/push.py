"""The work of `wedlm push`: a folder is checked as someone without this package loads it, then uploaded to the Hub."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from ..adapters.adapter_files import PEFT_TYPE
from ..adapters.loading import load_adapted
from ..checkpoints.card import CARD_NAME, is_hub_id, is_written_by_a_person, model_card, read_card, signed
from ..checkpoints.find import ADAPTER_FILE, CONFIG_FILE, base_path, is_adapter, is_hub_reachable, read_adapter_config
from ..checkpoints.loading import load_model
from ..modeling_wedlm.convert import require_wedlm
from ..modeling_wedlm.hub import hub_files

# What a training leaves in its folder and a user of the model does not need; pickles can run code when they are read.
LEFT_OUT = [".*", "_*", "checkpoint-*", "runs/*", "work/*", "trainer_state.json", "optimizer*", "scheduler*"]
LEFT_OUT += ["rng_state*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*/.*", "*/_*"]
# Deleted from the repository where the folder has no file of that name: of an earlier upload.
STALE = ["*.safetensors", "*.safetensors.index.json", "*_wedlm.py"]
CALLS = ({"strategy": "ar"}, {"strategy": "wedlm"}, {"strategy": "wedlm", "verification": "exact"})


def check(folder: Path, base: str | None = None) -> str:
    """Loads a model or an adapter (of `base`; default: its own) and generates with it, in a process that cannot import
    this package. A mask adapter needs the package, and is tried in this process. Returns what was found, in words.

    Raises:
        OSError: for a folder that holds neither a model nor an adapter.
        ValueError: for code that is not this version's, and for a folder that does not load or generate.
    """
    is_model = not is_adapter(folder)
    if is_model and not (folder / CONFIG_FILE).is_file():
        wanted = f"neither a model ({CONFIG_FILE}) nor an adapter ({ADAPTER_FILE})"
        raise FileNotFoundError(f"{str(folder)!r} holds {wanted}.")
    for name, text in hub_files().items() if is_model else ():
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text:
            raise ValueError(
                f"{str(folder / name)!r} is missing or not this version's: load the model with "
                "`wedlm_hf.WeDLMForCausalLM` and save it again."
            )
    model = str(folder) if is_model else base or base_path(folder)
    if not is_model and read_adapter_config(folder).get("peft_type") == PEFT_TYPE:
        adapted, tokenizer = load_adapted(model, folder)
        inputs: Any = tokenizer("Count from 1 to 20:", return_tensors="pt")
        output = adapted.generate(**inputs, max_new_tokens=24, strategy="wedlm", verification="exact")
        return f"{output.shape[1] - inputs['input_ids'].shape[1]} tokens on {model}."
    require_wedlm(model)
    model = os.path.abspath(model) if os.path.isdir(model) else model
    job = {"model": model, "adapter": None if is_model else str(folder.absolute()), "calls": CALLS}
    command = [sys.executable, "-I", str(Path(__file__).with_name("without_package.py").absolute())]
    with tempfile.TemporaryDirectory(prefix="wedlm-push-") as place:
        where: Any = {
            "cwd": place,
            "env": os.environ | {"HF_MODULES_CACHE": place, "TOKENIZERS_PARALLELISM": "false"},
        }
        result = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False, **where)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise ValueError(f"{str(folder)!r} does not load and generate without this package: {reason}")
    return f"{result.stdout.splitlines()[-1]} tokens in a process without this package."


def card(folder: Path, repo: str, license: str | None = None) -> str:
    """The card for the repository: the folder's, with the repository's name in its examples, and with a licence.
    Raises `OSError` for a folder that is not there and an adapter without a card, `ValueError` for a card without a
    licence, and for an adapter of a base that is not on the Hub."""
    if not folder.is_dir():
        raise NotADirectoryError(f"There is no folder {str(folder)!r}.")
    text = read_card(folder)
    if text is None:
        if is_adapter(folder):
            raise FileNotFoundError(f"{str(folder)!r} has no {CARD_NAME}: write one, with a `license` at its top.")
        require_wedlm(folder)
        text = model_card(load_model(folder), folder, repo_id=repo)
    is_own = is_written_by_a_person(text)
    names = {".", str(folder), str(folder.absolute()), folder.absolute().name}
    places = "|".join(map(re.escape, names))
    text = re.sub(rf'((?:from_pretrained|load_mask_adapter)\((?:model, )?)"(?:{places})"', rf'\1"{repo}"', text)
    made: Any = _naming_base(text, base_path(folder)) if is_adapter(folder) else ModelCard(text)
    if license:
        made.data.license = license
    if not made.data.license:
        raise ValueError(f"The card states no `license`: pass `--license`, or write it at the top of {CARD_NAME}.")
    return str(made) if is_own else signed(str(made))


def _naming_base(text: str, base: str) -> ModelCard:
    """An adapter's card that says what it belongs to. Raises `ValueError` for a base that only this machine has."""
    if not is_hub_id(base):
        is_word = not os.path.exists(base) and "/" not in base and "\\" not in base
        found = f"its base {base!r}, without an owner" if is_word else f"a base of this machine, {base!r}"
        raise ValueError(
            f"{ADAPTER_FILE} names {found}, which nobody else can load: write the Hub id of the base there, "
            "OWNER/NAME, as `base_model_name_or_path`; `--base FOLDER` then checks the adapter on the one here."
        )
    for name in set(re.findall(r'Auto\w+\.from_pretrained\("([^"]*)"', text)):
        if not is_hub_id(name):
            text = text.replace(f'.from_pretrained("{name}"', f'.from_pretrained("{base}"')
    card: Any = ModelCard(text)
    card.data.base_model = base
    tags = [tag for tag in card.data.tags or () if not tag.startswith("base_model:")]
    card.data.tags = tags or None
    return card


def files(folder: Path) -> list[str]:
    """The files of a folder that an upload takes, by their names in the repository."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return sorted({*filter_repo_objects(names, ignore_patterns=LEFT_OUT), CARD_NAME})


def upload(
    folder: Path,
    repo: str,
    card: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str = "Upload by wedlm push",
) -> str:
    """Uploads a folder, deletes weights and code of an earlier upload, and then writes the card, but for one that a
    person wrote on the Hub. Returns the address of the commit or pull request. Raises `OSError` for a Hub that cannot
    be reached or refuses the upload."""
    if not is_hub_reachable():
        raise OSError(f"{constants.ENDPOINT} cannot be reached: nothing was uploaded.")
    api = HfApi()
    repo_id = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
    if revision and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    about: Any = {"repo_id": repo_id, "commit_message": message}
    patterns: Any = {"ignore_patterns": [*LEFT_OUT, CARD_NAME], "delete_patterns": STALE}
    commit: Any = api.upload_folder(folder_path=folder, revision=revision, create_pr=create_pr, **about, **patterns)
    revision = commit.pr_revision or revision
    try:
        there = Path(api.hf_hub_download(repo_id, CARD_NAME, revision=revision)).read_text(encoding="utf-8")
    except EntryNotFoundError:
        there = None
    if not is_written_by_a_person(there):
        api.upload_file(path_or_fileobj=card.encode(), path_in_repo=CARD_NAME, revision=revision, **about)
    return str(commit.pr_url or commit.commit_url)
