"""lm-evaluation-harness with our model: answers, likelihoods, statistics and errors, on wedlm-nano and tiny models."""

import os
import subprocess
import sys
from argparse import Namespace
from unittest.mock import Mock

import datasets
import evaluate as metrics
import pandas as pd
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from tiny import EOS, stock_twin, tiny_model, tiny_tokenizer

from wedlm_hf.checkpoints import NANO
from wedlm_hf.eval.harness import WeDLMHarnessLM, evaluate
from wedlm_hf.eval.harness.model import block_elbo
from wedlm_hf.eval.harness.nano import FEWSHOT, documents
from wedlm_hf.eval.harness.run import TASKS_FOLDER, _apply_suite
from wedlm_hf.eval.measure import decode, measure
from wedlm_hf.eval.prompts import Prompt, encode_prompt, read_tasks

TASKS = ("counting", "arithmetic", "sorting", "json", "chat", "python")
COUNT = 2
COUNTS = ("new_tokens", "forwards", "token_instances")
PROMPTS = {task: [prompt for prompt in read_tasks(NANO) if prompt.task == task][:COUNT] for task in TASKS}


@pytest.fixture(autouse=True)
def undescribed(monkeypatch):
    """The harness asks pip and the system for everything that is installed, 3 s for each run."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """Our tasks alone, with caches that vanish."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False)


def run(manager, tasks, model_args=None, **options):
    """Results of a run on wedlm-nano, on few documents."""
    settings = {"limit": COUNT, "apply_chat_template": True, "bootstrap_iters": 0, "device": "cpu", "model": "wedlm"}
    arguments = {"pretrained": str(NANO)} | (model_args or {})
    return evaluate(**settings | {"task_manager": manager, "tasks": tasks, "model_args": arguments} | options)


def instances(kind, *arguments):
    return [Instance(kind, {}, given, idx, metadata=("task", idx, 1)) for idx, given in enumerate(arguments)]


def tiny_lm(**options) -> WeDLMHarnessLM:
    return WeDLMHarnessLM(tiny_model(), tokenizer=tiny_tokenizer(), **options)


def texts(results, task):
    return [entry["resps"] for entry in results["samples"][task]]


@pytest.mark.parametrize(("options", "batch_size", "tasks"), [
    ({"strategy": "ar"}, 2, ("counting", "chat")),
    ({"strategy": "wedlm", "verification": "exact", "window_size": 12, "slot_cost": 0.04}, 1, ("sorting", "python")),
    ({"strategy": "wedlm", "entropy_threshold": 0.3, "distance_penalty": 0.02}, 2, TASKS),
], ids=str)  # fmt: skip
def test_answers_scores_and_counts_are_those_of_the_measuring_core(nano, manager, options, batch_size, tasks):
    model, tokenizer = nano
    names = ["wedlm_nano"] if tasks == TASKS else [f"wedlm_nano_{task}" for task in tasks]
    results = run(manager, names, options, batch_size=batch_size)
    prompts = [encode_prompt(model, tokenizer, prompt) for task in tasks for prompt in PROMPTS[task]]
    own = pd.DataFrame(measure(model, tokenizer, prompts, {"own": options | {"max_new_tokens": 160}}))
    if tasks == TASKS:
        assert results["groups"]["wedlm_nano"]["right,none"] == pytest.approx(own["right"].mean())
    for name, rows in own.groupby("task"):
        task = f"wedlm_nano_{name}"
        assert texts(results, task) == [[[text]] for text in rows["text"]]
        assert results["results"][task]["right,none"] == rows["right"].mean()
        assert results["config"]["decoding"][task] == {"strategy": options["strategy"]} | options
        if options["strategy"] == "ar":
            continue
        counts = results["config"]["decoding_statistics"][task]
        assert {column: counts[column] for column in COUNTS} == {column: rows[column].sum() for column in COUNTS}
        assert counts["prompts"] == len(rows)
        per_forward = rows["new_tokens"].sum() / rows["forwards"].sum()
        assert results["results"][task]["tokens_per_forward,none"] == pytest.approx(per_forward)


