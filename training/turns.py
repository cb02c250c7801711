"""Conversations as text: what a chat template makes of them, and which of it the assistant wrote."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template
from trl.chat_template_utils import has_generation_markers
from trl.data_utils import common_prefix_length

from ..generation.versions import named_thoughts
from .written import is_in, pieces, squeezed

Turn = dict[str, Any]
Span = tuple[int, int]  # of characters, the last one excluded

# Roles of ShareGPT's `conversations` whose names differ from those of chat templates.
_CALL = "function_call"
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool",
    "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
_ASSISTANTS = {"assistant", "gpt", "chatgpt", "bot", "model", "ai"}
THOUGHTS_LEFT_OUT = (
    "the chat template leaves out thoughts of the assistant, so they are not learnt (some templates keep those of the "
    "last turn alone)"
)
_WEIGHTS = ("weight", "loss", "train")  # how much of a turn is learnt: OpenAI's name, and those of other trainers
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
    role, text = turn["role"], turn.get("content")
    if kind == "conversations":
        name = role.lower().replace("-", "_")
        role = _ROLES.get(name, role)
        if name == _CALL:
            calls = _from_json(text)
            calls = calls if isinstance(calls, list) else [calls]
            if not all(isinstance(call, dict) and call.get("name") for call in calls):
                wanted = "JSON with `name` and `arguments`, or a list of such"
                raise ValueError(f"{where}: a turn from {turn['role']!r} must be {wanted}, got {text!r:.80}.")
            turn["tool_calls"] = [{"type": "function", "function": call} for call in calls]
            role, text = "assistant", None
    if isinstance(text, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in text):
        text = "".join(str(part.get("text") or "") for part in text)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: `content` of each turn must be text, got {text!r:.80}.")
    if role != "assistant" and role.strip().lower() in _ASSISTANTS:
        raise ValueError(f"{where}: `role` of the assistant must be 'assistant', got {role!r}.")
    if turn.get("function_call"):
        raise ValueError(f"{where}: chat templates do not know `function_call`: write it as one of `tool_calls`.")
    for name in _WEIGHTS:
        if turn.get(name, 1) not in (None, 1):
            raise ValueError(f"{where}: `{name}` must be 1, got {turn[name]!r}: each turn is learnt as any other.")
    if calls := turn.get("tool_calls"):
        turn["tool_calls"] = [_tool_call(call, where, keeps_nulls) for call in _unpacked(calls, "tool_calls", where)]
    return turn | {"role": role, "content": text or ""}


def alpaca_turns(example: Mapping[str, Any], where: str) -> list[Turn]:
    """The turns of an example in Alpaca's columns: `instruction` (with `input`) and `output`, behind the pairs of
    `history`. Raises `ValueError` for a history of anything else."""
    asked = "\n\n".join(str(example[name]) for name in ("instruction", "input") if example.get(name))
    pairs = _from_json(example.get("history")) if example.get("history") else []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"{where}: `history` must be a list of [question, answer], got {example['history']!r:.80}.")
    pairs = [*pairs, [asked, example["output"]]]
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


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
        self, tokenizer: PreTrainedTokenizerBase, template: str | None, assistant_only: bool, notes: list[str]
    ) -> tuple[str, list[Span]]:
        """The text, and which parts of it are supervised: all from the first learnt turn on, or of that what the
        assistant wrote. Where the template marks that by {% generation %}, the marks are taken; else it is what each
        answer adds to the text before it. The template is the tokenizer's where it is None. What is left out of the
        text with good reason is added to `notes`."""
        has_marks = assistant_only and has_generation_markers(self._source(tokenizer, template))
        text, spans = self._rendered(self.turns, tokenizer, template, marks=has_marks)
        begin = 0
        if self.begin:
            prompt, _ = self._rendered(self.turns[: self.begin], tokenizer, template, add_generation_prompt=True)
            begin = _letters_shared(prompt, text)
        if not assistant_only:
            spans = [(0, len(text))]
        elif not has_marks:
            self._check(text, text, tokenizer, template, [])  # what is left out is told before what cannot be found
            answers = [number for number, turn in enumerate(self.turns) if turn["role"] == "assistant"]
            spans = [self._answer(n, text, tokenizer, template) for n in answers if n >= self.begin]
        spans = [(max(start, begin), end) for start, end in spans if end > begin]
        self._check(text, "".join(text[start:end] for start, end in spans), tokenizer, template, notes)
        return text, spans

    def _answer(self, number: int, whole: str, tokenizer: Any, template: str | None) -> Span:
        """Where the text of the whole conversation holds what the turn of this number adds: from the end of its prompt
        to the end of the conversation up to it. Raises `ValueError` for a template that writes these otherwise once
        turns follow, but for an end token."""
        until, _ = self._rendered(self.turns[: number + 1], tokenizer, template)
        end = _shared(until, whole, tokenizer)
        if whole[:end] != until:
            rest = tokenizer(until[end:], add_special_tokens=False).input_ids
            if str(tokenizer.decode(rest, skip_special_tokens=True)).strip():
                raise self._rewritten(until, whole, tokenizer, template, self.turns[: number + 1])
        if not number:  # templates refuse to render nothing
            return max(until.find(self.turns[0]["content"].strip()), 0), end
        before = self.turns[:number]
        prompt, _ = self._rendered(before, tokenizer, template, add_generation_prompt=True)
        begin = _shared(prompt, whole, tokenizer)
        if whole[:begin] != prompt:  # a prompt may open what its answer does not, such as a thought
            history, _ = self._rendered(before, tokenizer, template)
            if begin < _shared(history, prompt, tokenizer):
                raise self._rewritten(prompt, whole, tokenizer, template, before, add_generation_prompt=True)
            turn = self.turns[number]  # which may begin with the same letters
            other = turn | {"content": "x" if turn["content"][:1] != "x" else "y"}
            until_other, _ = self._rendered([*before, other], tokenizer, template)
            begin = min(begin, _letters_shared(until, until_other))
        return begin, end

    def _rewritten(
        self, part: str, whole: str, tokenizer: Any, template: str | None, turns: Sequence[Turn], **how: Any
    ) -> ValueError:
        """For a template that writes these turns as `part`, and otherwise once others follow."""
        place = _letters_shared(part, whole)
        names = {"messages": self._given(turns), "tools": self.tools, **self._settings(tokenizer, **how)}
        line = _line(self._source(tokenizer, template), place, names)
        return ValueError(
            f"{self.where}: what the assistant wrote cannot be told apart, since line {line} of the chat template "
            f"writes {part[place : place + 40]!r} only until more turns follow. Pass a `chat_template_path` of a "
            "template with {% generation %} markers ('chatml' is this package's), or `assistant_only_loss=False`."
        )

    def _settings(self, tokenizer: Any, **how: Any) -> dict[str, Any]:
        return {"add_generation_prompt": False, **tokenizer.special_tokens_map, **self.template_kwargs, **how}

    @staticmethod
    def _given(turns: Sequence[Turn]) -> list[Turn]:
        """Turns as templates get them."""
        return [named_thoughts({key: value for key, value in turn.items() if value is not None}) for turn in turns]

    def _source(self, tokenizer: Any, template: str | None) -> str:
        return str(tokenizer.get_chat_template(template, self.tools))

    def _rendered(
        self, turns: Sequence[Turn], tokenizer: Any, template: str | None, marks: bool = False, **how: Any
    ) -> tuple[str, list[Span]]:
        try:
            source = self._source(tokenizer, template)
            rendered: Any = render_jinja_template(
                [self._given(turns)],
                tools=self.tools,
                chat_template=source,
                return_assistant_tokens_mask=marks,
                **self._settings(tokenizer, **how),
            )
        except Exception as error:  # templates are programs
            raise ValueError(f"{self.where}: the chat template refuses it: {error}") from error
        (text,), spans = rendered
        return text, spans[0] if marks else []

    def _check(self, text: str, taught: str, tokenizer: Any, template: str | None, notes: list[str]) -> None:
        """What was written must be in the text, and what is learnt of it in what is taught."""
        source = self._source(tokenizer, template)
        whole, taught = squeezed(text), squeezed(taught)
        if self.tools and "tools" not in source:
            raise self._left_out("`tools`: the chat template knows none")
        for number, turn in enumerate(self.turns):
            learnt = turn["role"] == "assistant" and number >= self.begin
            there = taught if learnt else whole
            if turn.get("tool_calls") and "tool_calls" not in source:
                raise self._left_out("`tool_calls`: the chat template knows none")
            if missing := next((piece for piece in pieces(turn) if not is_in(piece, there)), None):
                place = "outside its {% generation %} markers" if learnt and is_in(missing, whole) else "out"
                raise self._left_out(f"{missing!r:.80}: the chat template leaves it {place}")
            *thoughts, _ = turn["content"].rsplit("</think>", 1)
            thoughts = [text.replace("<think>", "") for text in thoughts]
            if thought := next((turn[name] for name in _THOUGHTS if turn.get(name)), ""):
                if not any(name in source for name in _THOUGHTS):
                    raise self._left_out(f"`{_THOUGHTS[0]}`: the chat template knows no thoughts")
                thoughts.append(thought)
            if learnt and not all(is_in(text, there) for text in thoughts):
                notes.append(THOUGHTS_LEFT_OUT)

    def _left_out(self, what: str) -> ValueError:
        help = "Take a `chat_template_path` that has it, or leave it out of the data"
        return ValueError(f"{self.where} has {what}. {help}.")


def _letters_shared(one: str, other: str) -> int:
    """How many letters both begin with."""
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _shared(part: str, whole: str, tokenizer: Any) -> int:
    """How many characters both begin with, in whole tokens where one is not the beginning of the other: markers of
    different roles may share letters."""
    if whole.startswith(part):
        return len(part)
    part_tokens, tokens = (
        tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False) for text in (part, whole)
    )
    count = common_prefix_length(part_tokens["input_ids"], tokens["input_ids"])
    return int(tokens["offset_mapping"][count - 1][1]) if count else 0


def _line(source: str, place: int, names: Mapping[str, Any]) -> int:
    """The line of a template that writes the character at this place of its text."""
    template: Any = _compile_jinja_template(source)
    pieces = template.root_render_func(template.new_context(names))
    line = 1
    for piece in pieces:
        line = template.get_corresponding_lineno(pieces.gi_frame.f_lineno)
        place -= len(piece)
        if place < 0:
            break
    return int(line)
