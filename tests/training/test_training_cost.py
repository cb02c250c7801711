"""The same loss as a dense, all-logits implementation, for fewer operations and less memory."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training_cost import collate, cost_model, dense_batch, dense_loss, our_loss, samples

from wedlm_hf.eval.memory import peak_bytes


@pytest.mark.slow
def test_a_step_gives_the_dense_loss_for_at_most_60_percent_of_its_operations_and_half_of_its_memory():
    model, examples = cost_model(), samples(1)
    ours = collate(examples)
    costs, losses, gradients = {}, {}, {}
    for name, loss, batch in (("dense", dense_loss, dense_batch(examples, ours)), ("ours", our_loss, ours)):

        def step(loss=loss, batch=batch, name=name):
            model.zero_grad()
            losses[name] = loss(model, batch)
            losses[name].backward()

        with FlopCounterMode(display=False) as counter:
            step()
        gradients[name] = {key: weight.grad.clone() for key, weight in model.named_parameters()}
        # In between no gradients exist: both count them as their own.
        model.zero_grad()
        costs[name] = {"flops": counter.get_total_flops(), "bytes": peak_bytes(step, torch.device("cpu"))}
    print(costs)
    assert losses["ours"].item() == pytest.approx(losses["dense"].item(), rel=1e-5)
    for key, gradient in gradients["dense"].items():
        scale = gradient.abs().max().item()
        assert scale > 0
        torch.testing.assert_close(gradients["ours"][key], gradient, rtol=0, atol=1e-4 * scale, msg=key)
    assert costs["ours"]["flops"] <= 0.6 * costs["dense"]["flops"]
    assert costs["ours"]["bytes"] <= 0.5 * costs["dense"]["bytes"]
