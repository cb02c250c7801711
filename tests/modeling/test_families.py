"""Llama and Mistral beside the Qwen families, and GGUF files: the stock classes' logits and answers, and refusals."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file, save_file
from tiny import EOS, PAD, VOCAB_SIZE, assert_equal_but_rounding, edit, randomize, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf import reader as gguf_headers

from wedlm_hf import WeDLMForCausalLM, add_mask_adapter, convert
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.checkpoints.gguf import end_token_ids, parsed_once
from wedlm_hf.checkpoints.loading import load_model, load_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
HALF_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}

# One of each kind that people have: what sets it apart from its class's defaults.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "Llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "Llama 3, tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "Llama, linear RoPE": ("llama", {"rope_parameters": LINEAR}),
    "TinyLlama": ("llama", {"num_key_value_heads": 1}),
    "SmolLM2": ("llama", {"tie_word_embeddings": True, "head_dim": 8}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral NeMo": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2.5": ("qwen2", {"sliding_window": 128, "use_sliding_window": False}),
    "Qwen3": ("qwen3", {"head_dim": 16}),
    "Qwen3, YaRN": ("qwen3", {"rope_parameters": YARN}),
}


def stock_model(model_type: str, **settings: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **SIZES | settings)
        return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def write_source(folder: Path, kind: str) -> Any:
    """A stock checkpoint of one of `KINDS` with a tokenizer; returns the model."""
    model_type, settings = KINDS[kind]
    model = stock_model(model_type, **settings)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def ids(rows: int = 3, length: int = 100) -> torch.Tensor:
    return torch.randint(4, 200, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_and_verified_answers_are_the_stock_classs(tmp_path, kind):
    write_source(tmp_path / "source", kind)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    result = convert(tmp_path / "source", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is WeDLMForCausalLM
    for attention in ("eager", "sdpa"):
        for model in (stock, result.model, loaded):
            model.set_attn_implementation(attention)
        for model in (result.model, loaded):
            assert torch.equal(model(ids()).logits, stock(ids()).logits)
    prompts = ids(length=20)
    mask = torch.ones_like(prompts)
    mask[1, :7] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    expected = stock.generate(prompts, suppress_tokens=[result.mask_token_id], **settings)
    for strategy in ({"strategy": "ar"}, {"strategy": "wedlm", "verification": "exact"}):
        assert torch.equal(loaded.generate(prompts, **settings, **strategy), expected)


@torch.no_grad()
def test_an_older_llama_checkpoint_may_store_rope_frequencies_and_state_no_rope_base(tmp_path):
    stock = write_source(tmp_path / "source", "Llama 2")
    file = tmp_path / "source" / "model.safetensors"
    stored = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(stored, file, {"format": "pt"})
    edit(tmp_path / "source" / "config.json", rope_parameters=..., head_dim=..., dtype=...)  # the family's defaults
    assert torch.equal(convert(tmp_path / "source").model(ids()).logits, stock(ids()).logits)


# ---------------------------------------------------------------------------------------------------------- refusals


NO_PLACE = r"'.*source' cannot be converted: WeDLM has no place for .*"
OTHER = r"\(Llama, Mistral, Qwen2, Qwen2.5 and Qwen3\) can be converted, got "


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("Llama 2", {"mlp_bias": True}, NO_PLACE + r"biases in the feed-forward layers \(mlp_bias=True\)"),
    ("Llama 2", {"attention_bias": True}, NO_PLACE + r"output projection `o_proj` \(attention_bias=True\)"),
    ("Mistral", {"sliding_window": 64}, NO_PLACE + r"attention that is not full in every layer \(sliding_window=64"),
    ("Llama 2", {"final_logit_softcapping": 30.0}, NO_PLACE + r"a soft cap on logits \(final_logit_softcapping=30\.0"),
    ("Llama 2", {"attn_logit_softcapping": 50.0}, NO_PLACE + r"a soft cap on attention scores \(attn_logit_softcapp"),
    ("Llama 2", {"num_local_experts": 8}, NO_PLACE + r"a mixture of experts \(num_local_experts=8\)"),
    ("Qwen3", {"quantization_config": {"quant_method": "fp8"}}, NO_PLACE + r"quantized weights \(quantization_config"),
    ("Llama 2", {"rope_parameters": HALF_ROPE}, NO_PLACE + r"partial rotary embeddings \(partial_rotary_factor=0\.5"),
    ("Llama 2", {"rope_parameters": DYNAMIC}, NO_PLACE + "rotary embeddings of the type 'dynamic'"),
    ("Llama 2", {"model_type": "gemma2", "final_logit_softcapping": 30.0}, OTHER + "'gemma2' with a soft cap on"),
    ("Llama 2", {"model_type": "mixtral", "num_local_experts": 8}, OTHER + "'mixtral' with a mixture of experts"),
    ("Llama 2", {"model_type": "phi3", "partial_rotary_factor": 0.75}, OTHER + "'phi3' with partial rotary emb"),
    ("Llama 2", {"model_type": "olmo2"}, OTHER + "'olmo2' in "),
])  # fmt: skip
def test_what_wedlms_network_has_not_and_another_family_are_refused_and_told_why(tmp_path, kind, changes, message):
    write_source(tmp_path / "source", kind)
    edit(tmp_path / "source" / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------------- GGUF

CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def architecture(config: Any) -> str:
    """As gguf calls it."""
    return config.model_type.removesuffix("_text")


def gguf_tensor(model: Any, name: str, weight: torch.Tensor) -> tuple[str, np.ndarray]:
    """A weight under its GGUF name; llama.cpp keeps the halves of Llama's query and key heads interleaved."""
    config, (stem, _, suffix) = model.config, name.rpartition(".")
    (kind,) = (kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture(config))
    gguf_name = gguf.get_tensor_name_map(kind, config.num_hidden_layers).get_name(stem)
    if config.model_type == "llama" and gguf_name.endswith(("attn_q", "attn_k")):
        heads = weight.shape[0] // config.head_dim
        weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    if config.model_type.startswith("gemma") and gguf_name.endswith("norm"):
        weight = weight + 1  # which the forward of transformers adds
    return f"{gguf_name}.{suffix}", weight.detach().squeeze().contiguous().numpy()  # of convolutions


