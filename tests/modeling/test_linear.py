"""Linear layers for few rows: the same numbers but for rounding, and torch's own wherever they are not meant."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn

from wedlm_hf.modeling_wedlm import linear_wedlm
from wedlm_hf.modeling_wedlm.linear_wedlm import MOST_ROWS, WeDLMLinear

LARGE, SMALL = (512, 640), (64, 32)


@pytest.fixture(autouse=True)
def transposed(monkeypatch):
    """The numbers of threads that the other order was asked for; it is always called faster."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(linear_wedlm, "_transposed_is_faster", lambda threads: asked.append(threads) or True)
    return asked


def layers(size=LARGE, bias=False, dtype=torch.float32):
    """A layer and torch's own with the same weights."""
    torch.manual_seed(0)
    plain = nn.Linear(*size, bias=bias).to(dtype)
    layer = WeDLMLinear(*size, bias=bias).to(dtype)
    layer.load_state_dict(plain.state_dict())
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
        torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


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


def test_compiled_graphs_hold_torchs_own(transposed):
    layer, plain = layers()
    x = torch.randn(4, LARGE[0])
    with torch.no_grad():
        assert torch.compile(layer, backend="eager")(x).equal(plain(x))
    assert not transposed


def test_all_linear_layers_of_a_model_are_such_layers_and_take_an_adapter():
    model = tiny_model()
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(found) == 7 * model.config.num_hidden_layers + 1
    assert all(type(module) is WeDLMLinear for module in found)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = adapted(ids).logits
        torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, expected, atol=1e-4, rtol=1e-4)


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
    monkeypatch.setattr(linear_wedlm, "LEAST_WEIGHT", 1)
    ids = torch.arange(5, 5 + 2 * MOST_ROWS)[None]
    with torch.no_grad():
        expected = model(ids).logits[:, :5]
        assert not transposed
        torch.testing.assert_close(model(ids[:, :5]).logits, expected, atol=1e-4, rtol=1e-4)
    assert transposed


def test_the_faster_order_is_found_by_measuring(monkeypatch):
    monkeypatch.undo()
    slow = nn.functional.linear

    def linear(*args):
        for _ in range(10):
            found = slow(*args)
        return found

    monkeypatch.setattr(nn.functional, "linear", linear)
    assert linear_wedlm._transposed_is_faster.__wrapped__(1)
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight: x)
    assert not linear_wedlm._transposed_is_faster.__wrapped__(1)
