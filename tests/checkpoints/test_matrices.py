"""Matrices in 16, 8 and 4 bits: rows with the same bits in any company, a file's levels, and what cannot be held."""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import tiny_llama, write_checkpoint
from transformers import AutoModelForCausalLM

from wedlm_hf import pack
from wedlm_hf.checkpoints import kernels
from wedlm_hf.checkpoints.kernels import has_kernels
from wedlm_hf.checkpoints.matrices import FORMATS, GROUP, Grouped, can_pack, has_levels, nearest_levels, own_levels
from wedlm_hf.checkpoints.packed import FOUR_BITS, PACKINGS, PackedLinear, format_of, use_fastest
from wedlm_hf.cli.options import LoadingOptions
from wedlm_hf.eval.measure import environment

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def products(request, monkeypatch):
    """What multiplies in few bits."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_has_kernels", lambda: False)
    elif not has_kernels():
        pytest.skip("no kernels")
    return request.param


def of_four_bits(out, width, kind="q4_1", seed=0):
    """A matrix as GGUF's formats of four bits give it: 32 weights share a step and a least weight, each in float16."""
    generator = torch.Generator().manual_seed(seed)
    level = torch.randint(0, 16, (out, width // GROUP, GROUP), generator=generator)
    step = torch.rand(out, width // GROUP, 1, generator=generator).mul(0.02).add(0.001).half().float()
    low = -8 * step
    if kind != "q4_0":
        low = (low * (0.8 + 0.4 * torch.rand(step.shape, generator=generator))).half().float()
    if kind == "sparse":  # a group need not hold its first and last level
        level = 3 + level % 5
    return (level * step + low).view(out, width)


def tiny(width=64, dtype=torch.float32):
    config = tiny_llama(hidden_size=width, intermediate_size=96, initializer_range=0.05, pad_token_id=0).config
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize(("out", "width"), [(8, 32), (192, 576), (97, 64), (1, 64), (17, 96), (40, 1536)])
def test_a_product_is_that_of_the_unpacked_weights_and_each_row_has_its_own_bits(bits, out, width):
    torch.manual_seed(0)
    weight, rows = torch.randn(out, width), torch.randn(70, width)
    matrix = FORMATS[bits](weight)
    alone = torch.cat([matrix(row[None]) for row in rows])
    expected = rows @ matrix.unpacked().float().T
    share = 1e-3 if bits == 16 else 1e-4 if isinstance(matrix, Grouped) else 0.01
    assert (alone - expected).norm() < share * expected.norm()
    for count in (0, 1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 64, 70):
        assert matrix(rows[:count]).equal(alone[:count]), count
    assert matrix(rows.view(2, 35, width)).equal(alone.view(2, 35, out)) and matrix(rows[0]).equal(alone[0])
    assert matrix(rows.t().contiguous().t()).equal(alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "sparse"])
def test_weights_from_a_file_of_four_bits_keep_their_values_but_for_the_rounding_of_scales(kind, dtype):
    weight = of_four_bits(48, 128, kind)
    assert has_levels(weight.to(dtype))
    levels = own_levels(weight.to(dtype))
    found = levels.level.unflatten(1, (-1, GROUP)) * levels.step[..., None] + levels.low[..., None]
    torch.testing.assert_close(found.flatten(1), weight, rtol=0, atol=1e-6 if dtype == torch.float32 else 3e-3)
    # A scale and a zero of bfloat16 have 8 bits, those of float16 more.
    error = (FORMATS[4](weight.to(dtype)).unpacked() - weight).abs().max()
    assert error <= weight.abs().max() * (2**-8 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 0.03)])
def test_weights_that_training_moved_have_no_levels_which_would_undo_it(dtype, kept):
    generator = torch.Generator().manual_seed(0)
    weight, moved = of_four_bits(48, 128), torch.randn(48, 128, generator=generator)
    step = own_levels(weight).step.repeat_interleave(GROUP, 1)
    assert own_levels(weight.to(dtype)) and own_levels(weight.to(dtype).float())
    trained = (weight + kept * step * moved).to(dtype)
    assert not has_levels(trained) and own_levels(trained) is None and own_levels(trained.float()) is None


def test_a_matrix_with_what_is_no_number_or_has_more_bits_has_no_levels():
    weight = of_four_bits(16, 64)
    weight[0, 0] = torch.nan
    assert not has_levels(weight) and not has_levels(torch.randn(16, 64, dtype=torch.float64))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 4), st.floats(0.01, 100))
