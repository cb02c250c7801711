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
- *μ_k*, see [`Worth`], a mean over the steps where masks drafted so deep: what the best plan nets with the drafts of
  depth k, beyond what the best one nets with those of less depth alone. Both have their masks for the step behind.
  (The value of a state in a decision process is what it lets one do: Bellman.) μ_1 is less by what other drafts net in
  the steps that have none of masks.

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

Ranking = list[tuple[float, Row]]  # drafts with their reach, the likeliest first; parents by rank, 0 is the root
Option = tuple[int, int]  # drafts and masks of each sequence
StepSize = tuple[int, bool, int]  # physical rows of all sequences, whether masks are among them, and the sequences


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


def choose(gains: Any, prices: Any, credit: float, hopes: Any = -np.inf, fee: float = 0.0) -> tuple[Option, float]:
    """The option that nets most, gains − prices; of equal ones that with the fewest drafts, then masks. Or a look: of
    the options that net less by no more than the credit, the one with the most hopes, if the credit pays the fee, too.

    Args:
        gains, prices: `(drafts, masks)`, tokens that so many of them bring, and that their time costs; infinite prices
            forbid.
        credit, fee: tokens that a look may cost, and those that any look costs.
        hopes: `(drafts, masks)`, or one for all; −∞ where a look would show nothing.

    Returns:
        The option, and the tokens that a look costs.
    """
    nets = gains - prices
    best = _argmax(nets)
    losses = nets[best] - nets
    hopes = np.where(losses <= credit, hopes, -np.inf)
    look = _argmax(hopes)
    cost = float(losses[look]) + fee
    return (best, 0.0) if look == best or hopes[look] == -np.inf or cost > credit else (look, cost)


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


