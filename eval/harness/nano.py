"""The offline tasks: prompts that a checkpoint brings along (see [`prompts`]), one harness task for each of theirs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask
from lm_eval.api.utils import Message

from ...checkpoints import NANO
from ..prompts import Prompt, read_tasks

TURN = "\x1e"  # separates the turns of a conversation in what the harness takes for one text
FEWSHOT = 30  # the last prompts of each task are kept for few-shot examples


class NanoTask(ConfigurableTask):
    """The prompts of wedlm-nano's task `dataset_name`, or of all of its tasks."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config={name: value for name, value in config.items() if name != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Read the documents."""
        self.dataset = documents(read_tasks(NANO), self.config.dataset_name)

    def build_qa_turn(self, *, q: str | None = None, **kwargs: Any) -> list[Message]:
        """The parent's, with the turns before the question in front of it."""
        *earlier, question = (q or "").split(TURN)
        roles = ("user", "assistant")
        turns = [Message(roles[index % 2], turn, "\n") for index, turn in enumerate(earlier)]
        return turns + super().build_qa_turn(q=question, **kwargs)


def documents(prompts: Sequence[Prompt], name: str | None) -> datasets.DatasetDict:
    """The splits `test` and `fewshot` of a task; without a name, the first 100 of all tasks in turn as `test`.

    A document has the prompt's fields, and four `choices` of which that at `label` is right.
    """
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    rows = {task: list(_rows(found)) for task, found in by_task.items()}
    if name is None:
        in_turn = [row for together in zip(*rows.values(), strict=True) for row in together]
        rows, name = {"": in_turn[: 100 + FEWSHOT]}, ""
    splits = {"test": rows[name][:-FEWSHOT], "fewshot": rows[name][-FEWSHOT:]}
    return datasets.DatasetDict({split: datasets.Dataset.from_list(part) for split, part in splits.items()})


def _rows(prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """The wrong choices are the answers to the prompts that follow."""
    for index, prompt in enumerate(prompts):
        following = dict.fromkeys(other.answers[0] for other in (*prompts[index + 1 :], *prompts[:index]))
        wrong = [*islice((answer for answer in following if not prompt.score(answer)), 3)]
        label = index % 4
        yield {
            "task": prompt.task,
            "messages": list(prompt.messages),
            "answers": list(prompt.answers),
            "match": prompt.match,
            "choices": [*wrong[:label], prompt.answers[0], *wrong[label:]],
            "label": label,
        }


def score(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the reply is right, by the rule of the prompt."""
    prompt = Prompt(document["messages"], document["task"], tuple(document["answers"]), document["match"])
    return {"right": prompt.score(results[0]) or 0.0}