def write_gguf(file: Path, model: Any, quantized: bool = False, **fields: Any) -> None:
    """As llama.cpp's converter writes it, with the byte-level tokenizer of the tests."""
    tokenizer, config = tiny_tokenizer(), model.config
    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens += [f"<|unused{row}|>" for row in range(len(tokens), VOCAB_SIZE)]
    writer, kv_heads = GGUFWriter(file, architecture(config)), config.num_key_value_heads
    if config.model_type == "lfm2":
        kv_heads = [kv_heads * (kind == "full_attention") for kind in config.layer_types]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]] or ["a b"]
    for field, value in {
        "context_length": config.max_position_embeddings, "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": kv_heads,
        "layer_norm_rms_eps": getattr(config, "rms_norm_eps", 1e-5),
        "rope_freq_base": config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"],
        "rope_dimension_count": config.hidden_size // config.num_attention_heads,
        "key_length": getattr(config, "head_dim", 8),
        "tokenizer_model": "gpt2", "token_list": tokens, "token_merges": merges,
        "token_types": [3 if token in tokenizer.all_special_tokens else 1 for token in tokens],
        "eos_token_id": EOS, "pad_token_id": EOS, "chat_template": CHAT,
    }.items():  # fmt: skip
        getattr(writer, f"add_{field}")(value)
    if not config.model_type.startswith("qwen"):  # whose files leave it to the number of tokens
        writer.add_vocab_size(VOCAB_SIZE)
    adders = {np.ndarray: writer.add_tensor, str: writer.add_string, int: writer.add_uint32}
    for key, value in fields.items():
        adders[type(value)](key, value)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name, array = gguf_tensor(model, name, weight)
        kind = GGMLQuantizationType.Q4_1 if quantized and array.ndim == 2 else None
        writer.add_tensor(gguf_name, quantize(array, kind) if kind else array, raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def gguf_source(tmp_path: Path, kind: str = "SmolLM2", quantized: bool = False, **fields: Any) -> tuple[Path, Any]:
    # transformers takes 128 for Qwen3, whose published models all have it, and does not read it from the file.
    model_type, settings = KINDS[kind]
    model = stock_model(model_type, **settings | {"head_dim": 128 if kind == "Qwen3" else 8, "intermediate_size": 64})
    (tmp_path / "source").mkdir()
    file = tmp_path / "source" / "tiny.gguf"
    write_gguf(file, model, quantized, **fields)
    return file, model


@pytest.fixture
def file(tmp_path):
    """A GGUF file."""
    return gguf_source(tmp_path)[0]


@pytest.mark.parametrize(
    ("kind", "quantized"), [*((kind, False) for kind in ("SmolLM2", "Llama 2", "Qwen2", "Qwen3")), ("Llama 2", True)]
)
@torch.no_grad()
def test_a_gguf_file_becomes_the_stock_models_twin(tmp_path, kind, quantized):
    file, written = gguf_source(tmp_path, kind, quantized)
    result = convert(file, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    kept = torch.arange(VOCAB_SIZE) != result.mask_token_id
    for model in (result.model, loaded):
        assert torch.equal(model(ids()).logits[..., kept], stock(ids()).logits[..., kept])
        if not quantized:
            assert_equal_but_rounding(model(ids()).logits[..., kept], written(ids()).logits[..., kept])
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


# Families beyond those that become WeDLM models, with what their files state and our sizes do not.
STOCK = {
    "phi3": {"pad_token_id": 0},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 256},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 256},
}


