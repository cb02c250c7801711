"""The synthetic tasks: answers are recomputed from the prompt's text, splits are disjoint, scores are strict."""

import ast
import json
import re

import pytest
from nano_tasks import TASKS, generate_samples, is_heldout, main

from wedlm_hf.checkpoints import NANO
from wedlm_hf.eval.prompts import Prompt


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def samples(task: str, count: int = 400, seed: int = 0, split: str = "heldout") -> list[Prompt]:
    return list(generate_samples(task, count, seed, split))


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_and_every_sample_ends_with_the_user_and_has_a_correct_answer(task):
    heldout = samples(task, 1000)
    assert not any(is_heldout(sample.text) for sample in samples(task, 2000, 0, "train"))
    assert all(is_heldout(sample.text) for sample in heldout)
    assert len({sample.text for sample in heldout}) == len(heldout)
    for sample in heldout[:400]:
        roles = [message["role"] for message in sample.messages]
        assert roles in (["user"], ["user", "assistant", "user"])
        assert sample.task == task
        assert sample.answers[0].isascii()
        assert sample.is_right(sample.answers[0])
        assert not sample.is_right("")
        assert task == "arithmetic" or not sample.is_right(sample.answers[0] + " and so on")


def test_counting_answers_follow_from_the_numbers_of_the_prompt():
    for sample in samples("counting"):
        given, terms = numbers(sample.text), numbers(sample.answers[0])
        if sample.text.startswith("Continue"):
            *shown, last = given
            step = shown[1] - shown[0]
            first = shown[-1] + step
        else:
            first, last, step = (given[0], given[2], given[1]) if "until" in sample.text else given
            step = step if first < last else -step
            assert (step < 0) == ("down" in sample.text)
        assert terms == list(range(first, last + (1 if step > 0 else -1), step))
        assert ", ".join(map(str, terms)) == sample.answers[0]


def test_arithmetic_working_is_true_line_by_line_and_ends_in_the_answer_of_the_story():
    operations = set()
    for sample in samples("arithmetic"):
        *working, last = sample.answers[0].split("\n")
        results = []
        for line in working:
            if "=" in line:
                left, right = line.split("=")
                assert eval_columns(left) == int(right), line
            else:
                left, operator, right = re.fullmatch(r"(\d{3})(?:([-+*])(\d+))?", line).groups()
                assert not results or int(left) == results[-1], line
                if operator:
                    operations.add(operator)
                    results.append(eval_columns(line))
        assert last == f"Answer: {results[-1]}" == f"Answer: {story_total(sample.text)}"
        assert 0 <= results[-1] <= 999
    assert operations == {"+", "-", "*"}


def eval_columns(expression: str) -> int:
    """Value of an expression whose numbers may carry leading zeros."""
    return eval(re.sub(r"\b0+(?=\d)", "", expression), {})


def story_total(story: str) -> int:
    """The story's answer by its words alone."""
    first, *events = story.split(". ")[:-1]
    if events and "Each" in events[0]:
        first += events.pop(0)
    total = 1
    for number in numbers(first):
        total *= number
    for event in events:
        loss = any(word in event for word in ("sells", "loses", "gives", "takes"))
        total += -numbers(event)[0] if loss else numbers(event)[0]
    return total


def test_sorting_answers_are_the_sorted_items_of_the_prompt():
    kinds = set()
    for sample in samples("sorting"):
        order, items = sample.text.split(": ")
        values = [int(item) if item.isdigit() else item for item in items.split(", ")]
        down = any(word in order for word in ("descending", "largest to", "falling", "Z to A", "reverse"))
        assert sample.answers[0] == ", ".join(map(str, sorted(values, reverse=down)))
        assert len(set(values)) == len(values) >= 3
        kinds.add((type(values[0]), down))
    assert len(kinds) == 4


def test_json_answers_hold_the_numbers_of_the_prompt_and_python_answers_complete_its_code():
    for sample in samples("json"):
        assert sample.answers[0] == json.dumps(json.loads(sample.answers[0]))
        assert sorted(numbers(sample.answers[0])) == sorted(numbers(sample.text))
    for sample in samples("python"):
        ast.parse(sample.text.split("\n", 1)[1] + "\n" + sample.answers[0])


def test_the_prompts_beside_the_checkpoint_are_what_the_script_writes(tmp_path, capsys):
    main(tmp_path / "tasks.jsonl")
    assert (tmp_path / "tasks.jsonl").read_text(encoding="utf-8") == (NANO / "tasks.jsonl").read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith("tasks.jsonl: 780 samples\n")
