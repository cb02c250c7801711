"""A conversation with a model, whose cache is kept from turn to turn."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from ..console.streaming import AnswerStreamer
from ..eval.decoders import Options
from ..eval.measure import ForwardCounter, pad_left
from ..eval.prompts import Prompt, answer_limit, encode_prompt
from ..generation.cache import WindowCache
from ..generation.versions import CACHE
from ..modeling_wedlm import WeDLMForCausalLM

LONGEST_ANSWER = 1024  # new tokens at most, where neither the options nor the checkpoint say


class AnswerStopped(KeyboardInterrupt):
    """Ctrl-C at a moment when only an exception can stop what is running. It does not end the program."""


@dataclass(frozen=True)
class Turn:
    """An answer, and what it took."""

    text: str  # without special tokens
    new_tokens: int  # the end token included
    forwards: int
    prompt_tokens: int  # of the whole conversation up to the answer
    cached_tokens: int  # those of them that were in the cache
    drafted: int  # drafts that were checked; 0 where that is not known
    accepted: int
    seconds: float  # of `generate`
    ended_by: Literal["end", "limit", "stop"]  # by the model, its limit, Ctrl-C


class Conversation:
    """Turns of a user and a model in evaluation mode, whose tokenizer has a chat template. The options (keywords of
    `generate`, `strategy` among them) and the text of a system message may be replaced between turns."""

    def __init__(
        self, model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, options: Options, system: str | None = None
    ):
        self.model, self.tokenizer = model, tokenizer
        self.options, self.system = options, system
        self.may_go_on = False  # True while an answer is written, until it is to stop
        self.reset()

    def reset(self) -> None:
        """Forgets all turns."""
        self.messages: list[dict[str, str]] = []  # without the system message
        self.turns: list[Turn] = []
        self.cache = WindowCache(self._capacity)

    @property
    def _capacity(self) -> int | None:
        """Slots of the kept cache where its shapes stay the same."""
        stored = self.model.generation_config.cache_implementation
        is_static = self.options.get("cache_implementation", stored) == "static"
        return int(self.options.get("max_cache_len") or 0) if is_static else None

    @property
    def all_messages(self) -> list[dict[str, str]]:
        """The messages, with that of the system."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def stop(self) -> bool:
        """Ends the answer that is being written after its present forward, so that the cache keeps what was computed.
        Returns False where there is no answer, or it was asked to end before."""
        was_going_on, self.may_go_on = self.may_go_on, False
        return was_going_on

    def ask(self, text: str, write: Callable[[str, int], None]) -> Turn:
        """Asks, and streams the answer by `write` (see [`AnswerStreamer`]). Both are part of the conversation then,
        unless nothing was answered. Returns what the answer took; where [`stop`] or [`AnswerStopped`] ended it, what
        there is of it. Raises `ValueError` as [`encode_prompt`], and for what `generate` refuses."""
        messages = [*self.all_messages, {"role": "user", "content": text}]
        prompt = list(encode_prompt(self.model, self.tokenizer, Prompt(messages)).tokens)
        stored = self.model.generation_config
        options = {**self.options, "tokenizer": self.tokenizer, "stopping_criteria": [self._is_stopped]}
        wanted = self.options.get("max_new_tokens") or stored.max_new_tokens or LONGEST_ANSWER
        limit = answer_limit(self.model, len(prompt), wanted)
        options |= {"max_new_tokens": limit, "return_dict_in_generate": True}
        cached = 0
        if (self.options.get("strategy") or getattr(stored, "strategy", None) or "ar") != "ar":
            cached = self._keep_beginning_of(prompt)
            # The kept cache is of the kind that was asked for.
            options |= {CACHE: self.cache, "cache_implementation": None, "max_cache_len": None}
        self.may_go_on, start = True, time.perf_counter()
        streamer = AnswerStreamer(self.tokenizer, write)
        with ForwardCounter(self.model) as counter:
            output, is_stopped = self._generate(prompt, streamer, options)
        tokens = streamer.tokens
        stats = getattr(output, "stats", None)
        turn = Turn(
            text=str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
            new_tokens=len(tokens),
            forwards=counter.forwards,
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            drafted=0 if stats is None else int(stats.drafted.sum()),
            accepted=0 if stats is None else int(stats.accepted.sum()),
            seconds=time.perf_counter() - start,
            ended_by="stop" if is_stopped else "limit" if len(tokens) == limit else "end",
        )
        if tokens:
            self.messages += [messages[-1], {"role": "assistant", "content": turn.text}]
            self.turns.append(turn)
        return turn

    def _generate(self, prompt: list[int], streamer: AnswerStreamer, options: dict[str, Any]) -> tuple[Any, bool]:
        """The output of `generate`, `None` where the streamer ended it, and whether somebody stopped it."""
        inputs: Any = pad_left([prompt], 0, self.model.device)
        untyped: Any = self.model  # transformers states a type of `generate`'s `self` that its own models do not have
        output = None
        try:
            output = untyped.generate(**inputs, streamer=streamer, **options)
        except AnswerStopped:
            self.stop()
            with suppress(AnswerStopped):  # pressed once more
                streamer.end()
        finally:
            was_going_on = self.stop()
        return output, not was_going_on

    def _is_stopped(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        """A stopping criterion."""
        return torch.full(input_ids.shape[:1], not self.may_go_on, device=input_ids.device)

    def _keep_beginning_of(self, prompt: list[int]) -> int:
        """Crops the cache to what it shares with a prompt: a template may write an answer in other tokens than the
        model did. Returns how many tokens of the prompt need not be computed."""
        if not self.cache.lengths:
            return 0
        length = self.cache.lengths[0]
        held = self.cache.token_ids[0, :length].tolist()
        pairs = enumerate(zip(held, prompt, strict=False))
        shared = next((place for place, (token, other) in pairs if token != other), min(length, len(prompt)))
        self.cache.crop(shared - length)
        return min(shared, len(prompt) - 1)
