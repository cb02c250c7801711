"""Commands whose options are the fields of dataclasses, and whose model is an argument or `--model`."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

# What an option needs beside the name, type and docstring of its field.
_SPECIAL: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "file": (("--file", "-f"), {}),
    "settings": (("--set",), {"metavar": "NAME=VALUE"}),
    "model": ((), {"metavar": "MODEL", "show_default": False}),
    "start": (("--from",), {}),
}
MODEL_HELP = "Folder or Hub id of a model; folder of an adapter; with --adapter also a GGUF file. Default: wedlm-nano."
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)]


class ModelCommand(TyperCommand):
    """A command whose first argument, a model, may be written as `--model` too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The parent's. Raises `UsageError` for wrong words."""
        if not any("--model" in one.opts for one in self.params):
            parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
            parser.add_argument("--model", "-m")
            try:
                found, rest = parser.parse_known_args(args)
            except argparse.ArgumentError as error:
                raise typer.BadParameter(str(error)) from None
            args = args if found.model is None else [found.model, *rest]
        return super().parse_args(ctx, args)


def with_options(command: Callable[..., None], *more: inspect.Parameter) -> Callable[..., None]:
    """Makes a command of a function. The fields of its parameters that are dataclasses become options.

    The first line of a dataclass's docstring is the title of the options' panel in `--help`, and what the docstring
    says of a field is the help of its option; a field may be `Annotated[type, typer.Option(…)]` instead. The command
    has `more` parameters, which the function does not see.
    """
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
    parameters = [one for name in own for one in (_panel(groups[name]) if name in groups else [own[name]])]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            given_fields = {field.name: values[field.name] for field in fields(group)}
            if "settings" in given_fields:
                given_fields["settings"] = parse_settings(given_fields["settings"])
            values[name] = group(**given_fields)
        command(**{name: values[name] for name in own})

    keyword_only = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*parameters, *more)]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # where typer looks
    return run


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
    section = re.search(
        r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", inspect.getdoc(group) or "", re.DOTALL | re.MULTILINE
    )
    entries = re.findall(r"^    (\w+): (.*(?:\n      .*)*)", section[1] if section else "", re.MULTILINE)
    return {
        name: " ".join((text[0].upper() + text[1:] if text[0].isascii() else text).split()) for name, text in entries
    }


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
    """`NAME=VALUE` pairs as keywords of `generate`; a value is JSON, or else text.

    Raises:
        ValueError: for another form, and for a name that is no setting of `generate`.
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
