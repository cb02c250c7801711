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


def moved(batch, device):
    return {name: values.to(device) for name, values in batch.items()}


def gradients_of(model):
    return {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_close(found, expected):
    assert found.keys() == expected.keys() and found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_dual_stream_loss_and_its_gradient_are_the_cpus(pretend, attention, monkeypatch):
    monkeypatch.setattr("wedlm_hf.modeling_wedlm.dual_stream.CHUNK_LOGITS", 5 * 320)  # several chunks of the head
    model, batch = tiny_model(attn_implementation=attention), batch_of()
    other = copy.deepcopy(model).to(pretend.device)
    expected = model(**batch)
    expected.loss.backward()
    output = other(**moved(batch, pretend.device), num_items_in_batch=None)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    torch.testing.assert_close(output.token_nll.cpu(), expected.token_nll, atol=1e-5, rtol=1e-5)
    assert_close(gradients_of(other), gradients_of(model))


def test_mask_adapters_learn_as_on_the_cpu(pretend):
    model = with_adapter(tiny_model())
    other = copy.deepcopy(model).to(pretend.device)
    batch = DataCollatorForMaskRuns(0, num_masks=3, cut_stride=2)([ANSWERS])
    pair = [MaskDistillation(one, num_masks=3, sampled_tokens=64) for one in (model, other)]
    pair[1].to(pretend.device)
    optimizers = [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], 1e-2) for one in pair]
    for _ in range(3):
        outputs = [one(**inputs) for one, inputs in zip(pair, (batch, moved(batch, pretend.device)), strict=True)]
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output["loss"].backward()
        assert_close(gradients_of(pair[1]), gradients_of(pair[0]))
        assert outputs[1]["loss"].item() == pytest.approx(outputs[0]["loss"].item(), rel=1e-5)
        assert torch.equal(outputs[1]["correct"].cpu(), outputs[0]["correct"])
        for optimizer in optimizers:
            optimizer.step()


def test_what_is_evaluated_is_the_cpus(pretend):
    model = tiny_model()
    other = copy.deepcopy(model).to(pretend.device)
    collator = DataCollatorForDualStreamMasking(tiny_tokenizer(), block_size=4, num_eos=3, num_copies=2)
    batch, sums = batch_of(), []
    for one, inputs in ((other, moved(batch, pretend.device)), (model, batch)):
        with torch.no_grad():
            output = one(**inputs)
        sums.append(evaluation_sums(inputs, output, collator))
    for name, values in sums[0].items():
        torch.testing.assert_close(values.cpu(), sums[1][name], atol=1e-5, rtol=1e-5)
    found, expected = (response_log_probs(one, [EXAMPLES[1]], collator) for one in (other, model))
    for name in ("ar_tokens", "mask_tokens", "ar_blocks", "mask_blocks"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), atol=1e-5, rtol=1e-5)
