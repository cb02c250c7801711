"""Everything that README.md, the guides and the model cards show: code runs, commands run, links and files are there,
the paper index names what exists, errors are those of the code, pages stay few and short.

Blocks run in a folder of their own that has what they name: the Hub ids as tiny local checkpoints, wedlm-nano, data. A
fence with a title, as in `sh title="needs several GPUs"`, says what its block takes; only options and syntax of such a
block are checked. A `text` fence right behind a block is what it prints.

The slow suite also runs what names a real model on the real one, as `make real` makes them: SmolLM2-135M-Instruct with
the adapter of examples/smollm2, and the WeDLM model of examples/real-wedlm.
"""

import ast
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import smollm2
import torch
import typer
from accelerate.commands.launch import launch_command_parser
from peft import LoraConfig, get_peft_model
from tiny import LINES, script, stock_twin, tiny_model, tiny_tokenizer
from torch.distributed.run import get_args_parser
from transformers import AutoTokenizer
from typer.main import get_command
from typer.testing import CliRunner

import wedlm_hf
from wedlm_hf import WeDLMForCausalLM, add_mask_adapter, cli, save_mask_adapter
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_model, load_tokenizer
from wedlm_hf.eval.prompts import read_tasks
from wedlm_hf.generation import WeDLMGenerationSettings
from wedlm_hf.generation.settings import WINDOW_SETTINGS

ROOT = Path(__file__).parents[1]
CARD = "examples/wedlm-nano/README.md"
DOCS, CARDS = sorted((ROOT / "docs").rglob("*.md")), sorted((ROOT / "examples").glob("*/README.md"))
PAGES = [*(page.relative_to(ROOT).as_posix() for page in (*DOCS, *CARDS)), "CONTRIBUTING.md", "README.md"]
RESULTS = ROOT / "examples" / "wedlm-nano" / "results"

# Added to long commands, so that they take seconds: later options win. A random model writes no prompts.
SHORTER = {
    "examples/wedlm-nano/train.py": "--max-steps 2 --batch-size 2",
    "examples/new-task/train.py": "--steps 2 --count 6 --examples 24 --old-examples 12",
    "examples/paper-findings/run.py": "--steps 2 --base-steps 2 --prompts-per-task 2",
    "examples/paper-findings/trends.py": "--count 1 --windows 6 --thresholds 0.8 --penalties 0 --max-new-tokens 8",
    "wedlm report": "--count 1 --repeats 1 --threads 1 --windows 6 --max-new-tokens 8",
    "wedlm adapt": "--minutes 0.05 --rank 2 --head-width 8 --device cpu --prompts examples/wedlm-nano/tasks.jsonl",
    "wedlm generate": "--repeats 1 --max-new-tokens 16",
    "wedlm train": "--max_steps 1 --use_cpu true --bf16 false --max_length 256 --gradient_accumulation_steps 1 "
    "--eval_decoding_samples 1 --eval_decoding_tokens 4 --chat_template_path chatml",
    "wedlm_hf.eval": "--limit 1",
}
SLOW = "max_steps=100"  # what makes a Python block slow
# The real models, as pages name them.
REAL_ID, REAL_FILE, REAL_WEDLM = "HuggingFaceTB/SmolLM2-135M-Instruct", "build/smollm2", "build/real-wedlm"
ELSEWHERE = {"cd", "git", "hf", "pip", "sbatch", "vllm"}  # programs that no test calls


def text_of(*path: str | Path) -> str:
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


