"""Options that several commands share: where prompts come from, how they are decoded, on what.

Each dataclass is one group of options: cli/groups.py makes options of its fields. The first line of its docstring is
the title of their panel in `--help`. Imports of torch stand inside the methods: they take seconds, and `--help` needs
none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..adapters.adapt_config import DeviceOption
from ..console.prompts import PROMPT_FILE, STANDARD_INPUT, Turns, is_unicode, read_rows, shown
from .decoders import LOOKUP

if TYPE_CHECKING:
    from .prompts import Prompt

NANO = Path(__file__).parents[1] / "examples" / "wedlm-nano"

DEMO_PROMPTS = (
    "Count down from 97 to 61 by 4.",
    "Anna has 347 apples. Ben brings 85 more. Anna sells 218. How many apples does Anna have now?",
    "Sort from largest to smallest: 31, 7, 86, 12, 54, 23",
    "Turn this text into JSON: Clara is 34. She works as a pilot. She lives in Lisbon. Clara has a cat and a dog.",
    "Emma lives in Paris. Jack has a horse. Emma likes soup. Jack is 41 years old. Where does Emma live?",
    'Complete this Python code:\ndef count_equal(scores, limit):\n    """Count the scores equal to limit."""',
)

DTYPES = ("fastest", "packed", "auto", "float32", "bfloat16", "float16")


def _one_of(*values: str) -> Callable[[str], list[str]]:
    """Completes a value in the shell."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Checkpoint folder or Hub id; default: wedlm-nano.")
]
CheckpointArgument = Annotated[
    str | None, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder or Hub id; default: wedlm-nano.")
]
RawOption = Annotated[bool, typer.Option("--raw", help="Continue the prompts as they are, without a chat template.")]
CompareOption = Annotated[bool, typer.Option(help="Decode each prompt with AR too, right after.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other keyword of `generate`; may be repeated."),
]
WindowsOption = Annotated[str, typer.Option(metavar="LIST", help="W to try, slots.")]
ThresholdsOption = Annotated[str, typer.Option(metavar="LIST", help="τ to try, nats.")]
PenaltiesOption = Annotated[str, typer.Option(metavar="LIST", help="λ to try, nats per position.")]
DraftsOption = Annotated[str, typer.Option(metavar="LIST", help="τ of drafts to verify, nats.")]
DecodersOption = Annotated[
    str, typer.Option(metavar="LIST", help="Decoders, as in the default; AR is always among them.")
]


@dataclass(frozen=True)
class PromptOptions:
    """Prompts."""

    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPTS",
            help="Default: the lines of standard input where it is piped, else a few built-in prompts.",
        ),
    ] = None
    file: Annotated[Path | None, typer.Option("--file", "-f", help=f"{PROMPT_FILE}; - is standard input.")] = None
    raw: RawOption = False

    def read(self) -> list[str | Turns]:
        """The prompts on the command line and in the file, or else those that are piped in, or else the built-in ones.

        Raises:
            OSError: for a file that cannot be read.
            ValueError: as [`read_rows`], for an empty prompt, and for text that is not UTF-8.
        """
        given: list[str | Turns] = []
        for prompt in self.prompts or ():
            if not prompt.strip():
                raise ValueError("A prompt must not be empty.")
            if not is_unicode(prompt):
                raise ValueError(f"A prompt must be UTF-8 text, got {prompt!r}.")
            given.append(prompt)
        is_piped = self.file is None and not given and sys.stdin is not None and not sys.stdin.isatty()
        file = Path("-") if is_piped else self.file
        if file is not None:
            text = read_text(file)
            if text.strip() or not is_piped:
                given += [row.prompt for row in read_rows(_name(file), text)]
        return given or list(DEMO_PROMPTS)


