"""Answers on a terminal while they are decoded."""

import time
from collections.abc import Callable

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no whole character are decoded to
LONGEST_HELD = 64  # tokens; a character has four bytes at most, so what is held longer is no beginning of one

_SIGNS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SIGNS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), ord(REPLACEMENT))


def printable(text: str) -> str:
    """The text with control characters other than line ends and tabs, which could move the cursor, as `␛` and such."""
    return text.translate(_SIGNS)


def writer_to(console: Console) -> Callable[[str, int], None]:
    """Writes new text; groups of tokens that became final in the same forward have two colours in turn."""

    def write(text: str, group: int) -> None:
        console.out(printable(text), style=("cyan", "magenta")[group % 2], highlight=False, end="")

    return write


class TextDecoder:
    """Text of tokens that come one by one. What may be the beginning of a character is held back; bytes that are none
    become replacement characters, as `decode` makes them.

    Args:
        decode: the text of tokens by themselves.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode = decode
        self.sent: list[int] = []  # the last tokens whose text went out: some decoders join words by what is before
        self.held: list[int] = []

    def feed(self, token: int) -> str:
        """The part of the text that is new and certain."""
        self.held.append(token)
        text = self._held_text()
        if (not text or text.endswith(REPLACEMENT)) and len(self.held) < LONGEST_HELD:
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


class AnswerStreamer(BaseStreamer):
    """Writes text as it becomes final: calls `write` with new text and the number, from 1, of the group of tokens that
    became final with it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, int], None]):
        self.write = write
        self.decoder = TextDecoder(lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)))
        self.count = 0  # of the final tokens so far
        self.group = -1  # the prompt comes first
        self.seconds = 0.0  # spent in here, not in the decoder

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, `(1, P)`, then groups of final tokens, `(n,)`, some of them empty."""
        start = time.perf_counter()
        if self.group < 0:
            self.group = 0
        elif value.numel():
            self.group += 1
            tokens = value.flatten().tolist()
            self.count += len(tokens)
            if text := "".join(map(self.decoder.feed, tokens)):
                self.write(text, self.group)
        self.seconds += time.perf_counter() - start

    def end(self) -> None:
        """Writes what was held back."""
        self.write(self.decoder.rest(), self.group)
