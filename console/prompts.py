"""Prompts of the user's: files of them, read the same way by every command, and chat templates. Light to import."""

import codecs
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns = Sequence[dict[str, str]]
"""A conversation: turns `{"role": ..., "content": ...}`, the last one the user's."""

STANDARD_INPUT = "standard input"

DEMO_PROMPTS = (
    "Count down from 97 to 61 by 4.",
    "Anna has 347 apples. Ben brings 85 more. Anna sells 218. How many apples does Anna have now?",
    "Sort from largest to smallest: 31, 7, 86, 12, 54, 23",
    "Turn this text into JSON: Clara is 34. She works as a pilot. She lives in Lisbon. Clara has a cat and a dog.",
    "Emma lives in Paris. Jack has a horse. Emma likes soup. Jack is 41 years old. Where does Emma live?",
    'Complete this Python code:\ndef count_equal(scores, limit):\n    """Count the scores equal to limit."""',
)


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a file."""

    prompt: str | Turns  # text where it is a single turn of the user, else all turns
    fields: dict[str, Any]  # what its JSON row holds; nothing for a line of text
    name: str  # of the file
    line: int  # its number, from 1

    def error(self, problem: str) -> ValueError:
        """Says where the row stands, and what is wrong with it."""
        return ValueError(f"{self.name}, line {self.line}: {problem}.")


def read_text(file: Path) -> tuple[str, str]:
    """The name of a file, or of standard input for `-`, and its text without a byte order mark. Raises `OSError` for a
    file that cannot be read, and `ValueError` for one that is neither UTF-8 nor what its mark says."""
    if str(file) == "-":
        name, content = STANDARD_INPUT, b"" if sys.stdin is None else sys.stdin.buffer.read()
    else:
        name, content = str(file), file.read_bytes()
    try:
        return name, content.decode(encoding_of(content))
    except UnicodeDecodeError as error:
        raise ValueError(f"The text of {shown(name)} is not UTF-8: {error}.") from None


def encoding_of(beginning: bytes) -> str:
    """The encoding of a text that begins so: what its byte order mark says (PowerShell and Excel write them), or
    UTF-8."""
    marks = {
        codecs.BOM_UTF8: "utf-8-sig",
        codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's, which it begins with
        codecs.BOM_UTF32_BE: "utf-32",
        codecs.BOM_UTF16_LE: "utf-16",
        codecs.BOM_UTF16_BE: "utf-16",
    }
    return next((encoding for mark, encoding in marks.items() if beginning.startswith(mark)), "utf-8")


def read_rows(name: str, text: str) -> list[PromptRow]:
    """The prompts of the file of this name, or of [`STANDARD_INPUT`], and text: JSON Lines if the name ends in .jsonl,
    .ndjson or .json, else one prompt a line. Blank lines are left out. A JSON row has `prompt`, a text or (as in TRL's
    data) a conversation, or `messages`, a conversation; the assistant's reply to the last turn of the user's is left
    out. Raises `ValueError` for binary data, for a file without prompts, and for a malformed row, naming its line."""
    if "\0" in text:
        raise ValueError(f"Prompts must be UTF-8 text, got a binary file: {shown(name)}.")
    # As in any text file, "\n", "\r\n" and "\r" end lines; other separators that `splitlines` knows occur in prompts.
    lines = enumerate(io.StringIO(text.removeprefix("\ufeff"), newline=None), 1)
    rows = [PromptRow(line.strip(), {}, name, number) for number, line in lines if line.strip()]
    if not rows:
        raise ValueError(f"There is no prompt in {shown(name)}.")
    return [_parsed(row) for row in rows] if name.lower().endswith((".jsonl", ".ndjson", ".json")) else rows


def _parsed(row: PromptRow) -> PromptRow:
    """The row of a line that is JSON. Raises `ValueError` for anything else."""
    line = str(row.prompt)
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise row.error(f"this is no JSON ({error})") from None
    if not isinstance(fields, dict):
        raise row.error(f"a row must be a JSON object, got {line[:40]}")
    if ("messages" in fields) == ("prompt" in fields):
        raise row.error(f"a row needs either `messages` or `prompt`, got {', '.join(fields) or 'nothing'}")
    name = "prompt" if "prompt" in fields else "messages"
    prompt = fields[name]
    if name == "messages" or isinstance(prompt, list):
        prompt = _conversation(row, name, prompt)
    elif not isinstance(prompt, str) or not prompt.strip():
        raise row.error(f"`prompt` must be a text that is not empty, or a conversation, got {prompt!r}")
    if not is_unicode(json.dumps(prompt, ensure_ascii=False)):  # JSON may hold half of a surrogate pair
        raise row.error(f"a prompt must be UTF-8 text, got {prompt!r}")
    return replace(row, prompt=prompt, fields=fields)


def _conversation(row: PromptRow, name: str, messages: Any) -> str | Turns:
    """What is answered of a conversation in the field `name`. Raises `ValueError` for anything but a conversation."""
    if not isinstance(messages, list) or not all(
        isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
        for turn in messages
    ):
        raise row.error(f"`{name}` must be a list of objects with the texts `role` and `content`")
    turns = [{key: turn[key] for key in ("role", "content")} for turn in messages]
    if len(turns) > 1 and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
        got = "nothing" if not turns or turns[-1]["role"] == "user" else turns[-1]["role"]
        raise row.error(f"the last of the `{name}` must be the user's (or the reply to it), got {got}")
    return turns if len(turns) > 1 else turns[0]["content"]


def encode(tokenizer: "PreTrainedTokenizerBase", messages: Turns) -> list[int]:
    """Tokens of a conversation and of the header that asks for an answer. Raises `ValueError` without a chat template,
    and for messages that it refuses."""
    from jinja2 import TemplateError  # of what transformers needs for templates

    try:
        # Not verbose: what is too long is refused when it is decoded.
        encoding: Any = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False}
        )
    except TemplateError as error:
        raise ValueError(f"The chat template refuses these messages: {error}") from None
    return list(encoding["input_ids"])


def shown(name: str) -> str:
    """The name of a file, or of standard input, inside a sentence."""
    return name if name == STANDARD_INPUT else repr(name)


def is_unicode(text: str) -> bool:
    """Whether text can be encoded: bytes of the command line that are no UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
