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
from tiny import EOS, LINES, PAD, VOCAB_SIZE, randomize, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from wedlm_hf.adapters import adapt as adapt_module
from wedlm_hf.adapters.adapt import AdaptConfig, adapt
from wedlm_hf.adapters.answers import read_answers
from wedlm_hf.adapters.attach import load_mask_adapter
from wedlm_hf.adapters.model_card import model_card, read_log
from wedlm_hf.cli import app

SMALL: dict[str, Any] = {"rank": 2, "head_width": 8, "device": "cpu"}


def write_base(folder: Path, seed: int = 0) -> Path:
    """A tiny Llama with a tokenizer; prompts beside its folder."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        randomize(LlamaForCausalLM(config)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder.parent / "prompts.txt").write_text("\n".join(line.strip().replace("\n", " ") for line in LINES))
    return folder


@pytest.fixture(scope="module", autouse=True)
def same_dtype():
    """On a busy machine, one run would train in bfloat16 and another one in float32."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapt_module, "faster_dtype", lambda device, clock: "float32")
        yield


@pytest.fixture
def base(tmp_path) -> Path:
    return write_base(tmp_path / "llama")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, write_base(folder / "llama"))[0]


def run(tmp_path: Path, base: Any, name: str = "out", measure: Any = None, **settings: Any) -> tuple[Path, str]:
    console = Console(file=io.StringIO(), width=200)
    config = AdaptConfig(**{"tokens": 150, "prompts": tmp_path / "prompts.txt"} | SMALL | settings)
    adapt(base, tmp_path / name, config, measure=measure, console=console)
    return tmp_path / name, console.file.getvalue()


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def stock(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def test_a_base_and_a_budget_make_an_adapter_and_a_card(tmp_path, base, monkeypatch):
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    seen, notes = {}, {}

    def measure(model: Any, tokenizer: Any, prompts: Any, max_new_tokens: int) -> dict[str, Any]:
        seen.update(prompts=prompts, config=model.generation_config.to_diff_dict())
        return {"caption": "On a test machine.", "columns": ["decoder", "tokens/s"], "rows": [["AR", "1.0"]]}

    monkeypatch.setattr(
        adapt_module,
        "stage",
        lambda console, title: nullcontext(lambda share, note: notes.setdefault(title, []).append((share, note))),
    )
    out, shown = run(tmp_path, base, measure=measure, tokens=600)
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    assert {file.name for file in out.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "README.md", "work",
    }  # fmt: skip
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    model, prompt = stock(base), torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert seen["config"] == model.generation_config.to_diff_dict()
    load_mask_adapter(model, out)
    options = {"strategy": "wedlm", "verification": "exact", "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), expected)
    card = (out / "README.md").read_text()
    for part in ("library_name: peft", "On a test machine.", "| AR | 1.0 |"):
        assert part in card
    answers = read_answers(out / "work" / "answers.jsonl")
    assert sum(len(answer["response_ids"]) for answer in answers) >= 600
    held_out = {tuple(prompt) for prompt in seen["prompts"]}
    trained_on = {tuple(answer["prompt_ids"]) for answer in read_answers(out / "work" / "training.jsonl")}
    assert held_out
    assert not held_out & trained_on
    assert list(notes) == ["[1/3] The model's own answers", "[2/3] Training the mask adapter"]
    assert all(one[-1][0] == 1 for one in notes.values())
    assert notes["[1/3] The model's own answers"][0] == (0.0, "the first batch")
    assert any("held-out answer 1 of" in note for _, note in notes["[2/3] Training the mask adapter"])
    assert "[3/3] Measuring" in shown
    log = read_log(out / "work" / "training" / "log.jsonl")
    assert log[-1]["mask_rows"] >= 6 * 600
    assert any(entry.get("eval_tokens", 0) > 0 for entry in log)
    weights = load_file(out / "adapter_model.safetensors")
    assert all(float(weight.abs().sum()) > 0 for name, weight in weights.items() if ".up." in name)  # they begin at 0


def run_until(stage: str, monkeypatch: Any, *arguments: Any, **settings: Any) -> None:
    """A run that is stopped where a stage would begin."""
    with monkeypatch.context() as patched:
        patched.setattr(adapt_module._Run, stage, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(*arguments, **settings)


@pytest.mark.parametrize("stage", ["answer", "_split", "train", "publish", "measure", "finish"])
def test_a_run_that_is_stopped_in_any_stage_goes_on(tmp_path, base, whole, stage, monkeypatch):
    run_until(stage, monkeypatch, tmp_path, base)
    out, _ = run(tmp_path, base)
    assert weights(out) == weights(whole)
    for name in ("answers.jsonl", "training.jsonl", "heldout.jsonl"):
        assert (out / "work" / name).read_bytes() == (whole / "work" / name).read_bytes()


def test_a_finished_run_has_nothing_left_to_do(whole, monkeypatch):
    before = weights(whole)
    monkeypatch.setattr(adapt_module, "MaskAdapterTrainer", None)
    monkeypatch.setattr(adapt_module, "write_answers", None)
    run(whole.parent, whole.parent / "llama")
    assert weights(whole) == before


def test_what_was_measured_is_measured_again_only_for_another_budget(whole, tmp_path):
    shutil.copytree(whole.parent, tmp_path, dirs_exist_ok=True)
    base, calls = whole.parent / "llama", []

    def measure(*_: Any) -> dict[str, Any]:
        calls.append(1)
        return {"caption": "On a test machine.", "columns": ["decoder"], "rows": [["AR"]], "measured": []}

    for tokens, count in ((150, 1), (150, 1), (200, 2)):
        out, _ = run(tmp_path, base, measure=measure, tokens=tokens)
        assert len(calls) == count
        assert "On a test machine." in (out / "README.md").read_text()


def test_a_larger_budget_writes_more_answers_and_trains_on(tmp_path, whole, monkeypatch):
    stopped, went_on = tmp_path / "stopped", tmp_path / "went_on"
    for folder in (stopped, went_on):
        shutil.copytree(whole.parent, folder)
    base, before = whole.parent / "llama", read_answers(whole / "work" / "answers.jsonl")
    tokens = 2 * sum(len(answer["response_ids"]) for answer in before)

    out, _ = run(went_on, base, tokens=tokens)
    assert weights(out) != weights(whole)
    after, held_out = (read_answers(out / "work" / f"{name}.jsonl") for name in ("answers", "heldout"))
    assert after[: len(before)] == before
    assert sum(len(answer["response_ids"]) for answer in after) >= tokens
    assert held_out == read_answers(whole / "work" / "heldout.jsonl")
    trained_on = read_answers(out / "work" / "training.jsonl")
    assert len(trained_on) > len(read_answers(whole / "work" / "training.jsonl"))
    assert not {tuple(one["prompt_ids"]) for one in held_out} & {tuple(one["prompt_ids"]) for one in trained_on}
    assert read_log(out / "work" / "training" / "log.jsonl")[-1]["mask_rows"] >= 6 * tokens

    for stage in ("_split", "train"):
        run_until(stage, monkeypatch, stopped, base, tokens=tokens)
    assert weights(run(stopped, base, tokens=tokens)[0]) == weights(out)


def test_answers_and_adapters_of_other_runs_are_taken_further(tmp_path, base, whole, monkeypatch):
    monkeypatch.setattr(adapt_module, "write_answers", None)
    answers = whole / "work" / "answers.jsonl"
    options = {"prompts": None, "answers": answers, "tokens": 100, "rank": None, "head_width": None}
    out, _ = run(tmp_path, whole.parent / "llama", start=str(whole), **options)
    assert weights(out) != weights(whole)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["rank"], config["head_width"]) == (2, 8)
    begun = load_file(whole / "adapter_model.safetensors")
    for name, weight in load_file(out / "adapter_model.safetensors").items():
        if "ngrams" in name:  # the same answers, counted twice
            assert len(weight) >= len(begun[name]) > 0
        else:
            assert float((weight - begun[name]).abs().max()) < 0.1, name  # a few small steps away
    with pytest.raises(ValueError, match="trained for another model of this shape"):
        run(tmp_path, write_base(tmp_path / "other" / "llama", seed=1), "out2", start=str(whole), **options)


# ---------------------------------------------------------------------------------------------------------- refusals


def refused(tmp_path: Path, base: Any, error: type[Exception], message: str, **settings: Any) -> None:
    """Raises before any work: nothing is written."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=message):
        run(tmp_path, base, **settings)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minutes": 0.0}, "`minutes` must be greater than 0, got 0.0"),
        ({"minutes": float("nan")}, "`minutes` must be greater than 0, got nan"),
        ({"answers": Path("a.jsonl")}, "`answers` need no `prompts`"),
        ({"start": "a"}, "The adapter 'a' has its own `rank` and `head_width`: leave these out"),
        ({"device": "abacus"}, "The device 'abacus' is not available"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, base, settings, message):
    refused(tmp_path, base, ValueError, message, **settings)


def test_the_command_makes_an_adapter_with_its_table(tmp_path, base):
    words = ["--tokens", "200", "--rank", "2", "--head-width", "0", "--device", "cpu"]
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    result = CliRunner().invoke(app, ["adapt", str(base), str(tmp_path / "out"), *words, *prompts])
    assert result.exit_code == 0, result.output
    table, made, example = result.stdout.rsplit("\n", 3)[:3]
    assert "wedlm+exact" in table and "Prompt lookup, which needs no adapter: " in table
    assert "mask rows were trained, and `--tokens 400` trains twice as many." in " ".join(table.split())
    assert made.startswith(f"The adapter and its model card are in {tmp_path / 'out'}; ")
    assert example == f"wedlm generate 'Why is the sky blue?' --model {tmp_path / 'out'}"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| decoder | tokens per forward |" in card and "trains twice as many" in card
    assert str(tmp_path) not in card
    assert "](acceptance.png)\n\n| mask rows | 1 draft | 2 drafts |" in card
    assert (tmp_path / "out" / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_a_disk_without_room_is_refused(tmp_path, base, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    refused(tmp_path, base, OSError, r"About 1\.0 GB are needed, and '.*' has 0\.0 GB free: make room, or choose a")


def test_a_folder_with_something_else_in_it_is_refused(tmp_path, base):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    refused(tmp_path, base, FileExistsError, r"must be new, empty, or of an earlier run, got '.*out'\.")
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").touch()
    refused(tmp_path, base, FileExistsError, "must be a folder, got the file")


def test_other_settings_do_not_go_on_with_a_run(whole):
    folder = whole.parent
    base, other = folder / "llama", write_base(folder / "other")
    refused(folder, base, ValueError, r"holds a run with other settings \(seed: 0, not 1\): choose a new", seed=1)
    refused(folder, other, ValueError, r"holds a run with other settings \(base: '.*llama', not '.*other'\)")


def test_answers_that_never_end_are_learned_and_said(tmp_path, base):
    config = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 319}))
    out, shown = run(tmp_path, base, tokens=200)
    count = len(read_answers(out / "work" / "answers.jsonl"))
    assert f"None of the {count} answers ended within 192 tokens" in shown


def test_a_full_disk_is_named_and_the_same_call_goes_on(tmp_path, base, whole, monkeypatch):
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
    out, _ = run(tmp_path, base)
    assert weights(out) == weights(whole)


def test_no_other_run_writes_into_the_folder_meanwhile(tmp_path, base, monkeypatch):
    lock = FileLock(tmp_path / "out" / "work" / "_lock")
    monkeypatch.setattr(adapt_module._Run, "_split", lambda *_: lock.acquire(blocking=False))
    with pytest.raises(Timeout):
        run(tmp_path, base)
    lock.acquire(blocking=False)


def test_the_card_of_an_adapter_for_a_gguf_file_loads_that_file(tmp_path):
    facts = {"answers": 1, "answer_tokens": 9, "held_out": 1, "mask_rows": 54, "training_seconds": 1.0}
    facts |= {"answer_seconds": 1.0, "rank": 2, "head_width": 0, "seed": 0, "is_chat": False, "gguf_file": None}
    file = tmp_path / "models" / "tiny.gguf"
    file.parent.mkdir()
    file.touch()
    card = model_card(str(file), str(tmp_path / "out"), facts, {"columns": [], "rows": []}, {})
    assert 'source = {"pretrained_model_name_or_path": "models", "gguf_file": "tiny.gguf"}' in card
    assert card.count(".from_pretrained(**source)") == 2 and 'load_mask_adapter(model, "out")' in card
    assert str(tmp_path) not in card
