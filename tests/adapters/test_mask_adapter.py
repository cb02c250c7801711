"""Mask adapters: what they may touch, how they are saved and loaded."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import MASK, tiny_model
from transformers import DynamicCache

from wedlm_hf import add_mask_adapter, load_mask_adapter, save_mask_adapter
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.adapters.peft_method import MaskAdapterConfig
from wedlm_hf.checkpoints.packed import can_pack, pack
from wedlm_hf.generation.versions import CACHE

SMALL = MaskAdapterSettings(rank=4, head_width=8)


def with_adapter(model: Any, settings: MaskAdapterSettings = SMALL) -> Any:
    """`model` with a mask adapter that changes every slot."""
    torch.manual_seed(1)
    for parameter in add_mask_adapter(model, settings).parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def predict(model: Any, ids: torch.Tensor, slots: Any, **inputs: Any) -> torch.Tensor:
    """Logits of a forward whose last rows are slots."""
    with model.predicting(slots):
        return model(input_ids=ids, **inputs).logits


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, slots: Any = None, **inputs: Any) -> torch.Tensor:
    """The same without a gradient; without slots, those of the plain model."""
    return model(input_ids=ids, **inputs).logits if slots is None else predict(model, ids, slots, **inputs)


def saved_adapter(folder: Path) -> Path:
    """A saved adapter of `tiny_model()`."""
    save_mask_adapter(with_adapter(tiny_model()), folder)
    return folder


IDS = torch.tensor([[5, 6, 7, 8, MASK, MASK, MASK], [9, 10, 11, 12, 13, MASK, MASK]])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("style", ["qwen3", "qwen2.5"])
def test_real_rows_are_the_bases_bit_for_bit(style, attention):
    base = tiny_model(style)
    base.set_attn_implementation(attention)
    adapted = with_adapter(copy.deepcopy(base))
    slots = torch.tensor([[True, True, True], [False, True, True]])
    expected_cache, cache = DynamicCache(), DynamicCache()
    expected = logits(base, IDS, **{CACHE: expected_cache})
    actual = logits(adapted, IDS, slots, **{CACHE: cache})
    assert torch.equal(logits(adapted, IDS), expected)
    real = torch.cat([torch.ones(2, 4, dtype=torch.bool), ~slots], dim=1)
    assert torch.equal(actual[real], expected[real])
    assert not torch.isclose(actual[~real], expected[~real]).all(-1).any()
    for layer, expected_layer in zip(cache.layers, expected_cache.layers, strict=True):
        for name in ("keys", "values"):
            states, expected_states = (getattr(each, name).transpose(1, 2) for each in (layer, expected_layer))
            assert torch.equal(states[real], expected_states[real])


def test_a_mask_token_outside_the_slots_is_ordinary_text():
    adapted = with_adapter(tiny_model())
    ids = torch.tensor([[5, MASK, 7, MASK, MASK]])
    actual = logits(adapted, ids, 1)
    assert torch.equal(actual[:, :4], logits(tiny_model(), ids)[:, :4])
    assert torch.equal(logits(adapted, torch.tensor([[5, MASK, 7, MASK, 9]]), 1), actual)  # and a slot none


@pytest.mark.parametrize("optimizer", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_between_steps_of_training_the_newest_weights_act(optimizer):
    model = with_adapter(tiny_model())
    steps = torch.optim.AdamW(model.mask_adapter.parameters(), lr=0.1, **optimizer)
    for _ in range(3):
        assert torch.equal(logits(model, IDS, 2), logits(copy.deepcopy(model), IDS, 2))
        predict(model, IDS, 2).square().mean().backward()
        steps.step()


def test_a_new_adapter_predicts_as_the_base_does_and_its_head_sees_both_tokens_in_their_order():
    model, hidden = tiny_model(), torch.randn(1, 32).expand(4, -1)
    pairs = torch.tensor([[4, 5], [5, 4], [4, 6], [7, 5]])
    expected = logits(model, IDS)
    add_mask_adapter(model, SMALL)
    assert torch.equal(logits(model, IDS, IDS[:, -2:] == MASK), expected)
    assert torch.equal(model.draft_hidden(hidden, pairs), hidden)
    states = with_adapter(tiny_model()).draft_hidden(hidden, pairs)
    assert states.shape == (4, 32) and len({tuple(state.tolist()) for state in states}) == 4


def test_after_an_error_the_next_forward_is_the_bases_and_gradient_checkpointing_is_refused():
    model, interrupt = with_adapter(tiny_model()), Mock(side_effect=KeyboardInterrupt)
    expected = logits(model, IDS)
    with pytest.raises(ValueError, match="more slots"):
        logits(model, IDS, 8)
    with pytest.raises(RuntimeError):
        logits(model, IDS, 2, position_ids=torch.zeros(3, 5, dtype=torch.long))
    with pytest.raises(KeyboardInterrupt), model.model.layers[1].register_forward_hook(interrupt):
        logits(model, IDS, 2)
    assert torch.equal(logits(model, IDS), expected)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="without the mask adapter"):
        predict(model, IDS, 2, use_cache=False)


# PEFT.

TASK = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


def test_peft_switches_it_off_takes_it_away_makes_a_new_one_to_train_but_does_not_merge_it(tmp_path):
    model = PeftModel.from_pretrained(tiny_model(), str(saved_adapter(tmp_path)))
    base = model.base_model.model
    with pytest.raises(ValueError, match="not loaded with `low_cpu_mem_usage=True`"):
        PeftModel.from_pretrained(tiny_model(), str(tmp_path), low_cpu_mem_usage=True)
    with model.disable_adapter():
        assert not base.has_mask_adapter
    assert base.has_mask_adapter and model.get_model_status().enabled
    for merge in ("merge_and_unload", "merge_adapter"):
        with pytest.raises(ValueError, match="cannot be merged: it acts on mask rows alone"):
            getattr(model, merge)()
    plain = tiny_model()
    assert model.unload() is base and type(base) is type(plain) and vars(base).keys() == vars(plain).keys()
    assert torch.equal(logits(base, IDS), logits(plain, IDS))
    made = []
    for make in (add_mask_adapter, lambda model, settings: get_peft_model(model, MaskAdapterConfig(rank=4))):
        other = tiny_model()
        torch.manual_seed(3)
        make(other, MaskAdapterSettings(rank=4))
        made.append(other.mask_adapter.down["o_proj"])
    assert torch.equal(*made)
    config = PeftConfig.from_pretrained(str(tmp_path))
    config.inference_mode = False
    parameters = get_peft_model(plain, config).named_parameters()
    trained = {name for name, parameter in parameters if parameter.requires_grad}
    assert trained and all("mask_adapter" in name for name in trained)


@pytest.mark.parametrize("mask_first", [True, False])
def test_it_stands_beside_a_task_lora_on_all_rows(tmp_path, mask_first):
    ours, base = str(saved_adapter(tmp_path)), tiny_model()
    torch.manual_seed(0)
    task: Any = get_peft_model(tiny_model(), TASK)
    expected = logits(task, IDS)
    task.save_pretrained(tmp_path / "task")
    both: Any
    if mask_first:
        load_mask_adapter(base, tmp_path)
        both = PeftModel.from_pretrained(base, str(tmp_path / "task"))
    else:
        both = PeftModel.from_pretrained(PeftModel.from_pretrained(base, str(tmp_path / "task")), ours)
        both.save_pretrained(tmp_path / "saved")  # both are called "default"
        both.base_model.model.save_pretrained(tmp_path / "saved" / "task")
        for file in ("adapter_model.safetensors", "task/adapter_model.safetensors"):
            own, other = load_file(tmp_path / file), load_file(tmp_path / "saved" / file)
            assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    actual = logits(both, IDS, 2)
    assert torch.equal(logits(both, IDS), expected) and torch.equal(actual[:, :5], expected[:, :5])
    assert not torch.isclose(actual[:, 5:], expected[:, 5:]).all(-1).any()
    if mask_first:  # the task's LoRA can be merged; the mask adapter stays what it was
        torch.testing.assert_close(logits(both.merge_and_unload(), IDS, 2), actual, atol=1e-4, rtol=1e-4)


def test_an_adapter_may_update_some_layers_alone(tmp_path: Path) -> None:
    settings = MaskAdapterSettings(rank=4, target_modules=("down_proj",), head_width=8, layers_to_transform=(1,))
    some, whole = (with_adapter(tiny_model(), each) for each in (settings, replace(settings, layers_to_transform=())))
    weights = some.mask_adapter.state_dict()
    for kind in ("down", "up"):
        assert len(weights[f"{kind}.down_proj"]) == 1
        every = torch.zeros_like(whole.mask_adapter.state_dict()[f"{kind}.down_proj"])
        every[1] = weights[f"{kind}.down_proj"][0]
        weights[f"{kind}.down_proj"] = every
    whole.mask_adapter.load_state_dict(weights)
    expected = predict(whole, IDS[:1], 3)
    assert torch.equal(predict(some, IDS[:1], 3), expected)
    save_mask_adapter(some, tmp_path)
    ours = tiny_model()
    load_mask_adapter(ours, tmp_path)
    peft: Any = PeftModel.from_pretrained(tiny_model(), str(tmp_path))
    assert ours.mask_adapter.settings == peft.get_base_model().mask_adapter.settings == replace(settings, root_layer=0)
    for model in (ours, peft.get_base_model()):
        assert torch.equal(predict(model, IDS[:1], 3), expected)
    with pytest.raises(ValueError, match="names layer 9; WeDLMForCausalLM has the layers 0 to 1"):
        add_mask_adapter(tiny_model(), replace(settings, layers_to_transform=(1, 9)))
    for layers, kept in ((None, []), (1, [1]), (range(2), [0, 1])):  # in PEFT, `None` means all and a number one
        config = MaskAdapterConfig(rank=4, head_width=8, layers_to_transform=layers)
        model = get_peft_model(tiny_model(), config)
        model.save_pretrained(tmp_path)
        assert PeftConfig.from_pretrained(str(tmp_path)).layers_to_transform == kept
        assert len(model.get_base_model().mask_adapter.down["o_proj"]) == len(kept or range(2))


@pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")
def test_updates_of_a_mask_adapter_are_packed_with_the_model():
    plain = with_adapter(tiny_model())
    model = pack(copy.deepcopy(plain))
    expected, found = logits(plain, IDS[1:], 2), logits(model, IDS[1:], 2)
    assert found.equal(logits(copy.deepcopy(model), IDS[1:], 2))  # copies make products of their own
    with torch.no_grad():
        (down, up), *_ = next(iter(model.mask_adapter.matrices(torch.float32, True).updates.values()))
        for parameter in model.mask_adapter.parameters():
            parameter.zero_()
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert not isinstance(down, torch.Tensor) and not isinstance(up, torch.Tensor)
    assert not logits(model, IDS[1:], 2).equal(found)  # weights that change are packed anew
