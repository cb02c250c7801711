"""`benchmarks/gpu_hour.py` on this CPU, tiny: each piece may be stopped after any of its parts, and writes a page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import gpu_hour
import gpu_results
import pytest
import torch
from gpu_hour import NANO, PIECES, Job
from pretend import accelerator
from typer import BadParameter

ROOT = Path(__file__).parents[2]
JOB = Job(str(NANO), "cpu", True, None)
COUNTS = {"adapt": 1, "parity": 2, "forwards": 2, "attention": 4, "static": 8, "batches": 4, "training": 1, "fsdp": 2}
# What no CPU can do, in the words that the page would show.
REFUSED = {"flash_attention_2": "the package for FlashAttention2"}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in PIECES if name not in ("forwards", "vllm")]


class Stopped(BaseException):
    """As by Ctrl-C."""


def main(out: Path, **options):
    """The command in this process."""
    defaults = {"model": str(NANO), "adapter": None, "device": "cpu", "tiny": True, "minutes": 25.0, "page": None}
    gpu_hour.main(out, **defaults | {"pieces": ",".join(PIECES), "one": ""} | options)


@pytest.mark.parametrize("piece", ["forwards", "vllm", *SLOW])
def test_a_piece_that_is_stopped_after_each_part_goes_on(tmp_path, monkeypatch, piece):
    written, write, threads = [], gpu_results.write_text, torch.get_num_threads()

    def write_and_stop(path, text):
        write(path, text)
        written.append(json.loads(text)["parts"])
        if len(written) % 2 == 0:  # the first says that a part has begun
            raise Stopped

    monkeypatch.setattr(gpu_results, "write_text", write_and_stop)
    for number in range(COUNTS.get(piece, 1)):
        with pytest.raises(Stopped):
            main(tmp_path, one=piece)
        assert len(written) == 2 * (number + 1)
    monkeypatch.setattr(gpu_results, "write_text", write)
    main(tmp_path, one=piece)  # what failed, once more
    torch.set_num_threads(threads)
    written.append(gpu_results.read(tmp_path, piece)["parts"])
    parts = [name for name, part in written[-1].items() if "error" not in part]
    for name, part in written[-1].items():
        assert name in parts or any(key in name and words in part["error"] for key, words in REFUSED.items()), part
        first = next(state[name] for state in written if "part_seconds" in state.get(name, {}))
        assert "error" in part or part == first  # and was not done again
    table = gpu_results.tables({piece: gpu_results.read(tmp_path, piece)})[piece]
    assert table.count("\n|") >= 2 and "tiny: no measurement" in table
    if piece == "parity":
        assert table.count("100 %") == 4 and "adapter not trained" in table
    if piece == "static":
        assert table.count("of 8") == 4 and all(part["graph_breaks"] == 0 for part in written[-1].values())
        assert all(part["tokens"] for part in written[-1].values())
    if piece == "fsdp":
        assert all(float(line.split("|")[-2]) < 1e-4 for line in table.splitlines()[2:4])


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["forwards", "parity", "batches", "training"])
def test_a_piece_runs_on_a_pretend_accelerator(tmp_path, monkeypatch, piece):
    load = gpu_hour.load_model
    monkeypatch.setattr(gpu_hour, "load_model", lambda name, dtype, device: load(name, dtype=dtype).to(device))
    with accelerator():
        main(tmp_path, one=piece, device="pretend")
    stored = gpu_results.read(tmp_path, piece)
    failed = [name for name, part in stored["parts"].items() if "error" in part]
    assert failed == (["flex_attention"] if piece == "training" else []), stored  # torch knows the devices of flex
    assert "pretend, " in gpu_results.tables({piece: stored})[piece]


def test_a_crash_or_a_failure_leaves_the_other_parts_and_is_tried_again(tmp_path):
    tried = []

    def fail():
        tried.append("fails")
        if len(tried) < 5:
            raise RuntimeError("no such kernel")
        return {"output": "done"}

    def crash():
        tried.append("crashes")
        if len(tried) == 1:
            raise SystemExit
        return {"output": "at last"}

    def todo():
        yield "crashes", crash
        yield "fails", fail
        yield "works", lambda: {"output": "one line"}

    with pytest.raises(SystemExit):
        gpu_results.do_parts(tmp_path, "vllm", {"model": "m", "device": "cuda", "tiny": False}, todo())
    for _ in range(2):
        gpu_results.do_parts(tmp_path, "vllm", {"model": "m", "device": "cuda", "tiny": False}, todo())
    assert tried == ["crashes", "fails", "crashes", "fails"]
    stored = gpu_results.read(tmp_path, "vllm")
    assert stored["is_complete"] is False and [*stored["parts"]] == ["crashes", "fails", "works"]
    table = gpu_results.tables({"vllm": stored})["vllm"]
    assert "**not whole**" in table and "- fails: RuntimeError: no such kernel" in table and "at last" in table
    with pytest.raises(ValueError, match=r"holds results of .*'cuda'.* not .*'cpu'.*: choose another `--out`"):
        gpu_results.do_parts(tmp_path, "vllm", {"model": "m", "device": "cpu", "tiny": False}, todo())


def test_a_page_has_a_table_for_each_piece_and_says_what_was_not_run(tmp_path):
    page = tmp_path / "gpu.md"
    main(tmp_path, one="vllm")
    main(tmp_path, page=page)
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", text, flags=re.MULTILINE) == [*PIECES]
    assert text.count("Not run yet.") == len(PIECES) - 1 and "\n| " in text.partition("## vllm")[2]


def test_a_model_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(BadParameter, match=r"`--model` takes a folder, got 'Qwen/Qwen3-0.6B': nothing is downloaded"):
        main(tmp_path, model="Qwen/Qwen3-0.6B")


@pytest.mark.slow
def test_the_command_gives_each_piece_a_process_and_does_none_twice(tmp_path):
    words = [sys.executable, str(ROOT / "benchmarks" / "gpu_hour.py"), "--out", str(tmp_path)]
    words += ["--device", "cpu", "--tiny", "--pieces", "forwards,vllm"]
    for minutes, shown in (("0.02", "vllm: no time is left"), ("9", "vllm: vllm: done"), ("9", "vllm: done before")):
        done = subprocess.run([*words, "--minutes", minutes], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0 and shown in done.stdout, done
    assert gpu_results.read(tmp_path, "forwards")["is_complete"]
