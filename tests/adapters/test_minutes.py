"""The minutes of `wedlm adapt` on machines of any speed, simulated by a clock that forwards and saves move."""

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from test_adapt import SMALL, write_base
from test_families import build
from test_states import STATEFUL
from tiny import EOS, PAD, VOCAB_SIZE, randomize
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from wedlm_hf.adapters import adapt as adapting
from wedlm_hf.adapters import answers, load_mask_adapter
from wedlm_hf.adapters.adapt import ANSWER_SHARE, GAINS, MASK_SHARE, AdaptConfig, adapt, forecast
from wedlm_hf.adapters.answers import read_answers
from wedlm_hf.training.saving import ResumableTrainer, newest_complete_checkpoint


class Machine:
    """A clock: seconds pass by forwards, three times as many where there is a backward pass to come, and by saves.

    Args:
        forward: seconds of a forward.
        row: seconds of each row of it.
        save: seconds of a checkpoint.
    """

    def __init__(self, forward: float, row: float, save: float = 0.0):
        self.forward, self.row, self.save, self.now = forward, row, save, 0.0
        self.has_begun = False  # a forward, whose tokens are not embedded yet
        self.console = Console(file=io.StringIO(), width=300)

    def __call__(self) -> float:
        return self.now

    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        def pass_time(module: Any, args: Any) -> None:
            if isinstance(module, PreTrainedModel) and not isinstance(module, GenerationMixin):  # without its head
                self.now += self.forward * (3 if torch.is_grad_enabled() else 1)
                self.has_begun = True

        def pass_rows(module: Any, args: Any) -> None:
            if isinstance(module, torch.nn.Embedding) and self.has_begun:
                self.now += self.row * args[0].numel() * (3 if torch.is_grad_enabled() else 1)
                self.has_begun = False
            elif isinstance(module, torch.nn.Embedding) and args[0].shape[1:] == (2,):  # of the root head
                self.now += 0.1 * self.row * len(args[0])

        def save(trainer: Any, *args: Any) -> None:
            self.now += self.save
            write(trainer, *args)

        write = ResumableTrainer._save_checkpoint
        monkeypatch.setattr(ResumableTrainer, "_save_checkpoint", save)
        hooks = [register_module_forward_pre_hook(hook) for hook in (pass_time, pass_rows)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def answer_all(model: Any, tokenizer: Any, prompts: Any, max_new_tokens: int) -> dict[str, Any]:
    """What a table takes: three decoders at the speed of AR decoding, and one prompt more to warm up."""
    for prompt in 3 * [prompts[0], *prompts]:
        model.generate(torch.tensor([prompt]), strategy="ar", max_new_tokens=max_new_tokens, do_sample=False)
    return {"caption": f"{len(prompts)} prompts.", "columns": ["decoder"], "rows": [["AR"]]}


def adapted(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    """What `adapt` makes of a tiny base by that clock."""
    base = tmp_path / "llama"
    if not base.exists():
        write_base(base)
    config = AdaptConfig(**{"prompts": tmp_path / "prompts.txt"} | SMALL | how)
    with machine.running(monkeypatch):
        return adapt(base, tmp_path / "out", config, measure=answer_all, console=machine.console, clock=machine)


@pytest.mark.parametrize(
    ("minutes", "machine"),
    [(2.0, Machine(0.05, 0.004, save=0.5)),
     (10.0, Machine(0.02, 0.03, save=0.5)),
     pytest.param(10.0, Machine(0.5, 0.04, save=5.0), marks=pytest.mark.slow),  # ten times slower
     pytest.param(30.0, Machine(0.5, 0.02, save=0.5), marks=pytest.mark.slow),  # few rows cost as many do
     pytest.param(60.0, Machine(0.02, 0.04, save=20.0), marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_minutes_are_kept_on_any_machine_and_the_time_left_is_true(tmp_path, monkeypatch, minutes, machine):
    seen: dict[str, list[Any]] = {}

    @contextmanager
    def stage(console: Any, title: str) -> Iterator[Any]:
        progress = Progress(console=console, get_time=machine, speed_estimate_period=120, auto_refresh=False)
        task, shown = progress.add_task(title, total=1.0), seen.setdefault(title[:5], [])

        def show(share: float, note: str) -> None:
            progress.update(task, completed=min(share, 1.0))
            shown.append((machine.now, progress.tasks[0].time_remaining, note))

        yield show

    monkeypatch.setattr(adapting, "stage", stage)
    made, total = adapted(tmp_path, machine, monkeypatch, minutes=minutes), 60 * minutes
    assert 0.85 * total <= machine.now <= 1.1 * total
    assert made["answer_seconds"] >= ANSWER_SHARE * total and made["training_seconds"] >= MASK_SHARE * total
    assert made["table"]["rows"]
    checkpoint = newest_complete_checkpoint(tmp_path / "out" / "work" / "training")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    spent = state["stateful_callbacks"]["Budget"]["attributes"]["spent"]
    assert spent["evaluation"] <= 0.05 * total and spent["saving"] <= 0.03 * total + 2 * machine.save
    if minutes == 2:
        forecast_is_true(machine.console.file.getvalue(), made["mask_rows"])
    assert seen.keys() == {"[1/3]", "[2/3]"}
    for shown in seen.values():
        began, ended = shown[0][0], shown[-1][0]
        told = [(now, left) for now, left, note in shown if left is not None and not note.startswith("root head")]
        told = [(now, left) for now, left in told if now > began + 0.1 * (ended - began)]
        assert told
        step = max(after[0] - before[0] for before, after in pairwise(shown))  # nothing is told meanwhile
        wrong = [now for now, left in told if abs(left - (ended - now)) > 0.15 * (ended - began) + step]
        assert len(wrong) <= 1 + 0.02 * len(told)  # the last step may be longer than what was left


def forecast_is_true(shown: str, mask_rows: int) -> None:
    """The minutes are announced by their shares; a forecast follows once the pace is known."""
    assert "2 minutes: 0.4 for the model's own answers, 1.1 for masks, 0.2 for the root head." in shown
    (about,) = re.findall(
        r"About ([\d,]+) mask rows in all\. On all kinds of questions, SmolLM2-135M has about 1\.", shown
    )
    rows = int(about.replace(",", ""))
    assert 0.7 * mask_rows < rows < 1.3 * mask_rows


def test_a_forecast_lies_between_what_was_measured():
    for known, gain in GAINS.items():
        known_gain = f"SmolLM2-135M has about {gain:.1f} tokens per forward after {known:,} rows."
        assert forecast(known) == f"On all kinds of questions, {known_gain}"
    assert "about 1.0 tokens per forward after 0 rows" in forecast(0) and "about 2.0 tokens" in forecast(10**8)


def test_a_larger_budget_adds_the_minutes_that_are_missing(tmp_path, monkeypatch):
    machine = Machine(0.05, 0.004)
    first = adapted(tmp_path, machine, monkeypatch, minutes=1)
    second = adapted(tmp_path, machine, monkeypatch, minutes=2)
    assert machine.now <= 1.15 * 120 and second["answer_seconds"] >= 0.2 * 120 > first["answer_seconds"]
    before = machine.now
    assert adapted(tmp_path, machine, monkeypatch, minutes=2) == second and machine.now == before


def test_a_budget_too_small_for_a_batch_of_answers_is_named_and_a_larger_one_goes_on(tmp_path, monkeypatch):
    machine = Machine(2.0, 0.1)
    with pytest.raises(ValueError, match=r"^0\.02 minutes are too few for a batch of answers .* `--minutes 1` or"):
        adapted(tmp_path, machine, monkeypatch, minutes=0.02)
    state = json.loads((tmp_path / "out" / "work" / "state.json").read_text())
    assert state["answer_seconds"] == 0  # what came to nothing does not count
    assert adapted(tmp_path, machine, monkeypatch, minutes=10)["answers"] > 0


def test_the_first_batch_of_answers_is_written_though_its_prompts_took_the_time(tmp_path, monkeypatch):
    def draw(writer: Any, rng: Any, count: int) -> list[tuple[int, ...]]:
        machine.now += 50
        return [writer.template.prompt(f"Sort {number}") for number in range(10, 14)]

    machine = Machine(0.1, 0.008)
    monkeypatch.setattr(answers._Writer, "draw", draw)
    made = adapted(tmp_path, machine, monkeypatch, minutes=2, prompts=None)
    assert made["answers"] > 0 and made["training_seconds"] >= MASK_SHARE * 120 and machine.now <= 1.3 * 120


def test_a_model_that_keeps_a_state_is_adapted(tmp_path, monkeypatch):
    base, tokens = write_base(tmp_path / "llama"), {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "pad_token_id": PAD}
    randomize(build("Qwen3_5", STATEFUL["Qwen3_5"] | tokens)).save_pretrained(base)
    made = adapted(tmp_path, Machine(0.5, 0.001), monkeypatch, minutes=10, tokens=60)
    assert made["mask_rows"] > 0
    written = read_answers(tmp_path / "out" / "work" / "answers.jsonl")
    assert len([answer for answer in written if answer["batch"] == 0]) > 1  # written together
    model, prompt = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval(), torch.tensor([[5, 6, 7]])
    for answer in written[:2]:
        ids = torch.tensor([answer["prompt_ids"]])
        text = model.generate(ids, max_new_tokens=192, do_sample=False)[0, ids.shape[1] :].tolist()
        assert text == answer["response_ids"]
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(prompt, **options)
    load_mask_adapter(model, tmp_path / "out")
    assert torch.equal(model.generate(prompt, strategy="wedlm", verification="exact", **options), expected)
