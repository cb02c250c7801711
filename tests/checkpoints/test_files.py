"""Files appear whole or not at all, and what is no plain file is written to, not replaced."""

import os
import stat
import threading

import pytest
import torch
from safetensors.torch import save_file

from wedlm_hf.checkpoints.files import write_text, written_whole


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_another_keeps_its_permissions(tmp_path):
    path = tmp_path / "new" / "file"

    def write(text, divisor):
        with written_whole(path) as unfinished:
            unfinished.write_text(text)
            return 1 / divisor

    write("old", 1)
    with pytest.raises(ZeroDivisionError):
        write("half", 0)
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    write_text(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with written_whole(weights := tmp_path / "weights") as unfinished:
        save_file({"some": torch.zeros(2)}, unfinished)
    assert stat.S_IMODE(weights.stat().st_mode) == 0o666 & ~umask


def test_a_symbolic_link_stays_one_and_its_target_is_written(tmp_path):
    target, link = tmp_path / "target" / "file", tmp_path / "link"
    link.symlink_to(target)
    for text in ("new", "newer"):  # the target is made, then replaced
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == link.read_text() == text
    assert list(target.parent.iterdir()) == [target]


def test_devices_and_fifos_are_written_to(tmp_path):
    link, fifo, read = tmp_path / "link", tmp_path / "fifo", []
    link.symlink_to("/dev/null")
    device = os.stat("/dev/null").st_rdev
    write_text(link, "lost")
    assert link.is_symlink() and os.stat("/dev/null").st_rdev == device
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
    reader.start()
    write_text(fifo, "text")
    reader.join(10)
    assert read == ["text"] and fifo.is_fifo() and {*tmp_path.iterdir()} == {link, fifo}
