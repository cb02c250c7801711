"""The work of `wedlm generate`: answers prompts, streaming, next to AR decoding with the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ...console.prompts import Turns
from ...modeling_wedlm import WeDLMForCausalLM
from ..decoders import AR
from ..measure import Decoding, decode, rates
from ..prompts import Prompt
from .record import Request
from .text import GROUP_STYLES, REPLACEMENT, printable

WARM_UP_TOKENS = 8

SHOWN = (
    ("new tokens", "new_tokens", "{}"),
    ("forwards", "forwards", "{}"),
    ("tokens per forward", "tokens_per_forward", "{:.2f}"),
    ("prefix cacheability", "prefix_cacheability", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("speed against AR", "speed_against_ar", "{:.2f}×"),
)
"""Rows of [`comparison_table`]: label, name in [`totals`], format."""


class AnswerStreamer(BaseStreamer):
    """Hands on text as it becomes final.

    Args:
        tokenizer: turns tokens into text.
        write: called with new text and the number of the group of tokens, final at once, that it came with.

    Attributes:
        seconds: time spent in here, which is not the decoder's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, int], None]):
        self.tokenizer = tokenizer
        self.write = write
        self.tokens: list[int] = []
        self.written = 0
        self.group = -1  # the prompt comes first
        self.seconds = 0.0

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
            return  # the first bytes of a character whose others are still to come
        self.write(text[self.written :], self.group)
        self.written = len(text)


def compare(
    model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, request: Request, console: Console
) -> dict[str, list[Decoding]]:
    """Answer prompts, streaming, and print what it took, next to AR decoding; the answers of each decoder.

    Raises:
        ValueError: whatever `generate` refuses.
    """

    def write(text: str, group: int) -> None:
        style = GROUP_STYLES[group % len(GROUP_STYLES)]
        console.out(printable(text), style=style, highlight=False, end="")

    encoded = request.encode(model, tokenizer)
    for options in request.decoders(model, len(encoded[0][1])).values():  # the first call costs more
        short = min(WARM_UP_TOKENS, options.get("max_new_tokens", WARM_UP_TOKENS))
        decode(model, tokenizer, [encoded[0][1]], {**options, "max_new_tokens": short})
    if console.is_terminal and not console.no_color:
        console.out("Neighbours of one colour became final in the same forward.\n", style="dim", highlight=False)
    decodings: dict[str, list[Decoding]] = {}
    for prompt, tokens in encoded:
        console.out(f"› {printable(prompt)}", style="bold", highlight=False)
        for name, options in request.decoders(model, len(tokens)).items():
            streamer = AnswerStreamer(tokenizer, write) if name == request.options["strategy"] else None
            (decoding,) = decode(model, tokenizer, [tokens], options, streamer, seed=request.seed)
            seconds = decoding.seconds - (streamer.seconds if streamer else 0.0)
            decodings.setdefault(name, []).append(replace(decoding, seconds=seconds))
        answer, *others = (answers[-1] for answers in decodings.values())
        costs = f"{len(answer.tokens)} tokens in {answer.forwards} forwards, {answer.seconds:.3f} s"
        for ar in others:
            same = "same answer" if ar.tokens == answer.tokens else f"its answer:\n{printable(ar.text)}"
            costs += f"; ar: {len(ar.tokens)} in {ar.forwards}, {ar.seconds:.3f} s, {same}"
        console.out("" if answer.text.endswith("\n") else "\n", end="")
        console.out(f"{costs}\n", style="dim", highlight=False)
    console.print(comparison_table(decodings))
    return decodings


def records(prompts: Sequence[str | Turns], decodings: Mapping[str, Sequence[Decoding]]) -> list[dict[str, Any]]:
    """For each prompt, what each decoder answered and what it took, as values that JSON has."""
    fields = ("text", "tokens", "forwards", "token_instances", "seconds")
    return [
        {"prompt": Prompt.of(prompt).text}
        | {name: {field: getattr(one, field) for field in fields} for name, one in zip(decodings, row, strict=True)}
        for prompt, row in zip(prompts, zip(*decodings.values(), strict=True), strict=True)
    ]


def totals(decodings: Mapping[str, Sequence[Decoding]]) -> dict[str, dict[str, float]]:
    """What each decoder took over all its answers; speed is relative to `"ar"`, where that is one of them."""
    made: dict[str, dict[str, float]] = {}
    for name, answers in decodings.items():
        fields = ("forwards", "token_instances", "seconds")
        sums = {"new_tokens": sum(len(answer.tokens) for answer in answers)}
        sums |= {field: sum(getattr(answer, field) for answer in answers) for field in fields}
        made[name] = sums | {rate: float(value) for rate, value in rates(sums).items()}
    for own in made.values() if AR in made else ():
        own["speed_against_ar"] = own["tokens_per_second"] / made[AR]["tokens_per_second"]
    return made


def comparison_table(decodings: Mapping[str, Sequence[Decoding]]) -> Table:
    """The [`totals`], one column for each decoder."""
    table = Table("strategy", *(Column(name, justify="right") for name in decodings), box=SIMPLE_HEAD)
    sums = totals(decodings).values()
    for label, name, form in SHOWN:
        if all(name in own for own in sums):
            table.add_row(label, *(form.format(own[name]) for own in sums))
    return table
