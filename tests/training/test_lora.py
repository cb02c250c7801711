"""Adapters by `peft_config` alone: what they train, and that they save, load, merge and decode."""

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from peft.utils import constants
from test_sft_trainer import MESSAGES, decoded, settings_of, trainer_on
from tiny import MASK, tiny_model, tiny_tokenizer
from transformers import BitsAndBytesConfig

from wedlm_hf import WeDLMForCausalLM
from wedlm_hf.training import WeDLMSFTTrainer
from wedlm_hf.training.model import mask_row_is_new

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
PROJECTIONS = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def with_new_mask_row(**overrides):
    """A model as `convert` leaves it: the mask token's row is the mean of all others."""
    model = tiny_model(**overrides)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[MASK] = weight[[row for row in range(len(tiny_tokenizer())) if row != MASK]].mean(0)
    return model


def train(folder, model, **settings):
    trainer = trainer_on(folder, model=model, peft=LoraConfig(**CONFIG | settings), max_steps=3, learning_rate=0.5)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("settings", "tied"), [({}, False), ({"use_dora": True}, True)], ids=["LoRA", "DoRA, tied"])
def test_an_adapter_saves_loads_merges_and_decodes(tmp_path, settings, tied):
    trainer = train(tmp_path, with_new_mask_row(tie_word_embeddings=tied), **settings)
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained if ".lora_" in name} == PROJECTIONS
    assert any("trainable_tokens_delta" in name for name in trained)
    trainer.save_model()
    assert not (tmp_path / "model.safetensors").exists()

    expected = decoded(trainer.model)
    base = with_new_mask_row(tie_word_embeddings=tied)
    with trainer.model.disable_adapter():
        assert torch.equal(decoded(trainer.model), decoded(base))
    row_before = base.get_input_embeddings().weight[MASK].clone()
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(decoded(loaded), expected)
    merged = loaded.merge_and_unload()
    assert torch.equal(decoded(merged), expected)
    assert not torch.equal(merged.get_input_embeddings().weight[MASK], row_before)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(decoded(type(merged).from_pretrained(tmp_path / "merged")), expected)


