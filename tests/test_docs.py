"""The documentation: the paper index names what exists, errors are those of the code, pages stay few and short."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
from tiny import script

import wedlm_hf
from wedlm_hf.generation import WeDLMGenerationSettings

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The paper in the code")[2]
LINES = [line.strip("|") for line in INDEX.partition("\n## ")[0].splitlines() if line.startswith("| ")]
HEAD, *ENTRIES = ([cell.strip() for cell in line.split("|")] for line in LINES)


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


PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_pages_are_few_and_short():
    assert len(PAGES) <= 10
    words = [word for page in PAGES for word in page.read_text(encoding="utf-8").split() if re.search(r"\w", word)]
    assert len(words) <= 9000


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
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    shown, known = re.findall(r"^```text\n(.*)\n```$", text, flags=re.MULTILINE), messages()
    assert len(shown) > 12
    for message in shown:
        assert any(pattern.fullmatch(message) for pattern in known), message


def test_the_signature_shown_has_every_setting_with_its_default():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
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
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, state = re.findall(r"^## \[(.*)\] - (.*)$", text, flags=re.MULTILINE)[0]
    assert version == wedlm_hf.__version__
    assert state == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", state)
