"""Verified decoding is AR decoding: models × decoders × calls, whatever is drafted."""

from functools import cache

import pytest
import torch
from oracle import decode_ar
from peft import LoraConfig, get_peft_model
from test_branches import COUNTED, FIXED, Bushy, adapted, ar_outputs, foreseeing  # noqa: F401
from test_generation import generate, prompts_of
from tiny import tiny_model

from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.packed import pack
from wedlm_hf.eval.prompts import encode_prompt, read_tasks
from wedlm_hf.generation import mixin


def with_lora(model):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()


MODELS = {
    "qwen3": tiny_model,
    "qwen2.5": lambda: tiny_model("qwen2.5"),
    "qwen3, adapter": adapted,
    "qwen2.5, adapter": lambda: adapted("qwen2.5"),
    "eager, adapter": lambda: adapted(attn_implementation="eager"),
    "lora": lambda: with_lora(tiny_model()),
    "packed, adapter": lambda: pack(adapted()),
}
DECODERS = {
    "one mask": {"window_size": 1},
    "no drafts": {"slot_cost": 1e9},
    "all drafts": {"window_size": 16},
    "fixed": FIXED,
    "counted": COUNTED,  # a slot cost leaves no part to the clock
    "timed": {},
    "static": {"cache_implementation": "static", "window_size": 4},
    "trees": COUNTED,
}
# How many of the masks' drafts are wrong: `None` are their own, which are random. What differs in Qwen2.5 are weights.
CELLS = [
    (model, decoder, errors)
    for model in MODELS
    for decoder in DECODERS
    for errors in (0.0, 0.3, None)
    if errors is None or (model != "lora" and "drafts" not in decoder)
    if model in ("qwen3", "qwen2.5", "qwen3, adapter", "qwen2.5, adapter")
    or decoder in ({"all drafts", "timed"} if model == "lora" else {"fixed", "trees"})
    if "qwen2.5" not in model or errors == 0.3 or "drafts" in decoder
]
LIMIT = 16
make = cache(lambda name: MODELS[name]())
PROMPTS = prompts_of([5, 1, 12, 3])
said_by_ar = cache(lambda name: [row[:LIMIT] for row in ar_outputs(make(name), PROMPTS)])
COUNTS = ("forwards", "token_instances", "drafted", "accepted")


@pytest.fixture
def decoder(request, monkeypatch):
    if request.param == "trees":
        monkeypatch.setattr(mixin, "Planner", Bushy)
    return request.param


@pytest.mark.parametrize(("name", "decoder", "errors"), CELLS, indirect=["decoder"])
def test_greedy_answers_are_ars_in_batches_and_alone(name, decoder, errors, foreseeing):  # noqa: F811
    model, expected, found = make(name), said_by_ar(name), []
    for chosen in (slice(0, 4), slice(2, 3)):
        if errors is not None:
            foreseeing(expected[chosen], errors, siblings=2 if decoder == "trees" else 0)
        how = DECODERS[decoder] | {"verification": "exact", "max_new_tokens": LIMIT}
        output, rows = generate(model, PROMPTS[chosen], **how)
        assert rows == expected[chosen]
        assert (output.stats.forwards <= output.stats.new_tokens).all()
        assert (output.stats.accepted <= output.stats.drafted).all()
        assert output.stats.drafted.sum() == 0 or decoder != "no drafts"
        if errors == 0.0 and decoder not in ("timed", "one mask"):
            assert output.stats.tokens_per_forward > 1.3 or len(rows) == 1
        found.append([getattr(output.stats, count)[2 if len(rows) > 1 else 0] for count in COUNTS])
    if decoder == "fixed" and errors == 0.0:  # others plan by what the rows of a batch cost together
        assert found[0] == found[1]


SAMPLED = {
    "plain": {"do_sample": True},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "prefix": {"do_sample": True, "repetition_penalty": 1.3},
    "greedy with a prefix": {"repetition_penalty": 1.3},
}


@pytest.mark.parametrize(
    ("name", "decoder", "sampling"),
    [
        *(("qwen3, adapter", "trees", each) for each in SAMPLED),
        *(("qwen3", "all drafts", each) for each in ("warped", "prefix")),
        *(("qwen3, adapter", each, "prefix") for each in ("fixed", "counted")),
    ],
    indirect=["decoder"],
)
def test_a_seed_gives_the_text_that_it_gives_without_drafts_whatever_stands_beside(name, decoder, sampling):
    def sample(prompts, seed=5, options=DECODERS[decoder]):
        options = SAMPLED[sampling] | options | {"max_new_tokens": 10}
        return generate(make(name), prompts, seed, verification="exact", **options)

    output, rows = sample(PROMPTS)
    assert output.stats.drafted.sum() > 0 or "adapter" not in name
    assert rows == sample(PROMPTS, options={"slot_cost": 1e9})[1]
    assert rows[:1] == sample(PROMPTS[:1])[1]
    assert rows == sample(PROMPTS + prompts_of([4] * 2, seed=5))[1][:4]
    assert (sample(PROMPTS, seed=6)[1] != rows) == ("do_sample" in SAMPLED[sampling])


def test_answers_of_trained_weights_are_ars(nano):
    model, tokenizer = nano
    how = {"limit": 16, "mask_id": tokenizer.mask_token_id, "eos_ids": [tokenizer.eos_token_id]}
    for prompt in {prompt.task: prompt for prompt in read_tasks(NANO)}.values():
        ids = encode_prompt(model, tokenizer, prompt).tokens
        output = model.generate(torch.tensor([ids]), strategy="wedlm", verification="exact", max_new_tokens=16)
        assert output[0, len(ids) :].tolist() == decode_ar(model, ids, **how)
