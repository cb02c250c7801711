"""Text of tokens."""

from __future__ import annotations

from itertools import takewhile

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...console.streaming import REPLACEMENT

_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""Byte-level tokenizers write bytes as these letters."""


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The part of the text that each token brings. Together they are the text without special tokens."""
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    pieces, written = [], 0
    for count in range(1, len(tokens) + 1):
        # A token may bring the first bytes of a character only, or change the end of what is there.
        prefix = str(tokenizer.decode(tokens[:count], skip_special_tokens=True)) if count < len(tokens) else text
        agreed = takewhile(lambda pair: pair[0] == pair[1], zip(prefix, text, strict=False))
        known = max(written, sum(1 for _ in agreed))
        pieces.append(text[written:known])
        written = known
    return pieces


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """How a token is shown by itself: its text, or its bytes where they are no whole characters."""
    text = str(tokenizer.decode([token]))
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if REPLACEMENT in text:
        values = [_BYTES.get(letter) for letter in piece]
        shown = piece if None in values else " ".join(f"{value:02X}" for value in values)
        return f"⟨{shown.removeprefix('<0x').removesuffix('>')}⟩"
    return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text
