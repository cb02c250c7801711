"""Conversations as text: what a chat template makes of them, and which of it the assistant wrote."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..generation.versions import named_thoughts
from .written import is_in, missing_piece, squeezed

logger = get_logger(__name__)

Turn = dict[str, Any]
Span = tuple[int, int]  # of characters, the last one excluded

# Roles of ShareGPT's `conversations` whose names differ from those of chat templates.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_ASSISTANTS = {"assistant", "gpt", "chatgpt", "bot", "model", "ai"}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def read_turn(turn: Any, kind: str, where: str, *, keeps_nulls: bool) -> Turn:
    """A turn in ChatML: text of its parts, ShareGPT's names replaced, tool arguments as objects. Raises `ValueError`
    for anything else, and for what chat templates would leave out in silence."""
    turn = dict(turn) if isinstance(turn, Mapping) else {}
    for old, new in (("from", "role"), ("value", "content")):
        if old in turn:
            turn[new] = turn.pop(old)
    if not isinstance(turn.get("role"), str) or (turn.get("content") is None and not turn.get("tool_calls")):
        keys = "`from` and `value`" if kind == "conversations" else "`role` and `content`"
        raise ValueError(f"{where}: each turn of `{kind}` needs {keys}: {turn!r:.80}.")
    text = turn.get("content")
    if isinstance(text, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in text):
        text = "".join(str(part.get("text") or "") for part in text)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: `content` of each turn must be text, got {text!r:.80}.")
    role = turn["role"]
    if kind == "conversations":
        role = _ROLES.get(role.lower(), role)
    if role != "assistant" and role.strip().lower() in _ASSISTANTS:
        raise ValueError(f"{where}: `role` of the assistant must be 'assistant', got {role!r}.")
    if turn.get("function_call"):
        raise ValueError(f"{where}: chat templates do not know `function_call`: write it as one of `tool_calls`.")
    if turn.get("weight", 1) not in (None, 1):
        raise ValueError(f"{where}: `weight` must be 1, got {turn['weight']!r}: each turn is learnt as any other.")
    if calls := turn.get("tool_calls"):
        turn["tool_calls"] = [_tool_call(call, where, keeps_nulls) for call in _unpacked(calls, "tool_calls", where)]
    return turn | {"role": role, "content": text or ""}


def read_tools(tools: Any, where: str, *, keeps_nulls: bool) -> list[Any] | None:
    """The tools of an example, None for none. Raises `ValueError` for anything but a list of objects."""
    read = _unpacked(tools, "tools", where) if tools else []
    return (read if keeps_nulls else _without_nulls(read)) or None


def _unpacked(value: Any, name: str, where: str) -> list[Any]:
    """A list of objects, or of the JSON text of one."""
    unpacked = _from_json(value)
    if not isinstance(unpacked, list) or not all(isinstance(item, dict) for item in unpacked):
        raise ValueError(f"{where}: `{name}` must be a list of objects, got {value!r:.80}.")
    return unpacked


def _tool_call(call: Turn, where: str, keeps_nulls: bool) -> Turn:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = _from_json(function.get("arguments")) if function.get("arguments") != "" else {}  # none, as served
    if not isinstance(arguments, dict):
        got = f"{function.get('arguments')!r:.80}"
        raise ValueError(f"{where}: `arguments` of a tool call must be a JSON object, got {got}.")
    if arguments is function.get("arguments") and not keeps_nulls:
        arguments = _without_nulls(arguments)
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _from_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None


def _without_nulls(value: Any) -> Any:
    """Tables give each object the keys of all others, as nulls."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


@dataclass
class Conversation:
    """Turns as they were written, and how they are rendered. Its methods raise `ValueError`, with the place where it
    stands, for what the template refuses or leaves out."""

    turns: Sequence[Turn]
    begin: int  # number of the first turn that is learnt: that of a completion
    tools: list[Any] | None
    template_kwargs: dict[str, Any]
    where: str

    def text(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None, assistant_only: bool
    ) -> tuple[str, list[Span]]:
        """The text, and which parts of it are supervised: all from the first learnt turn on, or of that what the
        template marks as the assistant's. The template is the tokenizer's where it is None."""
        text, spans = self._rendered(self.turns, tokenizer, template, marks=assistant_only)
        begin = 0
        if self.begin:
            prompt, _ = self._rendered(self.turns[: self.begin], tokenizer, template, add_generation_prompt=True)
            ends = (number for number, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1])
            begin = next(ends, min(len(prompt), len(text)))
        spans = spans if assistant_only else [(0, len(text))]
        spans = [(max(start, begin), end) for start, end in spans if end > begin]
        self._check(text, "".join(text[start:end] for start, end in spans), tokenizer, template)
        return text, spans

    def _rendered(
        self, turns: Sequence[Turn], tokenizer: Any, template: str | None, marks: bool = False, **how: Any
    ) -> tuple[str, list[Span]]:
        given = [named_thoughts({key: value for key, value in turn.items() if value is not None}) for turn in turns]
        settings = {**tokenizer.special_tokens_map, **self.template_kwargs, **how}
        try:
            template = tokenizer.get_chat_template(template, self.tools)
            rendered: Any = render_jinja_template(
                [given], tools=self.tools, chat_template=template, return_assistant_tokens_mask=marks, **settings
            )
        except Exception as error:  # templates are programs
            raise ValueError(f"{self.where}: the chat template refuses it: {error}") from error
        (text,), spans = rendered
        return text, spans[0] if marks else []

    def _check(self, text: str, taught: str, tokenizer: Any, template: str | None) -> None:
        """What was written must be in the text, and what is learnt of it in what is taught."""
        source = str(tokenizer.get_chat_template(template, self.tools))
        whole, taught = squeezed(text), squeezed(taught)
        if self.tools and "tools" not in source:
            raise self._left_out("`tools`: the chat template knows none")
        for number, turn in enumerate(self.turns):
            learnt = turn["role"] == "assistant" and number >= self.begin
            there = taught if learnt else whole
            if turn.get("tool_calls") and "tool_calls" not in source:
                raise self._left_out("`tool_calls`: the chat template knows none")
            if (missing := missing_piece(turn, there)) is not None:
                place = "outside its {% generation %} markers" if learnt and is_in(missing, whole) else "out"
                raise self._left_out(f"{missing!r:.80}: the chat template leaves it {place}")
            *thoughts, _ = turn["content"].rsplit("</think>", 1)
            thoughts = [text.replace("<think>", "") for text in thoughts]
            if thought := next((turn[name] for name in _THOUGHTS if turn.get(name)), ""):
                if not any(name in source for name in _THOUGHTS):
                    raise self._left_out(f"`{_THOUGHTS[0]}`: the chat template knows no thoughts")
                thoughts.append(thought)
            if learnt and not all(is_in(text, there) for text in thoughts):
                logger.warning_once(
                    f"{self.where} and perhaps others: the chat template leaves out thoughts of the assistant, so "
                    "they are not learnt (some keep those of the last turn alone)."
                )

    def _left_out(self, what: str) -> ValueError:
        help = "Take a `chat_template_path` that has it, or leave it out of the data"
        return ValueError(f"{self.where} has {what}. {help}.")
