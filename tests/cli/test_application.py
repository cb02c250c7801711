"""What all commands have in common: help with examples, completion, errors, exit codes, output for machines."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer
from peft import LoraConfig, get_peft_model
from tiny import MASK, stock_twin, tiny_model, write_checkpoint, write_stock_checkpoint
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import wedlm_cli as program
from wedlm_hf import __version__, add_mask_adapter, cli, save_mask_adapter
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.checkpoints.loading import load_model
from wedlm_hf.cli import application, options
from wedlm_hf.generation.settings import STRATEGIES

COMMANDS = typer.main.get_command(cli.app).commands


def invoke(*words, **keywords):
    return CliRunner().invoke(cli.app, list(map(str, words)), **keywords)


def run(*words, stdout=subprocess.PIPE, **environment):
    """Runs the program itself, in a process of its own; output as bytes."""
    command, streams = [Path(sys.executable).with_name("wedlm"), *words], {"stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.run(command, stdin=subprocess.DEVNULL, **streams, env=os.environ | environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint `model`, a stock one `stock`, `prompts.txt`, and what cannot be used."""
    folder = tmp_path_factory.mktemp("commands")
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    write_checkpoint(folder / "model", model)
    write_stock_checkpoint(folder / "stock")
    write_checkpoint(folder / "base of adapter", tiny_model(seed=1))
    (folder / "prompts.txt").write_text("1, 2, 3\n4, 5\n7, 8, 9\n3, 1")
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    (folder / "link.txt").symlink_to("prompts.txt")
    chat = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (folder / "empty").mkdir()
    (folder / "empty" / "README.md").write_text("---\nlicense: mit\n---\n")
    for name in ("model", "stock"):
        weights = shutil.copytree(folder / name, folder / f"damaged-{name}") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1)).save_pretrained(folder / "gpt2")
    (folder / "truncated.gguf").write_bytes(b"GGUF\3\0\0\0")
    shutil.copy(folder / "prompts.txt", folder / "model.gguf")
    lora = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    lora.peft_config["default"].base_model_name_or_path = str(folder / "model")
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    lora.save_pretrained(folder / "lora")
    wide = stock_twin(tiny_model(hidden_size=64))
    for name, base in {"adapter": tiny_model(seed=1), "mask": stock_twin(tiny_model()), "wide": wide}.items():
        base.config.name_or_path = str(folder / "stock") if name != "adapter" else ""
        add_mask_adapter(base, MaskAdapterSettings(rank=2))
        save_mask_adapter(base, folder / name)
    for name, copy, base, other in (("mask", "moved", "stock", "gone.gguf"), ("lora", "stock-lora", "model", "stock")):
        config = shutil.copytree(folder / name, folder / copy) / "adapter_config.json"
        config.write_text(config.read_text().replace(str(folder / base), other))
    return folder


# --- help and completion ------------------------------------------------------------------------------------------


def examples_of(command):
    title, *lines = command.epilog.split("\n\n")
    assert title == ("Examples:" if len(lines) > 1 else "Example:")
    return [part.strip() for line in lines for part in line.split(";")]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_the_command_understands(name):
    command = COMMANDS[name]
    shown = " ".join(invoke(name, "--help", env={"COLUMNS": "200"}).stdout.split()) if name != "train" else None
    for example in examples_of(command):
        assert shown is None or example.replace("\\[", "[") in shown
        words = shlex.split(example.partition(" > ")[0].rpartition(" | ")[2])
        assert words[:2] == ["wedlm", name]
        command.make_context(name, words[2:])  # raises for an option that is not there


@pytest.mark.parametrize(("columns", "term"), [("0", "xterm"), ("12", "dumb")])
def test_help_is_whole_on_a_narrow_and_on_a_dumb_terminal_and_one_without_greek_letters(columns, term):
    result = run("generate", "--help", COLUMNS=columns, TERM=term, PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, b"")
    shown = "".join(result.stdout.decode("ascii").split())
    assert "\x1b" not in shown and shown.count("my-wedlm") == 1


HELP = """
import sys
import wedlm_cli
from wedlm_hf.cli import app
from typer.testing import CliRunner
for command in ([], ["generate"], ["convert"], ["adapt"], ["report"], ["generate", "--typo"]):
    result = CliRunner().invoke(app, [*command, "--help"][:2])
    assert "Usage" in result.stdout or "--help" in result.stderr, result.output
assert not {"torch", "transformers", "peft"} & set(sys.modules)
"""


