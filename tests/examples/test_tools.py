"""The tools of `benchmarks/` and `examples/` run on tiny models, and find what they are there to find."""

import json
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import against_llama_cpp
import gpu_hour
import gpu_results
import nbformat
import pytest
import step_time
import torch
import training_methods
from nbclient import NotebookClient
from tiny import START, script, tiny_llama, tiny_model, write_checkpoint, write_stock_checkpoint

from wedlm_hf import add_mask_adapter, save_mask_adapter
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.checkpoints import NANO
from wedlm_hf.eval.measure import decode

PROMPTS = [[20, 40, 9, 31, 77], [11, 12, 13], [50, 60, 70, 80, 90, 100, 110, 120]]


# --- benchmarks -----------------------------------------------------------------------------------------------------


def test_there_are_few_scripts():
    scripts = [path.name for path in (NANO.parents[1] / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert len(scripts) <= 9, scripts


def test_ways_to_train_a_mask_adapter_and_the_parts_of_its_step_are_measured(tmp_path, capsys):
    base, answers, prompts = tiny_model(), tmp_path / "answers.jsonl", tmp_path / "prompts.jsonl"
    folders = [str(write_checkpoint(tmp_path / "base", base)), str(tmp_path / "adapter")]
    lines = [{"prompt_ids": prompt, "response_ids": [*prompt[::-1], *prompt], "greedy": True} for prompt in PROMPTS]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    training_methods.train("wide-head", folders[0], answers, tmp_path / "out", mask_rows=100)
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["mask_rows"] >= 100 and all(rate >= 1 for rate in found["tokens_per_forward"])

    add_mask_adapter(base, MaskAdapterSettings(rank=2, head_width=4))
    save_mask_adapter(base, folders[1])
    prompts.write_text('{"prompt": "count to ten"}\n' * 2)
    capsys.readouterr()
    training_methods.replay(folders[0], prompts, [folders[1]] * 2, max_new_tokens=8)
    header, _, first, again = capsys.readouterr().out.splitlines()
    assert "branch 4" in header and first == again and all(float(each) >= 1 for each in first.split("|")[3:-1])
    step_time.parts(*folders, prompts, "float32", drafts=[2], planned=2, count=1, max_new_tokens=8)
    header, _, *rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [name.strip() for name in header[1:4]] == ["one row", "drafts: 2", "planned"]
    times = {name.strip(): [float(each) for each in found] for name, *found in rows}
    assert times.pop("rows")[:2] == [1, 9] and times.pop("of them masks")[:2] == [0, 6] and min(times.pop("steps")) > 0
    assert all(sum(parts) == pytest.approx(whole, abs=0.6) for *parts, whole in zip(*times.values(), strict=True))


def test_operators_are_counted_and_linear_layers_are_timed_in_all_formats(tmp_path, monkeypatch, capsys):
    def printed():
        lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line] for line in lines]
        return cells[0], {name: [float(each) for each in found if each != "–"] for name, *found in cells[2:]}

    step_time.operators(str(write_stock_checkpoint(tmp_path)))
    _, calls = printed()
    for bits in ("packed", "8bit", "4bit"):
        fused, unfused = calls[bits]
        assert 0 < fused < unfused < calls["as transformers has it"][0]
    monkeypatch.setitem(step_time.SHAPES, "SmolLM2-135M", (32, 64, 2, 32, 32, 96))
    step_time.matrices(rows=[1, 5], repeats=1)
    header, times = printed()
    assert header == ["rows", "packed", "8bit", "4bit", "bfloat16", "float32"] and list(times) == ["1", "5"]


