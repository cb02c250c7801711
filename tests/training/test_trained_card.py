"""The model card that a training writes: how the model was trained; a person's own stays."""

from huggingface_hub import ModelCard
from test_sft_trainer import trainer_on

from wedlm_hf.modeling_wedlm.card import is_written_by_a_person, read_card

OWN = "---\nlicense: mit\n---\n\n# Mine\n"


def test_a_trained_model_has_a_card_that_says_how_it_was_trained(tmp_path):
    trainer = trainer_on(tmp_path, max_steps=1, learning_rate=3e-4)
    trainer.train()
    trainer.save_model()
    text = read_card(tmp_path)
    assert "By `WeDLMSFTTrainer`, 1 steps:" in text and "- learning_rate: 0.0003" in text
    assert "apply_chat_template" in text
    data = ModelCard(text).data
    assert data.library_name == "transformers" and {"trl", "sft", "wedlm"} <= set(data.tags)
    assert not is_written_by_a_person(text)
    trainer.save_model(str(tmp_path / "copy"))
    assert "## Training" not in read_card(tmp_path / "copy")
    (tmp_path / "README.md").write_text(OWN)
    trainer.save_model()
    trainer.create_model_card()
    assert read_card(tmp_path) == OWN
    assert not (tmp_path / "_saved").exists()
