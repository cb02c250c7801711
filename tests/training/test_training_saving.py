"""Saves that are cut off, by a kill or by a full disk, at every file: what was there before stays whole."""

import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_sft_trainer import MESSAGES, logged, trainer_on, weights_of
from tiny import tiny_model
from transformers import AutoTokenizer, TrainerCallback, TrainerState, modeling_utils
from transformers.trainer_utils import get_last_checkpoint

from wedlm_hf import WeDLMForCausalLM
from wedlm_hf.training import saving
from wedlm_hf.training.saving import newest_complete_checkpoint

# Every step is saved, and one checkpoint is kept. AdamW: a resume without its state would show.
SETTINGS = {
    "max_steps": 4, "per_device_train_batch_size": 4, "optim": "adamw_torch", "save_strategy": "steps",
    "save_steps": 1, "save_total_limit": 1,
}  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CUT_OFF = r"Saving into '.*' was cut off: .* GB were free there\. What was saved before is as it was\."
WEIGHTS_SIZE = 4 * weights_of(tiny_model()).numel()


class Killed(BaseException):
    """Stands for SIGKILL: what a save has written so far stays there, one file half written."""


@contextmanager
def disk_with_room_for(size: int):
    """A full disk: the system refuses to let files grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class FullDisk(TrainerCallback):
    """Leaves room for files of `size` bytes from a step on."""

    def __init__(self, size: int, step: int):
        self.size, self.step = size, step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def train_on_a_full_disk(trainer, size: int, step: int, checkpoint=None) -> None:
    trainer.add_callback(FullDisk(size, step))
    with disk_with_room_for(resource.RLIM_INFINITY), pytest.raises(OSError, match=CUT_OFF):
        trainer.train(checkpoint)


def test_after_kills_and_full_disks_in_the_middle_of_checkpoints_training_resumes_as_if_uninterrupted(
    tmp_path, monkeypatch
):
    def kill(owner, name: str, place: str, step: int) -> None:
        """Kills the training behind half of a file whose path has `place` in it, which `owner.name` writes."""

        def cut_off(*args, **kwargs):
            save(*args, **kwargs)
            target = Path(next(str(arg) for arg in args if isinstance(arg, str | os.PathLike)))
            if place in str(target):
                os.truncate(target, target.stat().st_size // 2)
                raise Killed

        save = getattr(owner, name)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, cut_off)
            patch.setattr(saving.shutil, "rmtree", lambda *args, **kwargs: None)  # the dead do not clean up
            with pytest.raises(Killed):
                trainer_on(folder, **SETTINGS).train(step > 2)
        assert (folder / "_saving").is_dir()
        # transformers' own search finds it too: no other folder looks like a checkpoint.
        newest = str(folder / f"checkpoint-{step - 1}")
        assert get_last_checkpoint(folder) == str(newest_complete_checkpoint(folder)) == newest

    def fill_the_disk(size: int, step: int) -> None:
        train_on_a_full_disk(trainer_on(folder, **SETTINGS), size, step, True)
        # Nothing is half-made.
        assert {path.name for path in folder.glob("*/")} <= {f"checkpoint-{done}" for done in range(1, step)}

    whole, folder = trainer_on(tmp_path / "whole", **SETTINGS), tmp_path / "out"
    whole.train()
    kill(modeling_utils, "safe_save_file", "checkpoint-2", step=2)
    fill_the_disk(WEIGHTS_SIZE // 2, step=2)
    kill(torch, "save", "checkpoint-3/optimizer", step=3)
    fill_the_disk(WEIGHTS_SIZE * 3 // 2, step=3)  # AdamW's state is twice as large
    kill(TrainerState, "save_to_json", "checkpoint-4", step=4)
    resumed = trainer_on(folder, **SETTINGS)
    resumed.train(True)
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert torch.equal(weights_of(resumed.model), weights_of(whole.model))
    assert [path.name for path in folder.glob("*/")] == ["checkpoint-4"]


@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 0.5}])
def test_a_finished_run_that_is_resumed_trains_nothing(tmp_path, length):
    settings = SETTINGS | length | {"per_device_train_batch_size": 2}  # an epoch has four steps
    whole = trainer_on(tmp_path, **settings)
    whole.train()
    for change in ({}, {"max_steps": 1}):
        resumed = trainer_on(tmp_path, **settings | change)
        resumed.train(True)
        assert resumed.state.global_step == 2
        assert torch.equal(weights_of(resumed.model), weights_of(whole.model))
        assert [path.name for path in tmp_path.glob("*/")] == ["checkpoint-2"]


def test_a_full_disk_in_the_final_save_leaves_the_older_model_as_it_was(tmp_path):
    trainer = trainer_on(tmp_path)
    trainer.save_model()
    before = contents(tmp_path)
    trainer.train()
    with disk_with_room_for(WEIGHTS_SIZE // 2), pytest.raises(OSError, match=CUT_OFF):
        trainer.save_model()
    assert contents(tmp_path) | {"README.md": before["README.md"]} == before  # it says how far training has come
    trainer.save_model()
    assert torch.equal(weights_of(WeDLMForCausalLM.from_pretrained(tmp_path)), weights_of(trainer.model))
    assert not list(tmp_path.glob("_sav*"))


def test_a_run_into_a_folder_of_another_leaves_the_others_checkpoint_whole_until_its_own_is(tmp_path):
    """Written in place, the new weights would lie beside the old optimizer under a complete-looking state."""
    trainer_on(tmp_path, **SETTINGS | {"max_steps": 1}).train()
    before = contents(tmp_path / "checkpoint-1")
    second = trainer_on(tmp_path, model=tiny_model(seed=1), **SETTINGS | {"save_total_limit": None})
    train_on_a_full_disk(second, WEIGHTS_SIZE * 3 // 2, step=1)
    assert contents(tmp_path / "checkpoint-1") == before
    trainer_on(tmp_path, model=tiny_model(seed=1), **SETTINGS | {"max_steps": 2}).train()
    assert newest_complete_checkpoint(tmp_path).name == "checkpoint-2"


def test_a_resume_goes_on_with_the_run_that_wrote_last_and_not_with_an_older_one_of_more_steps(tmp_path):
    def write(step: int, seconds: int | None) -> None:
        (tmp_path / f"checkpoint-{step}").mkdir()
        if seconds is not None:  # else it is not complete
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
            os.utime(tmp_path / f"checkpoint-{step}" / "trainer_state.json", (seconds, seconds))

    for step, seconds, newest in ((300, 5, 300), (9, 7, 9), (10, 7, 10), (11, None, 10), (2, 6, 10)):
        write(step, seconds)
        assert newest_complete_checkpoint(tmp_path).name == f"checkpoint-{newest}"


def test_the_best_checkpoint_is_kept_by_its_final_name_and_loaded_in_the_end(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2}
    settings |= {"metric_for_best_model": "eval_ar_nll", "learning_rate": 0.0}  # so that the first remains the best
    trainer = trainer_on(tmp_path, eval_dataset=MESSAGES, **SETTINGS | settings)
    trainer.train()
    best = str(tmp_path / "checkpoint-1")
    assert trainer.state.best_model_checkpoint == best
    assert sorted(path.name for path in tmp_path.glob("*/")) == ["checkpoint-1", "checkpoint-4"]
    for step in (1, 4):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == best


def test_a_saved_model_replaces_the_shards_of_an_older_one(tmp_path):
    tiny_model(seed=1).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    trainer = trainer_on(tmp_path)
    trainer.save_model()
    trainer.save_state()
    assert [path.name for path in tmp_path.glob("model*.safetensors*")] == ["model.safetensors"]
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 0
    assert torch.equal(weights_of(WeDLMForCausalLM.from_pretrained(tmp_path)), weights_of(tiny_model()))
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(trainer.processing_class)


def test_a_checkpoint_that_lacks_a_state_is_not_resumed_in_silence(tmp_path):
    trainer_on(tmp_path, **SETTINGS | {"max_steps": 1}).train()
    for part in ("optimizer.pt", "scheduler.pt", "trainer_state.json"):
        hidden = (tmp_path / "checkpoint-1" / part).rename(tmp_path / part)
        said = f"checkpoint-1' cannot be resumed: it has no {part.removesuffix('.pt')}.* pass it as the model"
        with pytest.raises(ValueError, match=said):
            trainer_on(tmp_path, **SETTINGS).train(str(tmp_path / "checkpoint-1"))
        hidden.rename(tmp_path / "checkpoint-1" / part)


def test_a_second_run_in_the_same_folder_is_refused_and_writes_nothing(tmp_path):
    hold = "import filelock, sys, time; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True)"
    command = [sys.executable, "-c", f"{hold}; time.sleep(600)", str(tmp_path / "_lock")]
    second = trainer_on(tmp_path, **SETTINGS)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        try:
            first.stdout.readline()
            for write in (second.train, second.save_model, second.save_state):
                with pytest.raises(OSError, match="Another run is writing into"):
                    write()
            assert [path.name for path in tmp_path.iterdir()] == ["_lock"]
        finally:
            first.kill()
    second.save_model()  # the system has freed the lock