@pytest.mark.parametrize("options", [{"strategy": "ar"}, {"strategy": "wedlm", "verification": "exact"}], ids=str)
def test_stop_strings_stop_the_decoder_but_not_where_they_begin_in_the_prompt(nano, options):
    model, tokenizer = nano
    lm = WeDLMHarnessLM(model, tokenizer=tokenizer, batch_size=2, **options)
    questions = ("Count from 1 to 12 by 1.", "Count down from 30 to 10 by 2.")
    prompts = [lm.apply_chat_template([{"role": "user", "content": text}]) for text in questions]
    assert all(prompt.endswith("assistant\n") for prompt in prompts)
    widths, model_generate = [], lm._model_generate

    def spied(*args, **kwargs):
        output = model_generate(*args, **kwargs)
        widths.append(output.shape[1] - kwargs["context"].shape[1])
        return output

    lm._model_generate = spied

    def answers(*until):
        return lm.generate_until(instances("generate_until", *((text, {"until": [*until]}) for text in prompts)), True)

    whole = answers()
    assert answers("\n1", "\n30") == whole
    assert answers(" 5", "24,", "<|im_end|>") == ["1, 2, 3, 4,", "30, 28, 26, "]
    assert widths[2] < widths[0] == widths[1]


def test_gen_kwargs_go_before_model_args_and_reach_the_stock_model_too(manager):
    task = "wedlm_nano_counting"
    gen_kwargs = {"strategy": "wedlm", "verification": "exact", "max_gen_toks": 40, "temperature": 0.0}
    ours = run(manager, [task], {"strategy": "ar"}, gen_kwargs=gen_kwargs, batch_size=2)
    counted = ours["config"]["decoding_statistics"][task]["tokens_per_forward"]
    assert ours["results"][task]["tokens_per_forward,none"] == counted > 1
    assert ours["config"]["decoding"][task] == {"strategy": "wedlm", "verification": "exact"}
    stock = run(manager, [task], model="hf", gen_kwargs=gen_kwargs)
    plain = run(manager, [task], model="hf", gen_kwargs={"max_gen_toks": 40})
    assert texts(ours, task) == texts(stock, task) == texts(plain, task)
    with pytest.raises(ValueError, match="stops the sequences of a batch together: pass `--model wedlm` or"):
        run(manager, [task], model="hf", gen_kwargs=gen_kwargs, batch_size=2)


def test_few_shot_examples_are_turns_and_no_test_document(manager):
    results = run(manager, ["wedlm_nano_chat"], {"strategy": "wedlm"}, num_fewshot=2, limit=1)
    prompt = results["samples"]["wedlm_nano_chat"][0]["arguments"][0][0]
    assert prompt.count("<|im_start|>user") >= 3 and "\x1e" not in prompt
    assert results["n-shot"]["wedlm_nano_chat"] == 2
    run(manager, ["wedlm_nano_chat"], {"strategy": "wedlm"}, num_fewshot=1, limit=1, apply_chat_template=False)


TEXTS = [("Count from 1 to 9:", " 1, 2, 3"), ("Sort 31, 7, 12, 5:", " 5"), ("", "3 + 4 = 7"), ("Count", " from")]


def test_likelihoods_of_the_ar_head_are_those_of_stock_qwen3_with_the_same_weights():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ours = WeDLMHarnessLM(model, tokenizer=tokenizer, batch_size=2)
    stock = HFLM(stock_twin(model, "sdpa"), tokenizer=tokenizer, batch_size=2)
    for kind, arguments in (("loglikelihood", TEXTS), ("loglikelihood_rolling", [("3 + 4 = 7" * 30,), ("Sort",)])):
        requests = instances(kind, *arguments)
        for value, other in zip(getattr(ours, kind)(requests), getattr(stock, kind)(requests), strict=True):
            assert value == pytest.approx(other, abs=1e-4)


