"""`wedlm curves`: what is drawn from a trainer's log, and what is told where there is nothing to draw."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wedlm_hf.cli import app
from wedlm_hf.eval import curves
from wedlm_hf.eval.curves import PANELS, draw, load_runs

TRAINED = [
    {"step": step, "loss": 3.0 / step, "ar_nll": 2.0 / step, "mask_nll": 4.0 / step, "tokens_per_second": 1000.0}
    | {"supervised_tokens_per_second": 400.0, "learning_rate": 1e-3, "epoch": step / 10}
    for step in (1, 2, 3)
]


def evaluated(step: int, name: str = "eval") -> dict:
    ratios = {f"{name}_mask_nll_ratio_{part}": part / 100 for part in (25, 50, 75, 100)}
    offsets = {f"{name}_accuracy_offset_{part}": 0.5 for part in ("0", "1", "2_3", "4_7", "8_15")}
    losses = {f"{name}_{kind}": 1.0 / step for kind in ("loss", "ar_nll", "elbo_nll")}
    return {"step": step, f"{name}_tokens_per_forward": 2.0, f"{name}_runtime": 1.0} | ratios | offsets | losses


def state(folder: Path, log: object, name: str = "trainer_state.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"global_step": 3, "log_history": log}))
    return folder


def command(*words: object):
    return CliRunner().invoke(app, ["curves", *map(str, words)])


def labels_of(axis) -> list[str]:
    return [line.get_label() for line in axis.get_lines()]


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The axes of figures that are saved."""
    figures = []
    from matplotlib.figure import Figure

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))
    return figures


def test_every_metric_is_drawn_at_its_steps_and_in_its_order(tmp_path, drawn):
    run = state(tmp_path / "run", [*TRAINED, evaluated(3), {"step": 3, "train_runtime": 1.0, "train_loss": 1.0}])
    result = command(run, "--output", tmp_path / "new" / "curves.png")
    assert result.exit_code == 0 and result.output.splitlines() == [f"Wrote {tmp_path / 'new' / 'curves.png'}."]
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    axes = [axis for axis in drawn[0].axes if axis.axison]
    assert [axis.get_title(loc="left") for axis in axes] == [panel.title for panel in PANELS]
    assert [labels_of(axis) for axis in axes] == [
        ["loss (Eq. 10)", "next token", "masked tokens"],
        ["loss", "next token", "block-wise bound"],
        ["≤ 25 %", "≤ 50 %", "≤ 75 %", "≤ 100 %"],
        ["0", "1", "2–3", "4–7", "8–15"],
        ["wedlm"],
        ["all", "supervised"],
    ]
    first, ratio = axes[0].get_lines()[2], axes[2].get_lines()[1]
    assert (list(first.get_xdata()), list(first.get_ydata())) == ([1, 2, 3], [4.0, 2.0, 4 / 3])
    assert (list(ratio.get_xdata()), list(ratio.get_ydata())) == ([3], [0.5])


def test_runs_and_evaluation_sets_stand_side_by_side_and_what_is_missing_is_said(tmp_path, drawn):
    short = state(tmp_path / "short", TRAINED)
    two_sets = state(tmp_path / "sets", [*TRAINED, evaluated(3, "eval_code") | evaluated(3, "eval_chat")])
    result = command(short, two_sets, "--output", tmp_path / "curves.svg")
    missing = ", ".join(panel.title for panel in PANELS if "held-out" in panel.title)
    assert result.output.splitlines() == [f"short has not logged: {missing}.", f"Wrote {tmp_path / 'curves.svg'}."]
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    titles = [axis.get_title(loc="left") for axis in drawn[0].axes]
    assert titles[3:6] == [f"{name}: held-out loss" for name in ("short", "sets: code", "sets: chat")]
    assert len(titles) == 3 * len(PANELS)
    counts = [len(axis.get_lines()) for axis in drawn[0].axes]
    assert counts[:6] == [3, 3, 3, 0, 3, 3]
    assert drawn[0].axes[3].texts[0].get_text() == "not logged"


def test_runs_share_vertical_axes_that_hold_all_of_their_lines(tmp_path, drawn):
    low = state(tmp_path / "low", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}])
    high = state(tmp_path / "high", [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}])
    command(low, high, "--output", tmp_path / "a.png")
    limits = {axis.get_ylim() for axis in drawn[0].axes}
    assert len(limits) == 1
    ((bottom, top),) = limits
    assert bottom == 0 and top > 9


def test_a_log_of_any_trainer_is_drawn_without_the_panels_that_it_has_nothing_for(tmp_path, drawn):
    run = state(tmp_path, [{"step": 5, "loss": 1.5}, {"step": 10, "loss": 1.0, "eval_loss": 2.0}])
    result = command(run, "--output", tmp_path / "a.png")
    assert "has not logged: held-out loss by masked share" in result.output
    assert [labels_of(axis) for axis in drawn[0].axes] == [["loss (Eq. 10)"], ["loss"]]


def test_the_log_is_found_in_the_folder_else_in_its_newest_checkpoint(tmp_path):
    for step in (9, 10):
        state(tmp_path / "run" / f"checkpoint-{step}", [{"step": step, "loss": 1.0}])
    assert load_runs([tmp_path / "run"])[0].metrics["loss"] == ([10], [1.0])
    state(tmp_path / "run", [{"step": 20, "loss": 1.0}])
    assert load_runs([tmp_path / "run"])[0].metrics["loss"] == ([20], [1.0])
    state(tmp_path / "run" / "checkpoint-30", [{"step": 30, "loss": 1.0}])  # resumed after that, and still running
    assert load_runs([tmp_path / "run"])[0].metrics["loss"] == ([30], [1.0])
    file = state(tmp_path, [{"step": 30, "loss": 1.0}], "other.json") / "other.json"
    (run,) = load_runs([file])
    assert run.name == "other.json" and run.metrics["loss"] == ([30], [1.0])


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    folders = [state(tmp_path / seed / "sft", TRAINED) for seed in ("a", "b")]
    assert [run.name for run in load_runs(folders)] == [str(folder) for folder in folders]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"log_', "malformed JSON: Unterminated string"),
        ("[1]", "is no trainer's state: it has no list `log_history`."),
        ("{}", "is no trainer's state: it has no list `log_history`."),
        ('{"log_history": [{"step": 1}, 7]}', "entry 2 of `log_history` must be an object with a `step`, got 7."),
        ('{"log_history": [{"loss": 1}]}', "entry 1 of `log_history` must be an object with a `step`, got {'loss'"),
        ('{"log_history": []}', "nothing to draw was logged in 0 entries up to step 0: see `logging_steps`"),
        ('{"log_history": [{"step": 4, "epoch": 1.0}], "global_step": 4}', "in 1 entries up to step 4"),
    ],
)
def test_a_damaged_or_empty_log_is_told_by_name_and_nothing_is_written(tmp_path, text, message):
    file = tmp_path / "trainer_state.json"
    file.write_text(text)
    result = command(tmp_path, "--output", tmp_path / "curves.png")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file}") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "curves.png").exists()


def test_what_cannot_be_drawn_is_told(tmp_path, monkeypatch):
    assert "Error: There is no trainer_state.json in" in command(tmp_path / "nowhere").stderr
    run = state(tmp_path / "run", TRAINED)
    wrong = command(run, "--output", tmp_path / "curves.gif")
    assert re.search(r"`--output` must end in .png or .svg, got '.*curves.gif'", wrong.stderr)
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need matplotlib: pip install 'wedlm-hf\[eval\]'"):
        draw(load_runs([run]), tmp_path / "curves.png")
