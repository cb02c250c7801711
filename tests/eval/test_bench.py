"""`wedlm bench`: what it counts, what it compares, and what it writes. No test looks at how fast anything is."""

import io
import json
import math
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tiny import EOS, MASK, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.eval import bench_show, bench_subject
from wedlm_hf.eval import measure as measuring
from wedlm_hf.eval.bench import (
    AR,
    DECODERS,
    VERIFIED,
    VLLM,
    Request,
    batches_of,
    bench,
    common_prefix,
    partings,
    scaling,
    seconds_to_first_token,
)
from wedlm_hf.eval.bench_subject import Prompt, checkpoint_subject
from wedlm_hf.eval.measure import Decoding, ForwardCounter, decode, endless
from wedlm_hf.eval.memory import TensorBytes, peak_bytes
from wedlm_hf.eval.tasks import TASKS
from wedlm_hf.eval.vllm_baseline import VllmDecoder, export_stock

PROMPTS = [[20, 40, 9, 31, 77], [11, 12, 13], [50, 60, 70, 80, 90, 100, 110, 120]]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [MASK]}

pytestmark = pytest.mark.skipif(not find_spec("matplotlib"), reason="matplotlib is an optional dependency")


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    model.generation_config.entropy_threshold = 2.0
    return model


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def wedlm():
    """Runs the command and returns (exit code, output, errors)."""
    threads = torch.get_num_threads()

    def run(*arguments):
        result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    yield run
    torch.set_num_threads(threads)


# --- memory -------------------------------------------------------------------------------------------------------


def test_views_and_what_was_there_before_count_nothing_and_what_is_freed_is_gone():
    weight = torch.zeros(1000)
    with TensorBytes() as counted:
        first = weight + 1
        assert counted.bytes == 4000
        view = first.view(10, 100)[2:]
        _ = weight.view(-1)
        assert counted.bytes == 4000
        second = first * 2
        assert counted.bytes == 8000
        del first
        assert counted.bytes == 8000  # the view holds it
        del view, second
        assert counted.bytes == 0
        third = torch.ones(500, dtype=torch.float64)
    assert (counted.bytes, counted.peak) == (4000, 8000)
    del third
    assert counted.bytes == 0


@pytest.mark.parametrize("decoder", [AR, "wedlm", VERIFIED])
def test_the_peak_of_memory_is_what_the_allocator_reports(model, decoder):
    def work():
        decode(model, None, PROMPTS, {**DECODERS[decoder], **GREEDY})

    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    # What a kernel holds within itself is not seen: a few per cent here.
    assert 0.9 * peak <= peak_bytes(work, torch.device("cpu")) <= 1.01 * peak


# --- counts and times ---------------------------------------------------------------------------------------------


