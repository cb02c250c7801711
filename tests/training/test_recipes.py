"""Recipes, the entry point that runs them, and the files that they read."""

import json
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from test_sft_trainer import CHATS
from tiny import stock_twin, tiny_model, tiny_tokenizer
from trl import ModelConfig, TrlParser

from wedlm_hf import WeDLMForCausalLM
from wedlm_hf.training import train
from wedlm_hf.training.data import load
from wedlm_hf.training.sft_config import WeDLMSFTConfig
from wedlm_hf.training.sft_trainer import COLLATOR_FIELDS
from wedlm_hf.training.train import DataConfig, main

ROOT = Path(__file__).parents[2]
NANO = ROOT / "examples" / "wedlm-nano"
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))

QUICK = (
    "--max_steps 2 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --block_size 4 --max_length 64 "
    "--eval_decoding_tokens 4 --eval_decoding_samples 1 --bf16 false --use_cpu true --logging_steps 1 "
    "--save_strategy no --disable_tqdm true --learning_rate 0.05"
).split()


@pytest.fixture
def checkpoint(tmp_path) -> str:
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def stock_checkpoint(tmp_path) -> str:
    """A Qwen3 whose tokenizer has no mask token."""
    folder = tmp_path / "stock"
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    stock_twin(tiny_model()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def chats(tmp_path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS * 2))
    return str(path)


def test_every_recipe_holds_known_settings_and_the_first_ones_are_the_defaults():
    assert [path.stem for path in RECIPES] == ["adapt", "lora", "sft"]
    for path in RECIPES:
        words = ["--config", str(path), "--dataset", "x", "--use_cpu", "true", "--bf16", "false"]
        _, args, model = TrlParser((DataConfig, WeDLMSFTConfig, ModelConfig)).parse_args_and_config(words)
        assert model.use_peft == (path.stem == "lora")
        if path.stem == "sft":
            default = WeDLMSFTConfig("x", use_cpu=True, bf16=False)
            for name in (
                "block_size ar_weight num_eos learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm "
                "num_train_epochs gradient_accumulation_steps max_length"
            ).split():
                assert getattr(args, name) == getattr(default, name), name


def test_a_recipe_trains_with_settings_of_the_command_line_and_says_what_came_out(tmp_path, checkpoint, chats, capsys):
    (recipe,) = (path for path in RECIPES if path.stem == "sft")
    output = tmp_path / "tuned"
    words = [
        "--model_name_or_path",
        checkpoint,
        "--dataset",
        chats,
        "--output_dir",
        str(output),
        "--eval_share",
        "0.25",
    ]
    main([str(recipe), *words, *QUICK])
    summary = capsys.readouterr().out
    for part in ("train dataset: 12 examples", "eval dataset: 4 examples", "eval_elbo_nll", "tokens_per_second"):
        assert part in summary
    tuned = WeDLMForCausalLM.from_pretrained(output)
    assert not torch.equal(tuned.lm_head.weight, tiny_model().lm_head.weight)


def test_the_one_conversation_that_the_readme_shows_is_trained_on(tmp_path, checkpoint, capsys, caplog):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (chat,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "chats.jsonl").write_text(chat)
    words = ["--model_name_or_path", checkpoint, "--dataset", str(tmp_path / "chats.jsonl")]
    main([str(ROOT / "examples/recipes/sft.yaml"), *words, "--output_dir", str(tmp_path / "out"), *QUICK])
    assert "train dataset: 1 example" in capsys.readouterr().out
    assert "none is left to evaluate on" in caplog.text


def test_a_stock_qwen_checkpoint_becomes_a_wedlm_by_one_command(tmp_path, stock_checkpoint):
    (recipe,) = (path for path in RECIPES if path.stem == "adapt")
    texts = tmp_path / "texts.parquet"
    Dataset.from_dict({"text": ["3 + 4 = 7, so 37 + 40 = 77. " * 9] * 6}).to_parquet(texts)
    output = tmp_path / "adapted"
    words = ["--model_name_or_path", stock_checkpoint, "--dataset", str(texts), "--output_dir", str(output)]
    main([str(recipe), *words, "--eval_share", "0", *QUICK])
    adapted = WeDLMForCausalLM.from_pretrained(output)
    ids = torch.tensor([[11, 12, 13]])
    assert adapted.generate(ids, attention_mask=ids > 0, strategy="wedlm", max_new_tokens=5).shape[1] > 3


