"""A trace, or a generation while it runs, in a terminal; or as plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..modeling_wedlm import WeDLMForCausalLM
from .compare import RUN_STYLES, RunStreamer
from .measure import Decoding, ForwardCounter, Options, decode, encode_text
from .trace import FILLED, MASK, PROMPT, Recording, Run, Trace, decoders_of, label_of, settings_of, token_text

PENDING_STYLE = "bold"
FILLED_STYLE = "black on yellow"
MASK_STYLE = "dim"
MASK_SIGN = "░"

PACE = 0.1
"""Seconds that a forward stays in view."""

SIDE_BY_SIDE = 100
"""Columns from which on two panes fit beside each other."""


@dataclass
class Frame:
    """What one decoder has so far.

    Attributes:
        label: of the decoder.
        final: final text in parts, each with the number of the forward that made it final.
        slots: the window in logical order: text of a filled slot, `None` for a mask.
        tokens, forwards, seconds: so far.
        order: logical positions of the last forward's rows in physical order; empty where they are not known.
    """

    label: str
    final: list[tuple[str, int]] = field(default_factory=list)
    slots: list[str | None] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    order: str = ""

    @property
    def counts(self) -> str:
        """In words."""
        pace = f", {self.tokens / self.forwards:.2f} a forward" if self.forwards else ""
        return f"{self.tokens} tokens, forward {self.forwards}{pace}, {self.seconds:.3f} s"

    def panel(self, height: int | None = None) -> Panel:
        """For a terminal."""
        text = Text()
        for part, forward in self.final:
            text.append(printable(part), RUN_STYLES[forward % len(RUN_STYLES)])
        for slot in self.slots:
            text.append(MASK_SIGN if slot is None else printable(slot).replace("\n", "⏎"), _style(slot))
        if self.order:
            text.append(f"\n\n{self.order}", "dim")
        return Panel(
            text, title=self.label, subtitle=self.counts, title_align="left", subtitle_align="left", height=height
        )

    def line(self) -> str:
        """For a file or a pipe: the forward, what it made final, and the window."""
        new = "".join(part for part, forward in self.final if forward == self.forwards)
        window = " ".join("_" if slot is None else repr(slot) for slot in self.slots)
        order = f"  read {self.order}" if self.order else ""
        shown = f"{self.label}: forward {self.forwards}, {self.seconds:.3f} s:{order}  final {new!r}"
        return f"{shown}  window {window}" if window else shown


def _style(slot: str | None) -> str:
    return MASK_STYLE if slot is None else FILLED_STYLE


def printable(text: str) -> str:
    """Control characters but line ends and tabs, which could move the cursor or worse, as `␛` and the like."""
    return "".join(_visible(letter) for letter in text)


def _visible(letter: str) -> str:
    code = ord(letter)
    if letter in "\n\t":
        return letter
    if code < 0x20 or code == 0x7F:
        return chr(0x2421 if code == 0x7F else 0x2400 + code)
    return "\N{REPLACEMENT CHARACTER}" if 0x80 <= code < 0xA0 else letter


# --- a saved trace ------------------------------------------------------------------------------------------------


def frame_of(trace: Trace, recording: Recording, run: Run, count: int, seconds: float) -> Frame:
    """What a run has after `count` of its forwards."""
    frame = Frame(run.label, forwards=count, seconds=seconds)
    for index, step in enumerate(run.steps[:count]):
        frame.final.append(("".join(run.pieces[frame.tokens : step.final]), index + 1))
        frame.tokens = step.final
    if count < len(run.steps):
        rows = run.steps[count]
        slots = sorted(
            (position, None if kind == MASK else trace.vocabulary[str(token)])
            for position, token, kind in zip(rows.positions, rows.tokens, rows.kinds, strict=True)
            if kind in (FILLED, MASK)
        )
        frame.slots = [text for _, text in slots]
    if count and run.name != "ar":
        frame.order = _order(run.steps[count - 1].positions, run.steps[count - 1].kinds, len(recording.prompt_tokens))
    return frame


def _order(positions: Sequence[int], kinds: str, prompt_length: int) -> str:
    """Positions of the rows in physical order; a bar where masks begin."""
    parts = ["prompt"] if PROMPT in kinds else []
    for place, (position, kind) in enumerate(zip(positions, kinds, strict=True)):
        if kind == MASK and MASK not in kinds[:place]:
            parts.append("|")
        if kind != PROMPT:
            parts.append(str(position - prompt_length))
    return " ".join(parts)


def replay_in_terminal(trace: Trace, console: Console, *, pace: float = PACE) -> None:
    """Show every recording of a trace, its decoders at the same clock.

    Args:
        trace: to show.
        console: where. If it is no terminal, it gets a line for each forward, at once.
        pace: seconds that a typical forward of the last decoder (AR's, where there is one) stays in view; 0 is the
            speed that was measured.
    """
    for recording in trace.recordings:
        _print_prompt(console, recording.prompt)
        moments = sorted((end, number) for number, run in enumerate(recording.runs) for end in run.ends)
        slowest = recording.runs[-1]
        stretch = max(1.0, pace * len(slowest.steps) / slowest.seconds) if pace else 1.0
        counts = [0] * len(recording.runs)

        def frames(now: float, counts: list[int] = counts, recording: Recording = recording) -> list[Frame]:
            pairs = zip(recording.runs, counts, strict=True)
            return [
                frame_of(trace, recording, run, count, min(now, run.seconds) if count else 0.0) for run, count in pairs
            ]

        if console.is_terminal:
            console.print(Text(f"{1 / stretch:.2g} of the measured speed", "dim"))
            before = 0.0
            with Live(_panes(frames(0.0), console), console=console, refresh_per_second=20) as live:
                for moment, number in moments:
                    time.sleep((moment - before) * stretch)
                    before = moment
                    counts[number] += 1
                    live.update(_panes(frames(moment), console))
        else:
            for moment, number in moments:
                counts[number] += 1
                _print_line(console, frames(moment)[number].line())
        for run in recording.runs:
            _print_line(console, _result(run.label, len(run.tokens), len(run.steps), run.seconds))


def _panes(frames: Sequence[Frame], console: Console) -> RenderableType:
    if len(frames) == 1 or console.width < SIDE_BY_SIDE:
        return Group(*(frame.panel() for frame in frames))
    return Columns([frame.panel() for frame in frames], width=console.width // len(frames) - 1, expand=True)


# --- live ---------------------------------------------------------------------------------------------------------


class FrameStreamer(RunStreamer):
    """Shows a generation while it runs: final text and the window's drafts, as `generate` sends them.

    Args:
        tokenizer: turns tokens into text.
        frame: kept up to date.
        mask_token_id: of masks in the window.
        forwards: the number of forwards so far.
        show: called with each new state.
        pace: seconds that each forward stays in view.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        frame: Frame,
        mask_token_id: int | None,
        forwards: Callable[[], int],
        show: Callable[[], None],
        pace: float,
    ):
        super().__init__(tokenizer, self._extend)
        self.frame = frame
        self.mask_token_id = mask_token_id
        self.forwards = forwards
        self.show = show
        self.pace = pace
        self.start = time.perf_counter()

    def _extend(self, text: str, run: int) -> None:
        self.frame.final.append((text, self.frame.forwards))

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then runs of final tokens."""
        if self.prompt_seen:
            self._next()
            self.frame.slots = self.frame.slots[value.numel() :]
            self.frame.tokens += value.numel()
        super().put(value)

    def put_draft(self, value: torch.Tensor) -> None:
        """Takes the window, masks included."""
        self._next()
        start = time.perf_counter()
        self.frame.slots = [
            None if token == self.mask_token_id else token_text(self.tokenizer, token) for token in value.tolist()
        ]
        self.seconds += time.perf_counter() - start

    def end(self) -> None:
        """Shows the last state."""
        start = time.perf_counter()
        super().end()
        self.frame.slots = []
        self.show()
        self.seconds += time.perf_counter() - start

    def _next(self) -> None:
        """At the first news of a forward: the state before it is complete and stays in view for a while."""
        if self.forwards() == self.frame.forwards:
            return
        start = time.perf_counter()
        seconds = start - self.start - self.seconds
        if self.frame.forwards:
            self.show()
            time.sleep(self.pace)
        self.frame.forwards, self.frame.seconds = self.forwards(), seconds
        self.seconds += time.perf_counter() - start


def decode_in_terminal(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    options: Options,
    console: Console,
    *,
    with_ar: bool = True,
    raw: bool = False,
    seed: int = 0,
    pace: float = PACE,
) -> None:
    """Decode prompts and show it live, AR decoding of each right after.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        prompts: at least one.
        options: keywords of `generate`, `strategy` among them.
        console: where. If it is no terminal, it gets a line for each forward.
        with_ar: AR decoding too, with the same options where they apply.
        raw: take prompts as they are, without the chat template.
        seed: of sampling, set anew for each prompt and decoder.
        pace: seconds that each forward stays in view. They do not count as the decoder's.

    Raises:
        ValueError: whatever `generate` refuses.
    """
    encoded = [encode_text(model, tokenizer, prompt, raw) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        decoders = decoders_of(model, options, len(tokens), with_ar)
        if prompt is prompts[0]:  # the first call costs more
            for keywords in decoders.values():
                decode(model, tokenizer, [tokens], {**keywords, "max_new_tokens": 2})
        _print_prompt(console, prompt)
        for name, keywords in decoders.items():
            label = label_of(name, settings_of(model, keywords).verification)
            decoding = _decode_live(model, tokenizer, tokens, keywords, label, console, seed, pace)
            _print_line(console, _result(label, len(decoding.tokens), decoding.forwards, decoding.seconds))


def _decode_live(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    tokens: list[int],
    options: Options,
    label: str,
    console: Console,
    seed: int,
    pace: float,
) -> Decoding:
    frame = Frame(label)
    live = Live(frame.panel(), console=console, auto_refresh=False) if console.is_terminal else None

    def show() -> None:
        if live is None:
            _print_line(console, frame.line())
        else:
            live.update(frame.panel(), refresh=True)

    with ForwardCounter(model) as counter, live or nullcontext():
        streamer = FrameStreamer(
            tokenizer,
            frame,
            settings_of(model, options).mask_token_id,
            lambda: counter.forwards,
            show,
            0.0 if live is None else pace,
        )
        (decoding,) = decode(model, tokenizer, [tokens], options, streamer, seed=seed)
    return replace(decoding, seconds=decoding.seconds - streamer.seconds)


def _print_prompt(console: Console, prompt: str) -> None:
    console.print(Text(f"› {printable(prompt)}", "bold"), soft_wrap=True)


def _print_line(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)


def _result(label: str, tokens: int, forwards: int, seconds: float) -> str:
    return f"{label}: {tokens} tokens in {forwards} forwards, {seconds:.3f} s"
