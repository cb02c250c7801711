"""Decoder layers as one kernel: the values of their own class, whatever is added to them, changed or cached."""

import copy
import gc
import pickle
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from test_fused import gemma3, qwen2, unmeasured  # noqa: F401
from tiny import tiny_llama, tiny_model
from transformers import DynamicCache, OlmoConfig, OlmoForCausalLM

from wedlm_hf import add_mask_adapter, pack
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.checkpoints import fused_layer
from wedlm_hf.checkpoints.fused_layer import FusedLayer
from wedlm_hf.checkpoints.kernels import LayerKernels, has_kernels
from wedlm_hf.checkpoints.packed_layers import PackedNorm
from wedlm_hf.generation.attention import StepAttention
from wedlm_hf.generation.cache import WindowCache
from wedlm_hf.generation.forward import forward_as
from wedlm_hf.generation.rows import Row, SequenceState, Tree, lay_out
from wedlm_hf.generation.versions import cache_name

pytestmark = pytest.mark.skipif(not has_kernels(), reason="no C compiler, or no AVX2")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "pad_token_id": 0}
MODELS = {
    "llama": lambda: tiny_llama(**SIZES),
    "biases": qwen2,
    "norms of queries and keys": lambda: tiny_model(head_dim=16, **SIZES),
    "norms that add 1 to their weights": gemma3,
}
IDS = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(0))
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that compute parts of layers, as they are called, and how many whole layers are."""
    found = []
    step = fused_layer.step_layers
    monkeypatch.setattr(
        fused_layer, "step_layers", lambda layers, *args: found.append(len(layers)) or step(layers, *args)
    )
    for name in ("begin", "end"):
        own = getattr(LayerKernels, name)

        def call(self, *args, own=own, name=name):
            found.append(name)
            return own(self, *args)

        monkeypatch.setattr(LayerKernels, name, call)
    return found


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, FusedLayer)]


def module_by_module(model):
    """A copy whose layers compute as their own class does; so do the norms, as torch does."""
    plain = copy.deepcopy(model)
    for layer in layers_of(plain):
        layer.has_kernels = False
    for norm in (each for each in plain.modules() if isinstance(each, PackedNorm)):
        norm.has_kernels = False
    return plain


def is_close(found, expected):
    return bool((found - expected).norm() < 2e-3 * expected.norm())


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_layer_gives_what_its_modules_give(name, bits, calls):
    model = pack(MODELS[name](), bits)
    plain = module_by_module(model)
    assert len(layers_of(model)) == 2
    calls.clear()
    for mask in (None, torch.tensor([[1] * 9, [0] * 4 + [1] * 5])):
        found, expected = (each(IDS, attention_mask=mask) for each in (model, plain))
        assert is_close(found.logits[:, 4:], expected.logits[:, 4:])
    assert calls == ["begin", "end"] * 4
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for part in IDS[:1].split([6, 1, 2], 1):
        found, expected = (
            each(part, use_cache=True, **{cache_name(model): cache}).logits
            for each, cache in zip((model, plain), caches, strict=True)
        )
        assert is_close(found, expected)


def step_of(model, rows, count, prompt, masks):
    """Logits of a step of these rows behind a prompt, in a window cache, and of them one by one."""
    return steps_of(model, [rows], count, prompt, masks)[0][0]


def steps_of(model, steps, count, prompt, masks=None):
    """Logits of steps of these rows, one behind the other, and all keys and values in the end."""
    attention, cache = StepAttention(model), WindowCache()
    sequence = SequenceState(0, list(prompt), len(prompt), 0, 1)
    cache.open([[*prompt, 0]], model.device, model.config)

    def forward(rows, alone, slots=None):
        sequence.rows = Tree(rows)
        step = lay_out([sequence], [0], 0, model.device)
        cache.announce(step)
        mask = attention.masks(step, step.position_ids, alone)
        with forward_as(slots=None if slots is None else model.slots(slots), **attention.record):
            inputs = {"attention_mask": mask, "position_ids": step.position_ids, cache_name(model): cache}
            found = model(step.input_ids, use_cache=True, **inputs).logits[0]
        kept = [row.position for row in rows if row.token is not None] if alone else [*range(len(prompt))]
        if slots is None and (not alone or all(row.parent == place - 1 for place, row in enumerate(rows))):
            cache.commit([[*range(len(kept))]])
            sequence.committed = cache.lengths[0]
        return found

    forward(sequence.pending_rows, 0)
    logits = [forward(rows, count, masks) for rows in steps]
    held = [(layer._keys, layer._values) for layer in cache.layers]
    return logits, [each[:, :, : cache.lengths[0]] for pair in held for each in pair]


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("name", "rank"), zip(MODELS, (32, 5, 64, 16), strict=True))
@torch.no_grad()
def test_rows_of_a_step_have_the_bits_that_they_have_alone_and_masks_are_updated(name, rank, bits, calls):
    model = pack(MODELS[name](), bits)
    add_mask_adapter(model, replace(MaskAdapterSettings(), target_modules=TARGETS, rank=rank, root_width=0))
    for up in model.mask_adapter.up.values():
        torch.nn.init.normal_(up, std=0.1)
    plain, prompt = module_by_module(model), IDS[0].tolist()
    tree = [Row(5, 9, -1), Row(6, 10, 0), Row(7, 11, 1), Row(8, 10, 0)]
    step = [*tree, Row(None, 11, 3), Row(None, 12, 4)]
    calls.clear()
    found = step_of(model, step, 4, prompt, 2)
    assert calls == ["begin", "end"] * 2 + [2]
    assert is_close(found, step_of(plain, step, 4, prompt, 2))
    assert found[:4].equal(step_of(model, tree, 4, prompt, None))
    alone = [[tree[0]], [*tree[:2]], [*tree[:3]]]
    for path in alone:
        assert found[: len(path)].equal(step_of(model, path, len(path), prompt, None))
    without = module_by_module(model)
    for up in without.mask_adapter.up.values():
        torch.nn.init.zeros_(up)
    assert not is_close(found[4:], step_of(without, step, 4, prompt, 2)[4:])


def nothing(layers):
    pass


def replace_output(layers):
    layers[1].register_forward_hook(lambda module, args, output: output * 1.5)


def change_output_in_place(layers):
    layers[1].register_forward_hook(lambda module, args, output: output.mul_(1.5))


def change_output_in_place_unseen(layers):
    def change(module, args, output):
        output.mul_(1.5)

    change.only_reads = True  # which is not so, as where a model changes rows between layers
    layers[1].register_forward_hook(change)


def change_input(layers):
    layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))


def change_argument(layers):
    def forget(module, args, how):
        return args, {**how, "position_embeddings": tuple(each * 0.9 for each in how["position_embeddings"])}

    own = layers[2].forward
    layers[2].forward = lambda rows, **how: own(rows, **forget(None, None, how)[1])


def exchange_layers(layers):
    layers[1], layers[2] = layers[2], layers[1]
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number


def change_another_layer(layers):
    def change(module, args, output):
        layers[3].input_layernorm.weight.fill_(0.3)

    layers[0].register_forward_hook(change)


BETWEEN = [
    nothing, replace_output, change_output_in_place, change_output_in_place_unseen, change_input, change_argument,
    exchange_layers, change_another_layer,
]  # fmt: skip


def steps_from(position):
    """Steps of two rows each."""
    return [[Row(5 + n, position + 2 * n, -1), Row(6 + n, position + 2 * n + 1, 0)] for n in range(4)]


def same(found, expected):
    return all(map(torch.equal, (*found[0], *found[1]), (*expected[0], *expected[1])))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", BETWEEN)
def test_layers_that_follow_are_computed_by_one_call_and_what_happens_between_them_counts(
    change, mode, calls, monkeypatch
):
    model, prompt = pack(tiny_llama(num_hidden_layers=4, **SIZES), 8), IDS[0].tolist()
    with mode():
        before = steps_of(model, steps_from(9), 2, prompt)
        assert [each for each in calls if isinstance(each, int)] == [1] * 4 + [4] * 3
        plain = copy.deepcopy(model)  # a copy has seen no layer run
        for each in (model, plain):
            with torch.no_grad():
                change(each.model.layers)
        found = [steps_of(model, steps_from(9), 2, prompt) for _ in range(3)]
        monkeypatch.setattr(fused_layer, "_MOST_AHEAD", 0)
        calls.clear()
        expected = [steps_of(plain, steps_from(9), 2, prompt) for _ in range(3)]
        assert set(calls) <= {"begin", "end", 1}
    assert all(map(same, found, expected)) and same(expected[0], before) == (change is nothing)


@torch.no_grad()
def test_layers_in_another_order_or_in_two_models_are_learned_anew(calls, monkeypatch):
    model, prompt = pack(tiny_llama(num_hidden_layers=4, **SIZES), 8), IDS[0].tolist()
    other = copy.copy(model)
    other._modules = {**model._modules, "model": copy.copy(model.model)}
    other.model._modules = {**model.model._modules, "layers": torch.nn.ModuleList(reversed(model.model.layers))}
    found = []
    for each in (model, other, model, other):
        calls.clear()
        found.append(steps_of(each, steps_from(9), 2, prompt))
    assert calls[-1] == 4
    monkeypatch.setattr(fused_layer, "_MOST_AHEAD", 0)
    expected = [steps_of(each, steps_from(9), 2, prompt) for each in (model, other)]
    assert all(map(same, found, expected * 2))


@torch.no_grad()
def test_a_record_of_states_does_not_end_a_run_and_a_failed_forward_leaves_nothing(calls):
    model, prompt = pack(tiny_llama(num_hidden_layers=4, **SIZES), 8), IDS[0].tolist()
    expected = steps_of(model, steps_from(9), 2, prompt)
    model(IDS, output_hidden_states=True)
    calls.clear()
    assert same(steps_of(model, steps_from(9), 2, prompt), expected) and calls[-4:] == [4] * 4

    def fail(module, args):
        raise ValueError("no norm")

    handle = model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="no norm"):
        steps_of(model, steps_from(9), 2, prompt)
    handle.remove()
    assert same(steps_of(model, steps_from(9), 2, prompt), expected)
    watched = weakref.ref(model.model.layers[0])
    del model, handle
    gc.collect()
    assert watched() is None


@torch.no_grad()
def test_another_default_dtype_changes_nothing():
    model, prompt = pack(tiny_llama(num_hidden_layers=4, **SIZES), 8), IDS[0].tolist()
    expected = steps_of(model, steps_from(9), 2, prompt)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = steps_of(model, steps_from(9), 2, prompt)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(found, expected)


def hook_projection(model):
    model.model.layers[-1].mlp.up_proj.register_forward_hook(lambda module, args, output: output + 3)


def hook_attention(model):
    model.model.layers[-1].self_attn.register_forward_hook(lambda module, args, output: (output[0] + 3, None))


def hook_gate(model):
    model.model.layers[-1].mlp.act_fn.register_forward_hook(lambda module, args, output: output + 3)


def exchange_gate(model):
    model.model.layers[-1].mlp.act_fn = torch.nn.ReLU()


def wrap_attention(model):
    class Louder(torch.nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, *args, **how):
            output, weights = self.attention(*args, **how)
            return output * 2, weights

    model.model.layers[-1].self_attn = Louder(model.model.layers[-1].self_attn)


def exchange_hooks(model):
    model.model.layers[-1].mlp.up_proj._forward_hooks = OrderedDict()
    hook_projection(model)
    model.model.layers[-1].mlp.up_proj.register_forward_hook(lambda module, args, output: output + 3)


def exchange_norm(model):
    model.model.layers[-1].post_attention_layernorm = torch.nn.Identity()


def exchange_forward(model):
    own = model.model.layers[-1].mlp.forward
    model.model.layers[-1].mlp.forward = lambda rows: own(rows) + torch.arange(rows.shape[-1]) / 10


def load_norms(model):
    state = {name: 3 * value for name, value in model.state_dict().items() if "norm" in name}
    model.load_state_dict(state, strict=False)


def scale_norms_of_heads(model):
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.mul_(3)
        if hasattr(layer.self_attn, "q_norm"):
            layer.self_attn.q_norm.weight.mul_(3)


def exchange_norms_of_heads(model):
    model.model.layers[-1].self_attn.k_norm.weight.data = 3 * model.model.layers[-1].self_attn.k_norm.weight.data


def raise_eps_of_heads(model):
    model.model.layers[-1].self_attn.q_norm.eps = 5.0


def leave_gaps(model):
    norm = model.model.layers[-1].input_layernorm
    norm.weight.data = torch.stack([norm.weight.data, norm.weight.data + 1], 1)[:, 1]


def raise_eps(model):
    model.model.layers[-1].input_layernorm.eps = 5.0


def exchange_class(model):
    mlp = model.model.layers[-1].mlp

    class Other(type(mlp)):
        def forward(self, rows):
            return super().forward(rows) + torch.arange(rows.shape[-1]) / 10

    mlp.__class__ = Other


def exchange_data(model):
    for name, parameter in model.named_parameters():
        if "layernorm" in name or "bias" in name:
            parameter.data = parameter.data * 3


def exchange_product(model):
    first, *_, last = model.model.layers
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(last.self_attn, name).product = getattr(first.self_attn, name).product


def exchange_hooks_of_attention(model):
    model.model.layers[-1].self_attn._forward_hooks = OrderedDict()
    hook_attention(model)


def put_hooks_in_place(model):
    model.model.layers[-1].mlp.up_proj._forward_hooks[10**9] = lambda module, args, output: output + 3
    model.model.layers[-1].mlp._forward_hooks[10**9] = lambda module, args, output: output + 3


CHANGES = [
    hook_projection, hook_attention, hook_gate, exchange_gate, exchange_norm, exchange_forward, load_norms,
    exchange_data, scale_norms_of_heads, leave_gaps, raise_eps, exchange_class,
    wrap_attention, exchange_hooks, exchange_product, exchange_hooks_of_attention, put_hooks_in_place,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["biases", "norms of queries and keys"])
def test_what_is_changed_in_a_layer_later_counts(name, change):
    model = pack(MODELS[name](), 8)
    plain = module_by_module(model)
    with torch.no_grad():
        before = model(IDS).logits
    for each in (model, plain):
        with torch.no_grad():
            change(each)
    with torch.no_grad():
        expected = plain(IDS).logits
        assert not is_close(expected, before)
        for each in (model, model, copy.deepcopy(model)):
            assert is_close(each(IDS).logits, expected)


def train(model):
    model.model.layers[1].train()


def use_eager(model):
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [*CHANGES, train, use_eager, exchange_norms_of_heads, raise_eps_of_heads])
@torch.no_grad()
def test_what_is_changed_counts_in_layers_that_were_computed_by_one_call(change, calls, monkeypatch):
    model, prompt = pack(MODELS["norms of queries and keys"](), 8), IDS[0].tolist()
    before = steps_of(model, steps_from(9), 2, prompt)
    assert calls[-1] == 2
    plain = copy.deepcopy(model)
    for each in (model, plain):
        change(each)
    found = [steps_of(model, steps_from(9), 2, prompt) for _ in range(2)]
    monkeypatch.setattr(fused_layer, "_MOST_AHEAD", 0)
    expected = steps_of(plain, steps_from(9), 2, prompt)
    assert all(same(each, expected) for each in found)
    assert not same(expected, before)


def watch_a_layer(model):
    return model.model.layers[0].register_forward_hook(lambda module, args, output: None).remove


def watch_a_projection(model):
    return model.model.layers[2].mlp.up_proj.register_forward_hook(lambda module, args, output: None).remove


def train_a_layer(model):
    model.model.layers[1].train()
    return model.eval


def leave_early(model):
    layers = model.model.layers
    model.model.layers = layers[:2]
    return lambda: setattr(model.model, "layers", layers)


@pytest.mark.parametrize("change", [watch_a_layer, watch_a_projection, train_a_layer, leave_early])
@torch.no_grad()
def test_what_came_and_went_leaves_one_call_for_all_layers(change, calls):
    model, prompt = pack(tiny_llama(num_hidden_layers=4, **SIZES), 8), IDS[0].tolist()
    expected = steps_of(model, steps_from(9), 2, prompt)
    undo = change(model)
    steps_of(model, steps_from(9), 2, prompt)
    assert calls[-1] != 4
    undo()
    assert same(steps_of(model, steps_from(9), 2, prompt), expected) and calls[-1] == 4


@torch.no_grad()
def test_two_callers_take_turns_step_by_step(calls, monkeypatch):
    model = pack(MODELS["llama"](), 8)
    add_mask_adapter(model, replace(MaskAdapterSettings(), target_modules=TARGETS, rank=5, root_width=0))
    for up in model.mask_adapter.up.values():
        torch.nn.init.normal_(up, std=0.1)
    prompts = [IDS[0].tolist(), IDS[1].tolist()[:5]]
    rows = [[Row(5, len(prompt), -1), Row(None, len(prompt) + 2, 0)] for prompt in prompts]
    expected = [steps_of(model, [own] * 4, 1, prompt, 1) for own, prompt in zip(rows, prompts, strict=True)]
    turns = threading.Barrier(2)

    def in_turn(forward):
        def step(*args, **how):
            turns.wait()
            return forward(*args, **how)

        return step

    monkeypatch.setattr(fused_layer, "step_layers", in_turn(fused_layer.step_layers))
    calls.clear()
    with ThreadPoolExecutor(2) as threads:
        jobs = zip(rows, prompts, strict=True)
        found = [threads.submit(torch.no_grad()(steps_of), model, [own] * 4, 1, prompt, 1) for own, prompt in jobs]
        found = [each.result() for each in found]
    assert calls[-2:] == [2, 2] and all(map(same, found, expected))


def test_what_needs_gradients_a_record_or_another_implementation_is_not_for_kernels(calls):
    model = pack(MODELS["llama"](), 8)
    with torch.no_grad():
        expected = model(IDS).logits
        calls.clear()
        states = model(IDS, output_hidden_states=True).hidden_states
    assert calls == ["begin", "end"] * 2 and len(states) == 3
    calls.clear()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(IDS, output_attentions=True)
    assert is_close(output.logits, expected) and output.attentions[0].shape == (2, 4, 9, 9) and not calls
    model.set_attn_implementation("sdpa")
    model(IDS)
    assert calls == ["begin", "end"] * 2
    model.model.layers[1].input_layernorm.weight.requires_grad_()
    embeds = model.get_input_embeddings()(IDS)
    for how in ({"input_ids": IDS}, {"inputs_embeds": embeds.requires_grad_()}):
        with pytest.raises(RuntimeError, match="no gradients"):
            model(**how)


@pytest.mark.parametrize("name", MODELS)
def test_a_norm_that_trains_is_refused(name):
    model = pack(MODELS[name](), 16)
    layer = model.model.layers[1]
    norms = [layer.input_layernorm, getattr(layer.self_attn, "q_norm", layer.post_attention_layernorm)]
    for norm in norms:
        norm.weight.requires_grad_()
        with pytest.raises(RuntimeError, match="no gradients"):
            model(IDS)
        norm.weight.requires_grad_(False)
    assert not model(IDS).logits.requires_grad


@torch.no_grad()
def test_masks_of_other_widths_are_refused_and_changed_ones_are_read_again():
    model = pack(MODELS["llama"](), 8)
    cache = DynamicCache(config=model.config)
    model(IDS[:1, :6], use_cache=True, **{cache_name(model): cache})
    how = {"position_ids": torch.tensor([[6]]), "use_cache": True}
    wide = torch.ones(1, 1, 1, 4000, dtype=torch.bool)
    with pytest.raises(RuntimeError):
        model(IDS[:1, 6:7], attention_mask=wide, **how, **{cache_name(model): copy.deepcopy(cache)})
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    seen = []
    for first in (0, 3):
        mask[..., :first] = False
        caches = [copy.deepcopy(cache) for _ in range(2)]
        found, expected = (
            model(IDS[:1, 6:7], attention_mask=each, **how, **{cache_name(model): own}).logits
            for each, own in zip((mask, mask.clone()), caches, strict=True)
        )
        assert found.equal(expected)
        seen.append(found)
    assert not seen[0].equal(seen[1])


@torch.no_grad()
def test_copies_and_pickles_are_layers_of_kernels_too(calls):
    model = pack(MODELS["biases"](), 4)
    expected = model(IDS).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        assert other(IDS).logits.equal(expected) and calls == ["begin", "end"] * 2
        other.model.layers[0].self_attn.q_proj.bias.zero_()
        assert not other(IDS).logits.equal(expected)
    assert model(IDS).logits.equal(expected)


def test_layers_of_another_kind_stay_what_they_are():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    olmo = OlmoForCausalLM(OlmoConfig(**sizes, num_attention_heads=4, pad_token_id=0)).eval()  # norms without weights
    assert not layers_of(pack(olmo, 8))
    model = MODELS["llama"]()
    own = type(model.model.layers[0])

    class Scaled(own):
        def forward(self, hidden_states, **kwargs):
            return hidden_states + 0.999 * (super().forward(hidden_states, **kwargs) - hidden_states)

    model.model.layers[0].__class__ = Scaled
    pack(model, 8)
    assert type(model.model.layers[0]) is Scaled and len(layers_of(model)) == 1
