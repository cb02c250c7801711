"""The page of the server: its files, what it has to know of the model, and answers decoded once more, every step kept.

The page talks to OpenAI's endpoints. A replay takes the same body: alone, or in a race with AR decoding.
"""

import asyncio
import copy
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse, StreamingResponse

from ...checkpoints import NANO
from ...checkpoints.packed import count_weights
from ...console.prompts import DEMO_PROMPTS
from ...console.streaming import AnswerStreamer
from ...eval.decoders import AR, DECODERS, EXACT, decoder_of, with_asked
from ...eval.trace.page import render, to_json
from ...eval.trace.record import record_prompt, settings_in_effect, trace_of
from ...generation.settings import WINDOW_SETTINGS
from ..calls import Asked, CallManager, RequestError, as_request_error, log
from ..endpoints import Endpoint, ServedModel

FOLDER = Path(__file__).parent
REPLAYS = 4  # that are recorded at a time; their `generate` calls take turns
MOST_TOKENS = 4096  # of the answer of a replay: the steps of each take some kilobytes
SMALL = 50_000_000  # weights up to which an answer is timed once more without being recorded
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Name three planets, each with its number of moons, as JSON.",
)

_once = cache(render)


def html() -> HTMLResponse:
    """The page itself, which holds nothing of the model."""
    return HTMLResponse(_once("serve.html", FOLDER), headers={"Cache-Control": "no-store"})


def empty_replay() -> HTMLResponse:
    """The page of a replay, without one: what is saved."""
    return HTMLResponse(_once("page.html", trace=None))


def about(served: ServedModel) -> dict[str, Any]:
    """What the page has to know: the decoders of the model, each with the settings that it reads and their values, and
    what requests get that name none."""
    model, template = served.model, str(served.tokenizer.chat_template or "")
    # Masks that nobody trained give no text by themselves, and an adapter's are for drafts.
    fills_masks = not model.has_mask_adapter and getattr(model.config, "masks_trained", False)
    decoders = {}
    for name in DECODERS if fills_masks else (EXACT, AR):
        asked = with_asked(served.settings, DECODERS[name], model)
        settings = settings_in_effect(model, asked)
        unread = settings.unread(model.has_mask_adapter)
        decoders[name] = {"fields": DECODERS[name], "settings": {
            field: min(value, 1e300) if (value := getattr(settings, field)) is not None else None
            for field in WINDOW_SETTINGS if field not in unread
        }}  # fmt: skip
    config, is_toy = model.generation_config, model.config.name_or_path == str(NANO)
    return {
        "model": served.name,
        "context": served.context,
        "is_chat": bool(template),
        "thinks": "enable_thinking" in template,
        "decoders": decoders,
        "decoder": decoder_of(served.settings, model),
        "temperature": (config.temperature or 1.0) if config.do_sample else 0,
        "is_toy": is_toy,  # it answers such questions, one by one, and knows no conversations
        "questions": DEMO_PROMPTS if is_toy else QUESTIONS,
    }


class Replays:
    """Decodes requests once more, with every step kept.

    Args:
        served: the model.
        calls: where answers are made: each call of a replay takes its turn among theirs.
        endpoint: reads requests.
    """

    def __init__(self, served: ServedModel, calls: CallManager, endpoint: Endpoint):
        self.served, self.calls, self.endpoint = served, calls, endpoint
        self.workers = ThreadPoolExecutor(REPLAYS, "wedlm-replay")

    async def answer(self, body: bytes, with_ar: bool, watch: Callable[["Watcher"], None]) -> StreamingResponse:
        """Events: of text, as it comes, and then the trace; `watch` gets what gives the replay up. Raises
        `RequestError` or `ValueError` for a request that cannot be answered."""
        loop = asyncio.get_running_loop()
        asks, asked = await loop.run_in_executor(self.workers, self.endpoint.read, body)
        if len(asked) != 1:
            raise RequestError(f"A replay shows one answer, and the request asks for {len(asked)}.")
        prompt = asks.messages[-1].content if hasattr(asks, "messages") else asks.prompt[0]
        watcher = Watcher(loop)
        watch(watcher)
        work = loop.run_in_executor(self.workers, self._record, str(prompt), asked[0], with_ar, watcher)
        return StreamingResponse(watcher.events(work), media_type="text/event-stream")

    def _record(self, prompt: str, asked: Asked, with_ar: bool, watcher: "Watcher") -> str:
        """The trace, as JSON. Runs in a worker; each call runs on the thread of all calls."""
        model, tokenizer = self.served.model, self.served.tokenizer
        config = copy.copy(asked.config)
        config.max_new_tokens = min(config.max_new_tokens, MOST_TOKENS)
        config.prompt_lookup_num_tokens = None  # its forwards of several tokens are not those of AR decoding
        config.stop_strings = asked.stops or None
        options: dict[str, Any] = {**asked.settings, "generation_config": config}
        decoders = {options["strategy"]: options}
        if with_ar:
            decoders.setdefault(AR, {"strategy": AR, "generation_config": config})

        def streamer(strategy: str) -> AnswerStreamer:
            def write(text: str, forwards: int) -> None:
                watcher.tell({"decoder": strategy, "tokens": own.count, "text": text})

            own = AnswerStreamer(tokenizer, write)
            watcher.tell({"decoder": strategy, "tokens": 0, "text": ""})
            return own

        turns = self.calls.turns(config)

        def between() -> None:
            watcher.check()
            turns.take()

        def run(call: Callable[[], Any]) -> Any:
            watcher.check()
            return self.calls.run(call)

        recording = record_prompt(
            model,
            tokenizer,
            prompt,
            asked.prompt,
            decoders,
            repeats=int(count_weights(model) <= SMALL),
            seed=asked.seed or 0,
            processors=(lambda: asked.processors[0]) if asked.grammar else None,
            streamer=streamer,
            run=run,
            between=between,
        )
        name, seed = self.served.name, asked.seed or 0
        return to_json(trace_of(model, tokenizer, [recording], model_name=name, seed=seed, digests={}))


class Watcher:
    """Passes on what a worker tells, until the client has gone or the server ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.queue = loop, asyncio.Queue[dict[str, Any] | None]()
        self.is_cancelled = threading.Event()

    def check(self) -> None:
        """Raises `RequestError` where nobody waits any more."""
        if self.is_cancelled.is_set():
            raise RequestError("The replay was cut off: the server ends.", status=503)

    def tell(self, event: dict[str, Any]) -> None:
        """Takes an event, on any thread. Raises `RequestError` as [`check`] does."""
        self.check()
        self.loop.call_soon_threadsafe(self.queue.put_nowait, event)

    async def events(self, work: "asyncio.Future[str]") -> AsyncIterator[str]:
        """The lines of a stream; the last event has the trace, or what the work failed with."""
        work.add_done_callback(lambda _: self.queue.put_nowait(None))
        try:
            while (event := await self.queue.get()) is not None:
                yield f"data: {json.dumps(event)}\n\n"
            yield f'data: {{"trace": {work.result()}}}\n\n'
        except Exception as error:
            if not isinstance(error, ValueError | RequestError):
                log.exception("a replay failed", exc_info=error)
            yield f"data: {json.dumps(as_request_error(error).body())}\n\n"
        finally:
            self.is_cancelled.set()
            work.cancel()  # as long as it waits for a worker
        yield "data: [DONE]\n\n"
