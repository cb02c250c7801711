"""The method's index names only what exists."""

import ast
import re
from pathlib import Path

import pytest

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
