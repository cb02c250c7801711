"""The text of an answer while its tokens come, up to the first stop string."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..console.streaming import TextDecoder

FIRST_LETTER = 0xD800  # of those that no text has: halves of pairs of UTF-16


class AnswerText:
    """What the parser of an answer reads, token by token.

    Special tokens are letters of their own while stop strings are looked for: one that lies in a part of a special
    token's name is not there, and one that holds a whole name is.

    Args:
        tokenizer: of the package `tokenizers`.
        stops: strings before which the text ends.
        special: tokens that people do not read.
        read: those of them that are in a stop string, by their names, and those that the parser reads.
        parsed: the latter.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        special: Collection[int] = (),
        read: Mapping[int, str] | None = None,
        parsed: Collection[int] = (),
    ):
        self._backend, self._special, self._read = tokenizer, special, read or {}
        self._letters = {name: chr(FIRST_LETTER + place) for place, name in enumerate(self._read.values())}
        self._words = {ord(self._letters[name]): name * (token in parsed) for token, name in self._read.items()}
        # Longest first: the name of one may begin as another's. None: what matches nothing.
        self._names = re.compile("|".join(map(re.escape, sorted(self._letters, key=len, reverse=True))) or "(?!)")
        self._stops = list(dict.fromkeys([*stops, *map(self._lettered, stops)]))
        # So many tokens hold any stop string that ends with the last one, whose first character is whole.
        self.tail = max((len(stop.encode()) for stop in stops), default=0) + 4
        self._decoder, self._trimmer = TextDecoder(self._decode), StopTrimmer(self._stops)
        self.count = 0  # characters so far, with those that are held back
        self.passed = 0  # characters that went out

    @property
    def is_over(self) -> bool:
        """Whether a stop string has ended it."""
        return self._trimmer.is_over

    def feed(self, token: int) -> str:
        """The part of the text that is new and certain."""
        return self._passed(self._decoder.feed(token))

    def rest(self) -> str:
        """What was held back, once there is no more."""
        text = self._passed(self._decoder.rest())
        rest = self._trimmer.rest().translate(self._words)
        self.passed += len(rest)
        return text + rest

    def is_stopped(self, tokens: Sequence[int]) -> bool:
        """Whether a stop string ends with the last of these tokens."""
        text = self._decode(tokens[-self.tail :]) if self._stops else ""
        return any(stop in text for stop in self._stops)

    def _passed(self, text: str) -> str:
        self.count += len(text.translate(self._words))
        text = self._trimmer.feed(text).translate(self._words)
        self.passed += len(text)
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        kept = [token for token in tokens if token in self._read or token not in self._special]
        text = str(self._backend.decode(kept, skip_special_tokens=False))
        return text if self._read.keys().isdisjoint(kept) else self._lettered(text)

    def _lettered(self, text: str) -> str:
        return self._names.sub(lambda found: self._letters[found[0]], text)


class StopTrimmer:
    """Text up to the first stop string, as OpenAI's API has it; transformers' answers include it."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.longest = stops, max(map(len, stops), default=0)
        self.held = ""  # may be the beginning of a stop string
        self.is_over = False
        self.behind = ""  # what came with a stop string and stands behind it

    def feed(self, text: str) -> str:
        """The part of the text that is new and certain."""
        if self.is_over:
            return ""
        text = self.held + text
        found = [(place, stop) for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            place, stop = min(found)
            self.is_over, self.held, self.behind = True, "", text[place + len(stop) :]
            return text[:place]
        starts = range(max(0, len(text) - self.longest), len(text))
        held = (start for start in starts if any(stop.startswith(text[start:]) for stop in self.stops))
        start = next(held, len(text))
        self.held = text[start:]
        return text[:start]

    def rest(self) -> str:
        """What was held back, once there is no more."""
        rest, self.held = self.held, ""
        return rest