@pytest.mark.parametrize("model_type", STOCK)
@torch.no_grad()
def test_a_gguf_file_of_any_family_that_transformers_reads_is_loaded_whole(tmp_path, model_type):
    model = stock_model(model_type, tie_word_embeddings=model_type != "phi3", **STOCK[model_type])
    stated = {f"{architecture(model.config)}.attention.sliding_window": model.config.sliding_window}
    write_gguf(tmp_path / "tiny.gguf", model, **stated if model.config.sliding_window else {})
    found = load_model(tmp_path / "tiny.gguf", dtype="float32")
    assert type(found) is type(model)
    assert_equal_but_rounding(found(ids()).logits, model(ids()).logits)
    with pytest.raises(ValueError, match=f"Only checkpoints of the model types .* got '{model_type}'"):
        convert(tmp_path / "tiny.gguf")


def test_a_gguf_file_that_lacks_a_weight_is_refused(tmp_path, monkeypatch):
    model = stock_model(*KINDS["SmolLM2"][:1], **KINDS["SmolLM2"][1])
    weights = dict(model.state_dict())
    del weights["model.layers.1.mlp.up_proj.weight"]
    monkeypatch.setattr(model, "state_dict", lambda: weights)
    write_gguf(tmp_path / "tiny.gguf", model)
    with pytest.raises(ValueError, match=r"are not those of Llama.*: missing_keys \['model.layers.1.mlp.up_p"):
        load_model(tmp_path / "tiny.gguf")


