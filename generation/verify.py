"""Verified decoding: drafts are final as long as the AR head's own choices are these drafts (ALGORITHM.md §4).

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
from typing import Any

import torch

from .drafter import Drafter, Outlook
from .planner import Planner
from .rows import Row, SequenceState, Step, lines, mask_runs
from .rules import Choice, Cut, SequenceOutcome
from .sampling import TokenSampler


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
        planner: Planner,
        size: int,
        is_by_row: bool = False,
        keeps_state: bool = False,
    ):
        self.sampler, self.drafter, self.planner = sampler, drafter, planner
        self.filler, self.width, self.most_masks = sampler.filler, 2 * size + 1 - drafter.skipped_masks, size
        self.is_by_row, self.keeps_state = is_by_row, keeps_state
        self._outlooks: dict[int, Outlook] = {}  # of each sequence, by its index
        self._tokens: int | None = None  # new tokens of this step, if the planner learns from it

    # --- the rows of a forward ---------------------------------------------------------------------------------------

    def rows(self, sequences: Sequence[SequenceState]) -> list[list[Row]]:
        """The planned rows. The planner takes the time of a step from one call to the next."""
        if self._tokens is not None:
            self.planner.finish(self._tokens)
        self._tokens = None
        if not sequences:
            return []
        is_prefill = any(not sequence.new_count for sequence in sequences)
        outlooks = [self._outlooks.pop(sequence.index, Outlook([], 0, sequence.remaining)) for sequence in sequences]
        if is_prefill and (self.is_by_row or self.keeps_state):
            planned: list[list[Row]] = [[] for _ in sequences]
        else:
            planned = self.planner.plan(outlooks, sequences[0].pending - 1 if self.keeps_state else 0)
        found = [self._rows(*each) for each in zip(sequences, planned, strict=True)]
        has_masks = any(rows[-1].token is None for rows in found)
        if not is_prefill:  # a prompt's time is that of AR decoding, too
            self.planner.begin(len(found) * max(map(len, found)), has_masks, len(sequences))
            self._tokens = 0
        return found

    def _rows(self, sequence: SequenceState, planned: list[Row]) -> list[Row]:
        """Pending tokens, and behind their last one the planned rows, without those behind an end token."""
        rows, ends, last = sequence.pending_rows, self.drafter.end_tokens, len(sequence.tokens) - 1
        places = {-1: len(rows) - 1}
        for place, row in enumerate(planned):
            if row.parent in places and not (row.parent >= 0 and planned[row.parent].token in ends):
                places[place] = len(rows)
                rows.append(row._replace(position=last + row.position, parent=places[row.parent]))
        return rows

    # --- the choices at them -----------------------------------------------------------------------------------------

    def read(self, step: Step, logits: torch.Tensor, hidden: torch.Tensor | None) -> Choice:
        """See [`Rule`]. The readings are the tokens that the AR rows choose, the last AR row of the accepted path, and
        what the masks behind that row draft."""
        device, count, rows = logits.device, logits.shape[1], [sequence.index for sequence in step.sequences]
        real = [_real_rows(sequence) for sequence in step.sequences]
        places = torch.arange(max(1, *map(len, real)), device=device)
        is_there = places < torch.tensor([len(each) for each in real], device=device)[:, None]
        first = step.starts([max(0, sequence.pending - 1) for sequence in step.sequences])
        columns = (torch.tensor(first, device=device)[:, None] + places).clamp(max=count - 1)
        entries = torch.arange(len(real), device=device)[:, None]
        chosen, scores = self._choose(step, real, logits[entries, columns].to(torch.float32))

        parents = (step.parents.gather(1, columns) - columns[:, :1]).clamp(min=0) * is_there
        tokens, depths = (each[:, -count:].gather(1, columns) for each in (step.input_ids, step.position_ids))
        depths = depths - depths[:, :1]
        passed = chosen.gather(1, parents) == tokens
        passed = (passed & is_there) | (places == 0)
        is_on_path = (passed[:, None] | ~lines(parents)).all(-1)
        end = ((depths + 1) * is_on_path).argmax(1, keepdim=True)

        readings, runs = [chosen, end], self._runs(step, len(places))
        most = max(drafting for entry in runs for _, drafting in entry)
        reads_root = self.drafter.reads_root and not all(drafting for entry in runs for _, drafting in entry)
        if most or reads_root:
            start, drafting = torch.tensor(runs, device=device).gather(1, end[..., None].expand(-1, -1, 2)).unbind(2)
            ks = torch.arange(most, device=device)
            masks = (start + torch.minimum(ks, (drafting - 1).clamp(min=0))).clamp(max=count - 1)
            behind = None if hidden is None else hidden[entries, masks]
            root = hidden[entries, columns.gather(1, end)][:, 0] if hidden is not None and reads_root else None
            before = torch.cat([tokens.gather(1, end), chosen.gather(1, end)], 1).clamp(min=0)
            offsets = torch.tensor([[1 + sequence.new_count] for sequence in step.sequences], device=device)
            offsets = offsets + depths.gather(1, end)
            readings.append(self.drafter.guess(logits[entries, masks].float(), behind, before, offsets, rows, root))
        return Choice(chosen, scores, columns, ((chosen < 0) & is_there).any(1), readings)

    def _choose(self, step: Step, real: list[list[Row]], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The AR rows' tokens and scores, `(A, R)` and `(A, R, V)`, from their logits `(A, R, V)` float32."""
        offsets = []
        for sequence, rows in zip(step.sequences, real, strict=True):
            own = [sequence.new_count + row.position - rows[0].position for row in rows]
            offsets.append([*own, *[-1] * (logits.shape[1] - len(own))])

        def prefix(entry: int, row: int) -> list[int]:
            path: list[Any] = []
            while row > 0:
                path.insert(0, real[entry][row].token)
                row = real[entry][row].parent
            return step.sequences[entry].new_tokens + path

        def follow(entry: int, row: int, token: int) -> int | None:
            behind = (child for child, draft in enumerate(real[entry]) if child and draft.parent == row)
            return next((child for child in behind if real[entry][child].token == token), None)

        indices = [sequence.index for sequence in step.sequences]
        return self.sampler.choose_in_order(logits, offsets, indices, prefix, follow)

    def _runs(self, step: Step, size: int) -> list[list[tuple[int, int]]]:
        """Of the masks behind each AR row that draft: the column of the first, and their number."""
        count = step.parents.shape[1]
        found = []
        for sequence in step.sequences:
            runs = [(count - 1, 0)] * size
            for place, masks in mask_runs(sequence.rows).items():
                skipped = min(self.drafter.skipped_masks, len(masks))
                first = count - len(sequence.rows) + masks.start
                runs[place + 1 - sequence.pending] = first + skipped, len(masks) - skipped
            found.append(runs)
        return found

    # --- what becomes final ------------------------------------------------------------------------------------------

    def settle(self, sequence: SequenceState, readings: list[list[int]], cut: Cut) -> SequenceOutcome:
        """Adds the accepted drafts and the AR head's own token behind them. What masks draft is the next outlook."""
        tokens, (end,), *guesses = readings
        rows, root = sequence.rows, sequence.pending - 1
        path = [root + end]
        while path[0] > root:
            path.insert(0, rows[path[0]].parent)
        checked = range(root + 1, sequence.unmasked)
        for place in checked:
            if (parent := rows[place].parent) in path:
                self.planner.learn(rows[place]._replace(parent=parent - root - 1), place in path)
        settled = [*(token for place in path[1:] if (token := rows[place].token) is not None), tokens[end]]
        count = cut(sequence, settled)
        is_kept = not self.keeps_state or len(rows) == sequence.pending
        outcome = SequenceOutcome(
            sequence=sequence,
            rows=rows,
            new_tokens=settled[:count],
            kept=[*range(root + 1), *path[1:count]] if is_kept else [],
            decided=[(place - root, sequence.new_count + n, settled[n]) for n, place in enumerate(path[:count])],
            checked=checked,
            accepted=path[1 : count + 1],
        )
        sequence.committed += len(outcome.kept)
        sequence.tokens += outcome.new_tokens
        if self._tokens is not None:
            self._tokens += count
        if not sequence.is_finished:
            masks = max(0, len(mask_runs(rows).get(path[-1], ())) - self.drafter.skipped_masks)
            drafts = self.drafter.drafts(sequence, masks, guesses[0] if guesses else [])
            self._outlooks[sequence.index] = Outlook(drafts, masks, sequence.remaining)
        return outcome


def _real_rows(sequence: SequenceState) -> list[Row]:
    """A sequence's root and drafts, with parents counted from the root."""
    root = max(0, sequence.pending - 1)
    return [row._replace(parent=row.parent - root) for row in sequence.rows[root:] if row.token is not None]