@dataclass(frozen=True)
class DecodingOptions:
    """Decoding (default: the checkpoint's generation_config.json)."""

    strategy: Annotated[
        str, typer.Option(help="wedlm, block or ar.", autocompletion=_one_of("wedlm", "block", "ar"))
    ] = "wedlm"
    verification: Annotated[
        str | None,
        typer.Option(
            autocompletion=_one_of("none", "exact", "typical"),
            help="none; exact: the output of AR decoding (default with a mask adapter); typical: what AR finds "
            "plausible.",
        ),
    ] = None
    window_size: Annotated[int | None, typer.Option(help="W, slots predicted at a time.")] = None
    entropy_threshold: Annotated[float | None, typer.Option(help="τ, nats: fill the masks below it.")] = None
    distance_penalty: Annotated[float | None, typer.Option(help="λ, nats per position.")] = None
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random instead of the likeliest.")] = False
    temperature: Annotated[float | None, typer.Option(help="Temperature; implies --sample.")] = None
    seed: Annotated[int, typer.Option(help="Seed of --sample.")] = 0
    settings: SetOption = None

    def keywords(self) -> dict[str, Any]:
        """What was given, as keywords of `generate`.

        Raises:
            ValueError: for settings of parallel decoding that are out of range, before any weights are read.
        """
        own = {field.name for field in fields(self)} - {"sample", "seed", "settings"}
        others = parse_settings(self.settings)
        if repeated := own & others.keys():
            option = min(repeated).replace("_", "-")
            raise ValueError(f"`--set {min(repeated)}=…`: this setting has an option of its own, `--{option}`.")
        from ..generation.settings import SETTING_NAMES, WeDLMGenerationSettings

        given = {name: getattr(self, name) for name in sorted(own) if getattr(self, name) is not None} | others
        WeDLMGenerationSettings(**{name: value for name, value in given.items() if name in SETTING_NAMES})
        return given | ({"do_sample": True} if self.sample or self.temperature is not None else {})


@dataclass(frozen=True)
class TraceOptions:
    """Trace."""

    compare: CompareOption = True
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; default: build/trace.html, none with --terminal.")
    ] = None
    save: Annotated[Path | None, typer.Option(help="JSON file to keep the trace in.")] = None
    source: Annotated[
        Path | None, typer.Option("--from", help="Show this saved trace; --model checks that it is that model's.")
    ] = None
    terminal: Annotated[bool, typer.Option("--terminal", help="Replay it here, too.")] = False
    pace: Annotated[float, typer.Option(min=0, help="For --terminal: seconds that a forward stays in view.")] = 0.1
    repeats: Annotated[int, typer.Option(min=1, help="The clock shows medians of so many runs.")] = 5


@dataclass(frozen=True)
class SweepOptions:
    """Settings that are tried.

    Raises:
        ValueError: for what is no list of settings, and for an unknown decoder.
    """

    windows: WindowsOption = "6,16"
    thresholds: ThresholdsOption = "0.1,0.2,0.4,0.6,0.8,1.0"
    penalties: PenaltiesOption = "0,0.02,0.1"
    draft_thresholds: DraftsOption = "0.4,0.8"
    decoders: DecodersOption = "block,wedlm,wedlm+typical,wedlm+exact"

    def __post_init__(self) -> None:
        self.candidates()  # checks its values

    def candidates(self) -> dict[str, dict[str, Any]]:
        """Keywords of `generate` by name, for all combinations."""
        from .sweep import candidates

        return candidates(
            parse_numbers("--windows", self.windows, int),
            parse_numbers("--thresholds", self.thresholds, float),
            parse_numbers("--penalties", self.penalties, float),
            parse_numbers("--draft-thresholds", self.draft_thresholds, float),
            self.decoders.split(","),
        )


@dataclass(frozen=True)
class CalibrationOptions(SweepOptions):
    """Calibration (lists have commas).

    Raises:
        ValueError: for a wanted agreement that is out of range, and as [`SweepOptions`].
    """

    agreement: Annotated[
        float, typer.Option(help="Wanted share of new tokens that AR decoding would have chosen too.")
    ] = 0.99
    write: Annotated[
        bool, typer.Option("--write", help="Store the settings in the checkpoint's generation_config.json.")
    ] = False
    windows: WindowsOption = "4,8,16"
    thresholds: ThresholdsOption = "0.1,0.2,0.4,0.8"
    penalties: PenaltiesOption = "0.02,0.1"
    draft_thresholds: DraftsOption = "0.4,1.0"
    decoders: DecodersOption = "wedlm,wedlm+exact"
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 256
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together where time does not count.")] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.agreement <= 1:
            raise ValueError(f"The wanted agreement must be above 0 and at most 1, got {self.agreement}.")
        if LOOKUP in self.decoders.split(","):
            raise ValueError(f"`--decoders`: {LOOKUP} has no settings to choose, only `wedlm report` compares it.")


