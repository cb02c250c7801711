"""Groups of options as dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

from typer.models import OptionInfo


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command of a function that has parameters of dataclass types: their fields become its options.

    A field is `Annotated[type, typer.Option(…)]`, as a parameter would be. The first line of the dataclass's docstring
    is the title of their panel in `--help`.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group: Any = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            groups[parameter.name] = group
            parameters += [_in_panel(field, group) for field in _fields(group)]
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in _fields(kind)})
        command(**values)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # where typer looks
    return run


def _fields(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)  # annotations of a parent class are resolved in its own module
    return [field.replace(annotation=hints[field.name]) for field in inspect.signature(group).parameters.values()]


def _in_panel(field: inspect.Parameter, group: type) -> inspect.Parameter:
    kind, info = get_args(field.annotation)
    info = copy(info)
    if isinstance(info, OptionInfo):
        info.rich_help_panel = (group.__doc__ or "").partition("\n")[0].rstrip(".")
    return field.replace(annotation=Annotated[kind, info])
