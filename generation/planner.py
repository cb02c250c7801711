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
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from statistics import median_low
from time import perf_counter, thread_time
from typing import Any, NamedTuple

# Drafts of similar probability share a chance: bins of the probability, for the likeliest tokens and for their
# siblings.
BINS = 8
# Observations that a prior counts for: a draft's own probability, or the gain of a depth.
PRIOR = 4.0
# What an observation still counts one step later: memory reaches about 50 steps back.
MEMORY = 0.98
# The chance of a draft before anything is known: of one from masks, by depth, and of a first and a later one in the
# text.
MASK_CHANCE, TEXT_CHANCES = 0.65, (0.6, 0.9)
# Share of the time that looking may cost, and the AR steps after which that share would have come to what it may at
# once.
LOOK_SHARE, LOOK_CREDIT = 0.015, 100
# Tokens that masks behind a prompt may cost: they are a look that is repeated in every call.
PROMPT_LOOK = 0.25
# Times of a width that are remembered: their median forgets a busy moment of the machine.
SAMPLES = 9
# Drafts of a sequence that are checked, at most; deeper chains may have more.
MOST_DRAFTS = 12
# Widths that differ by this factor tell what others take beyond them.
SPAN = 8
# Numbers of drafts that are compared: a few sensible ones.
DRAFT_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)


class Draft(NamedTuple):
    """A guess behind a sequence's root.

    Attributes:
        token: what is guessed.
        parent: the place of the draft that it follows in the list of drafts; -1 for the root.
        depth: 1 behind the root.
        chance: the drafter's own probability; `None` for drafts from the text.
        is_sibling: a likelier token is drafted behind the same parent.
    """

    token: int
    parent: int
    depth: int
    chance: float | None
    is_sibling: bool = False


class Plan(NamedTuple):
    """A sequence's rows of the next forward: `drafts`, parents first, and the number of masks behind the root and
    behind each of them."""

    drafts: list[Draft]
    masks: list[int]


def step_clock(device_type: str) -> Callable[[], float]:
    """Seconds for [`StepTimes`]: a CPU's own do not count those of other programs on the machine."""
    return thread_time if device_type == "cpu" else perf_counter


class StepTimes:
    """t(n): what a step of n physical rows takes, relative to other steps.

    Steps with masks and steps without have a curve each, since masks have work of their own. A width's time is the
    median of its last ones, relative to the machine's load when they were taken. A curve never falls (neighbours that
    would are averaged), and is linear between the widths that were measured.

    Args:
        slot_cost: what a row adds to the time of one row, until it is measured; or times by number of rows.
        clock: seconds. `None`: `slot_cost` is all there is to know.
    """

    def __init__(self, slot_cost: float | Mapping[int, float], clock: Callable[[], float] | None = None):
        self.clock = clock
        given = slot_cost if isinstance(slot_cost, Mapping) else {1: 1.0, 2: 1.0 + slot_cost}
        self._given = sorted((int(rows), float(time)) for rows, time in given.items())
        self._samples: tuple[dict[int, list[float]], dict[int, list[float]]] = {}, {}
        self._curves: list[list[tuple[int, float]]] = [[], []]
        self._load = 0.0
        self._seen: set[tuple[int, bool]] = set()

    def record(self, rows: int, has_masks: bool, seconds: float) -> None:
        """Takes in a step."""
        samples, usual = self._samples[has_masks], self.of(rows, has_masks)
        known = samples.get(rows, [])
        self._load = self._load or seconds / usual
        if len(known) > 1:  # a single step may be an accident
            self._load *= min(max(seconds / self._load / usual, 0.5), 2.0) ** 0.3
        # A first step of a shape prepares kernels: it counts until there is a second.
        samples[rows] = [
            *(known[1 - SAMPLES :] if len(known) > 1 or not self._met(rows, has_masks) else []),
            seconds / self._load,
        ]
        self._curves[has_masks] = _monotone(samples)

    def _met(self, rows: int, has_masks: bool) -> bool:
        if (rows, has_masks) in self._seen:
            return False
        self._seen.add((rows, has_masks))
        return bool(self._samples[has_masks].get(rows))

    def is_measured(self, rows: int, has_masks: bool) -> bool:
        """Whether there was a step of this width."""
        return self.clock is None or (rows, has_masks) in self._seen

    def of(self, rows: int, has_masks: bool, is_optimistic: bool = False) -> float:
        """t(rows); `is_optimistic`: of a width that was not measured, the time of the next narrower one that was."""
        curve = self._curves[has_masks] or self._curves[not has_masks]
        place = bisect_left(curve, (rows, 0.0))
        if 0 < place < len(curve):
            (here, time), (there, its_time) = curve[place - 1], curve[place]
            return time + (its_time - time) * (0 if is_optimistic and rows < there else rows - here) / (there - here)
        given = _line(self._given, rows)
        if not curve:
            return given
        if is_optimistic and place and 3 * rows <= 4 * curve[-1][0] + 4:
            return curve[-1][1]
        # Beyond what was measured: by the mean slope, or by what is given where few widths are known, if that is more.
        (first, least), (here, time) = (self._curves[False] or curve)[0], curve[-1 if place else 0]
        slope = (time - least) / (here - first) if here > first else 0.0
        guess = time * given / _line(self._given, here)
        return max(time + slope * (rows - here), guess if here < SPAN * first else 0.0)


