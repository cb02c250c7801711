"""From the messages of a chat to its prompt. What the chat template would leave out in silence is refused."""

import re
from collections.abc import Sequence
from typing import Any

from ..generation.versions import named_thoughts
from ..training.written import missing_piece, squeezed
from .calls import RequestError
from .limits import LineCounter
from .message import THOUGHTS

Message = dict[str, Any]

# Fields of messages that need not be in the text: a call and its result stand one behind the other.
UNWRITTEN = {"role", "content", "tool_calls", "tool_call_id", *THOUGHTS}
# What templates call their switch for thoughts, where they have one.
SWITCHES = ("reasoning_effort", "enable_thinking", "thinking")
NEAR = 2000  # characters that a template may write between two messages
EFFORT = re.compile(rf"(?<![.\w'\"])({'|'.join(SWITCHES)})(?![\w'\"])")


class Conversation:
    """Messages, and how they are written.

    Args:
        tokenizer: its chat template writes them.
        messages: as the endpoint takes them.
        tools: that may be called.
    """

    def __init__(self, tokenizer: Any, messages: Sequence[Message], tools: Any):
        self.tokenizer, self.tools = tokenizer, tools
        self.words: dict[str, Any] = {}  # keywords of the template
        self.lines = LineCounter()
        self.source = str(tokenizer.get_chat_template(None, tools))
        self.messages: list[Message] = []
        for message in messages:
            self._add(message)

    def _add(self, message: Message) -> None:
        """Takes a message in. What templates do not know stands where they write such things."""
        role = message["role"]
        if role == "function":  # what OpenAI's API had before tools
            role = "tool"
        elif role == "developer" and "developer" not in self.source:
            role = "system"
            if self.messages and self.messages[-1]["role"] == "system":  # many templates know one, and in front
                texts = [self.messages[-1]["content"], message["content"]]
                self.messages[-1]["content"] = "\n\n".join(filter(None, texts))
                message = {name: value for name, value in message.items() if name != "content"}
                self.messages[-1] |= message | {"role": role}
                return
        self.messages.append(named_thoughts(message | {"role": role}))

    def think(self, effort: str | None, words: dict[str, Any], *, has_grammar: bool) -> bool:
        """Takes the client's keywords of the template, and OpenAI's `reasoning_effort`; says whether they ask for
        thoughts. An answer that follows a grammar has none where nobody asks and the template can do without. Raises
        `RequestError` for what the template does not know."""
        found = EFFORT.findall(self.source)
        switch = next((name for name in SWITCHES if name in found), None)
        is_off = effort in ("none", "minimal")
        wants = effort is not None and not is_off
        field = "reasoning_effort" if effort else "chat_template_kwargs"
        if effort is not None and switch in words:
            raise RequestError(f"`{field}` sets {switch!r} of the chat template: leave one out.", param=field)
        if wants and switch is None:
            raise RequestError(f"`{field}`: the chat template knows no thoughts.", param=field)
        self.words = dict(words)
        if switch == "reasoning_effort":
            self.words |= {} if effort is None else {switch: effort}
        elif switch is not None and (effort is not None or (has_grammar and switch not in words)):
            self.words[switch] = wants
        return wants or any(words.get(name) for name in found if name != "reasoning_effort")

    def text(self) -> str:
        """The prompt. Raises `RequestError` for messages that the template refuses or leaves out."""
        try:
            return self._checked()
        except RequestError:
            whole = self.messages
            self.messages = [part for message in whole for part in _parts(message)]
            if len(self.messages) == len(whole):
                raise
            return self._checked()  # some templates write text or a call, and not both, and no second call

    def _checked(self) -> str:
        text = self._written(self.messages)
        self._check(text)
        return text

    def generation_prompt(self) -> str:
        """What stands in the prompt behind the messages."""
        bare = self._written(self.messages, add_generation_prompt=False)
        whole = self._written(self.messages)
        return whole[len(bare) :] if whole.startswith(bare) else ""

    def _written(self, messages: Sequence[Message], **how: Any) -> str:
        words = {"tokenize": False, "add_generation_prompt": True} | self.words | how
        try:
            with self.lines.counting():
                return str(self.tokenizer.apply_chat_template(messages, tools=self.tools, **words))
        except Exception as error:  # a template is a program: whatever it raises is about what it was given
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from None

    def _check(self, text: str) -> None:
        whole = squeezed(text)
        marks = [f"<mark-{number}>" if m["content"].strip() else "" for number, m in enumerate(self.messages)]
        marked = [message | {"content": mark} for message, mark in zip(self.messages, marks, strict=True)]
        try:
            written = set(re.findall(r"<mark-\d+>", self._written(marked)))
        except RequestError:  # it looks into the texts
            written = {*marks}
        # Behind the last text that was found, as templates write messages in their order; characters of those since.
        place = skipped = 0
        for number, (message, mark) in enumerate(zip(self.messages, marks, strict=True)):
            content = squeezed(message["content"])
            skipped += len(content) + len(str(message.get("tool_calls") or ""))
            near = whole[place : place + 2 * skipped + NEAR]
            piece = missing_piece(message, near)
            if piece is not None:
                piece, near = missing_piece(message, whole), whole[place:]
            if content and (found := near.find(content)) >= 0:
                place, skipped = place + found + len(content), 0
            if piece is not None or (mark and mark not in written):
                what = f"{(message['content'] if piece is None else piece)!r:.80}, of the role {message['role']!r}"
                raise RequestError(
                    f"`messages.{number}`: the chat template leaves {what}, out.", param=f"messages.{number}"
                )
        for name in sorted({name for message in self.messages for name in message} - UNWRITTEN):
            without = [
                {key: value for key, value in message.items() if key != name or message["role"] == "tool"}
                for message in self.messages
            ]
            if without != self.messages and self._written(without) == text:
                place = next(n for n, message in enumerate(self.messages) if message != without[n])
                field = f"messages.{place}.{name}"
                raise RequestError(f"`{field}`: the chat template does not write it.", param=field)


def _parts(message: Message) -> list[Message]:
    """A message as several, which have the text or one call each."""
    calls = message.get("tool_calls") or []
    if len(calls) + bool(message["content"]) < 2:
        return [message]
    texts = [{name: value for name, value in message.items() if name != "tool_calls"}] if message["content"] else []
    return texts + [{"role": message["role"], "content": "", "tool_calls": [call]} for call in calls]
