"""Decoding and training on a pretend accelerator: the CPU's answers, scores, losses and steps, no tensor on the wrong
device, and one wait a step of decoding."""

import copy
from itertools import pairwise

import pytest
import torch
from pretend import accelerator
from test_generation import ENDS, new_tokens, padded, prompts_of
from test_half_precision import EXAMPLES, batch_of
from test_mask_adapter import with_adapter
from tiny import tiny_model, tiny_tokenizer

from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.layout import DataCollatorForMaskRuns
from wedlm_hf.generation.versions import CACHE, cache_of
from wedlm_hf.training import DataCollatorForDualStreamMasking
from wedlm_hf.training.log_probs import response_log_probs
from wedlm_hf.training.metrics import evaluation_sums

LIMIT = 8
EXACT = {"verification": "exact", "slot_cost": 0.04}
STATIC = {"cache_implementation": "static"}
DECODERS = {
    "ar": {"strategy": "ar"},
    "wedlm": {"entropy_threshold": 2.0},
    "block": {"strategy": "block", "entropy_threshold": 2.0},
    "verified": EXACT,
    "fixed": {"verification": "exact", "window_size": 16},
    "static": STATIC | {"entropy_threshold": 2.0},
    "static verified": STATIC | {"verification": "exact"},
    "static adapter": STATIC | {"verification": "exact", "window_size": 4},
    "branches": EXACT | {"window_size": 16},
    "trees": EXACT,
}


@pytest.fixture(scope="module")
def pretend():
    with accelerator() as device:
        yield device


@pytest.fixture(scope="module")
def models(pretend):
    """Each decoder's model on the CPU and on the device."""
    pairs = [pair_on(pretend.device, model) for model in (tiny_model(), with_adapter(tiny_model()))]
    return {name: pairs[name in ("static adapter", "branches", "trees")] for name in DECODERS}


def generate(model, prompts, **options):
    inputs = {name: values.to(model.device) for name, values in padded(prompts).items()}
    width = 0 if options.pop("embed", False) else inputs["input_ids"].shape[1]
    if not width:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    torch.manual_seed(5)
    defaults = {"strategy": "wedlm", "max_new_tokens": LIMIT, "eos_token_id": ENDS, "return_dict_in_generate": True}
    output = model.generate(**inputs, **defaults | options)
    assert output.sequences.device == model.device
    return output, new_tokens(output.sequences.cpu(), width, ENDS)


OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9},
    "top-k": {"do_sample": True, "top_k": 9},
    "warped": {"do_sample": True, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "eta_cutoff": 1e-3},
    "prefixes": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7, 8]],
        "sequence_bias": [[[9], 1.5], [[9, 10], -2.0]], "max_new_tokens": 12,  # until a sibling passes
    },
    "ends": {
        "min_new_tokens": 4, "forced_eos_token_id": ENDS[0], "exponential_decay_length_penalty": (2, 1.1),
        "suppress_tokens": [5], "begin_suppress_tokens": [6],
        "stop_strings": ["never said"], "tokenizer": tiny_tokenizer(),
    },
    "kept": {"output_scores": True, "output_logits": True, "output_trace": True},
}  # fmt: skip
# Of "trees", all are tried, and of other decoders these, or "greedy".
TRIED = {
    "ar": ["sampled"],
    "wedlm": ["top-k", "kept"],
    "static verified": ["greedy", "kept"],
    "trees": [name for name in OPTIONS if name != "top-k"],
}


@pytest.mark.parametrize(
    ("name", "options"), [(name, each) for name in DECODERS for each in TRIED.get(name, ["greedy"])]
)
def test_answers_scores_and_traces_are_the_cpus(pretend, models, name, options):
    (model, other), options = models[name], DECODERS[name] | OPTIONS[options]
    expected, expected_rows = generate(model, prompts_of([5, 1, 12]), **options)
    waited = []
    with other.register_forward_pre_hook(lambda *_: waited.append(len(pretend.waits))):
        output, rows = generate(other, prompts_of([5, 1, 12]), **options)
    if name != "ar" and "output_scores" not in options:
        between = pretend.waits[waited[0] : waited[-1]]
        assert [end - start for start, end in pairwise(waited)] == [1] * len(between) != [], between
    assert rows == expected_rows
    assert output.stats.tokens_per_forward == expected.stats.tokens_per_forward
    if output.get("log_probs") is not None:
        torch.testing.assert_close(output.log_probs.cpu(), expected.log_probs, atol=1e-4, rtol=1e-4)
    if "output_trace" in options:
        for score, same in zip(output.scores + output.logits, expected.scores + expected.logits, strict=True):
            assert score.device == pretend.device
            torch.testing.assert_close(score.cpu(), same, atol=1e-3, rtol=1e-3)
        assert torch.equal(output.step_map, expected.step_map)
        for step, same in zip(output.trace, expected.trace, strict=True):
            assert torch.equal(step.input_ids, same.input_ids) and torch.equal(step.tokens, same.tokens)


