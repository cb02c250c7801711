"""The example of docs/train.md, in short: a new task for wedlm-nano."""

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
    assert all(before[f"new, {name}"] < 0.2 and after[f"new, {name}"] > 0.9 for name in ("wedlm", "ar"))
    assert after["new, tokens per forward"] > 1.5
    # What was saved is what was measured.
    model = WeDLMForCausalLM.from_pretrained(new_task.NANO if lora else tmp_path)
    model = PeftModel.from_pretrained(model, tmp_path).merge_and_unload() if lora else model
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert new_task.exact_match(model.eval(), tokenizer, prompts, "wedlm")[0] > 0.9
