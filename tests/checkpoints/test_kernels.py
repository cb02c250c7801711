"""The kernels: each against torch, rows with the same bits in any company, and machines that cannot have them."""

import logging
import shutil
import subprocess
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_llama
from torch.nn import functional as F
from transformers import MistralConfig, MistralForCausalLM

from wedlm_hf import add_mask_adapter, pack
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.checkpoints import kernels
from wedlm_hf.checkpoints.kernels import (
    GROUP,
    attend_rows,
    from_blocks,
    from_tiles,
    gate_rows,
    has_kernels,
    multiply_groups,
    norm_rows,
    takes,
    to_blocks,
    to_tiles,
    turn_heads,
)

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="no C compiler, or no AVX2")
pytestmark = needs_kernels if shutil.which("cc") is None or torch.backends.cpu.get_cpu_capability() != "AVX2" else []

LIBRARY, HAS_KERNELS = kernels._library.__wrapped__, kernels._has_kernels.__wrapped__
FLAGS = kernels._FLAGS[1:]
sizes = {"seed": st.integers(0, 2**31), "count": st.integers(1, 11)}


def rounded(rows):
    """Rows as the kernels read them: each group of 32 numbers in 15 bits."""
    groups = rows.unflatten(-1, (-1, GROUP)).double()
    step = groups.abs().amax(-1, keepdim=True).float().div(127 * 128).double()
    return (groups / step.where(step > 0, 1.0)).round().mul(step).flatten(-2)


def blocks_of(bits, out, width, generator):
    least, beyond, dtype = (-127, 128, torch.int8) if bits == 8 else (0, 16, torch.uint8)
    levels = torch.randint(least, beyond, (out, width), generator=generator).to(dtype)
    scales = torch.randn(1 if bits == 8 else 2, out, width // GROUP, generator=generator)
    return levels, scales, to_blocks(levels, *scales)


@settings(max_examples=40, deadline=None)
@given(**sizes, bits=st.sampled_from([8, 4]), out=st.integers(1, 40), groups=st.integers(1, 6))
def test_a_product_is_that_of_the_weights_with_rounded_rows_alone_and_beside_others(seed, count, bits, out, groups):
    generator = torch.Generator().manual_seed(seed)
    levels, scales, blocks = blocks_of(bits, out, GROUP * groups, generator)
    step, *low = (scale.half().float()[..., None] for scale in scales)
    weight = levels.float().unflatten(1, (-1, GROUP)) * step
    weight = (weight + low[0] if low else weight).flatten(1)
    torch.testing.assert_close(from_blocks(blocks, out, bits), weight, rtol=1e-6, atol=1e-6)
    rows = torch.randn(count, GROUP * groups, generator=generator) * 10 ** float(torch.randn((), generator=generator))
    found = multiply_groups(rows, blocks, out, bits)
    expected = rounded(rows) @ weight.double().T
    # A level may be the other one of two that are as near.
    slack = 2e-4 * rows.abs().max() * weight.abs().max()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=float(slack))
    assert torch.cat([multiply_groups(row[None], blocks, out, bits) for row in rows]).equal(found)


def test_threads_and_large_products_change_no_bit():
    generator = torch.Generator().manual_seed(0)
    _, _, blocks = blocks_of(4, 800, 640, generator)
    rows, threads = torch.randn(130, 640, generator=generator), torch.get_num_threads()
    found = multiply_groups(rows, blocks, 800, 4), norm_rows(rows, rows[0], 1e-5), gate_rows(rows)
    try:
        torch.set_num_threads(1)
        alone = multiply_groups(rows, blocks, 800, 4), norm_rows(rows, rows[0], 1e-5), gate_rows(rows)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, found, alone))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_with_what_is_no_number_gives_none_and_leaves_other_rows_alone(bits):
    _, _, blocks = blocks_of(bits, 11, 64, torch.Generator().manual_seed(0))
    rows = torch.randn(5, 64)
    rows[1, 3], rows[2, 40], rows[3, 0], rows[4] = torch.nan, torch.inf, -torch.inf, 0.0
    found = multiply_groups(rows, blocks, 11, bits)
    assert found[1:4].isnan().all() and found[0].isfinite().all() and found[4].eq(0).all()


