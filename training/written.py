"""What of a turn a chat template has left out of a text."""

import json
from collections.abc import Iterator
from typing import Any


def pieces(turn: dict[str, Any]) -> list[str]:
    """A turn's text without thoughts in front of it, and the names and values among the arguments of its calls."""
    calls = [call.get("function", call) for call in turn.get("tool_calls") or []]
    values = [value for call in calls for value in _leaves(call["arguments"])]
    return [turn["content"].rsplit("</think>", 1)[-1], *values]


def squeezed(text: str) -> str:
    """A text without white space, which templates add and take away."""
    return "".join(text.split())


def is_in(piece: str, text: str) -> bool:
    """Whether text is there, which is [`squeezed`]."""
    return any(spelling in text for spelling in spellings(piece))


def spellings(piece: str) -> Iterator[str]:
    """How text may be written, [`squeezed`]: as itself, or inside a string of JSON or Python."""
    yield squeezed(piece)
    for written in (json.dumps(piece, ensure_ascii=False), json.dumps(piece), repr(piece)):
        yield squeezed(written[1:-1])


def _leaves(value: Any) -> Iterator[str]:
    """Names and values in the arguments of a call, but for those whose spelling is a template's choice."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        yield str(value)
