"""Prompts: read from files, turned into tokens, and the rules by which a reply to one is right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

LONGEST_ANSWER = 256
"""New tokens of an answer at most, where nothing else is asked for (transformers' own default is 20)."""

OWN_TASK = "prompts"  # of rows that name none
TASKS_FILE = "tasks.jsonl"
"""Prompts that a checkpoint folder may bring along."""


@dataclass(frozen=True)
class Prompt:
    """What is answered.

    Attributes:
        messages: turns `{"role": ..., "content": ...}`, the last one the user's.
        task: groups prompts in tables.
        answers: those that count as right; none if they are unknown.
        match: the rule among [`MATCHES`] by which a reply is compared with them.
        tokens: of the whole prompt; empty before [`encode`].
    """

    messages: Sequence[dict[str, str]]
    task: str = OWN_TASK
    answers: tuple[str, ...] = ()
    match: str = "exact"
    tokens: Sequence[int] = ()

    @classmethod
    def of(cls, text: str, **fields: Any) -> Prompt:
        """A single turn of the user."""
        return cls([{"role": "user", "content": text}], **fields)

    @property
    def text(self) -> str:
        """Of all turns."""
        return "\n".join(message["content"] for message in self.messages)

    def is_right(self, reply: str) -> bool | None:
        """Whether one of the accepted answers is given; `None` if there are none."""
        if not self.answers:
            return None
        return any(MATCHES[self.match](answer, reply) for answer in self.answers)


def _same_number(answer: str, reply: str) -> bool:
    wanted, got = (re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (answer, reply))
    return bool(wanted and got) and float(wanted[-1]) == float(got[-1])


def _same_json(answer: str, reply: str) -> bool:
    try:
        wanted, got = (json.dumps(json.loads(text), sort_keys=True) for text in (answer, reply))
    except (ValueError, RecursionError):
        return False
    return got == wanted  # as text, for True == 1 in Python


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda answer, reply: answer.strip() == reply.strip(),
    "number": _same_number,
    "json": _same_json,
}
"""Rules by name: `exact`, the same text, white space around it aside; `number`, the last number is that of the answer;
`json`, equal JSON values."""


def read_prompts(name: str, text: str) -> list[Prompt]:
    """The prompts of a file.

    Args:
        name: of the file. JSON Lines if it ends in .jsonl, .ndjson or .json, else one prompt a line.
        text: what it holds. A JSON row has `messages` (ending with the user) or `prompt`, and may have `task`,
            `answer` (a text, or a list of accepted ones; in all rows or in none) and `match` (see [`MATCHES`]).

    Raises:
        ValueError: for a file without prompts, and for a malformed row, naming its line.
    """
    is_json = name.lower().endswith((".jsonl", ".ndjson", ".json"))
    # Lines end at "\n" alone: other separators that `splitlines` knows occur inside prompts.
    lines = [(number, line) for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"There is no prompt in {name!r}.")
    rows: dict[int, Prompt] = {}
    for number, line in lines:
        try:
            rows[number] = _json_row(line) if is_json else Prompt.of(line.strip())
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}.") from None
    missing, present = ([number for number, row in rows.items() if bool(row.answers) == has] for has in (False, True))
    if missing and present:
        raise ValueError(
            f"{name}, line {missing[0]}: there is no `answer`, though line {present[0]} has one: all rows need one, "
            "or none."
        )
    return list(rows.values())


