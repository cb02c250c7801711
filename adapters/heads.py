"""Training of an adapter's heads from states that are computed once (ALGORITHM.md §5).

The root head drafts without masks: what it reads and what it learns are states of the base alone. The previous-token
head learns beside the masks; a second one learns behind them. A step on hundreds of kept rows costs less than a step
on a few masks: apart from them, heads get many steps.

`N` rows, `M` rows of the base, `H` hidden size, `S` frequent tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ..generation.state import keeps_state
from ..training.streams import IGNORE_INDEX
from .attach import MOST_FREQUENT
from .budget import MaskTrainingConfig
from .distillation import MaskDistillation
from .layout import AnswerBatches, AnswerTokens, DataCollatorForMaskRuns
from .mask_adapter import PreviousTokenHead

ROOT_ROWS = 4  # rows that the root head trains for each mask row
LEARNING_RATE, WARMUP = 1e-3, 0.05  # the latter is a share of the steps
# At the peak learning rate, weights decay by 1/e in so many passes over the rows, whatever the number of rows (Wang
# and Aitchison, 2024), but no faster than the largest decay has it. A head sees each row often: with a tenth of the
# decay the root head was right less often by 3 percentage points.
DECAY_PASSES, MOST_DECAY = 2.3, 2.0
BATCH = 512  # rows of a step
MEASURED = 100  # steps between two measurements
HELD_OUT = 32  # answers at most, and no more than every tenth, that tell whether training helped
MOST_BYTES = 3 * 2**30  # of states: with more answers, some are left out
CUT_STRIDE = MaskTrainingConfig.cut_stride
_PART = 4096  # tokens whose states are computed at once, about
_MASKS = 1024  # masks whose states are computed at once, about

ShowRows = Callable[[int, dict[str, float]], None]
"""Gets how many rows were trained, and what was measured last: nothing yet while states are computed."""


def ignore(rows: int, found: dict[str, float]) -> None:
    """Shows nothing."""


class HeadRows(NamedTuple):
    """Rows that a head learns from, on the CPU."""

    states: torch.Tensor  # `(N, H)`, what the head reads of each; or `(N, 2H)`, see [`Slots`]
    tokens: torch.Tensor  # `(N, 2)` int64, the two tokens before what it predicts
    bases: torch.Tensor  # `(M, H)`, last states of the base, which may have inner states behind
    targets: torch.Tensor  # `(N,)` int64: in which of these is the distribution that it learns, -1 for none


def root_rows(distillation: MaskDistillation, answers: Sequence[AnswerTokens], show: ShowRows = ignore) -> HeadRows:
    """The rows of answers that predict their tokens, in the order of the text, for the root head. The target of each
    is the row behind it."""
    states, tokens, is_last = [], [], []
    for part in _parts(answers):
        show(0, {})
        texts = [torch.tensor([*answer["prompt_ids"], *answer["response_ids"]]) for answer in part]
        hidden = distillation.hidden(pad_sequence(texts, batch_first=True).to(distillation.model.device))
        for answer, text, own in zip(part, texts, hidden, strict=True):
            first, end = len(answer["prompt_ids"]) - 1, len(text) - 1
            states.append(own[first:end].to("cpu", copy=True))  # not a view, which would keep all of them
            tokens.append(torch.stack([text[first:end], text[first + 1 :]], 1))
            is_last.append(torch.arange(first, end) == end - 1)
    known, last = torch.cat(states), torch.cat(is_last)
    targets = torch.arange(1, len(known) + 1).masked_fill(last, -1)
    return HeadRows(known, torch.cat(tokens), known, targets)


@torch.no_grad()
def mask_rows(
    distillation: MaskDistillation, answers: Sequence[AnswerTokens], seed: int = 0, show: ShowRows = ignore
) -> HeadRows:
    """The masks behind random cuts of answers, as the masks' training has them, for the previous-token head."""
    model, masks = distillation.model, distillation.num_masks
    batches = AnswerBatches(answers, _MASKS, CUT_STRIDE, masks, seed)
    collate = DataCollatorForMaskRuns(0, masks, CUT_STRIDE, seed, keeps_state(model))
    parts, known = [], 0
    for number in range(len(batches)):
        show(0, {})
        batch = {name: value.to(model.device) for name, value in collate([batches[number]]).items()}
        cuts, counted = batch["cuts"], batch["labels"] != IGNORE_INDEX
        hidden, memory = distillation.memory(batch["input_ids"], cuts)
        states = distillation.masks(memory, cuts)[counted]
        places, of_slot, tokens = distillation.targets(batch["input_ids"], cuts, counted)
        parts.append([each.cpu() for each in (states, tokens[of_slot], hidden.flatten(0, 1)[places], known + of_slot)])
        known += len(places)
    return HeadRows(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _parts(answers: Sequence[AnswerTokens]) -> Iterator[list[AnswerTokens]]:
    """Answers of similar length, whose states are computed at once."""
    part: list[AnswerTokens] = []
    for answer in sorted(answers, key=_length):
        if part and (len(part) + 1) * _length(answer) > _PART:
            yield part
            part = []
        part.append(answer)
    yield part


def _length(answer: AnswerTokens) -> int:
    return len(answer["prompt_ids"]) + len(answer["response_ids"])


def train_root_head(
    distillation: MaskDistillation,
    answers: Sequence[AnswerTokens],
    count: int,
    seed: int = 0,
    show: ShowRows = ignore,
) -> dict[str, float]:
    """Trains the root head of a mask adapter on answers of its model.

    A row learns the base's distribution of the token behind the one that it predicts, among the frequent tokens of
    the adapter's n-grams (soft cross-entropy). Some answers are held out from it. If the loss on them rises, the head
    stays as it was.

    Args:
        distillation: the model, whose adapter has a root head and n-grams.
        answers: with `prompt_ids` and `response_ids`, one of more than a token at least, which then is held out, too.
        count: rows to train, each counted as often as it is seen.
        seed: of the batches, and of the answers that are held out.
        show: called before each part of the states that are computed, and after each step.

    Returns:
        On the answers that are held out, the `loss_root` in nats, and how often the likeliest token is the base's
        (`accuracy_root`).
    """
    adapter = distillation.model.mask_adapter
    learned, held_out = _split(distillation, answers, 1.0 + bool(adapter.settings.root_layer), seed)
    rows = (root_rows(distillation, some, show) for some in (learned, held_out))
    return _train(distillation, adapter.root_head, rows, count, seed, "root", show)


def add_second_head(
    distillation: MaskDistillation,
    answers: Sequence[AnswerTokens],
    count: int,
    seed: int = 0,
    show: ShowRows = ignore,
    *,
    width: int,
) -> dict[str, float]:
    """Trains a second previous-token head, for the masks as they are, and makes the adapter's the mean of both: it
    grows by so many hidden units. The two err apart, and their mean errs less than either.

    A mask learns the base's distribution of its own position, as of [`train_root_head`]. If the mean's loss on the
    answers that are held out is no lower, the head stays as it was.

    Args:
        distillation: the model, whose adapter has a previous-token head and n-grams.
        answers, count, seed, show: see [`train_root_head`].
        width: hidden units of the second head.

    Raises:
        ValueError: for an adapter without n-grams or without a previous-token head.

    Returns:
        `loss_mask` and `accuracy_mask` of the adapter's head, as of [`train_root_head`].
    """
    adapter, masks = distillation.model.mask_adapter, distillation.num_masks / CUT_STRIDE
    first: Any = adapter.head
    if first is None or adapter.ngrams is None:
        lacking = "previous-token head (`head_width` is 0)" if first is None else "n-grams: call `count_ngrams` first"
        raise ValueError(f"The mask adapter has no {lacking}.")
    learned, held_out = _split(distillation, answers, 1 + masks, seed)
    rows, tests = (mask_rows(distillation, some, seed + 1, show) for some in (learned, held_out))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        second = PreviousTokenHead(len(adapter.mask_embedding), width).to(first.down.device)
    _train(distillation, second, (rows, tests), count, seed, "mask", show)
    both = mean_of_heads(first, second)
    before, found = (Batches(distillation, tests, head).measure("mask") for head in (first, both))
    if not found["loss_mask"] < before["loss_mask"]:  # it may be NaN
        return before
    adapter.head = both.requires_grad_(first.down.requires_grad)
    adapter.restate(head_width=len(both.down))
    return found


@torch.no_grad()
def mean_of_heads(first: PreviousTokenHead, second: PreviousTokenHead) -> PreviousTokenHead:
    """One head that gives the mean of what two give: it has the hidden units of both."""
    mean = PreviousTokenHead(len(first.up), 0).to(first.down)
    mean.down = nn.Parameter(torch.cat([first.down, second.down.to(first.down)]))
    mean.up = nn.Parameter(torch.cat([first.up, second.up.to(first.up)], dim=1) / 2)
    return mean


def _split(
    distillation: MaskDistillation, answers: Sequence[AnswerTokens], states: float, seed: int
) -> tuple[list[AnswerTokens], list[AnswerTokens]]:
    """The answers to learn from, as many as fit with so many states for each token, and those that are held out."""
    answers = [answer for answer in answers if answer["prompt_ids"] and len(answer["response_ids"]) > 1]
    order = torch.randperm(len(answers), generator=torch.Generator().manual_seed(seed)).tolist()
    answers = [answers[place] for place in order]
    held_out = max(1, min(HELD_OUT, len(answers) // 10))
    model = distillation.model
    room = MOST_BYTES / (model.dtype.itemsize * len(model.mask_adapter.mask_embedding) * states)
    fitting = sum(rows <= room for rows in accumulate(len(answer["response_ids"]) for answer in answers))
    return answers[held_out : max(held_out + 1, fitting)] or answers, answers[:held_out]


@torch.enable_grad()
def _train(
    distillation: MaskDistillation,
    head: Any,
    rows: Iterable[HeadRows],
    count: int,
    seed: int,
    name: str,
    show: ShowRows,
) -> dict[str, float]:
    """Trains a head on the first of these rows. The second are held out, and tell whether it stays."""
    batches, tests = (Batches(distillation, some, head) for some in rows)
    kept = {key: value.clone() for key, value in head.state_dict().items()}
    before = found = tests.measure(name)
    generator = torch.Generator().manual_seed(seed)
    decay = min(MOST_DECAY, BATCH / (DECAY_PASSES * LEARNING_RATE * len(batches)))
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=decay)
    steps = -(-count // BATCH)
    show(0, before)
    for step in range(steps):
        shape = min((step + 1) / (WARMUP * steps), max(0.03, 0.5 * (1 + math.cos(math.pi * step / steps))))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * shape
        loss, _ = batches.loss(torch.randint(len(batches), (BATCH,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % MEASURED == 0 or step == steps - 1:
            found = tests.measure(name)
        show((step + 1) * BATCH, found)
    if not found[f"loss_{name}"] <= before[f"loss_{name}"]:  # it may be NaN
        head.load_state_dict(kept)
        return before
    return found


class Batches:
    """Losses of a head on some rows."""

    def __init__(self, distillation: MaskDistillation, rows: HeadRows, head: PreviousTokenHead):
        model = distillation.model
        self.model, self.rows, self.head, self._scaled = model, rows, head, distillation.scaled
        self.places = (rows.targets >= 0).nonzero()[:, 0]
        lm_head = model.get_output_embeddings()
        self.frequent = model.mask_adapter.ngrams.frequent(MOST_FREQUENT, len(lm_head.weight)).to(model.device)
        self.weight = lm_head.weight.detach()[self.frequent]
        self.bias = None if lm_head.bias is None else lm_head.bias.detach()[self.frequent]

    def __len__(self) -> int:
        return len(self.places)

    def loss(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss of some of the rows, and the share of them where the likeliest token is the base's."""
        device, rows, places = self.model.device, self.rows, self.places[chosen]
        states, bases = rows.states[places].to(device), rows.bases[rows.targets[places]].to(device)
        with torch.no_grad():
            embeddings = self.model.get_input_embeddings()(rows.tokens[places].to(device))
            wanted = self._scores(bases[:, : self.weight.shape[1]]).softmax(-1)
        # Weights stay in float32, products take the model's 16 bits.
        with torch.autocast(device.type, torch.bfloat16, enabled=self.weight.dtype == torch.bfloat16):
            scores = self._scores(self.head(states, embeddings))
        loss = -(wanted * scores.log_softmax(-1)).sum(-1).mean()
        return loss, (scores.argmax(-1) == wanted.argmax(-1)).float().mean()

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        return self._scaled(nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias))

    @torch.no_grad()
    def measure(self, name: str) -> dict[str, float]:
        """Of all rows, `loss_…` and `accuracy_…` of a name."""
        parts = torch.arange(len(self)).split(BATCH)
        sums = torch.stack([len(part) * torch.stack(self.loss(part)) for part in parts]).sum(0)
        loss, accuracy = (sums / len(self)).tolist()
        return {f"loss_{name}": loss, f"accuracy_{name}": accuracy}
