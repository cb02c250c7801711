"""The parts of `examples/paper-findings` that its conclusions rest on."""

import pytest
import torch
from tiny import START, script, tiny_model

from wedlm_hf.eval.measure import decode

pytest.importorskip("matplotlib")
run = script("examples/paper-findings/run.py")
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


def test_causal_block_decoding_by_definition_is_the_librarys():
    model, threshold = tiny_model(), 0.8
    for prompt in ([START, 20, 21], [START, *range(30, 41)]):
        how = {"both_ways": False, "size": run.WINDOW, "as_trained": False}
        answer, forwards = run.decode_blocks(model, prompt, threshold, **how)
        options = {"strategy": "block", "window_size": run.WINDOW, "entropy_threshold": threshold}
        options |= {"distance_penalty": run.DISTANCE_PENALTY, "max_new_tokens": run.LONGEST_ANSWER}
        (expected,) = decode(model, None, [prompt], options)
        assert answer == expected.tokens
        assert forwards == expected.forwards
