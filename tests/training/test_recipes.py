"""Recipes, the entry point that runs them, and the files that they read."""

import json
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from test_sft_trainer import CHATS, write_llama_like
from tiny import tiny_model, write_checkpoint, write_stock_checkpoint
from transformers.integrations import integration_utils
from trl import ModelConfig, TrlParser
from typer.testing import CliRunner

from wedlm_hf import WeDLMForCausalLM, cli
from wedlm_hf.checkpoints.merge import merge_adapter
from wedlm_hf.cli.options import DecodingOptions, LoadingOptions
from wedlm_hf.training import train
from wedlm_hf.training.sft_config import WeDLMSFTConfig
from wedlm_hf.training.sft_trainer import COLLATOR_FIELDS
from wedlm_hf.training.train import DataConfig, main

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "examples" / "recipes").glob("*.yaml"))}

CPU = ["--use_cpu", "true", "--bf16", "false"]
QUICK = (
    "--max_steps 2 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --block_size 4 --max_length 64 "
    "--eval_decoding_tokens 4 --eval_decoding_samples 1 --logging_steps 1 "
    "--save_strategy no --disable_tqdm true --learning_rate 0.05"
).split() + CPU


@pytest.fixture
def checkpoint(tmp_path) -> str:
    return str(write_checkpoint(tmp_path / "model"))


@pytest.fixture
def chats(tmp_path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS * 2))
    return str(path)


def run(recipe: str, model: str, dataset: str, output: Path, *words: str) -> None:
    named = ["--model_name_or_path", model, "--dataset", dataset, "--output_dir", str(output)]
    main([str(RECIPES[recipe]), *named, *QUICK, *words])


def test_every_recipe_holds_known_settings_and_the_first_ones_are_the_defaults():
    assert [*RECIPES] == ["adapt", "lora", "sft"]
    for path in RECIPES.values():
        words = ["--config", str(path), "--dataset", "x", *CPU]
        _, args, model = TrlParser((DataConfig, WeDLMSFTConfig, ModelConfig)).parse_args_and_config(words)
        assert model.use_peft == (path.stem == "lora")
        if path.stem == "sft":
            default = WeDLMSFTConfig("x", use_cpu=True, bf16=False)
            for name in (
                "block_size ar_weight num_eos learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm "
                "num_train_epochs gradient_accumulation_steps max_length"
            ).split():
                assert getattr(args, name) == getattr(default, name), name


def test_one_conversation_as_the_readme_shows_them_is_trained_on(tmp_path, checkpoint, capsys, caplog):
    (chat,) = re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "chats.jsonl").write_text(chat.partition("\n")[0])
    run("sft", checkpoint, str(tmp_path / "chats.jsonl"), tmp_path / "out")
    assert "train dataset: 1 example" in capsys.readouterr().out and "none is left to evaluate on" in caplog.text


def test_a_stock_qwen_checkpoint_becomes_a_wedlm_by_one_command(tmp_path):
    stock = str(write_stock_checkpoint(tmp_path / "stock"))
    Dataset.from_dict({"text": ["3 + 4 = 7, so 37 + 40 = 77. " * 9] * 6}).to_parquet(tmp_path / "texts.parquet")
    run("adapt", stock, str(tmp_path / "texts.parquet"), tmp_path / "adapted", "--eval_share", "0")
    adapted = WeDLMForCausalLM.from_pretrained(tmp_path / "adapted")
    ids = torch.tensor([[11, 12, 13]])
    assert adapted.generate(ids, attention_mask=ids > 0, strategy="wedlm", max_new_tokens=5).shape[1] > 3


def test_lora_of_a_single_kind_of_layer_from_a_stream_and_resuming_by_itself(tmp_path, checkpoint, chats):
    output = tmp_path / "adapter"
    words = "--packing false --eval_share 0 --streaming true --resume_from_checkpoint auto --save_strategy steps"
    words += " --save_steps 1 --lora_target_modules q_proj"
    for steps in (1, 2):
        run("lora", checkpoint, chats, output, *words.split(), f"--max_steps={steps}")
        assert json.loads((output / "trainer_state.json").read_text())["global_step"] == steps
        assert (output / "adapter_model.safetensors").exists()
    assert json.loads((output / "adapter_config.json").read_text())["target_modules"] == ["q_proj"]


def test_a_dataset_to_evaluate_on_goes_before_the_share_that_a_recipe_keeps(monkeypatch):
    monkeypatch.setattr(train, "load", lambda name, split, **_: (name, split))
    for streaming in (False, True):
        data = DataConfig("chats", eval_dataset="others", eval_share=0.02, streaming=streaming)
        assert train._datasets(data, seed=0) == (("chats", "train"), ("others", "test"))


