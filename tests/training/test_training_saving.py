"""Saves that are cut off, by a kill or by a full disk: training goes on from what was complete before."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sft_trainer import MESSAGES, logged, trainer_on, weights_of
from tiny import tiny_model
from transformers import AutoTokenizer, TrainerCallback, TrainerState, modeling_utils

from wedlm_hf import WeDLMForCausalLM
from wedlm_hf.training.saving import newest_complete_checkpoint

# Every step is saved, and one checkpoint is kept. AdamW: a resume without its state would show.
SETTINGS = {
    "max_steps": 4, "per_device_train_batch_size": 4, "optim": "adamw_torch", "save_strategy": "steps",
    "save_steps": 1, "save_total_limit": 1,
}  # fmt: skip


CUT_OFF = r"The weights in '.*checkpoint-\d' cannot be written: "
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
            with pytest.raises(Killed):
                trainer_on(folder, **SETTINGS).train(step > 2)
        assert newest_complete_checkpoint(folder).name == f"checkpoint-{step - 1}"

    whole, folder = trainer_on(tmp_path / "whole", **SETTINGS), tmp_path / "out"
    whole.train()
    kill(modeling_utils, "safe_save_file", "checkpoint-2", step=2)
    train_on_a_full_disk(trainer_on(folder, **SETTINGS), WEIGHTS_SIZE // 2, 2, True)
    kill(torch, "save", "checkpoint-3/optimizer", step=3)
    train_on_a_full_disk(trainer_on(folder, **SETTINGS), WEIGHTS_SIZE // 2, 3, True)
    kill(TrainerState, "save_to_json", "checkpoint-4", step=4)
    resumed = trainer_on(folder, **SETTINGS)
    resumed.train(True)
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert torch.equal(weights_of(resumed.model), weights_of(whole.model))
    assert [path.name for path in folder.glob("*/")] == ["checkpoint-4"]


@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(3, 6), batch=st.integers(1, 3), accumulation=st.integers(1, 2), steps=st.integers(2, 6),
    cut=st.integers(1, 5),
)  # fmt: skip
def test_a_stream_that_is_read_more_than_once_resumes_to_the_same_weights(rows, batch, accumulation, steps, cut):
    cut = min(cut, steps - 1)
    how = SETTINGS | {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    with tempfile.TemporaryDirectory() as folder:
        stream = MESSAGES.select([row % len(MESSAGES) for row in range(rows)]).to_iterable_dataset()
        if rows < batch * accumulation:
            return
        whole = trainer_on(Path(folder, "whole"), stream, **how | {"max_steps": steps, "save_strategy": "no"})
        whole.train()
        trainer_on(Path(folder, "cut"), stream, **how | {"max_steps": cut, "save_steps": cut}).train()
        resumed = trainer_on(Path(folder, "cut"), stream, **how | {"max_steps": steps, "save_strategy": "no"})
        resumed.train(True)
        assert torch.equal(weights_of(resumed.model), weights_of(whole.model))


@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 0.5}])
def test_a_finished_run_that_is_resumed_trains_nothing(tmp_path, length):
    how = SETTINGS | length | {"per_device_train_batch_size": 2}  # an epoch has four steps
    whole = trainer_on(tmp_path, **how)
    whole.train()
    for change in ({}, {"max_steps": 1}):
        resumed = trainer_on(tmp_path, **how | change)
        resumed.train(True)
        assert resumed.state.global_step == 2
        assert torch.equal(weights_of(resumed.model), weights_of(whole.model))
        assert [path.name for path in tmp_path.glob("*/")] == ["checkpoint-2"]


def test_a_checkpoint_is_not_complete_while_another_run_takes_its_place(tmp_path):
    """The new weights would lie beside the old optimizer, under a complete-looking state."""
    trainer_on(tmp_path, **SETTINGS | {"max_steps": 1}).train()
    second = trainer_on(tmp_path, model=tiny_model(seed=1), **SETTINGS | {"save_total_limit": None})
    train_on_a_full_disk(second, WEIGHTS_SIZE // 2, step=1)
    with pytest.raises(ValueError, match="There is no complete checkpoint"):
        newest_complete_checkpoint(tmp_path)
    trainer_on(tmp_path, model=tiny_model(seed=1), **SETTINGS | {"max_steps": 2}).train()
    assert newest_complete_checkpoint(tmp_path).name == "checkpoint-2"


def test_a_resume_goes_on_with_the_run_that_wrote_last_and_not_with_an_older_one_of_more_steps(tmp_path):
    def write(step: int, seconds: int | None) -> None:
        (tmp_path / f"checkpoint-{step}").mkdir()
        if seconds is not None:  # else it is not complete
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("[1]")
            os.utime(tmp_path / f"checkpoint-{step}" / "trainer_state.json", (seconds, seconds))

    for step, seconds, newest in ((300, 5, 300), (9, 7, 9), (10, 7, 10), (11, None, 10), (2, 6, 10)):
        write(step, seconds)
        assert newest_complete_checkpoint(tmp_path).name == f"checkpoint-{newest}"


def test_the_best_checkpoint_is_kept_by_its_final_name_and_loaded_in_the_end(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2}
    best |= {"metric_for_best_model": "eval_ar_nll", "learning_rate": 0.0}  # so that the first remains the best
    trainer = trainer_on(tmp_path, eval_dataset=MESSAGES, **SETTINGS | best)
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
    assert [path.name for path in tmp_path.glob("model*.safetensors")] == ["model.safetensors"]
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
    assert not (tmp_path / "_lock").exists()
