"""`wedlm adapt`: a mask adapter for a model, from nothing but the model.

Stages: write the model's own answers, train the adapter on them, measure. Everything is kept in the output folder as
it is made, so that a run may be stopped at any moment: the same call goes on.
"""

import errno
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from ..checkpoints.card import CARD_NAME, write_card
from ..checkpoints.files import check_room, write_text, written_whole
from ..checkpoints.find import ADAPTER_FILE, read_adapter_config
from ..checkpoints.loading import FASTEST, find_device, load_config_dict, load_model, load_tokenizer
from ..console.progress import Show, stage
from ..generation.state import keeps_state
from ..training.saving import only_writer
from .adapt_config import AdaptConfig
from .adapter_files import WEIGHTS_NAME, MaskAdapterSettings, base_of, compare_bases
from .answers import (
    Answer,
    AnswerConfig,
    AnswerCount,
    DamagedAnswersError,
    check_conversations,
    read_answers,
    read_user_prompts,
    write_answers,
)
from .attach import add_mask_adapter, add_root_head, check_answers, load_mask_adapter, save_mask_adapter
from .budget import MaskTrainingConfig
from .distillation import MaskDistillation
from .model_card import acceptance_table, model_card, read_log
from .pace import (
    ENOUGH_ROWS,
    FEW_ROWS,
    ROOT_SHARE,
    ROWS_PER_TOKEN,
    Clock,
    Pace,
    Schedule,
    default_schedule,
    faster_dtype,
    least_minutes,
    measure_pace,
)
from .pace import schedule as scheduled
from .root_head import ROOT_ROWS
from .trainer import MaskAdapterTrainer

FORMAT = 5  # of the folder `work`
HELD_OUT = 24  # greedy answers at most that are not trained on, and no more than every tenth answer
ROOT_WIDTH = 1024  # of a new root head
ROOM = 1_000_000_000  # bytes for answers, checkpoints and the adapter

Measure = Callable[[Any, PreTrainedTokenizerBase, Sequence[Sequence[int]], int], dict[str, Any]]
"""Measures AR and verified decoding of the prompts, with so many new tokens at most: a table (see [`model_card`])."""
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
    clock: Clock = time.monotonic,
) -> dict[str, Any]:
    """Trains a mask adapter for a model on the model's own answers, going on with what `output_dir` holds already.

    The base is only read. In the end `output_dir` holds `adapter_config.json`, `adapter_model.safetensors` and the
    model card; beside them `work`, which may be deleted.

    Args:
        base: folder or Hub id of a causal language model, or a GGUF file.
        output_dir: new, empty, or that of an earlier call with the same base.
        config: budget and settings.
        measure: makes the table of the model card; without it the card states tokens per forward alone.
        draw: draws tokens per forward against training for the model card, beside their table.
        console: shows progress and the time left.
        clock: seconds; measures machine and budget.

    Returns:
        What was made and measured: `output_dir` and `base`; `answers`, `answer_tokens`, `answer_seconds`, `held_out`,
        `mask_rows` and `training_seconds`; `acceptance`, tokens per forward against mask rows, and `table`, what
        `measure` found (empty without it), both with `columns` and `rows`.

    Raises:
        FileExistsError: for an `output_dir` that holds something else.
        OSError: for a base that cannot be read, a disk without room, and while another run writes into `output_dir`.
        ValueError: for an unsupported base, unreadable prompts or answers, conversations that its chat template
            refuses, settings other than those of the run it goes on, and a budget too small for any answer.
    """
    run = _Run(os.fspath(base), Path(output_dir), config, console or Console(stderr=True), clock)
    run.check()
    try:
        with only_writer(run.work):
            if any(run.is_left(name) for name in ("answer", "train", "measure")):
                run.measure_machine()
            run.once("answer", run.answer)
            run.once("train", run.train)
            run.publish()
            run.once("measure", lambda: run.measure(measure))
            return run.finish(draw)
    except DamagedAnswersError as error:  # in a file of its own
        raise ValueError(f"{error} {str(error.file)!r} is damaged: delete it, or choose a new folder.") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                f"The disk of {str(run.out)!r} is full. What was done is kept: make room, and the same call goes on."
            ) from error
        raise


