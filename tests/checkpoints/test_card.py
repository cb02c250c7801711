"""Cards of models: true of what they stand beside, and each code block of theirs runs."""

import re

import pytest
from tiny import tiny_tokenizer, write_checkpoint, write_stock_checkpoint

from wedlm_hf import convert
from wedlm_hf.checkpoints.loading import load_model


def run_blocks(folder, monkeypatch):
    """Runs the code blocks of a folder's card in that folder; returns the card and what the last block left."""
    card, names = (folder / "README.md").read_text(), {}
    monkeypatch.chdir(folder)
    blocks = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block.replace("max_new_tokens=128", "max_new_tokens=4"), "card", "exec"), names)
    return card, names


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_blocks_of_an_untrained_copys_card_run_and_it_is_a_copy_of_what_it_names(tmp_path, monkeypatch, is_chat):
    source = write_stock_checkpoint(tmp_path / "stock")
    if not is_chat:
        (source / "chat_template.jinja").unlink()
    convert(source, tmp_path / "made")
    card, names = run_blocks(tmp_path / "made", monkeypatch)
    assert "an untrained copy of another model, with a mask token" in card and "copy of it" not in card
    assert ("chat" in names) == is_chat and names["output"].shape[1] == names["inputs"]["input_ids"].shape[1] + 4


def test_the_blocks_of_a_trained_models_card_run(tmp_path, monkeypatch):
    model = load_model(write_checkpoint(tmp_path / "trained"))
    model.config.masks_trained = True
    tiny_tokenizer().save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")
    card, _ = run_blocks(tmp_path / "saved", monkeypatch)
    assert "it predicts several tokens in one forward" in card
