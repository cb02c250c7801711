"""`wedlm adapt`: a mask adapter for a model, from nothing but the model.

Stages: convert, write the model's own answers, train the adapter on them, calibrate, measure. Everything
is kept in the output folder as it is made, so that a run may be stopped at any moment: the same call goes on.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from ..console.progress import Show, stage
from ..modeling_wedlm.card import CARD_NAME, write_card
from ..modeling_wedlm.convert import convert, read_source_config, read_source_tokenizer
from ..modeling_wedlm.files import write_text, written_whole
from ..modeling_wedlm.loading import find_device, load_model, load_tokenizer
from ..modeling_wedlm.modeling_wedlm import WeDLMForCausalLM
from ..training.saving import only_writer
from .adapt_config import AdaptConfig
from .adapter_files import CONFIG_NAME, WEIGHTS_NAME, MaskAdapterSettings
from .answers import (
    Answer,
    AnswerConfig,
    DamagedAnswersError,
    check_conversations,
    read_answers,
    read_prompts,
    write_answers,
)
from .budget import MaskTrainingConfig
from .layout import load_answers
from .model_card import acceptance_table, model_card, read_log
from .trainer import MaskAdapterTrainer

ANSWER_SHARE = 1 / 3  # of the minutes: answers are what a small budget lacks first
ROWS_PER_TOKEN = 6  # mask rows that are trained for each token of an answer where the budget is in tokens
HELD_OUT = 24  # greedy answers that are not trained on: acceptance is measured on them
CALIBRATE_EVERY = 3  # of the held-out answers' prompts, one in so many is for calibration, the others for the table
CALIBRATION_DRAFTS, CALIBRATION_TOKENS = 4, 64
MEASURED = 8  # prompts of the table at most: it is no part of the budget
ROOM = 1_000_000_000  # bytes for answers, checkpoints and the adapter

Measure = Callable[[WeDLMForCausalLM, PreTrainedTokenizerBase, Sequence[Sequence[int]]], dict[str, Any]]
"""Measures AR and verified decoding of the prompts: a table for the model card (see [`model_card`])."""
Draw = Callable[[Sequence[dict[str, Any]], Path], None]
"""Draws the acceptance curve of a training log into a folder, as acceptance.png."""


def adapt(
    base: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    config: AdaptConfig,
    *,
    measure: Measure | None = None,
    draw: Draw | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains a mask adapter for a model on the model's own answers, going on with what `output_dir` holds already.

    The base itself is only read. In the end `output_dir` holds `adapter_config.json`, `adapter_model.safetensors` and
    the model card; beside them `base`, the WeDLM checkpoint that was made of a base of another kind, and `work`, which
    may be deleted.

    Args:
        base: folder or Hub id of a WeDLM, Llama, Mistral, Qwen2, Qwen2.5 or Qwen3 checkpoint, or a GGUF file.
        output_dir: new, empty, or that of an earlier call with the same base.
        config: budget and settings.
        measure: makes the table of the model card; without it the card states tokens per forward alone.
        draw: draws tokens per forward against training for the model card, beside their table.
        console: shows progress and the time left.

    Returns:
        What was made and measured: `output_dir` and `base`; `answers`, `answer_tokens`, `answer_seconds`, `held_out`,
        `mask_rows` and `training_seconds`; `acceptance`, tokens per forward against mask rows, and `table`, what
        `measure` found (empty without it), both with `columns` and `rows`.

    Raises:
        FileExistsError: for an `output_dir` that holds something else.
        OSError: for a base that cannot be read, a disk without room, and while another run writes into `output_dir`.
        ValueError: for an unsupported base, unreadable prompts, conversations that its chat template refuses, and
            settings other than those of the run it goes on.
    """
    run = _Run(os.fspath(base), Path(output_dir), config, console or Console(stderr=True))
    run.check()
    try:
        with only_writer(run.work):
            run.begin()
            run.convert()
            for name in ("answer", "train", "calibrate"):
                run.once(name)
            run.publish()
            run.once("measure", measure)
            return run.finish(draw)
    except DamagedAnswersError as error:  # in a file of its own
        raise ValueError(f"{error} {str(error.file)!r} is damaged: delete it, or choose a new folder.") from None


def calibrate_drafts(model: Any, prompts: Iterable[Sequence[int]]) -> None:
    """Counts how often the drafts of a model's mask adapter pass, and keeps that as the adapter's `calibration`.

    Args:
        model: in evaluation mode, with its mask adapter.
        prompts: token ids; each is answered greedily, with up to 64 tokens and 4 drafts a step.
    """
    settings: dict[str, Any] = {"strategy": "wedlm", "verification": "exact", "do_sample": False}
    settings |= {"adaptive_window": False, "window_size": CALIBRATION_DRAFTS, "max_new_tokens": CALIBRATION_TOKENS}
    model.generation_config.slot_cost = None  # with one of its own, decoding keeps no record
    for prompt in prompts:
        model.generate(torch.tensor([prompt], device=model.device), repetition_penalty=1.0, **settings)
    model.model.mask_adapter.calibration = model._draft_record.calibration()


