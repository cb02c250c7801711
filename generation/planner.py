"""Which rows go into the next forward: one rule for chains, branches, trees and text drafts (ALGORITHM.md §6).

A step forwards each sequence's last final token (the *root*), n drafts, and m masks behind these rows. A draft's
*reach* r is the chance that the AR head confirms it and all before it (the root's is 1); the accepted path ends at a
row with chance w = its r − Σ r of its children. A step gives 1 + Σ r tokens. The k-th mask behind a row is worth
w·μ_k: with chance w it drafts in the next step, where drafts of depth k net μ_k tokens. Where a unit of time brings ρ
tokens, a plan nets

    Σ r + Σ w·μ − ρ·(t(rows) − t(AR step)),

and the one that nets most is taken, of some numbers n (the likeliest drafts) and all m (the masks worth most). AR
decoding is the plan without either, which nets 0. In a batch, n and m are the same for all sequences, since they have
as many columns. Each spends them on its own best.

What is not given is learned: *r* from the drafter's own probabilities, corrected by what became of similar drafts;
*ρ*, the rate that was reached lately, or AR's if that is more; *t*, see [`StepTimes`]; *μ_k*, the mean of what the
best plan with the drafts up to depth k netted beyond the best one with those up to k − 1, masks for the step behind
included. (The value of a state in a decision process is what it lets one do: Bellman.)

What is never tried is never known. A small share of the tokens may be lost to *looks*: at masks, if none drafted
lately, or else at the plan that would net most if widths that were not measured lately took as little as they might.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise, zip_longest
from math import isfinite
from sys import maxsize
from typing import Any, NamedTuple

from .commits import Commits
from .drafter import CHANCE, Draft, Outlook
from .step_times import ENOUGH, MEMORY, StepTimes

# Drafts of similar probability share a correction: bins of it, for the likeliest tokens and for their siblings.
BINS = 8
# Share of the tokens that looking may cost; those of the first hundred steps at once.
LOOK_SHARE = 0.01
# Numbers of drafts that are compared, beside all there are.
DRAFT_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12)

Tree = list[tuple[float, int]]  # reach and place of drafts, the likeliest first
Option = tuple[float, int, int]  # tokens beyond an AR step's; drafts and masks of each sequence


class Plan(NamedTuple):
    """A sequence's rows of the next forward."""

    drafts: list[Draft]  # parents first
    masks: list[int]  # how many follow the root and each draft


