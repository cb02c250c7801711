"""The built-in tasks and the suite as lm-evaluation-harness gets them."""

from argparse import Namespace

import datasets
import evaluate
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


LETTERS = {"label": ["A", "B", "C", "D"], "text": ["one", "two", "three", "four"]}


SHOTS = {
    "arc_challenge": 0, "arc_easy": 0, "hellaswag": 10, "mmlu_anatomy": 5, "gsm8k": 3, "gpqa_diamond_n_shot": 5,
    "mbpp": 3, "humaneval": 4, "humaneval_plus": 4,
}  # fmt: skip


def look_alike(path, name=None, **kwargs):
    """Twelve documents in the form of a benchmark's."""
    program = {"prompt": "def f(x):\n", "canonical_solution": "    return x\n", "test": "def check(f): pass"}
    program["entry_point"] = "f"
    choice = {"question": "Which?", "choices": ["one", "two", "three", "four"], "answer": 1, "subject": "x"}
    documents = {
        "allenai/ai2_arc": {"question": "Which?", "choices": LETTERS, "answerKey": "B"},
        "Rowan/hellaswag": {"ctx_a": "A", "ctx_b": "b", "activity_label": "C", "endings": ["d", "e"], "label": "1"},
        "cais/mmlu": choice,
        "openai/gsm8k": {"question": "1 + 1?", "answer": "2\n#### 2"},
        "Idavidrein/gpqa": {"Question": "Which?", "Correct Answer": "a"}
        | {f"Incorrect Answer {n}": f"w{n}" for n in (1, 2, 3)},
        "google-research-datasets/mbpp": {"text": "Add.", "code": "x", "test_list": ["assert 1"] * 3, "task_id": 1},
        "openai/openai_humaneval": program,
        "evalplus/humanevalplus": program,
    }
    document = next(
        value for key, value in documents.items() if key == path or key.split("/")[1] == path.split("/")[-1]
    )
    split = datasets.Dataset.from_list([document | {"number": str(n)} for n in range(12)])
    return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test", "dev"), split))


@pytest.mark.slow
def test_the_suite_names_tasks_of_the_harness_and_runs_them_with_the_papers_shots_and_settings(monkeypatch, tmp_path):
    class CodeEval:
        def compute(self, references, predictions, k):
            return {"pass@1": 1.0}, None

    manager = TaskManager(include_path=str(TASKS_FOLDER))
    suite = load_yaml(TASKS_FOLDER / "paper.yaml")
    names = [child.get("task") or child["group"] for child in suite["task"]]
    assert not [name for name in names if name not in manager.task_index]

    monkeypatch.setattr(datasets, "load_dataset", look_alike)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(evaluate, "load", lambda name: CodeEval())
    # Its extra packages are not among those of the tests, and one of MMLU's 57 parts is enough.
    suite["task"] = [child for child in suite["task"] if child.get("group") != "minerva_math"]
    (mmlu,) = (child for child in suite["task"] if child.get("group") == "mmlu")
    mmlu["task"] = "mmlu_anatomy"
    del mmlu["group"]
    settings = suite["metadata"]
    manager.task_index["wedlm_paper"].cfg = suite
    manager.task_index["wedlm_paper"].yaml_path = None
    results = harness.evaluate(
        model="wedlm", model_args={"pretrained": str(NANO)} | settings["model_args"], tasks=["wedlm_paper"],
        gen_kwargs=settings["gen_kwargs"] | {"max_gen_toks": 8}, task_manager=manager, limit=1, bootstrap_iters=0,
        confirm_run_unsafe_code=True, device="cpu",
    )  # fmt: skip
    shots = results["n-shot"]
    assert {name: shots[name] for name in SHOTS if name in shots} == SHOTS
    prompts = {name: entries[0]["arguments"][0] for name, entries in results["samples"].items()}
    assert prompts["arc_easy"][0] == "Question: Which?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    assert prompts["arc_easy"][1] == " A"
    assert prompts["humaneval"][0] == "def f(x):\n    return x\n\n\n" * 4 + "def f(x):\n"
    for name in ("gsm8k", "mbpp", "humaneval", "humaneval_plus"):
        options = prompts[name][1]
        assert (options["temperature"], options["do_sample"]) == (0.1, True) and options["until"]
    decoding = results["config"]["decoding"]["gsm8k"]
    chosen = ("strategy", "verification", "window_size", "entropy_threshold", "distance_penalty")
    assert [decoding[name] for name in chosen] == ["wedlm", "none", 6, 0, 0.1]
    statistics = results["config"]["decoding_statistics"]
    assert len(statistics) == 4 and all(numbers["tokens_per_forward"] <= 1 for numbers in statistics.values())


# --- the suite ----------------------------------------------------------------------------------


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
