"""When to commit, for a model that keeps a state (docs/algorithm.md#states; see state.py)."""

# Pending tokens that are committed in any case, where reading them costs nothing.
MOST_PENDING = 64


class Commits:
    """Decides when a step goes without drafts and masks. Such a step commits the pending tokens. Every other step
    reads them again, and pays more for it the more there are.

    Both are priced in tokens. A commit costs the tokens that its step would have drafted. The best moment is the one
    that makes the mean cost of a step least: the first step whose pending tokens cost more than the mean so far, the
    commit's own cost counted in. A later commit would only raise that mean.
    """

    def __init__(self) -> None:
        self._cost, self._steps = 0.0, 0  # since the last commit

    def is_due(self, net: float, cost: float, pending: int) -> bool:
        """Whether to commit now instead of checking drafts, which would `net` so much more than a commit. Reading the
        pending tokens, so many without the root, costs the step `cost`."""
        if not pending:
            self._cost, self._steps = 0.0, 1
            return False
        is_due = pending >= MOST_PENDING or cost * self._steps > self._cost + net
        self._cost, self._steps = self._cost + cost, self._steps + 1
        return is_due
