"""A request while it is answered: what it asked for, whether its client is still there, and its `generate` call.

transformers' server runs `generate` calls one after the other on a thread of their own. Its manager is extended here
by what parallel decoding needs beside a generation config (the settings of [`WeDLMGenerationSettings`]), by statistics
in the log, and by an end of the call as soon as the client has gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, _GenerationCancelled, _StreamError
from transformers.generation.streamers import BaseStreamer

log = logging.getLogger("wedlm_hf.serving")

DEFAULT_NEW_TOKENS = 1024
"""Longest answer where neither the request nor the checkpoint says, as in `transformers serve`."""


class RequestError(Exception):
    """A request that is not answered.

    Args:
        message: for the client.
        status: of HTTP.
        code: OpenAI's name of the error, if it has one.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(eq=False)
class Call:
    """One request.

    Attributes:
        settings: of parallel decoding, keywords of `generate`.
        limit: new tokens that the request asks for at most; `None` if it does not say.
        seed: of sampling; `None`: the generator's state is left as it is.
        has_begun: completed by the first token, or by the error with which `generate` refused the request.
        is_cancelled: set when the client has gone, and when the server ends.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    seed: int | None = None
    has_begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    def begin(self, error: BaseException | None = None) -> None:
        """Marks it as begun, or as failed before. On the event loop."""
        if not self.has_begun.done():
            self.has_begun.set_exception(error) if error is not None else self.has_begun.set_result(None)
            self.has_begun.exception()  # asyncio would warn of one that is never looked at

    def check(self) -> None:
        """Ends the `generate` call that this is called from if it is cancelled."""
        if self.is_cancelled.is_set():
            raise _GenerationCancelled


CURRENT_CALL: ContextVar[Call] = ContextVar("current_call")


class StopTrimmer:
    """Text up to the first stop string, as OpenAI's API has it; transformers' answers include it.

    Args:
        stops: the stop strings.
    """

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


class CallWatcher(BaseStreamer):
    """A streamer that shows nothing: it counts new tokens, and ends a call whose client has gone."""

    def __init__(self, call: Call):
        self.call = call
        self.total_tokens = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, `(1, P)`, then new tokens, `(n,)`."""
        self.call.check()
        self.total_tokens = 0 if self.total_tokens < 0 else self.total_tokens + value.numel()

    def end(self) -> None:
        """Nothing is left to do."""


