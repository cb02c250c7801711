"""Packed linear layers: rows with the same bits in any company, weights held once, and clear errors elsewhere."""

import copy
import logging
import pickle
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import tiny_llama, tiny_model, tiny_tokenizer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

import wedlm_hf
from wedlm_hf.checkpoints import matrices, packed
from wedlm_hf.checkpoints.kernels import has_kernels
from wedlm_hf.checkpoints.loading import load_model
from wedlm_hf.checkpoints.matrices import can_pack, in_one_thread
from wedlm_hf.checkpoints.packed import (
    PACKINGS,
    PackedLinear,
    PackedNorm,
    count_weights,
    is_packed,
    pack,
    use_fastest,
)
from wedlm_hf.eval.measure import environment, fingerprint
from wedlm_hf.generation.drafter import head_rows

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")


def stock_model(tied=False, dtype=torch.float32):
    config = tiny_llama(initializer_range=0.02, tie_word_embeddings=tied, pad_token_id=0).config
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(("out", "width"), [(8, 8), (192, 576), (97, 32), (1, 64), (17, 100), (40, 1536), (64, 1200)])
def test_a_row_has_the_same_bits_whatever_stands_beside_it_and_for_any_number_of_threads(out, width):
    layer, rows, threads = PackedLinear(nn.Linear(width, out)), torch.randn(400, width), torch.get_num_threads()
    expected = torch.cat([layer(row[None]) for row in rows])
    torch.testing.assert_close(expected, nn.functional.linear(rows, layer.unpacked().float(), layer.bias))
    for count in [*range(1, 65), 96, 119, 120, 121, 200, 245, 400]:
        assert layer(rows[:count]).equal(expected[:count]), count
    assert layer(rows.view(4, 100, width)).equal(expected.view(4, 100, out))
    assert layer(rows[0]).equal(expected[0]) and layer(rows[:0]).shape == (0, out)
    assert layer(rows.t().contiguous().t()).equal(expected)
    for count in (2, 3):
        torch.set_num_threads(count)
        found = layer(rows[:7])
        torch.set_num_threads(threads)
        assert found.equal(expected[:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_says_what_the_model_said(tmp_path, tied, dtype):
    model = stock_model(tied, dtype)
    plain, size = copy.deepcopy(model).float(), count_weights(model)
    assert pack(model) is model and is_packed(model) and not is_packed(plain)
    torch.testing.assert_close(logits_of(model), logits_of(plain), atol=2e-3, rtol=1e-3)
    assert model.dtype == torch.float32 and count_weights(model) == size
    assert not any(parameter.requires_grad for parameter in model.parameters())
    # A table in 16 bits stays so, and gives a tied head its rows.
    assert model.model.embed_tokens.weight.dtype == dtype and (model.lm_head.rows is not None) == tied
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) != tied and saved["model.layers.0.mlp.up_proj.weight"].dtype == torch.float16
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), atol=2e-3, rtol=1e-3)
    assert logits_of(pack(loaded)).equal(logits_of(model))
    # Nothing is kept of a forward.
    assert all(module.product._left is None for module in model.modules() if isinstance(module, PackedLinear))
    options = {"max_new_tokens": 6, "do_sample": False}
    assert loaded.generate(IDS, **options).equal(model.generate(IDS, **options))


def test_copies_of_a_packed_model_say_the_same_and_it_may_be_packed_again():
    model = pack(stock_model())
    before = [*model.modules()]
    for copied in (copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        assert logits_of(copied(model)).equal(logits_of(model))
    assert pack(model) is model and [*model.modules()] == before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc")
def test_the_memory_of_the_unpacked_weights_is_given_back():
    def held():
        return psutil.Process().memory_info().rss / 2**20

    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(600)))  # 150 MiB, in small pieces
    before = held()
    pack(model, 8)
    assert held() < before - 75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_tied_to_an_embedding_that_scales_its_rows_shares_the_table(dtype):
    config = Gemma3TextConfig(
        vocab_size=80, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = Gemma3ForCausalLM._from_config(config, dtype=dtype).eval()
    weights, expected = count_weights(plain), logits_of(plain).float()
    model = pack(copy.deepcopy(plain))
    table = model.model.embed_tokens.weight
    assert head_rows(model.lm_head).data_ptr() == table.data_ptr() and table.dtype == torch.float32
    assert count_weights(model) == weights
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=0.05 * float(expected.abs().max()))


