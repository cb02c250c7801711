"""Drafts from the text itself: the tokens that followed where the last tokens occurred before (prompt lookup).

Answers repeat their prompt and themselves: names, code, lists, quotations. Such drafts need no mask, and often reach
further than those of masks.
"""

from collections.abc import Sequence

# Tokens that an earlier occurrence must have: of the text alone, and of the text with a mask's draft behind it.
SURE_MATCH, AGREED_MATCH = 4, 2
# Tokens that are compared at most, and the number of earlier occurrences that are looked at, the latest ones.
LONGEST_MATCH, OCCURRENCES = 8, 16


class TextLookup:
    """Where each pair of tokens of a growing text occurs."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 1

    def drafts(self, text: Sequence[int], drafts: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow the text; none where its end did not occur before.

        They continue the longest earlier occurrence of the text's end, if it is long enough to be trusted. Otherwise
        the masks' first draft counts as the text's last token, and a shorter occurrence is enough.

        Args:
            text: final tokens; those of an earlier call, and more.
            drafts: of masks, behind the text.
            count: tokens wanted.
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
        """Where the longest earlier occurrence of the text's end and the `known` tokens behind it stops; the latest of
        several. `None` where it has less than `least` tokens."""
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
