"""The parts of `examples/paper-findings` that its conclusions rest on."""

import pandas as pd
import pytest
import torch
from tiny import START, script, tiny_model

from wedlm_hf.eval.decoders import candidates
from wedlm_hf.eval.measure import decode

pytest.importorskip("matplotlib")
run = script("examples/paper-findings/run.py")
trends = script("examples/paper-findings/trends.py")

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
        answer, forwards = run.decode_blocks(
            model, prompt, threshold, both_ways=False, size=run.WINDOW, as_trained=False
        )
        options = {"strategy": "block", "window_size": run.WINDOW, "entropy_threshold": threshold}
        options |= {"distance_penalty": run.DISTANCE_PENALTY, "max_new_tokens": run.LONGEST_ANSWER}
        (expected,) = decode(model, None, [prompt], options)
        assert answer == expected.tokens
        assert forwards == expected.forwards


@pytest.mark.parametrize(("sign", "verdict"), [(1, trends.HOLDS), (-1, trends.FAILS)])
def test_what_is_as_the_paper_reports_holds_and_its_mirror_image_does_not(sign, verdict):
    """Sweeps that are made up: where `sign` is −1, everything is the other way round."""
    table = []
    for name, options in candidates((4,), (0.1, 0.2, 0.4), (0.0, 0.1), decoders=("block", "wedlm")).items():
        tau, lam = options.get("entropy_threshold", 0.0), options.get("distance_penalty", 0.0)
        forwards = 40 if name == "ar" else round(40 / ((1 + 5 * tau) * (1.3 if "block" not in name else 1)) ** sign)
        for index in range(200):
            row = {"decoder": name, "prompt": index, "batch_size": 1, "new_tokens": 40, "forwards": forwards}
            row |= {"token_instances": 40 * (2 - sign * 8 * lam) + index % 3, "entropy": 0.01 + index / 200}
            row |= {"seconds": forwards / 20, "forward_seconds": forwards / 20}
            right = name == "ar" or index * 37 % 200 / 200 < 0.6 - sign * 0.3 * tau
            table += [row | {"kind": "quality", "quality": float(right)}, row | {"kind": "speed"}]
    sweep = pd.DataFrame(table)
    accurate, *others = trends.trends(sweep, sweep)["here"][:6]
    assert accurate in (verdict, trends.LARGELY)
    assert others == [verdict] * 5
