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
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from ..checkpoints.card import CARD_NAME, write_card
from ..checkpoints.files import check_room, write_text, written_whole
from ..checkpoints.find import ADAPTER_FILE, read_adapter_config
from ..checkpoints.loading import FASTEST, find_device, load_config_dict, load_model, load_tokenizer
from ..console.progress import Show, stage
from ..generation.state import keeps_state
from ..training.cpu import FASTER, bf16_speedup
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
from .budget import Clock, MaskTrainingConfig
from .distillation import MaskDistillation
from .model_card import acceptance_table, model_card, read_log
from .trainer import MaskAdapterTrainer

FORMAT = 1  # of the folder `work`
HELD_OUT = 24  # greedy answers at most that are not trained on, and no more than every tenth answer
ROOT_WIDTH = 1024  # of a new root head
ROOM = 1_000_000_000  # bytes for answers, checkpoints and the adapter

# Shares of `--minutes`. What is left is for evaluations, checkpoints and loading. A token of an answer costs about as
# much more on a slower machine, or for a larger model, as the masks that learn from it do: so the shares are fixed.
ANSWER_SHARE, MASK_SHARE, ROOT_SHARE, TABLE_SHARE = 0.2, 0.55, 0.1, 0.05
ROWS_PER_TOKEN = 3  # mask rows that `--tokens` trains for each token of an answer
BATCH_SIZE, MOST_SLOTS = {"cpu": 48, "cuda": 256}, {"cpu": 400, "cuda": 8192}
LEAST_SLOTS, STEPS = 120, 300  # masks of a step, and steps that a short training should have
# An evaluation has one mask behind a token of held-out answers for so many trained ones, within limits.
ROWS_PER_EVALUATED, LEAST_POSITIONS, MOST_EVALUATED = 50, 64, 16_000
TABLE_PROMPTS, TABLE_TOKENS, DECODERS = 12, 128, 3
LEAST_ANSWER = 32  # tokens of each answer of the first batch, though the minutes for answers are over
LEAST_PROMPTS = 2  # of the table, whatever they take

# What SmolLM2-135M decoded after so many mask rows, with four drafts a step (examples/smollm2).
GAINS = {13_000: 1.3, 40_000: 1.65, 460_000: 1.8, 2_400_000: 2.0}

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
        clock: seconds; measures the budget.

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
            run.announce()
            run.once("answer", run.answer)
            run.once("train", run.train)
            run.publish()
            if measure is not None:
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


@dataclass
class _State:
    """What the stages of a run cannot see on the disk, kept in `work/state.json`."""

    dtype: str = ""  # that the masks train in
    base: dict[str, Any] = field(default_factory=dict)  # what tells the base, see [`base_of`]
    answer_seconds: float = 0.0
    root_seconds: float = 0.0
    training_seconds: float = 0.0  # of masks and root head
    mask_rows: int = 0
    table: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)  # the budget that each stage was done for


