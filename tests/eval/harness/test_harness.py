"""lm-evaluation-harness with our model: answers, likelihoods, statistics and errors, on wedlm-nano and tiny models."""

import json
import logging
import os
import subprocess
import sys
from argparse import Namespace

import datasets
import lm_eval
import pandas as pd
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny import EOS, MASK, PUBLISHED, stock_twin, tiny_model, tiny_tokenizer

from wedlm_hf.eval.harness import WeDLMHarnessLM, evaluate
from wedlm_hf.eval.harness import run as harness
from wedlm_hf.eval.harness.likelihood import block_elbo
from wedlm_hf.eval.harness.run import TASKS_FOLDER
from wedlm_hf.eval.measure import measure
from wedlm_hf.eval.options import NANO
from wedlm_hf.eval.prompts import encode, encode_prompt, read_tasks
from wedlm_hf.modeling_wedlm.loading import load_model, load_tokenizer

TASKS = ("counting", "arithmetic", "sorting", "json", "chat", "python")
GROUP = [f"wedlm_nano_{task}" for task in TASKS]
COUNT = 3
PROMPTS = {task: [prompt for prompt in read_tasks(NANO) if prompt.task == task][:COUNT] for task in TASKS}


@pytest.fixture(scope="module")
def nano():
    return load_model(NANO).eval(), load_tokenizer(NANO)


@pytest.fixture(scope="module")
def measured(nano):
    """Some prompts of each task, and what the measuring core counts for them; once for the same options."""
    model, tokenizer = nano
    everything = [encode_prompt(model, tokenizer, prompt) for task in TASKS for prompt in PROMPTS[task]]
    kept = {}

    def measured(options):
        if (key := str(options)) not in kept:
            kept[key] = pd.DataFrame(measure(model, tokenizer, everything, {"own": options | {"max_new_tokens": 160}}))
        return everything, kept[key]

    return measured


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


def statistics(lm):
    """Of all that the model has decoded."""
    return lm.get_model_info()["decoding_statistics"]["pooled"]


def estimates(lm):
    """Statistics of likelihoods, and standard errors by document and index."""
    info = lm.get_model_info()["likelihood"]
    return info["tasks"]["task"], {(document, index): error for _, document, index, error in info["standard_errors"]}


# --- generation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "batch_size"),
    [
        ({"strategy": "ar"}, 1),
        ({"strategy": "wedlm"}, 1),
        ({"strategy": "wedlm", "verification": "exact", "window_size": 12}, 1),
        ({"strategy": "wedlm", "entropy_threshold": 0.3, "distance_penalty": 0.02}, 2),
        ({"strategy": "ar"}, 3),
    ],
    ids=str,
)
def test_answers_are_those_of_generate_token_for_token_and_scores_those_of_measure(
    nano, manager, measured, monkeypatch, options, batch_size
):
    _, tokenizer = nano
    seen = {}

    def spied(lm, context, *args, **kwargs):
        sequences = original(lm, context, *args, **kwargs)
        for row, prompt in zip(sequences, kwargs["attention_mask"], strict=True):
            tokens = row.tolist()
            seen[tuple(tokens[len(prompt) - int(prompt.sum()) : len(prompt)])] = tokens[len(prompt) :]
        return sequences

    original = WeDLMHarnessLM._model_generate
    monkeypatch.setattr(WeDLMHarnessLM, "_model_generate", spied)
    results = run(manager, ["wedlm_nano"], options, batch_size=batch_size)

    everything, own = measured(options)
    assert len(seen) == len(everything)
    for task in TASKS:
        logged = results["samples"][f"wedlm_nano_{task}"]
        for direct, entry in zip(own[own["task"] == task].itertuples(), logged, strict=True):
            answer = seen[tuple(everything[direct.prompt].tokens)]
            assert answer[: len(direct.tokens)] == direct.tokens
            assert set(answer[len(direct.tokens) :]) <= {tokenizer.pad_token_id}
            assert entry["resps"] == [[direct.text]]
    for task in TASKS:
        assert results["results"][f"wedlm_nano_{task}"]["right,none"] == own[own["task"] == task]["right"].mean()
    assert results["groups"]["wedlm_nano"]["right,none"] == pytest.approx(own["right"].mean())
    statistics = results["config"]["decoding_statistics"]
    for task in (*TASKS, None):
        counts = statistics["tasks"][f"wedlm_nano_{task}"] if task else statistics["pooled"]
        rows = own[own["task"] == task] if task else own
        assert counts["prompts"] == len(rows)
        for name in ("new_tokens", "forwards", "token_instances"):
            assert counts[name] == rows[name].sum(), name
        assert counts["tokens_per_forward"] == pytest.approx(rows["new_tokens"].sum() / rows["forwards"].sum())
        assert counts["tokens_per_second"] > 0
    assert results["config"]["decoding"]["strategy"] == options["strategy"]


