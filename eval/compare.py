"""The work of `wedlm generate`: answers prompts, streaming, next to plain AR decoding of the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..generation.settings_wedlm import SETTING_NAMES
from ..modeling_wedlm import WeDLMForCausalLM
from .measure import Decoding, Options, Score, decode, encode_text

LONGEST_ANSWER = 256
WARM_UP_TOKENS = 8
RUN_STYLES = ("cyan", "magenta")


class RunStreamer(BaseStreamer):
    """Hands on text as it becomes final, with a number that goes up by one with each run of tokens.

    Args:
        tokenizer: turns tokens into text.
        write: called with new text and the number of its run.

    Attributes:
        seconds: time spent in here, which is not the decoder's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, int], None]):
        self.tokenizer = tokenizer
        self.write = write
        self.tokens: list[int] = []
        self.written = 0
        self.run = 0
        self.prompt_seen = False  # it comes first
        self.seconds = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, `(1, P)`, then runs of final tokens, `(n,)`, some of them empty."""
        start = time.perf_counter()
        if not self.prompt_seen:
            self.prompt_seen = True
        elif value.numel():
            self.run += 1
            self.tokens.extend(value.flatten().tolist())
            self._write(hold_back=True)
        self.seconds += time.perf_counter() - start

    def end(self) -> None:
        """Writes what was held back."""
        self._write(hold_back=False)

    def _write(self, hold_back: bool) -> None:
        text = str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        if hold_back and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return  # the first bytes of a character whose others are still to come
        self.write(text[self.written :], self.run)
        self.written = len(text)


def compare(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    options: Options,
    *,
    console: Console,
    with_ar: bool = True,
    raw: bool = False,
    seed: int = 0,
) -> None:
    """Answer prompts, streaming, and print what it took.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        prompts: at least one.
        options: keywords of `generate`, `strategy` among them.
        console: to print on.
        with_ar: decode each prompt with AR too, right after, with the same options where they apply.
        raw: take prompts as they are, without the chat template.
        seed: of sampling, set anew for each prompt and decoder.

    Raises:
        ValueError: whatever `generate` refuses.
    """
    strategy = options["strategy"]
    decoders = {strategy: options}
    if with_ar:
        shared = {name: value for name, value in options.items() if name not in SETTING_NAMES}
        decoders.setdefault("ar", {**shared, "strategy": "ar"})
    encoded = [encode_text(model, tokenizer, prompt, raw) for prompt in prompts]
    for decoder in decoders.values():
        short = min(WARM_UP_TOKENS, decoder.get("max_new_tokens", WARM_UP_TOKENS))
        decode(model, tokenizer, encoded[:1], {**decoder, "max_new_tokens": short})

    def write(text: str, run: int) -> None:
        console.out(text, style=RUN_STYLES[run % len(RUN_STYLES)], highlight=False, end="")

    if console.is_terminal and not console.no_color:
        console.out("Neighbours of one colour became final in the same forward.\n", style="dim", highlight=False)
    totals = {name: Score() for name in decoders}
    for prompt, tokens in zip(prompts, encoded, strict=True):
        console.out(f"› {prompt}", style="bold", highlight=False)
        limit = default_limit(model, len(tokens))
        decodings: dict[str, Decoding] = {}
        for name, decoder in decoders.items():
            streamer = RunStreamer(tokenizer, write) if name == strategy else None
            torch.manual_seed(seed)
            (decoding,) = decode(model, tokenizer, [tokens], {**limit, **decoder}, streamer)
            seconds = decoding.seconds - (streamer.seconds if streamer else 0.0)
            decodings[name] = replace(decoding, seconds=seconds)
            totals[name] += Score.of(decodings[name])
        console.out("" if decodings[strategy].text.endswith("\n") else "\n", end="")
        console.out(_costs(decodings), style="dim", highlight=False)
    console.print(comparison_table(totals))


def default_limit(model: WeDLMForCausalLM, prompt_length: int) -> dict[str, int]:
    """A limit of new tokens where the generation config has none: transformers' own default is 20."""
    config = model.generation_config
    if config.max_new_tokens is not None or config.max_length is not None:
        return {}
    return {"max_new_tokens": max(1, min(LONGEST_ANSWER, model.config.max_position_embeddings - prompt_length))}


def _costs(decodings: Mapping[str, Decoding]) -> str:
    """What one answer took, the streamed one first, and whether the other one is the same."""
    streamed, *others = decodings.values()
    text = f"{len(streamed.tokens)} tokens in {streamed.forwards} forwards, {streamed.seconds:.3f} s"
    for other in others:
        answer = "same answer" if other.tokens == streamed.tokens else f"its answer:\n{other.text}"
        text += f"; ar: {len(other.tokens)} in {other.forwards}, {other.seconds:.3f} s, {answer}"
    return f"{text}\n"


def comparison_table(totals: Mapping[str, Score]) -> Table:
    """One column for each decoder; speed is relative to `"ar"`, where that is one of them."""
    table = Table("strategy", box=SIMPLE_HEAD)
    for name in totals:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[Score], str]] = {
        "new tokens": lambda score: f"{score.new_tokens}",
        "forwards": lambda score: f"{score.forwards}",
        "tokens per forward": lambda score: f"{score.tokens_per_forward:.2f}",
        "prefix cacheability": lambda score: f"{score.prefix_cacheability:.2f}",
        "tokens/s": lambda score: f"{score.tokens_per_second:,.0f}",
    }
    if "ar" in totals:
        ar_speed = totals["ar"].tokens_per_second
        rows["speed against AR"] = lambda score: f"{score.tokens_per_second / ar_speed:.2f}×"
    for label, cell in rows.items():
        table.add_row(label, *map(cell, totals.values()))
    return table
