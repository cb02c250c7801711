"""What was measured is remembered for what it depends on."""

import pytest

from wedlm_hf.checkpoints import remembered as module
from wedlm_hf.checkpoints.remembered import remembered


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Makes a choice; returns it and whether it was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def ask(key, choice, choices=("a", "b"), name="trial"):
        measured = []
        found = remembered(name, key, {*choices}.__contains__, lambda: measured.append(choice) or choice)
        return found, bool(measured)

    return ask


def test_a_choice_is_measured_once_for_each_key_file_machine_and_version(asked, monkeypatch):
    assert asked([1, "x"], "a") == ("a", True) and asked([1, "x"], "b") == ("a", False)
    assert asked([2, "x"], "b") == ("b", True) and asked([1, "x"], "b") == ("a", False)
    assert asked([1, "x"], "b", name="other") == ("b", True)
    assert asked([1, "x"], "b", choices=["b"]) == ("b", True)  # what was chosen can no longer be
    monkeypatch.setattr(module, "_machine", lambda: ["another"])
    assert asked([1, "x"], "a") == ("a", True)
    monkeypatch.setattr(module, "version", lambda package: "9")
    assert asked([1, "x"], "b") == ("b", True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_file_is_measured_anew_and_replaced(asked, tmp_path, content):
    (tmp_path / "wedlm-hf").mkdir()
    (tmp_path / "wedlm-hf" / "trial.json").write_bytes(content)
    assert asked(1, "a") == ("a", True) and asked(1, "b") == ("a", False)


def test_a_folder_that_cannot_be_written_to_is_no_error_and_old_entries_go(asked, tmp_path, monkeypatch):
    (tmp_path / "wedlm-hf").write_text("a file")
    assert asked(1, "a") == asked(1, "a") == ("a", True)
    (tmp_path / "wedlm-hf").unlink()
    monkeypatch.setattr(module, "MOST", 3)
    assert [asked(key, "a")[1] for key in (1, 2, 3, 4, 4, 3, 2, 1)] == [True] * 4 + [False] * 3 + [True]