def test_llama_cpp_and_this_library_answer_in_turn_the_same_questions(tmp_path, monkeypatch, capsys):
    asked = []

    class Llama:  # which always says the same
        def __init__(self, path, **how):
            assert how["n_threads"] == how["n_threads_batch"] == 1

        def reset(self):
            asked.append(None)

        def generate(self, tokens, temp, repeat_penalty):
            asked[-1] = tokens
            yield from [20] * 99

    base, prompts = tiny_model(), tmp_path / "prompts.jsonl"
    how = [str(write_checkpoint(tmp_path / "base", base)), str(tmp_path / "adapter"), prompts]
    add_mask_adapter(base, MaskAdapterSettings(rank=2, head_width=4))
    save_mask_adapter(base, how[1])
    prompts.write_text('{"prompt": "count to nine"}\n{"prompt": "sort 3, 1"}\n')
    monkeypatch.setattr(against_llama_cpp, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install llama-cpp-python"):
        against_llama_cpp.main(*how)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama, __spec__=object()))
    monkeypatch.setattr(against_llama_cpp, "ProcessPoolExecutor", lambda count, context: ThreadPoolExecutor(count))
    against_llama_cpp.main(*how, max_new_tokens=12, threads=1)
    shown = capsys.readouterr().out
    assert len(asked) == 3 and asked[0] == asked[1] != asked[2]
    assert "## count to nine\n" in shown and shown.count("[ar, plain AR") == shown.count("wedlm+exact]\n") == 2
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line[:2] == "| "]
    rows = {row[0]: dict(zip(table[0], row, strict=True)) for row in table[1:]}
    assert list(rows) == ["llama.cpp", "plain AR, float32", "plain AR, bfloat16", "ar", "wedlm+exact"]
    assert rows["llama.cpp"]["against llama.cpp"] == "1.00×" and rows["llama.cpp"]["same answers"] == "0 %"
    assert rows["wedlm+exact"]["same answers"] == "100 %" and rows["plain AR, bfloat16"]["format"] == "bfloat16"
    assert all(float(row["MiB"]) >= float(row["of them libraries"]) > 100 for row in rows.values())
    against_llama_cpp.main(*how, max_new_tokens=4, threads=1, as_json=True)
    found = json.loads(capsys.readouterr().out)
    order = [row["decoder"] for row in found["answers"]]
    assert order[:5] == list(rows) and order[5:] == [*order[1:5], order[0]]
    assert all(len(row["tokens"]) <= 4 for row in found["answers"]) and found["questions"][1] == "sort 3, 1"


