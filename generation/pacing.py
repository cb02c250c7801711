"""How many masks a step takes: as many as give the most tokens per time, by what masks have given so far.

Everything here is a function of counts, never of a clock, so a seed gives the same generation on any machine.
"""

from collections.abc import Callable, Sequence

from .window import RowOutcome

# What the first draft's chance is taken for before anything is known, and for how many observations this counts.
PRIOR, PRIOR_WEIGHT = 0.96, 0.5
# What an observation still counts one step later: memory reaches about 100 steps back.
MEMORY = 0.99
# The time that one slot adds to a forward, relative to one without any: a CPU takes about 3.5 % of the time that it
# needs to read the weights, a GPU ten times less.
CPU_SLOT_COST, GPU_SLOT_COST = 0.035, 0.004


class WindowPacer:
    """Chooses the window's size W, step by step.

    *Tokens.* With W masks a row proposes D = W − 1 drafts (the leftmost slot goes to the AR head). Let p_k be the
    chance that draft k passes, given that those before it did, and a = p_1·…·p_D that all do. A step that checks
    drafts then gives E = 1 + p_1 + p_1·p_2 + … + a tokens. If one fails, the masks saw a wrong token: a step without
    drafts follows, which gives 1 token. Per step with drafts that makes E + (1 − a) tokens.

    *Cost.* A forward of n physical rows for each of A rows takes 1 + c·A·n, c being the slot cost. With drafts n is
    1 + D + W, without 1 + W. So W is what maximises

        (E + 1 − a) / (cost(1 + D + W) + (1 − a)·cost(1 + W)),

    and 0, plain AR decoding, where nothing exceeds 1 / cost(1).

    *Estimates.* p_k is a running mean, drawn towards p_{k−1}, or the prior if that is less, by the weight of half an
    observation: a depth that was never tried is taken to be as good as the one before it, the first one to be good.
    Observations fade, so what has failed is tried again after a while, the later the more often it failed. A depth
    also fails when no mask is sure enough to give its draft. A step counts as one observation, however many rows.

    Filling without verification has no rejections; fills beyond the one that every step has count as accepted drafts.

    Args:
        largest: the largest W.
        slot_cost: c.
        is_adaptive: otherwise W stays the largest.

    Attributes:
        window_size: W for the next refill.
    """

    def __init__(self, largest: int, slot_cost: float, is_adaptive: bool, rows: int = 1):
        self.largest = largest
        self.slot_cost = slot_cost
        self.is_adaptive = is_adaptive
        self.passed = [0.0] * (largest - 1)
        self.tried = [0.0] * (largest - 1)
        self.window_size = self.best_window(rows) if is_adaptive else largest

    def observe(self, outcomes: Sequence[RowOutcome]) -> None:
        """Takes in what a step did to each row."""
        if not self.is_adaptive:
            return
        self.passed = [MEMORY * count for count in self.passed]
        self.tried = [MEMORY * count for count in self.tried]
        share = 1 / len(outcomes)  # a step counts as one observation, however many rows it has
        for outcome in outcomes:
            for depth in range(outcome.paid):
                self.passed[depth] += share
                self.tried[depth] += share
            if (failed := outcome.failed) is not None:
                self.tried[failed] += share
        self.window_size = self.best_window(len(outcomes))

    def best_window(self, rows: int) -> int:
        """The W of the highest rate for this many rows, by what is known so far."""
        return best_window(self.passed, self.tried, rows, lambda count: 1 + self.slot_cost * count)


def best_window(passed: Sequence[float], tried: Sequence[float], rows: int, time: Callable[[int], float]) -> int:
    """The number of masks W of the highest rate of tokens, by [`WindowPacer`]'s reasoning; 0 for AR steps.

    Args:
        passed, tried: drafts, by their place in a run.
        rows: of the batch.
        time: of a step of so many physical rows, relative to others.
    """
    best, window_size = 1 / time(rows), 0
    chance, reached, tokens = PRIOR, 1.0, 1.0
    for drafts, (passed_here, tried_here) in enumerate(zip(passed, tried, strict=True), 1):
        chance = (passed_here + PRIOR_WEIGHT * min(chance, PRIOR)) / (tried_here + PRIOR_WEIGHT)
        reached *= chance
        tokens += reached
        fails = 1 - reached
        both = time(rows * (2 * drafts + 2)) + fails * time(rows * (drafts + 2))
        if (tokens + fails) / both > best:
            best, window_size = (tokens + fails) / both, drafts + 1
    return window_size


def default_slot_cost(device_type: str) -> float:
    """The slot cost where none is given."""
    return CPU_SLOT_COST if device_type == "cpu" else GPU_SLOT_COST