class _Run:
    """The stages of [`adapt`]. Each looks at the disk for what it has done before."""

    def __init__(self, base: str, out: Path, config: AdaptConfig, console: Console):
        self.base, self.out, self.work, self.config, self.console = base, out, out / "work", config, console
        self.plan_file, self.state_file = self.work / "adapt.json", self.work / "state.json"
        self.answers, self.trained_on = self.work / "answers.jsonl", self.work / "training.jsonl"
        self.held_out = self.work / "heldout.jsonl"
        self.device = find_device(config.device)
        self.budget = {"minutes": config.minutes, "tokens": config.tokens}
        self.state: dict[str, Any] = {"answer_seconds": 0.0, "table": {}, "done": {}}

    # Before any work.

    def check(self) -> None:
        """Raises for what would otherwise end the run after hours of work."""
        self.prompts = None if self.config.prompts is None else read_prompts(self.config.prompts)
        self.identity = self.config.identity(self.base)
        if self.out.exists() and not self.out.is_dir():
            raise FileExistsError(f"The output must be a folder, got the file {str(self.out)!r}.")
        if self.plan_file.exists():
            before = _read(self.plan_file)
            if different := [name for name, value in self.identity.items() if before.get(name) != value]:
                changes = ", ".join(f"{name}: {before.get(name)!r}, not {self.identity[name]!r}" for name in different)
                raise ValueError(
                    f"{str(self.out)!r} holds a run with other settings ({changes}): choose a new folder."
                )
        elif self.out.exists() and {path.name for path in self.out.iterdir()} - {"work"}:
            raise FileExistsError(
                f"The output folder must be new, empty, or of an earlier run, got {str(self.out)!r}."
            )
        source = read_source_config(self.base, self.config.revision, self.config.gguf_file)
        if any(not isinstance(prompt, str) for prompt in self.prompts or ()):
            tokenizer = read_source_tokenizer(self.base, self.config.revision, self.config.gguf_file)
            check_conversations(tokenizer, self.prompts or ())
        self.is_wedlm = source.model_type == "wedlm"
        self.base_path = self.base if self.is_wedlm else str(self.out / "base")
        self._require_room(source)

    def _require_room(self, source: Any) -> None:
        """Raises `OSError` where the disk has no room for what will be written."""
        needed = ROOM
        if not self.is_wedlm and not (self.out / "base").exists():
            embeddings = source.vocab_size * source.hidden_size * (1 if source.tie_word_embeddings else 2)
            layer = source.hidden_size * (4 * source.hidden_size + 3 * source.intermediate_size)
            bytes_each = 4 if self.config.gguf_file or self.base.lower().endswith(".gguf") else 2
            needed += bytes_each * (embeddings + source.num_hidden_layers * layer)
        place = next(folder for folder in (self.out.absolute(), *self.out.absolute().parents) if folder.exists())
        if (free := shutil.disk_usage(place).free) < needed:
            raise OSError(
                f"About {needed / 1e9:.1f} GB are needed, and {str(place)!r} has {free / 1e9:.1f} GB free: make "
                "room, or choose a folder on another disk."
            )

    def begin(self) -> None:
        """Reads how far an earlier call has come, and writes down the settings of this run."""
        if self.state_file.exists():
            self.state |= _read(self.state_file)
        self.state.setdefault("dtype", _faster_dtype(self.device))
        write_text(self.plan_file, json.dumps(self.identity, indent=2) + "\n")

    def save_state(self, **changes: Any) -> None:
        """Keeps what the stages cannot see on the disk."""
        self.state |= changes
        write_text(self.state_file, json.dumps(self.state, indent=2) + "\n")

    def once(self, name: str, *arguments: Any) -> None:
        """Runs a stage unless it is done for this budget, and keeps what it returns; None: it did nothing."""
        if self.state["done"].get(name) != self.budget:
            made = getattr(self, name)(*arguments)
            if made is not None:
                self.save_state(**made, done={**self.state["done"], name: self.budget})

    # The stages.

    def convert(self) -> None:
        """A WeDLM checkpoint of the base, unless it is one."""
        for left_over in self.out.glob(".base.*"):  # of a kill
            shutil.rmtree(left_over, ignore_errors=True)
        if self.is_wedlm or Path(self.base_path).exists():
            return
        self.console.print(f"[1/5] Converting {self.base} …", highlight=False, markup=False)
        convert(self.base, self.base_path, revision=self.config.revision, gguf_file=self.config.gguf_file)

    def load(self) -> tuple[WeDLMForCausalLM, PreTrainedTokenizerBase]:
        """The base and its tokenizer."""
        options = {"revision": self.config.revision} if self.is_wedlm else {}
        if Path(self.base_path).is_dir():  # nothing is downloaded, and each stage loads it
            disable_progress_bar()
        model = load_model(self.base_path, dtype=getattr(torch, self.state["dtype"]), **options).to(self.device).eval()
        return model, load_tokenizer(self.base_path, **options)

    def answer(self) -> dict[str, Any]:
        """The model's own answers, and a few of them held out; a larger budget adds to what there is."""
        model, tokenizer = self.load()
        batch_size = 256 if self.device.type == "cuda" else 48
        settings = AnswerConfig(batch_size=batch_size, seed=self.config.seed)
        clock = time.monotonic()
        with stage(self.console, "[2/5] The model's own answers") as show:
            for count in write_answers(model, tokenizer, self.answers, self.prompts, settings):
                seconds = self.state["answer_seconds"] + time.monotonic() - clock
                clock = time.monotonic()
                self.save_state(answer_seconds=seconds)
                share = self._answer_share(count.tokens, seconds)
                show(share, f"{count.answers:,} answers, {count.tokens:,} tokens")
                if share >= 1 and count.answers:
                    break
        self._split()
        return {}

    def _answer_share(self, tokens: int, seconds: float) -> float:
        """How much of the budget for answers is used; all of it as soon as one of its limits is reached."""
        shares = [0.0]
        if self.config.tokens is not None:
            shares.append(tokens / self.config.tokens)
        if self.config.minutes is not None:
            shares.append(seconds / (60 * self.config.minutes * ANSWER_SHARE))
        return min(1.0, max(shares))

    def _split(self) -> None:
        """Holds out some greedy answers, none of them to a prompt that is trained on: the same ones with more answers,
        since training has seen the others."""
        answers = read_answers(self.answers)
        greedy = list(dict.fromkeys(tuple(answer["prompt_ids"]) for answer in answers if answer["greedy"]))
        if self.held_out.exists():
            prompts = {tuple(answer["prompt_ids"]) for answer in read_answers(self.held_out)}
        else:
            prompts = set(greedy[:: max(2, len(greedy) // HELD_OUT)][:HELD_OUT]) if len(greedy) > 1 else set()
        parts: dict[bool, list[Answer]] = {True: [], False: []}
        for answer in answers:
            is_held_out = tuple(answer["prompt_ids"]) in prompts
            if answer["greedy"] or not is_held_out:
                parts[is_held_out].append(answer)
        write_text(self.held_out, "".join(json.dumps(answer) + "\n" for answer in parts[True]))
        write_text(self.trained_on, "".join(json.dumps(answer) + "\n" for answer in parts[False]))

    def train(self) -> dict[str, Any]:
        """The adapter, from the newest checkpoint on."""
        args = self._training_config()
        model, _ = self.load()
        torch.manual_seed(self.config.seed)
        model.add_mask_adapter(MaskAdapterSettings(rank=self.config.rank, head_width=self.config.head_width))
        held_out: Any = read_answers(self.held_out)
        trainer = MaskAdapterTrainer(model, args, load_answers(self.trained_on, 10**9), held_out)
        trainer.remove_callback(PrinterCallback)  # the progress line says what it would, and log.jsonl keeps it
        has_checkpoint = any(Path(str(args.output_dir)).glob("checkpoint-*"))
        with stage(self.console, "[3/5] Training the mask adapter") as show:
            trainer.add_callback(_ShowProgress(trainer, show))
            trainer.train(resume_from_checkpoint=has_checkpoint)
        model.save_mask_adapter(self.work / "adapter")
        return {"mask_rows": trainer.budget.mask_rows, "training_seconds": trainer.budget.seconds}

    def _training_config(self) -> MaskTrainingConfig:
        minutes, tokens = self.config.minutes, self.config.tokens
        # A first batch of answers may take longer than their share: an adapter without training is of no use.
        left = None if minutes is None else max(minutes / 2, minutes - self.state["answer_seconds"] / 60)
        is_gpu = self.device.type == "cuda"
        return MaskTrainingConfig(
            output_dir=str(self.work / "training"),
            minutes=left,
            mask_rows=None if tokens is None else ROWS_PER_TOKEN * tokens,
            save_minutes=5.0 if left is None else min(5.0, max(0.2, left / 10)),
            batch_slots=8192 if is_gpu else 640,
            seed=self.config.seed,
            disable_tqdm=True,
            use_cpu=not is_gpu,
        )

    def calibrate(self) -> dict[str, Any]:
        """How often the adapter's drafts pass, so that decoding need not find out first."""
        prompts = [answer["prompt_ids"] for answer in read_answers(self.held_out)[::CALIBRATE_EVERY]]
        if prompts:
            model, _ = self.load()
            model.load_mask_adapter(self.work / "adapter")
            calibrate_drafts(model, self._tracked("[4/5] Calibrating", prompts))
            model.save_mask_adapter(self.work / "adapter")
        return {}

    def _tracked(self, name: str, prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """The prompts one by one, and how many of them are done."""
        with stage(self.console, name) as show:
            for index, prompt in enumerate(prompts):
                show(index / len(prompts), f"{index} of {len(prompts)} prompts")
                yield prompt
            show(1.0, f"{len(prompts)} of {len(prompts)} prompts")

    def publish(self) -> None:
        """The adapter where users look for it."""
        for name in (WEIGHTS_NAME, CONFIG_NAME):
            with written_whole(self.out / name) as unfinished:
                shutil.copyfile(self.work / "adapter" / name, unfinished)

    def measure(self, measure: Measure | None) -> dict[str, Any] | None:
        """The table of the model card."""
        held_out = read_answers(self.held_out)
        if measure is None or not held_out:
            return None
        self.console.print("[5/5] Measuring …", highlight=False, markup=False)
        model, tokenizer = self.load()
        model.load_mask_adapter(self.work / "adapter")
        others = [answer for index, answer in enumerate(held_out) if index % CALIBRATE_EVERY] or held_out
        table = measure(model, tokenizer, [answer["prompt_ids"] for answer in others[:MEASURED]])
        return {"table": {name: table[name] for name in ("caption", "columns", "rows")}}

    def finish(self, draw: Draw | None) -> dict[str, Any]:
        """The figure and the model card; returns what [`adapt`] does."""
        answers, held_out = read_answers(self.trained_on), read_answers(self.held_out)
        entries, table = read_log(self.work / "training" / "log.jsonl"), self.state["table"]
        facts = {
            "answers": len(answers),
            "answer_tokens": sum(len(answer["response_ids"]) for answer in answers),
            "held_out": len(held_out),
            **{name: self.state[name] for name in ("mask_rows", "training_seconds", "answer_seconds")},
            **{name: value for name, value in asdict(self.config).items() if name in ("rank", "head_width", "seed")},
        }
        is_chat = load_tokenizer(self.base_path).chat_template is not None
        figure = None
        if draw is not None and acceptance_table(entries)["rows"]:
            draw(entries, self.out)
            figure = "acceptance.png"
        base = None if self.is_wedlm else self.base_path
        card = model_card(self.base, base, str(self.out), facts | {"is_chat": is_chat}, entries, table, figure)
        if not write_card(self.out, card):
            self.console.print(f"{self.out / CARD_NAME} was edited: it stays as it is.", highlight=False, markup=False)
        made = {"output_dir": str(self.out), "base": self.base_path}
        return made | facts | {"acceptance": acceptance_table(entries), "table": table}


class _ShowProgress(TrainerCallback):
    """Shows how much of the budget is used."""

    def __init__(self, trainer: MaskAdapterTrainer, show: Show):
        self.trainer, self.show, self.note, self.measured = trainer, show, "", 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Keeps the newest numbers."""
        if logs and "accepted" in logs:
            self.note = f", {logs['accepted']:.2f} drafts accepted"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Shows them."""
        self._show()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Shows that an evaluation is under way."""
        self.measured += 1
        self._show(f", held-out answer {self.measured} of {len(self.trainer.eval_dataset)}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Shows that it is over."""
        self.measured = 0
        self._show()

    def _show(self, doing: str = "") -> None:
        budget = self.trainer.budget
        self.show(budget.progress(self.trainer.args), f"{budget.mask_rows:,} mask rows{doing or self.note}")


def _faster_dtype(device: torch.device) -> str:
    """The dtype in which the device multiplies matrices faster: some CPUs compute in bfloat16, others emulate it."""
    if device.type == "cuda":
        return "bfloat16"
    seconds = {}
    for name in ("float32", "bfloat16"):
        matrix = torch.randn(512, 1024, dtype=getattr(torch, name))
        runs = []
        for _ in range(5):
            start = time.perf_counter()
            matrix @ matrix.T
            runs.append(time.perf_counter() - start)
        seconds[name] = min(runs)
    return min(seconds, key=lambda name: seconds[name])


def _read(file: Path) -> dict[str, Any]:
    """What a run wrote down. Raises `ValueError` for a damaged file."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{str(file)!r} is damaged: choose a new folder.")
    return content
