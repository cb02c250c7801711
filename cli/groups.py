"""Commands whose options are the fields of dataclasses, and whose model is an argument or `--model`."""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

UsageError: Any = typer.BadParameter.__mro__[1]  # click's; newer versions of typer bring a copy of click

# What an option needs beside the name, type and docstring of its field.
_SPECIAL: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "file": (("--file", "-f"), {}),
    "settings": (("--set",), {"metavar": "NAME=VALUE"}),
    "model": ((), {"metavar": "MODEL"}),
    "start": (("--from",), {}),
}
_MODEL = "model_by_option"
MODEL_HELP = "Folder or Hub id of a model; folder of an adapter; with --adapter also a GGUF file. Default: wedlm-nano."
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)]


def with_options(command: Callable[..., None], *more: inspect.Parameter) -> Callable[..., None]:
    """Makes a command of a function. The fields of its parameters that are dataclasses become options, and `--model`
    gives the first of its arguments. The command has `more` parameters, which the function does not see. When it runs,
    it raises `UsageError` for a missing argument, and for a model that is named twice.

    The first line of a dataclass's docstring is the title of the options' panel in `--help`, and what the docstring
    says of a field is the help of its option; a field may be `Annotated[type, typer.Option(…)]` instead.
    """
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
    parameters: list[inspect.Parameter] = []
    for name, one in own.items():
        parameters += _panel(groups[name]) if name in groups else [one]
    arguments = [one for one in parameters if _is_argument(one)]
    shown = [one.replace(default=None, annotation=_optional(one)) if one in arguments else one for one in parameters]
    if arguments:
        option = typer.Option("--model", "-m", help="The first argument as an option.", show_default=False)
        kind = inspect.Parameter.KEYWORD_ONLY
        shown.append(inspect.Parameter(_MODEL, kind, default=None, annotation=Annotated[str | None, option]))

    @wraps(command)
    def run(**values: Any) -> None:
        given = [values.pop(_MODEL, None), *(values[one.name] for one in arguments)]
        values |= _assigned(arguments, [value for value in given if value is not None])
        for name, group in groups.items():
            given_fields = {field.name: values[field.name] for field in fields(group)}
            if "settings" in given_fields:
                given_fields["settings"] = parse_settings(given_fields["settings"])
            values[name] = group(**given_fields)
        command(**{name: values[name] for name in own})

    keyword_only = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*shown, *more)]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # where typer looks
    return run


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Whether it is an argument of one word."""
    kind, *info = get_args(parameter.annotation) or (None,)
    return any(isinstance(one, ArgumentInfo) for one in info) and "list" not in str(kind)


def _optional(argument: inspect.Parameter) -> Any:
    """An argument's annotation as one that may be left out, since another way to give it may take its place."""
    info = copy(get_args(argument.annotation)[1])
    info.show_default = False
    return Annotated[str | None, info]


def _assigned(arguments: Sequence[inspect.Parameter], given: Sequence[str]) -> dict[str, Any]:
    """The words in the order of the arguments, and defaults for the others."""
    if len(given) > len(arguments):
        raise UsageError("The model is named twice, by `--model` and as an argument.")
    found: dict[str, Any] = {}
    for place, one in enumerate(arguments):
        if place >= len(given) and one.default is one.empty:
            raise UsageError(f"Missing argument '{get_args(one.annotation)[1].metavar or one.name.upper()}'.")
        is_path = get_args(one.annotation)[0] is Path
        found[one.name] = one.default if place >= len(given) else Path(given[place]) if is_path else given[place]
    return found


def _panel(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass, their options in a panel of their own."""
    hints, helps, found = get_type_hints(group, include_extras=True), _helps(group), []
    title = (group.__doc__ or "").partition("\n")[0].rstrip(".")
    for field in inspect.signature(group).parameters.values():
        kind, default = hints[field.name], field.default
        if get_origin(kind) is Annotated:
            kind, info = get_args(kind)
            info = copy(info)
        else:
            names, extra = _SPECIAL.get(field.name, ((), {}))
            if default is False:
                names = (f"--{field.name.replace('_', '-')}",)
            if get_origin(kind) is dict:
                kind, default = list[str] | None, None
            if get_origin(kind) is tuple:
                extra = {"metavar": "LIST", "parser": _list_parser(get_args(kind)[0])}
                kind, default = str, ",".join(map(str, default))
            helped = {"help": helps.get(field.name), **extra}
            info = typer.Argument(**helped) if field.name == "model" else typer.Option(*names, **helped)
        if isinstance(info, OptionInfo):
            info.rich_help_panel = title
        found.append(field.replace(default=default, annotation=Annotated[kind, info]))
    return found


def _helps(group: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each field, as sentences."""
    section = re.search(r"(?ms)^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", inspect.getdoc(group) or "")
    entries = re.findall(r"(?m)^    (\w+): (.*(?:\n      .*)*)", section[1] if section else "")
    texts = {name: " ".join(text.split()) for name, text in entries}
    return {name: text[0].upper() + text[1:] if text[0].isascii() else text for name, text in texts.items()}


def _list_parser(kind: Any) -> Callable[[str], tuple[Any, ...]]:
    """Reads values with commas between them; numbers each once, ascending."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            values = [kind(part.strip()) for part in text.split(",")]
        except ValueError:
            raise typer.BadParameter(f"numbers with commas between them are needed, got {text!r}.") from None
        return tuple(values if kind is str else sorted(set(values)))

    parse.__name__ = "LIST"
    return parse


def parse_settings(given: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` pairs as keywords of `generate`; a value is JSON, or else text. Raises `ValueError` for another
    form, and for a name that is no setting of `generate`."""
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
