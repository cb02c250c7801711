"""How wide the window is and how bold the drafts are, from what both have paid so far.

Wide windows cost slots, and on text that the masks cannot foresee they pay nothing: then decoding goes on as plain AR,
and looks up now and then whether that has changed. Everything here is a function of counts, never of a clock, so a
seed gives the same generation on any machine.
"""

from bisect import bisect_right

# What a depth is believed to pay before anything is known: 0.9 to its power.
PRIOR = 0.9
# Averages run over about this many steps.
MEMORY = 8
# The belief in depths that are not tried goes back to the prior by this share a step; after vain tries more slowly.
RECOVERY, SLOWEST_RECOVERY = 0.01, 0.002
# A rejection makes drafts this much more careful, a step without one bolder: in balance at 2 rejections in 9 steps.
CAREFUL, BOLD = 0.9, 1.03
# How far the entropy threshold may move either way.
LEEWAY = 8.0

DEFAULT_SLOT_COST = {"cpu": 0.04}
GPU_SLOT_COST = 0.004


class WindowPacer:
    """Chooses the window's size W and the entropy threshold τ of drafts, step by step.

    A forward of A rows and Q slots a row takes the time 1 + c·A·Q, c being the slot cost. Depth i of the window is the
    i-th mask behind the leftmost, which yields nothing that a step does not have anyway; S_i is the share of rows and
    steps in which a token came out of it. With a window of W, a step yields T = 1 + S_1 + … + S_{W−1} tokens a row,
    and takes about Q = T + W slots: W is what maximises T / (1 + c·A·Q), and 0, plain AR decoding, where nothing
    exceeds 1 / (1 + c·A).

    Args:
        largest: the largest W.
        threshold: τ at the start, nats.
        slot_cost: c.
        rows: A at the start.
        is_adaptive: otherwise W and τ stay as they are.

    Attributes:
        window_size: W for the next refill.
        threshold: τ for the next drafts.
    """

    def __init__(self, largest: int, threshold: float, slot_cost: float, rows: int, is_adaptive: bool):
        self.largest = largest
        self.threshold = threshold
        self.slot_cost = slot_cost
        self.is_adaptive = is_adaptive
        self.lowest, self.highest = threshold / LEEWAY, threshold * LEEWAY
        self.tokens = 1.0  # T, averaged
        self.yields = [PRIOR ** (depth + 1) for depth in range(largest - 1)]  # S
        self.weights = [0.5] * len(self.yields)
        self.recovery = [RECOVERY] * len(self.yields)
        self.window_size = 0 if is_adaptive else largest
        if is_adaptive:
            self._choose(rows)

    def observe(self, masks: int, tokens: list[int], found: list[int], checked: list[tuple[int, int]] | None) -> None:
        """Takes in a step.

        Args:
            masks: of the widest row.
            tokens: final tokens that the step gave, per row.
            found: fills beyond the one that any step has, or drafts proposed, per row.
            checked: under verification, for each row that had drafts: how many, and how many of them were accepted.
        """
        if not self.is_adaptive:
            return
        rows = len(tokens)
        self.tokens += (sum(tokens) / rows - self.tokens) / MEMORY
        # The hit rate that would pay at the present rate.
        least = min(2 * self.slot_cost * rows * self.rate, PRIOR)
        rises = False
        found = sorted(found)
        tried = found if checked is None else sorted(drafts for drafts, _ in checked)
        hit = found if checked is None else sorted(accepted for _, accepted in checked)
        for depth in range(len(self.yields)):
            # A depth that gave no draft has failed. One that did has yet to see it accepted.
            hits = len(hit) - bisect_right(hit, depth)
            tries = len(tried) - bisect_right(tried, depth)
            if depth < masks - 1:
                tries += bisect_right(found, depth)
            if tries:
                share = hits / tries
                self.weights[depth] = min(MEMORY, self.weights[depth] + 1)
                self.yields[depth] += (share - self.yields[depth]) / self.weights[depth]
                # Up to twice as often after hits; in balance where the hits are as many as would pay.
                factor = 2 ** (share - (1 - share) * least / (1 - least))
                self.recovery[depth] = min(max(self.recovery[depth] * factor, SLOWEST_RECOVERY), RECOVERY)
            elif depth >= masks - 1:
                hope = PRIOR * (self.yields[depth - 1] if depth else 1.0)
                rate = 1 / MEMORY if rises else self.recovery[depth]
                self.yields[depth] += rate * (hope - self.yields[depth])
            rises = 0 < hits == tries  # where all went well at the deepest depth, the next one is soon worth a try
        if checked:
            passed = sum(accepted == drafts for drafts, accepted in checked) / len(checked)
            self.threshold *= CAREFUL ** (1 - passed) * BOLD**passed
            self.threshold = min(max(self.threshold, self.lowest), self.highest)
        self._choose(rows)

    def _choose(self, rows: int) -> None:
        cost = self.slot_cost * rows
        # A draft that is rejected also costs the drafts of the next step: what is less likely is left out.
        likely = (self.tokens - 1) / (2 * self.tokens - 1)
        self.rate, best = 1 / (1 + cost), 0
        tokens = before = 1.0
        for depth, share in enumerate(self.yields):
            if share < likely * before:
                break
            share = min(share, PRIOR * before)  # what is not tried cannot be better than what is
            tokens, before = tokens + share, share
            rate = tokens / (1 + cost * (tokens + depth + 2))
            if rate > self.rate:
                self.rate, best = rate, depth + 2
        if self.window_size == 0:  # a look that may be vain costs no more than a forward without slots
            best = min(best, max(2, int(1 / max(cost, 1e-9))))
        self.window_size = best


def default_slot_cost(device_type: str) -> float:
    """The slot cost where none is given: a CPU computes a slot for about 4 % of what it takes to read the weights, a
    GPU for ten times less."""
    return DEFAULT_SLOT_COST.get(device_type, GPU_SLOT_COST)
