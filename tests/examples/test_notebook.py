"""The notebook: it runs, and its stored outputs are what it prints."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell shows on its standard output, and the kinds of its pictures."""
    shown = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        texts = [output.text for output in cell.outputs if output.get("name") == "stdout"]
        pictures = [kind for output in cell.outputs for kind in output.get("data", {}) if kind.startswith("image/")]
        shown.append("".join([*texts, *pictures]))
    return shown


def test_its_outputs_are_stored():
    shown = outputs(nbformat.read(NOTEBOOK, as_version=4))
    assert shown[1:].count("image/png") == 2 and all(shown[1:])


@pytest.mark.slow
def test_it_prints_what_is_stored():
    stored = nbformat.read(NOTEBOOK, as_version=4)
    fresh = NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4), timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    *before, training = outputs(stored)
    *after, trained = outputs(fresh)
    assert after == before
    assert trained.splitlines()[-1] == training.splitlines()[-1]  # the greeting; the log above it tells seconds, too