def test_help_and_wrong_words_need_neither_torch_nor_transformers():
    result = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_shell_completes_commands_options_and_values():
    for begun, offered in {
        "wedlm rep": {"report"}, "wedlm generate --verif": {"--verification"},
        "wedlm generate --strategy ": set(STRATEGIES), "wedlm generate --dtype b": {"bfloat16"},
    }.items():  # fmt: skip
        words = {"COMP_WORDS": begun, "COMP_CWORD": str(begun.count(" ")), "_WEDLM_COMPLETE": "complete_bash"}
        assert set(invoke(env=words, prog_name="wedlm").stdout.split()) == offered


# --- what is wrong ------------------------------------------------------------------------------------------------


LOADING = {  # words of each command that loads a checkpoint
    "generate": "hi --model CHECKPOINT",
    "serve": "CHECKPOINT --port 0",
    "report": "CHECKPOINT --file prompts.txt --output OUT",
    "convert": "CHECKPOINT OUT",
    "train": "--model_name_or_path CHECKPOINT --dataset chats.jsonl --output_dir OUT --use_cpu true --bf16 false",
    "adapt": "CHECKPOINT OUT --tokens 9",
}


def loading(command, checkpoint):
    return f"{command} {LOADING[command].replace('CHECKPOINT', checkpoint)}"