@settings(max_examples=40, deadline=None)
@given(**sizes, out=st.integers(1, 70), width=st.integers(1, 70))
def test_a_product_in_sixteen_bits_is_that_of_the_weights_alone_and_beside_others(seed, count, out, width):
    generator = torch.Generator().manual_seed(seed)
    weight, rows = torch.randn(out, width, generator=generator).half(), torch.randn(count, width, generator=generator)
    tiles = to_tiles(weight)
    found = multiply_groups(rows, tiles, out, 16)
    expected = torch.zeros(count, out)
    for place in range(width):  # in this order, with one rounding for each: that of float64 is far below
        expected = (expected.double() + rows[:, place, None].double() * weight[:, place].double()).float()
    assert found.equal(expected) and from_tiles(tiles, out).equal(weight)
    assert torch.cat([multiply_groups(row[None], tiles, out, 16) for row in rows]).equal(found)


@settings(max_examples=20, deadline=None)
@given(**sizes, width=st.sampled_from([8, 40, 576]), size=st.floats(1e-3, 1e3))
def test_norms_and_gates_are_torchs(seed, count, width, size):
    rows = torch.randn(count, 2 * width, generator=torch.Generator().manual_seed(seed)) * size
    gate, up = rows.chunk(2, -1)
    torch.testing.assert_close(gate_rows(rows), F.silu(gate) * up, rtol=1e-5, atol=1e-30)
    x = gate.double()  # GELU by its tanh, of which 1 + tanh would leave nothing far below 0
    expected = (x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))).float() * up
    torch.testing.assert_close(gate_rows(rows, True), expected, rtol=1e-4, atol=1e-30)
    factor = up[0].contiguous()
    torch.testing.assert_close(norm_rows(gate, factor, 1e-5), F.rms_norm(gate, (width,), factor, 1e-5))
    assert torch.cat([norm_rows(row[None], factor, 1e-5) for row in gate]).equal(norm_rows(gate, factor, 1e-5))


def test_gates_far_from_zero_are_open_or_shut():
    gate = torch.tensor([[-torch.inf, -1e30, -100.0, -0.0, 0.0, 100.0, 1e30, torch.nan]])
    found = gate_rows(torch.cat([gate, torch.ones(1, 8)], 1))[0]
    expected = F.silu(gate)[0]
    torch.testing.assert_close(found[2:], expected[2:], rtol=1e-6, atol=1e-30, equal_nan=True)


@settings(max_examples=20, deadline=None)
@given(**sizes, width=st.sampled_from([16, 48, 64]), heads=st.integers(1, 5), others=st.integers(0, 3))
def test_heads_are_turned_to_the_bit_and_normed_before(seed, count, width, heads, others):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, count, (heads + others) * width, generator=generator)
    cos, sin = torch.randn(2, 2, count, width, generator=generator)
    for factors in (None, torch.randn(heads, width, generator=generator)):
        found = rows.clone()
        turn_heads(found, (cos, sin), heads, factors, 1e-6)
        own = rows.unflatten(-1, (-1, width))[:, :, :heads]
        if factors is not None:
            flat = own.flatten(0, 1)
            normed = [norm_rows(flat[:, head].contiguous(), factors[head], 1e-6) for head in range(heads)]
            own = torch.stack(normed, 1).view(own.shape)
        first, second = own.chunk(2, -1)
        expected = own * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]
        assert found[..., : heads * width].equal(expected.flatten(2))
        assert found[..., heads * width :].equal(rows[..., heads * width :])


