"""The hybrid that wedlm-nano becomes: what it starts from, what it learns first, and its answers."""

import torch
from nano_tasks import TASKS, generate_samples
from tiny import script
from transformers import AutoModelForCausalLM

from wedlm_hf import load_mask_adapter
from wedlm_hf.checkpoints import NANO
from wedlm_hf.eval.prompts import encode
from wedlm_hf.generation.state import keeps_state

HYBRID = NANO.parent / "wedlm-nano-hybrid"
TRAIN = script("examples/wedlm-nano-hybrid/train.py")


def test_with_attention_in_every_layer_it_is_nano(nano):
    model, tokenizer = nano
    whole = TRAIN.build_model(tokenizer, ["full_attention"] * 4).eval()
    ids = torch.randint(4, len(tokenizer), (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(whole(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-3, rtol=0)


def test_mixers_learn_by_themselves_before_other_weights_change(nano, tmp_path, monkeypatch):
    _, tokenizer = nano
    monkeypatch.setattr(TRAIN, "ALONE", 1.0)
    monkeypatch.setattr(TRAIN, "PROMPTS", 2)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)  # for the whole process
    TRAIN.main(tmp_path, steps=2, batch_size=2)
    found = TRAIN.Qwen3_5ForCausalLM.from_pretrained(tmp_path)
    TRAIN.set_seed(0)
    changed = {
        name
        for name, weight in TRAIN.build_model(tokenizer).state_dict().items()
        if not torch.equal(weight, found.state_dict()[name])
    }
    assert keeps_state(found) and changed and all(".linear_attn." in name for name in changed)


def test_it_answers_held_out_prompts_as_ar_does_in_fewer_forwards(nano):
    _, tokenizer = nano
    model = AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.float32).eval()
    load_mask_adapter(model, HYBRID / "adapter")
    options = {"max_new_tokens": 128, "do_sample": False, "return_dict_in_generate": True}
    tokens = forwards = 0
    for sample in [sample for task in TASKS for sample in generate_samples(task, 2, 3, "heldout")]:
        ids = torch.tensor([encode(tokenizer, sample.messages)])
        output = model.generate(ids, strategy="wedlm", verification="exact", slot_cost=0.01, **options)
        assert torch.equal(output.sequences, model.generate(ids, strategy="ar", **options).sequences)
        tokens, forwards = tokens + output.stats.new_tokens.item(), forwards + output.stats.forwards.item()
    assert tokens / forwards > 2.5