# What is wrong is said in one line, before any work.


def said(*words: str) -> str:
    """What `wedlm train` says of a wrong request."""
    result = CliRunner().invoke(cli.app, ["train", *words])
    assert result.exit_code == 2, result.output
    return result.stderr.splitlines()[-1]


def test_a_bad_recipe_is_told_in_one_line_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content, message in (
        (b"a: [1,\nb", "while parsing a flow sequence"),
        (b'!!python/object/apply:os.system ["touch run"]', "could not determine a constructor for the tag"),
        (b"- a", "must contain a YAML mapping."),
        (b"3: 4", "The name of a setting must be text, but the recipe has a number"),
        (b"\xff\xfe\x00", "The recipe is not UTF-8: "),
        (b"learning_rate: null", "`learning_rate` must be at least 0, got None."),
        (b"blok_size: 8", "blok_size"),
    ):
        (tmp_path / "recipe.yaml").write_bytes(content)
        line = said("recipe.yaml", "--dataset", "x.jsonl", "--model_name_or_path", "m", *CPU)
        assert line.startswith("Error: ") and message in line
        assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_the_model_is_checked_before_the_data_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "load", lambda *_, **__: pytest.fail("the data are read"))
    words = ["--dataset", "x.jsonl", "--output_dir", str(tmp_path / "out"), *CPU, "--model_name_or_path"]
    assert said(*words, str(tmp_path / "no")) == f"Error: There is no checkpoint folder '{tmp_path / 'no'}'."
    stock = str(write_stock_checkpoint(tmp_path / "stock"))
    expected = "Error: An adapter is loaded onto the checkpoint that it was trained on"
    assert said(*words, stock, "--use_peft", "true").startswith(expected) and not (tmp_path / "out").exists()


def test_a_model_with_the_template_of_llama_3_2_is_trained_as_it_is_and_with_chatml(tmp_path, chats):
    write_checkpoint(tmp_path / "llama")
    write_llama_like(tmp_path / "llama")
    words = ["--eval_share=0", "--max_length=200"]
    for more in ([], ["--chat_template_path", "chatml"]):
        run("sft", str(tmp_path / "llama"), chats, tmp_path / f"out{len(more)}", *words, *more)
    with pytest.raises(ValueError, match=r"'<\|im_end\|>'\) is not found in the vocabulary"):
        run("sft", str(tmp_path / "llama"), chats, tmp_path / "no", *words, "--eos_token", "<|im_end|>")


def test_ctrl_c_says_where_it_goes_on_and_promises_no_checkpoint_that_is_not_there(
    tmp_path, checkpoint, chats, monkeypatch
):
    def stop(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train.WeDLMSFTTrainer, "train", stop)
    words = ["train", "--model", checkpoint, "--dataset", chats, "--output_dir", str(tmp_path / "out"), *CPU]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 130 and "No checkpoint was saved yet (`--save_steps` is 500)" in result.stderr
    (tmp_path / "out" / "checkpoint-20").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-20" / "trainer_state.json").write_text("[1]")
    result = CliRunner().invoke(cli.app, words)
    assert "`--resume_from_checkpoint auto` goes on from checkpoint-20." in result.stderr


def test_a_report_to_a_package_that_is_not_there_is_told_before_any_work(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(train, "load", lambda *_, **__: pytest.fail("the data are read"))
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: False)
    words = ["--dataset", "x.jsonl", "--model_name_or_path", checkpoint, "--output_dir", str(tmp_path / "out"), *CPU]
    line = said(*words, "--report_to", "tensorboard")
    assert "TensorBoardCallback requires tensorboard to be installed" in line and "`--report_to none`" in line


def test_help_shows_what_most_runs_need_and_help_all_the_rest(capsys):
    shown = {}
    for word in ("--help", "--help_all"):
        with pytest.raises(SystemExit):
            main([word])
        shown[word] = capsys.readouterr().out
    assert len(shown["--help"].splitlines()) < 190 < 600 < len(shown["--help_all"].splitlines())
    for name in ("--dataset", "--eval_share", "--block_size", "--num_copies", "--learning_rate", "--use_peft"):
        assert name in shown["--help"]
    assert "--adam_beta1" not in shown["--help"] and "--help_all" in shown["--help"]


