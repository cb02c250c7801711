"""Requests while they are answered: which of them are decoded together, how an answer streams, and how it ends.

transformers' server runs `generate` calls one after the other on a thread of their own. Its manager is extended here:
requests that decode alike share a call, and a call ends as soon as its clients have gone.
"""

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, _GenerationCancelled, _StreamError
from transformers.generation.streamers import BaseStreamer

from ..eval.measure import pad_left
from ..generation.request import context_length

log = logging.getLogger("wedlm_hf.serving")

# Longest answer where neither the request nor the checkpoint says, as in `transformers serve`.
DEFAULT_NEW_TOKENS = 1024
LARGEST_BATCH = 8  # requests that share a `generate` call
# Settings whose effect would reach other sequences of a batch, or the padding, and the values without an effect.
ALONE = {"stop_strings": None, "max_time": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


class RequestError(Exception):
    """A request that is not answered: its status of HTTP, OpenAI's name of the error, and the field that is wrong."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": " ".join(str(self).split()), "type": kind, "param": self.param, "code": self.code}
        # They may quote a lone surrogate, which no response can hold.
        return {"error": {name: text and text.encode(errors="replace").decode() for name, text in error.items()}}


@dataclass(eq=False)
class Call:
    """A request that is being answered."""

    is_cancelled: threading.Event = field(default_factory=threading.Event)  # the client has gone, or the server ends
    settings: dict[str, Any] = field(default_factory=dict)  # of parallel decoding, keywords of `generate`
    limit: int | None = None  # of new tokens, if the request says
    seed: int | None = None  # of sampling; `None`: the generator's state is left as it is
    error: Exception | None = None  # why the answer failed


CURRENT_CALL: ContextVar[Call] = ContextVar("current_call")


class StopTrimmer:
    """Text up to the first stop string, as OpenAI's API has it; transformers' answers include it."""

    def __init__(self, stops: list[str]):
        self.stops = stops
        self.held = ""  # may be the beginning of a stop string
        self.is_over = False

    def feed(self, text: str) -> str:
        """The part of the text so far that is new and certain."""
        if self.is_over:
            return ""
        text = self.held + text
        found = [place for place in map(text.find, self.stops) if place >= 0]
        if found:
            self.is_over, self.held = True, ""
            return text[: min(found)]
        starts = (start for start in range(len(text)) if any(stop.startswith(text[start:]) for stop in self.stops))
        start = next(starts, len(text))
        self.held = text[start:]
        return text[:start]

    def rest(self) -> str:
        """What was held back, once there is no more."""
        rest, self.held = self.held, ""
        return rest


class AnswerStreamer(DirectStreamer):
    """transformers' streamer of one sequence, which ends before a stop string and knows why it ends. The request's
    config changes at the end, see [`finish`]; the parser is of tool calls and thoughts, if any."""

    def __init__(
        self, call: Call, request_id: str, prompt: list[int], config: GenerationConfig, tokenizer: Any, parser: Any
    ):
        self.call, self.request_id, self.prompt, self.config = call, request_id, prompt, config
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.limit: int = config.max_new_tokens
        ends, stops = config.eos_token_id, config.stop_strings or []
        self.ends = set(ends) if isinstance(ends, list) else {ends}
        self.stops = [stops] if isinstance(stops, str) else stops
        self.trimmer = StopTrimmer(self.stops)
        self.is_over = False
        self.queue = asyncio.Queue[Any]()
        super().__init__(tokenizer._tokenizer, asyncio.get_running_loop(), self.queue, parser)
        self._first = False  # the prompt does not come here

    @property
    def kind(self) -> Hashable:
        """Equal for requests that may share a `generate` call."""
        settings = self.config.to_dict() | {"max_new_tokens": None}
        if self.call.seed is not None or any(settings.get(name) not in (None, value) for name, value in ALONE.items()):
            return id(self)
        return repr(sorted(settings.items())), repr(sorted(self.call.settings.items()))

    def put(self, value: torch.Tensor) -> None:
        """Takes new tokens, `(n,)`; after the end they are padding."""
        if self.is_over:
            return
        super().put(value)
        self.tokens += value.tolist()
        if not self.ends.isdisjoint(self.tokens[-1:]) or len(self.tokens) >= self.limit:
            self.finish()

    def finish(self) -> None:
        """Ends the answer. transformers' handlers tell its reason by `max_new_tokens`: an answer that has so many
        was cut off ("length"), one that has fewer ended by itself ("stop")."""
        if self.is_over:
            return
        self.is_over = True
        text = str(self.tokenizer.decode(self.tokens)) if self.stops else ""
        is_stopped = not self.ends.isdisjoint(self.tokens[-1:]) or any(stop in text for stop in self.stops)
        self.config.max_new_tokens = len(self.tokens) + is_stopped
        super().end()

    def cancel(self) -> None:
        """Gives it up: its stream is closed. Other answers of the call go on."""
        self.call.is_cancelled.set()

    def fail(self, error: Exception) -> None:
        """Ends it by an error, which the handlers are told of."""
        if not self.is_over:
            self.is_over, self.call.error = True, error
            super()._enqueue(_StreamError(""))

    def _enqueue(self, item: Any) -> None:
        if item is None and (rest := self.trimmer.rest()):
            super()._enqueue(rest)
        elif type(item) is str:  # neither a tool call nor thoughts
            item = self.trimmer.feed(item)
        if item != "":
            super()._enqueue(item)


class Batch(BaseStreamer, StoppingCriteria):
    """Sequences of one `generate` call: hands each its tokens, and ends each at its own limit."""

    def __init__(self, answers: Sequence[AnswerStreamer]):
        self.answers = answers
        self.width = max(len(answer.prompt) for answer in answers)
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompts, `(B, P)`, then new tokens: of a single sequence any number, else `(B,)`, one of each."""
        unfinished = [answer for answer in self.answers if not answer.is_over]
        if unfinished and all(answer.call.is_cancelled.is_set() for answer in unfinished):
            raise _GenerationCancelled
        if not self.is_prompt:
            rows = [value.flatten()] if len(self.answers) == 1 else value.split(1)
            for answer, tokens in zip(self.answers, rows, strict=True):
                answer.put(tokens)
        self.is_prompt = False

    def end(self) -> None:
        """Nothing."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Which sequences are over, `(B,)`."""
        count = input_ids.shape[1] - self.width
        is_over = [answer.call.is_cancelled.is_set() or count >= answer.limit for answer in self.answers]
        return torch.tensor(is_over, device=input_ids.device)


class CallManager(GenerateManager):
    """Runs `generate` calls one after the other, each for requests that decode alike."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.waiting: list[AnswerStreamer] = []

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], AnswerStreamer]:  # fmt: skip
        """Takes a request. Returns a queue of text (then `None`, or a `_StreamError` and the call's `error`), and the
        streamer that fills it. Raises `RequestError` for a request over the context."""
        call, prompt = CURRENT_CALL.get(), inputs["input_ids"][0].tolist()
        fit_into_context(call, model, len(prompt), gen_config)
        answer = AnswerStreamer(call, request_id, prompt, gen_config, processor, response_parser)
        with self.lock:
            self.waiting.append(answer)
        self.submit(self._answer_next, model)
        return answer.queue, answer

    async def generate_non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        """As [`generate_streaming`], to the end: the text, the prompt's length and the new tokens. Raises whatever the
        answer failed with."""
        queue, answer = self.generate_streaming(model, processor, inputs, gen_config, request_id)
        text = ""
        while (item := await queue.get()) is not None:
            if answer.call.error is not None:
                raise answer.call.error
            text += item
        return text, len(answer.prompt), answer.tokens

    def next_batch(self) -> list[AnswerStreamer]:
        """Takes out what is decoded next: the request that has waited longest, and those that can share its call."""
        with self.lock:
            batch = [answer for answer in self.waiting if answer.kind == self.waiting[0].kind][:LARGEST_BATCH]
            self.waiting = [answer for answer in self.waiting if answer not in batch]
        return batch

    def _answer_next(self, model: Any) -> None:
        """On the thread that all calls share."""
        batch = []
        for answer in self.next_batch():
            _cut_off(answer) if answer.call.is_cancelled.is_set() else batch.append(answer)
        if batch:
            self._generate(model, batch)

    def _generate(self, model: Any, batch: list[AnswerStreamer]) -> None:
        first, config, start = batch[0], copy.copy(batch[0].config), time.perf_counter()
        config.max_new_tokens = max(answer.limit for answer in batch)
        keywords = {**first.call.settings, "generation_config": config, "tokenizer": first.tokenizer}
        streamer = Batch(batch)
        if len(batch) > 1:  # a single one has its limit in the config
            keywords["stopping_criteria"] = [streamer]
        if first.call.seed is not None:
            torch.manual_seed(first.call.seed)
        try:
            prompts = pad_left([answer.prompt for answer in batch], config.pad_token_id or 0, model.device)
            output = model.generate(**prompts, **keywords, streamer=streamer)
        except _GenerationCancelled:
            for answer in batch:
                if not answer.is_over:
                    _cut_off(answer)
        except Exception as error:
            if len(batch) > 1 and not any(answer.tokens for answer in batch):
                for answer in batch:  # whatever one of them is to blame for concerns no other
                    self._generate(model, [answer])
                return
            if not isinstance(error, ValueError):
                log.exception("%s: failed", first.request_id)
                error = RequestError(f"The answer could not be generated: {error}", status=500)
            for answer in batch:
                answer.fail(error)
        else:
            seconds = time.perf_counter() - start
            for index, answer in enumerate(batch):
                if answer.call.is_cancelled.is_set() and not answer.is_over:
                    _cut_off(answer)
                    continue
                answer.finish()
                cost = cost_of(getattr(output, "stats", None), index, len(answer.tokens), seconds)
                others = f", beside {len(batch) - 1} others" if len(batch) > 1 else ""
                log.info("%s: %d prompt tokens, %s%s", answer.request_id, len(answer.prompt), cost, others)


def _cut_off(answer: AnswerStreamer) -> None:
    count = len(answer.tokens)
    log.info("%s: stopped after %d new tokens: its client has gone, or the server ends", answer.request_id, count)
    answer.fail(RequestError("The answer was cut off: the server ends.", status=503))


def cost_of(stats: Any, index: int, new_tokens: int, seconds: float) -> str:
    """One line on what the answer to a sequence of a call took."""
    forwards = new_tokens if stats is None else int(stats.forwards[index])  # AR: one forward a token
    text = f"{new_tokens} new in {forwards} forwards ({new_tokens / max(1, forwards):.2f} tokens per forward)"
    if stats is not None and stats.drafted[index]:
        text += f", {int(stats.accepted[index])} of {int(stats.drafted[index])} drafts accepted"
    return f"{text}, {seconds:.2f} s ({new_tokens / seconds:.0f} tokens/s)"


def fit_into_context(call: Call, model: Any, length: int, config: GenerationConfig) -> None:
    """Sets how long the answer to a prompt of `length` tokens may become. Raises `RequestError` for a prompt that is
    empty or leaves no room in the context, and for a limit that does not fit or lies below `min_new_tokens`."""
    context, code = context_length(model.config), "context_length_exceeded"
    if not 0 < length < context:
        message = f"The prompt must have 1 to {context - 1} tokens for this model's context, got {length}."
        raise RequestError(message, code=code if length else None)
    if call.limit is not None and length + call.limit > context:
        asked = f"{length + call.limit}: {length} in the prompt, {call.limit} for the answer"
        message = f"This model's context is {context} tokens, but the request asks for {asked}."
        raise RequestError(message, code=code)
    stored = model.generation_config.max_new_tokens or DEFAULT_NEW_TOKENS
    config.max_new_tokens = call.limit or min(stored, context - length)
    if (least := config.min_new_tokens or 0) > config.max_new_tokens:
        raise RequestError(f"`min_new_tokens` is {least}, but the answer may have {config.max_new_tokens} tokens.")
