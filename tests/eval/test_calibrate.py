"""`wedlm calibrate`: what agreement is, how speed follows from counts, and which settings are chosen."""

import io
import json

import pandas as pd
import pytest
from rich.console import Console
from tiny import MASK, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.eval import calibrate as calibrating
from wedlm_hf.eval.calibrate import (
    Calibration,
    calibrate,
    fit_slot_cost,
    measure_slot_cost,
    show,
    summarise_trials,
)
from wedlm_hf.eval.measure import decode
from wedlm_hf.eval.options import CalibrationOptions
from wedlm_hf.eval.prompts import Prompt
from wedlm_hf.generation import WeDLMGenerationSettings

PROMPTS = [[20, 40, 9, 31, 77], [11, 12, 13], [50, 60, 70, 80, 90, 100, 110, 120], [5, 6, 7, 8]]
SMALL = {
    "windows": "4",
    "thresholds": "0,100",
    "penalties": "0",
    "draft_thresholds": "1",
    "max_new_tokens": 10,
    "batch_size": 2,
}
BOLD, VERIFIED = "wedlm W=4 τ=100 λ=0", "wedlm+exact W=4 τ=1"


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    return model


@pytest.fixture
def checkpoint(model, tmp_path):
    folder = tmp_path / "checkpoint"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def cheap(monkeypatch):
    """Forwards whose time is known, and outcomes that are timed once."""
    monkeypatch.setattr(calibrating, "measure_slot_cost", lambda *args: (0.01, 0.001))
    monkeypatch.setattr(calibrating, "TIMED_REPEATS", 1)


def run(model, agreement, prompts=PROMPTS):
    encoded = [Prompt.of(str(tokens), tokens=tokens) for tokens in prompts]
    return calibrate(model, tiny_tokenizer(), encoded, CalibrationOptions(agreement=agreement, **SMALL))


# --- speed --------------------------------------------------------------------------------------------------------


def test_a_slot_costs_the_slope_of_a_line_through_medians():
    seconds = {1: [2.5, 2.5, 90.0], 3: [3.5] * 4, 9: [6.5, 0.0, 6.5], 17: [10.5]}  # 2 + Q/2, with outliers
    steps = [(width, second) for width, times in seconds.items() for second in times]
    assert fit_slot_cost(pd.DataFrame(steps, columns=["width", "seconds"])) == pytest.approx((2, 0.5))
    free = pd.DataFrame({"width": [1, 2], "seconds": [3.0, 2.0]})
    assert fit_slot_cost(free)[1] == 0  # noise on a machine where slots are free


def test_the_slot_cost_is_measured_over_many_widths_and_leaves_the_model_as_it_was(model, monkeypatch):
    seen = []
    monkeypatch.setattr(calibrating, "fit_slot_cost", seen.append)
    ends = model.generation_config.eos_token_id
    monkeypatch.setattr(calibrating, "COST_REPEATS", 1)
    measure_slot_cost(model, PROMPTS[0])
    (steps,) = seen
    widths = set(steps["width"])
    assert {1, 4, 8, 16, 24} <= widths | {width - 1 for width in widths}
    assert (steps["seconds"] > 0).all()
    assert model.generation_config.eos_token_id == ends


def test_speed_follows_from_counts_and_the_slot_cost(monkeypatch):
    monkeypatch.setattr(calibrating, "agreeing_tokens", lambda model, prompt, answer: len(answer) - 1)
    counts = {"ar": [(4, 4, 3), (6, 6, 5)], "wedlm": [(4, 2, 12), (6, 3, 8)]}
    rows = [
        {"decoder": name, "prompt": index, "tokens": [index] * tokens, "new_tokens": tokens}
        | {"forwards": forwards, "token_instances": slots}
        for name, answers in counts.items()
        for index, (tokens, forwards, slots) in enumerate(answers)
    ]
    found = summarise_trials(None, [Prompt.of("a"), Prompt.of("b")], rows, 0.25)
    # AR: 10 forwards and 8 slots; wedlm: 5 forwards and 20 slots.
    assert found["speed"].tolist() == pytest.approx([1, (10 + 2) / (5 + 5)])
    assert found["tokens_per_forward"].tolist() == [1, 2]
    assert found["agreement"].tolist() == [0.8, 0.8] and found["same"].tolist() == [1, 1]


# --- choice -------------------------------------------------------------------------------------------------------


def test_every_setting_that_is_tried_can_be_decoded_with():
    candidates = CalibrationOptions().candidates()
    assert len(candidates) == 1 + 3 * (4 * 2 + 2)
    for options in candidates.values():
        WeDLMGenerationSettings(**options)
    assert {options.get("verification") for options in candidates.values()} == {None, "none", "exact"}


def test_only_verified_decoding_agrees_everywhere_with_a_random_model(model, cheap):
    found = run(model, agreement=1.0)
    assert list(found.trials.index) == list(CalibrationOptions(**SMALL).candidates())
    assert found.trials.loc["ar", ["agreement", "same", "speed"]].tolist() == [1, 1, 1]
    assert found.chosen == VERIFIED
    assert found.trials.loc[VERIFIED, ["checked", "same"]].tolist() == [1, 1]
    assert list(found.tokens_per_second) == ["ar", VERIFIED]
    assert {"window_size": 4, "entropy_threshold": 1.0, "verification": "exact"}.items() <= found.settings.items()
    assert "strategy" not in found.settings


