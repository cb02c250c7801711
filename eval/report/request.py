"""The request of `wedlm report`. Imports that take seconds stand inside: `--help` needs none."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints import NANO
from ...console.prompts import read_text

if TYPE_CHECKING:
    from ..prompts import Prompt

_DECIDED = {"strategy", "verification", "window_size", "entropy_threshold", "distance_penalty", "max_new_tokens"}
_DECIDED |= {"do_sample", "temperature", "output_trace", "prompt_lookup_num_tokens"}
_DECIDED |= {"num_beams", "use_cache", "return_dict_in_generate", "eos_token_id"}  # they change counts and answers
_LEAST = {"max_loss": 0, "count": 1, "repeats": 1, "batch_size": 1, "max_new_tokens": 2}


def check_temperature(temperature: float | None) -> None:
    """Raises `ValueError` for one that no sampling has."""
    if temperature is not None and not 0 < temperature < math.inf:
        raise ValueError(f"`--temperature` must be above 0 and finite, got {temperature}: greedy is the default.")


@dataclass(frozen=True)
class ReportRequest:
    """Report (lists have commas).

    Attributes:
        model: folder or Hub id of a checkpoint, or folder of an adapter.
        file: prompts, one a line, or .jsonl with `prompt` or `messages`, perhaps `answer`, `match` and `task`; - is
            standard input. Default: tasks.jsonl of the checkpoint folder.
        raw: continue the prompts as they are, without a chat template.
        metric: what says how right a reply is, for all rows: exact, json, number, or the name or folder of a metric of
            the library evaluate. Default: the `match` of each row.
        decoders: of ar+lookup, block, wedlm, wedlm+exact; AR is always among them. Default: those that the model has.
        windows: W of block and wedlm to try, slots; default: the checkpoint's.
        thresholds: τ to try, nats; default: the checkpoint's.
        penalties: λ to try, nats per position; default: the checkpoint's.
        max_loss: points that a picked setting may lose to AR on a task.
        save_settings: write the fastest of the settings of wedlm that lose no more into the checkpoint's
            generation_config.json.
        count: prompts of each task.
        repeats: times are medians of so many.
        batch_size: prompts decoded together.
        max_new_tokens: longest answer, in tokens.
        temperature: temperature of sampling; default: greedy.
        settings: any other keyword of `generate`; may be repeated.
        output: folder for report.html, report.md, table.csv and figure.svg.

    Raises:
        OSError: for a folder that cannot be written to.
        ValueError: for anything else.
    """

    model: str = str(NANO)
    file: Path | None = None
    raw: bool = False
    metric: str | None = None
    decoders: tuple[str, ...] = ()
    windows: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = ()
    penalties: tuple[float, ...] = ()
    max_loss: float = 1.0
    save_settings: bool = False
    count: int = 50
    repeats: int = 1
    batch_size: int = 1
    max_new_tokens: int = 256
    temperature: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    output: Path = Path("build/report")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")
        if self.save_settings and not (Path(self.model) / "config.json").is_file():
            raise ValueError(f"`--save-settings` needs a checkpoint folder, got {self.model!r}.")
        check_temperature(self.temperature)
        if not self.max_loss < math.inf:
            raise ValueError(f"`max_loss` must be a finite number, got {self.max_loss}.")
        if decided := [name for name in self.settings if name in _DECIDED]:
            raise ValueError(f"`--set {decided[0]}` is decided by the report: leave it out.")
        from ...checkpoints.files import check_folder
        from ..decoders import candidates
        from ..metrics import judge

        candidates(self.decoders, self.windows, self.thresholds, self.penalties)  # checks its values
        if self.metric is not None:
            judge(self.metric)
        check_folder(self.output)

    def prompts(self) -> "tuple[list[Prompt], str]":
        """The prompts, and the name of their file. Raises `OSError` for a file that cannot be read, and `ValueError`
        for a malformed one, where neither a file nor the checkpoint brings prompts, and for a metric without answers
        to compare with."""
        from ..compare import judged_by
        from ..prompts import TASKS_FILE, read_prompts, read_tasks

        if self.file is None:
            return judged_by(self.metric, read_tasks(Path(self.model))), TASKS_FILE
        name, text = read_text(self.file)
        return judged_by(self.metric, read_prompts(name, text)), name
