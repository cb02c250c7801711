"""Which rows go into the next forward: one planner for chains, branches, trees and drafts from the text (ALGORITHM.md
§6).

A step forwards each sequence's last final token (the *root*), n drafts, and m masks behind these real rows. Let q be
the chance that the AR head confirms a draft once it has confirmed the draft's parent, and the *reach* r the product
of q along the path from the root.

*Tokens.* A step gives 1 + Σ r tokens, summed over the n drafts.

*Masks* are an investment: those behind a real row draft the next step if the accepted path ends there, with chance
w = r − Σ r of its children. Mask k is worth w·μ_k, where μ_k is what drafts of depth k net in the step that checks
them.

*Price.* A row costs s, in tokens: the plan's time beyond an AR step, by the rate ρ, shared among its rows; or what the
best row that was left out would bring, where that is more (rows are free up to the edge of a stair, but few). With
φ(w) = Σ_k max(0, w·μ_k − s), what masks net behind a row that ends the path with chance w, a draft behind row u nets

    r − s + φ(r) + φ(w_u − r) − φ(w_u):

its token, its row, and that masks must now stand behind two rows. μ_k is the running mean of what the drafts of depth
k net together. Where masks stand behind the last draft alone (a chain), it is r − s + φ(r) − φ(w_u).

*Choice.* For some numbers of drafts n (the likeliest ones) and every number of masks m (those worth most), the plan
that maximises Σ r + Σ w·μ − ρ·t(rows) is taken: Dinkelbach's method, with ρ the rate that is reached, and at least
AR's own. AR decoding is the plan without drafts and masks. In a batch all sequences have the columns of the widest
one, so n and m are the same for all, and each sequence spends them on its own best drafts and masks.

*Looking.* What is never tried is never measured. A small share of the time goes into other plans: AR steps, masks
where AR steps are best, and widths whose time is not known and would be best if it were that of the next narrower one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, takewhile, zip_longest
from operator import neg
from sys import maxsize
from typing import Any, NamedTuple

from .step_times import StepTimes

# Drafts of similar probability share a chance: bins of it, for the likeliest tokens and for their siblings.
BINS = 8
# Observations that a prior counts for: a draft's own probability, or the gain of a depth.
PRIOR = 4.0
# What an observation still counts one step later: memory reaches about 50 steps back.
MEMORY = 0.98
# Chances before anything is known: of a draft of masks; of the first draft of a text, and of later ones.
MASK_CHANCE, TEXT_CHANCES = 0.65, (0.6, 0.9)
# Share of the tokens that looking may cost; and tokens that masks behind a prompt may cost, a look of every call.
LOOK_SHARE, PROMPT_LOOK = 0.015, 0.25
# Steps between two estimates of costs, and two thoughts about widths to measure: planning takes time.
PAUSE = 4
# Numbers of drafts that are compared, beside all there are.
DRAFT_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12)

Tree = list[tuple[float, int]]  # reach and place of drafts, the likeliest first


class Draft(NamedTuple):
    """A guess behind a sequence's root."""

    token: int
    parent: int  # the place of the draft that it follows in the list of drafts; -1 for the root
    depth: int  # 1 behind the root
    chance: float | None  # the drafter's own probability; `None` for drafts from the text
    is_sibling: bool = False  # a likelier token is drafted behind the same parent


class Outlook(NamedTuple):
    """What a sequence can do next."""

    drafts: list[Draft]  # parents first
    foreseen: int  # depths of them that masks drafted
    room: int  # new tokens allowed


class Plan(NamedTuple):
    """A sequence's rows of the next forward."""

    drafts: list[Draft]  # parents first
    masks: list[int]  # how many follow the root and each draft


class Choice(NamedTuple):
    """A plan for all sequences."""

    net: float  # tokens of all of them
    drafts: int  # of each, and masks
    masks: int
    left_out: float  # what the best row left out would bring


