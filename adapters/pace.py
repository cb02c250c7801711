"""How the minutes of `wedlm adapt` are spent: what a model costs on this machine, and the schedule that follows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ..generation.state import keeps_state
from ..generation.versions import CACHE
from .distillation import MaskDistillation
from .evaluation import accepted_runs
from .layout import AnswerTokens, DataCollatorForMaskRuns

Clock = Callable[[], float]
"""Seconds since some moment, as `time.monotonic`."""

ROWS_PER_TOKEN = 3  # mask rows that are trained for each token of an answer
ROOT_SHARE = 0.15  # of the time of training, for the root head; less of larger models
EVALUATION_SHARE = 0.05  # of the time, beside it, for all evaluations together
SAVING_SHARE = 0.02
TABLE_SHARE = 0.15
EVALUATIONS = 4  # that fit into their share
FEW_ROWS, ENOUGH_ROWS = 30_000, 100_000  # of masks: an adapter gives next to nothing, and clearly something

_LARGEST_BATCH = 0.15  # of the time, for a batch of answers
_ANSWER_STEPS = 256  # forwards of a batch of answers: a prompt of the model's own and its answer
_KEPT = 0.35  # of the tokens that steps without a past give: others are prompts, or stand behind an end
_STEPS = 300  # optimizer steps that a short training should have
_LEAST_SLOTS = 120
_LEAST_POSITIONS, _MOST_POSITIONS = 64, 4000
_ROWS_OF_POSITION = 2.5  # trained mask rows that take as long as a position, where nothing was measured
_TABLE_TOKENS, _TABLE_PROMPTS, _DECODERS = 128, 12, 3
_LEAST_PROMPTS = 6  # fewer give no standard error


@dataclass(frozen=True)
class Pace:
    """Seconds that a model takes on this machine."""

    steps: dict[int, float]  # of a decoding step, by how many sequences are decoded together, in rising order
    mask_row: float  # of a mask that is trained, forward and backward
    position: float  # of the drafts behind a token of a held-out answer

    @classmethod
    def read(cls, stored: dict[str, Any]) -> "Pace":
        """Of what JSON has made of one."""
        return cls(**stored | {"steps": {int(size): step for size, step in stored["steps"].items()}})


@dataclass(frozen=True)
class Schedule:
    """What becomes of a budget."""

    batch_size: int  # answers that are written together
    batch_slots: int  # masks of an optimizer step, about
    warmup_steps: int  # optimizer steps
    mask_rows: int  # that can be trained, about
    positions: int  # tokens of held-out answers that an evaluation may look at; 0 for no evaluation
    table: tuple[int, int]  # prompts and tokens of each answer in the last table; zeros for no table
    answer_seconds: float = 0.0  # of the time; 0 where the answers are there
    answer_tokens: int = 0  # that are written in it, about
    evaluation_seconds: float = 0.0  # that this takes, about; 0 where that is not known


def default_schedule(is_gpu: bool, mask_rows: int) -> Schedule:
    """For a budget without minutes: nothing depends on a clock."""
    positions = int(mask_rows * EVALUATION_SHARE / EVALUATIONS / _ROWS_OF_POSITION)
    positions = min(max(positions, _LEAST_POSITIONS), _MOST_POSITIONS)
    sizes = (256, 8192) if is_gpu else (48, 640)
    return Schedule(*sizes, 30, mask_rows, positions, (_TABLE_PROMPTS, _TABLE_TOKENS))


def schedule(seconds: float, pace: Pace, is_gpu: bool, has_answers: bool, root_share: float = ROOT_SHARE) -> Schedule:
    """What becomes of some seconds at a pace.

    Each token of an answer gets [`ROWS_PER_TOKEN`] mask rows; a tenth to a half of the time goes into answers.

    Args:
        seconds: the budget.
        pace: see [`measure_pace`].
        is_gpu: larger batches.
        has_answers: none need be written.
        root_share: of the time of training, for the root head; 0 where there is none.
    """
    training = pace.mask_row / (1 - root_share)
    # The size with the most tokens a second, of those that leave time for more than one batch.
    sizes = [size for size, step in pace.steps.items() if _ANSWER_STEPS * step <= seconds * _LARGEST_BATCH]
    size = max(sizes, key=lambda size: size / pace.steps[size], default=min(pace.steps))
    share, tokens_per_second = 0.0, _KEPT * size / pace.steps[size]
    if not has_answers:
        share = 1 / (1 + ROWS_PER_TOKEN * training * tokens_per_second)
        share = min(max(share, 0.1, 2 * _ANSWER_STEPS * pace.steps[size] / seconds), 0.5)
    rows = int(seconds * (1 - share) / training)
    slots = min(max(rows // _STEPS, _LEAST_SLOTS), default_schedule(is_gpu, 0).batch_slots)
    positions = min(int(seconds * EVALUATION_SHARE / EVALUATIONS / pace.position), _MOST_POSITIONS)
    positions = positions if positions >= _LEAST_POSITIONS else 0
    return Schedule(
        batch_size=size,
        batch_slots=slots,
        warmup_steps=min(30, max(1, rows // slots // 10)),
        mask_rows=rows,
        positions=positions,
        evaluation_seconds=positions * pace.position,
        table=_table(seconds, pace),
        answer_seconds=seconds * share,
        answer_tokens=int(seconds * share * tokens_per_second),
    )


def least_minutes(pace: Pace) -> int:
    """A budget that has room for a batch of answers."""
    return math.ceil(4 * _ANSWER_STEPS * min(pace.steps.values()) / 60)


def _table(seconds: float, pace: Pace) -> tuple[int, int]:
    """Prompts and tokens of the last table, which has a prompt more to warm up."""
    for tokens in (_TABLE_TOKENS, _TABLE_TOKENS // 2):
        prompts = int(seconds * TABLE_SHARE / (_DECODERS * tokens * min(pace.steps.values()))) - 1
        if prompts >= _LEAST_PROMPTS:
            return min(prompts, _TABLE_PROMPTS), tokens
    return 0, 0


def measure_pace(distillation: MaskDistillation, decoder: Any, clock: Clock, is_gpu: bool, patience: float) -> Pace:
    """Measures a model and its mask adapter on this machine.

    Args:
        distillation: its gradients are used and then cleared.
        decoder: the model that writes answers.
        clock: measures.
        is_gpu: larger batches.
        patience: seconds; what takes longer is not repeated or enlarged.
    """
    model = distillation.model
    answers = _random_answers(model.config.get_text_config(decoder=True).vocab_size)
    collate = DataCollatorForMaskRuns(0, distillation.num_masks, 3, is_shared=keeps_state(model))

    def seconds(work: Callable[..., Any], *inputs: Any) -> float:
        """Of the second of two calls, unless the first takes long."""
        for _ in range(2):
            began = clock()
            work(*inputs)
            if (spent := clock() - began) > patience:
                break
        return spent

    @torch.inference_mode()
    def decode(tokens: torch.Tensor, cache: DynamicCache) -> None:
        decoder(tokens, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits.argmax(-1).tolist()

    def train(batch: dict[str, torch.Tensor]) -> None:
        loss = distillation(**batch)["loss"]
        loss.backward()
        float(loss.detach())  # waits for a GPU

    steps: dict[int, float] = {}
    for size in (1, 32, 256) if is_gpu else (1, 8, 48, 96):
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([answers[index % 4]["prompt_ids"][:2] for index in range(size)], device=model.device)
        decode(ids, cache)
        steps[size] = seconds(decode, ids[:, :1], cache)
        if 4 * steps[size] > patience:
            break
    for part in (answers[:1], answers):
        batch = {name: value.to(model.device) for name, value in collate([part]).items()}
        spent = seconds(train, batch)
        mask_row = spent / int((batch["labels"] != -100).sum())
        if 4 * spent > patience:
            break
    distillation.zero_grad()
    some = {**answers[0], "response_ids": answers[0]["response_ids"][:24]}
    return Pace(steps, mask_row, seconds(accepted_runs, distillation, some) / 24)


def _random_answers(vocab_size: int) -> list[AnswerTokens]:
    """Four answers of 96 tokens to prompts of 32."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"prompt_ids": 32, "response_ids": 96}

    def drawn() -> AnswerTokens:
        return {name: torch.randint(vocab_size, (size,), generator=generator).tolist() for name, size in sizes.items()}

    return [drawn() for _ in range(4)]


def faster_dtype(device: torch.device, clock: Clock) -> str:
    """The dtype in which the device multiplies matrices faster: some CPUs compute in bfloat16, others emulate it."""
    if device.type == "cuda":
        return "bfloat16"
    seconds = {}
    for name in ("float32", "bfloat16"):
        matrix, runs = torch.randn(512, 1024, dtype=getattr(torch, name)), []
        for _ in range(5):
            began = clock()
            matrix @ matrix.T
            runs.append(clock() - began)
        seconds[name] = min(runs)
    return min(seconds, key=lambda name: seconds[name])
