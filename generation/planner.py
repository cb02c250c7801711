"""Which rows go into the next forward: one rule for all verified decoders (docs/algorithm.md#planning).

A step forwards each sequence's last final token (the *root*), n drafts, and m masks behind these rows. A draft's
*reach* r is the chance that the AR head confirms it and all before it (the root's is 1); the accepted path ends at a
row with chance w = its r − Σ r of its children. A step gives 1 + Σ r tokens. The k-th mask behind a row is worth
w·μ_k: with chance w it drafts in the next step, where drafts of depth k net μ_k tokens. Where a unit of time brings ρ
tokens, a plan nets

    Σ r + Σ w·μ − ρ·(t(rows) − t(AR step)),

and the one that nets most is taken, of all n (the likeliest drafts) and m (the masks worth most). AR decoding is the
plan without either, which nets 0. In a batch, n and m are the same for all sequences, since they have as many columns.
Each spends them on its own best.

What is not given is learned:

- *r* from the drafter's own probabilities, see [`Odds`]; *t* by a clock, see [`StepTimes`];
- *ρ*, the rate that was reached lately, or AR's if that is more;
- *μ_k*, a mean over the steps where masks drafted so deep: what the best plan nets with the drafts of depth k, beyond
  what the best one nets with those of less depth alone. Both have their masks for the step behind. (The value of a
  state in a decision process is what it lets one do: Bellman.) μ_1 is less by what other drafts net in the steps that
  have none of masks.

What is never tried is never known. A small share of the tokens may be lost to *looks*: at masks, if none drafted
lately, or else at the plan that would net most if widths that were not measured lately took as little as they might.

All n and m of all sequences are one array: the planner takes a fraction of a millisecond.
"""

from collections.abc import Callable, Sequence
from sys import maxsize
from typing import Any, NamedTuple

import numpy as np

from .commits import Commits
from .rows import ADAPTER_MASKS, CERTAIN, MOST_DRAFTS, MaskRun, Row, Tree, with_masks
from .step_times import ENOUGH, MEMORY, StepTimes

# What a draft's chance is taken for before anything is known.
CHANCE = 0.7

# Masks of a sequence in a step, behind all rows together: where rows cost nothing, each is worth something.
MOST_MASKS = 256
# Where masks stand up to this deep, what is known well is learned from each step, deeper from every so many-th one:
# there to weigh the drafts of each depth takes the planner longer than all else.
SHALLOW, SELDOM = 8, 4
# Drafts of similar probability share a correction: bins of it, for the likeliest tokens and for their siblings.
BINS = 8
# Share of the tokens that looking may cost. A planner begins with the share of 100 steps, or of 150 where a state is
# kept: there, what a look finds is read again.
LOOK_SHARE = 0.01

Ranking = list[tuple[float, int]]  # reach and place of drafts, the likeliest first
Option = tuple[int, int]  # drafts and masks of each sequence


class Outlook(NamedTuple):
    """What may follow a sequence."""

    drafts: Sequence[Row]  # parents first
    foreseen: int  # depths down to which masks drafted
    room: int  # new tokens allowed


class Table(NamedTuple):
    """What is known of the drafts of sequences, by their rank. The root comes first, and zeros where there are fewer
    drafts."""

    reach: Any  # `(sequences, ranks)` float32
    room: Any  # `(sequences, ranks)` float32, new tokens allowed behind
    children: Any  # `(sequences, ranks, ranks)` float32: of a draft and its parent, the draft's reach


class Odds:
    """What the chances of drafts are worth: their own, corrected by what became of drafts with similar ones."""

    def __init__(self) -> None:
        # Of each bin, how many drafts passed, and how many should have by their chances.
        self._met: dict[tuple[int, int], tuple[float, float]] = {}

    def learn(self, draft: Row, has_passed: bool) -> None:
        """Learns whether a draft passed, whose parent did."""
        key, chance = _bin(draft)
        passed, expected = self._met.get(key, (0.0, 0.0))
        self._met[key] = MEMORY * passed + has_passed, MEMORY * expected + chance

    def reaches(self, drafts: Sequence[Row]) -> list[float]:
        """Each draft's reach: the chance that it and all drafts before it pass."""
        found: list[float] = []
        for draft in drafts:
            key, chance = _bin(draft)
            passed, expected = self._met.get(key, (0.0, 0.0))
            chance = min(1.0, chance * (passed + ENOUGH * chance) / (expected + ENOUGH * chance or 1.0))
            found.append(chance * (found[draft.parent] if draft.parent >= 0 else 1.0))
        return found


