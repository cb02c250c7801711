"""Decoding on a pretend accelerator: the CPU's answers, and no tensor on the wrong device."""

import copy

import pytest
import torch
from test_generation import ENDS, new_tokens, padded, prompts_of
from test_mask_adapter import with_adapter
from tiny import tiny_model, tiny_tokenizer

from wedlm_hf.generation.versions import CACHE, cache_of

LIMIT = 12
EXACT = {"verification": "exact", "slot_cost": 0.04}
DECODERS = {
    "ar": {"strategy": "ar"},
    "wedlm": {"entropy_threshold": 2.0},
    "block": {"strategy": "block", "entropy_threshold": 2.0},
    "verified": EXACT | {"draft_threshold": 2.5},
    "fixed": {"verification": "exact", "adaptive_window": False, "draft_threshold": 2.5},
    "static": {"cache_implementation": "static", "entropy_threshold": 2.0},
    "static verified": {"cache_implementation": "static", "verification": "exact", "draft_threshold": 2.5},
    "static adapter": {"cache_implementation": "static", "verification": "exact", "window_size": 4},
    "branches": EXACT | {"adaptive_window": False},
    "trees": EXACT,
}


@pytest.fixture(scope="module")
def models():
    adapted = with_adapter(tiny_model())
    return {name: adapted if name in ("static adapter", "branches", "trees") else tiny_model() for name in DECODERS}


def on(device, model):
    return copy.deepcopy(model).to(device)


def generate(model, prompts, **options):
    inputs = {name: values.to(model.device) for name, values in padded(prompts).items()}
    torch.manual_seed(5)
    defaults = {"strategy": "wedlm", "max_new_tokens": LIMIT, "eos_token_id": ENDS, "return_dict_in_generate": True}
    output = model.generate(**inputs, **defaults | options)
    assert output.sequences.device == model.device
    return output, new_tokens(output.sequences.cpu(), inputs["input_ids"].shape[1], ENDS)


OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9},
    "top-k": {"do_sample": True, "top_k": 9},
    "prefixes": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7, 8]]},
    "lengths": {"min_new_tokens": 4, "forced_eos_token_id": ENDS[0], "exponential_decay_length_penalty": (2, 1.1)},
    "suppressed": {"suppress_tokens": [5], "begin_suppress_tokens": [6]},
    "biased": {"sequence_bias": [[[9], 1.5], [[9, 10], -2.0]]},
    "warped": {"do_sample": True, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "eta_cutoff": 1e-3},
    "kept": {"output_scores": True, "output_logits": True, "output_trace": True},
}
# Of "trees", all are tried, and of other decoders these, or "greedy".
TRIED = {
    "ar": ["greedy", "sampled"],
    "wedlm": ["greedy", "sampled", "top-k", "kept"],
    "static verified": ["greedy", "kept"],
    "trees": list(OPTIONS),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, each) for name in DECODERS for each in TRIED.get(name, ["greedy"])],
)
def test_answers_scores_and_traces_are_the_cpus(pretend, models, name, options):
    options = DECODERS[name] | OPTIONS[options]
    expected, expected_rows = generate(models[name], prompts_of([5, 1, 12]), **options)
    output, rows = generate(on(pretend.device, models[name]), prompts_of([5, 1, 12]), **options)
    assert rows == expected_rows
    assert output.stats.tokens_per_forward == expected.stats.tokens_per_forward
    if output.get("log_probs") is not None:
        torch.testing.assert_close(output.log_probs.cpu(), expected.log_probs, atol=1e-4, rtol=1e-4)
    if "output_trace" in options:
        for one, other in zip(output.scores + output.logits, expected.scores + expected.logits, strict=True):
            assert one.device == pretend.device
            torch.testing.assert_close(one.cpu(), other, atol=1e-3, rtol=1e-3)
        assert torch.equal(output.step_map, expected.step_map)
        for step, other in zip(output.trace, expected.trace, strict=True):
            assert torch.equal(step.input_ids, other.input_ids) and torch.equal(step.tokens, other.tokens)


@pytest.mark.parametrize("name", ["wedlm", "static", "verified", "trees"])
def test_a_cache_goes_on_over_turns(pretend, models, name):
    model, options = on(pretend.device, models[name]), DECODERS[name]
    first, rows = generate(model, prompts_of([5, 9]), **options)
    turns = [a + b + c for a, b, c in zip(prompts_of([5, 9]), rows, prompts_of([4, 3], seed=7), strict=True)]
    _, cold = generate(models[name], turns, **options)
    options = {key: value for key, value in options.items() if key != "cache_implementation"}  # the cache says it
    cache = cache_of(first)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-2)
    _, warm = generate(model, [turns[1], turns[1], turns[0], turns[0]], **options, **{CACHE: cache})
    assert warm == [cold[1], cold[1], cold[0], cold[0]]


@pytest.mark.parametrize("name", ["wedlm", "verified", "trees"])
def test_stop_strings_and_embeddings_do_as_on_the_cpu(pretend, models, name):
    model, tokenizer = on(pretend.device, models[name]), tiny_tokenizer()
    _, rows = generate(models[name], prompts_of([4, 7]), **DECODERS[name])
    stop = next(text for token in rows[0][3:] if (text := tokenizer.decode(token)).isascii() and text.strip())
    options = DECODERS[name] | {"stop_strings": [stop], "tokenizer": tokenizer}
    _, expected = generate(models[name], prompts_of([4, 7]), **options)
    assert generate(model, prompts_of([4, 7]), **options)[1] == expected
    assert expected != rows
    ids = padded(prompts_of([4, 7]))
    embeds = model.get_input_embeddings()(ids["input_ids"].to(pretend.device))
    output = model.generate(
        inputs_embeds=embeds, attention_mask=ids["attention_mask"].to(pretend.device), strategy="wedlm",
        max_new_tokens=LIMIT, eos_token_id=ENDS, **DECODERS[name],
    )  # fmt: skip
    assert new_tokens(output.cpu(), 0, ENDS) == rows


# Nothing ends: how often the host waits per step is the difference of a longer and a shorter answer.
ENDLESS = {"eos_token_id": None, "return_dict_in_generate": True, "strategy": "wedlm"}
PROCESSED = {name: OPTIONS[name] for name in ("greedy", "sampled", "top-k")} | {
    "lengths": {"begin_suppress_tokens": [6]},
    "prefixes": {"repetition_penalty": 1.2},
    "stop strings": {"stop_strings": ["never said"], "tokenizer": tiny_tokenizer()},
}


@pytest.mark.parametrize(
    ("name", "processed"),
    [*((name, "greedy") for name in DECODERS if name != "ar"), *(("trees", processed) for processed in PROCESSED)],
)
def test_the_host_waits_once_a_step(pretend, models, name, processed):
    model, options = on(pretend.device, models[name]), ENDLESS | DECODERS[name] | PROCESSED[processed]
    inputs = {key: values.to(pretend.device) for key, values in padded(prompts_of([5, 1, 12])).items()}
    waits, steps = [], []
    for limit in (5, 14):
        torch.manual_seed(5)
        pretend.waits.clear()
        output = model.generate(**inputs, max_new_tokens=limit, **options)
        waits.append([lines[:3] for lines in pretend.waits])
        steps.append(int(output.stats.forwards.max()))
    assert len(waits[1]) - len(waits[0]) == steps[1] - steps[0], waits[1]