def test_the_block_elbo_of_requests_is_the_estimate_with_its_standard_error():
    lm = tiny_lm(likelihood="elbo", elbo_samples=5, elbo_block_size=4, elbo_seed=3, batch_size=2)
    answers = lm.loglikelihood(instances("loglikelihood", *TEXTS))
    pairs = [lm._encode_pair(*text) if text[0] else ([EOS], lm.tok_encode(text[1])) for text in TEXTS]
    direct = block_elbo(lm.model, lm.tokenizer, pairs, samples=5, block_size=4, seed=3)
    greedy = [answer[1] for answer in tiny_lm().loglikelihood(instances("loglikelihood", *TEXTS))]
    for answer, estimate, is_greedy in zip(answers, direct, greedy, strict=True):
        assert answer == (pytest.approx(estimate.value, rel=1e-5), is_greedy)
    info = lm.get_model_info()["likelihood"]
    assert info["kind"] == "elbo" and (info["samples"], info["block_size"], info["seed"]) == (5, 4, 3)
    tokens = sum(len(rest) for _, rest in pairs)
    assert info["tokens"] == tokens
    assert info["elbo_per_token"] == pytest.approx(sum(estimate.value for estimate in direct) / tokens, rel=1e-5)
    error = sum(estimate.standard_error**2 for estimate in direct) ** 0.5 / tokens
    assert info["elbo_standard_error_per_token"] == pytest.approx(error, rel=1e-3)


def test_a_text_longer_than_the_context_is_estimated_window_by_window():
    lm = tiny_lm(likelihood="elbo", elbo_samples=2, elbo_block_size=4, batch_size=2, max_length=16)
    text = "Count from 1 to 9: 1, 2, 3, 4, 5, 6, 7, 8, 9 and so on"
    (answer,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    tokens = [EOS, *lm.tok_encode(text)]
    assert len(tokens) > 33
    tail = len(tokens[1:]) % 16
    windows = [(tokens[start : start + 1], tokens[start + 1 : start + 17]) for start in range(0, len(tokens) - 16, 16)]
    windows.append((tokens[-17:-tail], tokens[-tail:]))  # the last window is full, too: its context reaches back
    direct = block_elbo(lm.model, lm.tokenizer, windows, samples=2, block_size=4)
    assert answer == pytest.approx(sum(estimate.value for estimate in direct), rel=1e-5)


def test_choices_and_texts_are_scored_either_way(manager):
    tasks = ["wedlm_nano_choice", "wedlm_nano_perplexity"]
    exact = run(manager, tasks)
    elbo = run(manager, tasks, {"likelihood": "elbo", "elbo_samples": 4}, batch_size=4)
    for results in (exact, elbo):
        assert results["results"]["wedlm_nano_choice"]["acc,none"] == 1
    bits = [results["results"]["wedlm_nano_perplexity"]["bits_per_byte,none"] for results in (exact, elbo)]
    assert 0 < bits[0] < bits[1]
    assert exact["config"]["likelihood"] == {"kind": "ar"} and exact["config"]["decoding_statistics"] == {}
    bound = elbo["config"]["likelihood"]
    assert bound["elbo_standard_error_per_token"] > 0 and bound["elbo_per_token"] < bound["ar_per_token"] < 0


@pytest.mark.parametrize(("model_args", "options", "message"), [
    ({"strategi": "wedlm"}, {}, "strategi"),
    ({}, {"gen_kwargs": {"entropy_treshold": 1}}, "entropy_treshold"),
    ({"window_size": 3}, {}, "`window_size=3` has no meaning with `strategy='ar'`"),
    ({"likelihood": "exact"}, {}, "`likelihood` must be one of 'ar', 'elbo', got 'exact'"),
    ({"elbo_samples": 4}, {}, "`elbo_samples` has no meaning with `likelihood='ar'`"),
    ({"likelihood": "elbo", "elbo_samples": 0}, {}, "`elbo_samples` must be an integer of at least 2, got 0"),
    ({"likelihood": "elbo"}, {"batch_size": "auto"}, "needs a number as `batch_size`, got 'auto'"),
    ({"pretrained": "/no/where"}, {}, "/no/where"),
])  # fmt: skip
def test_a_request_that_cannot_be_honoured_is_refused(manager, model_args, options, message):
    with pytest.raises((ValueError, OSError, TypeError), match=message):
        run(manager, ["wedlm_nano_counting"], model_args, limit=1, **options)


@pytest.mark.parametrize("options", [{"use_cache": "cache"}, {"batch_size": "auto"}], ids=str)
def test_what_makes_processes_wait_for_each_other_for_ever_is_refused(manager, monkeypatch, options):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"`--(use_cache cache|batch_size auto)` on 2 processes can hang, since some"):
        run(manager, ["wedlm_nano_counting"], **options)


