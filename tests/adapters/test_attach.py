"""Mask adapters on stock models: what attaching changes, what detaching restores, and what is refused."""

import copy
import gc
import io
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_families import build
from test_mask_adapter import SMALL
from test_mask_adapter import with_adapter as attached
from test_states import STATEFUL
from tiny import tiny_llama as llama
from tiny import tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from wedlm_hf import add_mask_adapter, load_mask_adapter, save_mask_adapter, unload_mask_adapter
from wedlm_hf.adapters.adapter_files import base_of, check_base
from wedlm_hf.adapters.layers import decoder_layers
from wedlm_hf.adapters.probe import is_close
from wedlm_hf.checkpoints import find
from wedlm_hf.generation.versions import CACHE, cache_of

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 96}
VERIFIED: dict[str, Any] = GREEDY | {"strategy": "wedlm", "verification": "exact", "slot_cost": 0.0}


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def state_of(model: Any) -> tuple[Any, ...]:
    hooks = [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()]
    configs = model.config.to_dict(), model.generation_config.to_dict()
    return type(model), hooks, trained(model), *configs, set(model.state_dict())


def test_detaching_gives_the_object_back_as_it_was():
    model = llama()
    before, weights = state_of(model), [parameter.data_ptr() for parameter in model.parameters()]
    expected = model.generate(PROMPT, **GREEDY)
    attached(model)
    assert isinstance(model, LlamaForCausalLM) and model.has_mask_adapter
    assert torch.equal(model.generate(PROMPT, **VERIFIED), expected)
    unload_mask_adapter(model)
    assert state_of(model) == before and [parameter.data_ptr() for parameter in model.parameters()] == weights
    with pytest.raises((TypeError, ValueError), match="strategy"):
        model.generate(PROMPT, **VERIFIED)
    with pytest.raises(ValueError, match="has no mask adapter"):
        unload_mask_adapter(model)


@pytest.mark.parametrize("name", ["Llama", "FalconH1", "Qwen3_5"])
def test_all_of_a_saved_adapter_is_loaded_by_our_function_and_by_peft_as_transformers_own_loading_says(tmp_path, name):
    ours, base, adapted, below = (build(name, STATEFUL.get(name, {})) for _ in range(4))
    own = attached(adapted, replace(SMALL, root_width=8)).mask_adapter
    own.root_head.draft_among([{"response_ids": [*range(20, 90)]}])
    save_mask_adapter(adapted, tmp_path)
    with pytest.raises(ValueError, match=r"call `wedlm_hf\.load_mask_adapter\(model, folder\)` or `PeftModel"):
        ours.load_adapter(str(tmp_path))
    load_mask_adapter(ours, tmp_path)
    theirs = PeftModel.from_pretrained(below, str(tmp_path))
    assert not any(parameter.requires_grad for parameter in theirs.parameters())
    expected = base.generate(PROMPT, **GREEDY)
    for model in (ours, theirs):
        found, weights = model.mask_adapter, own.state_dict()
        assert found.settings == own.settings and len(found.root_head.frequent()) == 70
        assert any("root_head" in key for key in weights) and weights.keys() == found.state_dict().keys()
        assert all(torch.equal(weight, found.state_dict()[key]) for key, weight in weights.items())
        assert torch.equal(model.generate(input_ids=PROMPT, **VERIFIED), expected)
    theirs.save_pretrained(tmp_path / "again")
    first, again = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Any:
    """A saved adapter of `llama()`."""
    folder = tmp_path_factory.mktemp("saved")
    save_mask_adapter(attached(llama()), folder)
    return folder


def test_loading_leaves_what_trains_in_training(saved):
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    base, before = model.base_model.model, trained(model)
    load_mask_adapter(base, saved)
    assert trained(model) == before
    with pytest.raises(ValueError, match="has a mask adapter already"):
        load_mask_adapter(base, saved)
    assert trained(model) == before
    unload_mask_adapter(model)  # that of the base, beside the LoRA, which stays
    assert trained(model) == before and not hasattr(base, "mask_adapter")


LORAS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["o_proj", "down_proj"], "use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    "whole embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("how", LORAS)
def test_an_adapter_made_beside_a_lora_updates_the_base_and_fits_it(tmp_path, how):
    torch.manual_seed(4)
    wrapped = get_peft_model(llama(), LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **LORAS[how]))
    model = wrapped.base_model.model.eval()
    expected = model.generate(PROMPT, **GREEDY)
    adapter = add_mask_adapter(model)
    assert adapter.settings.target_modules == ("o_proj", "down_proj")
    for parameter in adapter.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert torch.equal(model.generate(PROMPT, **VERIFIED), expected)
    save_mask_adapter(model, tmp_path)
    unload_mask_adapter(model)
    load_mask_adapter(wrapped.merge_and_unload(), tmp_path)


