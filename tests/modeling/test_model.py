"""The network: Qwen's logits, causal attention in physical order whatever the positions, loading, plain generation."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import causal_forward
from safetensors.torch import save_file
from tiny import MASK, PUBLISHED, VOCAB_SIZE, assert_equal_but_rounding, stock_twin, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from wedlm_hf import WeDLMForCausalLM, WeDLMModel
from wedlm_hf.generation.versions import CACHE

STYLES = ["qwen3", "qwen2.5"]
IMPLEMENTATIONS = ["eager", "sdpa", "flex_attention"]
CALM = {"initializer_range": 0.1}  # less sharp attention, which leaves the order of float32 sums less to amplify
LENGTH, PADDING, PREFIX = 14, 4, 9  # slots of a row, of them padding in the first row, slots that a cache holds


@pytest.fixture(autouse=True)
def flex_attention_without_a_compiler():
    """Runs flex attention as plain Python: the same result, no minutes of compiling."""
    with torch.compiler.set_stance("force_eager"):
        yield


def tokens(rows: int = 2, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


def reordered_positions(rows: int = 2, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """Logical positions of a decoder's input: a prefix in order, then what is observed, then masks, both with gaps."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(length).repeat(rows, 1)
    for row in positions:
        observed = torch.rand(length - PREFIX + 2, generator=generator) < 0.5
        window = row[PREFIX - 2 :]
        row[PREFIX - 2 :] = torch.cat([window[observed], window[~observed]])
    return positions


def oracle(model: WeDLMForCausalLM, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits `(T, V)` of one row without padding: stock Qwen, told outright that slot i sees the slots j ≤ i."""
    return causal_forward(stock_twin(model), ids.tolist(), positions.tolist())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_logits_are_those_of_stock_qwen(style, implementation, tied):
    model = tiny_model(style, tie_word_embeddings=tied, attn_implementation=implementation)
    twin = stock_twin(model, implementation)
    assert_equal_but_rounding(model(tokens()).logits, twin(tokens()).logits)
    embeds = model.get_input_embeddings()(tokens())
    kept = model(inputs_embeds=embeds, logits_to_keep=3).logits
    assert_equal_but_rounding(kept, twin(tokens()).logits[:, -3:])


# How a caller may state the padding of row 0; `none` goes with unpadded rows alone.
MASKS = ["none", "2d", "4d bool", "4d additive"]


def stated_mask(kind: str, padding: int, first_query: int, length: int = LENGTH) -> torch.Tensor | None:
    real = torch.ones(2, length, dtype=torch.long)
    real[0, :padding] = 0
    if kind in ("none", "2d"):
        return real if kind == "2d" else None
    allowed = torch.ones(length, length, dtype=torch.bool).tril() & real.bool()[:, None, None, :]
    allowed = (allowed | torch.eye(length, dtype=torch.bool))[:, :, first_query:]
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return allowed if kind == "4d bool" else additive


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("style", "implementation"), [*(("qwen3", each) for each in IMPLEMENTATIONS), ("qwen2.5", "sdpa")]
)
@torch.no_grad()
def test_reordered_input_is_causal_in_physical_order(style, implementation, mask, cached):
    model = tiny_model(style, attn_implementation=implementation, **CALM)
    ids, positions = tokens(), reordered_positions()
    padding = 0 if mask == "none" else PADDING
    positions[0] = (positions[0] - padding).clamp(min=0)
    # Masks of a window in the part that the cache does not hold, as in decoding.
    ids[:, -3:] = MASK

    first, cache = 0, None
    if cached:
        first, cache = PREFIX, DynamicCache(config=model.config)
        prefix_mask = stated_mask("none" if mask == "none" else "2d", padding, 0, PREFIX)
        model(ids[:, :PREFIX], prefix_mask, positions[:, :PREFIX], **{CACHE: cache})
    logits = model(ids[:, first:], stated_mask(mask, padding, first), positions[:, first:], **{CACHE: cache}).logits

    for row, skipped in ((0, padding), (1, 0)):
        expected = oracle(model, ids[row, skipped:], positions[row, skipped:])[max(first - skipped, 0) :]
        assert_equal_but_rounding(logits[row, max(skipped - first, 0) :], expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_the_traps_of_packed_sequences_and_of_boolean_masks_are_real_and_avoided(implementation):
    """Without a cache and a mask, stock Qwen reads each jump of the positions as the start of another sequence; and
    attention other than sdpa adds a boolean mask to the scores: hidden slots count 0, visible ones 1."""
    model, ids, positions = tiny_model(attn_implementation=implementation, **CALM), tokens(1), reordered_positions(1)
    stock, mask = stock_twin(model, implementation), torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    trap = {"position_ids": positions, "use_cache": False}
    expected = oracle(model, ids[0], positions[0])
    assert (stock(ids, **trap).logits[0] - expected).abs().max() > 0.1
    assert_equal_but_rounding(model(ids, **trap).logits[0], expected)
    expected = model(ids).logits
    assert ((stock(ids, mask).logits - expected).abs().max() > 0.1) == (implementation != "sdpa")
    assert_equal_but_rounding(model(ids, mask).logits, expected)


@torch.no_grad()
def test_flash_kernels_get_no_position_ids_and_no_mask_but_padding(monkeypatch):
    """The flash path splits sequences at jumps of `position_ids`, and again inside the kernel's own wrapper."""
    seen: list[tuple[torch.Tensor | None, set[str]]] = []
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)

    def kernel(module, query, key, value, attention_mask, scaling, **kwargs):
        seen.append((attention_mask, set(kwargs)))
        return attend(query, key, value, scale=scaling).transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "kernel", kernel)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "kernel", flash_attention_mask)
    ids, positions = tokens(), reordered_positions()
    expected = tiny_model(**CALM)(ids, position_ids=positions).logits

    model = tiny_model(attn_implementation="kernel", **CALM)
    assert_equal_but_rounding(model(ids, position_ids=positions).logits, expected)
    padded = stated_mask("2d", PADDING, 0)
    model(ids, padded, position_ids=positions)
    layers = model.config.num_hidden_layers
    assert [mask for mask, _ in seen[:layers]] == [None] * layers
    assert all(mask is not None and mask.shape == padded.shape for mask, _ in seen[layers:])
    assert not any("position_ids" in names for _, names in seen)