@settings(max_examples=40, deadline=None)
@given(**sizes, width=st.sampled_from([8, 24, 64, 80, 256]), groups=st.integers(1, 3), keys=st.integers(1, 40))
def test_each_row_attends_to_its_own_keys_as_it_does_alone(seed, count, width, groups, keys):
    generator = torch.Generator().manual_seed(seed)
    # Parts of larger tensors, as heads in a product and keys in a cache are.
    query = torch.randn(2, count, 2 * groups + 1, width, generator=generator).transpose(1, 2)[:, : 2 * groups]
    key, value = torch.randn(2, 2, 2, keys + 3, width, generator=generator)[:, :, :, :keys]
    visible = torch.rand(2, 1, count, keys, generator=generator) < 0.6
    visible[..., 0] = True
    rows = visible.flatten(0, 2)
    found = attend_rows(
        query, key, value, 0.3, (rows.nonzero()[:, 1].int(), F.pad(rows.sum(1).cumsum(0), (1, 0)).int())
    )
    how = {"scale": 0.3, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, **how).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for sequence in range(2):
        parts = [each[sequence : sequence + 1] for each in (query, key, value)]
        for row in range(count):
            keys_seen = visible[sequence, 0, row]
            own = parts[0][:, :, row : row + 1], *(each[:, :, keys_seen] for each in parts[1:])
            assert attend_rows(*own, 0.3).equal(found[sequence : sequence + 1, row : row + 1])


def test_what_has_gradients_or_other_dtypes_is_left_to_torch():
    rows = torch.ones(2, 8)
    assert takes(rows) and not takes(rows.bfloat16()) and not takes(rows.double())
    assert not takes(rows.requires_grad_())
    with torch.no_grad():
        assert takes(rows)


def test_rows_of_another_width_or_dtype_are_refused():
    _, _, blocks = blocks_of(8, 11, 64, torch.Generator().manual_seed(0))
    for rows in (torch.ones(2, 60), torch.ones(2, 96), torch.ones(2, 64).bfloat16()):
        with pytest.raises(ValueError, match=r"multiplies rows of 64 float32 numbers on a CPU, got \d+ of torch\."):
            multiply_groups(rows, blocks, 11, 8)


def test_an_activation_that_is_exchanged_or_watched_counts():
    model, seen = pack(tiny_llama(hidden_size=64, intermediate_size=96, pad_token_id=0), 8), []
    mlp, rows = model.model.layers[0].mlp, torch.randn(1, 3, 64)
    assert mlp.has_kernels
    with torch.no_grad():
        expected = mlp(rows)
        handle = mlp.act_fn.register_forward_hook(lambda *args: seen.append(1))
        torch.testing.assert_close(mlp(rows), expected, rtol=1e-3, atol=1e-4)
        handle.remove()
        assert seen and mlp(rows).equal(expected)
        mlp.act_fn = torch.nn.ReLU()
        gate, up = mlp.gate_proj(rows), mlp.up_proj(rows)
        assert mlp(rows).equal(mlp.down_proj(gate.relu() * up))


def test_text_is_ars_in_sliding_windows_and_beside_padding():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=97, num_key_value_heads=2, sliding_window=8, **sizes)
    for bits in (16, 8, 4):
        model = pack(MistralForCausalLM(config).eval(), bits)
        add_mask_adapter(model, MaskAdapterSettings(num_masks=3, rank=32))
        for up in model.mask_adapter.up.values():
            torch.nn.init.normal_(up, std=0.1)
        ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8, 9, 10, 11]])
        how = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        for mask in (torch.ones_like(ids), (ids > 0).long()):
            expected = model.generate(ids, attention_mask=mask, **how)
            found = model.generate(ids, attention_mask=mask, strategy="wedlm", verification="exact", **how)
            assert found.equal(expected)


