"""Model cards: what they say, where it comes from, and that a person's own stays."""

import types
from pathlib import Path

import pytest
import transformers
from huggingface_hub import ModelCard, ModelCardData
from tiny import stock_twin, tiny_model, tiny_tokenizer

from wedlm_hf import WeDLMForCausalLM, convert
from wedlm_hf.modeling_wedlm import card
from wedlm_hf.modeling_wedlm.card import (
    for_repository,
    is_written_by_a_person,
    provenance,
    read_card,
    write_card,
)

OWN = "---\nlicense: mit\nlanguage: fr\nbase_model: some/base\n---\n\n# Mine\n"


def test_a_saved_model_has_a_card_with_metadata_usage_and_its_decoding_settings(tmp_path):
    model = tiny_model()
    model.generation_config.entropy_threshold = 0.75
    model.save_pretrained(tmp_path)
    text = read_card(tmp_path)
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.base_model) == ("transformers", "text-generation", None)
    assert {"wedlm", "diffusion-language-model"} <= set(data.tags)
    assert "| `entropy_threshold` | 0.75 nats |" in text
    assert 'AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)' in text
    assert "Not stated: set `license`" in text
    assert not is_written_by_a_person(text)


def test_the_example_of_a_card_runs_and_is_a_chat_where_there_is_a_template(tmp_path, monkeypatch, capsys):
    tiny_tokenizer().save_pretrained(tmp_path)
    model = tiny_model()
    model.generation_config.max_length = 512
    model.save_pretrained(tmp_path)
    text = read_card(tmp_path)
    assert "apply_chat_template" in text
    monkeypatch.chdir(tmp_path)
    exec(text.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out


def test_a_card_names_the_base_and_its_licence_over_conversion_and_training(tmp_path):
    stock = tmp_path / "stock"
    stock_twin(tiny_model()).save_pretrained(stock)
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(stock)
    (stock / "README.md").write_text(OWN)
    convert(stock, tmp_path / "converted")
    WeDLMForCausalLM.from_pretrained(tmp_path / "converted").save_pretrained(tmp_path / "tuned")
    for folder in ("converted", "tuned"):
        data = ModelCard(read_card(tmp_path / folder)).data
        assert (data.base_model, data.license, data.language) == ("some/base", "mit", "fr")


def test_a_model_of_the_hub_is_the_base_of_what_is_saved(monkeypatch, tmp_path):
    (tmp_path / "card.md").write_text(OWN)
    monkeypatch.setattr(card, "try_to_load_from_cache", lambda *_: str(tmp_path / "card.md"))
    assert provenance("some/model") == ("some/model", {"license": "mit", "language": "fr"})
    for name in ("", "a/b/c", "./folder", "model"):
        assert provenance(name)[0] is None


def test_a_card_that_was_written_here_is_replaced_and_a_persons_own_is_not(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    model.generation_config.window_size = 5
    model.save_pretrained(tmp_path)
    ours = read_card(tmp_path)
    assert "| `window_size` | 5 slots |" in ours
    for own in (OWN, ours + "More words.\n", ours.replace("5 slots", "6 slots"), ours.replace("tags:", "tags: x\na:")):
        (tmp_path / "README.md").write_text(own)
        model.save_pretrained(tmp_path)
        assert read_card(tmp_path) == own
        assert not write_card(tmp_path, ours)
    assert write_card(tmp_path, ours, overwrite=True)


def test_measured_tables_and_tags_do_not_make_a_card_a_persons_own(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    text = read_card(tmp_path)
    assert text.count("<!-- measured: ") == 2
    assert not is_written_by_a_person(text.replace("Nothing yet", "| a | table |"))
    assert not is_written_by_a_person(text.replace("- wedlm\n", "- wedlm\n- mine\n", 1))
    assert not is_written_by_a_person(text.replace("\n", "\r\n"))


def test_empty_forms_of_transformers_and_peft_are_no_persons_own(tmp_path):
    said = "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
    said += "This model card has been automatically generated."
    form = str(ModelCard.from_template(ModelCardData(tags=["x"]), model_description=said))
    assert not is_written_by_a_person(form)
    assert is_written_by_a_person(form.replace("[More Information Needed]", "Me", 1))
    peft = (
        str(ModelCard.from_template(ModelCardData(library_name="peft")))
        + "\n### Framework versions\n\n- PEFT 0.21.0\n"
    )
    assert not is_written_by_a_person(peft)
    assert not is_written_by_a_person(None) and not is_written_by_a_person(" \n")


def test_a_card_gets_its_name_and_licence_for_the_hub(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    text = for_repository(read_card(tmp_path), "someone/model", license="apache-2.0")
    assert not is_written_by_a_person(text)
    assert ModelCard(text).data.license == "apache-2.0"
    assert "\n# model\n" in text and "\napache-2.0.\n" in text and "Not stated" not in text
    assert text.count('from_pretrained("someone/model"') == 2
    assert for_repository(text, "someone/model", license="apache-2.0") == text


# --- uploads --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A Hub: `hub.card` is the card in the repository, `hub.uploaded` the one of the last upload."""
    hub = types.SimpleNamespace(card=None, uploaded=None)

    class Api:
        def create_repo(self, repo_id, **_):
            return types.SimpleNamespace(repo_id=repo_id)

        def create_commit(self, operations, **_):
            files = {each.path_in_repo: each.path_or_fileobj for each in operations}
            hub.uploaded = Path(files["README.md"]).read_text(encoding="utf-8") if "README.md" in files else None

    def card_of(repo_id, tags=None, token=None):
        return ModelCard(hub.card) if hub.card else ModelCard.from_template(ModelCardData(tags=tags or []))

    for module in (transformers.utils.hub, transformers.modeling_utils):
        monkeypatch.setattr(module, "hf_api", Api)
        monkeypatch.setattr(module, "create_and_tag_model_card", card_of, raising=False)
    return hub


def test_a_push_brings_our_card_with_the_name_in_it_where_there_is_none(hub, tmp_path):
    tiny_model().push_to_hub("someone/tiny", tags=["mine"])
    assert 'from_pretrained("someone/tiny"' in hub.uploaded
    assert "mine" in ModelCard(hub.uploaded).data.tags
    hub.card = hub.uploaded  # ours, as it was written: replaced
    model = tiny_model()
    model.generation_config.window_size = 3
    model.save_pretrained(tmp_path, push_to_hub=True, repo_id="someone/tiny")
    assert "| 3 slots |" in hub.uploaded


def test_a_push_keeps_the_card_that_a_person_wrote_on_the_hub_or_in_the_folder(hub, tmp_path):
    hub.card = OWN
    tiny_model().push_to_hub("someone/tiny")
    assert "# Mine" in hub.uploaded
    hub.card, local = None, OWN.replace("Mine", "Local")
    (tmp_path / "README.md").write_text(local)
    tiny_model().save_pretrained(tmp_path, push_to_hub=True, repo_id="someone/tiny")
    assert hub.uploaded == local == read_card(tmp_path)
    hub.card = OWN
    tiny_model().save_pretrained(tmp_path, push_to_hub=True, repo_id="someone/tiny")
    assert "# Mine" in hub.uploaded and read_card(tmp_path) == local