STOCK = "'stock' is a model of type 'qwen3', not a WeDLM checkpoint: pass its mask adapter (`--adapter`, in Python "
NO_MODEL = "it holds an adapter, not a model; a LoRA is merged first (`wedlm merge`, or `merge_and_unload` of PEFT)."
OTHER_BASE = "The mask adapter belongs to another base than this model ("
OTHER_MODEL, MAKES = "was trained for another model of this shape", ("convert", "train", "adapt")
TRAIN = "train --dataset x.jsonl --model_name_or_path m --use_cpu true --bf16 false "
WRONG = {
    "--nope": "No such option",
    "nope": "No such command 'nope'",
    "generate --window-sise 3": "--window-size",
    "generate --window-size x": "Invalid value for '--window-size'",
    "convert": "Missing argument",
    "serve model --model stock": "The model is named twice",
    "generate hi --window-size 0": "`window_size` must be an integer of at least 1, got 0.",
    "generate hi --strategy beam": "'--strategy': 'beam' is not one of 'wedlm', 'block', 'ar'.",
    "generate hi --temperature 0": "`--temperature` must be above 0 and finite, got 0.0: greedy is the default.",
    "serve m --temperature nan": "`--temperature` must be above 0 and finite, got nan: greedy is the default.",
    "generate hi --max-new-tokens 0": "`--max-new-tokens` must be at least 1, got 0.",
    "generate hi --set top_k=abc": "`top_k` has to be a strictly positive integer, but is abc",
    "report --output out --set top_k=abc": "`top_k` has to be a strictly positive integer, but is abc",
    "generate ' '": "A prompt must not be empty.",
    "generate hi --model none.gguf": "There is no GGUF file 'none.gguf'.",
    "generate hi --model prompts.txt": "The checkpoint must be a folder or a Hub id, got the file 'prompts.txt'.",
    "generate hi --model model.gguf": "model.gguf' is not a GGUF file, or damaged or truncated: ",
    "generate hi --model model.gguf --window-size 4": "'model.gguf' is a GGUF file, not a WeDLM checkpoint: pass its ",
    "generate hi --model stock --verification exact": STOCK,
    "generate hi --model stock --strategy block": STOCK,
    "generate hi --model stock-lora --trace x.html": STOCK,
    "generate hi --model moved": "The base of the adapter 'moved': There is no GGUF file 'gone.gguf'; `--model BASE",
    "generate hi --model stock --adapter stock-lora --set slot_cost=0.1": STOCK,
    "generate hi --model stock --adapter stock": "There is no adapter in 'stock': it has no adapter_config.json.",
    "generate hi --model stock --adapter prompts.txt": "The adapter must be a folder or a Hub id, got the file",
    "generate hi --model stock --adapter wide": f"{OTHER_BASE}hidden_size: 64, not 32",
    "report stock --file prompts.txt --output out": STOCK,
    "merge stock stock-lora out": STOCK,
    "merge stock mask out": "is a mask adapter, which cannot be merged",
    "convert lora out": NO_MODEL,
    "adapt mask out --tokens 9": NO_MODEL,
    "generate hi --set window": "`--set` takes NAME=VALUE, got 'window'.",
    "generate hi --set windw_size=3": "`--set windw_size=…`: `generate` has no setting of this name.",
    "generate hi --set top_k=3 --set top-k=4": "`--set top_k=…` was given twice.",
    "generate hi --set pad_token_id=x": "`--set pad_token_id=…` must be a token id or a JSON list of them, got 'x'.",
    "generate hi --set suppress_tokens=5": "`suppress_tokens=5`: 'int' object is not iterable",
    "generate hi --set top_p=95": "`--set top_p=…` must be at most 1, got 95.",
    "generate hi --set do_sample=yes": "`--set do_sample=…` must be true or false, got 'yes'.",
    "generate hi --strategy ar --set max_time=10s": "`max_time='10s'`: ",
    "generate hi --strategy ar --set max_matching_ngram_size=3": "needs `--set prompt_lookup_num_tokens=…`, too.",
    "generate hi --set use_cache=false": "`use_cache=False` is not supported with `strategy='wedlm'`",
    "generate hi --set do_sample=false --set top_k=5": "`do_sample` is not set to `True`. However, `top_k` is set",
    "generate hi --set window_size=3": "this setting has an option of its own, `--window-size`.",
    "generate \udcff": "A prompt must be UTF-8 text, got '\\udcff'.",
    "generate --file \udcff": "'\\udcff'",
    "generate --file -": "There is no prompt in standard input.",
    "generate --file latin.txt": "The text of 'latin.txt' is not UTF-8: ",
    **{  # before a model is looked for
        f"generate hi --model ./missing {how} --set slot_cost=0.1": f"`slot_cost=0.1` {said}"
        for how, said in {
            "--strategy ar": "has no meaning with `strategy='ar'`: pass `strategy='wedlm'` too.",
            "--strategy block": "goes with `verification='exact'`",
            "--verification none": "goes with `verification='exact'`",
        }.items()
    },
    "generate --trace x.html --strategy ar hi": "`--strategy` must be wedlm or block, got 'ar'.",
    "generate --trace prompts.txt --trace ./link.txt hi": "'prompts.txt' is named twice",
    "generate --file prompts.txt --trace prompts.txt": "'prompts.txt' is named twice",
    "generate --trace . hi": "'.' is a folder; a file is to be written.",
    "generate --trace prompts.txt/x hi": "The folder 'prompts.txt' cannot be written to",
    "report --output out --decoders ar,beam": "Unknown decoder 'beam': choose among ar, block, wedlm",
    "report --output out --windows 4,wide": "'--windows': numbers with commas between them are needed, got '4,wide'.",
    "report --output out --temperature 0": "`--temperature` must be above 0 and finite, got 0.0: greedy is the defaul",
    "report --output out --set window_size=4": "`--set window_size` is decided by the report: leave it out.",
    "report --output out --set repetition_penaltyy=1.0": "repetition_penaltyy",
    "report --output /proc/out": "The folder '/proc/out' cannot be written to",
    "report --output prompts.txt": "The folder 'prompts.txt' cannot be written to",
    "report --output out --metric nowhere/at-all": "There is no metric 'nowhere/at-all'",
    "report --output out --save-settings some/model": "`--save-settings` needs a checkpoint folder, got 'some/model'.",
    "report --output out some/model": "There is no folder 'some/model' that could bring prompts: name a file (--file)",
    "adapt stock out": "A budget is needed: `--minutes` of work, such as 60, or `--tokens` of answers.",
    "adapt stock out --minutes 1 --prompts no.txt": "No such file or directory",
    "train --dataset x --use_cpu true --bf16 false": "`model_name_or_path` is required: a folder or Hub id",
    TRAIN + "--model_name_or_path=": "The checkpoint must be a folder or a Hub id, got ''.",
    TRAIN + "--dataset no.jsonl --model_name_or_path model": "There is no file 'no.jsonl'.",
    TRAIN + "--dataset x.yml --model_name_or_path model": "There is no file 'x.yml', and files of examples end in .",
    TRAIN + "--dataset prompts.txt --model_name_or_path model": "A file of examples must end in .jsonl, .json, .parq",
    TRAIN + "--streaming true": "`streaming` needs `max_steps`",
    TRAIN + "--output_dir prompts.txt": "`output_dir` must be a folder",
    TRAIN + "--dataset=": "`dataset` must be a file, a folder or a Hub id, got an empty text.",
    TRAIN + "--eval_share 1": "`eval_share` must lie in [0, 1), got 1.0.",
    TRAIN + "--streaming true --max_steps 2 --eval_share 0.1": "`eval_share` must be 0 with `streaming`, got 0.1",
    TRAIN + "--warmup_steps -3": "`warmup_steps` must be at least 0, got -3.0.",
    TRAIN + "--seed -1": "`seed` must be an integer of at least 0, below 4294967296, got -1.",
    TRAIN + "--use_peft true --lora_r 0": "`lora_r` must be an integer of at least 1, got 0.",
    TRAIN + "--use_peft true --lora_dropout 1": "`lora_dropout` must be at least 0, below 1, got 1.0.",
    TRAIN
    + "--gradient_accumulation_steps 0": "`gradient_accumulation_steps` must be an integer of at least 1, got 0.",
    TRAIN + "--learning_rate fast": "argument --learning_rate/--learning-rate: invalid float value: 'fast'.",
    TRAIN + "--num_train_epochs 0": "Without `max_steps`, `num_train_epochs` must be more than 0, got 0.",
    TRAIN + "--blok_size 8": "Some specified arguments are not used by the HfArgumentParser: ['--blok_size', '8']",
    TRAIN + "--model_name_or_path ./no": "There is no checkpoint folder './no'.",
    **{
        loading(command, "damaged-model"): "'damaged-model' are damaged" for command in LOADING if command != "convert"
    },
    loading("convert", "damaged-stock"): "'damaged-stock' are damaged or truncated",
    **{loading("generate", name): name for name in ("./missing", "empty", "gpt2", "truncated.gguf")},
    **{f"{loading(command, 'model')} --adapter adapter": OTHER_MODEL for command in LOADING if command not in MAKES},
    "generate hi --adapter ./missing": "'./missing'",
    "generate hi --device abacus": "`--device abacus` is not available",
    "generate hi --dtype int8": "Invalid value for '--dtype'",
    "generate hi --threads 0": "`threads` must be at least 1, got 0.",
    f"generate hi --seed {2**70}": "Invalid value for '--seed'",
    "merge 'base of adapter' adapter out": "is a mask adapter, which cannot be merged",
    "merge model model out": "adapter_config.json",
}


