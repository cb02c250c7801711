"""The examples of docs/train.md, in short: a new task for wedlm-nano, and a stock Qwen3 that becomes a WeDLM."""

from itertools import islice

import pytest
from peft import PeftModel
from tiny import script
from transformers import AutoTokenizer

from wedlm_hf import WeDLMForCausalLM


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["SFT", "LoRA"])
def test_nano_learns_a_new_task(tmp_path, lora):
    new_task = script("examples/new-task/train.py")
    prompts = list(islice(new_task.samples(1, "heldout"), 60))
    rows = list(islice(new_task.samples(0, "train"), 2400))
    steps = 240 if lora else 180
    before, after = new_task.fine_tune(tmp_path, rows, {"new": prompts}, lora=lora, steps=steps, batch_size=2, seed=0)
    for decoder in ("wedlm", "ar"):
        assert before[f"new, {decoder}"] < 0.2
        assert after[f"new, {decoder}"] > 0.9
    assert after["new, tokens per forward"] > 1.5
    # What was saved is what was measured.
    model = WeDLMForCausalLM.from_pretrained(new_task.NANO if lora else tmp_path)
    model = PeftModel.from_pretrained(model, tmp_path).merge_and_unload() if lora else model
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert new_task.exact_match(model.eval(), tokenizer, prompts, "wedlm")[0] > 0.9


@pytest.mark.slow
def test_a_stock_model_is_adapted_at_equal_ar_loss(tmp_path):
    adaptation = script("examples/adaptation/train.py")
    adaptation.train_stock(tmp_path / "stock", steps=400, seed=0)
    before, after = adaptation.adapt(tmp_path / "stock", tmp_path / "adapted", steps=300, seed=0)
    assert before["eval_tokens_per_forward"] < 1.5
    assert after["eval_tokens_per_forward"] >= 2
    assert after["eval_ar_nll"] < 1.02 * before["eval_ar_nll"]
