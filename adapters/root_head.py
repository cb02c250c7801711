"""Training of an adapter's root head, which drafts without masks (docs/algorithm.md#mask-adapters).

What it reads and what it learns are states of the base alone, which are computed once. A step on hundreds of kept rows
costs less than a step on a few masks: apart from them, the head gets many steps.

`N` rows, `R` of them with a row behind, `H` hidden size, `S` frequent tokens.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from .budget import Clock
from .distillation import MaskDistillation
from .layout import AnswerTokens

ROOT_ROWS = 4  # rows that the root head trains for each mask row
LEARNING_RATE, WARMUP = 1e-3, 0.05  # the latter is a share of the steps
# At the peak learning rate, weights decay by 1/e in so many passes over the rows, whatever the number of rows (Wang
# and Aitchison, 2024), but no faster than the largest decay has it. The head sees each row often: with a tenth of the
# decay it was right less often by 3 percentage points.
DECAY_PASSES, MOST_DECAY = 2.3, 2.0
BATCH = 512  # rows of a step
MEASURED = 100  # steps between two measurements
HELD_OUT = 32  # answers at most, and no more than every tenth, that tell whether training helped
MOST_BYTES = 3 * 2**30  # of states: with more answers, some are left out
_PART = 4096  # tokens whose states are computed at once, about

ShowRoot = Callable[[float, dict[str, float]], None]
"""Gets the share of the training that is done, and what was measured last: nothing yet while states are computed."""


def ignore(share: float, found: dict[str, float]) -> None:
    """Shows nothing."""


class RootRows(NamedTuple):
    """The rows of answers that predict their tokens, in the order of the text, on the CPU."""

    states: torch.Tensor  # `(N, H)`, the base's last states; or `(N, 2H)`, see [`Slots`]
    tokens: torch.Tensor  # `(N, 2)` int64, each row's own token and the one that it predicts
    places: torch.Tensor  # `(R,)` int64, the rows with a row of the same answer behind, whose distribution they learn


def root_rows(
    distillation: MaskDistillation,
    answers: Sequence[AnswerTokens],
    show: ShowRoot = ignore,
    is_over: Callable[[], bool] = lambda: False,
) -> RootRows:
    """What the root head learns from answers: from all of them, or from those that were read once it is over."""
    states, tokens, has_next = [], [], []
    parts = list(_parts(answers))
    # Short ones lie in other parts than long ones: those that are read are of all lengths.
    for place in torch.randperm(len(parts), generator=torch.Generator().manual_seed(0)).tolist():
        show(0, {})
        texts = [torch.tensor([*answer["prompt_ids"], *answer["response_ids"]]) for answer in parts[place]]
        hidden = distillation.hidden(pad_sequence(texts, batch_first=True).to(distillation.model.device))
        for answer, text, own in zip(parts[place], texts, hidden, strict=True):
            first, end = len(answer["prompt_ids"]) - 1, len(text) - 1
            states.append(own[first:end].to("cpu", copy=True))  # not a view, which would keep all of them
            tokens.append(torch.stack([text[first:end], text[first + 1 :]], 1))
            has_next.append(torch.arange(first, end) < end - 1)
        if is_over():
            break
    return RootRows(torch.cat(states), torch.cat(tokens), torch.cat(has_next).nonzero()[:, 0])


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


@torch.enable_grad()
def train_root_head(
    distillation: MaskDistillation,
    answers: Sequence[AnswerTokens],
    count: int,
    seed: int = 0,
    show: ShowRoot = ignore,
    *,
    seconds: float | None = None,
    clock: Clock = time.monotonic,
) -> dict[str, float]:
    """Trains the root head of a mask adapter on answers of its model.

    A row learns the base's distribution of the token behind the one that it predicts, among the tokens of the head
    (soft cross-entropy). Some answers are held out from it. If the loss on them rises, the head stays as it was.

    Args:
        distillation: the model, whose adapter has a root head that knows its tokens, see [`RootHead.draft_among`].
        answers: with `prompt_ids` and `response_ids`, one of more than a token at least, which then is held out, too.
        count: rows to train, each counted as often as it is seen.
        seed: of the batches, and of the answers that are held out.
        show: called before each part of the states that are computed, and after each step.
        seconds: after which it ends, though fewer rows were trained; the learning rate follows what is used up first.
        clock: measures them.

    Returns:
        On the answers that are held out, the `loss_root` in nats, and how often the likeliest token is the base's
        (`accuracy_root`).
    """
    head = distillation.model.mask_adapter.root_head
    began = clock()
    learned, held_out = _split(distillation, answers, seed)
    tests = Batches(distillation, root_rows(distillation, held_out, show))
    half = math.inf if seconds is None else seconds / 2
    batches = Batches(distillation, root_rows(distillation, learned, show, lambda: clock() - began > half))
    kept = {key: value.clone() for key, value in head.state_dict().items()}
    before = found = tests.measure()
    generator = torch.Generator().manual_seed(seed)
    decay = min(MOST_DECAY, BATCH / (DECAY_PASSES * LEARNING_RATE * len(batches)))
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=decay)
    steps, step = -(-count // BATCH), 0
    used = 0.0 if steps else 1.0
    show(0, before)
    if seconds is not None:  # the states took a part of them
        seconds, began = max(seconds - (clock() - began), half / 2), clock()
    while used < 1:
        shape = min((used + 1 / steps) / WARMUP, max(0.03, 0.5 * (1 + math.cos(math.pi * used))))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * shape
        loss, _ = batches.loss(torch.randint(len(batches), (BATCH,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        used = max(step / steps, (clock() - began) / seconds if seconds else 0.0)
        if step % MEASURED == 0 or used >= 1:
            found = tests.measure()
        show(min(used, 1.0), found)
    if not found["loss_root"] <= before["loss_root"]:  # it may be NaN
        head.load_state_dict(kept)
        return before
    return found


def _split(
    distillation: MaskDistillation, answers: Sequence[AnswerTokens], seed: int
) -> tuple[list[AnswerTokens], list[AnswerTokens]]:
    """The answers to learn from, as many as their states leave room for, and those that are held out."""
    answers = [answer for answer in answers if answer["prompt_ids"] and len(answer["response_ids"]) > 1]
    order = torch.randperm(len(answers), generator=torch.Generator().manual_seed(seed)).tolist()
    answers = [answers[place] for place in order]
    held_out = max(1, min(HELD_OUT, len(answers) // 10))
    adapter = distillation.model.mask_adapter
    numbers = adapter.hidden_size * (1 + bool(adapter.settings.root_layer))  # of a row's states
    room = MOST_BYTES / (distillation.model.dtype.itemsize * numbers)
    fitting = sum(rows <= room for rows in accumulate(len(answer["response_ids"]) for answer in answers))
    return answers[held_out : max(held_out + 1, fitting)] or answers, answers[:held_out]


class Batches:
    """Losses of the root head on some rows."""

    def __init__(self, distillation: MaskDistillation, rows: RootRows):
        model = distillation.model
        self.model, self.rows, self.head, self._scaled = model, rows, model.mask_adapter.root_head, distillation.scaled
        lm_head = model.get_output_embeddings()
        frequent = self.head.frequent(len(lm_head.weight)).to(model.device)
        self.weight = lm_head.weight.detach()[frequent]
        self.bias = None if lm_head.bias is None else lm_head.bias.detach()[frequent]

    def __len__(self) -> int:
        return len(self.rows.places)

    def loss(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss of some of the rows, and the share of them where the likeliest token is the base's."""
        device, rows, places = self.model.device, self.rows, self.rows.places[chosen]
        states, behind = rows.states[places].to(device), rows.states[places + 1].to(device)
        with torch.no_grad():
            embeddings = self.model.get_input_embeddings()(rows.tokens[places].to(device))
            wanted = self._scores(behind[:, : self.weight.shape[1]]).softmax(-1)
        # Weights stay in float32, products take the model's 16 bits.
        with torch.autocast(device.type, torch.bfloat16, enabled=self.weight.dtype == torch.bfloat16):
            scores = self._scores(self.head(states, embeddings))
        loss = -(wanted * scores.log_softmax(-1)).sum(-1).mean()
        return loss, (scores.argmax(-1) == wanted.argmax(-1)).float().mean()

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        return self._scaled(nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias))

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """`loss_root` and `accuracy_root` of all rows."""
        parts = torch.arange(len(self)).split(BATCH)
        sums = torch.stack([len(part) * torch.stack(self.loss(part)) for part in parts]).sum(0)
        loss, accuracy = (sums / len(self)).tolist()
        return {"loss_root": loss, "accuracy_root": accuracy}
