"""Rules: which rows a forward has and what becomes of them. Here those of the unverified decoders, streaming and
block-wise (paper §5, Algorithm 1, Fig. 4c); [`VerifyRule`] is the other one.

`A` sequences in use, `T` physical rows with logits, `V` vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import maxsize
from typing import Any, NamedTuple, Protocol

import torch

from .rows import Row, SequenceState, Step, Tree
from .sampling import TokenSampler, token_entropy
from .settings import WeDLMGenerationSettings

# How many of these tokens a sequence takes: up to an end token, its limit, or where a stopping criterion holds.
Cut = Callable[[SequenceState, list[int]], int]


@dataclass(frozen=True)
class SequenceOutcome:
    """What a step did to one sequence. Numbers stand for rows: their places among its rows in the step."""

    sequence: SequenceState
    new_tokens: list[int]  # that became final
    kept: list[int]  # rows whose keys and values enter the cache: a path from the first row on, or nothing
    decided: list[tuple[int, int, int]]  # of each new token that was decided: its choice, its offset, the token
    checked: range = range(0)  # all drafts
    accepted: list[int] = field(default_factory=list)  # drafts that passed, a path


@dataclass
class StepOutcome:
    """What was chosen at M of a step's rows with logits, and what became of it. `sequences[i]` belongs to entry i of
    the tensors; choices are arbitrary where there is nothing to choose."""

    step: Step
    logits: torch.Tensor  # `(A, T, V)`, raw, in the model's dtype
    scores: torch.Tensor  # `(A, M, V)` float32, processed; MASK's are −∞
    columns: torch.Tensor  # `(A, M)` int64, which of the T columns these rows are
    is_broken: torch.Tensor  # `(A,)` bool, where no token can be chosen: the logits are NaN, or all are −∞
    readings: Any  # a NamedTuple of tensors `(A, …)`, or nested ones: what `settle` reads on the host
    sequences: list[SequenceOutcome] = field(default_factory=list)  # once they are settled

    @property
    def decided(self) -> list[tuple[int, int, int, int, int]]:
        """The new tokens that the step decided: of each its entry, its choice, its sequence, the number of new tokens
        before it, and the token."""
        return [
            (entry, place, outcome.sequence.index, offset, token)
            for entry, outcome in enumerate(self.sequences)
            for place, offset, token in outcome.decided
        ]

    def logits_at(self, entries: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The raw logits of some choices, `(N, V)` float32."""
        return self.logits[entries, self.columns[entries, places]].float()


def on_host(readings: Any) -> list[Any]:
    """Readings `(A, …)` for each of the A entries, with lists in the place of tensors. The host waits here, once."""
    tensors = [each.nan_to_num() if each.is_floating_point() else each for each in _tensors(readings)]
    parts = [(each.double() if each.is_floating_point() else each.long()).reshape(len(each), -1) for each in tensors]
    numbers = torch.cat([part.view(torch.int64) for part in parts], dim=1).cpu()
    columns = numbers.split([part.shape[1] for part in parts], dim=1)
    found = [
        column.contiguous().view(part.dtype).view(each.shape).tolist()
        for column, part, each in zip(columns, parts, tensors, strict=True)
    ]
    return [_filled(readings, iter(each)) for each in zip(*found, strict=True)]


def _tensors(readings: Any) -> Iterator[torch.Tensor]:
    if isinstance(readings, torch.Tensor):
        yield readings
    elif readings is not None:
        for each in readings:
            yield from _tensors(each)


def _filled(readings: Any, lists: Iterator[Any]) -> Any:
    if isinstance(readings, torch.Tensor):
        return next(lists)
    if readings is None:
        return None
    parts = [_filled(each, lists) for each in readings]
    return type(readings)(*parts) if hasattr(readings, "_fields") else parts


class Rule(Protocol):
    """Plans the rows of forwards, and decides what becomes final."""

    filler: int  # the token of masks
    width: int  # rows of a sequence, where all forwards have the same number
    most_masks: int  # how many of these may be masks
    asks_all: bool  # needs logits from the last final token on; otherwise those of masks alone
    is_by_row: bool  # real rows attend one by one, see [`attends_by_row`]
    is_timed: bool  # learns from what steps take

    def rows(self, sequences: Sequence[SequenceState]) -> list[Tree]:
        """The rows of each of these sequences in the next forward."""

    def read(self, step: Step, logits: torch.Tensor, hidden: torch.Tensor | None) -> StepOutcome:
        """Chooses tokens at these rows, for all sequences at once, on the device.

        Args:
            step: the forward.
            logits: `(A, T, V)`, raw, in the model's dtype.
            hidden: `(A, T, H)`, the states that the head read, if a mask adapter predicts masks; `(A, T, 2H)`, with
                inner states behind, where its root head reads them.
        """

    def settle(self, sequence: SequenceState, readings: Any, cut: Cut) -> SequenceOutcome:
        """Adds new final tokens to a sequence, and remembers what may follow them.

        Args:
            sequence: changes.
            readings: its part of those of the [`StepOutcome`], with lists in the place of tensors.
            cut: says how many of the tokens are taken.
        """

    def finish(self, seconds: float) -> None:
        """The step has ended, all sequences are settled. It took so long, or 0 where it is not timed."""