@pytest.mark.skipif(not has_kernels(), reason="torch's own products hold no groups of 8 bits")
@pytest.mark.parametrize("moved", [0.0, 0.01])
def test_a_table_in_eight_bits_is_held_once_by_the_tied_head(tmp_path, moved, monkeypatch):
    plain = stock_model(tied=True)
    table = plain.model.embed_tokens.weight
    levels = torch.randint(-127, 128, table.shape).float()
    levels[:, 5] = 127  # as a file of 8 bits has it: the largest level, and steps in float16
    with torch.no_grad():
        table.copy_(levels * torch.rand(len(table), 1).add_(0.1).div_(100).half().float())
        table[3, 4] += moved * table[3, 5]
    model = pack(copy.deepcopy(plain), 8)
    embeddings, head = model.model.embed_tokens, model.lm_head
    assert (embeddings.table is head.rows) == (moved == 0) and embeddings.weight.equal(table)
    assert embeddings(IDS).equal(plain.model.embed_tokens(IDS)) and head_rows(head)[IDS].equal(table[IDS])
    assert count_weights(model) == count_weights(plain) and model.dtype == torch.float32
    expected = logits_of(model)
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        assert logits_of(copied(model)).equal(expected)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in saved and saved["model.embed_tokens.weight"].equal(table)
    for beyond in (-1, len(table)):
        with pytest.raises(IndexError):
            embeddings(torch.tensor([[1, beyond]]))
    assert embeddings(IDS[:0]).shape == (0, 5, 32) and embeddings(IDS.int()).equal(embeddings(IDS))
    assert torch.jit.trace(embeddings, IDS)(IDS.flip(1)).equal(embeddings(IDS.flip(1)))
    with pytest.raises((TypeError, RuntimeError), match=r"integers|Long"):
        embeddings(IDS.float())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert embeddings(IDS).equal(table[IDS])
    monkeypatch.undo()
    monkeypatch.setattr(packed, "_share_tables", lambda model: None)
    assert logits_of(pack(copy.deepcopy(plain), 8)).equal(expected)


def test_layers_that_read_the_same_rows_are_multiplied_together_and_give_what_each_gives_alone():
    plain = stock_model().model.layers[0].self_attn
    alone = [PackedLinear(layer) for layer in (plain.q_proj, plain.k_proj, plain.v_proj)]
    attention = pack(stock_model()).model.layers[0].self_attn
    together = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert len({id(layer.product) for layer in together}) == 1 != len({id(layer.product) for layer in alone})
    for layer, other in zip(together, alone, strict=True):
        assert layer.unpacked().equal(other.unpacked())
    rows, others = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    for place in (0, 1, 2, 2, 0, 1, 1, 1, 0, 0, 2, 1):
        assert together[place](rows).equal(alone[place](rows))
    together[0](rows).add_(1)  # as a hook does: nobody else sees it
    for change in (lambda: others, lambda: rows.mul_(2), rows.clone, lambda: others):
        together[0](rows)
        read = change()
        assert together[1](read).equal(alone[1](read)) and together[2](read).equal(alone[2](read))


def test_norms_take_fewer_operations_and_layers_of_another_kind_stay():
    class ScaledRMSNorm(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x) * 1.5

    class ScaledEmbedding(nn.Embedding):
        def forward(self, ids):
            return 2 * super().forward(ids)

    model = stock_model()
    model.model.layers[1].input_layernorm = other = ScaledRMSNorm(32, eps=1e-6)
    model.model.embed_tokens = table = ScaledEmbedding(97, 32).bfloat16()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2)
    plain = copy.deepcopy(model.model.norm)
    pack(model)
    assert model.model.layers[1].input_layernorm is other
    assert model.model.embed_tokens is table and table.weight.dtype == torch.float32
    assert type(model.model.norm) is PackedNorm is type(model.model.layers[0].input_layernorm)
    norm = model.model.norm
    for count in (1, 2, 7, 300):
        rows = torch.randn(1, count, 32) * 10
        torch.testing.assert_close(norm(rows), plain(rows).detach())
        assert norm.normed(rows, norm.factor, norm.eps).equal(plain(rows))  # by torch, to the bit


def test_what_cannot_be_packed_is_refused_and_stays_as_it_is():
    quantized, plain = stock_model(), pack(stock_model())
    quantized.is_quantized, quantized.quantization_method, quantized.hf_quantizer = True, "gguf", object()
    # The weights of a GGUF file have been read.
    assert logits_of(wedlm_hf.pack(quantized)).equal(logits_of(plain))
    with pytest.raises(ValueError, match=r"nn\.Linear layers hold 0% of the weights of this GPT2LMHeadModel"):
        pack(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)))