def test_a_run_says_what_it_will_do_how_far_it_is_what_came_out_and_how_to_use_it(tmp_path, checkpoint, chats, capsys):
    words = ["--eval_share=0.25", "--disable_tqdm=false", "--eval_strategy=steps", "--eval_steps=1"]
    run("sft", checkpoint, chats, tmp_path / "out", *words, "--save_strategy=steps", "--save_steps=1")
    printed = capsys.readouterr()
    said_before = r"On the CPU, in float32: .*\n[\d,]+ tokens, [\d,]+ of them to learn, .* times in 2 steps\."
    assert re.search(said_before, printed.err) and re.search(
        r"takes [\d.]+ rows of a forward.* on this ma", printed.err
    )
    assert "masks" in printed.err and "tokens/forward" in printed.err
    for part in ("train dataset: 12 examples", "eval dataset: 4 examples", "eval_elbo_nll", "tokens_per_second"):
        assert part in printed.out
    tuned = WeDLMForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(tuned.lm_head.weight, tiny_model().lm_head.weight) and tuned.config.use_cache is True
    flat = " ".join(printed.out.split())
    assert "tokens per forward on held-out prompts" in flat and "commands verify every token" in flat
    assert f"wedlm generate 'YOUR QUESTION' --model {tmp_path / 'out'}" in printed.out
    assert (tmp_path / "out" / "curve.png").stat().st_size > 5000
    # What is published is complete; what is only resumed holds no code.
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "modeling_wedlm.py" in names and "_lock" not in names
    assert not list((tmp_path / "out").glob("checkpoint-*/*_wedlm.py"))
    stated = json.loads((tmp_path / "out" / "checkpoint-2" / "config.json").read_text())
    assert "auto_map" not in stated and stated["masks_trained"]


def test_commands_verify_unless_the_masks_are_ready_or_a_person_asks(tmp_path):
    for stored, expected in (({}, "exact"), ({"masks_ready": False}, "exact"), ({"masks_ready": True}, None),
                             ({"verification": "none"}, "none")):  # fmt: skip
        folder = write_checkpoint(tmp_path / str(stored), **stored)
        model, _ = LoadingOptions(dtype="float32").load(str(folder))
        assert getattr(model.generation_config, "verification", None) == expected
    base, lora = tmp_path / str({"masks_ready": True}), tmp_path / "lora"
    model = get_peft_model(WeDLMForCausalLM.from_pretrained(base), LoraConfig(target_modules="all-linear"))
    model.save_pretrained(lora)  # with other masks than those that were ready
    beside, _ = LoadingOptions(dtype="float32", adapter=str(lora)).load(str(base))
    assert beside.generation_config.verification == "exact"
    assert not merge_adapter(WeDLMForCausalLM.from_pretrained(base), lora).generation_config.masks_ready
    assert "verification" not in DecodingOptions().keywords()
    for asked in ({"entropy_threshold": 0.2}, {"distance_penalty": 0.1}, {"strategy": "block"}):
        assert DecodingOptions(**asked).keywords()["verification"] == "none"
    with pytest.raises(ValueError, match="`verification='exact'` goes with `strategy='wedlm'`"):
        DecodingOptions(strategy="block", verification="exact").keywords()


def test_the_card_of_a_lora_runs_and_names_no_path_of_this_machine(tmp_path, checkpoint, chats, monkeypatch):
    for _ in range(2):  # PEFT adds its own to a card that is there
        run("lora", checkpoint, chats, tmp_path / "lora", "--eval_share=0", "--save_strategy=steps", "--save_steps=1")
    card = (tmp_path / "lora" / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in card and "Framework versions" not in card and "None" not in card
    assert "A LoRA for `model`" in card and "- train dataset: 16 examples" in card
    (block,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(block.replace('".")', '"lora")').replace("=128", "=4"), {})
    (tmp_path / "lora" / "README.md").write_text("# Mine\n")
    run("lora", checkpoint, chats, tmp_path / "lora", "--eval_share=0")
    assert (tmp_path / "lora" / "README.md").read_text() == "# Mine\n"


def test_each_setting_and_default_of_the_documentation_is_the_configs():
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    table = text[text.index("| setting |") : text.index("Learning rate, schedule and epochs")]
    default = WeDLMSFTConfig("x", use_cpu=True, bf16=False)
    documented = set()
    for line in table.splitlines()[2:]:
        if line.startswith("|"):
            names, values = (cell.strip() for cell in line.strip("|").split("|")[:2])
            for name, value in zip(re.findall(r"`(\w+)`", names), values.replace("`", "").split(", "), strict=True):
                actual = getattr(default, name)
                assert value == getattr(actual, "value", actual) or float(value) == actual, name
                documented.add(name)
    assert set(COLLATOR_FIELDS) - {"seed"} <= documented
