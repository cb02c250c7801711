"""The built-in tasks and the suite as lm-evaluation-harness gets them."""

from argparse import Namespace

import pytest
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from wedlm_hf.checkpoints import NANO
from wedlm_hf.eval.harness import nano
from wedlm_hf.eval.harness import run as harness
from wedlm_hf.eval.harness.run import TASKS_FOLDER
from wedlm_hf.eval.prompts import Prompt, read_tasks

TASKS = ("counting", "arithmetic", "sorting", "json", "chat", "python")


@pytest.mark.parametrize("name", [*TASKS, None])
def test_documents_are_the_prompts_with_one_right_choice_and_none_is_a_few_shot_example(name):
    splits = nano.documents(read_tasks(NANO), name)
    test, fewshot = list(splits["test"]), list(splits["fewshot"])
    assert len(test) == 100 and len(fewshot) == nano.FEWSHOT
    assert not [row for row in test if row in fewshot]
    for row in test:
        prompt = Prompt(row["messages"], row["task"], tuple(row["answers"]), row["match"])
        assert len(set(row["choices"])) == 4
        assert [prompt.is_right(choice) for choice in row["choices"]] == [i == row["label"] for i in range(4)]
    if name:
        expected = [prompt for prompt in read_tasks(NANO) if prompt.task == name][:100]
        assert [(row["messages"], tuple(row["answers"])) for row in test] == [
            (prompt.messages, prompt.answers) for prompt in expected
        ]
    else:
        assert {row["task"] for row in test} == {row["task"] for row in fewshot} == set(TASKS)


# --- the suite ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_suite_names_tasks_of_the_harness():
    suite, manager = load_yaml(TASKS_FOLDER / "paper.yaml"), TaskManager(include_path=str(TASKS_FOLDER))
    names = [child.get("task") or child["group"] for child in suite["task"]]
    assert len(names) > 5 and not [name for name in names if name not in manager.task_index]


def test_the_suite_leaves_what_is_given_alone_and_other_models_their_decoding():
    own = {"pretrained": "x", "window_size": 8}
    given = Namespace(model="wedlm", tasks=None, gen_kwargs={"temperature": 0.5}, model_args=own)
    harness._apply_suite(given, "paper")
    assert given.tasks == ["wedlm_paper"] and given.gen_kwargs["temperature"] == 0.5
    assert given.gen_kwargs["max_gen_toks"] == 512
    suite = {"strategy": "wedlm", "verification": "none", "entropy_threshold": 0, "distance_penalty": 0.1}
    assert given.model_args == own | suite
    baseline = Namespace(tasks=None, gen_kwargs=None, model="wedlm", model_args={"strategy": "ar"})
    other = Namespace(model="hf", tasks=["gsm8k"], gen_kwargs=None, model_args={"pretrained": "x"})
    for arguments in (baseline, other):
        before = dict(arguments.model_args)
        harness._apply_suite(arguments, "paper")
        assert arguments.model_args == before and arguments.gen_kwargs["max_gen_toks"] == 512
    assert other.tasks == ["gsm8k"]