@pytest.mark.parametrize(
    "piece", [pytest.param(name, marks=[pytest.mark.slow] * (name != "forwards")) for name in gpu_hour.PIECES]
)
def test_a_piece_of_the_gpu_hour_that_is_stopped_goes_on_and_has_its_table(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for the whole process
    how = {"model": str(NANO), "adapter": None, "device": "cpu", "tiny": True, "minutes": 25.0}
    how |= {"pieces": ",".join(gpu_hour.PIECES)}
    written, write = [], gpu_results.write_text

    def write_and_stop(path, text):
        write(path, text)
        written.append(text)
        if len(written) == 2:  # the first says that a part has begun
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu_results, "write_text", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        gpu_hour.main(tmp_path, one=piece, page=None, **how)
    (first,) = gpu_results.read(tmp_path, piece)["parts"].items()
    gpu_hour.main(tmp_path, one=piece, page=None, **how)
    parts = gpu_results.read(tmp_path, piece)["parts"]
    assert first in parts.items() or "error" in first[1]  # what was done was not done again
    errors = {name: part["error"] for name, part in parts.items() if "error" in part}
    assert all("flash_attention_2" in name and "FlashAttention2" in error for name, error in errors.items()), errors
    gpu_hour.main(tmp_path, one="", page=tmp_path / "gpu.md", **how)
    table = (tmp_path / "gpu.md").read_text(encoding="utf-8").partition(f"## {piece}\n")[2].partition("\n## ")[0]
    assert table.count("\n|") >= 2 and "tiny: no measurement" in table


# --- examples -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_is_stored():
    def kinds_shown(notebook):
        """What each code cell shows: text on its standard output, pictures by their kinds."""
        shown = []
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            kinds = {kind for output in cell.outputs for kind in (output.get("name", ""), *output.get("data", {}))}
            shown.append({kind for kind in kinds if kind == "stdout" or kind.startswith("image/")})
        return shown

    path = NANO.parent / "tour.ipynb"
    stored, fresh = (nbformat.read(path, as_version=4) for _ in range(2))
    NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    # Steps of verified decoding are planned by a clock: their numbers differ from run to run.
    shown = kinds_shown(fresh)
    assert shown == kinds_shown(stored) and all(shown[1:]) and shown.count({"image/png"}) == 2


def test_findings_compare_three_masks_and_decode_blocks_by_definition_as_the_library_does():
    run, index = script("examples/paper-findings/run.py"), torch.arange(10)
    # One document of six tokens in blocks of two, of which the first is the prompt's; then its prediction stream.
    streams, blocks = torch.tensor([[0] * 6 + [1] * 4]), torch.tensor([[0, 0, 1, 1, 2, 2, 1, 1, 2, 2]])
    memory = ["x.........", "xx........", "xxx.......", "xxxx......", "xxxxx.....", "xxxxxx...."]
    for name, prediction in (
        ("dual_stream_mask_function", ["xx....x...", "xx....xx..", "xxxx....x.", "xxxx....xx"]),
        ("both_ways_mask_function", ["xx....xx..", "xx....xx..", "xxxx....xx", "xxxx....xx"]),
        ("single_stream_mask_function", ["xx....x...", "xx....xx..", "xx....xxx.", "xx....xxxx"]),
    ):
        visible = getattr(run, name)(streams, blocks, torch.zeros_like(streams))
        rows = visible(torch.tensor(0), None, index[:, None], index[None, :]).tolist()
        assert ["".join("x" if seen else "." for seen in row) for row in rows] == memory + prediction
    for variant in run.VARIANTS:  # observed tokens that see more than the memory's are not left out
        is_papers = variant.mask_function is run.dual_stream_mask_function
        assert ("leave_out_repeats" in variant.patches()) == (not is_papers)
    options = {"strategy": "block", "window_size": run.WINDOW, "entropy_threshold": 0.8}
    options |= {"distance_penalty": run.DISTANCE_PENALTY, "max_new_tokens": run.LONGEST_ANSWER}
    for prompt in ([START, 20, 21], [START, *range(30, 41)]):
        found = run.decode_blocks(tiny_model(), prompt, 0.8, both_ways=False, size=run.WINDOW, as_trained=False)
        (expected,) = decode(tiny_model(), None, [prompt], options)
        assert found == (expected.tokens, expected.forwards)


def test_the_check_of_smollm2_passes_the_same_model_and_fails_another():
    def tokenize(texts, **_):
        ids = torch.tensor([[2 + ord(character) % 20 for character in text[:8]] for text in texts])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def generate(**options):  # with the settings of AR alone
        ours = ("strategy", "verification", "window_size", "return_dict_in_generate")
        sequences = own.generate(**{name: options[name] for name in options.keys() - {*ours}})
        counts = dict.fromkeys(("new_tokens", "forwards", "drafted", "accepted"), torch.ones(len(sequences)))
        return Namespace(sequences=sequences, stats=Namespace(**counts))

    check, sizes = script("examples/smollm2/check.py"), {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"initializer_range": 0.5, "eos_token_id": 1, "pad_token_id": 1}
    stock = tiny_llama(**sizes)
    found = dict(check.probabilities(stock, torch.tensor([[3, 4, 5]]), eos_token_id=1))
    assert len(found) <= check.TOP_K**check.LENGTH and sum(found.values()) == pytest.approx(1)
    tokenizer = Mock(side_effect=tokenize, eos_token_id=1, pad_token_id=1)
    tokenizer.apply_chat_template = lambda messages, **_: messages[0]["content"]
    how = {"answers": 4, "samples": 640, "max_new_tokens": 6, "batch_size": 2, "drafts": 2}
    how |= {"dtype": "float32", "lora": False}
    for seed in (0, 1):
        own = tiny_llama(seed, **sizes)
        for look in (check.check_greedy, check.check_samples):
            assert look(Namespace(generate=generate), stock, tokenizer, Namespace(**how)) == (seed == 0)
