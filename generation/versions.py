"""What differs between the versions of transformers; all other files speak one language."""

import logging
from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import signature
from typing import Any, TypeVar

import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast

Function = TypeVar("Function", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

# This library, as messages name it: the code beside a checkpoint has no package to ask.
RELEASE = "wedlm-hf 0.1"
# Of config.json and adapter_config.json. Files that an older library would misread state theirs as `wedlm_format`.
FORMAT = 1
# The oldest and the newest transformers that the tests ran with.
TESTED = ("5.19.0", "5.24.0")


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


_OLDEST, _NEWEST = (".".join(map(str, _minor(version))) for version in TESTED)

# Here and not in a function: the files whose imports fail with an older transformers import this one first.
if _minor(transformers.__version__) < _minor(_OLDEST):
    raise ImportError(
        f"{RELEASE} needs transformers {_OLDEST} to {_NEWEST}, got {transformers.__version__}: "
        f"pip install 'transformers>={_OLDEST}'"
    )

# What is to be said of a transformers that is too new to be known.
UNTESTED = ""
if _minor(transformers.__version__) > _minor(_NEWEST):
    UNTESTED = (
        f"transformers {transformers.__version__} is newer than what {RELEASE} was tested with, {_OLDEST} to "
        f"{_NEWEST}: where something fails, try a newer wedlm-hf, or `pip install 'transformers=={_NEWEST}.*'`."
    )


@cache
def warn_if_untested() -> None:
    """Says once, when the first model is made, that the installed transformers is too new to be known."""
    if UNTESTED:
        logger.warning(UNTESTED)


def explained(function: Function) -> Function:
    """With a transformers that is too new to be known, whatever this function raises says so, in a note."""
    if not UNTESTED:
        return function

    @wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if UNTESTED not in getattr(error, "__notes__", ()):
                error.add_note(UNTESTED)
            raise

    return noting  # type: ignore[return-value]


def check_format(config: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a config.json or adapter_config.json that a later library wrote and this one would
    misread."""
    if (found := config.get("wedlm_format", FORMAT)) != FORMAT:
        raise ValueError(
            f"The checkpoint has format {found!r}, of a later wedlm-hf, and {RELEASE} reads format {FORMAT}: "
            "pip install --upgrade wedlm-hf"
        )


# What `forward`, `generate` and their outputs call the key/value cache: "past_key_values" up to 5.23, "cache" since
# 5.24, which takes the older name with a warning (up to 5.40 in `forward`, up to 6.0 in `generate`).
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
OTHER_NAME = {"cache": "past_key_values", "past_key_values": "cache"}[CACHE]


def cache_of(outputs: Any) -> Any:
    """The cache in the outputs of a model."""
    return getattr(outputs, CACHE)


def cache_name(model: Any) -> str:
    """What a model's `forward` calls its cache: [`CACHE`], but for Mamba 2 up to transformers 5.23."""
    names = signature(type(model).forward).parameters
    return "cache_params" if "cache_params" in names and CACHE not in names else CACHE


def rename_cache(kwargs: dict[str, Any]) -> None:
    """Gives the cache among these keywords the name that the installed transformers uses.

    Raises:
        TypeError: if both names are there.
    """
    if OTHER_NAME in kwargs:
        given = kwargs.pop(OTHER_NAME)
        if kwargs.setdefault(CACHE, given) is not given:
            raise TypeError(f"`cache` and `past_key_values` are two names of one argument: pass `{CACHE}` alone.")


def is_checkpointing(model: Any) -> bool:
    """Whether a model computes its activations again in the backward pass: what transformers calls gradient
    checkpointing up to 5.22, and activation checkpointing since 5.23."""
    names = "is_activation_checkpointing", "is_gradient_checkpointing"
    return bool(getattr(model, next((name for name in names if hasattr(type(model), name)), ""), False))


def named_thoughts(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn whose thoughts have the names that chat templates read, as transformers gives them since 5.21."""
    names = ("reasoning_content", "thinking", "reasoning")
    thoughts = next((turn[name] for name in names if turn.get(name) is not None), None)
    return turn if thoughts is None else {"thinking": thoughts, **turn, "reasoning_content": thoughts}


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
