"""`benchmarks/gpu_hour.py` on this CPU, tiny: each piece runs, goes on where it was stopped, and has its table."""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import gpu_hour
import gpu_results
import pytest
import torch
import typer
from gpu_hour import NANO, PIECES

from wedlm_hf.generation import mixin

# What no CPU can do, in the words that the page would show.
REFUSED = {"flash_attention_2": "the package for FlashAttention2"}
QUICK = ("forwards", "vllm")


def main(out: Path, **options):
    """The command in this process."""
    defaults = {"model": str(NANO), "adapter": None, "device": "cpu", "tiny": True, "minutes": 25.0, "page": None}
    gpu_hour.main(out, **defaults | {"pieces": ",".join(PIECES), "one": ""} | options)


@pytest.mark.parametrize(
    "piece", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PIECES]
)
def test_a_piece_that_is_stopped_goes_on_and_has_its_table(tmp_path, monkeypatch, piece):
    written, write, threads = [], gpu_results.write_text, torch.get_num_threads()

    def write_and_stop(path, text):
        write(path, text)
        written.append(text)
        if len(written) == 2:  # the first says that a part has begun
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu_results, "write_text", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        main(tmp_path, one=piece)
    (first,) = gpu_results.read(tmp_path, piece)["parts"].items()
    main(tmp_path, one=piece)
    torch.set_num_threads(threads)
    parts = gpu_results.read(tmp_path, piece)["parts"]
    assert first in parts.items() or "error" in first[1]  # what was done was not done again
    for name, part in parts.items():
        refused = any(key in name and words in part.get("error", "") for key, words in REFUSED.items())
        assert "error" not in part or refused, part
    main(tmp_path, page=tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    table = text.partition(f"## {piece}\n")[2].partition("\n## ")[0]
    assert table.count("\n|") >= 2 and "tiny: no measurement" in table
    assert text.count("Not run yet.") == len(PIECES) - 1


@pytest.fixture
def invariant(monkeypatch):
    """In the place of batch_invariant_ops, which needs a GPU: in float32 here, products are good enough."""
    module, is_on = ModuleType("batch_invariant_ops"), []

    @contextmanager
    def mode():
        is_on.append(True)
        yield
        is_on.clear()

    module.set_batch_invariant_mode, module.is_batch_invariant_mode_enabled = mode, lambda: bool(is_on)
    monkeypatch.setitem(sys.modules, "batch_invariant_ops", module)


def test_parity_with_batch_invariant_products_decodes_rows_that_attend_alone(tmp_path, monkeypatch, invariant):
    alone, rule = [], mixin.VerifyRule
    monkeypatch.setattr(mixin, "VerifyRule", lambda *args: alone.append(args[5]) or rule(*args))
    threads = torch.get_num_threads()
    main(tmp_path, one="parity", batch_invariant=True)
    torch.set_num_threads(threads)
    parts = gpu_results.read(tmp_path, "parity")["parts"]
    assert [part["gaps"] for part in parts.values()] == [[0.0], [0.0]]
    assert alone and all(alone)


def test_batch_invariant_products_without_their_package_are_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match="needs the package batch_invariant_ops"):
        main(tmp_path, batch_invariant=True)


def test_a_part_that_fails_is_told_and_tried_again(tmp_path):
    tried = []

    def fail():
        tried.append("fails")
        raise RuntimeError("no such kernel")

    def todo():
        yield "fails", fail
        yield "works", lambda: tried.append("works") or {"output": "one line"}

    asked = {"model": "m", "device": "cuda", "tiny": False}
    for _ in range(2):
        gpu_results.do_parts(tmp_path, "vllm", asked, todo())
    assert tried == ["fails", "works", "fails"]
    table = gpu_results.tables({"vllm": gpu_results.read(tmp_path, "vllm")})["vllm"]
    assert "**not whole**" in table and "- fails: RuntimeError: no such kernel" in table
    with pytest.raises(ValueError, match=r"holds results of .*'cuda'.* not .*'cpu'.*: choose another `--out`"):
        gpu_results.do_parts(tmp_path, "vllm", asked | {"device": "cpu"}, todo())