def _line(points: list[tuple[int, float]], rows: int) -> float:
    """Through neighbouring points; beyond them on the outermost two."""
    place = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
    (here, time), (there, its_time) = points[place - 1], points[place]
    return time + (its_time - time) * (rows - here) / (there - here)


def _monotone(samples: Mapping[int, Sequence[float]]) -> list[tuple[int, float]]:
    """The median of each width; those that fall are averaged with their neighbours, by their number of samples."""
    blocks: list[tuple[float, int, list[int]]] = []
    for width, times in sorted(samples.items()):
        if times:
            block = median_low(times), len(times), [width]
            while blocks and blocks[-1][0] > block[0]:
                time, count, widths = blocks.pop()
                total = count + block[1]
                block = (time * count + block[0] * block[1]) / total, total, widths + block[2]
            blocks.append(block)
    return [(width, time) for time, _, widths in blocks for width in widths]


class Outlook(NamedTuple):
    """What a sequence can do next.

    Attributes:
        drafts: guesses behind its root, parents first.
        foreseen: depths of them that masks drafted.
        room: new tokens that are still allowed.
    """

    drafts: list[Draft]
    foreseen: int
    room: int


class Choice(NamedTuple):
    """Numbers of drafts and masks of each sequence; what they net, in tokens of all sequences; and what the best row
    that was left out would bring."""

    net: float
    drafts: int
    masks: int
    left_out: float


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
        self.key: Any = None  # of what it learned about, where that is kept
        self.speed = 1.0  # the rate, in tokens of a sequence per time of an AR step
        self._chances: dict[tuple[int, int], tuple[float, float]] = {}  # passed and tried drafts of each bin
        self._gains = [(0.0, 0.0)] * depth  # sums, and how many
        self._price = 0.0
        self._reached = 0.0, 0.0  # tokens and time
        self._credit = LOOK_SHARE * LOOK_CREDIT
        self._looks = 0
        self._step = 0.0, 1, False, 1

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
        self._reached = MEMORY * self._reached[0] + tokens / sequences, MEMORY * self._reached[1] + time
        self.speed = max(1.0, self._reached[0] / self._reached[1])
        self._credit += LOOK_SHARE * tokens / sequences

    def _worth(self) -> list[float]:
        """mu of each depth. One that was never tried is as good as those before let it expect."""
        worth: list[float] = []
        for total, count in self._gains:
            ratio = worth[-1] / worth[-2] if len(worth) > 1 and worth[-2] else MASK_CHANCE
            prior = ratio * worth[-1] if worth else MASK_CHANCE
            worth.append(min((total + PRIOR * prior) / (count + PRIOR), worth[-1] if worth else 1e9))
        return worth

    def _learn_gains(self, state: Outlook, tree: list[tuple[float, int]], worth: list[float]) -> None:
        """Takes in what the drafts of each depth net, if they are checked where they net something."""

        def invested(chance: float) -> float:
            found = 0.0
            for one in worth:
                if chance * one <= self._price:
                    break
                found += chance * one - self._price
            return max(0.0, found - self.lost * self._price)

        gains, ends = [0.0] * self.depth, {-1: 1.0}
        net, best = 0.0, (0.0, gains)
        for reach, place in tree:
            draft = state.drafts[place]
            if draft.parent not in ends or draft.depth > state.foreseen:
                continue
            end = ends[draft.parent]
            rest = 0.0 if self.is_chain else invested(end - reach)
            one = reach - self._price + invested(reach) + rest - invested(end)
            if one > 0 or self.is_chain:
                ends[place], ends[draft.parent] = reach, end - reach
                gains = [*gains[: draft.depth - 1], gains[draft.depth - 1] + one, *gains[draft.depth :]]
                net += one
                if self.is_chain:
                    ends[draft.parent] = 0.0
                best = max(best, (net, gains), key=lambda pair: pair[0])
        for depth in range(min(state.foreseen, self.depth)):
            total, count = self._gains[depth]
            self._gains[depth] = MEMORY * total + best[1][depth], MEMORY * count + 1

    # --- the plan ----------------------------------------------------------------------------------------------------

    def plan(self, states: Sequence[Outlook], before: int = 0) -> list[Plan]:
        """The rows of the next forward.

        Args:
            states: of the sequences.
            before: rows of each sequence in front of its root, which are those of its prompt.
        """
        count, worth = len(states), self._worth()
        trees = [sorted(zip([-r for r in self.reaches(s.drafts)], range(len(s.drafts)), strict=True)) for s in states]
        trees = [
            [(-reach, place) for reach, place in tree if s.drafts[place].depth < s.room]
            for s, tree in zip(states, trees, strict=True)
        ]
        trees = [tree[: max(MOST_DRAFTS, self.depth)] for tree in trees]
        if not before:
            for state, tree in zip(states, trees, strict=True):
                if state.foreseen:
                    self._learn_gains(state, tree, worth)
        plain, best = self._options(states, trees, worth, before)
        choice = max(plain, best)
        if before:  # a look beside a prompt costs little
            choice = best if best.net > plain.net - PROMPT_LOOK * count else plain
        else:
            if best.masks + best.drafts:
                rows = best.masks + best.drafts
                secant = self._cost(count, before, rows, True) / rows
                self._price += 0.1 * (max(secant, best.left_out if choice is best else 0.0) / count - self._price)
            if min(outlook.room for outlook in states) > 2 * self.depth:  # an answer that ends has no more use for it
                choice = self._look(states, trees, worth, choice, plain, best)
        return [self._spend(state, tree, worth, choice) for state, tree in zip(states, trees, strict=True)]

    def _cost(self, count: int, before: int, rows: int, has_masks: bool, is_optimistic: bool = False) -> float:
        """Of so many rows of each sequence beyond its root, in tokens."""
        base, times = count * (1 + before), self.times
        least = times.of(base, before > 0)
        time = times.of(base + count * rows, has_masks or before > 0, is_optimistic)
        return self.speed * count * (time - least) / (times.of(count, False) if before else least)

    def _options(
        self,
        states: Sequence[Outlook],
        trees: list[list[tuple[float, int]]],
        worth: list[float],
        before: int,
        least: float | None = None,
    ) -> tuple[Choice, Choice]:
        """The best plan without masks, and the best with masks."""
        count, most = len(states), max(map(len, trees))
        plain = best = Choice(0.0, 0, 0, 0.0)
        best = best._replace(net=-1e9)
        costs = {}

        def cost(rows: int, has_masks: bool, is_optimistic: bool = False) -> float:
            key = rows, has_masks, is_optimistic
            if key not in costs:
                costs[key] = self._cost(count, before, *key)
            return costs[key]

        drafts_of = [n for n in DRAFT_COUNTS if n < most] + [most]
        for drafts in drafts_of:
            gain = sum(reach for tree in trees for reach, _ in tree[:drafts])
            following = sum(tree[drafts][0] for tree in trees if len(tree) > drafts)
            values = [
                sum(column)
                for column in zip_longest(
                    *(
                        [value for value, _ in self._masks(state, tree[:drafts], worth)]
                        for state, tree in zip(states, trees, strict=True)
                    ),
                    fillvalue=0.0,
                )
            ]
            net = gain - cost(drafts, False)
            if net > plain.net:
                plain = Choice(net, drafts, 0, following)
            for masks, value in enumerate(values, 1):
                gain += value
                net = gain - cost(drafts + masks, True)
                if least is not None:
                    net = gain - cost(drafts + masks, True, True) if net > least else -1e9
                if net > best.net:
                    left = max(values[masks] if masks < len(values) else 0.0, following)
                    best = Choice(net, drafts, masks, left)
        return plain, best

    def _masks(self, state: Outlook, tree: list[tuple[float, int]], worth: list[float]) -> list[tuple[float, int]]:
        """What each mask is worth and the place of the draft that it stands behind (-1: the root), beginning with the
        best."""
        ends = {-1: 1.0}
        for reach, place in tree:
            ends[place] = reach
            ends[state.drafts[place].parent] -= reach
        if self.is_chain:
            place = tree[-1][1] if tree else -1
            ends = {place: tree[-1][0] if tree else 1.0}
        found = []
        for place, chance in ends.items():
            depth = state.drafts[place].depth if place >= 0 else 0
            most = max(0, min(self.depth, state.room - depth - 1))
            found += [(0.0, place)] * (self.lost if most else 0)
            found += [(chance * one, place) for one in worth[:most]]
        return found if self.is_chain else sorted(found, reverse=True)

    def _look(
        self, states: Sequence[Outlook], trees: Any, worth: list[float], choice: Choice, plain: Choice, best: Choice
    ) -> Choice:
        """Now and then another plan, to measure."""
        count = len(states)
        ar = Choice(0.0, 0, 0, 0.0)
        other = choice
        if (
            self.times.clock
            and choice is not plain
            and (self._looks % 2 == 0 or not self.times.is_measured(count, False))
        ):
            other = ar
        elif choice is plain:
            other = best
        elif self.times.clock:
            _, other = self._options(states, trees, worth, 0, choice.net - self._credit * count)
            rows = other.drafts + other.masks
            if self.times.is_measured(count * (1 + rows), True):
                self._looks += 1
                return choice
            change = self._cost(count, 0, rows, True, True) - self._cost(count, 0, rows, True)
            other = other._replace(net=other.net + change)
        if other is choice or choice.net - other.net > self._credit * count:
            return choice
        self._looks += 1
        self._credit -= max(0.0, choice.net - other.net) / count
        return other

    def _spend(self, state: Outlook, tree: list[tuple[float, int]], worth: list[float], choice: Choice) -> Plan:
        """A sequence's own best drafts and masks. The likeliest child stands right behind its parent."""
        chosen = tree[: choice.drafts]
        masks = Counter(place for value, place in self._masks(state, chosen, worth)[: choice.masks])
        children: dict[int, list[int]] = {}
        for _, place in reversed(chosen):
            children.setdefault(state.drafts[place].parent, []).append(place)
        order, stack = [], children.get(-1, [])[:]
        while stack:
            order.append(stack.pop())
            stack += children.get(order[-1], [])
        rows = {place: row for row, place in enumerate([-1, *order], -1)}
        drafts = [state.drafts[place]._replace(parent=rows[state.drafts[place].parent]) for place in order]
        return Plan(drafts, [masks[place] for place in [-1, *order]])