@pytest.mark.parametrize("options", [{"strategy": "ar"}, {"strategy": "wedlm", "verification": "exact"}], ids=str)
def test_stop_strings_stop_the_decoder(nano, options):
    model, tokenizer = nano
    lm = WeDLMHarnessLM(model, tokenizer=tokenizer, batch_size=2, **options)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in ("Count from 1 to 12 by 1.", "Count down from 30 to 10 by 2.")
    ]
    whole = lm.generate_until(instances("generate_until", *((prompt, {"until": []}) for prompt in prompts)))
    full = statistics(lm)
    cut = lm.generate_until(
        instances("generate_until", *((prompt, {"until": [" 5", "24,", "<|im_end|>"]}) for prompt in prompts))
    )
    assert cut == ["1, 2, 3, 4,", "30, 28, 26, "] and all(a.startswith(b) for a, b in zip(whole, cut, strict=True))
    stopped = statistics(lm)["new_tokens"] - full["new_tokens"]
    assert stopped <= sum(len(tokenizer(text)["input_ids"]) for text in ("1, 2, 3, 4, 5,", "30, 28, 26, 24, "))
    assert statistics(lm)["forwards"] < 2 * full["forwards"]


def test_sampling_follows_the_seed(manager):
    def answers(seed):
        results = run(
            manager,
            ["wedlm_nano_chat"],
            {"strategy": "wedlm"},
            gen_kwargs={"do_sample": True, "temperature": 3.0, "max_gen_toks": 12},
            torch_random_seed=seed,
        )
        return [entry["resps"] for entry in results["samples"]["wedlm_nano_chat"]]

    assert answers(1) == answers(1) != answers(2)


def test_gen_kwargs_go_before_model_args_and_reach_the_stock_model_too(manager):
    gen_kwargs = {"strategy": "wedlm", "verification": "exact", "max_gen_toks": 40, "temperature": 0.0}
    ours = run(manager, ["wedlm_nano_counting"], {"strategy": "ar"}, gen_kwargs=gen_kwargs, batch_size=2)
    assert ours["config"]["decoding_statistics"]["pooled"]["tokens_per_forward"] > 1.5
    stock = run(manager, ["wedlm_nano_counting"], model="hf", gen_kwargs=gen_kwargs)
    plain = run(manager, ["wedlm_nano_counting"], model="hf", gen_kwargs={"max_gen_toks": 40})
    replies = [
        [entry["resps"] for entry in results["samples"]["wedlm_nano_counting"]] for results in (ours, stock, plain)
    ]
    assert replies[0] == replies[1] == replies[2]
    with pytest.raises(
        ValueError, match="stops the rows of a batch together: pass `--model wedlm` or `--batch_size 1`"
    ):
        run(manager, ["wedlm_nano_counting"], model="hf", gen_kwargs=gen_kwargs, batch_size=2)


def test_few_shot_examples_are_turns_and_no_test_document(manager):
    results = run(manager, ["wedlm_nano_chat"], {"strategy": "wedlm"}, num_fewshot=2, limit=1)
    prompt = results["samples"]["wedlm_nano_chat"][0]["arguments"][0][0]
    assert prompt.count("<|im_start|>user") >= 3 and "\x1e" not in prompt
    assert results["n-shot"]["wedlm_nano_chat"] == 2
    run(manager, ["wedlm_nano_chat"], num_fewshot=1, limit=1, apply_chat_template=False)  # and as plain text


