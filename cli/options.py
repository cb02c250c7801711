"""Options that several commands share: prompts, and how they are decoded."""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..console.prompts import Turns, is_unicode, read_rows, read_text
from ..eval.options import DEMO_PROMPTS, NANO
from .groups import MODEL_HELP

CheckpointArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
CompareOption = Annotated[bool, typer.Option(help="Decode each prompt with AR too, right after.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as one JSON object and nothing else.")]


@dataclass(frozen=True)
class PromptOptions:
    """Prompts.

    Attributes:
        file: prompts, one a line, or .jsonl with `prompt` or `messages`; - is standard input.
        raw: continue the prompts as they are, without a chat template.
    """

    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPTS", help="Default: the lines of piped standard input, or else built-in prompts."
        ),
    ] = None
    file: Path | None = None
    raw: bool = False

    def read(self) -> list[str | Turns]:
        """The prompts on the command line and in the file, or else those that are piped in, or else the built-in ones.
        Raises `OSError` for a file that cannot be read, and `ValueError` as [`read_rows`], for an empty prompt, and
        for text that is not UTF-8."""
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
            name, text = read_text(file)
            if text.strip() or not is_piped:
                given += [row.prompt for row in read_rows(name, text)]
        return given or list(DEMO_PROMPTS)


@dataclass(frozen=True)
class DecodingOptions:
    """Decoding (default: the checkpoint's generation_config.json).

    Attributes:
        strategy: parallel decoding (wedlm), the same block by block (block), or token by token (ar).
        verification: accept drafts that are AR decoding's own tokens (exact, default with a mask adapter) or plausible
            to AR (typical), or all (none).
        window_size: W, slots predicted at a time.
        entropy_threshold: τ, nats; masks below it are filled.
        distance_penalty: λ, nats per position.
        max_new_tokens: longest answer, in tokens.
        sample: draw tokens at random instead of the likeliest.
        temperature: of sampling; implies --sample.
        seed: of --sample.
        settings: any other keyword of `generate`; may be repeated.
    """

    strategy: Literal["wedlm", "block", "ar"] = "wedlm"
    verification: Literal["none", "exact", "typical"] | None = None
    window_size: int | None = None
    entropy_threshold: float | None = None
    distance_penalty: float | None = None
    max_new_tokens: int | None = None
    sample: bool = False
    temperature: float | None = None
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def keywords(self) -> dict[str, Any]:
        """What was given, as keywords of `generate`. Raises `ValueError` for settings of parallel decoding that are
        out of range, before any weights are read."""
        own = {field.name for field in fields(self)} - {"sample", "seed", "settings"}
        if repeated := own & self.settings.keys():
            option = min(repeated).replace("_", "-")
            raise ValueError(f"`--set {min(repeated)}=…`: this setting has an option of its own, `--{option}`.")
        from ..generation.settings import SETTING_NAMES, WeDLMGenerationSettings

        given = {name: getattr(self, name) for name in sorted(own) if getattr(self, name) is not None} | self.settings
        WeDLMGenerationSettings(**{name: value for name, value in given.items() if name in SETTING_NAMES})
        return given | ({"do_sample": True} if self.sample or self.temperature is not None else {})


def has_no_chat_template(tokenizer: Any, checkpoint: str | None) -> bool:
    """Whether prompts can only be continued as they are; says so on standard error."""
    if tokenizer.chat_template is not None:
        return False
    name = str(NANO) if checkpoint is None else checkpoint
    typer.echo(f"{name!r} has no chat template: the prompts are continued as they are.", err=True)
    return True
