"""Conversion of Qwen2, Qwen2.5 and Qwen3 checkpoints: every weight kept, the mask token, its row, what is refused.

Other families: test_families.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import LINES, VOCAB_SIZE, edit, stock_twin, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Tokenizer

from wedlm_hf import WeDLMForCausalLM, convert


def stock_tokenizer() -> Any:
    """As the stock checkpoints have it: no mask token, and special tokens behind the ordinary ones."""
    single_bytes = sorted(token for token in tiny_tokenizer().get_vocab() if len(token) == 1)
    vocabulary = {token: row for row, token in enumerate(single_bytes)}
    tokenizer = Qwen2Tokenizer(vocabulary, [], unk_token=None, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|fim_pad|>"]})
    return tokenizer


def write_source(folder: Path, style: str = "qwen3", tokenizer: Any = None, **overrides: Any) -> Any:
    """A stock Qwen checkpoint with tokenizer and generation config; returns the model."""
    tokenizer = tokenizer or stock_tokenizer()
    settings = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "mask_token_id": None}
    model = stock_twin(tiny_model(style, **settings | overrides), "sdpa")
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    model.generation_config = GenerationConfig(do_sample=True, top_k=20, eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture
def source(tmp_path):
    """A stock checkpoint in the folder `source`: the model that is stored there."""
    return write_source(tmp_path / "source")


def ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 200, (rows, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("style", "dtype", "tied"), [("qwen3", torch.float32, True), ("qwen2.5", torch.bfloat16, False)]
)
@torch.no_grad()
def test_every_weight_logit_and_setting_is_the_sources(tmp_path, style, dtype, tied):
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 128}
    write_source(tmp_path / "source", style, tie_word_embeddings=tied, dtype=dtype, rope_parameters=yarn)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=dtype)
    stock.save_pretrained(tmp_path / "source")
    result = convert(tmp_path / "source", tmp_path / "out")
    assert str(result).startswith(f"{result.copied} weights copied; mask token '<|mask|>' is id")

    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    assert before.keys() == after.keys() and len(before) == result.copied
    for name, weight in before.items():
        changed = (weight != after[name]).any(dim=-1)
        assert after[name].dtype == dtype
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert changed.nonzero().flatten().tolist() == [result.mask_token_id]
        else:
            assert not changed.any()

    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(loaded) is WeDLMForCausalLM and not any(report.values())
    kept = torch.arange(VOCAB_SIZE) != result.mask_token_id
    for model in (result.model, loaded):
        assert model.dtype == dtype
        assert torch.equal(model(ids()).logits[..., kept], stock(ids()).logits[..., kept])
    for config in (result.model.config, loaded.config):
        assert (config.qk_norm, config.attention_bias) == ((True, False) if style == "qwen3" else (False, True))
        for name in ("tie_word_embeddings", "eos_token_id", "max_position_embeddings", "rms_norm_eps", "hidden_size"):
            assert getattr(config, name) == getattr(stock.config, name)
        assert config.rope_parameters == stock.config.rope_parameters


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("row", ["unused", "added"])
@torch.no_grad()
def test_the_masks_row_is_an_unused_one_or_is_added_and_starts_from_the_mean(tmp_path, row, tied):
    size = len(stock_tokenizer())
    vocabulary = VOCAB_SIZE if row == "unused" else size
    source = write_source(tmp_path / "source", vocab_size=vocabulary, tie_word_embeddings=tied)
    result = convert(tmp_path / "source", tmp_path / "out")
    assert (result.mask_row, result.mask_token_id) == (row, size)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.vocab_size == loaded.lm_head.out_features == max(vocabulary, size + 1)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    for old, new in (
        (source.get_input_embeddings(), loaded.get_input_embeddings()),
        (source.get_output_embeddings(), loaded.get_output_embeddings()),
    ):
        assert torch.equal(new.weight[:size], old.weight[:size])
        torch.testing.assert_close(new.weight[size], old.weight[:size].mean(0))
    inputs = ids() % size
    assert torch.equal(loaded(inputs).logits[..., :size], source(inputs).logits[..., :size])


@pytest.mark.parametrize(
    ("make", "named", "mask"),
    [
        (tiny_tokenizer, None, "<|mask|>"),
        (stock_tokenizer, "<|fim_pad|>", "<|fim_pad|>"),
        (stock_tokenizer, None, None),
    ],
)
@torch.no_grad()
def test_a_special_token_that_is_the_mask_or_is_named_as_it_keeps_its_row_and_the_tokenizer_changes_in_nothing_else(
    tmp_path, make, named, mask
):
    source = write_source(tmp_path / "source", tokenizer=make())
    result = convert(tmp_path / "source", tmp_path / "out", mask_token=named)
    before, after = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("source", "out"))
    if mask:
        assert (result.mask_row, result.mask_token_id) == ("existing", make().convert_tokens_to_ids(mask))
        assert torch.equal(result.model(ids()).logits, source(ids()).logits)
        for tokenizer in (result.tokenizer, after):
            assert (tokenizer.mask_token, tokenizer.mask_token_id) == (mask, result.mask_token_id)
    assert type(before) is type(after) and before.chat_template == after.chat_template
    for text in [*LINES, "<|im_start|>user\nHi<|im_end|>\n", "  é 日本 <|endoftext|>"]:
        assert before.encode(text) == after.encode(text)
    assert before.get_vocab().items() <= after.get_vocab().items()


def test_the_generation_config_is_carried_over_and_none_is_derived(tmp_path, source):
    for wanted in ({"top_k": 20, "eos_token_id": source.generation_config.eos_token_id}, {}):
        convert(tmp_path / "source", tmp_path / str(len(wanted)))
        saved = json.loads((tmp_path / str(len(wanted)) / "generation_config.json").read_text())
        assert wanted.items() <= saved.items() and "_from_model_config" not in saved
        (tmp_path / "source" / "generation_config.json").unlink(missing_ok=True)


@pytest.mark.usefixtures("source")
def test_the_working_folder_a_link_to_a_folder_and_a_new_one_can_be_filled(tmp_path, monkeypatch):
    """The first two cannot be replaced by another folder: a shell, a mount or a link would be left with none."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    convert(tmp_path / "source", ".")
    convert(tmp_path / "source", tmp_path / "link")
    convert(tmp_path / "source", tmp_path / "new" / "deeper")
    for folder in (Path(), tmp_path / "there", tmp_path / "new" / "deeper"):
        assert type(AutoModelForCausalLM.from_pretrained(folder)) is WeDLMForCausalLM
        assert not list(folder.glob(".*"))
    assert (tmp_path / "link").is_symlink()