@pytest.mark.skipif(
    "lfm2" not in gguf.MODEL_ARCH_NAMES.values(), reason="this gguf does not know the names of LFM2's tensors"
)
def test_a_gguf_file_of_a_hybrid_carries_a_mask_adapter(tmp_path):
    own = {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "block_auto_adjust_ff_dim": False}
    model = stock_model("lfm2", **own)
    write_gguf(tmp_path / "tiny.gguf", model, **{"lfm2.shortconv.l_cache": model.config.conv_L_cache})
    found = load_model(tmp_path / "tiny.gguf", dtype="float32")
    prompt, options = ids(1, 9), {"max_new_tokens": 24, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    expected = model.generate(prompt, **options)
    assert torch.equal(found.generate(prompt, **options), expected)
    for parameter in add_mask_adapter(found, MaskAdapterSettings(rank=2, head_width=8)).parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    how = {"strategy": "wedlm", "verification": "exact", "window_size": 3}
    assert torch.equal(found.generate(prompt, **options, **how), expected)


def test_what_a_file_states_behind_its_vocabulary_is_read(tmp_path):
    writer = GGUFWriter(tmp_path / "file.gguf", "llama")
    writer.add_array("few", [3, 1, 2])
    for name, value in {"floats": 0.5, "bools": True, "integers": -1, "strings": "añ"}.items():
        writer.add_array(name, [value] * 5000)
        writer.add_uint32(f"behind {name}", 7)
    writer.add_array("names", ["one", "two"])
    writer.add_string("last", "end")
    writer.add_tensor("weight", np.arange(6, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with parsed_once():
        reader = gguf.GGUFReader(str(tmp_path / "file.gguf"))
    assert reader.fields["few"].contents() == [3, 1, 2] and reader.fields["last"].contents() == "end"
    assert all(reader.fields[f"behind {name}"].contents() == 7 for name in ("floats", "bools", "integers", "strings"))
    assert reader.tensors[0].data.tolist() == [0, 1, 2, 3, 4, 5] and len(reader.fields["strings"].parts) == 4


def test_a_gguf_file_is_parsed_once_and_its_tokenizer_knows_its_template_its_ends_and_a_padding_of_its_own(
    tmp_path, file, monkeypatch
):
    parsed, reader, find = [], gguf.GGUFReader, gguf.get_tensor_name_map

    class Reader(reader):
        def __init__(self, path):
            super().__init__(path)
            parsed.append(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    headers, read = [], gguf_headers._read_metadata
    counted = lambda content, *what: headers.append(what) or read(content, *what)  # noqa: E731
    monkeypatch.setattr(gguf_headers, "_read_metadata", counted)
    make, made = AutoTokenizer.from_pretrained, []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **how: made.append(args) or make(*args, **how))
    with parsed_once():
        model, tokenizer = load_model(str(file), dtype=torch.float32), load_tokenizer(file)
    assert len(made) == 1
    assert 0 < len(headers) == len(set(headers)) and gguf_headers._read_metadata == counted
    assert len(parsed) == 1 and (gguf.GGUFReader, gguf.get_tensor_name_map) == (Reader, find)
    for result in (convert(str(file), tmp_path / "out"), convert(file.parent, gguf_file=file.name)):
        assert torch.equal(model.lm_head.weight, result.model.lm_head.weight)
        assert tokenizer.get_vocab() == result.tokenizer.get_vocab()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (tokenizer.chat_template, tokenizer.eos_token_id, ends["eos_token_id"]) == (CHAT, EOS, [EOS])
    assert ends["pad_token_id"] == tokenizer.pad_token_id != EOS
    assert tokenizer.encode("Sort 31") == tiny_tokenizer().encode("Sort 31")
    # The end of a chat turn ends answers beside the tokenizer's own end.
    tokenizer.chat_template = CHAT.replace("<|im_end|>", "<|im_start|>")
    assert end_token_ids(tokenizer) == [EOS, tokenizer.convert_tokens_to_ids("<|im_start|>")]


def test_a_gguf_file_that_is_truncated_or_of_a_kind_that_transformers_cannot_read_is_refused(tmp_path, file):
    content = file.read_bytes()
    for share in (0.0, 0.001, 0.2, 0.7, 0.98):
        file.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(OSError, match=r"'.*tiny\.gguf' is not a GGUF file, or damaged or truncated: "):
            convert(file, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    file.write_bytes(content.replace(b"llama", b"rwkv7"))
    with pytest.raises(OSError, match=r"transformers cannot read the GGUF file 'tiny\.gguf' of '.*source': .*rwkv7"):
        convert(file)


@pytest.mark.parametrize(("fields", "message"), [
    ({"rope_freqs.weight": np.ones(4, np.float32)}, r"rope_freqs\.weight: its RoPE scaling, which transformers"),
    ({"blk.0.attn_output.bias": np.ones(32, np.float32)}, r"blk\.0\.attn_output\.bias, which transformers"),
    ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type=yarn"),
    ({"llama.expert_count": 8}, r"llama\.expert_count=8"),
    ({"llama.final_logit_softcapping": 30}, r"llama\.final_logit_softcapping=30"),
])  # fmt: skip
def test_what_transformers_would_leave_out_of_a_gguf_file_is_refused(tmp_path, fields, message):
    file, _ = gguf_source(tmp_path, **fields)
    with pytest.raises(ValueError, match=rf"'.*tiny\.gguf' holds {message}.* Convert the safetensors checkpoint"):
        convert(file)


def test_a_gguf_file_that_is_not_there_is_refused_and_one_in_a_folder_or_the_missing_package_named(file, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint in '.*source': it has no other\.gguf"):
        convert(file.with_name("other.gguf"))
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: pass a GGUF file of it, tiny\.gguf\."):
        convert(file.parent)
    monkeypatch.setattr("wedlm_hf.checkpoints.gguf.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"needs the package `gguf`: pip install '\.\[gguf\]'"):
        convert(file)
