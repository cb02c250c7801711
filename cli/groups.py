"""Groups of options as dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

from typer.models import OptionInfo


def with_options(command: Callable[..., None], *more: inspect.Parameter) -> Callable[..., None]:
    """Makes a command of a function that has parameters of dataclass types: their fields become its options.

    A field is `Annotated[type, typer.Option(…)]`, as a parameter would be. The first line of the dataclass's docstring
    is the title of their panel in `--help`. The command has `more` parameters, which the function does not see.
    """
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
    parameters: list[inspect.Parameter] = []
    for name, one in own.items():
        parameters += _panel(groups[name]) if name in groups else [one]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values[field.name] for field in fields(group)})
        command(**{name: values[name] for name in own})

    keyword_only = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*parameters, *more)]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # where typer looks
    return run


def _panel(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass, their options in a panel of their own."""
    hints = get_type_hints(group, include_extras=True)  # annotations of a parent class are resolved in its own module
    title, found = (group.__doc__ or "").partition("\n")[0].rstrip("."), []
    for field in inspect.signature(group).parameters.values():
        kind, info = get_args(hints[field.name])
        if isinstance(info, OptionInfo):
            info = copy(info)
            info.rich_help_panel = title
        found.append(field.replace(annotation=Annotated[kind, info]))
    return found