class CallStreamer(DirectStreamer):
    """transformers' streamer, which ends with its client and before a stop string.

    Args:
        call: the request.
        trimmer: of its stop strings.
        args: of [`DirectStreamer`].
    """

    def __init__(self, call: Call, trimmer: StopTrimmer, *args: Any):
        self.call = call
        self.trimmer = trimmer
        super().__init__(*args)

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, `(1, P)`, then new tokens, `(n,)`, whose text it sends."""
        self.call.check()
        super().put(value)
        if self.total_tokens:
            self._loop.call_soon_threadsafe(self.call.begin)

    def _enqueue(self, item: Any) -> None:
        if item is None and (rest := self.trimmer.rest()):
            super()._enqueue(rest)
        elif type(item) is str:  # neither a tool call nor thoughts
            item = self.trimmer.feed(item)
        if item != "":
            super()._enqueue(item)


class CallManager(GenerateManager):
    """Runs the `generate` calls of requests one after the other, each with the settings of its [`Call`]."""

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], CallStreamer]:
        """Starts a call. Returns a queue of text (then `None`), and the streamer that fills it.

        Raises:
            RequestError: for a request over the context.
        """
        call = CURRENT_CALL.get()
        fit_into_context(call, model, inputs, gen_config)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        trimmer = StopTrimmer(stops_of(gen_config))
        streamer = CallStreamer(call, trimmer, processor._tokenizer, loop, queue, response_parser)
        keywords = {**inputs, "generation_config": gen_config, "tokenizer": processor, **call.settings}

        def run() -> None:
            error: Exception | None = None
            try:
                self._generate(call, streamer, request_id, model, keywords)
            except Exception as failure:
                error = failure
            loop.call_soon_threadsafe(call.begin, error)
            if error is not None:  # otherwise the streamer has said that it is over
                message = json.dumps(str(error))[1:-1]  # transformers puts it between quotes as it is
                loop.call_soon_threadsafe(queue.put_nowait, _StreamError(message))

        self.submit(run)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, Any]:
        """Runs a call to its end. Returns its text, the length of the prompt, and the `(n,)` int64 new tokens.

        Raises:
            RequestError: for a request over the context, and for one that is cancelled.
            ValueError: for what `generate` refuses.
        """
        call = CURRENT_CALL.get()
        fit_into_context(call, model, inputs, gen_config)
        keywords = {**inputs, "generation_config": gen_config, "tokenizer": processor, **call.settings}
        new_tokens = await self.async_submit(self._generate, call, CallWatcher(call), request_id, model, keywords)
        trimmer = StopTrimmer(stops_of(gen_config))
        text = trimmer.feed(processor.decode(new_tokens, skip_special_tokens=True)) + trimmer.rest()
        return text, inputs["input_ids"].shape[1], new_tokens

    def _generate(
        self,
        call: Call,
        streamer: CallWatcher | CallStreamer,
        request_id: str,
        model: Any,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        """The `(n,)` new tokens; what they took goes into the log. On the thread that all calls share."""
        begin, prompt_length = time.perf_counter(), keywords["input_ids"].shape[1]
        try:
            call.check()
            if call.seed is not None:
                torch.manual_seed(call.seed)
            output = model.generate(**keywords, streamer=streamer)
        except _GenerationCancelled:
            count = max(0, streamer.total_tokens)
            log.info("%s: stopped after %d new tokens: its client has gone, or the server ends", request_id, count)
            raise RequestError("The answer was cut off: the server ends.", status=503) from None
        except ValueError:
            raise
        except Exception as error:
            log.exception("%s: failed", request_id)
            raise RequestError(f"The answer could not be generated: {error}", status=500) from error
        seconds = time.perf_counter() - begin
        new_tokens: torch.Tensor = output.sequences[0, prompt_length:]
        log.info("%s: %d prompt tokens, %s", request_id, prompt_length, cost_of(output, len(new_tokens), seconds))
        return new_tokens


def cost_of(output: Any, new_tokens: int, seconds: float) -> str:
    """One line on what `generate` took."""
    stats = getattr(output, "stats", None)
    forwards = new_tokens if stats is None else int(stats.forwards.sum())  # AR: one forward a token
    text = f"{new_tokens} new in {forwards} forwards ({new_tokens / max(1, forwards):.2f} tokens per forward)"
    if stats is not None and stats.drafted.sum():
        text += f", {int(stats.accepted.sum())} of {int(stats.drafted.sum())} drafts accepted"
    return f"{text}, {seconds:.2f} s ({new_tokens / seconds:.0f} tokens/s)"


def fit_into_context(call: Call, model: Any, inputs: Any, gen_config: GenerationConfig) -> None:
    """Sets how long the answer may become.

    Raises:
        RequestError: for a prompt that is empty or leaves no room in the context, and for a limit that does not fit.
    """
    context, length = model.config.max_position_embeddings, inputs["input_ids"].shape[1]
    if not 0 < length < context:
        message = f"The prompt must have 1 to {context - 1} tokens for this model's context, got {length}."
        raise RequestError(message, code="context_length_exceeded" if length else None)
    if call.limit is not None and length + call.limit > context:
        raise RequestError(
            f"This model's context is {context} tokens, but the request asks for {length + call.limit}: {length} in "
            f"the prompt, {call.limit} for the answer.",
            code="context_length_exceeded",
        )
    stored = model.generation_config.max_new_tokens or DEFAULT_NEW_TOKENS
    gen_config.max_new_tokens = call.limit or min(stored, context - length)


def stops_of(gen_config: GenerationConfig) -> list[str]:
    """The stop strings of a generation config."""
    stops = gen_config.stop_strings or []
    return [stops] if isinstance(stops, str) else list(stops)
