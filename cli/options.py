"""How options are made of the fields of dataclasses, and those that commands share: prompts, loading, decoding."""

import gc
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from typer.models import ArgumentInfo

from ..checkpoints import NANO
from ..console.prompts import DEMO_PROMPTS, Turns, is_unicode, read_rows, read_text
from ..eval.report.request import check_temperature
from .settings import checked, parse_settings

MODEL_HELP = "Folder or Hub id of a model, or a GGUF file; folder of an adapter. Default: wedlm-nano."
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)]
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


@contextmanager
def loading_shown(checkpoint: str | None) -> Iterator[None]:
    """Says on a terminal that a model is loaded, from the first moment on: importing torch takes seconds, and so does
    finding the format that this machine multiplies fastest, once. Nobody looks for garbage meanwhile, since what is
    imported and loaded stays: that would take a tenth of the time."""
    name = NANO.name if checkpoint is None else checkpoint
    said = f"Loading {escape(name)} (once for each model, this machine's fastest format is looked for)"
    gc.disable()
    try:
        with Console(stderr=True).status(said):
            yield
    finally:
        gc.enable()


def _is_no_fallback(record: logging.LogRecord) -> bool:
    return "falling back to its reference" not in record.getMessage()


@dataclass(frozen=True)
class LoadingOptions:
    """Model and machine.

    Attributes:
        adapter: mask adapter or LoRA for the model: folder or Hub id; uno:NAME for a mask adapter of Uno.
        any_base: take a mask adapter also where the model is a fine-tune of the adapter's base.
        dtype: of the weights: fastest (on this CPU; elsewhere auto), packed (16-bit weights on a CPU), 8bit, 4bit (on
            a CPU), auto (the checkpoint's), float32, bfloat16 or float16.
        device: such as cpu or cuda; default: cuda if there is one.
        threads: CPU threads; default: as many as have work.

    Raises:
        ValueError: for fewer than one thread.
    """

    adapter: str | None = None
    any_base: bool = False
    dtype: Literal["fastest", "packed", "8bit", "4bit", "auto", "float32", "bfloat16", "float16"] = "fastest"
    device: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"`threads` must be at least 1, got {self.threads}.")

    def load(self, checkpoint: str | None, needs_masks: bool = True) -> tuple[Any, Any]:
        """Model, in evaluation mode, and tokenizer of a folder or Hub id, or of the folder of an adapter (see
        [`load_adapted`]); of wedlm-nano for None. Raises `OSError` or `ValueError` for what cannot be loaded, and
        `ValueError` for an unknown device."""
        import torch
        from transformers.utils.logging import disable_progress_bar

        from ..adapters.loading import load_adapted
        from ..checkpoints.loading import find_device
        from ..eval.measure import default_threads

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device = str(find_device(self.device, called="`--device {}`"))
        disable_progress_bar()
        if device.startswith("cpu"):  # each kernel that is missing needs a GPU
            logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_no_fallback)
        source = str(NANO) if checkpoint is None else checkpoint
        how: dict[str, Any] = {"dtype": self.dtype, "device": device, "any_base": self.any_base}
        model, tokenizer = load_adapted(source, self.adapter, **how, needs_masks=needs_masks)
        stored = model.generation_config
        is_ready = getattr(stored, "masks_ready", False) and not hasattr(model, "peft_config")  # said of the base
        if getattr(stored, "verification", None) is None and not is_ready:
            stored.verification = "exact"  # a checkpoint says that its masks are ready, or a person asks
        if self.threads is None:
            torch.set_num_threads(default_threads(model))
        return model.eval(), tokenizer


@dataclass(frozen=True)
class DecodingOptions:
    """Decoding (default: the checkpoint's generation_config.json).

    Attributes:
        strategy: parallel decoding (wedlm), the same block by block (block), or token by token (ar).
        verification: accept drafts that are AR decoding's own tokens (exact, default unless the checkpoint says that
            its masks are ready), or all (none, default where --entropy-threshold or --distance-penalty is given).
        window_size: W, slots predicted at a time (default with verification: planned step by step).
        entropy_threshold: τ, nats; masks below it are filled.
        distance_penalty: λ, nats per position.
        max_new_tokens: longest answer, in tokens.
        sample: draw tokens at random instead of the likeliest.
        temperature: of sampling; implies --sample.
        seed: of --sample.
        settings: any other keyword of `generate`; may be repeated.

    Raises:
        ValueError: for a length or a temperature that is out of range.
    """

    strategy: Literal["wedlm", "block", "ar"] = "wedlm"
    verification: Literal["none", "exact"] | None = None
    window_size: int | None = None
    entropy_threshold: float | None = None
    distance_penalty: float | None = None
    max_new_tokens: int | None = None
    sample: bool = False
    temperature: float | None = None
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"`--max-new-tokens` must be at least 1, got {self.max_new_tokens}.")
        check_temperature(self.temperature)

    def keywords(self) -> dict[str, Any]:
        """What was given, as keywords of `generate`. Raises `ValueError` for `--set` where a setting has an option of
        its own, and as [`checked`]."""
        own = {field.name for field in fields(self)} - {"sample", "seed", "settings"}
        if repeated := own & self.settings.keys():
            option = min(repeated).replace("_", "-")
            raise ValueError(f"`--set {min(repeated)}=…`: this setting has an option of its own, `--{option}`.")
        from ..generation.settings import ENTROPIES

        given = {name: getattr(self, name) for name in sorted(own) if getattr(self, name) is not None} | self.settings
        if self.strategy == "block" or {*ENTROPIES} & given.keys():
            given.setdefault("verification", "none")  # the only decoder that reads them
        if self.sample or self.temperature is not None:
            given["do_sample"] = True
        return checked(given)


