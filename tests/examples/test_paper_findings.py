"""The parts of `examples/paper-findings/run.py` that its conclusions rest on."""

import json

import pytest
import torch
import typer
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


def test_every_panel_shows_variants_that_exist():
    names = {variant.name for variant in run.VARIANTS}
    assert {name for others in run.PANELS.values() for name in others} == names - {run.PAPER}
    assert set(run.REFERENCES.values()) <= names and run.REFERENCES.keys() <= run.PANELS.keys()


@pytest.mark.slow
def test_results_go_on_where_they_stopped_and_other_settings_are_refused(tmp_path):
    few = {"steps": 1, "base_steps": 1, "prompts_per_task": 1}
    run.main(tmp_path, **few, only=["block size 4"], seed=0, threads=1, draw_only=False)
    first = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    run.main(tmp_path, **few, only=["block size 4", run.PAPER], seed=0, threads=1, draw_only=False)
    both = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(both["variants"]) == [run.PAPER, "block size 4"]
    assert both["variants"]["block size 4"] == first["variants"]["block size 4"]
    with pytest.raises(typer.BadParameter, match="other settings"):
        run.main(tmp_path, **(few | {"steps": 2}), only=None, seed=0, threads=1, draw_only=False)


def test_blocks_as_trained_have_the_prediction_streams_layout(monkeypatch):
    model, prompt, seen = tiny_model(), [START, *range(30, 35)], []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda *args, **inputs: seen.append((args, inputs)) or forward(*args, **inputs)
    )
    answer, forwards = run.decode_blocks(model, prompt, 0.0, both_ways=True, size=4, as_trained=True)
    assert len(seen) == forwards and len(answer) <= run.LONGEST_ANSWER
    for (tokens,), inputs in seen:
        positions, visible = inputs["position_ids"][0].tolist(), inputs["attention_mask"][0, 0]
        start = len(positions) - 4
        assert start % 4 == 0 and positions[:start] == list(range(start))  # whole blocks before
        assert sorted(positions) == list(range(len(positions)))
        is_mask = (tokens[0] == model.config.mask_token_id).tolist()
        assert any(is_mask[start:]) and is_mask == sorted(is_mask)  # known tokens first
        assert bool(visible[start:].all()) and torch.equal(visible[:start], torch.ones_like(visible).tril()[:start])
    (tokens,), inputs = seen[-1]
    by_place = dict(zip(inputs["position_ids"][0].tolist(), tokens[0].tolist(), strict=True))
    assert [by_place[place] for place in range(len(prompt))] == prompt
