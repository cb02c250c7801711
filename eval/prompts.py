"""Prompts: read from files, turned into tokens, and the rules by which a reply to one is right."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..console.prompts import PromptRow, Turns, read_rows
from ..console.prompts import encode as encode  # belongs to these names, too
from ..generation.request import context_length
from .metrics import RULES, judge

logger = logging.getLogger(__name__)

LONGEST_ANSWER = 256  # new tokens at most, where nothing else is asked for (transformers' own default is 20)
OWN_TASK = "prompts"  # of rows that name none
TASKS_FILE = "tasks.jsonl"  # prompts that a checkpoint folder may bring along


@dataclass(frozen=True)
class Prompt:
    """What is answered."""

    messages: Turns  # `{"role": ..., "content": ...}`, the last one the user's
    task: str = OWN_TASK  # groups prompts in tables
    answers: tuple[str, ...] = ()  # those that count as right; none if they are unknown
    match: str = "exact"  # the metric by which a reply is compared with them (see [`judge`])
    tokens: Sequence[int] = ()  # of the whole prompt; empty before [`encode_prompt`]

    @classmethod
    def of(cls, prompt: str | Turns, **fields: Any) -> "Prompt":
        """A text, which is a single turn of the user, or the turns of a conversation."""
        return cls([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, **fields)

    @property
    def text(self) -> str:
        """Of all turns."""
        return "\n".join(message["content"] for message in self.messages)

    def score(self, reply: str) -> float | None:
        """How right a reply is, 0 to 1, by the best of the accepted answers; `None` if there are none."""
        return judge(self.match)(reply, self.answers) if self.answers else None


def read_prompts(name: str, text: str) -> list[Prompt]:
    """The prompts of the file of this name (see [`read_rows`]) and text, with what is known of the replies to them: a
    JSON row may have `task`, `answer` (a text, or a list of accepted ones; in all rows or in none) and `match` (see
    [`RULES`]). Raises `ValueError` for a file without prompts, and for a malformed row, naming its line. Warns of
    replies in `messages`, as chats to train on have them: they are no `answer`."""
    rows = read_rows(name, text)
    prompts = [_with_answers(row) for row in rows]
    chats = [
        row.fields.get("messages") or [{}] for row, prompt in zip(rows, prompts, strict=True) if not prompt.answers
    ]
    if any(chat[-1].get("role") == "assistant" for chat in chats):
        logger.warning(f"{name}: answers are not compared with the replies in `messages`: give rows an `answer`.")
    with_answer = {bool(prompt.answers): row for row, prompt in zip(rows[::-1], prompts[::-1], strict=True)}
    if len(with_answer) == 2:
        there = with_answer[True].line
        raise with_answer[False].error(
            f"there is no `answer`, though line {there} has one: all rows need one, or none"
        )
    return prompts


def _with_answers(row: PromptRow) -> Prompt:
    """Raises `ValueError` for fields that say nothing."""
    task, answers = row.fields.get("task", OWN_TASK), row.fields.get("answer", [])
    match = row.fields.get("match", "exact")
    if not isinstance(task, str) or not task.strip():
        raise row.error(f"`task` must be a text that is not empty, got {task!r}")
    accepted = [answers] if isinstance(answers, str) else answers
    if not isinstance(accepted, list) or not all(isinstance(answer, str) for answer in accepted):
        raise row.error(f"`answer` must be a text or a list of texts, got {answers!r}")
    if match not in [*RULES]:
        raise row.error(f"`match` must be one of {', '.join(RULES)}, got {match!r}")
    return Prompt.of(row.prompt, task=task, answers=tuple(accepted), match=match)


def read_tasks(folder: Path) -> list[Prompt]:
    """The prompts that a checkpoint folder brings along. Raises `ValueError` if it brings none."""
    path = folder / TASKS_FILE
    if not folder.exists():
        raise ValueError(f"There is no folder {str(folder)!r} that could bring prompts: name a file (--file).")
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} brings no prompts ({TASKS_FILE}) along: name a file of your own (--file).")
    return read_prompts(path.name, path.read_text(encoding="utf-8"))


def encode_prompt(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, raw: bool = False) -> Prompt:
    """The prompt with its tokens, by the chat template or, if `raw`, as it is. Raises `ValueError` where they leave no
    room for an answer in the model's context, for a raw conversation, and for one that the chat template refuses."""
    if raw and len(prompt.messages) > 1:
        raise ValueError(f"Without a chat template, a row holds one turn, got {len(prompt.messages)}.")
    tokens = list(tokenizer(prompt.text, verbose=False)["input_ids"]) if raw else encode(tokenizer, prompt.messages)
    context = context_length(model.config)
    if not 1 <= len(tokens) < context:
        shown = prompt.text if len(prompt.text) <= 40 else f"{prompt.text[:40]}…"
        raise ValueError(f"A prompt needs 1 to {context - 1} tokens for this model, got {len(tokens)}: {shown!r}.")
    return replace(prompt, tokens=tokens)


def answer_limit(model: Any, prompt_length: int, wanted: int | None = None) -> int:
    """New tokens that a prompt may get: those wanted (default: [`LONGEST_ANSWER`]), at most what fits the context."""
    return max(1, min(wanted or LONGEST_ANSWER, context_length(model.config) - prompt_length))
