"""The text of an answer while its tokens come: what of it is certain, and where a stop string ends it."""

from collections.abc import Collection
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no whole character are decoded to
LONGEST_HELD = 64  # tokens; a character has four bytes at most, so what is held longer is no beginning of one


class TextDecoder:
    """Text of tokens that come one by one. What may be the beginning of a character is held back; bytes that are none
    become replacement characters, as `decode` makes them.

    Args:
        tokenizer: of the package `tokenizers`.
        skipped: tokens that the text does without.
    """

    def __init__(self, tokenizer: Any, skipped: Collection[int] = ()):
        self.tokenizer, self.skipped = tokenizer, skipped
        self.sent: list[int] = []  # the last tokens whose text went out: some decoders join words by what is before
        self.held: list[int] = []

    def feed(self, token: int) -> str:
        """The part of the text that is new and certain."""
        self.held.append(token)
        text = self._held_text()
        if (not text or text.endswith(UNFINISHED)) and len(self.held) < LONGEST_HELD:
            return ""
        if text:
            self.sent = self.held
        self.held = []
        return text

    def rest(self) -> str:
        """What was held back, once there is no more."""
        text, self.held = self._held_text() if self.held else "", []
        return text

    def _held_text(self) -> str:
        before, text = self.decode(self.sent), self.decode(self.sent + self.held)
        # Bytes behind other bytes may change how those are decoded, which cannot be taken back.
        return text[len(before) :] if text.startswith(before) else self.decode(self.held)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens by themselves."""
        kept = [token for token in tokens if token not in self.skipped]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False))


class StopTrimmer:
    """Text up to the first stop string, as OpenAI's API has it; transformers' answers include it."""

    def __init__(self, stops: list[str]):
        self.stops = stops
        self.held = ""  # may be the beginning of a stop string
        self.is_over = False
        self.behind = ""  # what came with a stop string and stands behind it
        self.count = 0  # characters that went out

    def feed(self, text: str) -> str:
        """The part of the text so far that is new and certain."""
        if self.is_over:
            return ""
        text = self._certain(self.held + text)
        self.count += len(text)
        return text

    def _certain(self, text: str) -> str:
        found = [(place, stop) for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            place, stop = min(found)
            self.is_over, self.held, self.behind = True, "", text[place + len(stop) :]
            return text[:place]
        starts = (start for start in range(len(text)) if any(stop.startswith(text[start:]) for stop in self.stops))
        start = next(starts, len(text))
        self.held = text[start:]
        return text[:start]

    def rest(self) -> str:
        """What was held back, once there is no more."""
        rest, self.held = self.held, ""
        self.count += len(rest)
        return rest
