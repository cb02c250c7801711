"""The work of `wedlm generate`: answers prompts, streaming, next to AR decoding with the same weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from transformers import PreTrainedTokenizerBase

from ..console.prompts import Turns
from ..console.streaming import AnswerStreamer, printable, writer_to
from ..modeling_wedlm import WeDLMForCausalLM
from .decoders import AR
from .measure import MOST_TURNS, Decoding, Speed, decode, in_turn, rates
from .prompts import Prompt
from .request import AnswerRequest

WARM_UP_TOKENS = 8

SHOWN = (
    ("new tokens", "new_tokens", "{}"),
    ("forwards", "forwards", "{}"),
    ("tokens per forward", "tokens_per_forward", "{:.2f}"),
    ("prefix cacheability", "prefix_cacheability", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("speed against AR", "speed", "{}"),
)
"""Rows of [`comparison_table`]: label, name in [`totals`], format."""


def compare(
    model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, request: AnswerRequest, console: Console
) -> dict[str, list[Decoding]]:
    """Answer prompts, streaming, and print their cost, next to AR decoding. Returns the answers of each decoder; where
    a speed cannot be right, both decoders answered the prompt again, and the seconds are medians. Raises `ValueError`
    for what `generate` refuses."""
    encoded = request.encode(model, tokenizer)
    if console.is_terminal and not console.no_color:
        console.out("Neighbours of one colour became final in the same forward.\n", style="dim", highlight=False)
    decodings: dict[str, list[Decoding]] = {}
    for prompt, tokens in encoded:
        console.out(f"› {printable(prompt)}", style="bold", highlight=False)
        decoders, turns = request.decoders(model, len(tokens)), dict[str, list[Decoding]]()
        for name, options in decoders.items():
            if name not in decodings:  # a decoder's first call costs more; AR's comes after the first answer
                short = min(WARM_UP_TOKENS, options.get("max_new_tokens", WARM_UP_TOKENS))
                decode(model, tokenizer, [tokens], {**options, "max_new_tokens": short})
            streamer = AnswerStreamer(tokenizer, writer_to(console)) if name == request.options["strategy"] else None
            (decoding,) = decode(model, tokenizer, [tokens], options, streamer, seed=request.seed)
            seconds = decoding.seconds - (streamer.seconds if streamer else 0.0)
            turns[name] = [replace(decoding, seconds=seconds)]
        own, *others = turns.values()
        while others and len(own) < MOST_TURNS and not Speed.of([in_turn(others[0])], [in_turn(own)]).is_possible:
            for name, options in decoders.items():
                turns[name] += decode(model, tokenizer, [tokens], options, seed=request.seed)
        for name, taken in turns.items():
            decodings.setdefault(name, []).append(in_turn(taken))
        answer, *rest = (answers[-1] for answers in decodings.values())
        console.out("" if answer.text.endswith("\n") else "\n", end="")
        console.out(f"{_cost(answer, rest)}\n", style="dim", highlight=False)
    console.print(comparison_table(decodings))
    return decodings


def show(prompts: Sequence[str], decodings: Mapping[str, Sequence[Decoding]], console: Console) -> None:
    """Prints answers that are there already as [`compare`] does."""
    for prompt, (answer, *rest) in zip(prompts, zip(*decodings.values(), strict=True), strict=True):
        console.out(f"› {printable(prompt)}", style="bold", highlight=False)
        console.out(printable(answer.text), highlight=False, end="" if answer.text.endswith("\n") else "\n")
        console.out(f"{_cost(answer, rest)}\n", style="dim", highlight=False)
    console.print(comparison_table(decodings))


def _cost(answer: Decoding, rest: Sequence[Decoding]) -> str:
    """What an answer took, beside AR's where there is one."""
    forwards = f"{answer.forwards} forward{'s' * (answer.forwards != 1)}"
    costs = f"{len(answer.tokens)} tokens in {forwards}, {answer.seconds:.3f} s"
    for ar in rest:
        same = "same answer" if ar.tokens == answer.tokens else f"its answer:\n{printable(ar.text)}"
        costs += f"; ar: {len(ar.tokens)} in {ar.forwards}, {ar.seconds:.3f} s, {same}"
    return costs


def records(prompts: Sequence[str | Turns], decodings: Mapping[str, Sequence[Decoding]]) -> list[dict[str, Any]]:
    """The answer and cost of each decoder for each prompt, as values that JSON has."""
    fields = ("text", "tokens", "forwards", "token_instances", "seconds")
    found: list[dict[str, Any]] = [{"prompt": Prompt.of(prompt).text} for prompt in prompts]
    for name, answers in decodings.items():
        for record, answer in zip(found, answers, strict=True):
            record[name] = {field: getattr(answer, field) for field in fields}
    return found


def totals(decodings: Mapping[str, Sequence[Decoding]]) -> dict[str, dict[str, Any]]:
    """The cost of each decoder over all its answers; with AR also `speed_against_ar` and `speed`, its text."""
    made: dict[str, dict[str, Any]] = {}
    for name, answers in decodings.items():
        fields = ("forwards", "token_instances", "seconds")
        sums = {"new_tokens": sum(len(answer.tokens) for answer in answers)}
        sums |= {field: sum(getattr(answer, field) for answer in answers) for field in fields}
        made[name] = sums | {rate: float(value) for rate, value in rates(sums).items()}
    for own in made.values() if AR in made else ():
        own["speed_against_ar"] = own["tokens_per_second"] / made[AR]["tokens_per_second"]
        own["speed"] = str(Speed(own["speed_against_ar"], own["tokens_per_forward"]))
    return made


def comparison_table(decodings: Mapping[str, Sequence[Decoding]]) -> Table:
    """The [`totals`], one column for each decoder."""
    table = Table("strategy", *(Column(name, justify="right") for name in decodings), box=SIMPLE_HEAD)
    sums = totals(decodings).values()
    for label, name, form in SHOWN:
        if all(name in own for own in sums):
            table.add_row(label, *(form.format(own[name]) for own in sums))
    return table
