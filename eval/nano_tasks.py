"""The built-in tasks for lm-evaluation-harness: data made on demand by seed, conversations as prompts, scores.

The YAML files in `harness_tasks/` refer to what is here. They take these from `--metadata`: `nano_count`, documents of
a task (default 100); `nano_seed` (1); `nano_dir`, the folder for the JSON files (default: in the Hub's cache folder).
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from lm_eval.api.task import ConfigurableTask
from lm_eval.api.utils import Message

from .files import write_text
from .right_answer import RightAnswer
from .tasks import TASKS, Sample, generate_samples, is_correct

TURN = "\x1e"
"""Separates the turns of a conversation in what the harness takes for one text."""

FEWSHOT = 16
"""Documents kept for few-shot examples; no test document is among them."""

_CHOICES = 4
_CHATML = "<|im_start|>{role}\n{content}<|im_end|>"  # wedlm-nano's turns, and the published checkpoints'


class NanoTask(ConfigurableTask):
    """A task whose `dataset_name` is one of [`TASKS`], or `choice` or `text`, which are made from all of them."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config={name: value for name, value in config.items() if name != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the JSON files, unless they are there, and load them."""
        given: Mapping[str, Any] = self.config.metadata or {}
        count, seed = (_integer(given, *field) for field in (("nano_count", 100, 1), ("nano_seed", 1, None)))
        folder = Path(str(given.get("nano_dir") or Path(HF_HOME) / "wedlm_hf" / "tasks"))
        files = write_documents(folder, self.config.dataset_name, count, seed)
        super().download({"data_files": files} | (dataset_kwargs or {}), **kwargs)

    def build_qa_turn(self, *, q: str | None = None, **kwargs: Any) -> list[Message]:
        """The parent's, with the turns before the question in front of it."""
        *earlier, question = (q or "").split(TURN)
        roles = ("user", "assistant")
        turns = [Message(roles[index % 2], turn, "\n") for index, turn in enumerate(earlier)]
        return turns + super().build_qa_turn(q=question, **kwargs)


def write_documents(folder: str | os.PathLike[str], name: str, count: int, seed: int) -> dict[str, str]:
    """Write `count` test documents and the few-shot ones of a task as JSON lines.

    Returns:
        the files by split, `test` and `fewshot`; one that holds the same already is left alone.

    Raises:
        ValueError: for an unknown `name`, and for more documents than the task has prompts.
        OSError: for a folder that cannot be written to.
    """
    documents = _documents(name, count + FEWSHOT, seed)
    files = {}
    for split, rows in (("test", documents[:count]), ("fewshot", documents[count:])):
        path = Path(folder).absolute() / f"{name}-seed{seed}-{count}-{split}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
        files[split] = str(path)
    return files


def prompt(document: Mapping[str, Any]) -> str:
    """The turns of a document's conversation."""
    return TURN.join(message["content"] for message in document["messages"])


def score(document: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the reply is right, by the local metric of `evaluate`."""
    sample = {name: document[name] for name in ("task", "messages", "answer")}
    computed = _metric().compute(predictions=results[:1], references=[json.dumps(sample)])
    assert computed is not None  # it is on the main process alone
    return {"right": computed["right"]}


@functools.cache
def _metric() -> RightAnswer:
    return RightAnswer(keep_in_memory=True)


def _documents(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    if name in TASKS:
        return [_row(sample) for sample in generate_samples(name, count, seed, "heldout")]
    if name not in ("choice", "text"):
        raise ValueError(f"`dataset_name` must be one of {', '.join((*TASKS, 'choice', 'text'))}, got {name!r}.")
    rng = random.Random(f"{name}/{seed}")
    sources = [generate_samples(task, 2 * count, seed, "heldout") for task in TASKS]
    documents: list[dict[str, Any]] = []
    while len(documents) < count:
        sample = next(sources[len(documents) % len(sources)])
        if name == "text":
            turns = [*sample.messages, {"role": "assistant", "content": sample.answer}]
            documents.append({"text": "\n".join(_CHATML.format(**turn) for turn in turns)})
        elif choices := _choices(sample, rng):
            documents.append(_row(sample) | {"choices": choices, "label": choices.index(sample.answer)})
    return documents


def _row(sample: Sample) -> dict[str, Any]:
    return {"task": sample.task, "messages": sample.messages, "answer": sample.answer}


def _choices(sample: Sample, rng: random.Random) -> list[str]:
    """The answer among wrong ones, each of which is the answer with two words exchanged; none where too few can be."""
    parts = re.split(r"(\w+)", sample.answer)  # words at the odd places
    pairs = [(i, j) for i in range(1, len(parts), 2) for j in range(1, i, 2) if parts[i] != parts[j]]
    rng.shuffle(pairs)
    choices = [sample.answer]
    for i, j in pairs:
        changed = parts.copy()
        changed[i], changed[j] = parts[j], parts[i]
        wrong = "".join(changed)
        if wrong not in choices and not is_correct(sample, wrong):
            choices.append(wrong)
        if len(choices) == _CHOICES:
            rng.shuffle(choices)
            return choices
    return []


def _integer(given: Mapping[str, Any], name: str, default: int, least: int | None) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"`{name}` must be an integer{bound}, got {value!r}.")
    return value
