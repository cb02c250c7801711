"""Verified decoding: drafts are final as long as they are the AR head's choices (docs/algorithm.md#verification).

Behind its last final token, the *root* c, a sequence has drafts, which may branch, and masks behind c and behind
drafts:

    rows        c  d₁ d₂ s₁ │ masks of c │ of d₁ │ of d₂        s₁ is a sibling of d₁
    AR row      0  1  2  3  │

AR row 0 chooses what follows c. If that is d₁ or s₁, the row of this draft chooses what follows it, and so on: the
path that the AR rows follow is final, and so is the token at its end that they choose. The masks behind the last row
of the path have seen nothing wrong, so what they draft is checked next.

Drafts never influence what an AR row chooses, so the output is that of AR decoding, greedy or sampled.

A [`Drafter`] says what may follow, a [`Planner`] which of it is checked and where masks stand.

`A` sequences in use, `T` physical rows with logits, `R` AR rows, `K` masks behind a row, `V` vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .drafter import Drafter, Seen
from .fixed_plan import FixedPlan
from .planner import Outlook, Planner, StepSize
from .rows import SequenceState, Step, Tree
from .rules import Cut, SequenceOutcome, StepOutcome
from .sampling import TokenSampler


class ARRow(NamedTuple):
    """The root or a draft, as a step reads it. Each field is a number, or for all rows at once a tensor `(A, R)`."""

    column: Any  # of the T columns
    token: Any  # -2 where there is no row: no row predicts -2, so such a draft never passes
    parent: Any  # one of the R
    offset: Any  # new tokens before the one that the row predicts; -1 where there is no row
    first_mask: Any  # column of the first drafting mask behind it; any where there is none
    masks: Any  # how many of them there are


class Choices(NamedTuple):
    """What a step says, for the host."""

    tokens: Any  # `(A, R)` int64, those that the AR rows choose
    end: Any  # `(A,)` int64, the last AR row of the accepted path
    guesses: Any  # what each source of drafts has to know, see [`Source`]


class VerifyRule:
    """The rule of verified decoding: the AR rows check the drafts.

    Args:
        sampler: chooses for the AR head.
        drafter, planner: see there.
        size: W, for forwards of fixed shapes.
        is_by_row: real rows attend one by one, see [`attends_by_row`], and no masks stand behind the prompt: its
            forward is AR decoding's.
        keeps_state: the model keeps a state: a step with drafts or masks keeps nothing, and no masks stand behind the
            prompt.
    """

    asks_all = True

    def __init__(
        self,
        sampler: TokenSampler,
        drafter: Drafter,
        planner: Planner | FixedPlan,
        size: int,
        is_by_row: bool = False,
        keeps_state: bool = False,
    ):
        self.sampler, self.drafter, self.planner = sampler, drafter, planner
        self.filler, self.width, self.most_masks = sampler.filler, 2 * size + 1 - drafter.run.skipped, size
        self.is_by_row, self.keeps_state, self.is_timed = is_by_row, keeps_state, planner.is_timed
        self._outlooks: dict[int, Outlook] = {}  # of each sequence, by its index
        self._size: StepSize | None = None  # of this step
        self._is_prefill = False
        self._tokens = 0  # its new ones, of all sequences

    # --- the rows of a forward ---------------------------------------------------------------------------------------

    def rows(self, sequences: Sequence[SequenceState]) -> list[Tree]:
        """The planned rows."""
        self._size, self._tokens = None, 0
        if not sequences:
            return []
        self._is_prefill = any(not sequence.new_count for sequence in sequences)
        nothing = [Outlook(Tree(), 0, sequence.remaining) for sequence in sequences]
        outlooks = [self._outlooks.pop(each.index, none) for each, none in zip(sequences, nothing, strict=True)]
        if self._is_prefill and (self.is_by_row or self.keeps_state):
            planned = [Tree() for _ in sequences]
        else:
            planned = self.planner.plan(outlooks, sequences[0].pending - 1 if self.keeps_state else 0)
        found = [self._rows(*each) for each in zip(sequences, planned, strict=True)]
        has_masks = any(rows[-1].token is None for rows in found)
        self._size = len(found) * max(map(len, found)), has_masks, len(sequences)
        return found

    def _rows(self, sequence: SequenceState, planned: Tree) -> Tree:
        """Pending tokens, and behind their last one the planned rows."""
        pending, last = sequence.pending_rows, len(sequence.tokens) - 1
        places = {-1: len(pending) - 1}
        for place, row in enumerate(planned):
            # Masks behind an end token would draft nothing.
            if row.parent in places and not (row.parent >= 0 and planned[row.parent].token in self.drafter.end_tokens):
                places[place] = len(pending)
                pending.append(row._replace(position=last + row.position, parent=places[row.parent]))
        rows, run = Tree(pending), self.drafter.run
        if not run.holds_tokens:
            return rows
        prompt, known = sequence.tokens[: sequence.prompt_length], sequence.tokens[: sequence.committed]
        fills: dict[int, int] = {}
        for home, row in enumerate(rows):
            if row.token is not None and (masks := rows.masks(home)):
                text = [*known, *rows.tokens(home)]
                fills |= {place: run.fill(prompt, text, number) for number, place in enumerate(masks)}
        return Tree(row._replace(fill=fills.get(place)) for place, row in enumerate(rows))

    # --- the choices at them -----------------------------------------------------------------------------------------

    def read(self, step: Step, logits: torch.Tensor, hidden: torch.Tensor | None) -> StepOutcome:
        """See [`Rule`]. The readings are the tokens that the AR rows choose, the last AR row of the accepted path, and
        what the masks behind that row draft."""
        device, indices = logits.device, [sequence.index for sequence in step.sequences]
        rows = [self._ar_rows(sequence, logits.shape[1]) for sequence in step.sequences]
        counts = [row.masks for own in rows for row in own]
        size = max(1, *map(len, rows))
        nothing = ARRow(column=0, token=-2, parent=0, offset=-1, first_mask=0, masks=0)
        rows = [own + [nothing] * (size - len(own)) for own in rows]
        at = ARRow(*torch.tensor(rows, device=device).unbind(-1))
        entries = torch.arange(len(rows), device=device)[:, None]
        chosen, scores = self._choose(step, rows, logits, (entries, at.column))

        passed, parents = chosen.gather(1, at.parent) == at.token, at.parent
        passed[:, 0] = True
        for _ in range(max(0, size - 2).bit_length()):  # each round doubles how far back a path is known
            passed, parents = passed & passed.gather(1, parents), parents.gather(1, parents)
        following = at.offset + 1
        end = (following * passed).argmax(1, keepdim=True)

        offsets, masks, states, root = following.gather(1, end), None, None, None
        if most := max(counts, default=0):
            last = (at.masks.gather(1, end) - 1).clamp(min=0)
            places = entries, at.first_mask.gather(1, end) + torch.arange(most, device=device).minimum(last)
            masks, states = logits[places].float(), None if hidden is None else hidden[places]
        if hidden is not None and self.drafter.reads_root:
            root = hidden[entries, at.column.gather(1, end)]
        before = torch.cat([at.token.gather(1, end), chosen.gather(1, end)], 1).clamp(min=0)
        guesses = self.drafter.guess(Seen(before, offsets, indices, masks, states, root, all(counts)))
        is_broken = (chosen < at.offset.clamp(max=0)).any(1)  # -1 where there is a row
        return StepOutcome(step, logits, scores, at.column, is_broken, Choices(chosen, end[:, 0], guesses))

    def _ar_rows(self, sequence: SequenceState, count: int) -> list[ARRow]:
        """A sequence's root and drafts, where a forward has `count` columns."""
        rows, root, found = sequence.rows, max(0, sequence.pending - 1), []
        first = count - len(rows)
        for place, row in enumerate(rows[root:], root):
            if row.token is not None:
                masks = rows.masks(place)[self.drafter.run.skipped :]
                offset = sequence.new_count + row.position - rows[root].position
                of_masks = min(first + masks.start, count - 1), len(masks)
                found.append(ARRow(first + place, row.token, max(0, row.parent - root), offset, *of_masks))
        return found

    def _choose(
        self, step: Step, rows: list[list[ARRow]], logits: torch.Tensor, cells: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The AR rows' tokens and scores, `(A, R)` and `(A, R, V)`, from the logits `(A, T, V)` at their cells."""
        if len(rows) == 1:  # side by side: only what changes is copied
            own = logits[:, rows[0][0].column : rows[0][-1].column + 1]
            own = own.to(torch.float32, copy=self.sampler.overwrites)
        else:
            own = logits[cells].float()

        def prefix(entry: int, row: int) -> list[int]:
            sequence = step.sequences[entry]
            path = sequence.rows.tokens(row + sequence.pending - 1)
            return sequence.new_tokens + path[sequence.pending :]

        def follow(entry: int, row: int, token: int) -> int | None:
            rows, root = step.sequences[entry].rows, step.sequences[entry].pending - 1
            behind = (child for child in rows.children(row + root) if rows[child].token == token)
            return next((child - root for child in behind), None)

        offsets = [[row.offset for row in own] for own in rows]
        return self.sampler.choose_in_order(own, offsets, [each.index for each in step.sequences], prefix, follow)

    # --- what becomes final ------------------------------------------------------------------------------------------

    def settle(self, sequence: SequenceState, readings: Choices, cut: Cut) -> SequenceOutcome:
        """Adds the accepted drafts and the AR head's own token behind them. What may follow is the next outlook."""
        tokens, end, guesses = readings
        rows, root = sequence.rows, sequence.pending - 1
        path = rows.path(root + end)[root:]
        checked = range(root + 1, sequence.unmasked)
        for place in checked:
            if (parent := rows[place].parent) in path:
                self.planner.learn(rows[place]._replace(parent=parent - root - 1), place in path)
        settled = [*rows.tokens(path[-1])[root + 1 :], tokens[end]]
        count = cut(sequence, settled)
        is_kept = not self.keeps_state or len(rows) == sequence.pending
        outcome = SequenceOutcome(
            sequence=sequence,
            new_tokens=settled[:count],
            kept=[*range(root + 1), *path[1:count]] if is_kept else [],
            decided=[(place - root, sequence.new_count + n, settled[n]) for n, place in enumerate(path[:count])],
            checked=checked,
            accepted=path[1 : count + 1],
        )
        sequence.committed += len(outcome.kept)
        sequence.tokens += outcome.new_tokens
        self._tokens += count
        if not sequence.is_finished:
            masks = len(rows.masks(path[-1])[self.drafter.run.skipped :])
            drafts = self.drafter.drafts(sequence, masks, guesses)
            self._outlooks[sequence.index] = Outlook(drafts, masks, sequence.remaining)
        return outcome

    def finish(self, seconds: float) -> None:
        """See [`Rule`]."""
        if self._size is not None:
            self.planner.finish(self._size, self._tokens, seconds, self._is_prefill)