class Planner:
    """Chooses the rows of each step, and learns from what became of them. It may outlive a call.

    Args:
        times: of steps.
        depth: masks behind one row that draft something, at most.
        is_chain: masks stand behind the last draft alone.
        lost: masks behind a row that draft nothing, since the AR head decides their position.
        keeps_state: so does the model, see [`Commits`].
    """

    def __init__(self, times: StepTimes, depth: int, is_chain: bool = False, lost: int = 0, keeps_state: bool = False):
        self.times, self.depth, self.is_chain, self.lost = times, depth, is_chain, lost
        self.most_rows = maxsize  # of one sequence's step
        self.commits = Commits(times) if keeps_state else None
        self.key: Any = None  # of what it learned about, where that is kept
        self.gain = 0.0  # tokens of all sequences that the best plan with masks nets beyond the best one without
        # Of each bin, drafts that passed, and those that should have.
        self._chances: dict[tuple[int, int], tuple[float, float]] = {}
        # mu of each depth, how many observations it rests on, and the step of the last one.
        self._worth = [(CHANCE, float(ENOUGH), 0)] + [(0.0, 0.0, 0)] * (depth - 1)
        self._reached, self._took = 1.0, 1.0  # tokens of a sequence, and the time, in AR steps
        self._credit, self._steps = 100 * LOOK_SHARE, 0  # the first: tokens that looks may cost
        self._step = 0.0, 1, False, 1, False

    def learn(self, draft: Draft, has_passed: bool) -> None:
        """Takes in what became of a draft whose parent passed."""
        key, chance = _bin(draft)
        passed, expected = self._chances.get(key, (0.0, 0.0))
        self._chances[key] = MEMORY * passed + has_passed, MEMORY * expected + chance

    def begin(self, rows: int, has_masks: bool, sequences: int, is_prompt: bool = False) -> None:
        """A forward of so many physical rows begins; prompts are among them."""
        self._step = self.times.clock() if self.times.clock else 0.0, rows, has_masks, sequences, is_prompt

    def finish(self, tokens: int) -> None:
        """The step that began is over, and gave so many tokens."""
        began, rows, has_masks, sequences, is_prompt = self._step
        seconds = self.times.clock() - began if self.times.clock else 0.0
        if is_prompt:
            self.times.record_prompt(rows, seconds)
            return
        if self.commits:
            self.commits.note(tokens, rows, has_masks)
        if self.times.clock:
            self.times.record(rows, has_masks, seconds)
        time = self.times.of(rows, has_masks) / self.times.of(sequences, False)
        self._reached, self._took = MEMORY * self._reached + tokens / sequences, MEMORY * self._took + time
        self._credit, self._steps = self._credit + LOOK_SHARE * tokens / sequences, self._steps + 1

    def reaches(self, drafts: Sequence[Draft]) -> list[float]:
        """The chance of each draft that it and all before it pass."""
        found: list[float] = []
        for draft in drafts:
            key, chance = _bin(draft)
            passed, expected = self._chances.get(key, (0.0, 0.0))
            chance = min(1.0, chance * (passed + ENOUGH * chance) / (expected + ENOUGH * chance or 1.0))
            found.append(chance * (found[draft.parent] if draft.parent >= 0 else 1.0))
        return found

    def plan(self, outlooks: Sequence[Outlook], before: int = 0) -> list[Plan]:
        """The rows of the next forward of these sequences, with so many rows in front of their roots: the prompts', or
        where a state is kept, the pending tokens'."""
        is_prompt = before > 0 and self.commits is None
        count, of, trees, worth = len(outlooks), self.times.of, [self._tree(each) for each in outlooks], self._worths()
        base, alone = count * (1 + before), of(count, False)
        rate = max(1.0, self._reached / self._took) * count / alone
        most = max(0, self.most_rows - 1 - before * (self.commits is not None))
        options = [each for each in self._options(outlooks, trees, worth) if each[1] + each[2] <= most]
        rows = range(1 + max(drafts + masks for _, drafts, masks in options))
        beyond = [alone + of(base, kind) - of(count, kind) for kind in (False, True)]
        doubt = [[0.0 for _ in rows]] * 2
        if not is_prompt:
            beyond = [of(base, False)] * 2
            doubt = [
                [0.0, *(rate * self.times.doubt(base + count * row, kind, count, self.lost) for row in rows[1:])]
                for kind in (False, True)
            ]
        cost = [[rate * (of(base + count * row, kind) - beyond[kind]) for row in rows] for kind in (False, True)]
        nets = []
        for gain, drafts, masks in options:
            kind, row = masks > 0, drafts + masks
            nets.append(gain - cost[kind][row] - doubt[kind][row])
        places = [place for place, net in enumerate(nets) if isfinite(net)]
        best = max(places, key=nets.__getitem__)
        masked = max((one for one in places if options[one][2] > self.lost), key=nets.__getitem__, default=best)
        self.gain = nets[masked] - max(nets[one] for one in places if not options[one][2])
        turn = self._steps % count
        deepest = min(outlooks[turn].foreseen, self.depth)
        if deepest and (self._worth[deepest - 1][1] < ENOUGH or not self._steps % ENOUGH):
            self._learn_worth(outlooks[turn], trees[turn], worth, [[one / count for one in each] for each in cost])
        look, (_, known, when) = best, self._worth[0]
        if not options[best][2] and known * MEMORY ** (self._steps - when) < 1:
            look = masked
        elif self.times.clock and not is_prompt and not self._steps % ENOUGH:
            least = [
                [rate * (self.times.least(base + count * row, kind) - beyond[0]) for row in rows]
                for kind in (False, True)
            ]
            near = [one for one in places if nets[best] - nets[one] <= self._credit * count]
            hopes = {one: options[one][0] - least[options[one][2] > 0][sum(options[one][1:])] for one in near}
            look = max(hopes, key=hopes.__getitem__, default=best)
            look = look if hopes.get(look, 0.0) > nets[best] else best
        loss = (nets[best] - nets[look]) / count
        if loss <= self._credit and min(each.room for each in outlooks) > 2 * self.depth:  # there is use for it
            self._credit, best = self._credit - loss, look
        _, drafts, masks = options[best]
        if self.commits and self.commits.is_due(
            outlooks[0].room, sum([reach for reach, _ in trees[0][:drafts]]), drafts, masks, before
        ):
            drafts = masks = 0
        return [self._spend(each, tree[:drafts], worth, masks) for each, tree in zip(outlooks, trees, strict=True)]

    def _tree(self, outlook: Outlook) -> Tree:
        """The likeliest drafts that there is room for."""
        most = min(max(DRAFT_COUNTS[-1], self.depth), self.most_rows - 1)
        tree = sorted([(-reach, place) for place, reach in enumerate(self.reaches(outlook.drafts))])
        return [(-reach, place) for reach, place in tree if outlook.drafts[place].depth < outlook.room][:most]

    def _worths(self) -> list[float]:
        """mu of each depth: no more than that of the one before. One that was not met lately passes as often as the
        first, which is always worth a look; what is next to nothing is nothing."""
        worth = [max(self._worth[0][0], 0.01)]
        for value, known, when in self._worth[1:]:
            known *= MEMORY ** (self._steps - when)
            worth.append(min(worth[-1], (known * value + worth[-1] * min(worth[0], 1.0)) / (known + 1)))
        return [one for one in worth if one > 0.005]

    def _learn_worth(self, outlook: Outlook, tree: Tree, worth: list[float], cost: list[list[float]]) -> None:
        """Takes in what the drafts of each depth net in a step."""
        nets: list[float] = []
        drafts = outlook.drafts
        for depth in range(min(outlook.foreseen, self.depth) + 1):
            kept, part = {-1}, []
            for reach, place in tree:
                if drafts[place].parent in kept and (drafts[place].chance is None or drafts[place].depth <= depth):
                    kept.add(place)
                    part.append((reach, place))
            least = len(part) if self.is_chain else 0  # plans with fewer drafts of a chain were met before
            options = self._options([outlook], [part], worth, least)
            options = [each for each in options if each[1] + each[2] < len(cost[0])]
            found = [gain - cost[masks > 0][count + masks] for gain, count, masks in options]
            nets.append(max([*nets[-1:], *found]))
        for depth, (less, more) in enumerate(pairwise(nets)):
            value, known, when = self._worth[depth]
            known = 1 + min(known, ENOUGH) * MEMORY ** (self._steps - when)
            self._worth[depth] = value + (more - less - value) / known, known, self._steps

    def _options(
        self, outlooks: Sequence[Outlook], trees: Sequence[Tree], worth: list[float], least: int = 0
    ) -> list[Option]:
        """What numbers of drafts, at least so many, and of masks bring."""
        most, found = max(map(len, trees)), []
        for drafts in [*(count for count in DRAFT_COUNTS if least <= count < most), most]:
            gain = sum([reach for tree in trees for reach, _ in tree[:drafts]])
            masks = [self._masks(outlook, tree[:drafts], worth) for outlook, tree in zip(outlooks, trees, strict=True)]
            columns = zip_longest(*([value for value, _ in each] for each in masks), fillvalue=0.0)
            gains = accumulate(map(sum, columns), initial=gain)
            found += [(gained, drafts, count) for count, gained in enumerate(gains)]
        return found

    def _masks(self, outlook: Outlook, tree: Tree, worth: list[float]) -> Tree:
        """What each mask is worth, and the place of the draft that it stands behind (-1: the root); the best first."""
        ends, found = {-1: 1.0}, []
        for reach, place in tree:
            ends[place] = reach
            ends[outlook.drafts[place].parent] -= reach
        if self.is_chain and tree:
            ends = {tree[-1][1]: tree[-1][0]}
        for place, end in ends.items():
            room = outlook.room - 1 - (outlook.drafts[place].depth if place >= 0 else 0)
            values = [0.0] * self.lost + [end * one for one in worth]
            found += [(value, place) for value in values[: room + self.lost if room > 0 else 0]]
        return found if self.is_chain else sorted(found, reverse=True)

    def _spend(self, outlook: Outlook, tree: Tree, worth: list[float], masks: int) -> Plan:
        """A sequence's own best drafts and masks. The likeliest child stands right behind its parent."""
        behind = Counter(place for _, place in self._masks(outlook, tree, worth)[:masks])
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        for rank, (_, place) in enumerate(tree):
            paths[place] = *paths[outlook.drafts[place].parent], rank
        order = sorted(paths, key=paths.__getitem__)
        rows = {place: row for row, place in enumerate(order, -1)}
        chosen = [outlook.drafts[place] for place in order[1:]]
        return Plan(
            [draft._replace(parent=rows[draft.parent]) for draft in chosen], [behind[place] for place in order]
        )


def _bin(draft: Draft) -> tuple[tuple[int, int], float]:
    """The bin of a draft, and the chance that it has by itself."""
    if draft.chance is None:
        return (2, int(draft.depth > 1)), CHANCE
    return (int(draft.is_sibling), min(int(draft.chance * BINS), BINS - 1)), draft.chance
