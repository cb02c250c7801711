"""Model cards: what they say, where it comes from, and that a person's own stays."""

from huggingface_hub import ModelCard, ModelCardData
from tiny import tiny_model, tiny_tokenizer, write_stock_checkpoint

from wedlm_hf import WeDLMForCausalLM, convert
from wedlm_hf.checkpoints import card
from wedlm_hf.checkpoints.card import is_written_by_a_person, model_card, provenance, read_card, write_card

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
