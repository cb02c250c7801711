"""`wedlm adapt`: from a base to an adapter, in one call or in many, and what is refused before any work."""

import errno
import io
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock, Timeout
from rich.console import Console
from safetensors.torch import load_file
from tiny import EOS, LINES, PAD, VOCAB_SIZE, randomize, tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from wedlm_hf.adapters import adapt as adapt_module
from wedlm_hf.adapters.adapt import ROWS_PER_TOKEN, AdaptConfig, adapt
from wedlm_hf.adapters.adapt_config import MOST_MASKS
from wedlm_hf.adapters.answers import read_answers
from wedlm_hf.adapters.attach import load_mask_adapter
from wedlm_hf.adapters.model_card import model_card, read_log
from wedlm_hf.cli import app
from wedlm_hf.generation.settings import LARGEST_WINDOW

SMALL: dict[str, Any] = {"rank": 2, "head_width": 8, "device": "cpu"}


def write_base(folder: Path, seed: int = 0) -> Path:
    """A tiny Llama with a tokenizer; prompts beside its folder."""
    tokens = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    randomize(tiny_llama(seed, **tokens)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder.parent / "prompts.txt").write_text("\n".join(line.strip().replace("\n", " ") for line in LINES))
    return folder


@pytest.fixture(scope="module", autouse=True)
def same_dtype():
    """On a busy machine, one run would train in bfloat16 and another one in float32."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapt_module, "bf16_speedup", lambda: 0.5)
        yield


@pytest.fixture
def base(tmp_path) -> Path:
    return write_base(tmp_path / "llama")


def run(tmp_path: Path, base: Any, name: str = "out", measure: Any = None, **settings: Any) -> tuple[Path, str]:
    console = Console(file=io.StringIO(), width=200)
    config = AdaptConfig(**{"tokens": 80, "prompts": tmp_path / "prompts.txt"} | SMALL | settings)
    adapt(base, tmp_path / name, config, measure=measure, console=console)
    return tmp_path / name, console.file.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> SimpleNamespace:
    """A run that nothing stops, its base, and what was measured, noted and shown meanwhile."""
    folder, seen, notes = tmp_path_factory.mktemp("whole"), {}, {}
    base = write_base(folder / "llama")

    def measure(model: Any, tokenizer: Any, prompts: Any, max_new_tokens: int) -> dict[str, Any]:
        seen.update(prompts=prompts, config=model.generation_config.to_diff_dict())
        return TABLE

    def stage(console: Any, title: str) -> Any:
        return nullcontext(lambda share, note: notes.setdefault(title, []).append((share, note)))

    before = files_of(base)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapt_module, "stage", stage)
        out, shown = run(folder, base, measure=measure)
    assert files_of(base) == before
    return SimpleNamespace(folder=folder, base=base, out=out, seen=seen, notes=notes, shown=shown)


TABLE = {"caption": "On a test machine.", "columns": ["decoder", "tokens/s"], "rows": [["AR", "1.0"]], "measured": []}


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def written(out: Path, name: str) -> list[Any]:
    return read_answers(out / "work" / f"{name}.jsonl")


def prompts_of(answers: list[Any]) -> set[tuple[int, ...]]:
    return {tuple(answer["prompt_ids"]) for answer in answers}


def test_a_base_and_a_budget_make_an_adapter_and_a_card(whole):
    out, seen, notes = whole.out, whole.seen, whole.notes
    made = {"adapter_config.json", "adapter_model.safetensors", "README.md", "work"}
    assert {path.name for path in out.iterdir()} == made
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(whole.base)
    model, prompt = AutoModelForCausalLM.from_pretrained(whole.base, dtype=torch.float32), torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert seen["config"] == model.generation_config.to_diff_dict()
    load_mask_adapter(model.eval(), out)
    options = {"strategy": "wedlm", "verification": "exact", "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), expected)
    card = (out / "README.md").read_text()
    assert all(part in card for part in ("library_name: peft", "On a test machine.", "| AR | 1.0 |"))
    assert sum(len(answer["response_ids"]) for answer in written(out, "answers")) >= 80
    held_out = {tuple(prompt) for prompt in seen["prompts"]}
    assert held_out and not held_out & prompts_of(written(out, "training"))
    assert list(notes) == ["[1/3] The model's own answers", "[2/3] Training the mask adapter"]
    answering, training = notes.values()
    assert answering[-1][0] == training[-1][0] == 1 and answering[0] == (0.0, "the first batch")
    assert any("held-out answer 1 of" in note for _, note in training) and "[3/3] Measuring" in whole.shown
    log = read_log(out / "work" / "training" / "log.jsonl")
    assert log[-1]["mask_rows"] >= ROWS_PER_TOKEN * 80 and any(entry.get("eval_tokens", 0) > 0 for entry in log)
    trained = load_file(out / "adapter_model.safetensors")
    assert all(float(weight.abs().sum()) > 0 for name, weight in trained.items() if ".up." in name)  # they begin at 0


def run_until(stage: str, monkeypatch: Any, *arguments: Any, stop: Any = KeyboardInterrupt, **settings: Any) -> None:
    """A run that is stopped where a stage would begin."""
    with monkeypatch.context() as patched:
        patched.setattr(adapt_module._Run, stage, Mock(side_effect=stop))
        with pytest.raises((KeyboardInterrupt, Timeout)):
            run(*arguments, **settings)


def test_a_run_that_a_full_disk_stops_and_then_somebody_in_each_stage_goes_on(tmp_path, base, whole, monkeypatch):
    def opened(path: Path, *args: Any, **options: Any) -> Any:
        file = open_file(path, *args, **options)
        if path.name == "answers.jsonl" and args[:1] == ("a",):  # takes a part of what is written, and then no more
            file.write("{")
            file.write = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        return file

    open_file = Path.open
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", opened)
        with pytest.raises(OSError, match=r"The disk of '.*out' is full\. What was done is kept: make room, and the"):
            run(tmp_path, base)
    assert (tmp_path / "out" / "work" / "answers.jsonl").stat().st_size > 0
    lock = FileLock(tmp_path / "out" / "work" / "_lock")
    run_until("answer", monkeypatch, tmp_path, base, stop=lambda *_: lock.acquire(blocking=False))  # it is held
    for stage in ("answer", "_split", "train", "publish", "measure", "finish"):
        run_until(stage, monkeypatch, tmp_path, base, measure=Mock(return_value=TABLE))
    out, _ = run(tmp_path, base)
    assert weights(out) == weights(whole.out)
    for name in ("answers.jsonl", "training.jsonl", "heldout.jsonl"):
        assert (out / "work" / name).read_bytes() == (whole.out / "work" / name).read_bytes()


def test_only_a_larger_budget_writes_more_answers_trains_on_and_is_measured_again(tmp_path, whole, monkeypatch):
    stopped, went_on = tmp_path / "stopped", tmp_path / "went_on"
    for folder in (stopped, went_on):
        shutil.copytree(whole.folder, folder)
    measure, before = Mock(return_value=TABLE), written(whole.out, "answers")
    with monkeypatch.context() as patched:
        patched.setattr(adapt_module, "MaskAdapterTrainer", None)
        patched.setattr(adapt_module, "write_answers", None)
        out, _ = run(went_on, whole.base, measure=measure)
    assert weights(out) == weights(whole.out) and not measure.called

    tokens = 2 * sum(len(answer["response_ids"]) for answer in before)
    run(went_on, whole.base, measure=measure, tokens=tokens)
    assert weights(out) != weights(whole.out) and measure.call_count == 1
    assert "On a test machine." in (out / "README.md").read_text()
    after, held_out, trained_on = (written(out, name) for name in ("answers", "heldout", "training"))
    assert after[: len(before)] == before and sum(len(answer["response_ids"]) for answer in after) >= tokens
    assert held_out == written(whole.out, "heldout")
    assert len(trained_on) > len(written(whole.out, "training")) and not prompts_of(held_out) & prompts_of(trained_on)
    assert read_log(out / "work" / "training" / "log.jsonl")[-1]["mask_rows"] >= ROWS_PER_TOKEN * tokens

    for stage in ("_split", "train"):
        run_until(stage, monkeypatch, stopped, whole.base, tokens=tokens)
    assert weights(run(stopped, whole.base, tokens=tokens)[0]) == weights(out)


def test_answers_and_adapters_of_other_runs_are_taken_further(tmp_path, base, whole, monkeypatch):
    monkeypatch.setattr(adapt_module, "write_answers", None)
    answers = whole.out / "work" / "answers.jsonl"
    options = {"prompts": None, "answers": answers, "tokens": 50, "rank": None, "head_width": None}
    options["start"] = str(whole.out)
    out, _ = run(tmp_path, whole.base, **options)
    assert weights(out) != weights(whole.out)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["rank"], config["head_width"]) == (2, 8)
    begun = load_file(whole.out / "adapter_model.safetensors")
    for name, weight in load_file(out / "adapter_model.safetensors").items():
        if weight.is_floating_point():
            assert float((weight - begun[name]).abs().max()) < 0.1, name  # a few small steps away
    rootless, _ = run(tmp_path, whole.base, "rootless", **options | {"start": None, "rank": 2, "root_width": 0})
    for start in (whole.out, rootless):  # an adapter keeps its shape
        further, _ = run(tmp_path, whole.base, f"from-{start.name}", **options | {"start": str(start)})
        shapes = [json.loads((each / "adapter_config.json").read_text())["root_width"] for each in (start, further)]
        assert shapes[0] == shapes[1] == (0 if start == rootless else 1024)
    tuned = write_base(tmp_path / "other" / "llama", seed=1)  # as a fine-tune of the first
    out, _ = run(tmp_path, tuned, "out2", **options, num_masks=12)
    assert json.loads((out / "adapter_config.json").read_text())["num_masks"] == 12 > config["num_masks"]
    assert any("eval_tokens_per_forward_branch_12" in entry for entry in read_log(out / "work/training/log.jsonl"))
    load_mask_adapter(AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32), out)


def test_the_command_makes_an_adapter_with_its_table_and_a_card_whose_code_runs(tmp_path, base, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--tokens", "60", "--rank", "2", "--head-width", "0", "--root-width", "0", "--device", "cpu"]
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    result = CliRunner().invoke(app, ["adapt", str(base), str(tmp_path / "out"), *words, *prompts])
    assert result.exit_code == 0, result.output
    table, made, example = result.stdout.rsplit("\n", 3)[:3]
    assert "wedlm+exact" in table and "Prompt lookup, which needs no adapter: " in table
    assert "mask rows were trained, and `--tokens 120` trains twice as many." in " ".join(table.split())
    assert made.startswith(f"The adapter and its model card are in {tmp_path / 'out'}; ")
    assert example == f"wedlm generate 'Why is the sky blue?' --model {tmp_path / 'out'}"
    assert not any("root" in name for name in load_file(tmp_path / "out" / "adapter_model.safetensors"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| decoder | tokens per forward |" in card and "trains twice as many" in card
    assert str(tmp_path) not in card and "](acceptance.png)\n\n| mask rows | 1 draft | 2 drafts |" in card
    assert (tmp_path / "out" / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    exec(card.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out.strip()


def test_what_cannot_be_done_is_refused_before_any_work(tmp_path, base, whole, monkeypatch):
    def refused(message: str, error: type[Exception] = ValueError, base: Any = base, **settings: Any) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(error, match=message):
            run(tmp_path, base, **settings)
        assert sorted(tmp_path.rglob("*")) == before

    for minutes in (0.0, float("nan"), float("inf")):
        refused(f"`minutes` must be a finite number greater than 0, got {minutes}", minutes=minutes)
    refused("`num_masks` must be at least 1, got 0", num_masks=0)
    assert MOST_MASKS == LARGEST_WINDOW
    refused("`num_masks` must be at most 32, the rows of a step, got 33", num_masks=33)
    refused("`answers` need no `prompts`", answers=Path("a.jsonl"))
    refused("The adapter 'a' has its own shape: leave out `rank` and `head_width`", start="a")
    refused("`root_width` must be at least 0, got -1", root_width=-1)
    refused("The device 'abacus' is not available", device="abacus")
    for number, tokens in enumerate(([5, 999], "ab", [5, 6.5])):
        file = tmp_path.parent / f"{tmp_path.name}-{number}.jsonl"
        file.write_text(json.dumps({"prompt_ids": [1, 2], "response_ids": tokens}) + "\n")
        why = "0 to 319, as .* answer 0 is .*999" if number == 0 else "Line 1 of .* must be an object with the lists"
        refused(why, answers=file, prompts=None)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        refused(r"About 1\.0 GB are needed, and '.*' has 0\.0 GB free: make room, or choose a", OSError)
    (tmp_path / "out").touch()
    refused("must be a folder, got the file", FileExistsError)
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    refused(r"must be new, empty, or of an earlier run, got '.*out'\.", FileExistsError)
    shutil.rmtree(tmp_path / "out")
    shutil.copytree(whole.out, tmp_path / "out")
    other = r"holds a run with other settings "
    refused(other + r"\(seed: 0, not 1\): choose a new", base=whole.base, seed=1)
    refused(other + r"\(base: '.*llama', not '.*other'\)", base=write_base(tmp_path / "other"))
    (tmp_path / "prompts.txt").write_text("another one\n")
    refused(other + r"\(other prompts\)", base=whole.base)


def test_a_run_does_not_go_on_with_other_weights_under_the_name_of_its_base(tmp_path, monkeypatch):
    base = write_base(tmp_path / "llama")
    run_until("train", monkeypatch, tmp_path, base)
    shutil.rmtree(base)
    write_base(base, seed=1)
    with pytest.raises(ValueError, match=r"The weights of '.*llama' changed since the run in '.*out' began: choose a"):
        run(tmp_path, base)


def test_answers_that_never_end_are_learned_and_said(tmp_path, base):
    config = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 319}))
    out, shown = run(tmp_path, base, tokens=60)
    count = len(read_answers(out / "work" / "answers.jsonl"))
    assert f"None of {count} answers ended within 192 tokens" in shown


def test_the_card_of_an_adapter_for_a_gguf_file_loads_that_file(tmp_path, monkeypatch):
    facts = {"answers": 1, "answer_tokens": 9, "held_out": 1, "mask_rows": 54, "training_seconds": 1.0}
    facts |= {"answer_seconds": 1.0, "rank": 2, "head_width": 0, "seed": 0, "is_chat": False, "gguf_file": None}
    file = tmp_path / "models" / "tiny.gguf"
    file.parent.mkdir()
    file.touch()
    monkeypatch.chdir(tmp_path)
    card = model_card(str(file), str(tmp_path / "runs" / "out"), facts, {"columns": [], "rows": []}, {})
    assert 'source = {"pretrained_model_name_or_path": "models", "gguf_file": "tiny.gguf"}' in card
    assert card.count(".from_pretrained(**source)") == 2 and 'load_mask_adapter(model, "runs/out")' in card
    assert str(tmp_path) not in card
