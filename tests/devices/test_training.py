"""Training on a pretend accelerator: the CPU's losses, gradients and steps."""

import copy

import pytest
import torch
from test_half_precision import EXAMPLES, batch_of
from test_mask_adapter import with_adapter
from tiny import tiny_model, tiny_tokenizer

from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.layout import DataCollatorForMaskRuns
from wedlm_hf.training import DataCollatorForDualStreamMasking
from wedlm_hf.training.log_probs import response_log_probs
from wedlm_hf.training.metrics import evaluation_sums

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
    pairs = [(one.grad, other.grad) for one, other in zip(found.parameters(), expected.parameters(), strict=True)]
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
    optimizers = [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], 1e-2) for one in pair]
    for _ in range(3):
        outputs = [one(**batch) for one, batch in zip(pair, batches, strict=True)]
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
