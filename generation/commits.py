"""When to commit, for a model that keeps a state (docs/algorithm.md#states; see state.py)."""

# Pending tokens that are committed in any case, where reading them costs nothing.
MOST_PENDING = 64


class Commits:
    """Decides when a step goes without drafts and masks. Such a step commits the pending tokens; all others read them
    again, which costs the more the more they are. A commit costs what the drafts and masks of its step would have
    netted. A commit is due once reading the pending tokens costs a step more than the mean of all these costs over the
    steps since the last commit: from there on, the mean would rise. All costs are tokens.
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