def has_no_chat_template(tokenizer: Any, checkpoint: str | None) -> bool:
    """Whether prompts can only be continued as they are; says so on standard error."""
    if tokenizer.chat_template is not None:
        return False
    typer.echo(f"{checkpoint!r} has no chat template: the prompts are continued as they are.", err=True)
    return True


UsageError: Any = typer.BadParameter.__mro__[1]  # click's; newer versions of typer bring a copy of click

# What an option needs beside the name, type and docstring of its field.
_SPECIAL: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "file": (("--file", "-f"), {}),
    "settings": (("--set",), {"metavar": "NAME=VALUE"}),
    "model": ((), {"metavar": "MODEL"}),
    "start": (("--from",), {}),
    "seed": ((), {"min": 0, "max": 2**32 - 1}),
}
_MODEL = "model_by_option"


def with_options(command: Callable[..., None], *more: inspect.Parameter) -> Callable[..., None]:
    """Makes a command of a function. The fields of its parameters that are dataclasses become options, and `--model`
    gives the first of its arguments. The command has `more` parameters, which the function does not see. When it runs,
    it raises `UsageError` for a missing argument, and for a model that is named twice.

    The first line of a dataclass's docstring is the title of the options' panel in `--help`, and what the docstring
    says of a field is the help of its option; a field may be `Annotated[type, typer.Argument(…)]` instead.
    """
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: parameter.annotation for name, parameter in own.items() if is_dataclass(parameter.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.items():
        parameters += _panel(groups[name]) if name in groups else [parameter]
    arguments = [parameter for parameter in parameters if _is_argument(parameter)]
    shown = [  # an argument may be left out, since another way to give it may take its place
        parameter.replace(default=None, annotation=Annotated[str | None, get_args(parameter.annotation)[1]])
        if parameter in arguments
        else parameter
        for parameter in parameters
    ]
    if arguments:
        option = typer.Option("--model", "-m", help="The first argument as an option.")
        kind = inspect.Parameter.KEYWORD_ONLY
        shown.append(inspect.Parameter(_MODEL, kind, default=None, annotation=Annotated[str | None, option]))

    @wraps(command)
    def run(**values: Any) -> None:
        given = [values.pop(_MODEL, None), *(values[parameter.name] for parameter in arguments)]
        values |= _assigned(arguments, [value for value in given if value is not None])
        for name, group in groups.items():
            given_fields = {field.name: values[field.name] for field in fields(group)}
            if "settings" in given_fields:
                given_fields["settings"] = parse_settings(given_fields["settings"])
            values[name] = group(**given_fields)
        command(**{name: values[name] for name in own})

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*shown, *more)]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # where typer looks
    return run


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Whether it is an argument of one word."""
    kind, info = get_args(parameter.annotation)
    return isinstance(info, ArgumentInfo) and "list" not in str(kind)


def _assigned(arguments: Sequence[inspect.Parameter], given: Sequence[str]) -> dict[str, Any]:
    """The words in the order of the arguments, and defaults for the others."""
    if len(given) > len(arguments):
        raise UsageError("The model is named twice, by `--model` and as an argument.")
    found: dict[str, Any] = {}
    for parameter, word in zip_longest(arguments, given):
        kind, info = get_args(parameter.annotation)
        if word is None and parameter.default is parameter.empty:
            raise UsageError(f"Missing argument '{info.metavar}'.")
        found[parameter.name] = parameter.default if word is None else Path(word) if kind is Path else word
    return found


def _panel(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass, their options in a panel of their own."""
    hints, helps, found = get_type_hints(group, include_extras=True), _helps(group), []
    title = (group.__doc__ or "").partition("\n")[0].rstrip(".")
    for parameter in inspect.signature(group).parameters.values():
        kind, default = hints[parameter.name], parameter.default
        if get_origin(kind) is Annotated:
            kind, info = get_args(kind)
        else:
            names, extra = _SPECIAL.get(parameter.name, ((), {}))
            if default is False:
                names = (f"--{parameter.name.replace('_', '-')}",)
            if get_origin(kind) is dict:
                kind, default = list[str] | None, None
            if get_origin(kind) is tuple:
                extra = {"metavar": "LIST", "parser": _list_parser(get_args(kind)[0])}
                kind, default = str, ",".join(map(str, default))
            helped = {"help": helps.get(parameter.name), **extra}
            is_argument = parameter.name == "model"
            info = typer.Argument(**helped) if is_argument else typer.Option(*names, **helped, rich_help_panel=title)
        found.append(parameter.replace(default=default, annotation=Annotated[kind, info]))
    return found


def _helps(group: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each field, as sentences."""
    section = re.search(r"(?ms)^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", inspect.getdoc(group) or "")
    entries = re.findall(r"(?m)^    (\w+): (.*(?:\n      .*)*)", section[1] if section else "")
    texts = {name: " ".join(text.split()) for name, text in entries}
    return {name: text[0].upper() + text[1:] if text[0].isascii() else text for name, text in texts.items()}


def _list_parser(kind: Any) -> Callable[[str], tuple[Any, ...]]:
    """Reads values with commas between them; numbers each once, ascending. An empty text has none."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            values = [kind(part.strip()) for part in text.split(",")] if text else []
        except ValueError:
            raise typer.BadParameter(f"numbers with commas between them are needed, got {text!r}.") from None
        return tuple(values if kind is str else sorted(set(values)))

    parse.__name__ = "LIST"
    return parse