def test_an_interrupted_run_goes_on_where_it_stopped_and_other_settings_get_no_answers_of_its(
    nano, manager, monkeypatch, tmp_path
):
    calls, generate = [], WeDLMHarnessLM._model_generate

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(WeDLMHarnessLM, "_model_generate", counted)
    cache, tasks = {"use_cache": str(tmp_path / "cache")}, ["counting", "arithmetic"]
    names = [f"wedlm_nano_{task}" for task in tasks]
    with pytest.raises(KeyboardInterrupt):
        run(manager, names, {"strategy": "wedlm"}, **cache)
    results = run(manager, names, {"strategy": "wedlm"}, **cache)
    assert len(calls) == 3 + 2 * COUNT - 2
    for task, name in zip(tasks, names, strict=True):
        prompts = [encode_prompt(*nano, prompt).tokens for prompt in PROMPTS[task]]
        fresh = decode(*nano, prompts, {"strategy": "wedlm", "max_new_tokens": 160})
        assert texts(results, name) == [[[answer.text]] for answer in fresh]
    calls[:] = [1] * 10
    run(manager, names, {"strategy": "wedlm", "window_size": 2}, **cache)
    assert len(calls) == 10 + 2 * COUNT


@pytest.mark.slow
def test_errors_of_the_command_are_one_message():
    words = ["--model", "wedlm", "--model_args", f"pretrained={NANO},strategy=x", "--tasks", "wedlm_nano"]
    command = [sys.executable, "-m", "wedlm_hf.eval", "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "OptionError: `strategy` must be one of 'ar', 'wedlm', 'block', got 'x'." in done.stderr


@pytest.mark.parametrize("name", [*TASKS, None])
def test_documents_are_the_prompts_with_one_right_choice_and_none_is_a_few_shot_example(name):
    splits = documents(read_tasks(NANO), name)
    test, fewshot = list(splits["test"]), list(splits["fewshot"])
    assert len(test) == 100 and len(fewshot) == FEWSHOT
    assert not [row for row in test if row in fewshot]
    for row in test:
        prompt = Prompt(row["messages"], row["task"], tuple(row["answers"]), row["match"])
        assert len(set(row["choices"])) == 4
        assert [prompt.score(choice) for choice in row["choices"]] == [i == row["label"] for i in range(4)]
    if name:
        expected = [(prompt.messages, prompt.answers) for prompt in read_tasks(NANO) if prompt.task == name]
        assert [(row["messages"], tuple(row["answers"])) for row in test] == expected[:100]
    else:
        assert {row["task"] for row in test} == {row["task"] for row in fewshot} == set(TASKS)


SHOTS = {
    "arc_challenge": 0, "arc_easy": 0, "hellaswag": 10, "mmlu_anatomy": 5, "gsm8k": 3, "gpqa_diamond_n_shot": 5,
    "mbpp": 3, "humaneval": 4, "humaneval_plus": 4,
}  # fmt: skip


def look_alike(path, name=None, **kwargs):
    """Twelve documents in the form of a benchmark's."""
    numbers = ["one", "two", "three", "four"]
    program = {"prompt": "def f(x):\n", "canonical_solution": "    return x\n", "test": "def check(f): pass"}
    wrong = {f"Incorrect Answer {n}": f"w{n}" for n in (1, 2, 3)}
    known = {
        "ai2_arc": {"question": "Which?", "choices": {"label": [*"ABCD"], "text": numbers}, "answerKey": "B"},
        "hellaswag": {"ctx_a": "A", "ctx_b": "b", "activity_label": "C", "endings": ["d", "e"], "label": "1"},
        "mmlu": {"question": "Which?", "choices": numbers, "answer": 1, "subject": "x"},
        "gsm8k": {"question": "1 + 1?", "answer": "2\n#### 2"},
        "gpqa": {"Question": "Which?", "Correct Answer": "a"} | wrong,
        "mbpp": {"text": "Add.", "code": "x", "test_list": ["assert 1"] * 3, "task_id": 1},
        "openai_humaneval": program | {"entry_point": "f"},
        "humanevalplus": program | {"entry_point": "f"},
    }
    document = known[path.split("/")[-1]]
    split = datasets.Dataset.from_list([document | {"number": str(n)} for n in range(12)])
    return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test", "dev"), split))


@pytest.mark.slow
def test_the_suite_names_tasks_of_the_harness_and_runs_them_with_the_papers_shots_and_settings(monkeypatch, tmp_path):
    manager = TaskManager(include_path=str(TASKS_FOLDER))
    suite = load_yaml(TASKS_FOLDER / "paper.yaml")
    names = [child.get("task") or child["group"] for child in suite["task"]]
    assert not [name for name in names if name not in manager.task_index]

    monkeypatch.setattr(datasets, "load_dataset", look_alike)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    code_eval = Mock(**{"compute.return_value": ({"pass@1": 1.0}, None)})
    monkeypatch.setattr(metrics, "load", lambda name: code_eval)
    # Its extra packages are not among those of the tests, and one of MMLU's 57 parts is enough.
    suite["task"] = [child for child in suite["task"] if child.get("group") != "minerva_math"]
    (mmlu,) = (child for child in suite["task"] if child.get("group") == "mmlu")
    mmlu["task"] = "mmlu_anatomy"
    del mmlu["group"]
    settings = suite["metadata"]
    manager.task_index["wedlm_paper"].cfg = suite
    manager.task_index["wedlm_paper"].yaml_path = None
    results = evaluate(
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


def test_the_suite_leaves_what_is_given_alone_and_other_models_their_decoding():
    own = {"pretrained": "x", "window_size": 8}
    given = Namespace(model="wedlm", tasks=None, gen_kwargs={"temperature": 0.5}, model_args=own)
    _apply_suite(given, "paper")
    found = (given.tasks, given.gen_kwargs["temperature"], given.gen_kwargs["max_gen_toks"])
    assert found == (["wedlm_paper"], 0.5, 512)
    suite = {"strategy": "wedlm", "verification": "none", "entropy_threshold": 0, "distance_penalty": 0.1}
    assert given.model_args == own | suite
    baseline = Namespace(tasks=None, gen_kwargs=None, model="wedlm", model_args={"strategy": "ar"})
    other = Namespace(model="hf", tasks=["gsm8k"], gen_kwargs=None, model_args={"pretrained": "x"})
    for arguments in (baseline, other):
        before = dict(arguments.model_args)
        _apply_suite(arguments, "paper")
        assert arguments.model_args == before and arguments.gen_kwargs["max_gen_toks"] == 512
    assert other.tasks == ["gsm8k"]
