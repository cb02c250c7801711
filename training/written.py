"""What of a turn a chat template has left out of a text."""

import json
from collections.abc import Iterator, Sequence
from typing import Any


def missing_piece(turn: dict[str, Any], text: str) -> str | None:
    """The first of a turn's texts, names and values of its calls that is not in the text, which is [`squeezed`];
    thoughts in front of its content do not count."""
    calls = [call.get("function", call) for call in turn.get("tool_calls") or []]
    pieces = [turn["content"].rsplit("</think>", 1)[-1], *_leaves(calls)]
    return next((piece for piece in pieces if not is_in(piece, text)), None)


def squeezed(text: str) -> str:
    """A text without white space, which templates add and take away."""
    return "".join(text.split())


def is_in(piece: str, text: str) -> bool:
    """Whether text is there, which is [`squeezed`], as itself or inside a string of JSON or Python."""
    spellings = (str, lambda it: json.dumps(it, ensure_ascii=False)[1:-1], lambda it: json.dumps(it)[1:-1],
                 lambda it: repr(it)[1:-1])  # fmt: skip
    return any(squeezed(spelling(piece)) in text for spelling in spellings)


def _leaves(calls: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Names and values among the arguments of calls, but for those whose spelling is a template's choice."""

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for name, part in value.items():
                yield name
                yield from walk(part)
        elif isinstance(value, list):
            for part in value:
                yield from walk(part)
        elif isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            yield str(value)

    for call in calls:
        yield from walk(call["arguments"])
