"""The upload of a checked folder, as one commit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

from ...modeling_wedlm.card import CARD_NAME, is_written_by_a_person
from ...modeling_wedlm.loading import ADAPTER_FILE, is_hub_reachable
from .checks import Package
from .request import PushRequest

STALE = (".safetensors", ".safetensors.index.json", "_wedlm.py")
"""Ends of the names of files that are deleted from a repository where the folder has none of that name."""


def upload(request: PushRequest, package: Package, api: HfApi | None = None) -> str:
    """Uploads the package in one commit: a reader of the repository sees all of it or nothing.

    Weights and code that an earlier upload left there are deleted. A model card that a person wrote on the Hub stays,
    unless the request says otherwise or the folder's is a person's own, too.

    Returns:
        the address of the commit.

    Raises:
        OSError: for a Hub that cannot be reached or refuses the upload.
        ValueError: for two cards that people wrote, and for a card whose metadata the Hub refuses.
    """
    if api is None:
        if not is_hub_reachable():
            raise OSError(f"{constants.ENDPOINT} cannot be reached: nothing was uploaded.")
        api = HfApi()
    repo_id = api.create_repo(request.repo, private=request.private or None, exist_ok=True).repo_id
    if request.revision and not request.create_pr and not api.revision_exists(repo_id, request.revision):
        api.create_branch(repo_id, branch=request.revision)
    card = _chosen_card(request, package, _card_there(api, repo_id, request.revision), repo_id)
    files = {name: path for name, path in package.files.items() if name != CARD_NAME}
    contents: dict[str, Any] = {name: str(path) for name, path in files.items()}
    if ADAPTER_FILE in files:
        contents[ADAPTER_FILE] = _adapter_config(files[ADAPTER_FILE], package.card)
    operations: list[Any] = [CommitOperationAdd(name, content) for name, content in contents.items()]
    if card is not None:
        operations.append(CommitOperationAdd(CARD_NAME, card.encode()))
    there = api.list_repo_files(repo_id, revision=request.revision)
    operations += [CommitOperationDelete(name) for name in there if name.endswith(STALE) and name not in files]
    commit = api.create_commit(
        repo_id,
        operations,
        commit_message=request.message,
        revision=request.revision,
        create_pr=request.create_pr,
    )
    return str(commit.pr_url or commit.commit_url)


def _adapter_config(path: Path, card: str | None) -> bytes:
    """An adapter_config.json whose base is the one on the Hub that the card names, where it was a folder here."""
    config = json.loads(path.read_bytes())
    stated: Any = None if card is None else ModelCard(card).data
    base = None if stated is None else stated.base_model
    if isinstance(base, str) and os.path.exists(config.get("base_model_name_or_path") or "."):
        config["base_model_name_or_path"] = base
    return (json.dumps(config, indent=2) + "\n").encode()


def _card_there(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """The card in the repository."""
    try:
        path = api.hf_hub_download(repo_id, CARD_NAME, revision=revision)
    except (EntryNotFoundError, RepositoryNotFoundError):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read()


def _chosen_card(request: PushRequest, package: Package, there: str | None, repo_id: str) -> str | None:
    """The card to upload; None where that in the repository stays."""
    if there is None or request.overwrite_card or not is_written_by_a_person(there) or there == package.card:
        return package.card
    if not is_written_by_a_person(package.card):
        return None
    raise ValueError(
        f"The model card of {repo_id!r} on the Hub was written by a person, and is not the folder's: make them the "
        "same, or pass `--overwrite-card` to upload the folder's."
    )