def refused(tmp_path: Path, error: type[Exception], message: str, **options: Any) -> None:
    """The conversion raises, and leaves nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out", **options)
    assert sorted(tmp_path.rglob("*")) == before


NOT_EMPTY = "The output folder must be new or empty"
OTHER = r"`mask_token_id` must differ from the {} token, got \d+ for both"
SAVE = Qwen2Tokenizer.save_pretrained


@pytest.mark.parametrize(("prepare", "error", "message"), [
    (lambda source, out: None, FileNotFoundError, r"There is no checkpoint folder '.*source'\."),
    (lambda source, out: (out / "deeper").mkdir(parents=True), FileExistsError, f"{NOT_EMPTY}, got '.*out'"),
    (lambda source, out: out.touch(), FileExistsError, f"{NOT_EMPTY}, got '.*out'"),
    (lambda source, out: (write_source(source), (source / "tokenizer.json").write_text("{")),
     ValueError, r"The tokenizer of '.*source' cannot be read: "),
    (lambda source, out: tiny_model().save_pretrained(source),
     ValueError, r"'.*source' is a WeDLM checkpoint already: there is nothing to convert\."),
])  # fmt: skip
def test_what_is_no_source_or_no_place_to_write_to_is_refused(tmp_path, prepare, error, message):
    prepare(tmp_path / "source", tmp_path / "out")
    refused(tmp_path, error, message)


@pytest.mark.usefixtures("source")
def test_weights_that_do_not_fit_are_refused(tmp_path):
    file, layer = tmp_path / "source" / "model.safetensors", "model.layers.0.self_attn"
    weights = load_file(file)
    save_file(weights | {f"{layer}.o_proj.bias": torch.zeros(32)}, file, metadata={"format": "pt"})
    refused(tmp_path, ValueError, rf"do not fit its config: missing \[\], unexpected \['{layer}\.o_proj\.bias'\]")
    del weights[f"{layer}.q_norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    refused(tmp_path, ValueError, rf"do not fit its config: missing \['{layer}\.q_norm\.weight'\], unexpected \[\]")


def test_a_token_with_another_meaning_or_that_the_tokenizer_splits_or_loses_is_refused_as_the_mask(
    tmp_path, source, monkeypatch
):
    # An end token of the generation config alone: stock chat checkpoints name more there.
    ends = [*source.generation_config.eos_token_id, stock_tokenizer().convert_tokens_to_ids("<|im_start|>")]
    edit(tmp_path / "source" / "generation_config.json", eos_token_id=ends)
    meanings = {"<|im_end|>": OTHER.format("end"), "<|endoftext|>": OTHER.format("padding")}
    meanings |= {
        "<|im_start|>": OTHER.format("end"),
        "a": "must be a special token or a new one, got the ordinary token",
    }
    for token, message in meanings.items():
        refused(tmp_path, ValueError, message, mask_token=token)
    with monkeypatch.context() as patch:
        patch.setattr(Qwen2Tokenizer, "encode", lambda *_, **__: [1, 2])
        refused(tmp_path, ValueError, r"does not encode the mask token '<\|mask\|>' as its one id \d+\.")
    monkeypatch.setattr(Qwen2Tokenizer, "save_pretrained", lambda _, folder: SAVE(stock_tokenizer(), folder))
    refused(tmp_path, ValueError, "does not survive being saved and loaded")
    (tmp_path / "out").mkdir()  # stays as it was
    refused(tmp_path, ValueError, "does not survive being saved and loaded")


@pytest.mark.usefixtures("source")
def test_a_copy_says_that_it_is_untrained_until_it_is_trained(tmp_path, caplog):
    convert(tmp_path / "source", tmp_path / "made")
    card = (tmp_path / "made" / "README.md").read_text()
    assert "an untrained copy of another model" in card and "trust_remote_code=True" not in card
    # Nobody publishes it: it brings no code, so that transformers does not ask whether that is to be run.
    assert not list((tmp_path / "made").glob("*.py"))
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "made"), WeDLMForCausalLM)
    model = WeDLMForCausalLM.from_pretrained(tmp_path / "made")
    model.generate(ids(1), strategy="wedlm", verification="exact", max_new_tokens=2, do_sample=False)
    assert "untrained" not in caplog.text
    model.generate(ids(1), strategy="wedlm", max_new_tokens=2, do_sample=False)
    assert "untrained copy of an AR model" in caplog.text
    slots = torch.full((1, 4), model.config.mask_token_id)
    model.train()(input_ids=slots, targets=ids(1)[:, :4])
    model.save_pretrained(tmp_path / "trained")
    assert WeDLMForCausalLM.from_pretrained(tmp_path / "trained").config.masks_trained
    assert "untrained" not in (tmp_path / "trained" / "README.md").read_text()