class _Run:
    """The stages of [`adapt`]. Each looks at the disk for what it has done before."""

    def __init__(self, base: str, out: Path, config: AdaptConfig, console: Console, clock: Clock):
        self.base, self.out, self.work, self.config = base, out, out / "work", config
        self.console, self.clock = console, clock
        self.identity_file, self.state_file = self.work / "adapt.json", self.work / "state.json"
        self.answers, self.trained_on = self.work / "answers.jsonl", self.work / "training.jsonl"
        self.held_out = self.work / "heldout.jsonl"
        self.device = find_device(config.device)
        self.is_gpu = self.device.type == "cuda"
        self.state: dict[str, Any] = {
            "measuring_seconds": 0.0,
            "answer_seconds": 0.0,
            "root_seconds": 0.0,
            "root_share": ROOT_SHARE,
            "table": {},
            "done": {},
        }

    def say(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, highlight=False, markup=False)

    # Before any work.

    def check(self) -> None:
        """Raises for what would otherwise end the run after hours of work."""
        config, processes = self.config, os.environ.get("WORLD_SIZE", "1")
        if processes != "1":
            raise ValueError(
                f"`wedlm adapt` is one process, got WORLD_SIZE={processes}: call it without a launcher. "
                "`MaskAdapterTrainer` trains on several."
            )
        self.prompts = None if config.prompts is None else read_user_prompts(config.prompts)
        self.budget: dict[str, Any] = {"minutes": config.minutes, "tokens": config.tokens}
        answers: list[Answer] = []
        if config.answers is not None:
            self.budget["answers"] = hashlib.sha256(config.answers.read_bytes()).hexdigest()
            answers = read_answers(config.answers)
            if not any(len(answer["response_ids"]) > 1 for answer in answers):
                raise ValueError(f"{str(config.answers)!r} holds no answer of at least two tokens.")
        self.identity = {"format": FORMAT} | config.identity(self.base)
        if self.out.exists() and not self.out.is_dir():
            raise FileExistsError(f"The output must be a folder, got the file {str(self.out)!r}.")
        if self.identity_file.exists():
            self._check_earlier(_read(self.identity_file))
        elif self.out.exists() and {path.name for path in self.out.iterdir()} - {"work"}:
            raise FileExistsError(
                f"The output folder must be new, empty, or of an earlier run, got {str(self.out)!r}."
            )
        if self.state_file.exists():
            self.state |= _read(self.state_file)
        self.state.setdefault("dtype", faster_dtype(self.device, self.clock))
        load_config_dict(self.base, revision=config.revision, gguf_file=config.gguf_file)
        self.tokenizer = load_tokenizer(self.base, revision=config.revision, gguf_file=config.gguf_file)
        check_conversations(self.tokenizer, self.prompts or ())
        check_room(self.out, ROOM)
        if self.is_left("train"):
            MaskDistillation(self.model)  # it may be one that cannot carry an adapter, or not train one
            self._check_base()
            check_answers(self.model, answers)
            self.state["root_share"] = ROOT_SHARE if self.model.mask_adapter.root_head is not None else 0.0

    def _check_earlier(self, before: dict[str, Any]) -> None:
        """Raises `ValueError` unless this run can go on with an earlier one."""
        if different := [name for name, value in self.identity.items() if before.get(name) != value]:
            names = [name for name in different if name != "prompts"]
            changes = [f"{name}: {before.get(name)!r}, not {self.identity[name]!r}" for name in names]
            changes += ["other prompts"] * ("prompts" in different)
            raise ValueError(
                f"{str(self.out)!r} holds a run with other settings ({', '.join(changes)}): choose a new folder."
            )

    def _check_base(self) -> None:
        """Raises `ValueError` where the base has other weights than when the run began, which wrote its answers."""
        own = base_of(self.model)
        try:
            compare_bases(own, self.state.setdefault("base", own))
        except ValueError as error:
            raise ValueError(
                f"The weights of {self.base!r} changed since the run in {str(self.out)!r} began: choose a new folder."
            ) from error

    def save_state(self, **changes: Any) -> None:
        """Keeps what the stages cannot see on the disk."""
        self.state |= changes
        write_text(self.identity_file, json.dumps(self.identity, indent=2) + "\n")
        write_text(self.state_file, json.dumps(self.state, indent=2) + "\n")

    def is_left(self, name: str) -> bool:
        """Whether a stage is not done for this budget."""
        return bool(self.state["done"].get(name) != self.budget)

    def once(self, name: str, run: Callable[[], dict[str, Any] | None]) -> None:
        """Runs a stage that is left, and keeps what it returns; None: it did nothing."""
        if self.is_left(name) and (made := run()) is not None:
            self.save_state(**made, done={**self.state["done"], name: self.budget})

    # What the stages share.

    def load(self, dtype: str) -> Any:
        """The base."""
        found = {"revision": self.config.revision, "gguf_file": self.config.gguf_file}
        return load_model(self.base, **found, dtype=dtype, device=self.device)

    @cached_property
    def model(self) -> Any:
        """The base with the adapter to train, as it is at the start."""
        config, model = self.config, self.load(self.state["dtype"])
        torch.manual_seed(config.seed)
        if config.start is not None:
            load_mask_adapter(model, config.start, is_trainable=True)
        else:
            shape: dict[str, Any] = {"rank": config.rank, "head_width": config.head_width}
            shape = {name: value for name, value in shape.items() if value is not None}
            add_mask_adapter(model, MaskAdapterSettings(**shape))
        if not keeps_state(model):  # there nothing reads a root head: drafts have no branches
            add_root_head(model, ROOT_WIDTH)
        return model

    @cached_property
    def writer(self) -> Any:
        """The base as it writes many answers fastest. The adapter on it changes nothing: without masks, it does not
        act."""
        dtype = self.state["dtype"]  # on a CPU whose 16 bits are fast; on others, packed layers may be faster
        model = self.load(FASTEST if self.is_gpu or dtype == "float32" else dtype)
        add_mask_adapter(model, MaskAdapterSettings(rank=1, head_width=0))
        return model

    @property
    def mask_rows(self) -> int | None:
        """That a budget of tokens trains."""
        return None if self.config.tokens is None else ROWS_PER_TOKEN * self.config.tokens

    @cached_property
    def schedule(self) -> Schedule:
        """What becomes of the budget, at the pace of [`measure_machine`]."""
        if (minutes := self.config.minutes) is None:
            return default_schedule(self.is_gpu, self.mask_rows or 0)
        seconds = max(60 * minutes - self.state["measuring_seconds"], 30 * minutes)
        has_answers, share = self.config.answers is not None, self.state["root_share"]
        return scheduled(seconds, Pace.read(self.state["pace"]), self.is_gpu, has_answers, share)

    # The stages.

    def measure_machine(self) -> None:
        """Measures what the base costs here, unless an earlier call has done so, and says what the budget gives."""
        minutes = self.config.minutes
        if minutes is None:
            return
        machine = f"{self.device}, {torch.get_num_threads()} threads, {self.state['dtype']}"
        if self.state.get("machine") != machine:
            self.say("Measuring this machine …")
            began, distillation = self.clock(), MaskDistillation(self.model)
            pace = measure_pace(distillation, self.writer, self.clock, self.is_gpu, patience=0.6 * minutes)
            seconds = self.state["measuring_seconds"] + self.clock() - began
            self.save_state(machine=machine, pace=asdict(pace), measuring_seconds=seconds)
        made, writing = self.schedule, self.schedule.answer_seconds / 60
        rows = made.mask_rows if self.mask_rows is None else min(self.mask_rows, made.mask_rows)
        self.say(
            f"{minutes:g} minutes on this machine: {writing:.1f} for answers, the others for training, about {rows:,} "
            "mask rows."
        )
        if rows < FEW_ROWS:
            few = {"minutes": made.mask_rows < ENOUGH_ROWS, "tokens": rows < made.mask_rows}
            least = {"minutes": minutes * ENOUGH_ROWS / made.mask_rows, "tokens": ENOUGH_ROWS / ROWS_PER_TOKEN}
            enough = " ".join(f"--{name} {math.ceil(least[name])}" for name in few if few[name])
            self.say(
                "That gives next to nothing: 13,000 rows brought SmolLM2-135M to 1.1 tokens per forward, 85,000 to "
                f"1.5. `{enough}` trains {ENOUGH_ROWS:,} here."
            )

    def answer(self) -> dict[str, Any]:
        """The model's own answers, and a few of them held out; a larger budget adds to what there is."""
        if self.config.answers is not None:
            self._split(read_answers(self.config.answers))
            return {}
        schedule, before = self.schedule, self.state["answer_seconds"]
        size = self.state.setdefault("batch_size", schedule.batch_size)
        began, note, written, tokens = self.clock(), "", 0.0, 0

        def seconds() -> float:
            return float(before + self.clock() - began)

        def is_over() -> bool:
            used, most = seconds(), schedule.answer_seconds
            # On a machine with other work, answers may take longer than was measured: few teach little.
            if tokens < schedule.answer_tokens / 2:
                most = max(most, 30 * (self.config.minutes or 0.0))
            share = max(used / schedule.answer_seconds if most else 0.0, written)
            slow = ", which takes longer than was measured" if schedule.answer_seconds <= used < most else ""
            show(min(share, 0.99) if slow else share, (note or "the first batch") + slow)
            return most > 0 and used >= most

        with stage(self.console, "[1/3] The model's own answers") as show:
            config = AnswerConfig(batch_size=size, seed=self.config.seed)
            for count in write_answers(self.writer, self.tokenizer, self.answers, self.prompts, config, is_over):
                self.save_state(answer_seconds=seconds())
                tokens = count.tokens
                written = count.tokens / self.config.tokens if self.config.tokens else 0.0
                note = f"{count.answers:,} answers, {count.tokens:,} tokens" if count.answers else ""
                if written >= 1 and count.answers:
                    break
            show(1.0, note)
        self._check_answers(count)
        self._split(read_answers(self.answers))
        return {}

    def _check_answers(self, count: AnswerCount) -> None:
        """Raises `ValueError` where there are none; says so where none of them ended."""
        if not count.answers:
            least = max(least_minutes(Pace.read(self.state["pace"])), math.ceil(2 * (self.config.minutes or 0)))
            raise ValueError(
                f"{self.config.minutes:g} minutes are too few for a batch of answers on this machine. The same call "
                f"with `--minutes {least}` or more goes on."
            )
        if not count.ended:
            self.say(
                f"None of the {count.answers:,} answers ended within {AnswerConfig().max_new_tokens} tokens. The "
                "adapter learns them as they are; if the model is for chats, look at its chat template and end tokens."
            )

    def _split(self, answers: Sequence[Answer]) -> None:
        """Holds out some greedy answers, none of them to a prompt that is trained on, now or in an earlier call."""
        prompts = {tuple(answer["prompt_ids"]): None for answer in read_answers(self.held_out)}
        seen = {tuple(answer["prompt_ids"]) for answer in read_answers(self.trained_on)}
        fresh = [tuple(answer["prompt_ids"]) for answer in answers if answer.get("greedy")]
        fresh = [prompt for prompt in dict.fromkeys(fresh) if prompt not in seen and prompt not in prompts]
        count = min(HELD_OUT, max(1, len(answers) // 10)) - len(prompts)
        if count > 0 and len(fresh) > 1:
            prompts |= dict.fromkeys(fresh[:: max(2, len(fresh) // count)][:count])
        parts: dict[bool, list[Answer]] = {True: [], False: []}
        for answer in answers:
            is_held_out = tuple(answer["prompt_ids"]) in prompts
            if answer.get("greedy") or not is_held_out:
                parts[is_held_out].append(answer)
        for file, part in ((self.held_out, parts[True]), (self.trained_on, parts[False])):
            write_text(file, "".join(json.dumps(answer) + "\n" for answer in part))

    def train(self) -> dict[str, Any]:
        """The adapter, from the newest checkpoint on."""
        schedule, minutes = self.schedule, self.config.minutes
        # Answers may have taken longer than their share: an adapter without training is of no use.
        used = sum(self.state[f"{name}_seconds"] for name in ("measuring", "answer", "root")) / 60
        left = None if minutes is None else max(minutes / 2, minutes - used) * (1 - self.state["root_share"])
        args = MaskTrainingConfig(
            output_dir=str(self.work / "training"),
            minutes=left,
            mask_rows=self.mask_rows,
            batch_slots=schedule.batch_slots,
            warmup_steps=schedule.warmup_steps,
            seed=self.config.seed,
            disable_tqdm=True,
            use_cpu=not self.is_gpu,
        )
        held_out = _beginnings(read_answers(self.held_out), schedule.positions)
        trainer = MaskAdapterTrainer(self.model, args, read_answers(self.trained_on), held_out, clock=self.clock)
        trainer.remove_callback(PrinterCallback)  # the progress line says what it would, and log.jsonl keeps it
        if schedule.evaluation_seconds:
            trainer.budget.last["evaluation"] = schedule.evaluation_seconds
        has_checkpoint = any(Path(str(args.output_dir)).glob("checkpoint-*"))
        with stage(self.console, "[2/3] Training the mask adapter") as show:
            progress = _ShowProgress(trainer, show)
            trainer.add_callback(progress)
            trainer.show_root = progress.on_root
            try:
                trainer.train(resume_from_checkpoint=has_checkpoint)
            finally:
                if trainer.root_seconds:
                    self.save_state(root_seconds=self.state["root_seconds"] + trainer.root_seconds)
            show(1.0, f"{trainer.budget.mask_rows:,} mask rows")
        save_mask_adapter(self.model, self.work / "adapter")
        seconds = trainer.budget.seconds + self.state["root_seconds"]
        return {"mask_rows": trainer.budget.mask_rows, "training_seconds": seconds}

    def publish(self) -> None:
        """The adapter where users look for it."""
        for name in (WEIGHTS_NAME, ADAPTER_FILE):
            with written_whole(self.out / name) as unfinished:
                shutil.copyfile(self.work / "adapter" / name, unfinished)

    def measure(self, measure: Measure | None) -> dict[str, Any] | None:
        """The table of the model card."""
        held_out, (count, tokens) = read_answers(self.held_out), self.schedule.table
        if measure is None or not held_out:
            return None
        if not count:
            self.say("[3/3] No table: it would take longer than the budget allows. `wedlm report` makes one.")
            return {"table": {}}
        self.say("[3/3] Measuring …")
        for name in ("model", "writer"):
            self.__dict__.pop(name, None)  # its memory is free
        decoder = self.load(FASTEST)
        load_mask_adapter(decoder, self.out)
        prompts = [answer["prompt_ids"] for answer in held_out[:count]]
        table = measure(decoder, self.tokenizer, prompts, tokens)
        notes = [*table.get("notes", ()), self._outlook()]
        return {"table": {name: table[name] for name in ("caption", "columns", "rows")} | {"notes": notes}}

    def _outlook(self) -> str:
        """What a larger budget would bring."""
        minutes, tokens, rows = self.config.minutes, self.config.tokens, self.state["mask_rows"]
        twice = f"`--minutes {2 * minutes:g}`" if minutes else f"`--tokens {2 * tokens}`" if tokens else "more"
        return (
            f"{rows:,} mask rows were trained, and {twice} trains twice as many. SmolLM2-135M gave 1.1 tokens per "
            "forward after 13,000, 1.5 after 85,000 and 2.0 after 1,400,000."
        )

    def finish(self, draw: Draw | None) -> dict[str, Any]:
        """The figure and the model card; returns what [`adapt`] does."""
        answers, held_out = read_answers(self.trained_on), read_answers(self.held_out)
        settings = read_adapter_config(self.out)
        entries, table = read_log(self.work / "training" / "log.jsonl"), self.state["table"]
        curve, figure = acceptance_table(entries), None
        facts = {
            "answers": len(answers),
            "answer_tokens": sum(len(answer["response_ids"]) for answer in answers),
            "held_out": len(held_out),
            **{name: self.state[name] for name in ("mask_rows", "training_seconds", "answer_seconds")},
            **{name: settings[name] for name in ("rank", "head_width", "root_width")},
            "seed": self.config.seed,
        }
        if draw is not None and curve["rows"]:
            draw(entries, self.out)
            figure = "acceptance.png"
        asked = {"is_chat": self.tokenizer.chat_template is not None, "gguf_file": self.config.gguf_file}
        card = model_card(self.base, str(self.out), facts | asked, curve, table, figure)
        if not write_card(self.out, card):
            self.say(f"{self.out / CARD_NAME} was edited: it stays as it is.")
        return {"output_dir": str(self.out), "base": self.base, **facts, "acceptance": curve, "table": table}


class _ShowProgress(TrainerCallback):
    """Shows how much of the budget is used."""

    def __init__(self, trainer: MaskAdapterTrainer, show: Show):
        self.trainer, self.show, self.note, self.measured = trainer, show, "", 0
        self.has_root = trainer.model.model.mask_adapter.root_head is not None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "accepted" in logs:
            self.note = f", {logs['accepted']:.2f} drafts accepted"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measured += 1
        self._show(f", held-out answer {self.measured} of {len(self.trainer.eval_dataset)}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measured = 0
        self._show()

    def on_root(self, rows: int, found: dict[str, float]) -> None:
        """Shows the training of the root head."""
        done = min(1.0, rows / (ROOT_ROWS * self.trainer.budget.mask_rows))
        note = f"root head, {found['accuracy_root']:.0%} of drafts right" if found else "root head, reading answers"
        self.show(1 - ROOT_SHARE * (1 - done), note)

    def _show(self, doing: str = "") -> None:
        budget, share = self.trainer.budget, 1 - ROOT_SHARE * self.has_root
        self.show(share * budget.elapsed(self.trainer.args), f"{budget.mask_rows:,} mask rows{doing or self.note}")


def _beginnings(answers: Sequence[Answer], positions: int) -> list[Answer]:
    """As many answers as have so many tokens together; at least four, then cut short, where there are four."""
    most, kept = max(positions // 4, 16), []
    for answer in answers:
        if positions > 0:
            kept.append(answer | {"response_ids": answer["response_ids"][: min(most, positions)]})
            positions -= len(kept[-1]["response_ids"])
    return kept


def _read(file: Path) -> dict[str, Any]:
    """What a run wrote down. Raises `ValueError` for a damaged file."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{str(file)!r} is damaged: choose a new folder.")
    return content