class Planner:
    """Chooses the rows of each step, and learns from what became of them. It may outlive a call.

    Args:
        times: of steps.
        depth: masks behind one row that draft something, at most.
        is_chain: masks stand behind the last draft alone.
        lost: masks behind a row that draft nothing, since the AR head decides their position.
    """

    def __init__(self, times: StepTimes, depth: int, is_chain: bool = False, lost: int = 0):
        self.times, self.depth, self.is_chain, self.lost = times, depth, is_chain, lost
        self.most_rows = maxsize  # of one sequence's step
        self.key: Any = None  # of what it learned about, where that is kept
        self.gain = 0.0  # tokens of all sequences that the best plan with masks nets beyond the best one without
        self._chances: dict[tuple[int, int], tuple[float, float]] = {}  # passed and tried drafts of each bin
        self._gains = [(0.0, 0.0)] * depth  # sums, and how many
        self._price = 0.0
        # By the number of sequences: tokens of each, and the time that they took, in AR steps.
        self._reached: dict[int, tuple[float, float]] = {}
        self._credit = 1.5  # tokens that looks may still cost
        self._looks = 0
        self._step = 0.0, 1, False, 1
        self._steps = self._near = 0
        self._cached: tuple[Any, Any] = None, None  # costs, and what they are of

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cached": (None, None)}  # functions of their own cannot be pickled

    # --- what is known -----------------------------------------------------------------------------------------------

    def reaches(self, drafts: Sequence[Draft]) -> list[float]:
        """The chance of each draft that it and all before it pass."""
        found: list[float] = []
        for draft in drafts:
            key, prior = _bin(draft)
            passed, tried = self._chances.get(key, (0.0, 0.0))
            chance = (passed + PRIOR * prior) / (tried + PRIOR)
            found.append(chance * (found[draft.parent] if draft.parent >= 0 else 1.0))
        return found

    def learn(self, draft: Draft, has_passed: bool) -> None:
        """Takes in what became of a draft whose parent passed."""
        key, _ = _bin(draft)
        passed, tried = self._chances.get(key, (0.0, 0.0))
        self._chances[key] = MEMORY * passed + has_passed, MEMORY * tried + 1

    def begin(self, rows: int, has_masks: bool, sequences: int) -> None:
        """A forward of so many physical rows begins."""
        self._step = self.times.clock() if self.times.clock else 0.0, rows, has_masks, sequences

    def finish(self, tokens: int) -> None:
        """The step that began is over, and gave so many tokens. Not to be called after a prefill."""
        began, rows, has_masks, sequences = self._step
        if self.times.clock:
            self.times.record(rows, has_masks, self.times.clock() - began)
        time = self.times.of(rows, has_masks) / self.times.of(sequences, False)
        reached, took = self._reached.get(sequences, (0.0, 0.0))
        self._reached[sequences] = MEMORY * reached + tokens / sequences, MEMORY * took + time
        self._credit += LOOK_SHARE * tokens / sequences
        self._steps += 1

    def _worth(self) -> list[float]:
        """mu of each depth. One that was never tried is as good as those before let it expect."""
        worth: list[float] = []
        for total, count in self._gains:
            ratio = worth[-1] / worth[-2] if len(worth) > 1 and worth[-2] else MASK_CHANCE
            prior = ratio * worth[-1] if worth else MASK_CHANCE
            worth.append(min((total + PRIOR * prior) / (count + PRIOR), worth[-1] if worth else 1e9))
        return [one if one > 0.005 else 0.0 for one in worth]

    def _learn_gains(self, outlook: Outlook, tree: Tree, worth: list[float]) -> None:
        """Takes in what the drafts of each depth net, if they are checked where they net something."""
        price, sums = self._price, [0.0, *accumulate(worth)]

        def invested(end: float) -> float:  # worth falls with depth
            count = bisect_left(worth, -price / end, key=neg) if end > 0 else 0
            return max(0.0, end * sums[count] - (count + self.lost) * price)

        ends, gains, net = {-1: 1.0}, [0.0] * self.depth, 0.0
        best = net, list(gains)
        for reach, place in tree:
            draft = outlook.drafts[place]
            if draft.parent not in ends or draft.depth > outlook.foreseen:
                continue
            end = ends[draft.parent]
            one = reach - price + invested(reach) + (0.0 if self.is_chain else invested(end - reach)) - invested(end)
            if one > 0 or self.is_chain:
                ends[place], ends[draft.parent] = reach, end - reach
                net, gains[draft.depth - 1] = net + one, gains[draft.depth - 1] + one
                best = max(best, (net, list(gains)))
        for depth, (total, count) in enumerate(self._gains[: outlook.foreseen]):
            self._gains[depth] = MEMORY * total + best[1][depth], MEMORY * count + 1

    # --- the plan ----------------------------------------------------------------------------------------------------

    def plan(self, outlooks: Sequence[Outlook], before: int = 0) -> list[Plan]:
        """The rows of the next forward of these sequences, with so many rows in front of their roots: the prompts'."""
        worth, trees = self._worth(), []
        for outlook in outlooks:
            tree = [(-reach, place) for place, reach in enumerate(self.reaches(outlook.drafts))]
            tree = [(-reach, place) for reach, place in sorted(tree) if outlook.drafts[place].depth < outlook.room]
            trees.append(tree[: min(max(DRAFT_COUNTS[-1], self.depth), self.most_rows - 1)])
            if outlook.foreseen:
                self._learn_gains(outlook, trees[-1], worth)
        plain, best = self._options(outlooks, trees, worth, before)
        choice = max(plain, best)
        if best.masks:
            self.gain = best.net - plain.net
        if before:
            choice = best if best.net > plain.net - PROMPT_LOOK * len(outlooks) else plain
        else:
            if rows := best.drafts + best.masks:
                price = max(self._cost(len(outlooks), 0)(rows, True) / rows, best.left_out * (choice is best))
                self._price += 0.1 * (price / len(outlooks) - self._price)
            if min(outlook.room for outlook in outlooks) > 2 * self.depth:  # there is use for what is learned
                choice = self._look(outlooks, trees, worth, choice, best)
        self._near = bisect_left(DRAFT_COUNTS, choice.drafts)
        return [self._spend(each, tree, worth, choice) for each, tree in zip(outlooks, trees, strict=True)]

    def _cost(self, count: int, before: int) -> Callable[..., float]:
        """The cost, in tokens, of rows of each of `count` sequences behind its root: of `(rows, has_masks)`."""
        key = count, before, self._steps // PAUSE if self._steps > 8 * PAUSE else self._steps
        if self._cached[0] == key:
            return self._cached[1]
        base, times = count * (1 + before), self.times
        reached, took = self._reached.get(count, (1.0, 1.0))
        least, scale = times.of(base, before > 0), max(1.0, reached / took) * count / times.of(count, False)

        @cache
        def cost(rows: int, has_masks: bool, is_optimistic: bool = False) -> float:
            return scale * (times.of(base + count * rows, has_masks or before > 0, is_optimistic) - least)

        self._cached = key, cost
        return cost

    def _options(
        self,
        outlooks: Sequence[Outlook],
        trees: list[Tree],
        worth: list[float],
        before: int,
        least: float | None = None,
    ) -> tuple[Choice, Choice]:
        """The best plan without masks, and with masks: where `least` is given, the best by optimistic times of those
        that net more."""
        cost = self._cost(len(outlooks), before)
        plain, best, most = Choice(0.0, 0, 0, 0.0), Choice(-1e9, 0, 0, 0.0), max(map(len, trees))
        near = range(self._near - 1, self._near + 2)
        counts = [count for place, count in enumerate(DRAFT_COUNTS) if not place or place in near or not self.is_chain]
        for drafts in [*(count for count in counts if count < most), most]:
            gain = sum([reach for tree in trees for reach, _ in tree[:drafts]])
            following = sum([tree[drafts][0] for tree in trees if len(tree) > drafts])
            plain = max(plain, Choice(gain - cost(drafts, False), drafts, 0, following))
            values = [
                sum(column) for column in zip_longest(*self._values(outlooks, trees, worth, drafts), fillvalue=0.0)
            ]
            for count, value in enumerate(values[: self.most_rows - 1 - drafts], 1):
                gain += value
                net = gain - cost(drafts + count, True)
                if least is not None:
                    net = gain - cost(drafts + count, True, True) if net > least else -1e9
                if net > best.net:
                    best = Choice(net, drafts, count, max([following, *values[count : count + 1]]))
        return plain, best

    def _values(
        self, outlooks: Sequence[Outlook], trees: list[Tree], worth: list[float], drafts: int
    ) -> list[list[float]]:
        """What the masks of each sequence are worth, the best first."""
        found = []
        for outlook, tree in zip(outlooks, trees, strict=True):
            values = [value for value, _ in self._masks(outlook, tree[:drafts], worth)]
            found.append([*values[: self.lost], *takewhile(bool, values[self.lost :])])
        return found

    def _masks(self, outlook: Outlook, tree: Tree, worth: list[float]) -> Tree:
        """What each mask is worth, and the place of the draft that it stands behind (-1: the root); the best first."""
        ends = {-1: 1.0}
        for reach, place in tree:
            ends[place] = reach
            ends[outlook.drafts[place].parent] -= reach
        if self.is_chain:
            reach, place = tree[-1] if tree else (1.0, -1)
            ends = {place: reach}
        found: Tree = []
        for place, end in ends.items():
            depth = outlook.drafts[place].depth if place >= 0 else 0
            values = [end * one for one in worth[: max(0, outlook.room - depth - 1)]]
            found += [(value, place) for value in [0.0] * (self.lost if values else 0) + values]
        return found if self.is_chain else sorted(found, reverse=True)

    def _look(
        self, outlooks: Sequence[Outlook], trees: list[Tree], worth: list[float], choice: Choice, best: Choice
    ) -> Choice:
        """Another plan than the one that is chosen, where that may be lost to measure it."""
        count, other = len(outlooks), best
        if choice is best:
            if not self.times.clock or self._steps % PAUSE:
                return choice
            other = Choice(0.0, 0, 0, 0.0)
            if self._looks % 2 and self.times.is_measured(count, False):
                _, other = self._options(outlooks, trees, worth, 0, choice.net - self._credit * count)
                rows = other.drafts + other.masks
                if self.times.is_measured(count * (1 + rows), True):
                    other = choice
                else:
                    cost = self._cost(count, 0)
                    other = other._replace(net=other.net + cost(rows, True, True) - cost(rows, True))
        if choice.net - other.net > self._credit * count:
            return choice
        self._looks += 1
        self._credit -= max(0.0, choice.net - other.net) / count
        return other

    def _spend(self, outlook: Outlook, tree: Tree, worth: list[float], choice: Choice) -> Plan:
        """A sequence's own best drafts and masks. The likeliest child stands right behind its parent."""
        chosen = tree[: choice.drafts]
        masks = Counter(place for _, place in self._masks(outlook, chosen, worth)[: choice.masks])
        children: dict[int, list[int]] = {}
        for _, place in reversed(chosen):
            children.setdefault(outlook.drafts[place].parent, []).append(place)
        order, stack = [-1], children.get(-1, [])
        while stack:
            order.append(stack.pop())
            stack += children.get(order[-1], [])
        rows = {place: row for row, place in enumerate(order, -1)}
        drafts = [outlook.drafts[place] for place in order[1:]]
        return Plan([draft._replace(parent=rows[draft.parent]) for draft in drafts], [masks[place] for place in order])


def _bin(draft: Draft) -> tuple[tuple[int, int], float]:
    """The bin of a draft, and the chance that it is taken for at first."""
    if draft.chance is None:
        behind = int(draft.depth > 1)
        return (2, behind), TEXT_CHANCES[behind]
    return (int(draft.is_sibling), min(int(draft.chance * BINS), BINS - 1)), draft.chance
