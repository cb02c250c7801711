"""The parts of `examples/paper-findings/run.py` that its conclusions rest on."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny import START, tiny_model

from wedlm_hf.eval.measure import decode

pytest.importorskip("matplotlib")
SCRIPT = Path(__file__).parents[1] / "examples" / "paper-findings" / "run.py"
SPEC = importlib.util.spec_from_file_location("paper_findings", SCRIPT)
run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)

# One document of six tokens in blocks of two, of which the first is the prompt's; then its prediction stream.
STREAM = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1, 1]])
BLOCKS = torch.tensor([[0, 0, 1, 1, 2, 2, 1, 1, 2, 2]])


def visible_of(mask_function) -> list[str]:
    """The prediction stream's rows, a column for each key."""
    visible = mask_function(STREAM, BLOCKS, torch.zeros_like(STREAM))
    index = torch.arange(10)
    rows = visible(torch.tensor(0), None, index[:, None], index[None, :])
    return ["".join("x" if seen else "." for seen in row) for row in rows.tolist()]


MEMORY = ["x.........", "xx........", "xxx.......", "xxxx......", "xxxxx.....", "xxxxxx...."]


def test_the_three_mask_functions_differ_only_in_the_prediction_stream():
    assert visible_of(run.dual_stream_mask_function) == [
        *MEMORY, "xx....x...", "xx....xx..", "xxxx....x.", "xxxx....xx",
    ]  # fmt: skip
    assert visible_of(run.both_ways_mask_function) == [
        *MEMORY, "xx....xx..", "xx....xx..", "xxxx....xx", "xxxx....xx",
    ]  # fmt: skip
    assert visible_of(run.single_stream_mask_function) == [
        *MEMORY, "xx....x...", "xx....xx..", "xx....xxx.", "xx....xxxx",
    ]  # fmt: skip


@pytest.mark.parametrize("threshold", [0.0, 0.8, 2.5])
def test_causal_block_decoding_by_definition_is_the_librarys(threshold):
    model = tiny_model()
    for prompt in ([START, 20, 21], [START, *range(30, 41)]):
        answer, forwards = run.decode_blocks(model, prompt, threshold, both_ways=False)
        options = {
            "strategy": "block",
            "window_size": run.WINDOW,
            "entropy_threshold": threshold,
            "distance_penalty": run.DISTANCE_PENALTY,
            "max_new_tokens": run.LONGEST_ANSWER,
        }
        (expected,) = decode(model, None, [prompt], options)
        assert answer == expected.tokens
        assert forwards == expected.forwards


def test_every_panel_shows_variants_that_exist():
    names = {variant.name for variant in run.VARIANTS}
    assert {name for others in run.PANELS.values() for name in others} == names - {run.PAPER}
