"""Merging: the merged model is the model under its adapter, or there is none."""

import random

import peft
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import VOCAB_SIZE, edit, tiny_model, tiny_tokenizer, write_checkpoint
from typer.testing import CliRunner

from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.checkpoints.loading import load_model
from wedlm_hf.checkpoints.merge import merge_adapter
from wedlm_hf.checkpoints.packed import pack
from wedlm_hf.cli import app

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::UserWarning:torch")
IDS = torch.tensor([[5, 6, 7, 8, 200, 319]])
LORA = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Methods that change weights, with what they need on a tiny model.
METHODS = {
    "AdaLora": {"total_step": 10}, "BOFT": {"boft_block_size": 4}, "C3A": {"block_size": 8}, "Delora": {},
    "FourierFT": {"n_frequency": 16}, "HRA": {}, "IA3": {"feedforward_modules": []}, "LNTuning": {}, "LoHa": {},
    "LoKr": {}, "Miss": {"r": 4}, "OFT": {"oft_block_size": 8, "r": 0}, "OSF": {}, "RandLora": {},
    "Road": {"group_size": 8}, "Shira": {"r": 4}, "VBLoRA": {"vector_length": 8, "num_vectors": 16}, "Vera": {},
    "WaveFT": {"n_frequency": 16},
}  # fmt: skip


def write_adapter(folder, config, base, scale=0.1, rows=None):
    """An adapter whose weights all do something. Returns what the model says under it."""
    model = load_model(base)
    if rows is not None:
        model.resize_token_embeddings(rows)
    wrapped, generator = get_peft_model(model, config).eval(), torch.Generator().manual_seed(0)
    for parameter in wrapped.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    wrapped.save_pretrained(folder)
    with torch.no_grad():
        return wrapped(IDS).logits


