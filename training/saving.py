"""Atomic saves: a kill, a full disk or a second run in the same folder leaves what was there before."""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, sort_checkpoints

from ..checkpoints.card import CARD_NAME, is_written_by_a_person, read_card
from ..checkpoints.find import ADAPTER_FILE, read_adapter_config

logger = logging.getLogger(__name__)

# Beside what they become, so that a rename is enough. Pushes to the Hub leave out what begins with an underscore.
_UNFINISHED, _FINISHED, _LOCK = "_saving", "_saved", "_lock"
_WEIGHTS = "model*.safetensors*"
# Fields of PEFT's configs that a resumed adapter must share with the one so far.
_OF_ADAPTERS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save", "rank_pattern",
    "alpha_pattern", "layers_to_transform",
)  # fmt: skip


@contextmanager
def only_writer(folder: Path, is_writer: bool = True) -> Iterator[None]:
    """Keeps the runs of other processes from writing into a folder meanwhile; may be entered repeatedly.

    The system frees the lock when its process ends, however it ends. File systems without locks go without, and so do
    processes of a run that are not its first (`is_writer`). The folder is made if it is not there. Raises `OSError`
    while another process holds the lock, and for a folder that cannot be written to.
    """
    if not is_writer:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        otherwise = "wait until it has ended, or choose another `output_dir`"
        raise OSError(f"Another run is writing into {str(folder)!r}: {otherwise}.") from None
    except NotImplementedError:
        pass
    try:
        yield
    finally:
        lock.release()


class AtomicSaveTrainer(Trainer):
    """A `Trainer` whose saves take the place of older ones only when their last byte is written.

    Checkpoints, models, adapters and states are written into a folder `_saving` inside the output folder. A finished
    checkpoint is renamed as a whole, older ones are deleted only then; the files of a model are renamed one by one.
    Files of a save that raised are removed at once, those of a killed process by the next save. While a run trains or
    saves, no other run can write into its output folder.

    Raises:
        OSError: in each of these methods, for what cannot be written, and while another run writes there.
    """

    _is_staging = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The parent's. Weight files of another model or of another number of shards do not stay behind."""
        if self._is_staging:  # part of a checkpoint
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or str(self.args.output_dir))
        with self._staged(folder) as unfinished:
            super().save_model(str(unfinished), _internal_call=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The parent's, except that `resume_from_checkpoint=True` skips checkpoints whose saving was cut off. Raises
        `ValueError` where none is left, and for one that lacks what a resumed run needs (see [`check_resumable`])."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_complete_checkpoint(Path(str(self.args.output_dir))))
        if resume_from_checkpoint:
            self.check_checkpoint(Path(resume_from_checkpoint))
        with only_writer(Path(str(self.args.output_dir)), self.args.process_index == 0):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Raises `ValueError` for a checkpoint that this run cannot go on from."""
        check_resumable(checkpoint)

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """The parent's, except that a run with all its steps trains no more: the parent counts after a step.

        Returns:
            The epoch to begin with, and how many of its batches are trained already.
        """
        begin: tuple[int, int] = super()._init_training_state(max_steps, *args)
        _, epochs, *_ = args
        return (epochs, 0) if self.state.global_step >= max_steps else begin

    def save_state(self) -> None:
        """The parent's."""
        with self._staged(Path(str(self.args.output_dir))) as unfinished:
            if self.is_world_process_zero():
                self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self._staged(run_dir) as unfinished:
            super()._save_checkpoint(model, trial)
            if self.state.best_model_checkpoint == str(unfinished / name):
                self.state.best_model_checkpoint = str(run_dir / name)
                if self.args.should_save:
                    self.state.save_to_json(str(unfinished / name / TRAINER_STATE_NAME))
        # The parent has seen the new checkpoint alone, in `_saving`: these two are still to do.
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(run_dir), self.args.save_total_limit, best, use_mtime=True)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, _UNFINISHED) if self._is_staging else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._is_staging:
            super()._push_from_checkpoint(checkpoint_folder)

    @contextmanager
    def _staged(self, folder: Path) -> Iterator[Path]:
        """A folder inside `folder` to write to; in the end, its content moves up. Nodes may share a disk or have their
        own: the first process of each moves what it finds."""
        unfinished = folder / _UNFINISHED
        with only_writer(folder, self.args.process_index == 0):
            if self.args.local_process_index == 0:
                for left_over in (unfinished, folder / _FINISHED):
                    shutil.rmtree(left_over, ignore_errors=True)
                unfinished.mkdir(parents=True, exist_ok=True)
            self.accelerator.wait_for_everyone()
            self._is_staging = True
            try:
                yield unfinished
            except BaseException as error:
                free = shutil.disk_usage(folder).free
                shutil.rmtree(unfinished, ignore_errors=True)
                is_from_writing = isinstance(error, (OSError, RuntimeError, SafetensorError))
                if not is_from_writing or isinstance(error, BrokenPipeError):  # of the log, printed meanwhile
                    raise
                raise OSError(
                    f"Saving into {str(folder)!r} was cut off: {str(error).rstrip('.')}. {free / 1e9:,.3f} GB were "
                    "free there. What was saved before is as it was."
                ) from error
            finally:
                self._is_staging = False
            self.accelerator.wait_for_everyone()
            is_first = self.args.process_index == 0
            for is_my_turn in (is_first, self.args.local_process_index == 0 and not is_first):
                if is_my_turn:
                    try:
                        finished = unfinished.rename(folder / _FINISHED)
                    except FileNotFoundError:
                        pass  # moved by the first process of another node: the disk is shared
                    else:
                        _move(finished, folder)
                self.accelerator.wait_for_everyone()


