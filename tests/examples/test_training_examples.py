"""The examples of docs/train.md, in short: preferences, a new task for wedlm-nano, a stock Qwen3 made a WeDLM."""

from copy import deepcopy
from itertools import islice

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from tiny import script, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer
from trl import DPOConfig

from wedlm_hf import WeDLMForCausalLM
from wedlm_hf.eval.prompts import Prompt
from wedlm_hf.training import DataCollatorForDualStreamMasking
from wedlm_hf.training.log_probs import response_log_probs

example = script("examples/dpo/train.py")

PAIRS = {
    "prompt": [[{"role": "user", "content": "3 + 4"}], [{"role": "user", "content": "Count"}]],
    "chosen": [[{"role": "assistant", "content": "7"}], [{"role": "assistant", "content": "1, 2, 3, 4"}]],
    "rejected": [[{"role": "assistant", "content": "77, 7"}], [{"role": "assistant", "content": "4"}]],
}


def trainer_with(tmp_path, **settings):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    args = DPOConfig(
        str(tmp_path), max_steps=6, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", bf16=False, gradient_checkpointing=False, use_cpu=True, report_to="none",
        disable_tqdm=True, **settings,
    )  # fmt: skip
    masks = DataCollatorForDualStreamMasking(tokenizer, block_size=4, num_copies=2)
    data = {"train_dataset": Dataset.from_dict(PAIRS), "processing_class": tokenizer, "masks": masks}
    return example.WeDLMDPOTrainer(model, ref_model=deepcopy(model), args=args, **data)


def test_the_loss_is_the_definition_starts_at_log_2_and_training_learns_to_prefer_the_chosen_answers(tmp_path):
    trainer = trainer_with(tmp_path, beta=0.3)
    (batch,) = trainer.get_train_dataloader()
    policy, rows = tiny_model(seed=1), trainer._examples(batch)
    with torch.no_grad():
        loss = trainer._compute_loss(policy, batch)
        new, old = (response_log_probs(model, rows, trainer.masks) for model in (policy, trainer.ref_model))
    ratios = (new.ar_tokens - old.ar_tokens).sum(-1) + (new.mask_tokens - old.mask_tokens).sum(-1)
    margins = 0.3 * (ratios[:2] - ratios[2:]) / 2
    assert loss.item() == pytest.approx(torch.log1p(torch.exp(-margins)).mean().item(), rel=1e-4)
    trainer.train()
    first, *_, last = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert float(first["loss"]) == pytest.approx(0.6931, abs=1e-4) and float(first["rewards/margins"]) == 0
    assert float(last["loss"]) < 0.5 and float(last["log_ratios/ar"]) > 0 and float(last["log_ratios/mask"]) > 0


def test_pairs_are_made_of_a_right_and_a_wrong_answer():
    samples = [
        Prompt.of(f"Count from 1 to {last} by 1.", task="counting", answers=(answer,))
        for last, answer in ((3, "1, 2, 3"), (4, "1, 2, 3, 4"), (2, "1, 2"))
    ]
    answers = [["1, 2", "1, 2, 3", "1"], ["1, 2, 3, 4", "1, 2, 3, 4"], ["2", "1"]]
    (pair,) = example.preferences(samples, answers)
    assert pair["chosen"][0]["content"] == "1, 2, 3" and pair["rejected"][0]["content"] == "1, 2"
    with pytest.raises(example.typer.BadParameter, match="No prompt got both a right and a wrong answer"):
        example.preferences(samples[1:], answers[1:])


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


@pytest.mark.slow
def test_a_stock_model_is_adapted_at_equal_ar_loss(tmp_path):
    adaptation = script("examples/adaptation/train.py")
    adaptation.train_stock(tmp_path / "stock", steps=400, seed=0)
    before, after = adaptation.adapt(tmp_path / "stock", tmp_path / "adapted", steps=300, seed=0)
    assert before["eval_tokens_per_forward"] < 1.5 and after["eval_tokens_per_forward"] >= 2
    assert after["eval_ar_nll"] < 1.02 * before["eval_ar_nll"]
