"""The hybrid that wedlm-nano becomes: what it starts from, and what it learns first."""

import torch
from tiny import script

from wedlm_hf.generation.state import keeps_state

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