@dataclass(frozen=True)
class LoadingOptions:
    """Model and machine."""

    adapter: Annotated[
        str | None, typer.Option(help="Mask adapter for the model: folder or Hub id (see wedlm adapt).")
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            help="fastest (on this CPU; elsewhere auto), packed (16-bit weights on a CPU), auto (the checkpoint's), "
            "float32, bfloat16 or float16.",
            autocompletion=_one_of(*DTYPES),
        ),
    ] = "fastest"
    device: DeviceOption = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: as many as have work.")] = None

    def prepare(self) -> str:
        """Sets the number of CPU threads and returns the device. Raises `ValueError` for one that is not there."""
        import torch

        from ..modeling_wedlm.loading import find_device

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return str(find_device(self.device, called="`--device {}`"))

    def load(self, checkpoint: str | None) -> tuple[Any, Any]:
        """Model, in evaluation mode, and tokenizer of a folder or Hub id; of wedlm-nano for None. A folder that
        `wedlm adapt` wrote is its base with the adapter.

        Raises:
            OSError: for what cannot be loaded.
            ValueError: likewise, and for an unknown `dtype` or device.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"`--dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        device = self.prepare()
        import torch
        from transformers.utils.logging import disable_progress_bar

        from ..modeling_wedlm.loading import base_path, is_adapter, load_model, load_tokenizer

        disable_progress_bar()
        source, adapter = str(NANO) if checkpoint is None else checkpoint, self.adapter
        if adapter is None and is_adapter(source):
            source, adapter = base_path(source), source
        model = load_model(source, dtype=self.dtype, device=device)
        if adapter is not None:
            model.load_mask_adapter(adapter)
            if getattr(model.generation_config, "verification", None) is None:
                model.generation_config.verification = "exact"  # what it was trained for: its base's own answers
        model = model.eval()
        if self.threads is None:
            from .measure import default_threads

            torch.set_num_threads(default_threads(model))
        return model, load_tokenizer(source)


def has_no_chat_template(tokenizer: Any, checkpoint: str | None) -> bool:
    """Whether prompts can only be continued as they are; says so on standard error."""
    if tokenizer.chat_template is not None:
        return False
    name = str(NANO) if checkpoint is None else checkpoint
    typer.echo(f"{name!r} has no chat template: the prompts are continued as they are.", err=True)
    return True


def parse_settings(given: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` pairs as keywords of `generate`; a value is JSON, or else text.

    Raises:
        ValueError: for what is no such pair, and for a name that `generate` has no setting of.
    """
    settings: dict[str, Any] = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"`--set` takes NAME=VALUE, got {pair!r}.")
        if name in settings:
            raise ValueError(f"`--set {name}=…` was given twice.")
        try:
            settings[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except json.JSONDecodeError:
            settings[name] = value
    if settings:
        from transformers import GenerationConfig

        from ..generation.settings import SETTING_NAMES

        known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
        for name in settings.keys() - known - {*SETTING_NAMES}:
            raise ValueError(f"`--set {name}=…`: `generate` has no setting of this name.")
    return settings


def parse_numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """Numbers with commas between them, each once, ascending. Raises `ValueError` for anything else."""
    try:
        return sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"`{option}` takes numbers with commas between them, got {text!r}.") from None


def read_text(file: Path) -> str:
    """Text of a file, or of standard input for `-`, without a byte order mark.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for one that is not UTF-8.
    """
    if str(file) == "-" and sys.stdin is None:
        return ""
    content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"The text of {shown(_name(file))} is not UTF-8: {error}.") from None


def read_prompt_file(file: Path) -> tuple[list[Prompt], str]:
    """The prompts of a file (see [`read_prompts`]) or of standard input, and its name.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for a malformed one.
    """
    from .prompts import read_prompts

    return read_prompts(_name(file), read_text(file)), _name(file)


def _name(file: Path) -> str:
    return STANDARD_INPUT if str(file) == "-" else str(file)
