"""Answers on a terminal while they are decoded."""

import time
from collections.abc import Callable

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

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


class AnswerStreamer(BaseStreamer):
    """Writes text as it becomes final: calls `write` with new text and the number, from 1, of the group of tokens that
    became final with it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, int], None]):
        self.tokenizer, self.write = tokenizer, write
        self.tokens: list[int] = []  # the final ones so far
        self.written = 0
        self.group = -1  # the prompt comes first
        self.seconds = 0.0  # spent in here, not in the decoder

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, `(1, P)`, then groups of final tokens, `(n,)`, some of them empty."""
        start = time.perf_counter()
        if self.group < 0:
            self.group = 0
        elif value.numel():
            self.group += 1
            self.tokens.extend(value.flatten().tolist())
            self._write(hold_back=True)
        self.seconds += time.perf_counter() - start

    def end(self) -> None:
        """Writes what was held back."""
        self._write(hold_back=False)

    def _write(self, hold_back: bool) -> None:
        text = str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        if hold_back and text.endswith(REPLACEMENT):
            return  # the last character lacks some of its bytes
        self.write(text[self.written :], self.group)
        self.written = len(text)