def compiled_anew(monkeypatch, folder):
    """Whether a process that begins now would have kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(kernels, "_library", cache(LIBRARY))
    monkeypatch.setattr(kernels, "_FLAGS", ["-O1", *FLAGS])  # which takes half the time
    monkeypatch.setattr(kernels.torch.library, "define", lambda *args: None)
    monkeypatch.setattr(kernels.torch.library, "impl", lambda *args: lambda function: None)
    monkeypatch.setattr(kernels.torch.library, "register_fake", lambda *args: lambda function: None)
    return HAS_KERNELS()


def test_they_are_compiled_once_for_a_machine_and_anew_where_the_file_is_damaged(tmp_path, monkeypatch):
    assert compiled_anew(monkeypatch, tmp_path / "whole")
    (file,) = (tmp_path / "whole" / "wedlm-hf").iterdir()
    assert file.name.startswith("kernels-") and file.suffix == ".so"
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", None)
        assert compiled_anew(patch, tmp_path / "whole")
    damaged = tmp_path / "damaged" / "wedlm-hf" / file.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(file.read_bytes()[:9000])  # as a machine that lost power may leave it
    assert compiled_anew(monkeypatch, tmp_path / "damaged") and damaged.read_bytes() == file.read_bytes()


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "wedlm-hf").touch()
    assert compiled_anew(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("/no/such/cc", "/no/such/cc"), ("false", "returned non-zero"), ("cc -include no_such.h", "no_such.h")],
)
def test_without_a_compiler_products_are_torchs_and_the_log_says_why(compiler, why, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.INFO):
        assert not compiled_anew(monkeypatch, tmp_path)
    assert "Products of packed layers are torch's own" in caplog.text and why in caplog.text


@pytest.mark.parametrize(("name", "value"), [("get_cpu_capability", "DEFAULT"), ("get_cpu_capability", "NO AVX")])
def test_other_processors_have_none(name, value, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, name, lambda: value)
    assert not compiled_anew(monkeypatch, tmp_path)


def test_a_compiler_that_is_wrong_is_noticed(tmp_path, monkeypatch, caplog):
    source = kernels._SOURCE.read_text().replace("return is_short;", "if (!is_short) out[0] += 1; return is_short;", 1)
    wrong = tmp_path / "kernels.c"
    wrong.write_text(source)
    monkeypatch.setattr(kernels, "_SOURCE", wrong)
    with caplog.at_level(logging.INFO):
        assert not compiled_anew(monkeypatch, tmp_path)
    assert "computes something else" in caplog.text


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("more", [[], kernels._VNNI])
def test_they_compile_without_a_warning_on_all_processors_that_have_them(more, tmp_path):
    strict = ["-Wall", "-Wextra", "-Werror", "-c", str(kernels._SOURCE), "-o", str(tmp_path / "kernels.o")]
    subprocess.run(["gcc", *kernels._FLAGS, *more, *strict], check=True)


# What the instruction does (Intel's manual, VPDPWSSD), for processors without it.
VNNI = """
#include <immintrin.h>
#define __AVX512VNNI__ 1
#define __AVX512VL__ 1
static __m256i dpwssd(__m256i sums, __m256i words, __m256i others) {
  int own[8]; short first[16], second[16];
  _mm256_storeu_si256((void *)own, sums);
  _mm256_storeu_si256((void *)first, words);
  _mm256_storeu_si256((void *)second, others);
  for (int i = 0; i < 16; i++) own[i / 2] += first[i] * second[i];
  return _mm256_loadu_si256((void *)own);
}
#define _mm256_dpwssd_epi32 dpwssd
"""


def test_products_by_instructions_that_this_processor_may_lack_are_the_same(tmp_path, monkeypatch):
    (tmp_path / "vnni.h").write_text(VNNI)
    monkeypatch.setenv("CC", f"cc -include {tmp_path / 'vnni.h'}")
    assert compiled_anew(monkeypatch, tmp_path)
    (tmp_path / "vnni.h").write_text(VNNI.replace("i / 2", "i / 4"))
    assert not compiled_anew(monkeypatch, tmp_path / "wrong")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_compiled_model_has_the_same_products(bits):
    model = pack(tiny_llama(hidden_size=64, intermediate_size=96, pad_token_id=0), bits)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        found = torch.compile(model, backend="aot_eager")(ids, use_cache=False).logits
    assert float((found - expected).norm() / expected.norm()) < 0.02
