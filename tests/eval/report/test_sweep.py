"""Names of decoders, the grid of settings, which of them is picked, and how a checkpoint stores them."""

import json

import pandas as pd
import pytest
from tiny import MASK, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from wedlm_hf.eval.decoders import candidates, configured
from wedlm_hf.eval.measure import decode
from wedlm_hf.eval.report.numbers import pick, settings_table
from wedlm_hf.eval.report.run import write_settings
from wedlm_hf.generation import WeDLMGenerationSettings

SHORT = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [MASK]}


GRID = {"windows": (4, 8), "thresholds": (0.1, 0.2), "penalties": (0.0, 0.02, 0.1), "draft_thresholds": (0.4,)}


def test_decoders_are_chosen_by_name():
    found = settings_table(candidates(**GRID, decoders=["wedlm+exact", "block"]))
    assert list(found["kind"].unique()) == ["ar", "block", "wedlm+exact"]
    with pytest.raises(ValueError, match="Unknown decoder 'beam': choose among ar, block, wedlm"):
        candidates(**GRID, decoders=["beam"])


def test_all_combinations_are_tried_and_block_with_the_middle_penalty():
    found = candidates(**GRID)
    assert len(found) == 1 + 4 + 12 + 2 + 2
    assert next(iter(found)) == "ar"
    assert {o["distance_penalty"] for o in found.values() if o["strategy"] == "block"} == {0.02}
    assert len({json.dumps(options) for options in found.values()}) == len(found)
    for options in found.values():
        WeDLMGenerationSettings(**options)
    table = settings_table(found)
    assert list(table["kind"].unique()) == ["ar", "block", "wedlm", "wedlm+typical", "wedlm+exact"]
    assert table.loc["wedlm W=8 τ=0.1 λ=0.02", ["window_size", "entropy_threshold"]].tolist() == [8, 0.1]
    assert pd.isna(table.loc["wedlm+exact W=4 τ=0.4", "distance_penalty"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"windows": (0,)}, "`window_size` must be an integer of at least 1, got 0"),
        ({"thresholds": (-1.0,)}, "`entropy_threshold` must be a number of at least 0, got -1.0"),
    ],
)
def test_values_that_are_no_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        candidates(**GRID | values)


def test_the_fastest_within_the_allowed_loss_come_first():
    numbers = {"speed": [1.0, 3.0, 2.0, 3.0], "loss": [0.0, 2.0, 1.0 + 1e-12, 1.0]}
    summary = pd.DataFrame(numbers, index=list("abcd"))
    assert pick(summary, 1.0, "speed") == ["d", "c", "a"]
    assert pick(summary, -1.0, "speed") == []


def test_chosen_settings_are_stored_in_the_checkpoint_and_used_from_there(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"_from_model_config": True, "eos_token_id": 2, "pad_token_id": 0, "top_k": 7}))
    write_settings(tmp_path, {"window_size": 4, "entropy_threshold": 2.0, "distance_penalty": 0.5})
    stored = json.loads(path.read_text())
    assert stored == {
        "distance_penalty": 0.5,
        "entropy_threshold": 2.0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "top_k": 7,
        "window_size": 4,
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompts = [[20, 40, 9, 31, 77]]
    (prompt,) = decode(loaded, tiny_tokenizer(), prompts, {"strategy": "wedlm", **SHORT})
    (wanted,) = decode(model, tiny_tokenizer(), prompts, {**SHORT, **configured("wedlm", 4, 2.0, 0.5)})
    assert (prompt.tokens, prompt.forwards) == (wanted.tokens, wanted.forwards)
