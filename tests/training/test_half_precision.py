"""Dual-stream training in sixteen bits against float64: weights in half precision, autocast, and scaled losses."""

import pytest
import torch
from tiny import EOS, START, tiny_model, tiny_tokenizer

from wedlm_hf.training import DataCollatorForDualStreamMasking

# Packed documents, a row that is padded, prompts that fill whole blocks.
EXAMPLES = [
    {
        "input_ids": [START, *range(10, 29), EOS, START, *range(60, 69), EOS],
        "labels": [-100] * 12 + [*range(21, 29), EOS] + [-100] * 4 + [*range(63, 69), EOS],
        "seq_lengths": [21, 11],
    },
    {"input_ids": [START, 40, 41, 42, EOS]},
]
HALVES = [torch.bfloat16, torch.float16]


def batch_of():
    return DataCollatorForDualStreamMasking(tiny_tokenizer(), block_size=4, num_eos=3, num_copies=2)(EXAMPLES)


def model_of(dtype=torch.float64, attention="sdpa", sharpness=1.0, rounded_to=None):
    """A tiny model; `sharpness` multiplies its attention scores."""
    model = tiny_model(attn_implementation=attention)
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data *= sharpness
    return model.to(rounded_to or dtype).to(dtype)


def loss_and_gradient(model, scale=1.0):
    loss = model(**batch_of()).loss
    (loss * scale).backward()
    return loss.item(), torch.cat([weight.grad.double().flatten() for weight in model.parameters()]) / scale


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("kind", "scale"), [("weights", 1.0), ("autocast", 1.0), ("autocast", 2.0**10)])
def test_loss_and_gradient_are_those_of_float64_but_for_rounding(dtype, attention, kind, scale):
    """Losses within one rounding of the type (their errors average out), gradients, as vectors, within eight."""
    is_autocast = kind == "autocast"
    with torch.autocast("cpu", dtype, enabled=is_autocast):
        loss, gradient = loss_and_gradient(model_of(torch.float32 if is_autocast else dtype, attention), scale)
    expected, direction = loss_and_gradient(model_of(rounded_to=None if is_autocast else dtype))
    epsilon = torch.finfo(dtype).eps
    assert loss == pytest.approx(expected, rel=epsilon)
    assert (gradient - direction).norm() <= 8 * epsilon * direction.norm()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", HALVES)
def test_scores_that_a_mask_drives_beyond_the_type_leave_no_row_without_a_number(dtype, attention):
    # `finfo.min` plus a negative score is -inf in float16.
    loss, gradient = loss_and_gradient(model_of(dtype, attention, sharpness=400.0))
    assert gradient.isfinite().all()
    assert loss == pytest.approx(loss_and_gradient(model_of(sharpness=400.0, rounded_to=dtype))[0], rel=0.05)
