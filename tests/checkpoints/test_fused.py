"""Fused modules: the very same values in fewer operations, and modules of another kind stay what they are."""

import copy
from dataclasses import replace

import pytest
import torch
from peft import LNTuningConfig, LoraConfig, get_peft_model
from test_families import FAMILIES, build
from tiny import tiny_llama, tiny_model
from torch.nn.modules.module import register_module_forward_hook
from torch.profiler import ProfilerActivity, profile
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from wedlm_hf import add_mask_adapter, pack
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.checkpoints import kernels, packed
from wedlm_hf.checkpoints.fused import Fused, FusedAttention, FusedMLP
from wedlm_hf.checkpoints.fused_layer import FusedLayer
from wedlm_hf.checkpoints.kernels import has_kernels
from wedlm_hf.checkpoints.matrices import can_pack
from wedlm_hf.checkpoints.packed_layers import PackedNorm

IDS = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    """How far packing takes a model is measured in `test_distance`."""
    monkeypatch.setattr(packed, "distance_of", lambda model, bits, change: change())


def qwen2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)).eval()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            torch.nn.init.normal_(getattr(layer.self_attn, name).bias)
    return model


def gemma3():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(weight)
    return model


MODELS = {
    "llama": lambda: tiny_llama(hidden_size=64, intermediate_size=96, pad_token_id=0),
    "biases": qwen2,
    "norms of queries and keys": tiny_model,
    "ours with biases": lambda: tiny_model("qwen2.5"),
    "norms that add 1 to their weights": gemma3,
}


def fused_in(model):
    return [type(module).__mro__[1] for module in model.modules() if isinstance(module, Fused)]


def unfused(model, bits, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(packed, "fuse", lambda model: None)
        return pack(model, bits)


def operations(model):
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as found:
        model(IDS[:1, :1])
    return sum(each.count for each in found.key_averages())


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "_has_kernels", lambda: False)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.skipif(not has_kernels(), reason="no kernels")
def test_kernels_give_nearly_the_same_values_in_fewer_operations(name, bits, monkeypatch):
    model = pack(MODELS[name](), bits)
    attentions, mlps = (
        [each for each in model.modules() if isinstance(each, kind)] for kind in (FusedAttention, FusedMLP)
    )
    assert len(attentions) == len(mlps) == 2
    assert all(each.has_kernels == (each.head_dim % 16 == 0) for each in attentions)
    assert all(each.has_kernels for each in mlps)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, (Fused, PackedNorm)):
            module.has_kernels = False
    assert operations(model) < operations(plain)
    with torch.no_grad():
        for mask in (None, torch.tensor([[1] * 9, [0] * 4 + [1] * 5])):
            found, expected = (each(IDS, attention_mask=mask).logits[:, 4:] for each in (model, plain))
            assert (found - expected).norm() < (1e-4 if bits == 16 else 0.05) * expected.norm()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("without_kernels")
