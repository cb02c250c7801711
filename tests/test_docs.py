"""The documentation: the paper index names only what exists, pages begin with what they are for."""

import ast
import re
from pathlib import Path

import pytest
from tiny import script

import wedlm_hf

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]
HEAD, *ENTRIES = ROWS


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
    assert len(entry) == len(HEAD) == 4
    for cell, folder in ((entry[2], r"\w+(/\w+)*"), (entry[3], r"tests(/\w+)*")):
        references = re.findall(r"`([^`]+)`", cell)
        assert references, "an entry needs code and a test"
        for reference in references:
            assert re.fullmatch(rf"{folder}/\w+\.py::\w+(\.\w+)?", reference), reference
            path, name = reference.split("::")
            assert (ROOT / path).is_file() and name in names_in(ROOT / path), reference


PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_first_what_its_reader_can_do_then(page):
    _, first = page.read_text(encoding="utf-8").split("\n\n")[:2]
    assert first.startswith("After reading this page you ")


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


def test_every_message_in_troubleshooting_is_in_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    shown, known = re.findall(r"^```text\n(.*)\n```$", text, flags=re.MULTILINE), messages()
    assert len(shown) > 15
    for message in shown:
        assert any(pattern.fullmatch(message) for pattern in known), message


def test_every_refusal_in_the_table_of_devices_is_in_the_code():
    text, known = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"), messages()
    refusals = re.findall('"([^"\n]+)"', text.partition("| path |")[2].partition("\n\n")[0])
    assert len(refusals) == 4
    for words in refusals:
        assert any(re.escape(words) in pattern.pattern for pattern in known), words


def test_the_drawings_are_what_the_code_draws(tmp_path, monkeypatch):
    figures = ROOT / "docs" / "figures"
    draw = script("docs/figures/draw.py")
    monkeypatch.setattr(draw, "HERE", tmp_path)
    for drawing in draw.DRAWINGS:
        drawing()
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == len(draw.DRAWINGS)
    for file in drawn:
        assert file.read_text(encoding="utf-8") == (figures / file.name).read_text(encoding="utf-8"), file.name


def test_the_newest_entry_of_the_changelog_is_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, state = re.findall(r"^## \[(.*)\] - (.*)$", text, flags=re.MULTILINE)[0]
    assert version == wedlm_hf.__version__
    assert state == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", state)
