"""How wide the window is and how bold the drafts are, from what both have paid so far.

Wide windows cost slots, and on text that the masks cannot foresee they pay nothing: then decoding goes on as plain AR,
and looks up now and then whether that has changed. Everything here is a function of counts, never of a clock, so a
seed gives the same generation on any machine.
"""

# What a depth is believed to pay before anything is known: 0.9 to its power.
PRIOR = 0.9
# Averages run over about this many steps.
MEMORY = 8
# The belief in depths that are not tried goes back to the prior by this share a step; less often after each vain try.
RECOVERY = 0.02
# A rejection makes drafts this much more careful, a step without one bolder: in balance at 2 rejections in 9 steps.
CAREFUL, BOLD = 0.9, 1.03
# How far the entropy threshold may move either way.
LEEWAY = 8.0

DEFAULT_SLOT_COST = {"cpu": 0.04}
GPU_SLOT_COST = 0.004


class WindowPacer:
    """Chooses the window's size W and the entropy threshold τ of drafts, step by step.

    A forward of A rows and Q slots a row takes the time 1 + c·A·Q, c being the slot cost. The mask at depth i (counted
    from the one behind the leftmost, whose token the step yields anyway) costs two slots, its own and that of the
    token it becomes, and yields a token in a share S_i of the rows. It pays while S_i / (2·c·A) is at least what a
    step as a whole yields, T / (1 + c·A·Q). W is the number of depths that pay, and one for the leftmost mask; where
    none does, W is 0 and the next token comes from the AR head.

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
        self.yields = [PRIOR ** (depth + 1) for depth in range(largest - 1)]  # S
        self.weights = [1.0] * len(self.yields)
        self.tokens, self.slots = 1.0, 1.0  # T and Q
        self.acceptance = 1.0
        self.recovery = RECOVERY
        self.window_size = self._paying(rows) if is_adaptive else largest

    def observe(self, slots: int, tokens: list[int], found: list[int], in_play: int, verdicts: list[bool]) -> None:
        """Takes in a step.

        Args:
            slots: Q.
            tokens: final tokens that the step gave, per row.
            found: fills beyond the one that any step has, or drafts proposed, per row.
            in_play: masks that the widest row had.
            verdicts: of each row whose drafts were checked, whether all passed.
        """
        if not self.is_adaptive:
            return
        rows = len(tokens)
        self.tokens += (sum(tokens) / rows - self.tokens) / MEMORY
        self.slots += (slots - self.slots) / MEMORY
        if verdicts:
            passed = sum(verdicts) / len(verdicts)
            self.acceptance += (passed - self.acceptance) / MEMORY
            self.threshold *= CAREFUL ** (1 - passed) * BOLD**passed
            self.threshold = min(max(self.threshold, self.lowest), self.highest)
        for depth in range(len(self.yields)):
            if depth < in_play - 1:
                share = sum(count > depth for count in found) / rows
                self.weights[depth] = min(MEMORY, self.weights[depth] + 1)
                self.yields[depth] += (share - self.yields[depth]) / self.weights[depth]
            else:
                self.yields[depth] += self.recovery * (PRIOR ** (depth + 1) - self.yields[depth])
        if in_play > 1:
            self.recovery = RECOVERY if any(found) else self.recovery / 2
        self.window_size = self._paying(rows)

    def _paying(self, rows: int) -> int:
        cost = self.slot_cost * rows
        least = 2 * cost * self.tokens / (1 + cost * self.slots)
        depths = next((depth for depth, paid in enumerate(self.yields) if paid < least), len(self.yields))
        return depths + 1 if depths else 0


def default_slot_cost(device_type: str) -> float:
    """The slot cost where none is given: a CPU computes a slot for about 4 % of what it takes to read the weights, a
    GPU for ten times less."""
    return DEFAULT_SLOT_COST.get(device_type, GPU_SLOT_COST)
