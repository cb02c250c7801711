"""The request of `wedlm report`. Imports that take seconds stand inside: `--help` needs none."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints import NANO
from ...console.prompts import read_text

if TYPE_CHECKING:
    from ..decoders import Options
    from ..prompts import Prompt

MANAGED = {"strategy", "verification", "window_size", "entropy_threshold", "distance_penalty", "draft_threshold"}
MANAGED |= {"max_new_tokens", "do_sample", "temperature", "output_trace"}
_COUNTED_ON = {"num_beams", "use_cache", "return_dict_in_generate", "eos_token_id"}  # they change counts and answers
_LEAST = {"max_loss": 0, "count": 1, "sweep_count": 0, "timed": 1, "sweep_timed": 1, "repeats": 1, "batch_size": 1}
_LEAST |= {"max_new_tokens": 2}


@dataclass(frozen=True)
class ReportRequest:
    """Report (lists have commas).

    Attributes:
        model: folder or Hub id of a checkpoint, or folder of an adapter.
        file: prompts, one a line, or .jsonl with `prompt` or `messages`, perhaps `answer`, `match` and `task`; - is
            standard input. Default: tasks.jsonl of the checkpoint folder.
        raw: continue the prompts as they are, without a chat template.
        windows: W to try, slots.
        thresholds: τ to try, nats.
        penalties: λ to try, nats per position.
        draft_thresholds: τ of drafts to verify, nats.
        decoders: decoders, with ar+lookup if you like; AR is always among them.
        max_loss: points that a picked setting may lose to AR on a task.
        save_settings: write the picked settings into the checkpoint's generation_config.json; the headline shows them.
        count: headline prompts of each task.
        sweep_count: other prompts of each task, for the sweep; 0 leaves it out.
        timed: headline prompts of each task that are timed.
        sweep_timed: prompts of each task that are timed in the sweep.
        repeats: times are medians of so many (sweep, batches: half).
        batch_sizes: prompts decoded together and timed; 1 for a model that keeps a state.
        batch_size: prompts decoded together for their quality.
        max_new_tokens: longest answer, in tokens.
        temperature: temperature of sampling; default: greedy.
        settings: any other keyword of `generate`; may be repeated.
        output: folder for report.html, .md, .json and table.csv.
        figures: folder for the figures as PNG.

    Raises:
        OSError: for a folder that cannot be written to.
        ValueError: for anything else.
    """

    model: str = str(NANO)
    file: Path | None = None
    raw: bool = False
    windows: tuple[int, ...] = (6, 16)
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    penalties: tuple[float, ...] = (0, 0.02, 0.1)
    draft_thresholds: tuple[float, ...] = (0.4, 0.8)
    decoders: tuple[str, ...] = ("block", "wedlm", "wedlm+exact")
    max_loss: float = 1.0
    save_settings: bool = False
    count: int = 100
    sweep_count: int = 30
    timed: int = 10
    sweep_timed: int = 2
    repeats: int = 5
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    batch_size: int = 50
    max_new_tokens: int = 256
    temperature: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    output: Path = Path("build/report")
    figures: Path | None = None

    def __post_init__(self) -> None:
        for name in ("matplotlib", "pandas", "scipy", "tabulate"):
            if find_spec(name) is None:
                raise ValueError(f"The report needs {name}: pip install '.[eval]' in the clone.")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")
        if self.save_settings and not (Path(self.model) / "config.json").is_file():
            raise ValueError(f"`--save-settings` needs a checkpoint folder, got {self.model!r}.")
        if self.save_settings and self.sweep_count == 0:
            raise ValueError("`--save-settings` writes the settings that the sweep picks; `--sweep-count 0` has none.")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            got = f"got {self.temperature}: greedy is the default"
            raise ValueError(f"`--temperature` must be above 0 and finite, {got}.")
        if managed := [name for name in self.settings if name in MANAGED | _COUNTED_ON]:
            raise ValueError(f"`--set {managed[0]}` is decided by the report: leave it out.")
        if min(self.batch_sizes) < 1:
            raise ValueError(f"`batch_sizes` must be at least 1, got {min(self.batch_sizes)}.")
        self.candidates()  # checks its values
        from ...checkpoints.files import check_folder

        for folder in (self.output, self.figures):
            if folder is not None:
                check_folder(folder)

    def candidates(self) -> dict[str, dict[str, Any]]:
        """Keywords of `generate` by name, for all combinations."""
        from ..decoders import candidates

        return candidates(self.windows, self.thresholds, self.penalties, self.draft_thresholds, self.decoders)

    def common(self, decoders: "Mapping[str, Options]") -> "dict[str, Options]":
        """The keywords of each decoder, with those of all."""
        shared = {**self.settings, "max_new_tokens": self.max_new_tokens, "do_sample": False}
        if self.temperature is not None:
            shared |= {"do_sample": True, "temperature": self.temperature}
        return {name: {**options, **shared} for name, options in decoders.items()}

    def prompts(self) -> "tuple[list[Prompt], str]":
        """The prompts, and the name of their file. Raises `OSError` for a file that cannot be read, and `ValueError`
        for a malformed one, and where neither a file nor the checkpoint brings prompts."""
        from ..prompts import TASKS_FILE, read_prompts, read_tasks

        if self.file is None:
            return read_tasks(Path(self.model)), TASKS_FILE
        name, text = read_text(self.file)
        return read_prompts(name, text), name
