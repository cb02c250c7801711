"""Mask adapters: what they may touch, how they are saved and loaded."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import MASK, tiny_model
from transformers import DynamicCache

from wedlm_hf import add_mask_adapter, load_mask_adapter
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


def saved_adapter(folder: Path, **base: Any) -> Path:
    """A saved adapter of `tiny_model(**base)`."""
    with_adapter(tiny_model(**base)).save_mask_adapter(folder)
    return folder


IDS = torch.tensor([[5, 6, 7, 8, MASK, MASK, MASK], [9, 10, 11, 12, 13, MASK, MASK]])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("style", ["qwen3", "qwen2.5"])
def test_real_rows_are_the_bases_bit_for_bit(style, attention):
    base = tiny_model(style)
    base.set_attn_implementation(attention)
    adapted = with_adapter(copy.deepcopy(base))
    slots = torch.tensor([[True, True, True], [False, True, True]])
    with torch.no_grad():
        expected_cache, cache = DynamicCache(), DynamicCache()
        expected = base(IDS, **{CACHE: expected_cache}).logits
        plain = adapted(IDS).logits
        actual = predict(adapted, IDS, slots, **{CACHE: cache})
    assert torch.equal(plain, expected)
    real = torch.cat([torch.ones(2, 4, dtype=torch.bool), ~slots], dim=1)
    assert torch.equal(actual[real], expected[real])
    assert not torch.isclose(actual[~real], expected[~real]).all(-1).any()
    for layer, expected_layer in zip(cache.layers, expected_cache.layers, strict=True):
        for states, expected_states in ((layer.keys, expected_layer.keys), (layer.values, expected_layer.values)):
            assert torch.equal(states.transpose(1, 2)[real], expected_states.transpose(1, 2)[real])


def test_a_mask_token_outside_the_slots_is_ordinary_text():
    adapted = with_adapter(tiny_model())
    ids = torch.tensor([[5, MASK, 7, MASK, MASK]])
    with torch.no_grad():
        actual = predict(adapted, ids, 1)
        assert torch.equal(actual[:, :4], tiny_model()(ids).logits[:, :4])
        assert torch.equal(predict(adapted, torch.tensor([[5, MASK, 7, MASK, 9]]), 1), actual)  # and a slot none


@pytest.mark.parametrize("optimizer", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_between_steps_of_training_the_newest_weights_act(optimizer):
    model = with_adapter(tiny_model())
    steps = torch.optim.AdamW(model.mask_adapter.parameters(), lr=0.1, **optimizer)
    for _ in range(2):
        with torch.no_grad():
            predict(model, IDS, 2)
        predict(model, IDS, 2).square().mean().backward()
        steps.step()
        with torch.no_grad():
            actual, expected = (predict(one, IDS, 2) for one in (model, copy.deepcopy(model)))
        assert torch.equal(actual, expected)


def test_a_new_adapter_predicts_as_the_base_does():
    model = tiny_model()
    with torch.no_grad():
        expected = model(IDS).logits
        add_mask_adapter(model, SMALL)
        slots = IDS[:, -2:] == MASK
        assert torch.equal(predict(model, IDS, slots), expected)
        hidden = torch.randn(3, 32)
        assert torch.equal(model.draft_hidden(hidden, torch.tensor([[4, 5]] * 3)), hidden)


def test_the_previous_token_head_sees_both_tokens_in_their_order():
    model = with_adapter(tiny_model())
    hidden = torch.randn(1, 32)
    pairs = torch.tensor([[4, 5], [5, 4], [4, 6], [7, 5]])
    states = model.draft_hidden(hidden.expand(4, -1), pairs)
    assert states.shape == (4, 32)
    assert len({tuple(state.tolist()) for state in states}) == 4


def test_after_an_error_the_next_forward_is_the_bases():
    model = with_adapter(tiny_model())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        expected = model(IDS).logits
        with pytest.raises(ValueError, match="more slots"):
            predict(model, IDS, 8)
        with pytest.raises(RuntimeError):
            predict(model, IDS, 2, position_ids=torch.zeros(3, 5, dtype=torch.long))
        with pytest.raises(KeyboardInterrupt), model.model.layers[1].register_forward_hook(interrupt):
            predict(model, IDS, 2)
        assert torch.equal(model(IDS).logits, expected)


def test_gradient_checkpointing_is_refused():
    model = with_adapter(tiny_model()).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="without the mask adapter"):
        predict(model, IDS, 2, use_cache=False)


# PEFT.

TASK = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


def test_peft_loads_and_saves_it(tmp_path):
    loaded = PeftModel.from_pretrained(tiny_model(), str(saved_adapter(tmp_path / "ours")))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    loaded.save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_peft_switches_it_off_and_takes_it_away_but_does_not_merge_it(tmp_path):
    model = PeftModel.from_pretrained(tiny_model(), str(saved_adapter(tmp_path)))
    base = model.base_model.model
    with model.disable_adapter():
        assert not base.has_mask_adapter
    assert base.has_mask_adapter and model.get_model_status().enabled
    for merge in ("merge_and_unload", "merge_adapter"):
        with pytest.raises(ValueError, match="cannot be merged: it acts on mask rows alone"):
            getattr(model, merge)()
    assert model.unload() is base and type(base) is type(tiny_model())
    assert vars(base).keys() == vars(tiny_model()).keys()
    with torch.no_grad():
        assert torch.equal(base(IDS).logits, tiny_model()(IDS).logits)


def test_peft_makes_a_new_one_to_train(tmp_path):
    saved_adapter(tmp_path)
    config = PeftConfig.from_pretrained(str(tmp_path))
    config.inference_mode = False
    model = get_peft_model(tiny_model(), config)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("mask_adapter" in name for name in trained)


@pytest.mark.parametrize("mask_first", [True, False])
def test_it_stands_beside_a_task_lora_on_all_rows(tmp_path, mask_first):
    saved_adapter(tmp_path)
    torch.manual_seed(0)
    task = get_peft_model(tiny_model(), TASK)
    with torch.no_grad():
        expected = task(input_ids=IDS).logits
    task.save_pretrained(tmp_path / "task")
    base = tiny_model()
    both: Any
    if mask_first:
        load_mask_adapter(base, tmp_path)
        both = PeftModel.from_pretrained(base, str(tmp_path / "task"))
    else:
        both = PeftModel.from_pretrained(PeftModel.from_pretrained(base, str(tmp_path / "task")), str(tmp_path))
        both.save_pretrained(tmp_path / "saved")  # both are called "default"
        both.base_model.model.save_pretrained(tmp_path / "saved" / "task")
        for folder in (".", "task"):
            file = f"{folder}/adapter_model.safetensors"
            one, other = load_file(tmp_path / file), load_file(tmp_path / "saved" / file)
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with torch.no_grad():
        actual = predict(both, IDS, 2)
        assert torch.equal(both(input_ids=IDS).logits, expected)
    assert torch.equal(actual[:, :5], expected[:, :5])
    assert not torch.isclose(actual[:, 5:], expected[:, 5:]).all(-1).any()
    if mask_first:  # the task's LoRA can be merged; the mask adapter stays what it was
        with torch.no_grad():
            merged = predict(both.merge_and_unload(), IDS, 2)
        torch.testing.assert_close(merged, actual, atol=1e-4, rtol=1e-4)


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
    some.save_mask_adapter(tmp_path)
    ours = tiny_model()
    load_mask_adapter(ours, tmp_path)
    peft: Any = PeftModel.from_pretrained(tiny_model(), str(tmp_path))
    assert ours.mask_adapter.settings == peft.get_base_model().mask_adapter.settings == settings
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
    ids, slots = torch.tensor([[5, 6, 7, 8, MASK, MASK]]), 2
    with torch.no_grad():
        expected, packed_logits = predict(plain, ids, slots), predict(model, ids, slots)
        assert packed_logits.equal(predict(copy.deepcopy(model), ids, slots))  # copies make products of their own
        (down, up), *_ = next(iter(model.mask_adapter.matrices(torch.float32, True).updates.values()))
    torch.testing.assert_close(packed_logits, expected, rtol=1e-2, atol=1e-2)
    assert not isinstance(down, torch.Tensor) and not isinstance(up, torch.Tensor)
    # Weights that change are packed anew.
    with torch.no_grad():
        for parameter in model.mask_adapter.parameters():
            parameter.zero_()
        assert not predict(model, ids, slots).equal(packed_logits)