def test_lora_from_a_stream_and_resuming_by_itself(tmp_path, checkpoint, chats):
    (recipe,) = (path for path in RECIPES if path.stem == "lora")
    output = tmp_path / "adapter"
    words = ["--model_name_or_path", checkpoint, "--dataset", chats, "--output_dir", str(output), "--packing", "false"]
    words += ["--eval_share", "0", "--streaming", "true", "--resume_from_checkpoint", "auto", *QUICK]
    words += ["--save_strategy", "steps", "--save_steps", "1"]
    main([str(recipe), *words])
    assert (output / "adapter_model.safetensors").exists()
    main([str(recipe), *words, "--max_steps", "3"])
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 3


def test_a_dataset_to_evaluate_on_goes_before_the_share_that_a_recipe_keeps(monkeypatch):
    monkeypatch.setattr(train, "load", lambda name, split, **_: (name, split))
    for streaming in (False, True):
        data = DataConfig("chats", eval_dataset="others", eval_share=0.02, streaming=streaming)
        assert train._datasets(data, seed=0) == (("chats", "train"), ("others", "test"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "x.jsonl"], "`model_name_or_path` is required"),
        (["--dataset", "no.jsonl", "--model_name_or_path", str(NANO)], "There is no file 'no.jsonl'."),
        (["--dataset", "x", "--streaming", "true", "--model_name_or_path", "m"], "`streaming` needs `max_steps`"),
        (
            ["--dataset", "x.jsonl", "--model_name_or_path", "m", "--output_dir", __file__],
            "`output_dir` must be a folder",
        ),
        (
            ["--dataset", __file__, "--model_name_or_path", str(NANO)],
            "A file of examples must end in .jsonl, .json, .parquet",
        ),
        (["--dataset", "x", "--eval_share", "1"], "`eval_share` must lie in [0, 1), got 1.0."),
        (
            ["--dataset", "x", "--streaming", "true", "--max_steps", "2", "--eval_share", "0.1"],
            "`eval_share` must be 0 with `streaming`, got 0.1",
        ),
        (
            ["--dataset", "x", "--block_size", "-1", "--packing", "true", "--max_length", "1"],
            "`max_length` must be at",
        ),
    ],
)
def test_a_wrong_request_is_told_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--use_cpu", "true", "--bf16", "false"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"Error: {message}")