def test_the_counter_takes_the_time_between_start_and_end_of_each_forward(model, monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    with ForwardCounter(model) as counter:
        model(torch.tensor([[20, 40]]))
        model(torch.tensor([[20], [40], [9]]))
    # For each forward the clock is read three times: its start, and before and after it.
    assert (counter.starts, counter.spans) == ([0, 3], [1, 1])
    assert (counter.shapes, counter.forwards, counter.rows, counter.slots) == ([(1, 2), (3, 1)], 2, 4, 5)


def test_own_cost_is_the_time_outside_the_forwards_relative_to_that_inside():
    score = measuring.Score.of(Decoding([1, 2], "", 2, 1, seconds=3.0, forward_seconds=2.0))
    assert score.own_cost == 0.5
    assert score.to_dict()["own_cost"] == 0.5
    assert measuring.Score.of(Decoding([1], "", 1, 0, 3.0)).own_cost is None


def test_the_first_token_ends_the_generation(model):
    for prompts in (PROMPTS[:1], PROMPTS):
        with ForwardCounter(model) as counter:
            assert seconds_to_first_token(model, None, prompts, {**DECODERS[AR], **GREEDY}, seed=0) > 0
        assert counter.forwards == 1
        with ForwardCounter(model) as counter:
            seconds_to_first_token(model, None, prompts, {**DECODERS[VERIFIED], **GREEDY}, seed=0)
        assert counter.forwards == 1  # the AR head of the prompt's last token gives it
    before = decode(model, None, PROMPTS, {**DECODERS["wedlm"], **GREEDY})
    seconds_to_first_token(model, None, PROMPTS, {**DECODERS["wedlm"], **GREEDY}, seed=0)
    after = decode(model, None, PROMPTS, {**DECODERS["wedlm"], **GREEDY})
    assert [d.tokens for d in before] == [d.tokens for d in after]


def test_sampled_decodings_are_a_function_of_the_seed(model):
    options = {**DECODERS["wedlm"], **GREEDY, "do_sample": True, "temperature": 1.0}
    first, second, other = (decode(model, None, PROMPTS, options, seed=seed) for seed in (1, 1, 2))
    assert [d.tokens for d in first] == [d.tokens for d in second] != [d.tokens for d in other]


# --- prompts ------------------------------------------------------------------------------------------------------


def test_batches_have_one_size_and_the_last_one_is_filled_up_from_the_start():
    prompts = [Prompt([number]) for number in range(1, 6)]
    sizes = [[[prompt.tokens[0] for prompt in batch] for batch in batches_of(prompts, size)] for size in (1, 2, 7)]
    assert sizes == [[[1], [2], [3], [4], [5]], [[1, 2], [3, 4], [5, 1]], [[1, 2, 3, 4, 5, 1, 2]]]


def test_tasks_take_turns_so_that_batches_mix_them(model):
    subject = checkpoint_subject(model, tiny_tokenizer(), "tiny", count=2)
    assert [prompt.task for prompt in subject.prompts] == [*TASKS, *TASKS]
    sample = subject.prompts[0].sample
    assert subject.prompts[0].judges(sample.answer) and not subject.prompts[0].judges("no")
    own = checkpoint_subject(model, tiny_tokenizer(), "tiny", ["1, 2", "3"], raw=True)
    assert [prompt.tokens for prompt in own.prompts] == [tiny_tokenizer()(text)["input_ids"] for text in ("1, 2", "3")]
    assert {prompt.task for prompt in own.prompts} == {"prompts"}
    assert not own.prompts[0].judges("anything")


def test_random_models_have_the_sizes_that_their_names_say():
    for shape, millions in (("qwen3-0.6b", 596), ("86m", 86)):
        sizes = bench_subject.SHAPES[shape]
        hidden, layers, heads = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"]
        attention = hidden * sizes["head_dim"] * 2 * (heads + sizes["num_key_value_heads"])
        weights = sizes["vocab_size"] * hidden + layers * (attention + 3 * hidden * sizes["intermediate_size"])
        assert round(weights / 1e6) == millions


# --- comparison with AR -------------------------------------------------------------------------------------------


def test_the_common_prefix_ends_at_the_first_difference():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == common_prefix([1, 2, 4], [1, 2]) == 2
    assert common_prefix([], [1]) == 0


def test_where_verified_output_parts_from_ar_both_best_logits_are_told(model):
    options = {**DECODERS[AR], **GREEDY}
    reference = decode(model, None, PROMPTS, options)
    assert partings(model, None, PROMPTS, options, reference, reference) == []
    tokens = list(reference[1].tokens)
    tokens[3] += 1
    changed = [reference[0], Decoding(tokens, "", 8, 7, 1.0), reference[2]]
    (parting,) = partings(model, None, PROMPTS, options, reference, changed)
    logits = model(torch.tensor([PROMPTS[1] + reference[1].tokens[:3]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert parting["token"] == 3
    assert parting["gap"] == pytest.approx(best - second, abs=1e-4)
    neighbour = torch.nextafter(torch.tensor(best), torch.tensor(math.inf))
    assert parting["spacing"] == pytest.approx(float(neighbour - best))


def test_partings_are_told_in_steps_of_the_dtype():
    entry = {"prompts": 10, "agreeing": 8, "agreement": 0.8}
    found = [{"token": 1, "gap": 0.5, "spacing": 0.25}, {"token": 2, "gap": 0.0, "spacing": 0.25}]
    line = bench_show.partings_line([entry | {"partings": found}, {"agreement": 0.1}])
    assert line.startswith("Verified output parts from AR's in 2 of 10 answers: ")
    assert "at most 2.0 steps of this dtype apart (median 1.0)" in line
    assert bench_show.partings_line([entry | {"agreement": 1.0, "partings": []}]) == ""


# --- the whole ----------------------------------------------------------------------------------------------------


def test_every_decoder_is_measured_at_every_batch_size(wedlm, checkpoint, tmp_path):
    arguments = ["--count", 1, "--repeats", 2, "--batch-sizes", "1,4", "--max-new-tokens", 4, "--threads", 1]
    code, output, errors = wedlm("bench", checkpoint, *arguments, "--output", tmp_path / "out")
    assert code == 0, errors
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    entries = report["results"]
    assert [(e["batch_size"], e["decoder"]) for e in entries] == [(size, name) for size in (1, 4) for name in DECODERS]
    assert report["environment"]["dtype"] == "float32"
    assert report["settings"]["entropy_threshold"] == 2.0
    assert report["prompts"] == {
        "count": 6,
        "longest": report["prompts"]["longest"],
        "tasks": sorted(TASKS),
        "seed": 4,
    }
    for entry in entries:
        reference = next(e for e in entries if e["batch_size"] == entry["batch_size"] and e["decoder"] == AR)
        assert entry["speed_to_ar"] == pytest.approx(entry["tokens_per_second"] / reference["tokens_per_second"], 1e-3)
        assert entry["prompts"] == {1: 6, 4: 8}[entry["batch_size"]]  # two of them twice
        assert len(entry["repeats"]) == len(entry["time_to_first_token"]) == 2
        assert all(run["seconds"] > run["forward_seconds"] > 0 for run in entry["repeats"])
        assert entry["own_cost"] > 0 and entry["peak_bytes"] > 0
        assert entry["agreement"] <= entry["prefix_agreement"] <= 1
        assert ("tasks" in entry) == (entry["batch_size"] == 1)
        if entry["decoder"] == VERIFIED:
            assert (entry["agreement"], entry["prefix_agreement"], entry["partings"]) == (1, 1, [])
    assert list(entries[0]["tasks"]) == list(TASKS)
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    for name in DECODERS:
        assert name in output
    assert "…" not in output  # it fits 80 columns
    assert report["scaling"] == []


def test_sampling_settings_and_own_prompts_reach_the_decoders(wedlm, checkpoint, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1, 2, 3\n4, 5, 6\n")
    arguments = ["--file", prompts, "--raw", "--temperature", 0.8, "--decoders", "wedlm", "--set", "window_size=2"]
    arguments += ["--set", "entropy-threshold=0.5", "--repeats", 1, "--batch-sizes", 1, "--max-new-tokens", 5]
    code, _, errors = wedlm("bench", checkpoint, *arguments, "--dtype", "bfloat16", "--output", tmp_path)
    assert code == 0, errors
    report = json.loads((tmp_path / "bench.json").read_text())
    assert list(report["decoders"]) == [AR, "wedlm"]
    sampling = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 5}
    assert report["decoders"][AR] == {"strategy": "ar", **sampling}
    wanted = {"window_size": 2, "entropy_threshold": 0.5, "strategy": "wedlm", "verification": "none", **sampling}
    assert report["decoders"]["wedlm"] == wanted
    assert report["environment"]["dtype"] == "bfloat16"
    assert report["prompts"]["count"] == 2
    assert report["results"][0]["prompts"] == 2
    assert "partings" not in report["results"][1]


def test_random_weights_bring_their_own_prompts(wedlm, tmp_path, monkeypatch):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    monkeypatch.setitem(bench_subject.SHAPES, "tiny", sizes | heads)
    arguments = ["--decoders", "block", "--batch-sizes", "1,2", "--repeats", 1, "--max-new-tokens", 4]
    code, _, errors = wedlm("bench", "--random", "tiny", *arguments, "--output", tmp_path)
    assert code == 0, errors
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["model"] == "random tiny"
    # One batch of each size; nothing ends before the limit.
    assert [(e["prompts"], e["new_tokens"]) for e in report["results"]] == [(1, 4), (1, 4), (2, 8), (2, 8)]


def test_steps_of_long_answers_are_measured_beyond_end_tokens(model):
    options = {name: {**DECODERS[name], "do_sample": False} for name in (AR, VERIFIED)}
    ends = model.generation_config.eos_token_id
    with endless(model):
        assert model.generation_config.eos_token_id is None
    entries = scaling(model, Prompt(PROMPTS[0]), options, lengths=(8, 40), repeats=1, seed=0)
    assert model.generation_config.eos_token_id == ends == EOS
    assert [(e["new_tokens"], e["decoder"]) for e in entries] == [(n, name) for n in (8, 40) for name in options]
    cache = model.generate(
        torch.tensor(PROMPTS[:1]), max_new_tokens=9, eos_token_id=-1, return_dict_in_generate=True
    ).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert entries[0]["cache_bytes"] == held  # the last of the nine is never cached
    for entry in entries:
        assert entry["seconds_per_step"] > entry["forward_seconds_per_step"] > 0
        assert entry["peak_bytes"] > entry["cache_bytes"]
    assert entries[0]["slots_per_step"] == 1
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(bench_show.scaling_table(entries))
    rows = [line.split()[:2] for line in console.export_text().splitlines() if line.strip().startswith((AR, "wedlm"))]
    assert rows == [[AR, "8"], [AR, "40"], [VERIFIED, "8"], [VERIFIED, "40"]]


def test_a_slice_of_a_report_draws(tmp_path):
    entry = {"tokens_per_forward": 1.0, "time_to_first_token": [0.1], "speed_to_ar": 1.0, "own_cost": 0.2}
    results = [{"decoder": AR, "batch_size": 2, "peak_bytes": 2**20, **entry}]
    results.append({"decoder": VLLM, "batch_size": 2, **entry})
    del results[1]["own_cost"]  # not known of vLLM
    machine = {"device": "cpu", "processor": "x86_64", "threads": 1, "dtype": "float32"}
    report = {"results": results, "environment": machine, "model": "m", "temperature": 0.7, "repeats": 5}
    assert bench_show.caption(report) == "m: temperature 0.7, float32, x86_64, 1 thread, median of 5"
    bench_show.draw(report, tmp_path / "new" / "bench.png")
    assert (tmp_path / "new" / "bench.png").read_bytes().startswith(b"\x89PNG")


# --- vLLM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "stock"), [("qwen3", Qwen3ForCausalLM), ("qwen2.5", Qwen2ForCausalLM)])
def test_an_exported_checkpoint_is_a_stock_one_with_the_same_logits(tmp_path, style, stock):
    model = tiny_model(style)
    export_stock(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is stock
    assert loaded.generation_config.eos_token_id == EOS
    ids = torch.tensor(PROMPTS[:1])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert not list(tmp_path.glob("*.py"))


def test_a_model_that_no_stock_class_can_hold_is_not_exported(tmp_path):
    with pytest.raises(ValueError, match="No stock model has `qk_norm=False` and `attention_bias=False`"):
        export_stock(tiny_model("qwen2.5", attention_bias=False), tmp_path)


FAKE_VLLM = """
import json, os, pathlib, sys
from types import SimpleNamespace
__version__ = "0.0"
print("a line that is no answer")
class LLM:
    def __init__(self, **keywords):
        config = json.loads((pathlib.Path(keywords["model"]) / "config.json").read_text())
        if config["model_type"] != "qwen3" or keywords["max_model_len"] == 13:
            raise RuntimeError("no such model")
        assert keywords["dtype"] == "float32" and not keywords["enable_prefix_caching"]
    def generate(self, prompts, sampling, use_tqdm):
        answers = [prompt["prompt_token_ids"][::-1][:sampling.max_tokens] for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)]) for answer in answers]
SamplingParams = SimpleNamespace
"""


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """A module `vllm` for the worker, whose engine answers with the prompt backwards."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_vllm_takes_turns_in_a_process_of_its_own(model, fake_vllm):
    options = {AR: {**DECODERS[AR], **GREEDY}}
    with VllmDecoder(model, tiny_tokenizer(), max_new_tokens=2, longest=64) as vllm:
        assert vllm.version == "0.0"
        assert [decoding.tokens for decoding in vllm(PROMPTS[:2])] == [[77, 31], [13, 12]]
        prompts = [Prompt(tokens) for tokens in PROMPTS]
        ours, theirs = bench(
            model, tiny_tokenizer(), prompts, options, batch_size=3, repeats=2, seed=0, vllm=vllm, title=""
        )
    assert (ours["decoder"], theirs["decoder"]) == (AR, VLLM)
    assert theirs["new_tokens"] == 6
    assert "own_cost" not in theirs and "peak_bytes" not in theirs
    assert len(theirs["time_to_first_token"]) == 2
    assert vllm._process.returncode is not None


def test_an_engine_that_does_not_start_says_why(model, fake_vllm):
    with pytest.raises(ValueError, match="vLLM stopped: RuntimeError: no such model"):
        VllmDecoder(model, None, max_new_tokens=2, longest=13)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_get_it(wedlm, checkpoint, tmp_path):
    code, _, errors = wedlm("bench", checkpoint, "--count", 1, "--vllm", "--output", tmp_path / "out")
    assert code == 2
    assert "`--vllm` needs vLLM, but No module named 'vllm'. Install it" in errors
    assert "`--vllm-python`" in errors
    assert not (tmp_path / "out").exists()


# --- what is wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--decoders", "ar,beam"],
            "Unknown decoder 'beam': choose among ar, block, wedlm, wedlm+exact, wedlm+typical.",
        ),
        (["--set", "window=8"], "Unknown setting 'window': choose among strategy, window_size, "),
        (["--set", "window_size"], "`--set` takes NAME=VALUE, got 'window_size'."),
        (["--set", "window_size=0"], "`window_size` must be an integer of at least 1, got 0."),
        (["--set", "window_size=big"], "`window_size` must be an integer of at least 1, got 'big'."),
        (["--batch-sizes", "0,4"], "Batch sizes must be at least 1, got 0, 4."),
        (["--batch-sizes", "1,many"], "`--batch-sizes` takes numbers with commas between them, got '1,many'."),
        (["--temperature", "0"], "`temperature` must be above 0, got 0.0; without it, decoding is greedy."),
        (["--dtype", "int8"], "`--dtype` must be one of auto, float32, bfloat16, float16, got 'int8'."),
        (["--random", "7b"], "`--random` takes one of qwen3-0.6b, 86m, got '7b'."),
        (
            ["--random", "86m", "some/model"],
            "`--random` brings its own weights and prompts: leave MODEL and `--file` out.",
        ),
        (["--file", "missing.txt"], "No such file or directory: 'missing.txt'"),
        (["./missing"], "There is no checkpoint folder './missing'."),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_any_work(wedlm, tmp_path, arguments, message):
    code, output, errors = wedlm("bench", *arguments, "--output", tmp_path / "out")
    assert (code, output, errors.count("\n")) == (2, "", 1), errors
    assert message in errors
    assert not (tmp_path / "out").exists()


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setattr("wedlm_hf.eval.bench.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="The picture needs matplotlib"):
        Request()


def test_help_needs_neither_torch_nor_transformers():
    check = (
        "import sys; from typer.testing import CliRunner; from wedlm_hf import cli\n"
        "for command in ('bench', 'calibrate'):\n"
        "    result = CliRunner().invoke(cli.app, [command, '--help'])\n"
        "    assert result.exit_code == 0 and 'Usage' in result.stdout\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