def _json_row(line: str) -> Prompt:
    """Raises `ValueError` for anything but a row."""
    try:
        row: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"this is no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {line.strip()[:40]}")
    if ("messages" in row) == ("prompt" in row):
        raise ValueError(f"a row needs either `messages` or `prompt`, got {', '.join(row) or 'nothing'}")
    for key in ("prompt", "task"):
        if key in row and (not isinstance(row[key], str) or not row[key].strip()):
            raise ValueError(f"`{key}` must be a text that is not empty, got {row[key]!r}")
    answers = row.get("answer", [])
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"`answer` must be a text or a list of texts, got {row['answer']!r}")
    if row.get("match", "exact") not in [*MATCHES]:
        raise ValueError(f"`match` must be one of {', '.join(MATCHES)}, got {row['match']!r}")
    messages: Any = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    if not isinstance(messages, list) or not all(
        isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
        for turn in messages
    ):
        raise ValueError("`messages` must be a list of objects with the texts `role` and `content`")
    if not messages or messages[-1]["role"] != "user":
        got = messages[-1]["role"] if messages else "none"
        raise ValueError(
            f"the last of the `messages` must be the user's (the wanted reply goes into `answer`), got {got}"
        )
    turns = [{key: turn[key] for key in ("role", "content")} for turn in messages]
    return Prompt(turns, row.get("task", OWN_TASK), tuple(answers), row.get("match", "exact"))


def read_tasks(folder: Path) -> list[Prompt]:
    """The prompts that a checkpoint folder brings along.

    Raises:
        ValueError: if it brings none.
    """
    path = folder / TASKS_FILE
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} brings no prompts ({TASKS_FILE}) along: name a file of your own (--file).")
    return read_prompts(path.name, path.read_text(encoding="utf-8"))


def split_prompts(
    prompts: Sequence[Prompt], most_tuning: int | None = None, most_others: int | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to choose settings on, and others to check them on; no prompt is among both.

    Those of each task are shared out evenly along the file, half of them to each side, but at most `most_tuning` to
    the first one and `most_others` to the second. Repeated ones are left out.

    Raises:
        ValueError: if some are wanted to choose settings on, and no task has two different prompts.
    """
    different = list({prompt.text: prompt for prompt in reversed(prompts)}.values())[::-1]
    by_task: dict[str, list[Prompt]] = {}
    for prompt in different:
        by_task.setdefault(prompt.task, []).append(prompt)
    tuning: list[Prompt] = []
    others: list[Prompt] = []
    for group in by_task.values():
        count = len(group)
        first = min(count // 2, count if most_tuning is None else most_tuning)
        chosen = {index for index in range(count) if (index + 1) * first // count > index * first // count}
        tuning += [group[index] for index in sorted(chosen)]
        others += [prompt for index, prompt in enumerate(group) if index not in chosen][:most_others]
    if not tuning and most_tuning != 0:
        raise ValueError(
            "It takes two different prompts of a task at least, one to choose settings on and one to check them, got "
            f"{len(different)} in {len(by_task)} task{'s' if len(by_task) > 1 else ''}."
        )
    return tuning, others


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """Tokens of a conversation and of the header that asks for an answer."""
    # Not verbose: what is too long is refused when it is decoded.
    encoding: Any = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False}
    )
    return list(encoding["input_ids"])


def encode_prompt(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, raw: bool = False) -> Prompt:
    """The prompt with its tokens, by the chat template or, if `raw`, as it is.

    Raises:
        ValueError: where they leave no room for an answer in the model's context, and for a raw conversation.
    """
    if raw and len(prompt.messages) > 1:
        raise ValueError(f"Without a chat template, a row holds one turn, got {len(prompt.messages)}.")
    tokens = list(tokenizer(prompt.text, verbose=False)["input_ids"]) if raw else encode(tokenizer, prompt.messages)
    context = model.config.max_position_embeddings
    if not 1 <= len(tokens) < context:
        shown = prompt.text if len(prompt.text) <= 40 else f"{prompt.text[:40]}…"
        raise ValueError(f"A prompt needs 1 to {context - 1} tokens for this model, got {len(tokens)}: {shown!r}.")
    return replace(prompt, tokens=tokens)


def answer_limit(model: Any, prompt_length: int, wanted: int | None = None) -> int:
    """New tokens that a prompt may get: those wanted (default: [`LONGEST_ANSWER`]), at most what fits the context."""
    return max(1, min(wanted or LONGEST_ANSWER, model.config.max_position_embeddings - prompt_length))