def test_the_model_is_checked_before_the_data_are_read(tmp_path, stock_checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(train, "load", lambda *_, **__: pytest.fail("the data are read"))
    words = ["--dataset", "x.jsonl", "--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--bf16", "false"]
    for model, message in (
        ([str(tmp_path / "no")], f"There is no checkpoint folder '{tmp_path / 'no'}'."),
        ([stock_checkpoint, "--use_peft", "true"], "An adapter is loaded onto the checkpoint that it was trained on"),
    ):
        with pytest.raises(SystemExit):
            main([*words, "--model_name_or_path", *model])
        assert f"Error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("gradient_accumulation_steps", "0", "`gradient_accumulation_steps` must be at least 1, got 0."),
        ("per_device_train_batch_size", "0", "`per_device_train_batch_size` must be at least 1, got 0."),
        ("learning_rate", "nan", "`learning_rate` must be at least 0, got nan."),
        ("learning_rate", "fast", "argument --learning_rate/--learning-rate: invalid float value: 'fast'."),
        ("num_train_epochs", "0", "Without `max_steps`, `num_train_epochs` must be more than 0, got 0."),
        ("weight_decay", "inf", "`weight_decay` must be at least 0, got inf."),
        ("ar_weight", "nan", "`ar_weight` must be a number of at least 0, got nan."),
        ("suffix_probability", "2", "`suffix_probability` must lie in [0, 1], got 2.0."),
        ("num_copies", "0", "`num_copies` must be an integer of at least 1, got 0."),
        ("output_dir", "", "`output_dir` must be a folder, got ''."),
        ("dataset", "", "`dataset` must be a file, a folder or a Hub id, got an empty text."),
    ],
)
def test_a_setting_out_of_range_is_told_in_one_line_before_any_work(setting, value, message, capsys):
    words = ["--dataset", "x.jsonl", "--model_name_or_path", "m", "--use_cpu", "true", "--bf16", "false"]
    with pytest.raises(SystemExit) as exit_:
        main([*words, f"--{setting}", value])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"Error: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1,\nb", "while parsing a flow sequence"),
        (b"\tlearning_rate: 3", "while scanning for the next token"),
        (b"a: *x", "found undefined alias 'x'"),
        (b'!!python/object/apply:os.system ["touch run"]', "could not determine a constructor for the tag"),
        (b"- a", "must contain a YAML mapping."),
        (b"hello", "must contain a YAML mapping."),
        (b"", "must contain a YAML mapping."),
        (b"3: 4", "The name of a setting must be text, but the recipe has a number"),
        (b"no: 4", "The name of a setting must be text, but the recipe has a number"),
        (b"\xff\xfe\x00", "The recipe is not UTF-8: "),
        (b"learning_rate: null", "`learning_rate` must be at least 0, got None."),
        (b"learning_rate: fast", "invalid float value: 'fast'"),
    ],
)
def test_a_bad_recipe_is_told_in_one_line_and_runs_nothing(tmp_path, monkeypatch, content, message, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_bytes(content)
    words = ["--dataset", "x.jsonl", "--model_name_or_path", "m", "--use_cpu", "true", "--bf16", "false"]
    with pytest.raises(SystemExit) as exit_:
        main(["recipe.yaml", *words])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ") and message in line
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", interrupt)
    with pytest.raises(SystemExit) as exit_:
        main(["--dataset", "x.jsonl", "--use_cpu", "true", "--bf16", "false"])
    assert exit_.value.code == 130
    said = "Stopped. With `--resume_from_checkpoint auto` it goes on from the newest checkpoint.\n"
    assert capsys.readouterr().err == said


def test_an_unknown_setting_of_a_recipe_is_told(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("dataset: x\nblok_size: 8\n")
    with pytest.raises(SystemExit):
        main([str(recipe), "--use_cpu", "true", "--bf16", "false"])
    assert "blok_size" in capsys.readouterr().err


def test_what_the_documentation_shows_runs(tmp_path, monkeypatch):
    page = ROOT / "docs" / "training.md"
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for command in re.findall(r"examples/recipes/\w+\.yaml", text):
        assert ROOT / command in RECIPES
    (code,) = [each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "greetings" in each]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page.name, "exec"), {})
    assert (tmp_path / "build" / "greetings" / "model.safetensors").exists()


def test_each_setting_and_default_of_the_documentation_is_the_configs():
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    table = text[text.index("| setting |") : text.index("The loss is divided by N")]
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


# Files.


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n', r":3: malformed JSON: Expecting ',' delimiter"),
        ('{"text": "a"}\n[1, 2]\n', r":2: each line must be a JSON object, got '[1, 2]'"),
        ("", ": there is no example in this file."),
        ('{"text": "a"}\n{"text": "\udcff"}\n', ":2: not UTF-8: 'utf-8' codec can't decode byte 0xff in position 10"),
    ],
)
def test_a_malformed_line_is_told_by_file_and_number(tmp_path, text, message, streaming):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(f"{path}{message}")):
        load(str(path), streaming=streaming)


def test_an_empty_list_and_a_missing_model_are_told_by_name(tmp_path, chats, capsys):
    path = tmp_path / "data.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=re.escape(f"{path}: there is no example in this file.")):
        load(str(path))
    with pytest.raises(SystemExit):
        main(
            ["--dataset", chats, "--model_name_or_path", str(tmp_path / "no"), "--use_cpu", "true", "--bf16", "false"]
        )
    assert f"Error: There is no checkpoint folder '{tmp_path / 'no'}'." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", " "])
def test_examples_without_a_name_are_refused(name):
    with pytest.raises(ValueError, match=f"Examples are a file, a folder or a Hub id, got '{name}'"):
        load(name)


def test_damaged_files_are_told_by_name(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(ValueError, match=re.escape(f"{path}: cannot be read as parquet")):
        load(str(path))


def test_files_of_each_kind_hold_the_same_examples(tmp_path):
    rows = [{"text": "a"}, {"text": "b"}]
    for kind in ("jsonl", "json", "parquet"):
        path = tmp_path / f"data.{kind}"
        data = Dataset.from_list(rows)
        data.to_parquet(path) if kind == "parquet" else data.to_json(path)
        assert list(load(str(path))) == rows
        assert list(load(str(path), streaming=True)) == rows
