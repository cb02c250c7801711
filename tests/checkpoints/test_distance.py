"""Packing says how far it takes a model from what it was, and measures it once."""

import copy
import logging

import pytest
import torch
from tiny import tiny_llama, tiny_model
from torch import nn

from wedlm_hf import pack
from wedlm_hf.checkpoints import distance
from wedlm_hf.checkpoints.matrices import can_pack

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")


@pytest.fixture
def looked(monkeypatch, tmp_path):
    """The texts that were written; nothing is remembered from before."""
    found, own = [], distance._own_texts
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(distance, "_own_texts", lambda model: found.append(own(model)) or found[-1])
    return found


def llama(seed=0):
    """Whose weights are numbers of float16."""
    return tiny_llama(seed, hidden_size=64, intermediate_size=96).half().float()


def test_packed_layers_that_are_exact_are_no_distance_away_and_coarse_ones_are(looked, caplog):
    with caplog.at_level(logging.INFO, "wedlm_hf"):
        exact, near, far = (pack(llama(), bits).packed_distance for bits in (16, 8, 4))
    assert 0 <= exact < 1e-6 and 1e-4 < near < far
    shown = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert shown[0] == ("INFO", f"Packed in 16 bits, this model is {exact:.2g} nats per token from the unpacked one.")
    assert shown[2][0] == "WARNING" and "4 bits" in shown[2][1] and "it writes other texts" in shown[2][1]


@pytest.mark.parametrize("make", [llama, tiny_model])
def test_it_is_the_mean_divergence_of_what_may_follow_on_texts_that_the_model_wrote(looked, make):
    plain = make()
    packed = pack(copy.deepcopy(plain), 4)
    ((ids, _),) = looked
    assert ids.shape == (distance.TEXTS, distance.LENGTH) and len(set(map(tuple, ids.tolist()))) > 1
    expected = 0.0
    with torch.no_grad():
        for text in ids:
            for end in range(1, len(text) + 1):
                own, other = (model(text[None, :end]).logits[0, -1].double().softmax(0) for model in (plain, packed))
                expected += float((own * (own.log() - other.log())).sum()) / ids.numel()
    assert packed.packed_distance == pytest.approx(expected, rel=1e-3)


def test_it_is_measured_once_for_the_same_weights_and_bits(looked):
    first = pack(llama(), 4).packed_distance
    assert pack(llama(), 4).packed_distance == first and len(looked) == 1
    pack(llama(), 8)
    pack(llama(1), 4)
    assert len(looked) == 3
    changed = llama()
    with torch.no_grad():
        changed.lm_head.weight *= 1.5
    assert pack(changed, 4).packed_distance != first and len(looked) == 4
    for number in range(3):  # one row of one layer, whichever it is
        one = llama()
        with torch.no_grad():
            one.model.layers[0].mlp.up_proj.weight[7 + number] *= 1.5
        pack(one, 4)
        assert len(looked) == 5 + number


def test_a_model_that_writes_no_text_is_packed_without_it(looked, caplog):
    with caplog.at_level(logging.INFO, "wedlm_hf"):
        assert pack(nn.Sequential(nn.Linear(32, 32))).packed_distance is None
        assert pack(llama().model).packed_distance is None
    assert "nats" not in caplog.text


def test_weights_that_lie_anywhere_in_memory_are_packed(looked):
    model, places = llama(), 1
    flat = torch.empty(1 + sum(weight.numel() for weight in model.parameters()))
    for weight in model.parameters():
        part = flat[places : places + weight.numel()].view_as(weight)
        weight.data, places = part.copy_(weight.data), places + weight.numel()
    assert pack(model, 8).packed_distance == pack(llama(), 8).packed_distance