def select_masks(
    entropy: torch.Tensor,
    distance: torch.Tensor,
    is_mask: torch.Tensor,
    is_useful: torch.Tensor,
    entropy_threshold: float | torch.Tensor,
    distance_penalty: float | torch.Tensor,
) -> torch.Tensor:
    """Selects every mask with H + λ·d < τ; where none of these is useful, also the useful one with the least (ties:
    the leftmost).

    Args:
        entropy: `(B, M)` float32, H in nats.
        distance: `(B, M)` int64, d: logical distance to the row's leftmost mask.
        is_mask: `(B, M)` bool; False where a row has fewer than M masks.
        is_useful: `(B, M)` bool, whether the answer can have what the mask would be filled with; the leftmost mask is
            useful.
        entropy_threshold: τ, nats; or `(B, 1)`, of each row.
        distance_penalty: λ, nats per position; likewise.

    Returns:
        `(B, M)` bool, at least one True in each row that has a mask (paper §5.3, Algorithm 1).
    """
    adjusted = (entropy + distance_penalty * distance).masked_fill(~is_mask, float("inf"))
    chosen, useful = adjusted < entropy_threshold, adjusted.masked_fill(~is_useful, float("inf"))
    least = torch.zeros_like(chosen).scatter_(1, useful.argmin(1, keepdim=True), True)
    return (chosen | (least & ~(chosen & is_useful).any(1, keepdim=True))) & is_mask


class Fills(NamedTuple):
    """Which columns of a step are masks that are filled, and with which tokens."""

    marks: Any  # `(A, T)` bool
    tokens: Any  # `(A, T)` int64


class FillRule:
    """The paper's rule: masks of low entropy are filled, and tokens without a gap to their left are final.

    Args:
        settings: τ and λ.
        sampler: chooses for the masks.
        end_tokens: end a sequence.
        size: W.
        is_block: masks are added only when the whole window is filled: the block-wise baseline.
    """

    asks_all = is_by_row = is_timed = False

    def __init__(
        self,
        settings: WeDLMGenerationSettings,
        sampler: TokenSampler,
        end_tokens: frozenset[int],
        size: int,
        is_block: bool = False,
    ):
        self.settings, self.sampler, self.end_tokens, self.is_block = settings, sampler, end_tokens, is_block
        self.filler, self.width, self.most_masks = sampler.filler, 2 * size, size
        self._windows: dict[int, list[int | None]] = {}  # of each sequence: its slots behind the final tokens

    def rows(self, sequences: Sequence[SequenceState]) -> list[Tree]:
        """Pending tokens, then filled slots, then masks, each in ascending order."""
        found = []
        for sequence in sequences:
            window = self._windows.setdefault(sequence.index, [])
            size = min(self.most_masks, sequence.remaining)
            if not (self.is_block and window):
                window += [None] * (size - len(window))
            rows = sequence.pending_rows
            slots = sorted(enumerate(window), key=lambda slot: slot[1] is None)
            for slot, token in slots:
                rows.append(Row(token, len(sequence.tokens) + slot, len(rows) - 1))
            found.append(Tree(rows))
        return found

    def read(self, step: Step, logits: torch.Tensor, hidden: torch.Tensor | None) -> StepOutcome:
        """See [`Rule`]. The readings are [`Fills`]."""
        settings, copied, device = self.settings, logits.to(torch.float32, copy=True), logits.device
        count, offsets, ends = logits.shape[1], [], []
        for sequence, rows in zip(step.sequences, step.rows, strict=True):
            masks = [row.position - sequence.prompt_length for row in rows if row.token is None]
            offsets.append([-1] * (count - len(masks)) + masks)
            filled = rows[sequence.pending : len(rows) - len(masks)]
            found = [row.position - sequence.prompt_length for row in filled if row.token in self.end_tokens]
            ends.append([min(found, default=maxsize)])
        places = torch.tensor(offsets, device=device)
        is_mask = places >= 0
        # Slot 0 is a mask: all are measured from there.
        distance = places - torch.tensor([[sequence.new_count] for sequence in step.sequences], device=device)
        entropy = token_entropy(copied)
        tokens, scores = self.sampler.choose(copied, offsets, [sequence.index for sequence in step.sequences])
        # Else a model that is sure of the end before it is sure of the text would fill the slots behind it one by one.
        is_end = torch.isin(tokens, torch.tensor(sorted(self.end_tokens), dtype=torch.int64, device=device))
        is_useful = (distance == 0) | (~is_end & (places < torch.tensor(ends, device=device)))
        marks = select_masks(
            entropy, distance, is_mask, is_useful, settings.entropy_threshold, settings.distance_penalty
        )
        is_broken = (entropy.isnan() & is_mask) | (marks & (tokens < 0))
        columns = torch.arange(count, device=device).expand_as(places)
        return StepOutcome(step, logits, scores, columns, is_broken.any(1), Fills(marks, tokens))

    def settle(self, sequence: SequenceState, readings: Fills, cut: Cut) -> SequenceOutcome:
        """Fills slots, and slides the window past the final tokens."""
        (marks, tokens), window, decided = readings, self._windows[sequence.index], []
        masks = [row.position - len(sequence.tokens) for row in sequence.rows if row.token is None]
        for column, slot in enumerate(masks, len(tokens) - len(masks)):
            if marks[column]:
                window[slot] = tokens[column]
                decided.append((column, sequence.new_count + slot, tokens[column]))
        final = [token for token in window[: window.index(None) if None in window else None] if token is not None]
        final = final[: cut(sequence, final)]
        outcome = SequenceOutcome(sequence, final, list(range(sequence.pending)), decided)
        sequence.committed += sequence.pending
        sequence.tokens += final
        del window[: len(final)]
        return outcome

    def finish(self, seconds: float) -> None:
        """See [`Rule`]. Nothing is learned."""
