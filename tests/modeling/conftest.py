from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from huggingface_hub import ModelCard, ModelCardData


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