def error(model, expected):
    with torch.no_grad():
        return float((model.eval()(IDS).logits.float() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A checkpoint whose head is its table of embeddings, and its model."""
    base = write_checkpoint(tmp_path_factory.mktemp("tied") / "base", tiny_model(tie_word_embeddings=True))
    return base, load_model(base)


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 6, 7, 8, 9, 10, 11])  # 2 and 5 ask for less than 6
def test_a_lora_of_any_kind_merges_into_the_model_that_it_made(tmp_path, seed):
    chance = random.Random(seed)
    base = write_checkpoint(tmp_path / "base", tiny_model(tie_word_embeddings=seed % 4 < 3))
    tables = [name for name in ("embed_tokens", "lm_head") if chance.random() < 0.5]
    settings = LORA | {
        "target_modules": chance.sample(LINEAR, chance.randrange(1, 4)),
        "use_dora": chance.random() < 0.4,
        "use_rslora": chance.random() < 0.4,
        "modules_to_save": (["norm"] if chance.random() < 0.3 else []) or None,
    }
    kind = chance.choice(["targets", "saved", "rows"])
    if kind == "targets":
        settings["target_modules"] += tables
    elif kind == "saved":
        settings["modules_to_save"] = [*(settings["modules_to_save"] or []), *tables] or None
    else:
        settings["trainable_token_indices"] = chance.sample(range(VOCAB_SIZE), 3)
    if kind != "rows" and tables == ["embed_tokens"]:
        settings["ensure_weight_tying"] = chance.random() < 0.5
    rows = chance.choice([VOCAB_SIZE + 5, None]) if kind != "rows" else None
    expected = write_adapter(tmp_path / "lora", LoraConfig(**settings), base, rows=rows)

    model, _ = load_adapted(base, tmp_path / "lora")
    assert error(load_model(base), expected[..., :VOCAB_SIZE]) > 1e-3 or (rows and tables)
    assert error(model, expected) < 1e-5
    model.save_pretrained(tmp_path / "merged")
    again, info = load_model(tmp_path / "merged", output_loading_info=True)
    assert error(again, expected) < 1e-5
    assert not info["missing_keys"] and not info["unexpected_keys"]
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert again.config.tie_word_embeddings == model.config.tie_word_embeddings == is_tied
    assert error(pack(again), expected) < 1e-2


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_of_peft_merge_too(tied, tmp_path, name):
    base, model = tied
    targets = ["norm"] if name == "LNTuning" else ["q_proj", "down_proj"]
    config = getattr(peft, f"{name}Config")(target_modules=targets, task_type="CAUSAL_LM", **METHODS[name])
    expected = write_adapter(tmp_path / "adapter", config, base)
    assert error(model, expected) > 1e-3
    assert error(load_adapted(base, tmp_path / "adapter")[0], expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_merge_within_their_rounding(tmp_path, dtype):
    base = write_checkpoint(tmp_path / "base", tiny_model(tie_word_embeddings=True).to(dtype))
    config = LoraConfig(**LORA | {"target_modules": [*LINEAR, "lm_head"]})
    expected = write_adapter(tmp_path / "lora", config, base).float()
    assert error(load_model(base), expected) > 0.3
    assert error(load_adapted(base, tmp_path / "lora")[0], expected) < 8 * torch.finfo(dtype).eps


def test_added_tokens_come_with_their_rows_and_the_command_writes_them(tied, tmp_path):
    base, _ = tied
    expected = write_adapter(tmp_path / "lora", LoraConfig(**LORA), base, rows=VOCAB_SIZE + 3)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.save_pretrained(tmp_path / "lora")
    result = CliRunner().invoke(app, ["merge", str(base), str(tmp_path / "lora"), str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    merged, tokenizer = load_adapted(tmp_path / "merged")
    assert merged.config.vocab_size == VOCAB_SIZE + 3 and error(merged, expected) < 1e-5
    assert "<tool>" in tokenizer.get_vocab()


@pytest.mark.parametrize("is_tied", [True, False])
def test_rows_that_are_trained_one_by_one_merge_beside_added_tokens_and_a_lora_of_the_head(tmp_path, is_tied):
    base = write_checkpoint(tmp_path / "base", tiny_model(tie_word_embeddings=is_tied))
    trained = [
        ([VOCAB_SIZE, VOCAB_SIZE + 1, 5], ["q_proj"], VOCAB_SIZE + 2),
        ([5, 6], ["q_proj"], VOCAB_SIZE + 3),
        ([5, 200], ["q_proj", "lm_head"], None),
    ]
    for number, (tokens, targets, rows) in enumerate(trained):
        folder = tmp_path / str(number)
        config = LoraConfig(**LORA | {"target_modules": targets, "trainable_token_indices": tokens})
        expected = write_adapter(folder, config, base, rows=rows)
        model = load_adapted(base, folder)[0]
        assert error(model, expected) < 1e-5
        model.save_pretrained(tmp_path / f"{number}-merged")
        assert error(load_model(tmp_path / f"{number}-merged"), expected) < 1e-5


def test_added_tokens_whose_embeddings_the_adapter_lacks_are_refused(tmp_path):
    base = write_checkpoint(tmp_path / "base", tiny_model(tie_word_embeddings=False))
    for name in ("lm_head", "embed_tokens"):
        config = LoraConfig(**LORA | {"target_modules": ["q_proj", name]})
        write_adapter(tmp_path / name, config, base, rows=VOCAB_SIZE + 3)
        refused(base, tmp_path / name, "was trained with 3 more tokens than the model has, and does not hold")


@pytest.mark.parametrize(("is_tied", "saved"), [(True, None), (False, None), (False, ["embed_tokens"])])
def test_a_lora_of_a_head_with_fewer_rows_is_refused_and_none_is_lost(tmp_path, is_tied, saved):
    small = tiny_model(tie_word_embeddings=is_tied)
    small.resize_token_embeddings(VOCAB_SIZE - 20)
    config = LoraConfig(**LORA | {"target_modules": ["q_proj", "lm_head"], "modules_to_save": saved})
    get_peft_model(small, config).save_pretrained(tmp_path / "lora", save_embedding_layers=False)
    base = write_checkpoint(tmp_path / "base", tiny_model(tie_word_embeddings=is_tied))
    said = f"with {VOCAB_SIZE - 20} embeddings, and this one has {VOCAB_SIZE} .*: merge it into"
    refused(base, tmp_path / "lora", said)


def refused(base, adapter, said):
    with pytest.raises(ValueError, match=said):
        load_adapted(base, adapter)


def test_what_weights_cannot_express_is_refused(tmp_path):
    base = write_checkpoint(tmp_path / "base")
    for name, config, said in (
        (
            "prompt",
            PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
            "PROMPT_TUNING changes no",
        ),
        (
            "prefix",
            PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
            "PREFIX_TUNING changes no",
        ),
        ("late", LoraConfig(**LORA, alora_invocation_tokens=[7]), "aLoRA does not support merging"),
        (
            "bias",
            LoraConfig(**LORA, lora_bias=True),
            "Impossible to merge LoRA with `lora_bias",
        ),
    ):
        get_peft_model(tiny_model(), config).save_pretrained(tmp_path / name)
        refused(base, tmp_path / name, said)


def test_a_merge_that_makes_another_model_is_refused(tmp_path, monkeypatch):
    base = write_checkpoint(tmp_path / "base")
    write_adapter(tmp_path / "lora", LoraConfig(**LORA), base)
    monkeypatch.setattr("peft.tuners.lora.layer.Linear.merge", lambda *args, **kwargs: None)
    refused(base, tmp_path / "lora", r"cannot be merged: logits of the merged model would be \d+\.\d% from those")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    base = write_checkpoint(tmp_path / "base")
    write_adapter(tmp_path / "lora", LoraConfig(**LORA), base)
    edit(tmp_path / "lora" / "adapter_config.json", target_modules=["k_proj"])
    with pytest.raises(ValueError, match=r"belongs to another model: this one has no '.*q_proj"):
        merge_adapter(tiny_model(), tmp_path / "lora")