def test_a_lora_may_come_after_the_mask_adapter(tmp_path):
    task = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    get_peft_model(llama(), task).save_pretrained(tmp_path)
    expected = PeftModel.from_pretrained(llama(), str(tmp_path)).generate(input_ids=PROMPT, **GREEDY)
    model = attached(llama())
    model.load_adapter(str(tmp_path))
    assert torch.equal(model.generate(PROMPT, **VERIFIED), expected)


def test_copies_pickles_and_saved_checkpoints_are_whole(tmp_path):
    model = attached(llama())
    model.generate(PROMPT, **VERIFIED | {"slot_cost": None})  # what it learned of times stays with it
    twin = copy.deepcopy(model)
    for parameter in twin.mask_adapter.parameters():
        nn.init.zeros_(parameter)
    assert model.mask_adapter.mask_embedding.abs().sum() > 0
    again = pickle.loads(pickle.dumps(model))
    assert again.has_mask_adapter and torch.equal(again.generate(PROMPT, **VERIFIED), model.generate(PROMPT, **GREEDY))
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=False).has_mask_adapter
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain) is LlamaForCausalLM
    assert load_file(tmp_path / "model.safetensors").keys() == plain.state_dict().keys()
    assert torch.equal(plain.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("make", [llama, tiny_model])
def test_the_class_of_a_model_with_an_adapter_makes_models_without_one(make, tmp_path):
    model = attached(make())
    kind, expected = type(model), model.generate(PROMPT, **GREEDY)
    model.save_pretrained(tmp_path)
    loaded, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for new in (kind(model.config), kind._from_config(model.config), loaded):
        assert type(new) is kind.base_class
        assert attached(new).generate(PROMPT, **VERIFIED).equal(new.generate(PROMPT, **GREEDY))
    assert loaded.generate(PROMPT, **GREEDY).equal(expected)
    assert copy.deepcopy(model).has_mask_adapter and type(copy.deepcopy(model)) is kind


@pytest.mark.parametrize("how", ["resized", "replaced"])
def test_embeddings_and_head_may_be_replaced_while_an_adapter_sits_on_the_model(how):
    model = attached(llama())
    if how == "resized":
        model.resize_token_embeddings(104)
    else:
        for name, new in (("embed_tokens", nn.Embedding(104, 32)), ("lm_head", nn.Linear(32, 104, bias=False))):
            setattr(model.model if name == "embed_tokens" else model, name, new)
    fixed = VERIFIED | {"window_size": 3, "return_dict_in_generate": True}
    before = model.generate(PROMPT, **fixed)
    assert torch.equal(before.sequences, model.generate(PROMPT, **GREEDY)) and before.stats.drafted.sum() > 0
    unload_mask_adapter(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_was_made_in_inference_mode_is_used_outside(saved):
    model = llama()
    with torch.inference_mode():
        load_mask_adapter(model, saved)
        first = model.generate(PROMPT, **VERIFIED, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, PROMPT], dim=1)
    second = model.generate(longer, **{CACHE: cache_of(first)}, **VERIFIED)
    assert torch.equal(second, llama().generate(longer, **GREEDY))


def test_a_deleted_model_frees_its_memory_at_once():
    model = attached(llama())
    model.generate(PROMPT, **VERIFIED)
    dead = weakref.ref(model), weakref.ref(model.lm_head.weight)
    gc.disable()
    try:
        del model
        assert [reference() for reference in dead] == [None, None]
    finally:
        gc.enable()


def test_another_base_is_named(saved):
    with pytest.raises(ValueError, match=r"another base than this model \(num_hidden_layers: 2, not 3"):
        load_mask_adapter(llama(num_hidden_layers=3), saved)
    other = llama(initializer_range=0.1)
    with pytest.raises(ValueError, match="the weights differ"):
        load_mask_adapter(other, saved)
    assert type(other) is LlamaForCausalLM
    # A LoRA below keeps its table whether the mask adapter is refused or unloaded.
    lora = LoraConfig(target_modules=["q_proj"])
    refused, below = get_peft_model(llama(initializer_range=0.1), lora), get_peft_model(llama(), lora)
    with pytest.raises(ValueError, match="trained for another model"):
        PeftModel.from_pretrained(refused, saved)
    PeftModel.from_pretrained(below, saved).base_model.unload()
    for model in (refused, below):
        assert {name: each.peft_type for name, each in model.peft_config.items()} == {"default": lora.peft_type}
    load_mask_adapter(other, saved, any_base=True)
    assert torch.equal(other.generate(PROMPT, **VERIFIED), other.generate(PROMPT, **GREEDY))


FLOATS = torch.float32, torch.bfloat16, torch.float16
WAYS = [(), *((dtype,) for dtype in FLOATS), (torch.float16, torch.bfloat16), (torch.float16, torch.float32)]


@pytest.mark.parametrize("std", [0.3, 0.02, 1e-5])  # of the weights; small ones are no numbers of float16
@pytest.mark.parametrize("saved", FLOATS)
def test_an_adapter_knows_its_base_in_every_dtype_and_no_other(saved, std):
    base, tuned = llama(initializer_range=std), llama(initializer_range=std)
    with torch.no_grad():
        tuned.model.embed_tokens.weight.mul_(1 + 0.01 * torch.randn(97, 32))
    stated = base_of(copy.deepcopy(base).to(saved))
    for way in WAYS:
        own, other = copy.deepcopy(base), copy.deepcopy(tuned)
        for dtype in way:
            own.to(dtype), other.to(dtype)
        check_base(own, stated)
        with pytest.raises(ValueError, match="the weights differ"):
            check_base(other, stated)


def test_a_folder_that_is_not_there_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(find, "cached_file", None)  # which would ask the Hub, six times
    for name, message in (("no-such-folder", "'no-such-folder' is no folder here"), ("./gone", "no adapter folder"),
                          (tmp_path, "it has no adapter_config")):  # fmt: skip
        with pytest.raises(OSError, match=message):
            load_mask_adapter(llama(), name)


def test_sharded_weights_are_refused_before_and_after(tmp_path):
    file = (tmp_path / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    try:
        sharded, adapted = llama(), attached(llama())
        for model in (sharded, adapted):
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="is sharded"):
            attached(sharded)
        with pytest.raises(ValueError, match="which FSDP does not allow"):
            adapted.generate(PROMPT, **VERIFIED)
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_that_cannot_carry_one_now_is_refused():
    for wrap, message in (
        (torch.compile, "OptimizedModule is a compiled one. Attach the adapter first"),
        (lambda model: model.compile() or model, r"attach the mask adapter before `model.compile\(\)`"),
        (nn.DataParallel, "DataParallel is a wrapped one"),
        (lambda model: get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")), "PeftModelForCausalLM is a wrapped"),
        (lambda model: model.model.layers[1].mlp.to("meta") and model, "3 weights of LlamaForCausalLM are on the dev"),
        (lambda model: model.lm_head, "Linear is no one"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            add_mask_adapter(wrap(llama()), SMALL)


def test_attention_that_takes_no_masks_as_tensors_decodes_one_prompt_at_a_time():
    def maskless(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        assert attention_mask is None
        ends = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None]
        visible = torch.zeros(query.shape[2], key.shape[2]).masked_fill(torch.arange(key.shape[2]) > ends, -torch.inf)
        return sdpa_attention_forward(module, query, key, value, visible[None, None], **kwargs)

    transformers.AttentionInterface.register("maskless", maskless)
    transformers.AttentionMaskInterface.register("maskless", lambda *args, **kwargs: None)
    model = attached(llama(attn_implementation="maskless"))
    assert torch.equal(model.generate(PROMPT, **VERIFIED), model.generate(PROMPT, **GREEDY))
    with pytest.raises(ValueError, match="cannot decode rows of different lengths together"):
        model.generate(PROMPT.expand(2, -1), **VERIFIED)


def test_a_model_in_training_mode_decodes_after_a_hint():
    model = attached(llama(attention_dropout=0.1)).train()
    with pytest.raises(ValueError, match=r"call `model.eval\(\)`"):
        model.generate(PROMPT, **VERIFIED)
    assert torch.equal(model.eval().generate(PROMPT, **VERIFIED), llama().generate(PROMPT, **GREEDY))


def test_the_decoder_of_a_model_with_images_is_found_beside_a_tower_of_as_many_layers():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "qwen2", "vocab_size": 100, "num_key_value_heads": 2, **sizes}
    images = {**sizes, "image_size": [28, 28], "patch_size": [14, 14]}
    config = transformers.InternVLConfig(vision_config=images, text_config=text, image_token_id=99)
    model = attached(transformers.InternVLForConditionalGeneration(config).eval())
    assert list(decoder_layers(model)) == list(model.get_decoder().layers)


def test_an_unverified_call_needs_no_mask_token_either(caplog):
    out = attached(llama()).generate(PROMPT, strategy="wedlm", **GREEDY, return_dict_in_generate=True, window_size=4)
    assert out.sequences.shape == (1, 17) and "Pass `verification='exact'`" in caplog.text


def test_in_sixteen_bits_single_rows_may_differ():
    for dtype, rows, wrong, is_same in (
        (torch.bfloat16, 4, 1, True), (torch.bfloat16, 4, 2, False), (torch.bfloat16, 2, 1, False),
        (torch.float32, 4, 1, False),
    ):  # fmt: skip
        model = llama().to(dtype)
        expected = torch.randn(rows, 32, dtype=dtype)
        signs = torch.tensor([-1] * wrong + [1] * (rows - wrong))[:, None]
        assert is_close(expected * signs, expected, model) == is_same
