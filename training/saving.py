"""One run writes into a folder, and one that was killed goes on from its newest complete checkpoint."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from ..checkpoints.find import ADAPTER_FILE, read_adapter_config
from .cpu import keep_freed_memory

logger = logging.getLogger(__name__)

_LOCK = "_lock"  # pushes to the Hub leave out what begins with an underscore
_WEIGHTS = "model*.safetensors*"
# Fields of PEFT's configs that a resumed adapter must share with the one so far.
_OF_ADAPTERS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save", "rank_pattern",
    "alpha_pattern", "layers_to_transform",
)  # fmt: skip


@contextmanager
def only_writer(folder: Path, is_writer: bool = True) -> Iterator[None]:
    """Keeps the runs of other processes from writing into a folder meanwhile; may be entered repeatedly.

    The system frees the lock when its process ends, however it ends; its file goes with the last who leaves. File
    systems without locks go without, and so do processes of a run that are not its first (`is_writer`). The folder is
    made if it is not there. Raises `OSError` while another process holds the lock, and for a folder that cannot be
    written to.
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
        if lock.lock_counter == 1:
            # While it is held: nobody waits for it who would then hold a file that is gone. Windows keeps open files.
            with suppress(OSError):
                os.unlink(lock.lock_file)
        lock.release()


class ResumableTrainer(Trainer):
    """A `Trainer` that is the only one to write into its output folder, and that goes on from its newest complete
    checkpoint. A checkpoint is complete once it has its trainer_state.json, which is written last.

    Raises:
        OSError: in each of these methods, for what cannot be written, and while another run writes there.
    """

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The parent's, except that `resume_from_checkpoint=True` skips checkpoints whose saving was cut off. Raises
        `ValueError` where none is left, and for one that lacks what a resumed run needs (see [`check_resumable`])."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_complete_checkpoint(Path(str(self.args.output_dir))))
        if resume_from_checkpoint:
            self.check_checkpoint(Path(resume_from_checkpoint))
        if self.args.device.type == "cpu":
            keep_freed_memory()
        with self._only_writer():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Raises `ValueError` for a checkpoint that this run cannot go on from."""
        check_resumable(checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The parent's. A checkpoint is not complete while another one takes its place."""
        folder = Path(output_dir or str(self.args.output_dir))
        if _internal_call and self.args.should_save:  # the first part of a checkpoint
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        with self._only_writer():
            try:
                super().save_model(output_dir, _internal_call)
            except SafetensorError as error:  # of a full disk, for example
                reason = str(error).rstrip(".")
                raise OSError(f"The weights in {str(folder)!r} cannot be written: {reason}.") from error

    def save_state(self) -> None:
        """The parent's."""
        with self._only_writer():
            super().save_state()

    def _only_writer(self) -> AbstractContextManager[None]:
        return only_writer(Path(str(self.args.output_dir)), self.args.process_index == 0)

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """The parent's, with two differences: a run with all its steps trains no more, where the parent counts after a
        step; and a stream that is read again goes on in the pass that was reached, where the parent knows one pass.

        Returns:
            The epoch to begin with, and how many of its batches are trained already.
        """
        begin: tuple[int, int] = super()._init_training_state(max_steps, *args)
        _, epochs, checkpoint, _ = args
        if self.state.global_step >= max_steps:
            return epochs, 0
        if checkpoint is None or not isinstance(self.train_dataset, IterableDataset):
            return begin
        # The parent says how far a stream has come as if one pass had all steps.
        stored = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        passes = math.ceil(stored.epoch or 0) - 1
        batches = ((stored.epoch or 0) - passes) * stored.max_steps * self.args.gradient_accumulation_steps
        self.state.epoch = passes  # of all steps in one pass, it would be the next one
        return passes, 0 if self.args.ignore_data_skip else round(batches)


def newest_complete_checkpoint(output_dir: Path) -> Path:
    """The `checkpoint-*` folder that was written last, by the time of its last file, the trainer's state; `Trainer`
    itself may leave folders without. Raises `ValueError` if there is none."""
    # An older run in the same folder may have come to higher numbers. Among equal times, the highest number is first.
    states = [Path(folder, TRAINER_STATE_NAME) for folder in reversed(sort_checkpoints(str(output_dir)))]
    complete = [state for state in states if _is_whole(state)]
    if not complete:
        raise ValueError(f"There is no complete checkpoint to resume from in {str(output_dir)!r}.")
    newest = max(complete, key=lambda state: state.stat().st_mtime_ns).parent
    if newest != complete[0].parent:  # it may also be that the folder was copied, without the times of its files
        logger.warning(
            f"{newest.name} is resumed, which was written last. {complete[0].parent.name} has more steps: to go on "
            "from there, pass its folder as `resume_from_checkpoint`."
        )
    return newest


def _is_whole(state: Path) -> bool:
    """Whether a trainer's state was written to its end."""
    try:
        return bool(json.loads(state.read_bytes()))
    except (OSError, ValueError):
        return False


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
