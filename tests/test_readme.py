"""Everything that README.md and the model card show: code blocks run, commands run, links and files are there.

Blocks run in a folder of their own that has what they name: `examples/wedlm-nano`, the Hub ids as tiny local
checkpoints, the pages with measured numbers.
"""

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import typer
from tiny import stock_twin, tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.eval.options import NANO
from wedlm_hf.eval.prompts import read_tasks
from wedlm_hf.eval.report.page import blocks_of, fill
from wedlm_hf.eval.sweep import FIELDS

ROOT = Path(__file__).parents[1]
CARD = "examples/wedlm-nano/README.md"
PAGES = ["README.md", CARD, "CONTRIBUTING.md"]
MEASURED = ["README.md", CARD]
RESULTS = ROOT / "examples" / "wedlm-nano" / "results"

# Added to long commands, so that they take seconds: later options win.
SHORTER = {
    "examples/wedlm-nano/train.py": ["--max-steps", "2", "--batch-size", "2"],
    "wedlm trace": "--repeats 1 --max-new-tokens 8".split(),
    "wedlm report": "--count 1 --sweep-count 1 --timed 1 --sweep-timed 1 --repeats 1 --threads 1 --windows 6 "
    "--thresholds 0.8 --penalties 0.1 --draft-thresholds 0.8 --batch-sizes 1 --max-new-tokens 8".split(),
}


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [content for name, content in fenced if name == language]


def cases(language: str, pages: list[str]) -> list:
    return [
        pytest.param(page, block, id=f"{Path(page).parent.name or 'root'}-{index}")
        for page in pages
        for index, block in enumerate(blocks(page, language))
    ]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with what the pages name, as the current one."""
    nano = tmp_path / "examples" / "wedlm-nano"
    shutil.copytree(NANO, nano, ignore=shutil.ignore_patterns("measured.jsonl"))  # of another request
    for page in [*MEASURED, "docs/evaluation.md"]:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / page, tmp_path / page)
    qwen, published = tmp_path / "Qwen" / "Qwen2.5-0.5B", tmp_path / "tencent" / "WeDLM-8B-Instruct"
    twin = tiny_model("qwen2.5")
    stock_twin(twin).save_pretrained(qwen)
    tiny_tokenizer().save_pretrained(qwen)
    twin.save_pretrained(published)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("page", "code"), cases("python", ["README.md", CARD]))
def test_python_blocks_run(workplace, capsys, page, code):
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    if "Sort from largest" in code:
        assert capsys.readouterr().out == "86, 54, 31, 23, 12, 7\n"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), cases("sh", PAGES))
def test_shell_blocks_run(workplace, page, block):
    for line in block.replace("\\\n", " ").splitlines():
        for command in line.split("#")[0].split("&&"):
            stdin = ""
            for stage in command.split("|"):
                if stage.strip():
                    stdin = run(shlex.split(stage), stdin)


def run(words: list[str], stdin: str) -> str:
    """Run one command in this process and return its output; those that set things up must only exist."""
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert {argument for argument in arguments if "=" not in argument} <= set(targets)
        return ""
    if program == "echo":
        return f"{' '.join(arguments)}\n"
    if program == "wedlm":
        app = cli.app
        arguments += SHORTER.get(f"wedlm {arguments[0]}", [])
    elif program == "python":
        app = typer.Typer()
        module, *arguments = arguments[1:] if arguments[0] == "-m" else arguments
        arguments += SHORTER[module]
        app.command()(main_of(module))
    else:
        assert words[:2] == ["git", "clone"] or program == "cd", f"no test knows how to run {shlex.join(words)}"
        return ""
    if "build/wedlm-nano" in arguments and not Path("build/wedlm-nano").exists() and program == "wedlm":
        shutil.copytree("examples/wedlm-nano", "build/wedlm-nano")
    result = CliRunner().invoke(app, arguments, input=stdin)
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result.stdout


def main_of(module: str):
    """The command's function."""
    spec = importlib.util.spec_from_file_location("train_wedlm_nano", ROOT / module)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.VOCABULARY_SAMPLES_PER_TASK = 20
    return script.main


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target


def test_the_file_tree_names_files_that_exist():
    (tree,) = (block for block in blocks("README.md", "") if "modeling_wedlm/ " in block)
    folder = ROOT
    for line in tree.splitlines():
        names = re.findall(r"[\w/.-]+(?:/|\.py)(?=[\s,]|$)", line.split("   ")[1] if line[0] == " " else line)
        for name in names[: None if "," in line and line[0] == " " else 1]:
            if line[0] != " ":
                folder = ROOT / name
                assert folder.exists(), name
            else:
                assert (folder / name).exists(), name
    listed = set(re.findall(r"\w+\.py", tree))
    present = {
        path.name
        for name in ("modeling_wedlm", "generation")
        for path in (ROOT / name).glob("*.py")
        if path.stem[0] != "_"
    }
    assert present <= listed


@pytest.mark.parametrize("page", MEASURED)
def test_measured_numbers_are_those_of_the_stored_report(page):
    measured = blocks_of((RESULTS / "report.md").read_text(encoding="utf-8"))
    text = (ROOT / page).read_text(encoding="utf-8")
    assert fill(text, measured) == text
    stored = json.loads((NANO / "generation_config.json").read_text())
    window, threshold, penalty = (stored[name] for name in FIELDS)
    assert measured["setup"].startswith(f"Settings: window {window}, τ = {threshold:g}, λ = {penalty:g};")


def test_the_model_card_shows_every_task_in_its_own_words():
    text = (ROOT / CARD).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| `", text, flags=re.MULTILINE)
    assert rows == list(dict.fromkeys(prompt.task for prompt in read_tasks(ROOT / CARD.rpartition("/")[0])))
