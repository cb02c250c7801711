"""From the messages of a chat to its prompt. What the chat template would leave out in silence is refused."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..generation.versions import named_thoughts
from ..training.written import pieces, spellings, squeezed
from .calls import RequestError
from .limits import LineCounter
from .message import THOUGHTS

Message = dict[str, Any]

# Fields of messages that need not be in the text: a call and its result stand one behind the other.
UNWRITTEN = {"role", "content", "tool_calls", "tool_call_id", *THOUGHTS}
# What templates call their switch for thoughts, where they have one.
SWITCHES = ("reasoning_effort", "enable_thinking", "thinking")
NEAR = 2000  # characters that templates write between two messages
MOST_COMPARED = 2**29  # characters: about a second
MOST_FIELDS = 32  # of other names: each is one more text to compare
MARK = re.compile(r"mark[\dx]+z")
EFFORT = re.compile(rf"(?<![.\w'\"])({'|'.join(SWITCHES)})(?![\w'\"])")


class Prompt:
    """What a template wrote. Each piece of a chat is looked for near the one before: where a template keeps their
    order, what is compared grows with the length of the chat alone, and elsewhere it has a limit."""

    def __init__(self, text: str):
        self.text, self.place, self.left = squeezed(text), 0, MOST_COMPARED

    def holds(self, piece: str) -> bool:
        """Whether a piece is there, in any spelling. Raises `RequestError` once too much was compared."""
        wanted = list(dict.fromkeys(spellings(piece)))
        longest, size = max(map(len, wanted)), NEAR
        while True:
            behind = self.place, self.place + size + longest
            before = max(0, self.place - size), self.place + longest
            for begin, end in (behind, before):
                for spelling in wanted:
                    self.left -= max(1, min(end, len(self.text)) - begin - len(spelling))
                    if (found := self.text.find(spelling, begin, end)) >= 0:
                        self.place = found + len(spelling)
                        return True
            if self.left < 0:
                raise RequestError("It takes too long to find these messages in the prompt.", param="messages")
            if before[0] == 0 and behind[1] >= len(self.text):
                return False
            size *= 2


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
        # For thoughts or none, where the template has no switch for them: field, word of it, whether for thoughts.
        self.wishes: list[tuple[str, str, bool]] = []
        self.lines = LineCounter()
        self.source = str(tokenizer.get_chat_template(None, tools))
        self.read = set(re.findall(r"\w+", self.source))
        self.messages = [named_thoughts(message) for message in self._known(messages)]

    def _known(self, messages: Sequence[Message]) -> Iterator[Message]:
        """The messages, with what templates do not know where they write such things."""
        runs: list[list[Message]] = []
        for message in messages:
            role = message["role"]
            if role == "developer" and "developer" not in self.source:
                if runs and runs[-1][0]["role"] == "system":  # many templates know one, and in front
                    runs[-1].append(message)
                    continue
                role = "system"
            elif role == "function":  # what OpenAI's API had before tools
                role = "tool"
            runs.append([message | {"role": role}])
        for run in runs:
            whole = {name: value for message in run for name, value in message.items()}
            content = "\n\n".join(filter(None, (message["content"] for message in run)))
            yield whole | {"role": run[0]["role"], "content": content}

    def think(self, effort: str | None, words: dict[str, Any], *, has_grammar: bool) -> bool:
        """Takes the client's keywords of the template, and OpenAI's `reasoning_effort`; says whether they ask for
        thoughts. An answer that follows a grammar has none where nobody asks and the template can do without. Raises
        `RequestError` for what the template does not know."""
        found = EFFORT.findall(self.source)
        switch = next((name for name in SWITCHES if name in found), None)
        wants = effort not in (None, "none", "minimal")
        field = "reasoning_effort"
        if effort is not None and switch in words:
            raise RequestError(f"`{field}` sets {switch!r} of the chat template: leave one out.", param=field)
        if switch is None and effort not in (None, "minimal"):
            self.wishes.append((field, "", wants))
        for name in sorted(words.keys() - self.read):
            if name in SWITCHES:
                if words[name] not in (None, "", "minimal"):
                    self.wishes.append(("chat_template_kwargs", name, words[name] not in (False, "none")))
            elif words[name]:
                message = f"`chat_template_kwargs`: the chat template does not read {name!r}."
                raise RequestError(message, param="chat_template_kwargs")
        self.words = dict(words)
        if switch == "reasoning_effort":
            self.words |= {} if effort is None else {switch: effort}
        elif switch is not None and (effort is not None or (has_grammar and switch not in words)):
            self.words[switch] = wants
        return wants or any(words.get(name) for name in found if name != "reasoning_effort")

    def check_thoughts(self, thinks: bool) -> None:
        """Raises `RequestError` where a client asks for thoughts or none, and the template always does the other;
        `thinks`: it opens thoughts."""
        for field, name, wants in self.wishes:
            if wants != thinks:
                does = f"does not read {name!r} and " * bool(name)
                does += "always opens thoughts" if thinks else "knows no thoughts"
                raise RequestError(f"`{field}`: the chat template {does}: leave it out.", param=field)

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

    def _checked(self) -> str:
        text = self._written(self.messages)
        marked, marks = _with_marks(self.messages)
        try:
            written = set(MARK.findall(self._written(marked)))
        except RequestError:  # it looks into the texts
            written = set().union(*marks)
        prompt = Prompt(text)
        for number, (message, own) in enumerate(zip(self.messages, marks, strict=True)):
            piece = next((piece for piece in pieces(message) if not prompt.holds(piece)), None)
            if piece is not None or not own <= written:
                said = (message["content"] or str(message.get("tool_calls"))) if piece is None else piece
                what = f"{said!r:.80}, of the role {message['role']!r}"
                raise RequestError(
                    f"`messages.{number}`: the chat template leaves {what}, out.", param=f"messages.{number}"
                )
        names = sorted({name for message in self.messages for name in message} - UNWRITTEN)
        if len(names) > MOST_FIELDS:
            raise RequestError(f"The messages have more than {MOST_FIELDS} fields of other names.", param="messages")
        for name in names:
            without = [
                {key: value for key, value in message.items() if key != name or message["role"] == "tool"}
                for message in self.messages
            ]
            if without != self.messages and self._written(without) == text:
                place = next(n for n, message in enumerate(self.messages) if message != without[n])
                field = f"messages.{place}.{name}"
                raise RequestError(f"`{field}`: the chat template does not write it.", param=field)
        return text


def _with_marks(messages: Sequence[Message]) -> tuple[list[Message], list[set[str]]]:
    """The messages with marks in place of texts and of the names of calls, and the marks of each."""
    marked, marks = [], []
    for number, message in enumerate(messages):
        content, calls = f"mark{number}z" if message["content"].strip() else "", message.get("tool_calls") or []
        names = [f"mark{number}x{place}z" for place in range(len(calls))]
        calls = [
            call | {"function": call["function"] | {"name": name}} for call, name in zip(calls, names, strict=True)
        ]
        marked.append(message | {"content": content} | ({"tool_calls": calls} if calls else {}))
        marks.append({*names, content} - {""})
    return marked, marks


def _parts(message: Message) -> list[Message]:
    """A message as several, which have the text or one call each."""
    calls = message.get("tool_calls") or []
    if len(calls) + bool(message["content"]) < 2:
        return [message]
    texts = [{name: value for name, value in message.items() if name != "tool_calls"}] if message["content"] else []
    return texts + [{"role": message["role"], "content": "", "tool_calls": [call]} for call in calls]