@pytest.mark.parametrize(
    "words", WRONG, ids=lambda words: words.removeprefix(TRAIN)[:40].encode("ascii", "replace").decode()
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(folder, monkeypatch, tmp_path, words):
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    model = ["--model", "model"] if words.startswith("generate") and "--model" not in words else []
    result = invoke(*shlex.split(words.replace("OUT", str(tmp_path / "out"))), *model, input="")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    *progress, error = result.stderr.splitlines()
    assert error.startswith("Error: ") and WRONG[words] in error
    assert "Missing argument" not in error or error.endswith("`wedlm convert --help` says what there is.")
    assert not progress or words.startswith("train")  # it has read the dataset
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= ({"adapt.json", "_lock"} if words.startswith("adapt") else set())  # what the run was asked for


@pytest.mark.parametrize(("words", "needs", "extra"), [
    ("train", "Training needs accelerate, datasets, filelock, peft, trl", "train"),
    ("report --output out", "The report needs matplotlib", "eval"),
    ("adapt base out --tokens 9", "`wedlm adapt` needs accelerate, filelock, matplotlib, pandas", "train"),
])  # fmt: skip
def test_a_command_says_what_to_install_before_weights_are_read(monkeypatch, words, needs, extra):
    monkeypatch.setattr(options.LoadingOptions, "load", lambda *args: pytest.fail("weights were read"))
    for module in (application, program):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = invoke(*words.split())
    assert (result.exit_code, result.stderr.startswith(f"Error: {needs}")) == (2, True), result.stderr
    assert result.stderr.endswith(f": pip install '.[{extra}]' in the clone.\n")
    # And so does the program where its own packages are missing.
    monkeypatch.setattr(program.signal, "getsignal", lambda number: None)  # Ctrl-C stays what it is
    with pytest.raises(
        SystemExit, match=r"The command `wedlm` needs rich, typer: pip install '\.\[cli\]' in the clone"
    ):
        program.main()


def test_a_lora_without_peft_is_told_by_what_to_install_and_not_as_damaged(folder, monkeypatch):
    monkeypatch.delattr("peft.get_peft_model")  # the import fails; what transformers remembers of PEFT stays
    result = invoke("generate", "1, 2", "--model", folder / "lora")
    assert result.exit_code == 2
    assert result.stderr == "Error: A LoRA needs PEFT: pip install '.[peft]' in the clone.\n"


def test_adapters_are_served_on_their_bases_and_on_a_model(folder, monkeypatch):
    """A mask adapter on a model: test_a_trace_names_its_files_and_a_conversion_its_keys_as_json."""
    monkeypatch.chdir(folder)
    for given in ("lora", "mask", "model --adapter lora"):
        result = invoke("generate", "1, 2", "--model", *given.split(), "--max-new-tokens", 3, "--raw", "--no-compare")
        assert (result.exit_code, "Error" in result.stderr) == (0, False), result.stderr


def test_a_lora_is_written_into_a_checkpoint(folder, tmp_path):
    merged = load_adapted(folder / "lora")[0].state_dict()
    for words in ((folder / "model", folder / "lora"), ("--model", folder / "model", folder / "lora")):
        assert invoke("merge", *words, tmp_path / str(len(words))).exit_code == 0
        written = load_model(tmp_path / str(len(words))).state_dict()
        assert all(torch.equal(written[name], weight) for name, weight in merged.items())


def test_only_debug_shows_a_traceback_wherever_it_stands_and_an_unexpected_failure_is_one_line_and_code_1(monkeypatch):
    assert invoke("--version").stdout == f"{__version__}\n"
    assert invoke().exit_code == 0 and "generate" in invoke().stdout
    plain = invoke("generate", "--file", "missing.txt")
    assert (plain.exit_code, plain.stderr.count("\n")) == (2, 1)
    for words in (["generate", "--debug"], ["--debug", "generate"]):
        result = invoke(*words, "--file", "missing.txt")
        assert result.exit_code == 2
        assert result.stderr.startswith("Traceback") and result.stderr.endswith(plain.stderr)
    monkeypatch.setattr(options.LoadingOptions, "load", Mock(side_effect=RuntimeError("two\nlines.")))
    result = invoke("generate", "hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: RuntimeError: two lines. `--debug` shows where.\n"
    result = invoke("generate", "hi", "--debug")
    assert (result.exit_code, result.stderr.endswith("Error: RuntimeError: two lines.\n")) == (1, True)


def test_a_closed_pipe_ends_a_command_with_code_141_and_nothing_more():
    reader, writer = os.pipe()
    os.close(reader)
    result = run("generate", "--help", stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error():
    with open("/dev/full", "wb") as full:
        result = run("--version", stdout=full)
    assert (result.returncode, result.stderr.count(b"\n")) == (2, 1)
    assert b"No space left on device" in result.stderr


# --- output for machines ------------------------------------------------------------------------------------------


def results_of(*words, code=0):
    result = invoke(*words, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def test_a_trace_names_its_files_and_a_conversion_its_keys_as_json(folder, tmp_path):
    words = ("--model", folder / "stock", "--adapter", folder / "mask", "--file", tmp_path / "chats.jsonl")
    turns = [{"role": role, "content": "1, 2"} for role in ("user", "assistant", "user")]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    files = [str(tmp_path / name) for name in ("[b]/trace.json", "a.html")]
    short = ("--max-new-tokens", 4, "--repeats", 1, "--trace", files[0], "--trace", files[1])
    results = results_of("generate", *words, *short)
    assert results["files"] == files
    assert results["decoders"]["wedlm"]["new_tokens"] == 4
    kept, page = (Path(file).read_text() for file in files)
    assert json.loads(kept)["recordings"][0]["prompt"] == "1, 2\n1, 2\n1, 2"
    shown = page.split('<script id="trace" type="application/json">')[1].split("</script>")[0]
    assert json.loads(shown) == json.loads(kept)
    results = results_of("convert", folder / "stock", tmp_path / "out")
    assert results["output_dir"] == str(tmp_path / "out")
    assert isinstance(results["mask_token_id"], int)


def test_what_adapting_and_training_gave_is_printed_as_json(folder, tmp_path):
    pytest.importorskip("trl")
    base = write_checkpoint(tmp_path / "base", tiny_model(max_position_embeddings=96), suppress_tokens=[MASK])
    words = ("adapt", base, tmp_path / "adapter", "--tokens", 20, "--rank", 2, "--head-width", 0)
    results = results_of(*words, "--prompts", folder / "prompts.txt", "--device", "cpu")
    assert results["output_dir"] == str(tmp_path / "adapter") and results["answer_tokens"] >= 20
    assert [row[0] for row in results["table"]["rows"]] == ["ar", "ar+lookup", "wedlm+exact"]
    words = "--use_cpu true --bf16 false --max_steps 1 --max_length 64 --block_size 4 --logging_steps 1".split()
    words += ["-m", folder / "model", "--dataset", folder / "chats.jsonl"]
    words += ["--output_dir", tmp_path / "trained", "--save_strategy", "no", "--disable_tqdm", "true"]
    results = results_of("train", *words)
    assert (results["output_dir"], results["steps"]) == (str(tmp_path / "trained"), 1)
    assert results["weights_trained"] == results["weights"] > 0 and results["last"]["loss"] > 0


def test_numbers_that_are_not_finite_are_null(capsys):
    application.print_json({"a": float("nan"), "b": [1, float("inf")], 3: (True, None, "x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, None], "3": [True, None, "x"]}
