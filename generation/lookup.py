"""Drafts from the text itself: what followed the last tokens where they occurred before (prompt lookup).

Answers repeat their prompt and themselves: names, code, lists, quotations. A repetition costs no mask to draft, and is
often longer than what masks foresee.
"""

from collections.abc import Sequence

# Tokens that must occur before for their continuation to be drafted: alone, and with a mask's draft as their last.
SURE_MATCH, AGREED_MATCH = 4, 2
# Tokens compared at most, and earlier occurrences of the last two that are looked at, the latest ones.
LONGEST_MATCH, OCCURRENCES = 8, 16


class TextLookup:
    """Where each pair of tokens of a growing text occurs."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 1

    def drafts(self, text: Sequence[int], drafts: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow.

        They continue the longest earlier occurrence of the text's end, if it is long enough to be trusted. Otherwise
        the first draft, of a mask, counts as the text's end too, and must then have been foreseen by the mask and by
        what occurred before.

        Args:
            text: final tokens; those of an earlier call, and more.
            drafts: what masks have drafted behind them.
            count: tokens wanted.

        Returns:
            the new drafts; none where nothing was found.
        """
        for end in range(self._indexed, len(text)):
            self._ends.setdefault((text[end - 1], text[end]), []).append(end + 1)
        self._indexed = max(self._indexed, len(text))
        first = list(drafts[:1])
        for known, least in [([], SURE_MATCH), (first, AGREED_MATCH)][: 1 + len(first)]:
            match = self._longest_match(text, known, least)
            if match is not None:
                found = [*text[match : match + count], *known]
                period = len(found)  # of a text that repeats itself up to the present
                while len(found) < count:
                    found.append(found[-period])
                return [*known, *found][:count]
        return []

    def _longest_match(self, text: Sequence[int], known: list[int], least: int) -> int | None:
        """Where in the text the longest earlier occurrence of its end, with what is `known` of the tokens behind it,
        ends; the latest of several. `None` where it has less than `least` tokens."""
        tail = [*text[-LONGEST_MATCH:], *known]
        ends = self._ends.get(tuple(tail[-2:]), [])
        if not known:
            ends = ends[:-1]  # the text's end itself
        longest, found = least - 1, None
        for end in reversed(ends[-OCCURRENCES:]):
            length = 0
            while length < min(len(tail), end) and text[end - 1 - length] == tail[-1 - length]:
                length += 1
            if length > longest:
                longest, found = length, end
        return found