def test_the_fastest_setting_that_agrees_well_enough_is_chosen(model, cheap, monkeypatch):
    monkeypatch.setattr(calibrating, "agreeing_tokens", lambda model, prompt, answer: len(answer) - 1)
    found = run(model, agreement=0.9)
    assert found.chosen == found.trials["speed"].idxmax() == BOLD
    trial = found.trials.loc[BOLD]
    picking = PROMPTS[1::2]
    options = {**CalibrationOptions(**SMALL).candidates()[BOLD], "max_new_tokens": 10, "do_sample": False}
    answers = decode(model, None, picking, options)
    assert trial["agreement"] == 18 / 20
    assert trial["tokens_per_forward"] == 20 / sum(answer.forwards for answer in answers)
    # AR: 10 forwards and 9 slots a prompt.
    spent = sum(answer.forwards + 0.1 * answer.token_instances for answer in answers)
    assert trial["speed"] == pytest.approx(2 * (10 + 0.9) / spent)
    assert list(found.trials.index[found.trials["checked"].notna()]) == [BOLD]


def test_a_setting_that_fails_on_the_other_prompts_gives_way_to_the_next(model, cheap, monkeypatch):
    def agreeing(model, prompt, answer):
        return len(answer) if prompt in PROMPTS[1::2] else len(answer) - 1

    monkeypatch.setattr(calibrating, "agreeing_tokens", agreeing)
    found = run(model, agreement=0.95)
    assert found.chosen is None
    assert (found.trials["checked"].drop(index="ar") == 0.9).all()
    assert found.tokens_per_second == {}
    assert run(model, agreement=0.9).chosen == BOLD


def test_answers_stay_within_the_context(cheap):
    small = tiny_model(max_position_embeddings=16)
    small.generation_config.suppress_tokens = [MASK]
    found = run(small, agreement=0.01)
    assert found.trials.loc["ar", "tokens_per_forward"] == 1
    assert found.chosen is not None


def test_the_table_shows_what_no_other_setting_beats():
    columns = ["agreement", "speed", "checked"]
    rows = {"ar": (1.0, 1.0, None), "beaten": (0.9, 2.0, None), "good": (0.95, 3.0, 0.94), "fast": (0.5, 9.0, None)}
    trials = pd.DataFrame.from_dict(rows, orient="index", columns=columns).assign(same=0.5, tokens_per_forward=2.0)
    console = Console(width=80, record=True, file=io.StringIO())
    show(Calibration(1.0, 0.1, trials, "good", {}, {"ar": 1.0, "good": 3.0}), 0.9, console)
    shown = [line.split() for line in console.export_text().splitlines() if line.rstrip().endswith("×")]
    assert [words[0] for words in shown] == ["ar", "fast", "good"]
    assert "95.00%" in shown[2] and "94.00%" in shown[2]


# --- the command --------------------------------------------------------------------------------------------------


def wedlm(*arguments, stdin=""):
    result = CliRunner().invoke(cli.app, ["calibrate", *map(str, arguments)], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


FEW = ["--windows", "4", "--thresholds", "2", "--penalties", "0", "--max-new-tokens", "8", "--raw"]


def test_settings_are_written_to_the_checkpoint_and_used_from_there(model, checkpoint, cheap):
    path = checkpoint / "generation_config.json"
    before = json.loads(path.read_text())
    lines = "1, 2, 3\n4, 5, 6\n7, 8\n9\n"
    arguments = [checkpoint, "--file", "-", "--agreement", "1", *FEW]
    code, output, errors = wedlm(*arguments, stdin=lines)
    assert code == 0, errors
    assert "slot_cost = 0.1" in output
    assert "Chosen: wedlm+exact W=4" in output
    assert json.loads(path.read_text()) == before  # not without --write
    code, _, _ = wedlm(*arguments, "--write", stdin=lines)
    written = {"window_size": 4, "verification": "exact", "slot_cost": 0.1}
    stored = json.loads(path.read_text())
    assert written.items() <= stored.items()
    assert "strategy" not in stored
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    short = {"max_new_tokens": 8, "do_sample": False}
    first = decode(loaded, None, PROMPTS, {"strategy": "wedlm", **short})
    assert [d.tokens for d in first] == [d.tokens for d in decode(model, None, PROMPTS, {"strategy": "ar", **short})]


def test_where_nothing_is_good_enough_nothing_is_written(checkpoint, cheap, monkeypatch):
    monkeypatch.setattr(calibrating, "agreeing_tokens", lambda *args: 0)
    before = (checkpoint / "generation_config.json").read_bytes()
    code, output, _ = wedlm(checkpoint, "--file", "-", "--write", *FEW, stdin="1, 2\n3, 4\n")
    assert code == 1
    assert "No setting agrees with AR on 99 % of the tokens." in output
    assert (checkpoint / "generation_config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], "1, 2\n", "one to choose settings on and one to check them, got 1 in 1 task."),
        (["--agreement", "0"], "1\n2\n", "The wanted agreement must be above 0 and at most 1, got 0.0."),
        (["--agreement", "1.5"], "1\n2\n", "The wanted agreement must be above 0 and at most 1, got 1.5."),
        (["--windows", "4,wide"], "1\n2\n", "`--windows` takes numbers with commas between them, got '4,wide'."),
        (["--windows", "0"], "1\n2\n", "`window_size` must be an integer of at least 1, got 0."),
        (["--thresholds", "-1"], "1\n2\n", "`entropy_threshold` must be a number of at least 0, got -1.0."),
        (["--write"], "1\n2\n", "`--write` needs a checkpoint folder, got 'some/model'."),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_any_work(arguments, stdin, message):
    code, output, errors = wedlm("some/model", "--file", "-", *arguments, stdin=stdin)
    assert (code, output, errors.count("\n")) == (2, "", 1), errors
    assert message in errors


def test_prompt_lookup_has_no_settings_to_choose():
    with pytest.raises(ValueError, match=r"ar\+lookup has no settings to choose"):
        CalibrationOptions(decoders="wedlm,ar+lookup")