class FixedPlan:
    """What [`Planner`] is without a choice: every step checks the first run of drafts, and has `size` masks behind
    each real row, or behind the last one (`is_chain`), of which `lost` draft nothing."""

    def __init__(self, size: int, is_chain: bool, lost: int):
        self.size, self.is_chain, self.lost = size, is_chain, lost

    def plan(self, outlooks: Sequence[Outlook], before: int = 0) -> list[Plan]:
        """See [`Planner.plan`]."""
        plans = []
        for outlook in outlooks:
            drafts = outlook.drafts[: max(0, min(self.size, outlook.room - 1 + self.lost))]
            masks = [min(self.size, outlook.room - depth - 1 + self.lost) for depth in range(len(drafts) + 1)]
            if self.is_chain:
                masks[:-1] = [0] * len(drafts)
            plans.append(Plan(drafts, [count if count > self.lost else 0 for count in masks]))
        return plans

    def learn(self, draft: Draft, has_passed: bool) -> None:
        """Nothing."""

    def begin(self, rows: int, has_masks: bool, sequences: int) -> None:
        """Nothing."""

    def finish(self, tokens: int) -> None:
        """Nothing."""


def _bin(draft: Draft) -> tuple[tuple[int, int], float]:
    """The bin of a draft, and the chance that it is taken for at first."""
    if draft.chance is None:
        behind = int(draft.depth > 1)
        return (2, behind), TEXT_CHANCES[behind]
    return (int(draft.is_sibling), min(int(draft.chance * BINS), BINS - 1)), draft.chance
