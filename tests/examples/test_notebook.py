"""The notebook: it runs, and shows what its stored outputs show."""

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


@pytest.mark.slow
def test_it_shows_what_is_stored():
    stored, fresh = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    # Steps of verified decoding are planned by a clock: their numbers differ from run to run.
    for shown in (outputs(stored), outputs(fresh)):
        assert shown[1:].count("image/png") == 2 and all(shown[1:])
    assert [kind == "image/png" for kind in outputs(fresh)] == [kind == "image/png" for kind in outputs(stored)]