class _Run:
    """The stages of [`adapt`]. Each looks at the disk for what it has done before."""

    def __init__(self, base: str, out: Path, config: AdaptConfig, console: Console, clock: Clock):
        self.base, self.out, self.work, self.config = base, out, out / "work", config
        self.console, self.clock = console, clock
        self.identity_file, self.state_file = self.work / "adapt.json", self.work / "state.json"
        self.answers, self.trained_on = self.work / "answers.jsonl", self.work / "training.jsonl"
        self.held_out = self.work / "heldout.jsonl"
        self.device = find_device(config.device)
        self.seconds = None if config.minutes is None else 60 * config.minutes
        self.state = _State()
        self.model: Any = None  # the base with the adapter to train, while training is left

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
            self.state = _State(**_read(self.state_file, {each.name for each in fields(_State)}))
        if not self.state.dtype:
            is_bf16 = self.device.type == "cuda" or bf16_speedup() > FASTER
            self.state.dtype = "bfloat16" if is_bf16 else "float32"
        load_config_dict(self.base, revision=config.revision, gguf_file=config.gguf_file)
        self.tokenizer = load_tokenizer(self.base, revision=config.revision, gguf_file=config.gguf_file)
        check_conversations(self.tokenizer, self.prompts or ())
        check_room(self.out, ROOM)
        if self.is_left("train"):
            self.model = self._trainable()
            MaskDistillation(self.model)  # it may be one that cannot carry an adapter, or not train one
            self._check_base()
            check_answers(self.model, answers)

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
        self.state.base = self.state.base or own
        try:
            compare_bases(own, self.state.base)
        except ValueError as error:
            raise ValueError(
                f"The weights of {self.base!r} changed since the run in {str(self.out)!r} began: choose a new folder."
            ) from error

    def save_state(self) -> None:
        """Keeps what the stages cannot see on the disk."""
        write_text(self.identity_file, json.dumps(self.identity, indent=2) + "\n")
        write_text(self.state_file, json.dumps(asdict(self.state), indent=2) + "\n")

    def is_left(self, name: str) -> bool:
        """Whether a stage is not done for this budget."""
        return bool(self.state.done.get(name) != self.budget)

    def once(self, name: str, run: Callable[[], None]) -> None:
        """Runs a stage that is left."""
        if self.is_left(name):
            run()
            self.state.done[name] = self.budget
            self.save_state()

    def announce(self) -> None:
        """Says what becomes of the minutes."""
        if self.seconds is not None and self.is_left("train"):
            answers, masks, root = (share * self.seconds / 60 for share in self.shares())
            parts = [f"{answers:.3g} for the model's own answers"] * (answers > 0)
            parts += [f"{masks:.3g} for masks", *[f"{root:.3g} for the root head"] * (root > 0)]
            self.say(f"{self.config.minutes:g} minutes: {', '.join(parts)}.")

    # What the stages share.

    def load(self, dtype: str) -> Any:
        """The base."""
        found = {"revision": self.config.revision, "gguf_file": self.config.gguf_file}
        return load_model(self.base, **found, dtype=dtype, device=self.device)

    def _trainable(self) -> Any:
        """The base with the adapter to train, as it is at the start."""
        config, model = self.config, self.load(self.state.dtype)
        torch.manual_seed(config.seed)
        if config.start is not None:
            # Trained further on this model's answers, it is this model's, whichever it was begun for.
            load_mask_adapter(model, config.start, any_base=True, is_trainable=True)
        else:
            shape: dict[str, Any] = {"rank": config.rank, "head_width": config.head_width}
            shape = {name: value for name, value in shape.items() if value is not None}
            add_mask_adapter(model, MaskAdapterSettings(**shape))
        width = config.root_width
        if width is None:
            width = ROOT_WIDTH if config.start is None else 0
        if width and not keeps_state(model):  # there nothing reads a root head: drafts have no branches
            add_root_head(model, width)
        return model

    def _writer(self) -> Any:
        """The base as it writes many answers fastest. The adapter on it changes nothing: without masks, it does not
        act."""
        dtype = self.state.dtype  # on a CPU whose 16 bits are fast; on others, packed layers may be faster
        model = self.load(FASTEST if self.device.type == "cuda" or dtype == "float32" else dtype)
        add_mask_adapter(model, MaskAdapterSettings(rank=1, head_width=0))
        return model

    def shares(self) -> tuple[float, float, float]:
        """Of the minutes, for answers, masks and root head."""
        has_answers, has_root = self.config.answers is not None, self.model.mask_adapter.root_head is not None
        answers, root = ANSWER_SHARE * (not has_answers), ROOT_SHARE * has_root
        return answers, ANSWER_SHARE + MASK_SHARE + ROOT_SHARE - answers - root, root

    # The stages.

    def answer(self) -> None:
        """The model's own answers, and a few of them held out; a larger budget adds to what there is."""
        if self.config.answers is not None:
            self._split(read_answers(self.config.answers))
            return
        before, began, count = self.state.answer_seconds, self.clock(), AnswerCount(0, 0, 0)
        least, most = (0.0, math.inf) if self.seconds is None else (ANSWER_SHARE * self.seconds, self.seconds / 2)

        def spent() -> float:
            return before + self.clock() - began

        def is_over(written: int) -> bool:
            # Without an answer, nothing can be learned.
            is_enough = self.seconds is not None and (count.answers > 0 or written >= LEAST_ANSWER)
            share = count.tokens / self.config.tokens if self.config.tokens else 0.0
            show(max(min(spent() / least, 0.99) if least else 0.0, share), note)
            return spent() >= (least if is_enough else most)

        with stage(self.console, "[1/3] The model's own answers") as show:
            note = "the first batch"
            config = AnswerConfig(batch_size=BATCH_SIZE.get(self.device.type, 48), seed=self.config.seed)
            for count in write_answers(self._writer(), self.tokenizer, self.answers, self.prompts, config, is_over):
                self.state.answer_seconds = spent()
                self.save_state()
                if count.answers:
                    note = f"{count.answers:,} answers, {count.tokens:,} tokens"
                if self.config.tokens and count.tokens >= self.config.tokens:
                    break
            show(1.0, note)
        self._check_answers(count)
        self._split(read_answers(self.answers))

    def _check_answers(self, count: AnswerCount) -> None:
        """Raises `ValueError` where there are none; says so where none of them ended."""
        if not count.answers:
            self.state.answer_seconds = 0.0  # nothing came of them
            self.save_state()
            raise ValueError(
                f"{self.config.minutes:g} minutes are too few for a batch of answers on this machine. The same call "
                f"with `--minutes {math.ceil(4 * (self.config.minutes or 0))}` or more goes on."
            )
        if not count.ended:
            self.say(
                f"None of {count.answers:,} answers ended within {AnswerConfig().max_new_tokens} tokens or in time. "
                "The adapter learns them as they are; if the model is for chats, look at its chat template and end "
                "tokens."
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

    def train(self) -> None:
        """The adapter, from the newest checkpoint on."""
        answers, seconds = read_answers(self.trained_on), self.seconds
        _, masks, root = self.shares()
        # A larger budget trains the root head anew.
        root_seconds = None if seconds is None else max(root * seconds - self.state.root_seconds, root * seconds / 2)
        rows = ROWS_PER_TOKEN * sum(len(answer["response_ids"]) for answer in answers)  # about
        count = self.config.num_masks or self.model.mask_adapter.settings.num_masks
        args = MaskTrainingConfig(
            output_dir=str(self.work / "training"),
            minutes=None if seconds is None else masks * seconds / 60,
            root_minutes=None if not root_seconds else root_seconds / 60,
            mask_rows=None if self.config.tokens is None else ROWS_PER_TOKEN * self.config.tokens,
            num_masks=count,
            cut_stride=max(MaskTrainingConfig.cut_stride, count // 2),  # a batch may have several answers
            batch_slots=min(max(rows // STEPS, LEAST_SLOTS), MOST_SLOTS.get(self.device.type, 400)),
            seed=self.config.seed,
            disable_tqdm=True,
            use_cpu=self.device.type != "cuda",
        )
        positions = max(min(rows // ROWS_PER_EVALUATED, MOST_EVALUATED) // count, LEAST_POSITIONS)
        held_out = _beginnings(read_answers(self.held_out), positions)
        trainer = MaskAdapterTrainer(self.model, args, answers, held_out, clock=self.clock)
        trainer.remove_callback(PrinterCallback)  # the progress line says what it would, and log.jsonl keeps it
        has_checkpoint = any(Path(str(args.output_dir)).glob("checkpoint-*"))
        with stage(self.console, "[2/3] Training the mask adapter") as show:
            progress = _ShowProgress(trainer, show, self.say, root / (masks + root))
            trainer.add_callback(progress)
            trainer.show_root = progress.on_root
            try:
                trainer.train(resume_from_checkpoint=has_checkpoint)
            finally:
                if trainer.root_seconds:
                    self.state.root_seconds += trainer.root_seconds
                    self.save_state()
            show(1.0, f"{trainer.budget.mask_rows:,} mask rows")
        save_mask_adapter(self.model, self.work / "adapter")
        self.state.mask_rows = trainer.budget.mask_rows
        self.state.training_seconds = trainer.budget.seconds + self.state.root_seconds

    def publish(self) -> None:
        """The adapter where users look for it."""
        for name in (WEIGHTS_NAME, ADAPTER_FILE):
            with written_whole(self.out / name) as unfinished:
                shutil.copyfile(self.work / "adapter" / name, unfinished)

    def measure(self, measure: Measure) -> None:
        """The table of the model card: a few held-out prompts at least."""
        self.model, self.state.table = None, {}  # its memory is free
        prompts = [answer["prompt_ids"] for answer in read_answers(self.held_out)]
        if not prompts:
            return
        self.say("[3/3] Measuring …")
        decoder = self.load(FASTEST)
        load_mask_adapter(decoder, self.out)
        count, tokens = self._table_size(decoder, prompts[0])
        table = measure(decoder, self.tokenizer, prompts[:count], tokens)
        kept = {name: table[name] for name in ("caption", "columns", "rows")}
        self.state.table = kept | {"notes": [*table.get("notes", ()), self._outlook()]}

    def _table_size(self, decoder: Any, prompt: list[int]) -> tuple[int, int]:
        """How many prompts the table may have, and new tokens of each: what fits into its share of the minutes."""
        if self.seconds is None:
            return TABLE_PROMPTS, TABLE_TOKENS
        began, ids = self.clock(), torch.tensor([prompt], device=self.device)
        new = decoder.generate(ids, strategy="ar", do_sample=False, max_new_tokens=16).shape[1] - ids.shape[1]
        positions = TABLE_SHARE * self.seconds / max((self.clock() - began) / new, 1e-9) / DECODERS
        count = int(positions / TABLE_TOKENS) - 1  # one more warms up
        if count >= LEAST_PROMPTS:
            return min(count, TABLE_PROMPTS), TABLE_TOKENS
        return LEAST_PROMPTS, min(max(16, int(positions / (LEAST_PROMPTS + 1))), TABLE_TOKENS)

    def _outlook(self) -> str:
        """What a larger budget would bring."""
        minutes, tokens, rows = self.config.minutes, self.config.tokens, self.state.mask_rows
        twice = f"`--minutes {2 * minutes:g}`" if minutes else f"`--tokens {2 * tokens}`" if tokens else "more"
        return f"{rows:,} mask rows were trained, and {twice} trains twice as many. {forecast(2 * rows)}"

    def finish(self, draw: Draw | None) -> dict[str, Any]:
        """The figure and the model card; returns what [`adapt`] does."""
        answers, held_out = read_answers(self.trained_on), read_answers(self.held_out)
        settings, state = read_adapter_config(self.out), self.state
        entries, curve, figure = read_log(self.work / "training" / "log.jsonl"), {}, None
        curve = acceptance_table(entries)
        facts = {
            "answers": len(answers),
            "answer_tokens": sum(len(answer["response_ids"]) for answer in answers),
            "held_out": len(held_out),
            **{name: getattr(state, name) for name in ("mask_rows", "training_seconds", "answer_seconds")},
            **{name: settings[name] for name in ("rank", "head_width", "root_width")},
            "seed": self.config.seed,
        }
        if draw is not None and curve["rows"]:
            draw(entries, self.out)
            figure = "acceptance.png"
        asked = {"is_chat": self.tokenizer.chat_template is not None, "gguf_file": self.config.gguf_file}
        card = model_card(self.base, str(self.out), facts | asked, curve, state.table, figure)
        if not write_card(self.out, card):
            self.say(f"{self.out / CARD_NAME} was edited: it stays as it is.")
        return {"output_dir": str(self.out), "base": self.base, **facts, "acceptance": curve, "table": state.table}


def forecast(rows: int) -> str:
    """What so many trained mask rows brought where that was measured."""
    found = np.interp(math.log(max(rows, 1)), [0, *(math.log(known) for known in GAINS)], [1, *GAINS.values()])
    return f"On all kinds of questions, SmolLM2-135M has about {found:.1f} tokens per forward after {rows:,} rows."


class _ShowProgress(TrainerCallback):
    """Shows how much of the budget is used, and once its pace is known, what it brings."""

    def __init__(self, trainer: MaskAdapterTrainer, show: Show, say: Callable[[str], None], root_share: float):
        self.trainer, self.show, self.say, self.root_share = trainer, show, say, root_share
        self.note, self.measured, self.has_forecast = "", 0, trainer.args.minutes is None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "accepted" in logs:
            self.note = f", {logs['accepted']:.2f} drafts accepted"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        budget, share = self.trainer.budget, self.trainer.budget.progress(args)
        if not self.has_forecast and share >= 0.05:
            self.has_forecast, rows = True, int(float(f"{budget.mask_rows / share:.2g}"))
            self.say(f"About {rows:,} mask rows in all. {forecast(rows)}")
        self._show()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measured += 1
        self._show(f", held-out answer {self.measured} of {len(self.trainer.eval_dataset)}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measured = 0
        self._show()

    def on_root(self, done: float, found: dict[str, float]) -> None:
        """Shows the training of the root head."""
        note = f"root head, {found['accuracy_root']:.0%} of drafts right" if found else "root head, reading answers"
        self.show(1 - self.root_share * (1 - done), note)

    def _show(self, doing: str = "") -> None:
        budget, share = self.trainer.budget, 1 - self.root_share
        self.show(share * budget.elapsed(self.trainer.args), f"{budget.mask_rows:,} mask rows{doing or self.note}")


def _beginnings(answers: Sequence[Answer], positions: int) -> list[Answer]:
    """As many answers as have so many tokens together; at least four, then cut short, where there are four."""
    most, kept = max(positions // 4, 16), []
    for answer in answers:
        if positions > 0:
            kept.append(answer | {"response_ids": answer["response_ids"][: min(most, positions)]})
            positions -= len(kept[-1]["response_ids"])
    return kept


def _read(file: Path, known: set[str] | None = None) -> dict[str, Any]:
    """What a run wrote down, of `known` names alone. Raises `ValueError` for a damaged file."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict) or not content.keys() <= (known or content.keys()):
        raise ValueError(f"{str(file)!r} is damaged: choose a new folder.")
    return content
