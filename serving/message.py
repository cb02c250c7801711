"""What of an answer's text is content, thoughts or a tool call: decided here alone, for whole and streamed answers.

A parser takes text in by `read` and, at its end, by `end`; both give items: text, [`ReasoningText`] or a [`ToolCall`].
"""

import json
import re
from collections.abc import Collection
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall
from transformers.utils.chat_parsing.content_parsers import STREAMABLE_PARSERS
from transformers.utils.chat_parsing.response_parser import ResponseParser

from .text import StopTrimmer

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of a message


class PlainParser:
    """All is content."""

    is_thinking = False

    def read(self, text: str) -> list[Any]:
        """Takes text in."""
        return [text] if text else []

    def end(self, is_cut: bool) -> list[Any]:
        """Takes the end; `is_cut`: there was no room for more."""
        return []


class CallParser(PlainParser):
    """All is the JSON of one tool call, as a grammar makes the model write it, or content if it is none.

    Args:
        names: of the tools.
    """

    def __init__(self, names: Collection[str]):
        self.names, self.parts = names, list[str]()

    def read(self, text: str) -> list[Any]:
        """Takes text in."""
        self.parts.append(text)
        return []

    def end(self, is_cut: bool) -> list[Any]:
        """Takes the end."""
        text = "".join(self.parts)
        try:
            found = json.loads(text)
            if found.keys() == {"name", "arguments"} and found["name"] in self.names:
                return calls_in(found)
        except Exception:  # cut, or another answer
            pass
        return [text] if text else []


class ThoughtsParser:
    """Thoughts, and behind them what another parser reads.

    Args:
        closing: ends the thoughts.
        behind: the other parser.
    """

    def __init__(self, closing: str, behind: Any):
        self._trimmer, self._behind = StopTrimmer([closing]), behind

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next belongs to thoughts."""
        return not self._trimmer.is_over

    def read(self, text: str) -> list[Any]:
        """Takes text in."""
        if not self.is_thinking:
            return self._behind.read(text)
        return _thoughts(self._trimmer.feed(text)) + self._behind.read(self._trimmer.behind)

    def end(self, is_cut: bool) -> list[Any]:
        """Takes the end."""
        return _thoughts(self._trimmer.rest()) + self._behind.end(is_cut)


def _thoughts(text: str) -> list[Any]:
    return [ReasoningText(text)] if text else []


class MessageParser(ResponseParser):
    """transformers' parser of messages, for which whatever a model writes is an answer: what is no tool call, or is
    cut before its end, is content as it was written. Only what the model writes is given out, not the prompt's part of
    the message.

    Args:
        template: how a message is written.
        prefix: the prompt, from the beginning of the message on.
        tools: what may be called.
        special: tokens that the template needs to see and people do not.
    """

    def __init__(self, template: Any, prefix: str, tools: Any = None, special: Collection[str] = ()):
        self._items: list[Any] = []
        self._begin = self._offset = 0  # of the open region, with its delimiter; of the answer
        self._is_cut = self._has_items = self._is_bare = False  # bare: nothing marks the open region as a call
        self._special = special
        self._names = {tool["function"]["name"] for tool in tools or []}
        super().__init__(template, prefix=prefix, tools=tools)
        self._offset = len(self._buffer)
        self._items.clear()

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next belongs to thoughts."""
        return self._current in THOUGHTS

    def read(self, text: str) -> list[Any]:
        """Takes text in."""
        self.feed(text)
        return self._take()

    def end(self, is_cut: bool) -> list[Any]:
        """Takes the end; `is_cut`: there was no room for more."""
        self._is_cut = is_cut
        self.finalize()
        if self._spec.implicit is None and not (self._items or self._has_items):  # all of it in no field
            self._add(self._buffer[self._offset :])
        return self._take()

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._begin, self._is_bare = m.start(), m.start() == m.end()

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        if not self._opened:
            self._begin = self._pos
        super()._accumulate(events, text)
        if self._current is not None and not self._is_structured:
            self._add(text)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        if not (self._opened and self._is_structured):
            super()._close_current(events)
            return
        name = self._current
        try:
            if name != "tool_calls" or self._is_cut:
                raise ValueError("no call, or the beginning of one")
            if not self._captures and self._spec.fields[name].content == "json":
                calls = [self._cast(call) for call in calls_in_text(self._body)]
            else:
                super()._close_current(events)
                calls = calls_in(events[-1]["value"])
            if self._is_bare and not {call.name for call in calls} <= self._names:
                raise ValueError("JSON that is no call")
            self._reset_to_implicit()
            for call in calls:
                self._add(call)
        except Exception:  # a model may write anything
            self._reset_to_implicit()
            self._add(self._buffer[max(self._begin, self._offset) : self._pos])

    def _cast(self, call: ToolCall) -> ToolCall:
        """A call whose arguments have the types that the tool's schema asks for."""
        function = {"name": call.name, "arguments": json.loads(call.arguments)}
        return calls_in(self._coerce_tool_calls({"function": function}))[0]

    @property
    def _is_structured(self) -> bool:
        """Whether the open region's text has a meaning only as a whole."""
        field = self._current and self._spec.fields[self._current]
        return bool(field and field.content not in STREAMABLE_PARSERS)

    def _add(self, item: Any) -> None:
        if isinstance(item, str):
            for written in self._special:
                item = item.replace(written, "")
            item = ReasoningText(item) if self.is_thinking else item
        if item != "":
            self._items.append(item)

    def _take(self) -> list[Any]:
        found, self._items = self._items, []
        self._has_items |= bool(found)
        return found


def calls_in(value: Any) -> list[ToolCall]:
    """The tool calls in what a model wrote as one: a call, or a list. Raises any exception for what is none."""
    if isinstance(value, list):
        if not value:
            raise ValueError("no call")
        return [call for each in value for call in calls_in(each)]
    if isinstance(value.get("function"), dict | list):
        return calls_in(value["function"])
    name, arguments = value["name"], value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    arguments = {} if arguments is None else arguments
    if not (isinstance(name, str) and name.isprintable() and name.strip() and isinstance(arguments, dict)):
        raise ValueError("no call")
    return [ToolCall(name, json.dumps(arguments, allow_nan=False))]


# What stands between calls, and the name in front of the arguments, as newer models of Mistral's write it.
_BETWEEN, _NAME = re.compile(r"[\s;,]*"), re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")


def calls_in_text(text: str) -> list[ToolCall]:
    """The tool calls in what a model wrote as JSON: one or several values. Raises any exception for what is none."""
    found: list[ToolCall] = []
    place = _BETWEEN.match(text).end()  # type: ignore[union-attr]
    while place < len(text) or not found:
        name = _NAME.match(text, place)
        value, place = json.JSONDecoder().raw_decode(text, name.end() if name else place)
        found += calls_in({"name": name[1], "arguments": value} if name else value)
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
    return found