@pytest.mark.parametrize("style", STYLES)
def test_labels_alone_give_the_parents_loss_and_gradients(style):
    model = tiny_model(style)
    twin, labels = stock_twin(model, "sdpa"), tokens().masked_fill(tokens(seed=1) % 3 == 0, -100)
    for settings in ({}, {"num_items_in_batch": torch.tensor(50)}):
        loss, expected = (each(tokens(), labels=labels, **settings).loss for each in (model, twin))
        assert_equal_but_rounding(loss, expected)
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    pairs = [(parameter.grad.flatten(), gradients[name].flatten()) for name, parameter in model.named_parameters()]
    assert_equal_but_rounding(*map(torch.cat, zip(*pairs, strict=True)))


@torch.no_grad()
def test_hidden_states_attentions_and_tuples_come_out_as_from_the_parent_and_there_is_one_kind_of_input():
    model = tiny_model(attn_implementation="eager")
    options = {"output_hidden_states": True, "output_attentions": True}
    ours, theirs = model(tokens(), **options), stock_twin(model)(tokens(), **options)
    assert ours.keys() == theirs.keys()
    for name in ("hidden_states", "attentions"):
        for layer, other in zip(ours[name], theirs[name], strict=True):
            assert_equal_but_rounding(layer, other)
    assert_equal_but_rounding(model(tokens(), return_dict=False)[0], theirs.logits)
    for inputs in ({}, {"input_ids": tokens(), "inputs_embeds": torch.zeros(2, LENGTH, 32)}):
        with pytest.raises(ValueError, match="Pass exactly one of `input_ids` and `inputs_embeds`"):
            model(**inputs)