@cache
def fences(page: str) -> list[tuple[str, str, str, str]]:
    """The code blocks of a page: language, title, content, and what the page says that it prints, or nothing."""
    fence = r"^```(\w*)([^\n]*)\n(.*?)^```$(?=(?:\n\n```text\n(.*?)^```$)?)"
    return re.findall(fence, text_of(page), flags=re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language that have no title."""
    return [content for name, title, content, _ in fences(page) if (name, title.strip()) == (language, "")]


def kinds_of(title: str, block: str) -> set[str]:
    """`titled`, or else to be `run`; and `real`, if it names the real model and no title keeps it from being run."""
    is_kept = re.search("trains for|takes |runs until|several GPUs|account", title)
    is_made = REAL_FILE in block or REAL_WEDLM in block
    is_real = not is_kept and (REAL_ID in block or is_made)
    is_run = not title and not is_made
    return {name for name, holds in (("titled", title), ("run", is_run), ("real", is_real)) if holds}


def cases(kind: str, *languages: str) -> Any:
    """Parametrizes a test with all blocks of a kind."""
    found = [
        pytest.param(page, block, id=f"{page.removesuffix('.md').replace('/', '-')}-{index}", marks=marks)
        for page in PAGES
        for index, (name, title, block, _) in enumerate(fences(page))
        for marks in [[pytest.mark.slow] if name == "python" and SLOW in block else []]
        if name in languages and kind in kinds_of(title.strip(), block)
    ]
    return pytest.mark.parametrize(("page", "block"), found)


def check_printed(page: str, block: str, printed: str) -> None:
    """Compares with what the page shows: "…" is anything, and how many tokens a forward gives depends on times."""
    (shown,) = {shown for _, _, content, shown in fences(page) if content == block}
    per_forward = r"[\d.]+(?= tokens per forward)"
    for number in re.findall(per_forward, printed if shown else ""):
        assert float(number) > 1
    parts = re.sub(per_forward, "…", shown).split("…")
    pattern = r"\s+".join(r".*".join(map(re.escape, parts)).replace(r"\ ", " ").replace("\\\n", "\n").split())
    assert re.search(pattern, printed, flags=re.DOTALL), (shown, printed)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with checkpoints under the names that the pages use."""
    folder, twin = tmp_path_factory.mktemp("models"), tiny_model("qwen2.5")
    for name, model in {
        "Qwen/Qwen3-0.6B": stock_twin(tiny_model()), REAL_ID: stock_twin(twin), "tencent/WeDLM-8B-Instruct": twin,
        "my-model": twin, "my-fine-tune": tiny_model("qwen2.5", seed=1),
    }.items():  # fmt: skip
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    for loader in (WeDLMForCausalLM, AutoTokenizer):
        loader.from_pretrained(NANO).save_pretrained(folder / "my-wedlm")
    lora = LoraConfig(target_modules=["q_proj"])
    get_peft_model(tiny_model("qwen2.5"), lora).save_pretrained(folder / "my-task-lora")
    add_mask_adapter(twin, MaskAdapterSettings(rank=2, head_width=8))
    save_mask_adapter(twin, folder / "my-adapter")
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch, models, page, block):
    """A folder with what a block names and does not make itself, as the current one."""
    shutil.copytree(NANO, tmp_path / "examples" / "wedlm-nano")
    folders = [f"examples/{name}" for name in ("recipes", "distributed", "wedlm-nano-hybrid")]
    for name in ("README.md", CARD, "docs/measure.md", *folders):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, tmp_path / name)
    own = [f"my-{name}" for name in ("task-lora", "model", "fine-tune", "adapter", "wedlm", "chat")]
    for name in ("Qwen", "HuggingFaceTB", "tencent", *own):
        if not re.search(rf"(adapt|convert) \S+ {name}|--output_dir {name}", block):
            shutil.copytree(NANO if name == "my-chat" else models / name, tmp_path / name)
    (chat,) = blocks("README.md", "json")
    (tmp_path / "chats.jsonl").write_text(chat * 20, encoding="utf-8")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES * 4))
    prompts = [f"Count from {first} to {first + 4} by 1." for first in range(1, 13)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@cases("run", "python")
def test_python_blocks_run(workplace, capsys, page, block):
    code = block.replace("300_000", "30")  # takes less time
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    if REAL_ID not in code:
        check_printed(page, block, capsys.readouterr().out)


@pytest.fixture(scope="module")
def real_model(tmp_path_factory) -> Path:
    """The real model, dequantized, as a folder of safetensors."""
    try:
        file = smollm2.fetch(ROOT / smollm2.FOLDER)
    except OSError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("real")
    load_model(str(file), dtype=torch.float32).save_pretrained(folder)
    load_tokenizer(str(file)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def real_wedlm(tmp_path_factory, real_model) -> Path:
    """The whole model of the published LoRA, in a folder as the examples make it."""
    folder = tmp_path_factory.mktemp("real-wedlm")
    script("examples/real-wedlm/train.py").whole_model("wedlm", ROOT / "examples/real-wedlm/wedlm", folder)
    return folder


@pytest.fixture
def real_workplace(workplace, real_model, real_wedlm):
    """As `workplace`, with the real models under their names, and the adapter as the one that a reader has trained."""
    here = {REAL_ID: real_model, REAL_FILE: ROOT / smollm2.FOLDER, REAL_WEDLM: real_wedlm}
    here["examples/real-wedlm"] = ROOT / "examples/real-wedlm"
    for name, source in (here | dict.fromkeys(["my-adapter", "examples/smollm2"], smollm2.ADAPTER)).items():
        shutil.rmtree(workplace / name, ignore_errors=True)
        (workplace / name).parent.mkdir(parents=True, exist_ok=True)
        (workplace / name).symlink_to(source)
    return workplace


@pytest.mark.slow
@cases("real", "python")
def test_python_blocks_run_on_the_real_model(real_workplace, capsys, page, block):
    exec(compile(block, page, "exec"), {"__name__": "__main__"})
    check_printed(page, block, capsys.readouterr().out)


PRINTED: dict[str, str] = {}  # by the commands of several pages


@pytest.mark.slow
@cases("real", "sh")
def test_shell_blocks_run_on_the_real_model(real_workplace, monkeypatch, page, block):
    printed = ""
    for line in commands(block):
        words = shlex.split(line)
        if words[:1] == ["wedlm"] and words[1] != "adapt":  # trained already
            if line not in PRINTED:
                PRINTED[line] = run(words, "", monkeypatch, SHORTER if words[1] == "report" else {})
            printed += PRINTED[line]
    check_printed(page, block, printed)


@cases("titled", "python")
def test_python_blocks_that_need_more_are_python(page, block):
    compile(block, page, "exec")


def commands(block: str) -> list[str]:
    """The commands of a block, a line each, without comments; of a console, those behind its prompt."""
    lines = block.replace("\\\n", " ").splitlines()
    lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ") or "$ " not in block]
    return [re.split(r"\s#\s|^#", line)[0] for line in lines]


@pytest.mark.slow
@cases("run", "sh", "console")
def test_shell_blocks_run(workplace, monkeypatch, page, block):
    for line in commands(block):
        for command in line.split("&&"):
            stdin = ""
            for stage in command.split("|"):
                if stage.strip():
                    stdin = run(shlex.split(stage), stdin, monkeypatch)


def run(words: list[str], stdin: str, monkeypatch: pytest.MonkeyPatch, shorter: dict[str, str] = SHORTER) -> str:
    """Run one command in this process and return its output; those that set things up must only exist."""
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert {argument for argument in arguments if "=" not in argument} <= set(targets)
        return ""
    if program == "echo":
        return f"{' '.join(arguments)}\n"
    if program in ELSEWHERE:
        return ""
    assert program in ("wedlm", "python"), f"no test knows how to run {shlex.join(words)}"
    if program == "wedlm":
        app, module = cli.app, f"wedlm {arguments[0]}"
    else:
        module, *arguments = arguments[1:] if arguments[0] == "-m" else arguments
    arguments += shorter.get(module, "").split()
    if module == "wedlm_hf.eval":
        monkeypatch.setattr(sys, "argv", ["eval", *arguments])
        import_module("wedlm_hf.eval.harness.run").main()
        return ""
    if program == "python":
        found, app = script(module), typer.Typer()
        found.VOCABULARY_SAMPLES_PER_TASK = 20
        app.command()(found.main)
    if "build/wedlm-nano" in arguments and not Path("build/wedlm-nano").exists() and program == "wedlm":
        shutil.copytree("examples/wedlm-nano", "build/wedlm-nano")
    result = CliRunner().invoke(app, arguments, input=stdin)
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result.stdout


@cases("titled", "sh")
def test_commands_that_need_more_have_the_options_that_are_shown(page, block, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in commands(block):
        words = shlex.split(line)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
        if words and words[0] not in ELSEWHERE:
            parse(words)


def parse(words: list[str]) -> None:
    """Reads the options of a command as the command does, and runs nothing."""
    program, *arguments = words
    if program in ("torchrun", "accelerate"):
        parser = get_args_parser() if program == "torchrun" else launch_command_parser()
        launch = parser.parse_args(arguments[program == "accelerate" :])
        return parse(["python", "-m", launch.training_script, *launch.training_script_args])
    if program == "python":
        module, *arguments = arguments[1:] if arguments[0] == "-m" else arguments
    else:
        assert program == "wedlm", words
        module, *arguments = arguments
    if module in ("wedlm_hf.training.train", "train"):
        import_module("wedlm_hf.training.train")._parse(
            [*arguments, *("" if "--dataset" in arguments else ("--dataset", "chats.jsonl")), "--bf16", "false"]
        )
    elif module.startswith("-"):
        assert any(module in option.opts for option in get_command(cli.app).params), module
    elif program == "wedlm":
        get_command(cli.app).commands[module].make_context(module, arguments)
    else:
        place = "/".join(module.split(".")[1:]) if module.startswith("wedlm_hf") else module.removesuffix(".py")
        file = ROOT / f"{place}.py"
        source = (file if file.exists() else ROOT / place / "harness" / "run.py").read_text(encoding="utf-8")
        known = HARNESS_OPTIONS if module == "wedlm_hf.eval" else set()
        for option in {word for word in arguments if word.startswith("--")} - known:
            assert re.search(rf'"{option}"|\b{option[2:].replace("-", "_")}:', source), option
    return None


HARNESS_OPTIONS = {"--model", "--model_args", "--batch_size", "--confirm_run_unsafe_code", "--output_path"}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), [("README.md", "")], ids=["README"])
def test_a_release_is_installed_and_runs_the_first_examples(workplace, tmp_path_factory, page, block):
    """sdist, the wheel made from it, a clean virtual environment; torch and the others are borrowed from this one."""
    folder = tmp_path_factory.mktemp("release")
    skipped = shutil.ignore_patterns(".venv*", ".git", "build", "dist", "__pycache__", "*.egg-info", ".*_cache")
    source = Path(shutil.copytree(ROOT, folder / "source", ignore=skipped))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*command: str | Path) -> str:
        result = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
        return result.stdout

    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    shutil.unpack_archive(sdist, folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    for part in ("tests/test_readme.py", "examples/recipes/sft.yaml", "docs/hooks.py", "Makefile"):
        assert (unpacked / part).exists(), part

    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    purelib = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(purelib, "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]))
    where = Path(call(python, "-c", "import wedlm_hf; print(wedlm_hf.__file__)").strip())
    assert where.is_relative_to(folder / "venv")
    for code in blocks("docs/decode.md", "python"):
        assert call(python, "-c", code)
    answer = call(folder / "venv" / "bin" / "wedlm", "generate", "Count from 5 to 20 by 5.")
    assert "5, 10, 15, 20" in answer


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = text_of(page)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target
    assert not re.search(r"install [\"']?wedlm-hf", text)  # no index has it


def test_the_file_tree_names_files_that_exist():
    (tree,) = (block for block in blocks("CONTRIBUTING.md", "") if "\nmodeling_wedlm/ " in block)
    folder = ROOT
    for line in tree.splitlines():
        for name in re.findall(r"[\w-]+/(?=[\s,]|$)", line) if line[0] != " " else []:
            folder = ROOT / name if (ROOT / name).exists() else folder
            assert (ROOT / name).exists() or (folder / name).exists(), name
        for name in re.findall(r"\w+\.py", line):
            assert (folder / name).exists(), name
    listed = set(re.findall(r"\w+\.py", tree))
    for folder in ("modeling_wedlm", "generation", "adapters"):
        assert {path.name for path in (ROOT / folder).glob("*.py") if path.stem[0] != "_"} <= listed


def test_the_card_of_nano_shows_the_stored_report_with_every_task():
    report, card = map(text_of, (RESULTS / "report.md", CARD))
    (table,) = re.findall(r"^\| decoder .*\n(?:\|.*\n)+", report, flags=re.MULTILINE)
    assert table in card
    stored = json.loads((NANO / "generation_config.json").read_text())
    window, threshold, penalty = (stored[name] for name in WINDOW_SETTINGS)
    assert f"W = {window}, τ = {threshold:g}, λ = {penalty:g}." in report
    assert f"Settings: window {window}, τ = {threshold:g}, λ = {penalty:g}," in card
    rows = re.findall(r"^\| (\w+) \| `", card, flags=re.MULTILINE)
    assert rows == list(dict.fromkeys(prompt.task for prompt in read_tasks((ROOT / CARD).parent)))


def test_the_first_table_repeats_the_measurements_of_the_examples():
    readme, report = text_of("README.md"), text_of(RESULTS / "report.md")
    real = text_of("examples/smollm2/README.md") + text_of("examples/real-wedlm/README.md")
    row = re.findall(r"^\| wedlm\+exact +\| all +\|(.*)\|$", report, flags=re.MULTILINE)[0]
    _, per_forward, _, _, speed, _ = (cell.strip() for cell in row.split("|"))
    assert f"| {per_forward} | {speed.split()[0]}× |" in readme
    rows = re.findall(r"^\| (?:\[SmolLM2|the same).*?\| ([\d.]+) \| ([\d.]+×) \|", readme, flags=re.MULTILINE)
    assert len(rows) == 3
    for numbers in rows:
        assert re.search(rf"^\|.*\| {re.escape(' | '.join(numbers))} \|", real, flags=re.MULTILINE), numbers


def test_the_readme_lists_every_extra():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    text = text_of("README.md")
    listed = re.findall(r"`(\w+)`", text.partition("The extras: ")[2].partition("\n\n")[0])
    assert sorted(listed) == sorted(setup["options.extras_require"])


INDEX = text_of("docs", "algorithm.md").partition("## The paper in the code")[2]
HEAD, *ENTRIES = (
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in INDEX.partition("\n## ")[0].splitlines()
    if line.startswith("| ")
)


def names_in(file: Path) -> set[str]:
    """Functions and classes of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry[0])
def test_code_and_test_of_each_entry_exist(entry):
    assert len(entry) == len(HEAD) == 4 and len(ENTRIES) > 10
    for cell, folder in ((entry[2], r"\w+(/\w+)*"), (entry[3], r"tests(/\w+)*")):
        references = re.findall(r"`([^`]+)`", cell)
        assert references, "an entry needs code and a test"
        for reference in references:
            assert re.fullmatch(rf"{folder}/\w+\.py::\w+(\.\w+)?", reference), reference
            path, name = reference.split("::")
            assert (ROOT / path).is_file() and name in names_in(ROOT / path), reference


def test_pages_are_few_and_short():
    assert len(DOCS) <= 12
    guides = [page for page in DOCS if page.stem not in ("algorithm", "glossary", "results")]
    generated = re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", flags=re.DOTALL)
    texts = [generated.sub("", page.read_text(encoding="utf-8")) for page in guides]
    assert len([word for text in texts for word in text.split() if re.search(r"\w", word)]) <= 9750


def test_the_words_that_people_search_for_are_titles():
    titles = [
        line.lower() for page in DOCS for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "#"
    ]
    for word in ("lossless", "acceptance rate", "speculative decoding", "prefix cacheability", "wedlm-8b-instruct"):
        assert any(word in title for title in titles), word
    glossary = text_of("docs", "glossary.md")
    assert glossary.count("\n### ") >= 25 and all(
        "glossary.md" in text_of(page) for page in ("docs/measure.md", "docs/results.md", CARD)
    )


def test_sections_of_the_algorithm_that_the_code_cites_are_there():
    titles = re.findall(r"^## (.*)$", text_of("docs", "algorithm.md"), flags=re.MULTILINE)
    files = [file for folder in ("generation", "adapters", "modeling_wedlm", "serving", "training", "tests")
             for file in (ROOT / folder).rglob("*.py")]  # fmt: skip
    cited = {
        each for file in files for each in re.findall(r"algorithm\.md#([\w-]+)", file.read_text(encoding="utf-8"))
    }
    assert cited and cited <= {title.lower().replace(" ", "-") for title in titles}


def messages() -> list[re.Pattern[str]]:
    """Every text literal of the package, with what is filled in at run time as a wildcard."""
    patterns = []
    for folder in ("generation", "modeling_wedlm", "adapters", "training"):
        for file in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    patterns += map(pattern_of, node.args)
    return [re.compile(pattern) for pattern in patterns if len(pattern.replace(".*", "")) > 30]


def pattern_of(node: ast.expr) -> str:
    """The regular expression of an expression's text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(".*" if isinstance(part, ast.FormattedValue) else pattern_of(part) for part in parts)


def test_every_message_on_the_page_of_errors_is_in_the_code():
    text = text_of("docs", "errors.md")
    shown, known = re.findall(r"^```text\n(.*)\n```$", text, flags=re.MULTILINE), messages()
    assert len(shown) > 12
    for message in shown:
        assert any(pattern.fullmatch(message) for pattern in known), message


def test_the_signature_shown_has_every_setting_with_its_default():
    text = text_of("docs", "reference.md")
    signature = text.partition("<!-- signature -->")[2].partition("<!-- /")[0]
    shown = re.findall(r"^    (\w+)=([^,]+),", signature, re.MULTILINE)
    settings = {field.name: repr(field.default).replace("'", '"') for field in fields(WeDLMGenerationSettings)}
    assert dict(shown) == settings


def test_the_drawings_are_what_the_code_draws(tmp_path, monkeypatch):
    draw = script("docs/figures/draw.py")
    monkeypatch.setattr(draw, "HERE", tmp_path)
    for drawing in draw.DRAWINGS:
        drawing()
    drawn = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.glob("*.svg")}
    assert len(drawn) == len(draw.DRAWINGS)
    assert drawn == {name: (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8") for name in drawn}


def test_the_newest_entry_of_the_changelog_is_of_this_version():
    text = text_of("CHANGELOG.md")
    version, state = re.findall(r"^## \[(.*)\] - (.*)$", text, flags=re.MULTILINE)[0]
    assert version == wedlm_hf.__version__
    assert state == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", state)