def test_an_automatic_batch_size_is_looked_for_once(manager, monkeypatch, capsys):
    sizes = []

    def detect(lm, requests=None, pos=0):
        sizes.append(original(lm, requests, pos))
        return sizes[-1]

    original = HFLM._detect_batch_size
    monkeypatch.setattr(HFLM, "_detect_batch_size", detect)
    results = run(manager, GROUP[:2], {"strategy": "wedlm"}, batch_size="auto", max_batch_size=2)
    assert sizes == [2] and results["config"]["decoding_statistics"]["pooled"]["prompts"] == 2 * COUNT


def test_a_lora_adapter_decodes(nano, manager, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load_model(NANO), LoraConfig(target_modules="all-linear", init_lora_weights=False, r=2))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.mul_(0.02)
    model.save_pretrained(tmp_path)
    options = {"strategy": "wedlm", "verification": "exact"}
    results = run(manager, ["wedlm_nano_sorting"], options | {"peft": str(tmp_path)})
    _, tokenizer = nano
    for sample, entry in zip(PROMPTS["sorting"], results["samples"]["wedlm_nano_sorting"], strict=True):
        inputs = torch.tensor([encode(tokenizer, sample.messages)])
        answer = model.generate(input_ids=inputs, max_new_tokens=160, **options)[0, inputs.shape[1] :]
        assert entry["resps"] == [[tokenizer.decode(answer, skip_special_tokens=True)]]
    assert results["config"]["decoding_statistics"]["pooled"]["tokens_per_forward"] > 1