class Worth:
    """What masks are worth, by depth: what the drafts net that they make."""

    def __init__(self, depth: int, is_chain: bool):
        self.depth, self.is_chain = depth, is_chain
        first = np.eye(1, max(1, depth))[0]
        self.mean, self.known = CHANCE * first, ENOUGH * first  # mu of each depth; how many steps it is the mean of
        self._maskless = 0.0  # what drafts that are not of the text netted lately where no masks drafted

    def forget(self) -> None:
        """A step has passed."""
        self.known *= MEMORY

    def values(self, table: Table, included: Any) -> Any:
        """The worth of each mask, by the choice of drafts, the row that it stands behind, and its place there.
        `included` are choices, `(1, N, ranks)`: 1 for the drafts that are checked."""
        # No depth is worth more than the one before. What was not met lately passes as often as the first.
        worth = [max(float(self.mean[0]), LOOK_SHARE)]
        for value, known in zip(self.mean[1:].tolist(), self.known[1:].tolist(), strict=True):
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

    def learn(self, foreseen: int, ranking: Ranking, table: Table, prices: Any, step: int) -> None:
        """Learns what the drafts of each depth net in a step; where no masks drafted, what the drafts do that are not
        of the text."""
        if not ranking:
            self._maskless *= MEMORY
            return
        deepest = min(foreseen, self.depth)
        if deepest > SHALLOW and step % SELDOM and self.known[:deepest].min() >= ENOUGH:
            return
        parts = _parts(ranking, deepest)
        # The likeliest drafts of each part, 0 and more of them; all parts' options lie one behind the other.
        counts = parts.cumsum(1) - 1
        part, count = np.nonzero(np.arange(parts.shape[1]) <= counts[:, -1:])
        included = (parts[part] & (counts[part] <= count[:, None])).astype(np.float32)
        values = self.values(table, np.pad(included, ((0, 0), (0, table.reach.shape[1] - included.shape[1])))[None])
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
        self.known[:deepest] = 1 + np.minimum(self.known[:deepest], ENOUGH)
        self.mean[:deepest] += (more - self.mean[:deepest]) / self.known[:deepest]


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
        self.times, self.is_timed, self.depth, self.run = times, times.is_measured, depth, run
        self.keeps_state, self.most_rows = keeps_state, most_rows
        self.odds, self.worth, self.commits = Odds(), Worth(depth, is_chain), Commits()
        self.gain = 0.0  # tokens of all sequences that the best plan with masks nets beyond the best one without
        self._reached, self._took = 1.0, 1.0  # lately: tokens of a sequence, and the time of steps in AR steps
        self._credit = (150 if keeps_state else 100) * LOOK_SHARE  # tokens of a sequence that looks may cost
        self._steps = 0

    def plan(self, outlooks: Sequence[Outlook], before: int = 0) -> list[Tree]:
        """The drafts and masks of each sequence in the next forward. Where a state is kept, `before` pending tokens
        stand in front of the root."""
        if self.keeps_state and not before and self._reached < (1 - LOOK_SHARE) * self._took:
            # No plan's price has what its tokens cost while they are pending; the rate that was reached has.
            return [Tree() for _ in outlooks]
        count, rankings = len(outlooks), [self._ranking(each) for each in outlooks]
        table = _table(outlooks, rankings)
        values = self.worth.values(table, np.tri(table.reach.shape[1], dtype=np.float32)[None])
        gains, homes = _gains(values, table.reach.cumsum(1) - 1)
        drafts, masks = np.arange(gains.shape[1])[:, None], np.arange(gains.shape[2])
        rows = 1 + before + drafts + masks + self.run.skipped * homes.max(0)
        prices = self._prices(rows, count, self.times.of)
        # What drafts net is learned from one sequence at a time.
        turn = self._steps // (SELDOM if self.depth > SHALLOW else 1) % count
        own = Table(*(each[turn : turn + 1] for each in table))
        self.worth.learn(outlooks[turn].foreseen, rankings[turn], own, prices / count, self._steps)
        chosen = self._choose(outlooks, gains.sum(0), prices, rows)
        if self.keeps_state and any(chosen):
            cost = self._reading(before, int(rows[chosen]), chosen[1] > 0)
            if self.commits.is_due(float(gains[0][chosen] - prices[chosen]), cost, before):
                chosen = 0, 0
        return [self._spend(*each, *chosen) for each in zip(rankings, values, strict=True)]

    def learn(self, draft: Row, has_passed: bool) -> None:
        """Learns whether a draft passed, whose parent did."""
        self.odds.learn(draft, has_passed)

    def finish(self, size: StepSize, tokens: int, seconds: float, is_prefill: bool = False) -> None:
        """Learns from a step that has ended: its new tokens, and its seconds if it was timed."""
        rows, has_masks, sequences = size
        if is_prefill:  # no choice of a plan: AR decoding takes it, too
            self.times.prompts = rows, seconds
            return
        if self.times.is_measured:
            self.times.record(rows, has_masks, seconds)
        time = float(self.times.of(rows, has_masks) / self.times.of(sequences, False))
        self._reached, self._took = MEMORY * self._reached + tokens / sequences, MEMORY * self._took + time
        self._credit, self._steps = self._credit + LOOK_SHARE * tokens / sequences, self._steps + 1
        self.worth.forget()

    def _ranking(self, outlook: Outlook) -> Ranking:
        """The likeliest drafts, as many as a step checks and the sequence has room for."""
        most = min(max(MOST_DRAFTS, self.depth), self.most_rows - 1)
        drafts, reaches = outlook.drafts, self.odds.reaches(outlook.drafts)
        allowed = [place for place, draft in enumerate(drafts) if draft.position < outlook.room]
        places = sorted(allowed, key=lambda place: -reaches[place])[:most]
        ranks = {place: rank for rank, place in enumerate([-1, *places])}
        return [(reaches[place], drafts[place]._replace(parent=ranks[drafts[place].parent])) for place in places]

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
        """The best option that a step may be as wide as, or one to look at."""
        count = len(outlooks)
        widest = max(rows[0, 0], self.times.widest(count) / count + self.run.skipped)
        prices = np.where(rows <= widest, prices, np.inf)
        nets = gains - prices
        self.gain = max(float(nets[:, 1:].max() - nets[:, 0].max()), -count)
        is_commit = rows[0, 0] > 1 and nets.max() <= 0  # comes before a look
        is_near_end = min(each.room for each in outlooks) <= 2 * self.depth  # a look is of no use
        hopes = -np.inf if is_commit or is_near_end else self._hopes(gains, nets, rows, count)
        # Where a state is kept, the look's token is read again, and about two of the step that checks its drafts.
        fee = self._reading(3, rows[0, 0] + 3, False) if self.keeps_state else 0.0
        chosen, cost = choose(gains, prices, self._credit * count, hopes, fee)
        self._credit -= cost / count
        return chosen

    def _hopes(self, gains: Any, nets: Any, rows: Any, count: int) -> Any:
        """What each option may net, as far as a look would show that; −∞ if there is nothing to find out."""
        if self.gain <= 0 and self.worth.known[0] < 1:  # no masks drafted lately
            return np.where(np.arange(rows.shape[1]), nets, -np.inf)
        if not self.times.is_measured or self._steps % ENOUGH:
            return -np.inf
        hopes = gains - self._prices(rows, count, self.times.least)
        return np.where(hopes > nets.max(), hopes, -np.inf)

    def _reading(self, tokens: int, rows: int, has_masks: bool) -> float:
        """What it costs, in tokens, that so many of a step's rows are read again."""
        return self._rate(1) * float(self.times.of(rows, has_masks) - self.times.of(rows - tokens, has_masks))

    def _spend(self, ranking: Ranking, values: Any, drafts: int, masks: int) -> Tree:
        """A sequence's own best drafts and masks. The likeliest child stands right behind its parent."""
        drafts = min(drafts, len(ranking))
        worth = values[drafts, : 1 + drafts].ravel()
        best = np.argsort(-worth, kind="stable")[:masks]
        behind = np.bincount(best[worth[best] > 0] // values.shape[-1], minlength=1 + drafts)
        behind += self.run.skipped * (behind > 0)
        paths: list[tuple[int, ...]] = [(0,)]
        for rank, (_, draft) in enumerate(ranking[:drafts], 1):
            paths.append((*paths[draft.parent], rank))
        order = sorted(range(1 + drafts), key=paths.__getitem__)
        rows = {rank: row for row, rank in enumerate(order, -1)}
        checked = [ranking[rank - 1][1] for rank in order[1:]]
        checked = [draft._replace(parent=rows[draft.parent]) for draft in checked]
        return with_masks(checked, behind[order].tolist(), self.run)


def _parts(ranking: Ranking, deepest: int) -> Any:
    """For each depth, which drafts there are down to it, with all drafts of the text. Where no masks drafted: the
    drafts of the text alone, and all drafts. `(depths, ranks)` bool; the root is the first rank."""
    depths = np.arange(deepest + 1) if deepest else np.array([0, maxsize])
    parts = np.ones((len(depths), 1 + len(ranking)), dtype=bool)
    for rank, (_, draft) in enumerate(ranking, 1):
        is_in = parts[:, draft.parent]  # drafts of the text stay, where their parents do
        parts[:, rank] = is_in if draft.chance in (None, CERTAIN) else is_in & (depths >= draft.position)
    return parts


def _table(outlooks: Sequence[Outlook], rankings: Sequence[Ranking]) -> Table:
    """Their drafts by rank."""
    size = 1 + max(map(len, rankings))
    reach, room = np.zeros((2, len(rankings), size), dtype=np.float32)
    children = np.zeros((len(rankings), size, size), dtype=np.float32)
    for entry, (outlook, ranking) in enumerate(zip(outlooks, rankings, strict=True)):
        reach[entry, 0], room[entry, 0] = 1.0, outlook.room - 1
        for rank, (chance, draft) in enumerate(ranking, 1):
            reach[entry, rank], room[entry, rank] = chance, outlook.room - 1 - draft.position
            children[entry, rank, draft.parent] = chance
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