@pytest.mark.parametrize("name", ["wedlm", "static", "verified", "trees"])
def test_turns_on_a_cache_stop_strings_and_embeddings_do_as_on_the_cpu(models, name):
    (model, other), prompts, options = models[name], prompts_of([4, 7]), DECODERS[name]
    first, rows = generate(other, prompts, **options)
    turns = [a + b + c for a, b, c in zip(prompts, rows, prompts_of([4, 3], seed=7), strict=True)]
    _, cold = generate(model, turns, **options)
    cache = cache_of(first)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-2)
    again = {key: value for key, value in options.items() if key != "cache_implementation"}  # the cache says it
    _, warm = generate(other, [turns[1], turns[1], turns[0], turns[0]], **again, **{CACHE: cache})
    assert warm == [cold[1], cold[1], cold[0], cold[0]]
    assert generate(other, prompts, **options, embed=True)[1] == rows
    tokenizer = tiny_tokenizer()
    stop = next(text for token in rows[0][3:] if (text := tokenizer.decode(token)).isascii() and text.strip())
    options = options | {"stop_strings": [stop], "tokenizer": tokenizer}
    stopped = generate(other, prompts, **options)[1]
    assert stopped == generate(model, prompts, **options)[1] != rows


ANSWERS = [
    {"prompt_ids": [5, 6, 7], "response_ids": [*range(20, 31)]},
    {"prompt_ids": [9, 8], "response_ids": [*range(40, 45)]},
]


def pair_on(device, model):
    """Two copies of a model: on the CPU and on the device."""
    return copy.deepcopy(model), copy.deepcopy(model).to(device)


def both(batch, device):
    return batch, {name: values.to(device) for name, values in batch.items()}


def assert_gradients_close(found, expected):
    pairs = [(own.grad, other.grad) for own, other in zip(found.parameters(), expected.parameters(), strict=True)]
    assert any(expected is not None for _, expected in pairs)
    for found, expected in pairs:
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_dual_stream_loss_and_its_gradient_are_the_cpus(pretend, attention, monkeypatch):
    monkeypatch.setattr("wedlm_hf.modeling_wedlm.dual_stream.CHUNK_LOGITS", 5 * 320)  # several chunks of the head
    outputs, models = [], pair_on(pretend.device, tiny_model(attn_implementation=attention))
    for model, batch in zip(models, both(batch_of(), pretend.device), strict=True):
        outputs.append(model(**batch))
        outputs[-1].loss.backward()
    assert outputs[1].loss.item() == pytest.approx(outputs[0].loss.item(), rel=1e-6)
    torch.testing.assert_close(outputs[1].token_nll.cpu(), outputs[0].token_nll, atol=1e-5, rtol=1e-5)
    assert_gradients_close(models[1], models[0])


def test_mask_adapters_learn_as_on_the_cpu(pretend):
    pair = [
        MaskDistillation(model, num_masks=3, sampled_tokens=64).to(model.device)
        for model in pair_on(pretend.device, with_adapter(tiny_model()))
    ]
    batches = both(DataCollatorForMaskRuns(0, num_masks=3, cut_stride=2)([ANSWERS]), pretend.device)
    optimizers = [torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], 1e-2) for trained in pair]
    for _ in range(3):
        outputs = [trained(**batch) for trained, batch in zip(pair, batches, strict=True)]
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output["loss"].backward()
        assert_gradients_close(pair[1], pair[0])
        assert outputs[1]["loss"].item() == pytest.approx(outputs[0]["loss"].item(), rel=1e-5)
        assert torch.equal(outputs[1]["correct"].cpu(), outputs[0]["correct"])
        for optimizer in optimizers:
            optimizer.step()


@torch.no_grad()
def test_what_is_evaluated_is_the_cpus(pretend):
    models = pair_on(pretend.device, tiny_model())
    collator = DataCollatorForDualStreamMasking(tiny_tokenizer(), block_size=4, num_eos=3, num_copies=2)
    pairs = zip(models, both(batch_of(), pretend.device), strict=True)
    expected, found = (evaluation_sums(batch, model(**batch), collator) for model, batch in pairs)
    for name, values in found.items():
        torch.testing.assert_close(values.cpu(), expected[name], atol=1e-5, rtol=1e-5)
    expected, found = (response_log_probs(model, [EXAMPLES[1]], collator) for model in models)
    for name in ("ar_tokens", "mask_tokens", "ar_blocks", "mask_blocks"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), atol=1e-5, rtol=1e-5)