def test_a_published_checkpoint_loads_into_our_class_without_its_code(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {name: PUBLISHED[name] for name in ("rope_theta", "rope_scaling", "torch_dtype", "transformers_version")}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_other.WeDLMForCausalLM"}, "mask_token_id": MASK}
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in tmp_path.glob("*.py"):
        file.unlink()
    lm = WeDLMHarnessLM(str(tmp_path), strategy="wedlm", device="cpu", dtype="bfloat16")
    assert type(lm.model).__module__ == "wedlm_hf.modeling_wedlm.modeling_wedlm" and lm.model.dtype == torch.bfloat16
    (answer,) = lm.generate_until(instances("generate_until", ("Sort 31, 7", {"until": ["x"], "max_gen_toks": 5})))
    assert isinstance(answer, str) and statistics(lm)["new_tokens"] <= 5


# --- likelihoods --------------------------------------------------------------------------------

TEXTS = [("Count from 1 to 9:", " 1, 2, 3"), ("Sort 31, 7, 12, 5:", " 5"), ("", "3 + 4 = 7"), ("Count", " from")]


def test_likelihoods_of_the_ar_head_are_those_of_stock_qwen3_with_the_same_weights():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ours = WeDLMHarnessLM(model, tokenizer=tokenizer, batch_size=2)
    stock = HFLM(stock_twin(model, "sdpa"), tokenizer=tokenizer, batch_size=2)
    for kind, arguments in (("loglikelihood", TEXTS), ("loglikelihood_rolling", [("3 + 4 = 7" * 30,), ("Sort",)])):
        requests = instances(kind, *arguments)
        for one, other in zip(getattr(ours, kind)(requests), getattr(stock, kind)(requests), strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_the_block_elbo_of_requests_is_the_estimate_with_its_standard_error():
    lm = tiny_lm(likelihood="elbo", elbo_samples=5, elbo_block_size=4, elbo_seed=3, batch_size=2)
    answers = lm.loglikelihood(instances("loglikelihood", *TEXTS))
    pairs = [lm._encode_pair(*text) if text[0] else ([EOS], lm.tok_encode(text[1])) for text in TEXTS]
    direct = block_elbo(lm.model, lm.tokenizer, pairs, samples=5, block_size=4, seed=3)
    greedy = [answer[1] for answer in tiny_lm().loglikelihood(instances("loglikelihood", *TEXTS))]
    for index, (answer, estimate) in enumerate(zip(answers, direct, strict=True)):
        assert answer == (pytest.approx(estimate.value, rel=1e-5), greedy[index])
        assert estimates(lm)[1][index, index] == pytest.approx(estimate.standard_error, rel=1e-3)
    info = lm.get_model_info()["likelihood"]
    assert info["kind"] == "elbo" and (info["samples"], info["block_size"], info["seed"]) == (5, 4, 3)
    assert info["pooled"]["elbo"] == pytest.approx(sum(estimate.value for estimate in direct), rel=1e-5)
    squares = sum(estimate.standard_error**2 for estimate in direct)
    assert info["pooled"]["elbo_standard_error"] == pytest.approx(squares**0.5, rel=1e-3)


def test_a_text_longer_than_the_context_is_estimated_window_by_window():
    lm = tiny_lm(likelihood="elbo", elbo_samples=2, elbo_block_size=4, batch_size=2, max_length=16)
    text = "Count from 1 to 9: 1, 2, 3, 4, 5, 6, 7, 8, 9 and so on"
    (answer,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    tokens = lm.tok_encode(text)
    assert len(tokens) > 32
    windows = [
        ([EOS] if start == 0 else [tokens[start - 1]], tokens[start : start + 16])
        for start in range(0, len(tokens) - len(tokens) % 16, 16)
    ]
    tail = len(tokens) % 16  # the last window is full, too: its context reaches back
    windows.append((tokens[-17:-tail], tokens[-tail:]))
    direct = block_elbo(lm.model, lm.tokenizer, windows, samples=2, block_size=4)
    assert answer == pytest.approx(sum(estimate.value for estimate in direct), rel=1e-5)
    sums, errors = estimates(lm)
    assert sums["requests"] == len(windows) and sums["tokens"] == len(tokens)
    error = sum(estimate.standard_error**2 for estimate in direct) ** 0.5
    assert errors[0, 0] == pytest.approx(error, rel=1e-3)


def test_choices_and_texts_are_scored_either_way(manager):
    tasks = ["wedlm_nano_choice", "wedlm_nano_perplexity"]
    exact = run(manager, tasks)
    elbo = run(manager, tasks, {"likelihood": "elbo", "elbo_samples": 4}, batch_size="auto", max_batch_size=4)
    for results in (exact, elbo):
        assert results["results"]["wedlm_nano_choice"]["acc,none"] == 1
    bits = [results["results"]["wedlm_nano_perplexity"]["bits_per_byte,none"] for results in (exact, elbo)]
    assert 0 < bits[0] < bits[1]
    assert exact["config"]["likelihood"] == {"kind": "ar"} and "decoding_statistics" not in exact["config"]
    pooled_bound = elbo["config"]["likelihood"]["pooled"]
    assert pooled_bound["elbo_standard_error"] > 0 and pooled_bound["elbo"] < pooled_bound["ar"] < 0
    for task, requests in zip(tasks, (4, 1), strict=True):
        assert [len(entry["elbo_standard_errors"]) for entry in elbo["samples"][task]] == [requests] * COUNT


# --- what cannot be honoured --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_args", "options", "message"),
    [
        ({"strategi": "wedlm"}, {}, "Unknown model argument `strategi` \\(did you mean `strategy`\\?\\)"),
        ({"strategy": "fast"}, {}, "`strategy` must be one of 'ar', 'wedlm', 'block', got 'fast'"),
        ({"strategy": "wedlm", "window_size": 0}, {}, "`window_size` must be an integer of at least 1, got 0"),
        ({}, {"gen_kwargs": {"entropy_treshold": 1}}, "did you mean `entropy_threshold`"),
        ({}, {"gen_kwargs": {"strategy": "wedlm", "verification": "maybe"}}, "`verification` must be one of"),
        ({"window_size": 3}, {}, "`window_size=3` has no meaning with `strategy='ar'`"),
        ({}, {"gen_kwargs": {"window_size": 3}}, "`window_size=3` has no meaning with `strategy='ar'`"),
        ({"strategy": "wedlm"}, {"gen_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"likelihood": "exact"}, {}, "`likelihood` must be one of 'ar', 'elbo', got 'exact'"),
        ({"elbo_samples": 4}, {}, "`elbo_samples` has no meaning with `likelihood='ar'`"),
        ({"likelihood": "elbo", "elbo_samples": 1}, {}, "`elbo_samples` must be an integer of at least 2, got 1"),
        ({"likelihood": "elbo", "elbo_block_size": "4"}, {}, "`elbo_block_size` must be an integer of at least 1"),
        ({}, {"limit": 0}, "`--limit` must be above 0, got 0"),
        ({"pretrained": None}, {}, "pretrained=FOLDER_OR_HUB_ID"),
        ({"pretrained": "/no/where"}, {}, "There is no checkpoint folder '/no/where'"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused(manager, model_args, options, message):
    with pytest.raises((ValueError, OSError), match=message):
        run(manager, ["wedlm_nano_counting"], model_args, **options)


def test_a_checkpoint_without_a_chat_template_is_refused_before_any_prompt_is_made(manager, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    tracker = lm_eval.loggers.EvaluationTracker()
    with pytest.raises(ValueError, match="has no chat template: leave `--apply_chat_template` out"):
        run(manager, ["wedlm_nano_counting"], {"pretrained": str(tmp_path)}, evaluation_tracker=tracker)


def test_missing_data_are_named_all_at_once_with_the_way_to_fetch_them(manager, tmp_path, monkeypatch):
    task = "output_type: generate_until\ntest_split: test\ndoc_to_text: q\ndoc_to_target: a\n"
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: nobody/{name}\ndataset_name: main\n{task}"
        )
    (tmp_path / "code.yaml").write_text(
        f"task: code\ndataset_path: nobody/code\n{task}metric_list:\n  - metric: !function scores.run\n"
    )
    (tmp_path / "scores.py").write_text("import evaluate\n\nrun = evaluate.load('code_eval').compute\n")
    (tmp_path / "all.yaml").write_text(
        "group: all\ntask:\n  - task: first\n    num_fewshot: 3\n  - second\n  - code\n"
    )
    missing = TaskManager(include_path=[str(TASKS_FOLDER), str(tmp_path)], include_defaults=False)

    def loads_a_model(*args, **kwargs):
        pytest.fail("the model was loaded first")

    monkeypatch.setattr(WeDLMHarnessLM, "__init__", loads_a_model)
    with pytest.raises(ValueError, match="cannot run") as caught:
        run(missing, ["all"])
    lines = str(caught.value).split("\n")
    assert lines[0].startswith("3 of the tasks cannot run") and len(lines) == 4
    for line, name in zip(lines[1:], ("first", "second"), strict=False):
        assert line.startswith(f"- {name}: its dataset is missing (Couldn't reach 'nobody/{name}' on the Hub")
        assert f"datasets.load_dataset('nobody/{name}', 'main')" in line
    assert "- code: its metric is missing." in lines[3] and "evaluate.load('code_eval')" in lines[3]


# --- the cache of answers -----------------------------------------------------------------------


def test_an_interrupted_run_goes_on_where_it_stopped_and_other_settings_get_no_answers_of_its(
    manager, monkeypatch, tmp_path
):
    calls = []

    def counted(lm, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(lm, *args, **kwargs)

    original = WeDLMHarnessLM._model_generate
    monkeypatch.setattr(WeDLMHarnessLM, "_model_generate", counted)
    cache, tasks = {"use_cache": str(tmp_path / "cache")}, GROUP[:2]
    with pytest.raises(KeyboardInterrupt):
        run(manager, tasks, {"strategy": "wedlm"}, **cache)
    results = run(manager, tasks, {"strategy": "wedlm"}, **cache)
    assert len(calls) == 3 + 2 * COUNT - 2
    assert results["config"]["decoding_statistics"]["pooled"]["prompts"] == 2 * COUNT - 2
    fresh = run(manager, tasks, {"strategy": "wedlm"})
    assert results["results"][tasks[0]]["right,none"] == fresh["results"][tasks[0]]["right,none"]
    calls.clear()
    calls += [1] * 10
    run(manager, tasks, {"strategy": "wedlm", "window_size": 2}, **cache)
    assert len(calls) == 10 + 2 * COUNT


@pytest.mark.parametrize("is_templated", [True, False])
def test_prompts_without_the_chat_template_of_the_checkpoint_are_warned_of(manager, caplog, is_templated):
    with caplog.at_level("WARNING", logger="lm_eval.wedlm"):
        logging.getLogger("lm_eval.wedlm").addHandler(caplog.handler)  # the harness keeps its logs to itself
        run(manager, ["wedlm_nano_chat"], limit=1, apply_chat_template=is_templated)
        logging.getLogger("lm_eval.wedlm").removeHandler(caplog.handler)
    assert any("without it" in message for message in caplog.messages) != is_templated


@pytest.mark.parametrize("strategy", ["wedlm", "ar"])
def test_a_stop_string_that_begins_in_the_prompt_stops_nothing(strategy):
    lm = WeDLMHarnessLM(str(NANO), strategy=strategy, batch_size=2, device="cpu")
    questions = ("Count down from 97 to 61 by 4.", "Sort from largest to smallest: 31, 7, 86, 12, 54, 23")
    contexts = [lm.apply_chat_template([{"role": "user", "content": question}]) for question in questions]
    assert all(context.endswith("assistant\n") for context in contexts)

    def answers(*until):
        options = {"until": list(until), "max_gen_toks": 60, "do_sample": False}
        return lm.generate_until(instances("generate_until", *((text, options) for text in contexts)), True)

    free = answers()
    assert answers("\n" + free[0][0], "\n" + free[1][0]) == free
    assert answers(free[0][4:6])[0] == free[0][: free[0].index(free[0][4:6])]


def test_the_suite_leaves_its_settings_to_an_ar_baseline():
    arguments = Namespace(tasks=None, gen_kwargs=None, model="wedlm", model_args={"strategy": "ar"})
    harness._apply_suite(arguments, "paper")
    assert arguments.model_args == {"strategy": "ar"} and arguments.gen_kwargs["max_gen_toks"] == 512


def test_results_state_the_settings_that_the_requests_bring(manager):
    results = run(manager, ["wedlm_nano_chat"], {"strategy": "wedlm"}, limit=1, gen_kwargs={"window_size": 3})
    assert results["config"]["decoding"]["window_size"] == 3


# --- the command line ---------------------------------------------------------------------------


def command(*arguments, module="wedlm_hf.eval", cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )


@pytest.mark.slow
def test_the_command_prints_the_tables_and_saves_the_statistics(tmp_path):
    arguments = ["--model", "wedlm", "--model_args", f"pretrained={NANO},strategy=wedlm,verification=exact"]
    arguments += ["--tasks", "wedlm_nano_counting,wedlm_nano_sorting", "--apply_chat_template", "--device", "cpu"]
    arguments += ["--limit", "4", "--output_path", str(tmp_path / "out")]
    done = command("run", *arguments, cwd=tmp_path, HF_DATASETS_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "|wedlm_nano_counting|      2|none  |     0|right " in done.stdout
    assert "Decoding: strategy wedlm, verification exact, W up to 32, " in done.stdout
    (file,) = (tmp_path / "out").rglob("results_*.json")
    saved = json.loads(file.read_text())["config"]
    assert saved["decoding"]["verification"] == "exact"
    for task, numbers in saved["decoding_statistics"]["tasks"].items():
        row = next(line for line in done.stdout.split("\n") if line.startswith(f"| {task} "))
        cells = [cell.strip() for cell in row.split("|")[2:]]
        assert cells[:2] == [str(numbers["prompts"]), f"{numbers['new_tokens']:,}"]


@pytest.mark.slow
def test_errors_of_the_command_are_one_message():
    done = command("run", "--model", "wedlm", "--model_args", f"pretrained={NANO},strategy=x", "--tasks", "wedlm_nano")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        done.stderr.strip().split("\n")[-1] == "ValueError: `strategy` must be one of 'ar', 'wedlm', 'block', got 'x'."
    )


@pytest.mark.slow
def test_the_harness_alone_runs_our_tasks_on_a_checkpoint_that_brings_its_code(tmp_path):
    arguments = ["--model", "hf", "--model_args", f"pretrained={NANO},trust_remote_code=True", "--device", "cpu"]
    arguments += ["--include_path", str(TASKS_FOLDER), "--tasks", "wedlm_nano_counting", "--apply_chat_template"]
    arguments += ["--limit", "2", "--gen_kwargs", "strategy=wedlm,verification=exact"]
    done = command("run", *arguments, module="lm_eval", cwd=tmp_path, HF_DATASETS_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "|wedlm_nano_counting|" in done.stdout