def test_fused_modules_give_the_same_bits_in_fewer_operations(name, bits, monkeypatch):
    model, plain = pack(MODELS[name](), bits), unfused(MODELS[name](), bits, monkeypatch)
    assert fused_in(model) == [FusedAttention, FusedMLP] * 2 and not fused_in(plain)
    assert operations(model) < operations(plain)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for mask in (None, torch.tensor([[1] * 9, [0] * 4 + [1] * 5])):
        found, expected = (each.generate(IDS, attention_mask=mask, **options) for each in (model, plain))
        assert torch.stack(found.logits).equal(torch.stack(expected.logits))
    model.set_attn_implementation("eager")
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        assert model(IDS).logits.equal(plain(IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("without_kernels")
def test_what_is_fused_of_a_family_gives_the_same_bits(name, monkeypatch):
    own, _ = FAMILIES[name]
    model, plain = build(name, own), build(name, own)
    try:
        pack(model)
    except ValueError:
        pytest.skip("cannot be packed")
    unfused(plain, 16, monkeypatch)
    ids = torch.randint(6, 97, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert model(ids).logits.equal(plain(ids).logits)
        positions = torch.arange(24)[None] + 400
        assert model(ids, position_ids=positions).logits.equal(plain(ids, position_ids=positions).logits)


class Turning(LlamaAttention):
    """Far from the beginning, it turns otherwise."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        cos, sin = position_embeddings
        scaled = cos * (1 + (kwargs["position_ids"][..., None] > 5000)), sin
        return super().forward(hidden_states, scaled, attention_mask, **kwargs)


class Limited(LlamaMLP):
    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=60))


class Needing(LlamaMLP):
    def forward(self, x, needed=None):
        if needed is None:
            raise ValueError("needed")
        return super().forward(x)


@pytest.mark.parametrize(("place", "kind"), [("self_attn", Turning), ("mlp", Limited), ("mlp", Needing)])
def test_a_module_that_computes_something_else_stays_what_it_is(place, kind):
    model = MODELS["llama"]()
    getattr(model.model.layers[0], place).__class__ = kind
    before = dict(vars(getattr(model.model.layers[0], place)))
    pack(model)
    module = getattr(model.model.layers[0], place)
    assert type(module) is kind and vars(module).keys() == before.keys()
    assert not module.training
    assert len([each for each in fused_in(model) if each is not FusedLayer]) == 3
    assert not isinstance(model.model.layers[0], FusedLayer)


class Limiting(LlamaMLP):
    limit = torch.inf

    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=self.limit))


class Unturned(LlamaAttention):
    turns = True

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        cos, sin = position_embeddings
        turns = position_embeddings if self.turns else (torch.ones_like(cos), torch.zeros_like(sin))
        return super().forward(hidden_states, turns, attention_mask, **kwargs)


@pytest.mark.parametrize(
    ("place", "kind", "change"), [("mlp", Limiting, ("limit", 60)), ("self_attn", Unturned, ("turns", False))]
)
def test_a_layer_unlike_those_of_its_kind_stays_what_it_is(place, kind, change):
    model = MODELS["llama"]()
    modules = [getattr(layer, place) for layer in model.model.layers]
    for module in modules:
        module.__class__ = kind
    setattr(modules[-1], *change)
    pack(model)
    assert [isinstance(module, Fused) for module in modules] == [True] * (len(modules) - 1) + [False]


def retune_norms(model):
    model = get_peft_model(model, LNTuningConfig(target_modules=["q_norm", "k_norm"]))
    for name, parameter in model.named_parameters():
        if "ln_tuning" in name:
            parameter.data.mul_(3)


def load_norms(model):
    norms = {name: value * 3 for name, value in model.state_dict().items() if "q_norm" in name}
    assert norms
    model.load_state_dict(norms, strict=False)


def replace_norms(model):
    for layer in model.model.layers:
        layer.self_attn.q_norm = torch.nn.Identity()


def replace_forwards(model):
    for layer in model.model.layers:
        own = layer.self_attn.q_proj.forward
        layer.self_attn.q_proj.forward = lambda rows, own=own: 3 * own(rows)


@pytest.mark.parametrize("change", [retune_norms, load_norms, replace_norms, replace_forwards])
@pytest.mark.usefixtures("without_kernels")
@torch.no_grad()
def test_parts_of_a_fused_module_that_change_later_count(change, monkeypatch):
    fused = pack(tiny_model())
    monkeypatch.setattr(packed, "fuse", lambda model: None)
    plain = pack(tiny_model())
    before = fused(input_ids=IDS).logits
    for model in (fused, plain):
        change(model)
    assert torch.equal(fused(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert not torch.equal(fused(input_ids=IDS).logits, before)


@torch.no_grad()
def test_hooks_on_all_modules_see_the_layers_of_fused_ones():
    model, seen = pack(tiny_model()), []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    try:
        model(input_ids=IDS)
    finally:
        handle.remove()
    assert seen.count("PackedLinear") == sum(type(each).__name__ == "PackedLinear" for each in model.modules())


def test_hooks_on_the_layers_of_a_fused_module_see_what_they_saw(monkeypatch):
    model, seen = pack(MODELS["llama"]()), []
    with torch.no_grad():
        expected = model(IDS).logits
        layer = model.model.layers[0]
        handles = [
            each.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))
            for each in (layer.self_attn.k_proj, layer.mlp.up_proj, layer.self_attn.o_proj)
        ]
        assert model(IDS).logits.equal(expected) and seen == [32, 64, 96]
        for handle in handles:
            handle.remove()
        assert model(IDS).logits.equal(expected) and len(seen) == 3


UP = ("q_proj", "up_proj")
PAIRS = [  # each of bits and LoRA, of bits and targets, of LoRA and targets
    (16, "none", ()), (16, "below", UP), (16, "of the mlp", ()),
    (8, "none", UP), (8, "below", ()), (8, "of the mlp", ()),
    (4, "none", ()), (4, "below", ()), (4, "of the mlp", UP),
]  # fmt: skip


@pytest.mark.parametrize(("bits", "lora", "targets"), PAIRS)
def test_verified_text_is_ars_with_an_adapter_and_a_lora_on_fused_modules(bits, lora, targets):
    model = MODELS["llama"]()
    if lora != "none":
        targets_of_lora = "all-linear" if lora == "below" else ["gate_proj", "down_proj"]
        config = LoraConfig(target_modules=targets_of_lora, init_lora_weights=False)
        model = get_peft_model(model, config).eval()
    base = pack(model, bits).get_base_model() if lora != "none" else pack(model, bits)
    assert (FusedAttention in fused_in(base)) == (lora != "below")
    add_mask_adapter(base, replace(MaskAdapterSettings(), target_modules=targets, rank=4, num_masks=3))
    torch.manual_seed(0)
    for up in base.mask_adapter.up.values():
        torch.nn.init.normal_(up, std=0.1)
    for rows in (1, 4):
        ids = torch.randint(3, 97, (rows, 7), generator=torch.Generator().manual_seed(rows))
        options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(input_ids=ids, **options)
        for how in ({"window_size": 3}, {"slot_cost": 0.01}):
            verified = model.generate(input_ids=ids, strategy="wedlm", verification="exact", **how, **options)
            assert verified.equal(expected)


def test_a_fused_model_in_training_mode_computes_as_its_own_class_does():
    model = pack(MODELS["llama"]())
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(0)
    with torch.no_grad():
        first, second = (copy.deepcopy(model).train()(IDS).logits for _ in range(2))
        assert not first.equal(second) and model(IDS).logits.equal(model(IDS).logits)