@pytest.mark.parametrize(("settings", "tied"), [({}, True), ({"use_dora": True}, False)], ids=["QLoRA, tied", "QDoRA"])
def test_an_adapter_of_a_model_in_four_bits_trains_saves_loads_and_decodes(tmp_path, settings, tied):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = str(tmp_path / "base")
    # Quantised in groups of 64 weights.
    with_new_mask_row(hidden_size=64, intermediate_size=128, tie_word_embeddings=tied).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    few = {"max_steps": 5, "learning_rate": 0.03, "eval_decoding_samples": 1, "eval_decoding_tokens": 8}
    config, peft = settings_of(tmp_path / "adapter", **few), LoraConfig(**CONFIG | settings)
    data = MESSAGES, MESSAGES.select(range(2))
    trainer = WeDLMSFTTrainer(base, config, *data, peft_config=peft, quantization_config=four_bits)
    layers = [module for module in trainer.model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 2 * len(PROJECTIONS)
    trained = [(name, weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    assert any("trainable_tokens_delta" in name for name, _ in trained)
    assert {weight.dtype for _, weight in trained} == {torch.float32}
    before = {name: weight.clone() for name, weight in trained}
    start = trainer.evaluate()
    trainer.train()
    assert all(not torch.equal(weight, before[name]) for name, weight in trained)
    assert trainer.evaluate()["eval_loss"] < 0.9 * start["eval_loss"]
    trainer.save_model()

    loaded = WeDLMForCausalLM.from_pretrained(base, quantization_config=four_bits, dtype=torch.float32)
    for module in loaded.modules():  # as while training: no kernels that compute in bfloat16 on some processors
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    loaded = PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    ids = torch.tensor([[5, MASK, 7]])
    torch.testing.assert_close(loaded.eval()(ids).logits, trainer.model.eval()(ids).logits)
    assert torch.equal(decoded(loaded), decoded(trainer.model))


def test_the_mask_row_is_trained_only_where_it_is_new_and_nobody_names_other_rows(tmp_path):
    tokenizer = tiny_tokenizer()
    assert mask_row_is_new(with_new_mask_row().bfloat16(), tokenizer)
    for model, settings, expected in (
        (tiny_model(), {}, None),
        (with_new_mask_row(), {}, {"embed_tokens": [MASK]}),
        (with_new_mask_row(), {"trainable_token_indices": {"embed_tokens": [5]}}, {"embed_tokens": [5]}),
        (with_new_mask_row(), {"modules_to_save": ["embed_tokens"]}, None),
    ):
        config = LoraConfig(**CONFIG | settings)
        trainer = trainer_on(tmp_path, model=model, peft=config)
        assert trainer.model.peft_config["default"].trainable_token_indices == expected
        assert config.trainable_token_indices == settings.get("trainable_token_indices")  # the caller's is untouched


@pytest.mark.parametrize("config", [PrefixTuningConfig, PromptTuningConfig])
def test_methods_that_put_virtual_tokens_before_the_input_are_refused(tmp_path, config):
    settings = config(num_virtual_tokens=3, task_type="CAUSAL_LM")
    for how in ({"peft": settings}, {"model": get_peft_model(tiny_model(), settings)}):
        with pytest.raises(ValueError, match=f"^{config.__name__} cannot be trained: it puts virtual tokens before"):
            trainer_on(tmp_path, **how)


def test_a_layer_to_change_that_the_model_does_not_have_is_not_left_out_in_silence(tmp_path):
    for targets in (["q_proj", "foo"], ["q_proj", "proj"]):
        said = f"`target_modules` must be names of the model's modules, got '{targets[1]}': .* down_proj, .* v_proj"
        with pytest.raises(ValueError, match=said):
            trainer_on(tmp_path, peft=LoraConfig(**CONFIG | {"target_modules": targets}))
    for targets in (["q_proj", "model.layers.1.mlp.up_proj"], ["self_attn.k_proj"], r".*\.v_proj|foo"):
        trainer_on(tmp_path, peft=LoraConfig(**CONFIG | {"target_modules": targets}))


def test_a_run_is_not_resumed_with_another_adapter_than_its_checkpoint_has(tmp_path):
    def resumed(folder, config: dict | None, **settings) -> WeDLMSFTTrainer:
        peft = None if config is None else LoraConfig(**CONFIG | config)
        trainer = trainer_on(folder, peft=peft, save_strategy="steps", save_steps=1, optim="adamw_torch", **settings)
        trainer.train(settings["max_steps"] > 1)
        return trainer

    resumed(tmp_path / "lora", {}, max_steps=1)
    resumed(tmp_path / "whole", None, max_steps=1)
    resumed(tmp_path / "q", {"target_modules": ["q_proj"]}, max_steps=1)
    resumed(tmp_path / "one", {"target_modules": ["model.layers.0.mlp.up_proj"]}, max_steps=1)
    for name, config, message in (
        ("lora", None, "it holds an adapter, and this run trains all weights: pass `--use_peft true`"),
        ("whole", {}, "it holds a whole model, and this run trains an adapter: leave out `--use_peft`"),
        ("lora", {"r": 2}, "^A run whose adapter has the `r` 4 cannot go on with 2: take the former, or another"),
        ("lora", {"lora_alpha": 4}, "`lora_alpha` 8 cannot go on with 4"),
        ("lora", {"use_dora": True}, "`use_dora` False cannot go on with True"),
        ("lora", {"target_modules": ["q_proj"]}, r"`target_modules` \[.*down_proj'.* on with {'q_proj'}"),
        ("q", {"target_modules": ["q_proj"], "layers_to_transform": [0]}, r"_transform` None cannot go on with \[0\]"),
        ("lora", {"alpha_pattern": {"q_proj": 2}}, r"`alpha_pattern` {} cannot go on with {'q_proj': 2}"),
        ("lora", {"modules_to_save": ["lm_head"]}, r"`modules_to_save` None cannot go on with "),
        (
            "one",
            {"target_modules": ["model.layers.1.mlp.up_proj"]},
            "0.mlp.up_proj'] cannot go on with {'model.layers.1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            resumed(tmp_path / name, config, max_steps=2)
    # Another way to name the same layers is the same adapter.
    assert resumed(tmp_path / "lora", {"target_modules": sorted(PROJECTIONS)}, max_steps=2).state.global_step == 2


def test_methods_of_peft_know_which_layers_to_change_where_none_are_named(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig())
    changed = [name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name]
    assert {name.rpartition(".")[2] for name in changed} == {"q_proj", "v_proj"}
    tables = [table for table in vars(constants).values() if isinstance(table, dict) and "qwen3" in table]
    assert len(tables) > 20 and all(table["wedlm"] == table["qwen3"] for table in tables)
    trainer_on(tmp_path, peft=LoraConfig(task_type="CAUSAL_LM")).train()
