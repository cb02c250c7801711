"""Linear layers for few rows: the same numbers but for rounding, and torch's own wherever they are not meant."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import assert_equal_but_rounding, tiny_model
from torch import nn

from wedlm_hf.modeling_wedlm import linear
from wedlm_hf.modeling_wedlm.linear import MOST_ROWS, few_rows_linear, speed_up_few_rows

LARGE, SMALL = (512, 640), (64, 32)


@pytest.fixture(autouse=True)
def transposed(monkeypatch):
    """The numbers of threads that the other order was asked for; it is always called faster."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(linear, "_transposed_is_faster", lambda: asked.append(torch.get_num_threads()) or True)
    return asked


def layers(size=LARGE, bias=False, dtype=torch.float32):
    """A layer and torch's own with the same weights."""
    torch.manual_seed(0)
    plain = nn.Linear(*size, bias=bias).to(dtype)
    layer = copy.deepcopy(plain)
    speed_up_few_rows(layer)
    return layer, plain


@pytest.mark.parametrize("shape", [(2,), (1, 3), (4, 2), (1, MOST_ROWS), (2, 2, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_torchs_own_but_for_rounding(transposed, shape, bias):
    layer, plain = layers(bias=bias)
    x = torch.randn(*shape, LARGE[0])
    with torch.no_grad():
        found, expected = layer(x), plain(x)
        strided = layer(x.transpose(0, -1).contiguous().transpose(0, -1))
    assert transposed == [2, 2]
    assert found.is_contiguous() and found.shape == expected.shape
    for rows in (found, strided):
        assert_equal_but_rounding(rows, expected)


@pytest.mark.parametrize("case", ["one row", "none", "many rows", "gradients", "bfloat16", "small", "autocast"])
def test_everything_else_is_torchs_own_bit_for_bit(transposed, case):
    layer, plain = layers(SMALL if case == "small" else LARGE, dtype=torch.bfloat16 if case == "bfloat16" else None)
    rows = {"one row": 1, "none": 0, "many rows": MOST_ROWS + 1}.get(case, 4)
    x = torch.randn(rows, layer.in_features, dtype=layer.weight.dtype)
    with torch.set_grad_enabled(case == "gradients"), torch.autocast("cpu", enabled=case == "autocast"):
        found, expected = layer(x), plain(x)
    assert found.equal(expected) and found.dtype == expected.dtype
    assert found.requires_grad == (case == "gradients")
    assert not transposed


def test_graphs_hold_torchs_own_for_any_number_of_rows(transposed):
    layer, plain = layers()
    x = torch.randn(4, LARGE[0])
    with torch.no_grad():
        assert torch.compile(layer, backend="eager")(x).equal(plain(x))
        exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=99)},))
        assert exported.module()(x[:3]).equal(plain(x[:3]))
        traced = torch.jit.trace(layer, x, check_trace=False)
        assert traced(x[:3]).equal(plain(x[:3]))
    assert not transposed


def test_an_input_of_another_width_is_refused_as_by_torch(transposed):
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layers()[0](torch.randn(2, 2 * LARGE[0]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_layer_uses_its_own_weights(transposed, copied):
    layer, _ = layers()
    twin, x = copied(layer), torch.randn(3, LARGE[0])
    with torch.no_grad():
        expected = twin(x)
        layer.weight.zero_()
        assert twin(x).equal(expected)
        assert layer(x).count_nonzero() == 0
    assert len(transposed) == 3


def test_the_layers_of_a_model_stay_plain_for_adapters_and_quantizers():
    model = tiny_model()
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(found) == 7 * model.config.num_hidden_layers + 1
    assert all(type(module) is nn.Linear and module.forward.func is few_rows_linear for module in found)
    ids = torch.tensor([[5, 6, 7]])
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    assert quantized(ids).logits.shape == (1, 3, model.config.vocab_size)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    with torch.no_grad():
        expected = adapted(ids).logits
        assert_equal_but_rounding(adapted.merge_and_unload()(ids).logits, expected)


@pytest.mark.parametrize(("threads", "most"), [(1, 4), (2, 8), (4, 8)])
def test_how_many_rows_are_few_goes_by_the_threads(transposed, monkeypatch, threads, most):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layer, _ = layers()
    for rows in range(1, 12):
        transposed.clear()
        with torch.no_grad():
            layer(torch.randn(rows, LARGE[0]))
        assert bool(transposed) == (1 < rows <= most)


def test_a_large_model_gives_the_same_logits_for_few_rows_as_for_many(transposed, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(linear, "LEAST_WEIGHT", 1)
    ids = torch.arange(5, 5 + 2 * MOST_ROWS)[None]
    with torch.no_grad():
        expected = model(ids).logits[:, :5]
        assert not transposed
        assert_equal_but_rounding(model(ids[:, :5]).logits, expected)
    assert transposed


def test_the_faster_order_is_found_by_measuring(monkeypatch):
    monkeypatch.undo()
    slow = nn.functional.linear

    def linear(*args):
        for _ in range(10):
            found = slow(*args)
        return found

    monkeypatch.setattr(nn.functional, "linear", linear)
    assert linear._transposed_is_faster.__wrapped__()
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight: x)
    assert not linear._transposed_is_faster.__wrapped__()


def test_what_is_faster_does_not_depend_on_the_default_dtype_and_device(monkeypatch):
    monkeypatch.undo()
    seen = []
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight: seen.extend([x, weight]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            linear._transposed_is_faster.__wrapped__()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(tensor.dtype, tensor.device.type) for tensor in seen} == {(torch.float32, "cpu")}