def write_published_checkpoint(folder: Path, style: str) -> dict[str, torch.Tensor]:
    """A tiny checkpoint in the published layout: its config.json, and safetensors with its keys, spelled out."""
    sizes = {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": 320, "mask_token_id": 319}
    bias = style == "qwen2.5"
    config = PUBLISHED | sizes | {"attention_bias": bias, "qk_norm": not bias, "bos_token_id": None, "eos_token_id": 2}
    config |= {"torch_dtype": "float32", "auto_map": {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(config))

    parts: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (64, 32), "self_attn.k_proj.weight": (32, 32), "self_attn.v_proj.weight": (32, 32),
        "self_attn.o_proj.weight": (32, 64), "mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48), "input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,),
    }  # fmt: skip
    if bias:
        parts |= {"self_attn.q_proj.bias": (64,), "self_attn.k_proj.bias": (32,), "self_attn.v_proj.bias": (32,)}
    else:
        parts |= {"self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,)}
    shapes = {"model.embed_tokens.weight": (320, 32), "model.norm.weight": (32,), "lm_head.weight": (320, 32)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in (0, 1) for name, shape in parts.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_a_published_checkpoint_loads_with_every_key_used(tmp_path, style):
    weights = write_published_checkpoint(tmp_path, style)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is WeDLMForCausalLM and not any(report.values())
    assert model.state_dict().keys() == weights.keys()
    twin = stock_twin(model, "sdpa")
    assert all(torch.equal(weight, weights[name]) for name, weight in twin.state_dict().items())
    assert twin.config.rope_parameters["rope_theta"] == 1_000_000
    assert_equal_but_rounding(model(tokens()).logits, twin(tokens()).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is WeDLMModel


def test_settings_of_a_derived_generation_config_survive_saving(tmp_path):
    """Without a generation_config.json transformers derives one from config.json, and marks it as such."""
    tiny_model().save_pretrained(tmp_path / "made")
    shutil.copytree(tmp_path / "made", tmp_path / "bare", ignore=shutil.ignore_patterns("generation_config.json"))
    bare = AutoModelForCausalLM.from_pretrained(tmp_path / "bare")
    bare.generation_config.window_size = 4
    bare.save_pretrained(tmp_path / "again")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").generation_config.window_size == 4


def test_the_head_of_a_batch_reads_rows_of_their_own() -> None:
    # For a slice of a batch, torch's 16-bit product copies the head's weights once for each sequence.
    model, seen = tiny_model(), []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append((args[0].shape[1], args[0].is_contiguous())))
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    whole = model(ids).logits
    for kept, expected in ((2, whole[:, -2:]), (9, whole)):
        assert model(ids, logits_to_keep=kept).logits.equal(expected)
    assert seen == [(4, True), (2, True), (4, True)]


def test_documents_side_by_side_told_apart_by_positions_alone_are_refused_in_training():
    model, documents = tiny_model().train(), [[11, 12, 13], [21], [31, 32]]
    flat = DataCollatorWithFlattening()([{"input_ids": document} for document in documents])
    for batch in (flat, flat | {"attention_mask": torch.ones_like(flat["input_ids"])}):
        with pytest.raises(ValueError, match="`position_ids` restart at 0 inside a row: its documents would see each"):
            model(**batch)
    ids, positions = flat["input_ids"], flat["position_ids"]
    number = torch.tensor([0, 0, 0, 1, 2, 2])
    apart = (number[:, None] == number) & torch.ones(6, 6, dtype=torch.bool).tril()
    together = model(ids, position_ids=positions, attention_mask=apart[None, None]).logits
    alone = [model(torch.tensor([document])).logits for document in documents]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), atol=1e-4, rtol=0)
    # One document each: left-padded, reordered, going on.
    model(ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]), position_ids=torch.tensor([[0, 0, 0, 1, 2, 3]]))
    for places in ([0, 2, 3, 1, 4, 5], [1, 2, 3, 0, 5, 4], [3, 4, 5, 6, 7, 8]):
        model(ids, position_ids=torch.tensor([places]))
    model.eval()(**flat)