def _move(finished: Path, folder: Path) -> None:
    """Moves files and folders into `folder`, in place of older ones, except for a model card where a person wrote one;
    removes the weight files there that are not among them, and what is left."""
    weights, keeps_card = {path.name for path in finished.glob(_WEIGHTS)}, is_written_by_a_person(read_card(folder))
    for path in [path for path in finished.iterdir() if path.name != CARD_NAME or not keeps_card]:
        target = folder / path.name
        if target.is_dir():
            target.rename(finished / f"{path.name}.replaced")
        path.replace(target)
    for path in folder.glob(_WEIGHTS) if weights else ():
        if path.name not in weights:
            path.unlink()
    shutil.rmtree(finished, ignore_errors=True)


def newest_complete_checkpoint(output_dir: Path) -> Path:
    """The `checkpoint-*` folder that was written last, by the time of its last file, the trainer's state; `Trainer`
    itself may leave folders without. Raises `ValueError` if there is none."""
    # An older run in the same folder may have come to higher numbers. Among equal times, the highest number is first.
    states = [Path(folder, TRAINER_STATE_NAME) for folder in reversed(sort_checkpoints(str(output_dir)))]
    complete = [state for state in states if state.is_file()]
    if not complete:
        raise ValueError(f"There is no complete checkpoint to resume from in {str(output_dir)!r}.")
    newest = max(complete, key=lambda state: state.stat().st_mtime_ns).parent
    if newest != complete[0].parent:  # it may also be that the folder was copied, without the times of its files
        logger.warning(
            f"{newest.name} is resumed, which was written last. {complete[0].parent.name} has more steps: to go on "
            "from there, pass its folder as `resume_from_checkpoint`."
        )
    return newest


def check_resumable(checkpoint: Path) -> None:
    """Raises `ValueError` unless a checkpoint holds the states of the trainer, of the optimizer and of the learning
    rate's schedule: `Trainer` starts afresh in silence. DeepSpeed keeps the latter two in a folder of its own."""
    states = [TRAINER_STATE_NAME] + ([] if any(checkpoint.glob("global_step*")) else ["optimizer*", SCHEDULER_NAME])
    if missing := [name for name in states if not any(checkpoint.glob(name))]:
        raise ValueError(
            f"{str(checkpoint)!r} cannot be resumed: it has no {missing[0].rstrip('*')} (was it saved with "
            "`save_only_model=True`?). To begin a new run from its weights, pass it as the model."
        )


def check_same_adapter(checkpoint: Path, configs: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless a run whose adapters have these configs of PEFT, by name, can go on from a checkpoint
    of a trainer: whether it holds an adapter, its kind, rank, scale and layers. A checkpoint of FSDP may have no
    adapter_config.json: it is not compared."""
    if not configs and (checkpoint / ADAPTER_FILE).is_file():
        what = "holds an adapter, and this run trains all weights: pass `--use_peft true` (in Python, a `peft_config`)"
        raise ValueError(f"{str(checkpoint)!r} cannot be resumed: it {what}, or another `output_dir`.")
    if configs and any(checkpoint.glob(_WEIGHTS)):
        what = "holds a whole model, and this run trains an adapter: leave out `--use_peft` (in Python, `peft_config`)"
        raise ValueError(f"{str(checkpoint)!r} cannot be resumed: it {what}, or take another `output_dir`.")
    for name, config in configs.items():
        folder = checkpoint if name == "default" else checkpoint / name
        stored = read_adapter_config(folder) if (folder / ADAPTER_FILE).is_file() else {}
        for field in _OF_ADAPTERS if stored else ():
            before, now = stored.get(field), getattr(config, field, None)
            if not _is_same(before, now):
                what = f"the `{field}` {before!r} cannot go on with {now!r}"
                raise ValueError(f"A run whose adapter has {what}: take the former, or another `output_dir`.")


def _is_same(before: Any, now: Any) -> bool:
    """Whether a field of a config is what it was. Names of layers may be short or whole, as PEFT keeps those of "all
    linear layers"; a regular expression is not compared with names."""
    before, now = before or None, getattr(now, "value", now) or None
    if not isinstance(before, list):
        return before == now or (isinstance(before, str) and isinstance(now, list | set | tuple))
    if not isinstance(now, list | set | tuple):
        return isinstance(now, str)
    sets = [set(map(str, each)) for each in (before, now)]
    ends = [{name.rpartition(".")[2] for name in each} for each in sets]
    return sets[0] == sets[1] or (ends[0] == ends[1] and ends[0] in sets)
