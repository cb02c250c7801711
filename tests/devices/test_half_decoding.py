"""Sixteen bits: decoding and the training of mask adapters against float64, under autocast, and with scaled losses."""

import copy

import pytest
import torch
from test_generation import generate, prompts_of
from test_mask_adapter import with_adapter
from test_mask_trainer import adapted_model, answers, batch_of
from tiny import MASK, tiny_model

from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.generation.sampling import token_entropy
from wedlm_hf.generation.versions import CACHE, cache_of

HALVES = [torch.bfloat16, torch.float16]
SLOW = pytest.mark.slow
ATTENTIONS = ["sdpa", pytest.param("eager", marks=SLOW)]
EXACT = {"verification": "exact", "slot_cost": 0.04}
DECODERS = {
    "ar": {"strategy": "ar", "suppress_tokens": [MASK]},
    "verified": EXACT,
    "static": {"verification": "exact", "cache_implementation": "static"},
    "trees": EXACT,
    "branches": EXACT | {"window_size": 16},
    "static adapter": {"verification": "exact", "cache_implementation": "static", "window_size": 4},
}
PROMPTS = prompts_of([5, 1, 12])
ADAPTED = ("trees", "branches", "static adapter")
FILLED = {name: {"strategy": name, "entropy_threshold": 2.0} for name in ("wedlm", "block")}
# Of the largest logit, that a token may lie below the best one: what rounding weights and states does to two logits.
ROUNDINGS = 4


def sharpened(model, sharpness):
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data *= sharpness
    return model


def pair_of(dtype, attention="sdpa", has_adapter=False, sharpness=1.0):
    """A model in sixteen bits, and one with the very same weights in float64."""
    model = sharpened(tiny_model(attn_implementation=attention), sharpness)
    model = (with_adapter(model) if has_adapter else model).to(dtype)
    return model, copy.deepcopy(model).to(torch.float64)


def is_nearly_best(exact, prompt, answer, dtype):
    """Whether each token of an answer is float64's best, or below it by a few roundings of the largest logit."""
    with torch.no_grad():
        logits = exact(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    logits[:, MASK] = float("-inf")
    found = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    shortfall = (logits.max(-1).values - found).max()
    return shortfall <= ROUNDINGS * torch.finfo(dtype).eps * logits[logits.isfinite()].abs().max()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", DECODERS)
def test_each_token_is_that_of_float64_or_nearly_tied_with_it(name, dtype, attention):
    model, exact = pair_of(dtype, attention, name in ADAPTED)
    output, rows = generate(model, PROMPTS, **DECODERS[name])
    assert all(is_nearly_best(exact, *pair, dtype) for pair in zip(PROMPTS, rows, strict=True))
    assert name == "ar" or output.stats.drafted.sum() > 0


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", FILLED | DECODERS)
def test_scores_that_a_mask_drives_beyond_the_type_leave_no_row_without_a_number(name, attention):
    # `finfo.min` plus a negative score is -inf in float16, and scores of 400 times their size come near its end.
    model, _ = pair_of(torch.float16, attention, name in ADAPTED, sharpness=400.0)
    options = (FILLED | DECODERS)[name] | {"output_logits": True, "eos_token_id": None, "max_new_tokens": 12}
    output, rows = generate(model, PROMPTS, **options)
    assert all(logits.isfinite().all() for logits in output.logits) and all(len(row) == 12 for row in rows)


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        (torch.bfloat16, "sdpa"),
        *(pytest.param(torch.float16, attention, marks=SLOW) for attention in ("sdpa", "eager")),
    ],
)
@pytest.mark.parametrize("name", FILLED | DECODERS)
def test_autocast_decodes_as_sixteen_bits_do_and_a_cache_goes_on_behind_it(name, dtype, attention):
    model, exact = pair_of(torch.float32, attention, name in ADAPTED)
    options = (FILLED | DECODERS)[name] | {"max_new_tokens": 12}
    with torch.autocast("cpu", dtype):
        first, rows = generate(model, PROMPTS, **options)
    if name in DECODERS:  # others choose by their own window
        assert all(is_nearly_best(exact, *pair, dtype) for pair in zip(PROMPTS, rows, strict=True))
    if name != "ar":
        turns = [prompt + row + [9, 8] for prompt, row in zip(PROMPTS, rows, strict=True)]
        options = {key: value for key, value in options.items() if key != "cache_implementation"}
        assert all(generate(model, turns, **options, **{CACHE: cache_of(first)})[1])


@pytest.mark.parametrize("dtype", HALVES)
def test_entropies_of_logits_at_the_end_of_the_type_are_those_of_float64(dtype):
    largest = torch.finfo(dtype).max
    logits = torch.tensor([[largest, -largest, 0.0], [largest, largest, 0.0], [-largest] * 3, [0.1, 0.2, 0.3]])
    expected = torch.special.entr(logits.to(dtype).double().softmax(-1)).sum(-1)
    torch.testing.assert_close(token_entropy(logits.to(dtype)).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("verification", ["none", "exact"])
def test_logits_beyond_the_type_are_an_error_that_says_so(verification):
    model, _ = pair_of(torch.float16, has_adapter=verification == "exact")
    model.lm_head.weight.data *= 2.0**14
    assert not model(torch.tensor([[5, 6]])).logits.isfinite().all()
    with pytest.raises(ValueError, match="dtype overflows"):
        generate(model, prompts_of([5]), verification=verification)


def distilled(model, scale=1.0):
    """The loss and the gradient of the adapter, as one vector."""
    distillation = MaskDistillation(model, num_masks=4, top_tokens=320, sampled_tokens=1)
    loss = distillation(**batch_of(answers()))["loss"]
    (loss * scale).backward()
    gradients = [parameter.grad for parameter in model.mask_adapter.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    return loss.item(), torch.cat([gradient.double().flatten() for gradient in gradients]) / scale


def base_in(dtype, rounded_to, sharpness=1.0):
    """A frozen base whose weights a type has rounded, and an adapter in float32, as it trains."""
    model = sharpened(adapted_model(), sharpness)
    adapter = model.mask_adapter
    for parameter in model.parameters():
        if not any(parameter is own for own in adapter.parameters()):
            parameter.data = parameter.data.to(rounded_to).to(dtype)
    if dtype == torch.float64:
        adapter.to(dtype)
    return model


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("kind", "scale"), [("weights", 1.0), ("weights", 2.0**8), ("autocast", 1.0)])
def test_mask_adapters_learn_what_float64_teaches_but_for_rounding(kind, scale, dtype):
    is_autocast = kind == "autocast"
    expected, direction = distilled(base_in(torch.float64, torch.float32 if is_autocast else dtype))
    with torch.autocast("cpu", dtype, enabled=is_autocast):
        found, gradient = distilled(base_in(*[torch.float32 if is_autocast else dtype] * 2), scale)
    epsilon = torch.finfo(dtype).eps
    assert found == pytest.approx(expected, rel=4 * epsilon)
    assert (gradient - direction).norm() <= 16 * epsilon * direction.norm()


@pytest.mark.parametrize("dtype", HALVES)
def test_mask_adapters_learn_from_scores_at_the_end_of_the_type(dtype):
    found, gradient = distilled(base_in(dtype, dtype, sharpness=400.0))
    assert found == pytest.approx(distilled(base_in(torch.float64, dtype, sharpness=400.0))[0], rel=0.1)
    assert gradient.norm() > 0
