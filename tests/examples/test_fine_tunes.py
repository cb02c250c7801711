"""Fine-tunes of SmolLM2 that its mask adapter is tried on, on a tiny model."""

from functools import cache
from shutil import copytree

import pytest
from tiny import script, write_stock_checkpoint

from wedlm_hf import add_mask_adapter, save_mask_adapter
from wedlm_hf.checkpoints.loading import load_model

fine_tunes = script("examples/smollm2/fine_tunes.py")


@pytest.mark.parametrize("task", fine_tunes.WAYS)
def test_held_out_questions_are_the_same_each_time_and_occur_in_no_training(task, monkeypatch):
    monkeypatch.setattr(fine_tunes.data, "_learnt", cache(fine_tunes.data._learnt.__wrapped__))
    monkeypatch.setattr(fine_tunes.data, "TRAIN_COUNT", 400)
    asked = [question for question, _ in fine_tunes.problems(task, 10, True)]
    learnt = {question for question, _ in fine_tunes.problems(task, 300, False)}
    assert len(set(asked)) == 10 and not learnt & set(asked)
    assert asked == [question for question, _ in fine_tunes.problems(task, 10, True)]


@pytest.mark.slow
@pytest.mark.parametrize("task", fine_tunes.WAYS)
def test_each_way_to_train_gives_a_model_that_is_decoded_with_both_adapters(task, tmp_path, monkeypatch, capsys):
    base, adapter = write_stock_checkpoint(tmp_path / "base"), tmp_path / "adapter"
    model = load_model(str(base))
    add_mask_adapter(model)
    save_mask_adapter(model, adapter)
    monkeypatch.setattr(fine_tunes, "fetch", lambda folder: base)
    monkeypatch.setattr(fine_tunes, "ADAPTER", adapter)
    monkeypatch.setattr(fine_tunes, "adapt", lambda model, output, config: copytree(adapter, output))
    monkeypatch.setattr(fine_tunes, "problems", lambda *_: [(f"Count to {count}.", "1, 2, 3") for count in range(24)])
    options = ["--examples", "8", "--count", "1", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["fine_tunes.py", task, *options])
    monkeypatch.setattr(fine_tunes, "give_way", lambda: None)
    monkeypatch.setattr("wedlm_hf.eval.prompts.LONGEST_ANSWER", 8)
    fine_tunes.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {task}")]
    assert ["the base's" in lines[0], "trained further" in lines[1], len(lines)] == [True, True, 2]
    assert (tmp_path / "out" / f"{task}-8" / "fine-tune" / "adapter_config.json").exists() == (task == "german")
