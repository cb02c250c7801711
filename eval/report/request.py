"""What `wedlm report` is asked for. Imports of what takes seconds stand inside: `--help` needs none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...console.prompts import PROMPT_FILE
from ..options import NANO, RawOption, SetOption, SweepOptions, parse_numbers, parse_settings, read_prompt_file

if TYPE_CHECKING:
    from ..decoders import Options
    from ..prompts import Prompt

MANAGED = {"strategy", "verification", "window_size", "entropy_threshold", "distance_penalty", "output_trace"}
MANAGED |= {"max_new_tokens", "do_sample", "temperature"}
_COUNTED_ON = {"num_beams", "use_cache", "return_dict_in_generate", "eos_token_id"}  # by what counts and cuts answers


@dataclass(frozen=True)
class ReportRequest(SweepOptions):
    """Report (lists have commas).

    Raises:
        OSError: for a folder that cannot be written to, and for files to fill that cannot be read.
        ValueError: for anything else.
    """

    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", show_default=False, help="Checkpoint folder or Hub id; default: wedlm-nano."),
    ] = str(NANO)
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help=f"{PROMPT_FILE}, perhaps `answer`, `match` and `task`; - is standard input. Default: tasks.jsonl of "
            "the checkpoint folder.",
        ),
    ] = None
    raw: RawOption = False
    decoders: Annotated[
        str, typer.Option(metavar="LIST", help="Decoders, with ar+lookup if you like; AR is always among them.")
    ] = "block,wedlm,wedlm+typical,wedlm+exact"
    max_loss: Annotated[float, typer.Option(min=0, help="Points that a picked setting may lose to AR on a task.")] = (
        1.0
    )
    write: Annotated[
        bool, typer.Option("--write", help="Store the picked settings in the checkpoint; the headline shows them.")
    ] = False
    count: Annotated[int, typer.Option(min=1, help="Headline prompts of each task.")] = 100
    sweep_count: Annotated[int, typer.Option(min=0, help="Other prompts of each task, for the sweep; 0: none.")] = 30
    timed: Annotated[int, typer.Option(min=1, help="Headline prompts of each task that are timed.")] = 10
    sweep_timed: Annotated[int, typer.Option(min=1, help="Prompts of each task that are timed in the sweep.")] = 2
    repeats: Annotated[int, typer.Option(min=1, help="Times are medians of so many (sweep, batches: half).")] = 5
    batch_sizes: Annotated[str, typer.Option(metavar="LIST", help="Prompts decoded together and timed.")] = "1,4,16"
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together where time does not count.")] = 50
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 256
    temperature: Annotated[float | None, typer.Option(help="Temperature of sampling; default: greedy.")] = None
    settings: SetOption = None
    output: Annotated[
        Path, typer.Option(help="Folder for report.html, .md, .json, table.csv and partial results.")
    ] = Path("build/report")
    fill: Annotated[
        list[Path] | None, typer.Option(help="Markdown file whose measured blocks are replaced; may be repeated.")
    ] = None
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures as PNG.")] = None
    restart: Annotated[bool, typer.Option("--restart", help="Drop what the output folder holds.")] = False

    def __post_init__(self) -> None:
        for name in ("matplotlib", "pandas", "scipy", "tabulate"):
            if find_spec(name) is None:
                raise ValueError(f"The report needs {name}: pip install 'wedlm-hf[eval]'.")
        if self.write and not Path(self.model).is_dir():
            raise ValueError(f"`--write` needs a checkpoint folder, got {self.model!r}.")
        if self.write and self.sweep_count == 0:
            raise ValueError("`--write` stores what the sweep picks, and `--sweep-count 0` asks for none.")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(
                f"`--temperature` must be above 0 and finite, got {self.temperature}: greedy is the default."
            )
        if managed := [name for name in self.common_settings if name in MANAGED | _COUNTED_ON]:
            raise ValueError(f"`--set {managed[0]}` is decided by the report: leave it out.")
        if min(self.timed_batch_sizes) < 1:
            raise ValueError(f"`--batch-sizes` must be at least 1, got {self.batch_sizes}.")
        super().__post_init__()
        from ..files import check_folder
        from .page import BLOCKS, fill

        for path in self.fill or ():
            try:
                fill(path.read_text(encoding="utf-8"), dict.fromkeys(BLOCKS, ""))
            except ValueError as error:
                raise ValueError(f"`--fill {path}`: {error}.") from None
        for folder in (self.output, self.figures):
            if folder is not None:
                check_folder(folder)

    @property
    def timed_batch_sizes(self) -> list[int]:
        """Those of the headline's times; 1 is always among them."""
        return sorted({1, *parse_numbers("--batch-sizes", self.batch_sizes, int)})

    @property
    def common_settings(self) -> dict[str, Any]:
        """Keywords of `generate` for every decoder, AR too."""
        return parse_settings(self.settings)

    def common(self, decoders: Mapping[str, Options]) -> dict[str, Options]:
        """The keywords of each decoder, with those of all."""
        shared = {**self.common_settings, "max_new_tokens": self.max_new_tokens, "do_sample": False}
        if self.temperature is not None:
            shared |= {"do_sample": True, "temperature": self.temperature}
        return {name: {**options, **shared} for name, options in decoders.items()}

    def prompts(self) -> tuple[list[Prompt], str]:
        """The prompts, and where they are from.

        Raises:
            OSError: for a file that cannot be read.
            ValueError: for a malformed one, and where neither a file nor the checkpoint brings prompts.
        """
        from ..prompts import TASKS_FILE, read_tasks

        return (read_tasks(Path(self.model)), TASKS_FILE) if self.file is None else read_prompt_file(self.file)