class Other(torch.Tensor):
    """As torchao has weights."""


class Linear4bit(nn.Linear):
    """As bitsandbytes has it."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        packed = torch.zeros(self.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)


class QuantLinear(nn.Module):
    """As GPTQ has it: integers in a buffer."""

    def __init__(self, layer):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(layer.in_features // 8, layer.out_features, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["bitsandbytes", "gptq", "torchao"])
def test_weights_that_another_library_has_quantized_are_refused_and_keep_their_format(kind):
    model = stock_model()
    for layer in model.model.layers:
        if kind == "torchao":  # which changes the weight of a plain layer
            up = layer.mlp.up_proj
            up.weight = nn.Parameter(up.weight.detach().as_subclass(Other), requires_grad=False)
        else:
            layer.mlp.up_proj = {"bitsandbytes": Linear4bit, "gptq": QuantLinear}[kind](layer.mlp.up_proj)
    if kind == "gptq":
        model.is_quantized, model.quantization_method = True, kind
    before = list(model.modules())
    for bits in PACKINGS.values():
        with pytest.raises(ValueError, match="weights of this LlamaForCausalLM are quantized: load the model with"):
            pack(model, bits)
    packed_before, packed._LEAST_WEIGHTS = packed._LEAST_WEIGHTS, 1
    try:
        assert use_fastest(model) == torch.float32
    finally:
        packed._LEAST_WEIGHTS = packed_before
    assert list(model.modules()) == before


def test_a_model_of_which_a_part_is_elsewhere_is_refused_and_stays_as_it_is():
    model = stock_model()
    model.model.layers[1].mlp.to("meta")
    before = list(model.modules())
    with pytest.raises(ValueError, match="the model is on 'cpu, meta'"):
        pack(model)
    assert list(model.modules()) == before


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["_packed", "fuse"])
def test_a_model_whose_packing_ends_in_the_middle_computes_no_more(monkeypatch, error, at):
    model, left = stock_model(), [3 if at == "_packed" else 0]
    own = getattr(packed, at)

    def fail(*args):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return own(*args)

    monkeypatch.setattr(packed, at, fail)
    with pytest.raises(error):
        pack(model)
    monkeypatch.undo()
    for call in (logits_of, pack, logits_of):
        with pytest.raises(ValueError, match=r"LlamaForCausalLM is packed by halves.*Load it again"):
            call(model)


def test_what_needs_the_weights_of_a_packed_model_or_moves_it_by_halves_is_told_so():
    model = pack(stock_model())
    expected = logits_of(model)
    for change in ("meta", torch.bfloat16, torch.float64):
        with pytest.raises(ValueError, match="computes in float32 on a CPU"):
            model.to(change)
        assert logits_of(model.to("cpu", torch.float32)).equal(expected)
    with pytest.raises(RuntimeError, match="no gradients"):
        model(inputs_embeds=torch.randn(1, 3, 32).requires_grad_())
    with pytest.raises(TypeError, match=r"float32 rows, got torch\.bfloat16"):
        model.lm_head(torch.randn(1, 3, 32).bfloat16())
    with pytest.raises(AttributeError, match="has no `weight`"):
        model.resize_token_embeddings(120)
    with pytest.raises(ValueError, match=r"PackedLinear.*is not supported"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def test_each_row_of_a_lora_beside_packed_layers_has_the_bits_that_it_has_alone():
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_bias=True)
    layer = pack(get_peft_model(stock_model(), config).eval()).base_model.model.model.layers[0].mlp.down_proj
    rows = torch.randn(40, layer.in_features)
    alone = torch.cat([layer(row) for row in rows[:, None]])
    assert all(layer(rows[:count]).equal(alone[:count]) for count in range(1, 41))
    down, up = layer.lora_A["default"], layer.lora_B["default"]
    expected = (rows[None] @ down.weight.T) @ up.weight.T + up.bias
    torch.testing.assert_close(up(down(rows[None])), expected)


def test_of_layers_with_a_lora_the_base_is_packed():
    model = get_peft_model(stock_model(), LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()
    expected = logits_of(model)
    pack(model)
    torch.testing.assert_close(logits_of(model), expected, atol=2e-3, rtol=1e-3)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    assert isinstance(layer.base_layer, PackedLinear) and isinstance(layer.lora_A["default"], nn.Linear)
    with pytest.raises(AttributeError, match="has no `weight`"):
        model.merge_and_unload()


@pytest.mark.parametrize("bits", PACKINGS.values())
def test_weights_that_no_format_holds_hooks_and_shared_layers_are_kept(caplog, bits):
    model, seen = stock_model(), []
    first, second = (layer.mlp for layer in model.model.layers)
    large = first.gate_proj, second.gate_proj, second.down_proj
    with torch.no_grad():
        for layer, value in zip(
            large, (70_000.0 if bits == 16 else -float("inf"), float("inf"), float("nan")), strict=True
        ):
            layer.weight[3, 4] = value
    second.up_proj = first.up_proj
    handle = first.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    pack(model, bits)
    seen.clear()  # of the forwards that tell how far it is from what it was
    assert (first.gate_proj, second.gate_proj, second.down_proj) == large and large[0].weight.dtype == torch.float32
    assert isinstance(first.down_proj, PackedLinear)
    assert "3 linear layers have weights that no number of bits holds and stay in float32: " in caplog.text
    assert first.up_proj is second.up_proj
    logits_of(model)
    assert seen == [(2, 5, 48)] * 2
    handle.remove()
    logits_of(model)
    assert len(seen) == 2


def test_without_the_kernels_a_model_stays_as_it_is(monkeypatch, caplog):
    def pack_weight(weight):
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack_fp16")

    monkeypatch.setattr(matrices, "pack_matrix", pack_weight)
    monkeypatch.setattr(packed, "can_pack", cache(can_pack.__wrapped__))  # asked anew
    model = stock_model()
    expected = logits_of(model)
    assert not is_packed(pack(model)) and not is_packed(pack(model))
    assert logits_of(model).equal(expected) and caplog.text.count("this torch has no FBGEMM kernels") == 1


def test_threads_that_start_while_kernels_are_timed_keep_their_number_of_torch_threads():
    def look():
        with ThreadPoolExecutor() as others:
            return others.submit(torch.get_num_threads).result(), torch.get_num_threads()

    threads = torch.get_num_threads()
    other, own = in_one_thread(look)
    assert other == threads == torch.get_num_threads()
    assert own in (1, threads)  # 1 where torch's threads are OpenMP's


def test_the_fastest_dtype_is_measured_once_on_a_machine(monkeypatch, caplog, tmp_path):
    asked = []
    monkeypatch.setattr(packed, "_seconds", lambda formats: asked.append(list(formats)) or times)
    small = stock_model(dtype=torch.bfloat16)  # it fits in a cache, and keeps its own dtype
    assert use_fastest(small) == torch.bfloat16 == small.dtype and not asked
    monkeypatch.setattr(packed, "_LEAST_WEIGHTS", 1000)
    for plain, fast, half, chosen in (
        (2.0, 1.0, 0.9, "packed"), (2.0, 1.0, 0.7, torch.bfloat16), (1.0, 1.1, 0.9, torch.float32),
    ):  # fmt: skip
        times, model = {torch.float32: plain, "packed": fast, torch.bfloat16: half}, stock_model()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(chosen)))
        with caplog.at_level(logging.INFO):
            assert use_fastest(model) == chosen
        assert use_fastest(stock_model()) == chosen and len(asked) == 1  # the next process does as this one
        assert set(asked.pop()) == set(times) and f"Linear layers are {chosen}" in caplog.text
        assert is_packed(model) == (chosen == "packed")
        assert model.dtype == (torch.bfloat16 if chosen == torch.bfloat16 else torch.float32)


def test_formats_are_timed_for_the_rows_of_a_step_with_one_draft():
    plain, seen = nn.Linear(64, 32, bias=False), []
    formats = {
        torch.float32: [plain],
        torch.bfloat16: [copy.deepcopy(plain).bfloat16()],
        "packed": [PackedLinear(plain)],
    }
    for (layer,) in formats.values():
        layer.register_forward_pre_hook(lambda module, args: seen.append((args[0].shape, args[0].dtype)))
    taken = packed._seconds(formats)
    assert taken.keys() == formats.keys() and all(0 < seconds < 1 for seconds in taken.values())
    assert set(seen) == {((6, 64), torch.float32), ((6, 64), torch.bfloat16)}


def test_a_checkpoint_is_loaded_packed(tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="packed")
    assert is_packed(model) and not is_packed(load_model(tmp_path, dtype="fastest"))
    assert environment(model)["dtype"] == "packed"
    with pytest.raises(ValueError, match="`dtype='packed'` is for CPUs"):
        load_model(tmp_path, dtype="packed", device="cuda")
    plain = load_model(tmp_path)
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    models = model, pack(plain), pack(load_model(tmp_path))
    digests = [fingerprint(model, tiny_tokenizer())["weights"] for model in models]
    assert digests[0] == digests[2] != digests[1]