class Planner:
    """Chooses the rows of each step, and learns from what became of them. It may outlive a call.

    Args:
        times: of steps.
        depth: the most drafting masks behind a row.
        is_chain: masks stand behind the last draft alone.
        run: how masks stand behind a row.
        keeps_state: the model keeps a state, see [`Commits`].
        most_rows: of a sequence in a step.
    """

    def __init__(
        self,
        times: StepTimes,
        depth: int,
        is_chain: bool = False,
        run: MaskRun = ADAPTER_MASKS,
        keeps_state: bool = False,
        most_rows: int = maxsize,
    ):
        self.times, self.depth, self.is_chain, self.run, self.keeps_state = times, depth, is_chain, run, keeps_state
        self.most_rows = most_rows
        self.commits = Commits() if keeps_state else None
        self.gain = 0.0  # tokens of all sequences that the best plan with masks nets beyond the best one without
        self.odds = Odds()
        first = np.eye(1, max(1, depth))[0]
        self._worth, self._known = CHANCE * first, ENOUGH * first  # mu of each depth; how many steps it is the mean of
        self._maskless = 0.0  # what drafts that are not of the text netted lately where no masks drafted
        self._reached, self._took = 1.0, 1.0  # lately: tokens of a sequence, and the time of steps in AR steps
        self._credit = (150 if keeps_state else 100) * LOOK_SHARE  # tokens that looks may cost
        self._steps = 0
        self._step = 0.0, 1, False, 1

    def learn(self, draft: Row, has_passed: bool) -> None:
        """Learns whether a draft passed, whose parent did."""
        self.odds.learn(draft, has_passed)

    def begin(self, rows: int, has_masks: bool, sequences: int) -> None:
        """Notes that a forward of so many physical rows begins."""
        self._step = self.times.clock() if self.times.clock else 0.0, rows, has_masks, sequences

    def finish(self, tokens: int) -> None:
        """Learns from the step that began last: its time, and its new tokens."""
        began, rows, has_masks, sequences = self._step
        if self.times.clock:
            self.times.record(rows, has_masks, self.times.clock() - began)
        time = float(self.times.of(rows, has_masks) / self.times.of(sequences, False))
        self._reached, self._took = MEMORY * self._reached + tokens / sequences, MEMORY * self._took + time
        self._credit, self._steps = self._credit + LOOK_SHARE * tokens / sequences, self._steps + 1
        self._known *= MEMORY

    def plan(self, outlooks: Sequence[Outlook], before: int = 0) -> list[Tree]:
        """The drafts and masks of each sequence in the next forward. Where a state is kept, `before` pending tokens
        stand in front of the root."""
        if self.keeps_state and not before and self._reached < (1 - LOOK_SHARE) * self._took:
            # No plan's price has what its tokens cost while they are pending; the rate that was reached has.
            return [Tree() for _ in outlooks]
        count, trees = len(outlooks), [self._tree(each) for each in outlooks]
        table = _table(outlooks, trees)
        values = self._values(table, np.tri(table.reach.shape[1], dtype=np.float32)[None])
        gains, homes = _gains(values, table.reach.cumsum(1) - 1)
        drafts, masks = np.arange(gains.shape[1])[:, None], np.arange(gains.shape[2])
        rows = 1 + before + drafts + masks + self.run.skipped * homes.max(0)
        prices = self._prices(rows, count, self.times.of)
        # What drafts net is learned from one sequence at a time.
        turn = self._steps // (SELDOM if self.depth > SHALLOW else 1) % count
        self._learn_worth(
            outlooks[turn], trees[turn], Table(*(each[turn : turn + 1] for each in table)), prices / count
        )
        chosen = self._choose(outlooks, gains.sum(0), prices, rows)
        if self.commits and sum(chosen):
            wide, narrow = self.times.of(np.array([rows[chosen], rows[chosen] - before]), chosen[1] > 0)
            cost = self._rate(count) * float(wide - narrow)
            if self.commits.is_due(float(gains[0][chosen] - prices[chosen]), cost, before):
                chosen = 0, 0
        return [self._spend(*each, *chosen) for each in zip(outlooks, trees, values[:count], strict=True)]

    def _prices(self, rows: Any, count: int, times: Callable[[Any, bool], Any]) -> Any:
        """The tokens that each option must bring to pay for its time, by numbers of drafts and of masks."""
        time = times(count * rows, True)  # a new array
        time[:, 0] = times(count * rows[:, 0], False)
        longer = time - self.times.of(count * rows[0, 0], False)
        prices = np.where(rows <= self.most_rows, self._rate(count) * longer, np.inf)
        prices[0, 0] = 0.0  # a step that has no choice may have more rows
        return prices

    def _rate(self, count: int) -> float:
        """Tokens of all sequences per time, lately or of AR decoding."""
        return max(1.0, self._reached / self._took) * count / float(self.times.of(count, False))

    def _choose(self, outlooks: Sequence[Outlook], gains: Any, prices: Any, rows: Any) -> Option:
        """The option that nets most, or the one to look at."""
        count = len(outlooks)
        widest = max(rows[0, 0], self.times.widest(count) / count + self.run.skipped)
        nets = np.where(rows <= widest, gains - prices, -np.inf)
        masked = np.where(np.arange(rows.shape[1]), nets, -np.inf)
        self.gain = max(float(masked.max() - nets[:, 0].max()), -count)
        best = look = _argmax(nets)
        if not best[1] and self._known[0] < 1:
            look = _argmax(masked)
        elif self.times.clock and not self._steps % ENOUGH:
            hopes = gains - self._prices(rows, count, self.times.least)
            hopes = np.where(nets[best] - nets <= self._credit * count, hopes, -np.inf)
            look = _argmax(hopes) if hopes.max() > nets[best] else best
        is_commit = rows[0, 0] > 1 and not sum(best)  # comes before a look
        if look == best or is_commit or min(each.room for each in outlooks) <= 2 * self.depth:  # of no use
            return best
        loss = float(nets[best] - nets[look]) / count
        if self.commits:  # its token, and about two of the step that checks its drafts, are read again
            loss += self._rate(1) * float(self.times.of(rows[0, 0] + 3, False) - self.times.of(rows[0, 0], False))
        if loss > self._credit:
            return best
        self._credit -= loss
        return look

    def _tree(self, outlook: Outlook) -> Ranking:
        """The likeliest drafts, as many as a step checks and the sequence has room for."""
        most = min(max(MOST_DRAFTS, self.depth), self.most_rows - 1)
        tree = sorted([(-reach, place) for place, reach in enumerate(self.odds.reaches(outlook.drafts))])
        return [(-reach, place) for reach, place in tree if outlook.drafts[place].position < outlook.room][:most]

    def _learn_worth(self, outlook: Outlook, tree: Ranking, table: Table, prices: Any) -> None:
        """Learns what the drafts of each depth net in a step; where no masks drafted, what the drafts do that are not
        of the text."""
        if not tree:
            self._maskless *= MEMORY
            return
        deepest = min(outlook.foreseen, self.depth)
        if deepest > SHALLOW and self._steps % SELDOM and self._known[:deepest].min() >= ENOUGH:
            return
        parts = _parts(outlook, tree, deepest)
        # The likeliest drafts of each part, 0 and more of them; all parts' options lie one behind the other.
        counts = parts.cumsum(1) - 1
        part, count = np.nonzero(np.arange(parts.shape[1]) <= counts[:, -1:])
        included = (parts[part] & (counts[part] <= count[:, None])).astype(np.float32)
        values = self._values(table, np.pad(included, ((0, 0), (0, table.reach.shape[1] - included.shape[1])))[None])
        flat = values[0].reshape(len(included), -1)
        flat.sort(1)
        first = included @ table.reach[0, : included.shape[1]] - 1
        nets = np.concatenate([first[:, None], first[:, None] + flat[:, : -MOST_MASKS - 1 : -1].cumsum(1)], 1)
        best = np.maximum.reduceat((nets - prices[count]).max(1), np.flatnonzero(count == 0))
        more = np.diff(np.maximum.accumulate(best))
        if not deepest:
            self._maskless += (1 - MEMORY) * (float(more[0]) - self._maskless)
            return
        more[0] -= self._maskless
        self._known[:deepest] = 1 + np.minimum(self._known[:deepest], ENOUGH)
        self._worth[:deepest] += (more - self._worth[:deepest]) / self._known[:deepest]

    def _values(self, table: Table, included: Any) -> Any:
        """The worth of each mask, by the choice of drafts, the row that it stands behind, and its place there.
        `included` are choices, `(1, N, ranks)`: 1 for the drafts that are checked."""
        # No depth is worth more than the one before. What was not met lately passes as often as the first.
        worth = [max(float(self._worth[0]), LOOK_SHARE)]
        for value, known in zip(self._worth[1:].tolist(), self._known[1:].tolist(), strict=True):
            worth.append(min(worth[-1], (known * value + worth[-1] * min(worth[0], 1.0)) / (known + 1)))
        # The chance that the path ends at a row.
        if self.is_chain:
            is_there = included * (table.reach[:, None] > 0)
            is_last = np.arange(included.shape[2]) == is_there.shape[2] - 1 - is_there[..., ::-1].argmax(2)[..., None]
            ends = np.where(is_last, table.reach[:, None], 0)
        else:
            ends = abs(included * (table.reach[:, None] - included @ table.children).clip(0))  # no -0
        values = ends[..., None] * np.array(worth, dtype=np.float32)
        return values * (np.arange(len(worth)) < table.room[:, None, :, None])

    def _spend(self, outlook: Outlook, tree: Ranking, values: Any, drafts: int, masks: int) -> Tree:
        """A sequence's own best drafts and masks. The likeliest child stands right behind its parent."""
        drafts = min(drafts, len(tree))
        worth = values[drafts, : 1 + drafts].ravel()
        behind = np.zeros(1 + drafts, dtype=int)
        for place in np.argsort(-worth, kind="stable")[:masks] if masks else ():
            behind[place // values.shape[-1]] += worth[place] > 0
        behind += self.run.skipped * (behind > 0)
        paths: dict[int, tuple[int, ...]] = {-1: (0,)}
        for rank, (_, place) in enumerate(tree[:drafts], 1):
            paths[place] = *paths[outlook.drafts[place].parent], rank
        order = sorted(paths, key=paths.__getitem__)
        rows = {place: row for row, place in enumerate(order, -1)}
        chosen = [outlook.drafts[place]._replace(parent=rows[outlook.drafts[place].parent]) for place in order[1:]]
        return with_masks(chosen, [int(behind[paths[place][-1]]) for place in order], self.run)


def _parts(outlook: Outlook, tree: Ranking, deepest: int) -> Any:
    """For each depth, which drafts there are down to it, with all drafts of the text. Where no masks drafted: the
    drafts of the text alone, and all drafts. `(depths, ranks)` bool; the root is the first rank."""
    depths = np.arange(deepest + 1) if deepest else np.array([0, maxsize])
    parts = np.ones((len(depths), 1 + len(tree)), dtype=bool)
    ranks = {-1: 0}
    for rank, (_, place) in enumerate(tree, 1):
        draft, ranks[place] = outlook.drafts[place], rank
        is_in = parts[:, ranks[draft.parent]]  # drafts of the text stay, where their parents do
        parts[:, rank] = is_in if draft.chance in (None, CERTAIN) else is_in & (depths >= draft.position)
    return parts


def _table(outlooks: Sequence[Outlook], trees: Sequence[Ranking]) -> Table:
    """Their drafts by rank."""
    size = 1 + max(map(len, trees))
    reach, room = np.zeros((2, len(trees), size), dtype=np.float32)
    children = np.zeros((len(trees), size, size), dtype=np.float32)
    for entry, (outlook, tree) in enumerate(zip(outlooks, trees, strict=True)):
        ranks = {-1: 0}
        reach[entry, 0], room[entry, 0] = 1.0, outlook.room - 1
        for rank, (chance, place) in enumerate(tree, 1):
            draft, ranks[place] = outlook.drafts[place], rank
            reach[entry, rank], room[entry, rank] = chance, outlook.room - 1 - draft.position
            children[entry, rank, ranks[draft.parent]] = chance
    return Table(reach, room, children)


def _gains(values: Any, first: Any) -> tuple[Any, Any]:
    """The tokens that each number of drafts and of masks brings each sequence, and behind how many rows masks
    stand; `first` is what drafts bring."""
    flat = values.reshape(*values.shape[:2], -1)
    # Numbers that are never negative are in the order of their bits. Numpy sorts integers much faster than it
    # finds an order; of equal values the first comes first, which behind a row is worth most.
    last = flat.shape[2] - 1
    keys = flat.view(np.uint32).astype(np.uint64) << 32 | np.arange(last, -1, -1, dtype=np.uint64)
    keys.sort(-1)
    order = last - (keys[..., : -MOST_MASKS - 1 : -1] & 0xFFFFFFFF).astype(np.int64)
    first = first[..., None]
    gains = np.concatenate([first, first + np.take_along_axis(flat, order, 2).cumsum(2)], 2)
    homes = np.zeros(gains.shape, dtype=int)
    homes[..., 1:] = (order % values.shape[3] == 0).cumsum(2)
    return gains, homes


def _argmax(nets: Any) -> Option:
    return divmod(int(nets.argmax()), nets.shape[1])


def _bin(draft: Row) -> tuple[tuple[int, int], float]:
    """The bin of a draft, and the chance that it has by itself."""
    if draft.chance is None:
        return (2, int(draft.parent >= 0)), CHANCE
    return (int(draft.is_sibling), int(draft.chance * BINS)), draft.chance
