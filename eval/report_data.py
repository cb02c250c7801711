"""Prompts of `wedlm report`: the built-in tasks, or the user's own file, in two parts that share no prompt.

Settings are compared on the *tuning* part, and the headline numbers come from the other one, which no setting was
picked on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .tasks import TASKS, Sample, generate_samples

OWN_TASK = "prompts"  # of rows that name none


@dataclass(frozen=True)
class Data:
    """What is decoded.

    Attributes:
        source: "built-in tasks" or the name of the file.
        tuning: samples that settings are compared on.
        headline: samples that no setting was compared on, none of them among `tuning`.
        has_answers: whether answers are known; if not, quality is agreement with AR.
        notes: what a reader of the numbers must know about the file.
    """

    source: str
    tuning: Sequence[Sample]
    headline: Sequence[Sample]
    has_answers: bool = True
    notes: Sequence[str] = ()

    @property
    def digest(self) -> str:
        """The same for the same samples in the same order."""
        rows = [[[s.task, s.messages, s.answer] for s in part] for part in (self.tuning, self.headline)]
        return hashlib.sha256(json.dumps([rows, self.has_answers]).encode()).hexdigest()[:16]

    def counts(self) -> dict[str, dict[str, int]]:
        """Prompts by part and task."""
        parts = {"tuning": self.tuning, "headline": self.headline}
        return {
            name: {task: sum(sample.task == task for sample in part) for task in _tasks(part)}
            for name, part in parts.items()
        }


def builtin_data(count: int, sweep_count: int, seed: int) -> Data:
    """Held-out samples of every task: `sweep_count` for tuning by `seed`, `count` others by `seed + 1`.

    Raises:
        ValueError: if a task has too few prompts.
    """
    tuning: list[Sample] = []
    headline: list[Sample] = []
    for task in TASKS:
        samples = list(generate_samples(task, sweep_count, seed, "heldout"))
        used = {sample.prompt for sample in samples}
        fresh = generate_samples(task, count + len(used), seed + 1, "heldout")
        tuning += samples
        headline += islice((sample for sample in fresh if sample.prompt not in used), count)
    return Data("built-in tasks", tuning, headline)


def file_data(name: str, text: str, count: int, sweep_count: int) -> Data:
    """The rows of a file; those of each task go to the headline part and to the tuning part in turn.

    Args:
        name: of the file. JSON Lines if it ends in .jsonl, .ndjson or .json, else one prompt a line.
        text: what it holds. A JSON row has `messages` (ending with the user) or `prompt`, and may have `answer` (in
            all rows or in none) and `task`. Answers are right when they are equal, surrounding white space aside;
            those of a built-in task's name, by that task's rule.
        count: most rows of a task in the headline part.
        sweep_count: most rows of a task in the tuning part.

    Raises:
        ValueError: for a malformed row, naming its line, and for fewer than two different prompts.
    """
    is_json = name.lower().endswith((".jsonl", ".ndjson", ".json"))
    lines = [(number, line) for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"There is no prompt in {name!r}.")
    rows = [(number, _json_row(name, number, line) if is_json else _row(line.strip())) for number, line in lines]
    first, has_answers = rows[0][0], rows[0][1].answer is not None
    by_task: dict[str, dict[str, Sample]] = {}
    seen: set[str] = set()  # of all tasks: no prompt is in both parts
    for number, row in rows:
        if (row.answer is not None) != has_answers:
            missing, present = (first, number) if row.answer is not None else (number, first)
            raise ValueError(
                f"{name}, line {missing}: there is no `answer`, though line {present} has one: all rows need one, "
                "or none."
            )
        sample = Sample(row.task, row.messages, row.answer or "")
        if sample.prompt not in seen:
            by_task.setdefault(row.task, {})[sample.prompt] = sample
        seen.add(sample.prompt)
    tuning: list[Sample] = []
    headline: list[Sample] = []
    for samples in by_task.values():
        different = list(samples.values())
        headline += different[::2][:count]
        tuning += different[1::2][:sweep_count]
    distinct = sum(map(len, by_task.values()))
    if not tuning:
        raise ValueError(
            f"{name!r} needs two different prompts of a task at least, one to compare settings on and one to check, "
            f"got {distinct} in {len(by_task)} task{'s' if len(by_task) > 1 else ''}."
        )
    notes = []
    if distinct < len(rows):
        notes.append(f"{len(rows) - distinct} of {len(rows)} rows repeat a prompt and were left out.")
    if (used := len(tuning) + len(headline)) < distinct:
        notes.append(f"{used:,} of {distinct:,} prompts were used (--count, --sweep-count).")
    if has_answers and (ruled := [task for task in by_task if task in TASKS]):
        notes.append(f"Answers of {', '.join(ruled)} are judged by the rule of the built-in task of that name.")
    return Data(name, tuning, headline, has_answers, notes)


@dataclass(frozen=True)
class _Row:
    task: str
    messages: list[dict[str, str]]
    answer: str | None


def _row(prompt: str, answer: str | None = None, task: str = OWN_TASK) -> _Row:
    return _Row(task, [{"role": "user", "content": prompt}], answer)


def _json_row(name: str, number: int, line: str) -> _Row:
    """Raises `ValueError` with file and line for anything but a row."""

    def refuse(what: str) -> ValueError:
        return ValueError(f"{name}, line {number}: {what}.")

    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise refuse(f"this is no JSON ({error})") from None
    if not isinstance(row, dict):
        raise refuse(f"a row must be a JSON object, got {line.strip()[:40]}")
    if ("messages" in row) == ("prompt" in row):
        got = ", ".join(row) or "nothing"
        raise refuse(f"a row needs either `messages` or `prompt`, got {got}")
    for key in ("prompt", "answer", "task"):
        if key in row and (not isinstance(row[key], str) or (key != "answer" and not row[key].strip())):
            raise refuse(f"`{key}` must be a text{'' if key == 'answer' else ' that is not empty'}, got {row[key]!r}")
    task = row.get("task", OWN_TASK)
    if "prompt" in row:
        return _row(row["prompt"], row.get("answer"), task)
    messages = row["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
        for turn in messages
    ):
        raise refuse("`messages` must be a list of objects with the texts `role` and `content`")
    if not messages or messages[-1]["role"] != "user":
        got = messages[-1]["role"] if messages else "none"
        raise refuse(f"the last of the `messages` must be the user's (the wanted reply goes into `answer`), got {got}")
    return _Row(task, [{key: turn[key] for key in ("role", "content")} for turn in messages], row.get("answer"))


def _tasks(samples: Iterable[Sample]) -> list[str]:
    return list(dict.fromkeys(sample.task for sample in samples))