def test_no_weight_is_further_from_its_own_than_half_a_step(seed, out, groups, scale):
    weight = torch.randn(out, groups * GROUP, generator=torch.Generator().manual_seed(seed)) * scale
    assert own_levels(weight) is None and not has_levels(weight)
    step = nearest_levels(weight).step.repeat_interleave(GROUP, 1)
    rounding = 2**-7 * weight.abs().max()
    assert ((FORMATS[4](weight).unpacked() - weight).abs() <= step / 2 + rounding).all()
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((FORMATS[8](weight).unpacked() - weight).abs() <= step * 0.51 + 1e-6).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_scales_that_float16_does_not_hold_and_rows_without_whole_groups_are_torchs(bits, products):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    kinds = [type(FORMATS[bits](each)) is Grouped for each in (weight, weight * 1e-8, weight * 1e7)]
    assert kinds == [products == "kernels", False, False]
    assert type(FORMATS[8](weight[:, :48])) is not Grouped
    for size in (1.0, 1e-8, 1e7):
        matrix = FORMATS[bits](weight * size)
        torch.testing.assert_close(matrix.unpacked() / size, weight, rtol=0, atol=0.25)


def test_constant_groups_and_zeros_are_held():
    weight = torch.zeros(16, 96)
    weight[:, 32:64] = 0.5
    for bits in FORMATS:
        matrix = FORMATS[bits](weight)
        torch.testing.assert_close(matrix.unpacked().float(), weight, rtol=0, atol=2e-3)
        assert matrix(torch.ones(3, 96)).isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_in_few_bits_says_what_its_unpacked_weights_say_and_is_saved_with_them(tmp_path, bits):
    model = pack(tiny(), bits)
    assert format_of(model) == f"{bits}bit" and pack(model, bits) is model
    found = {module.bits for module in model.modules() if isinstance(module, PackedLinear)}
    assert found == ({4, 8} if bits == 4 else {8}) and model.lm_head.bits == 8
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), atol=0.05, rtol=0.05)
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        assert logits_of(copied(model)).equal(logits_of(model)) and format_of(copied(model)) == f"{bits}bit"
    with pytest.raises(ValueError, match=f"packed in {bits} bits already: load it again to have 16"):
        pack(model)
    for wrong in (0, 3, 32, "4"):
        with pytest.raises(ValueError, match="`bits` must be one of 16, 8, 4, got"):
            pack(tiny(), wrong)


def test_what_a_file_holds_in_four_bits_stays_so_and_the_rest_gets_eight():
    model = tiny()
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                weight = getattr(layer.self_attn, name).weight
                weight.copy_(of_four_bits(*weight.shape))
    before = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    pack(model, 4)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert {attention.q_proj.bits, attention.o_proj.bits} == {4} and {mlp.up_proj.bits, mlp.down_proj.bits} == {8}
    assert attention.q_proj.product is attention.v_proj.product
    torch.testing.assert_close(attention.q_proj.unpacked(), before, rtol=0, atol=float(before.abs().max()) * 2**-8)


def test_a_matrix_without_whole_groups_gets_more_bits():
    model = pack(tiny(width=48), 4)
    assert model.model.layers[0].self_attn.q_proj.bits == 8 and model.model.layers[0].mlp.down_proj.bits == 4


@pytest.mark.parametrize("name", PACKINGS)
def test_each_format_reaches_the_models_of_commands(tmp_path, name):
    model, _ = LoadingOptions(dtype=name, device="cpu").load(str(write_checkpoint(tmp_path)))
    assert format_of(model) == environment(model)["dtype"] == name
    output = model.generate(IDS[:1], strategy="wedlm", verification="exact", max_new_tokens=8, do_sample=False)
    assert output.equal(model.generate(IDS[:1], strategy="ar", max_new_tokens=8, do_sample=False))


def test_four_bits_are_tried_only_for_weights_that_a_file_held_so(monkeypatch, tmp_path):
    from wedlm_hf.checkpoints import packed

    offered = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is remembered
    monkeypatch.setattr(packed, "_LEAST_WEIGHTS", 1)
    monkeypatch.setattr(packed, "_seconds", lambda formats: offered.append([*formats]) or dict.fromkeys(formats, 1.0))
    model = tiny()
    use_fastest(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(of_four_bits(*module.weight.shape))
    use_fastest(model)
    assert FOUR_BITS not in offered[0] and FOUR_BITS in offered[1]
