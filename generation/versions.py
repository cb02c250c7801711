"""What differs between the versions of transformers; all other files speak one language."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from transformers.modeling_outputs import BaseModelOutputWithPast

Function = TypeVar("Function", bound=Callable[..., Any])

# The oldest and the newest transformers that the tests ran with.
TESTED = ("5.18.0", "5.24.0")

# What `forward`, `generate` and their outputs call the key/value cache: "past_key_values" up to 5.23, "cache" since
# 5.24, which takes the older name with a warning (up to 5.40 in `forward`, up to 6.0 in `generate`).
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
OTHER_NAME = {"cache": "past_key_values", "past_key_values": "cache"}[CACHE]


def cache_of(outputs: Any) -> Any:
    """The cache in the outputs of a model."""
    return getattr(outputs, CACHE)


def rename_cache(kwargs: dict[str, Any]) -> None:
    """Gives the cache among these keywords the name that the installed transformers uses.

    Raises:
        TypeError: if both names are there.
    """
    if OTHER_NAME in kwargs:
        given = kwargs.pop(OTHER_NAME)
        if kwargs.setdefault(CACHE, given) is not given:
            raise TypeError(f"`cache` and `past_key_values` are two names of one argument: pass `{CACHE}` alone.")


def takes_cache(function: Function) -> Function:
    """Makes a `forward` that is written with a parameter `cache` take both names. Its signature shows the one that the
    installed transformers uses, by which transformers itself finds the parameter."""
    written = signature(function)

    @wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            rename_cache(kwargs)
            kwargs["cache"] = kwargs.pop(CACHE)
        return function(*args, **kwargs)

    parameters = [each.replace(name=CACHE if name == "cache" else name) for name, each in written.parameters.items()]
    renamed.__signature__ = written.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed  # type: ignore[return-value]
