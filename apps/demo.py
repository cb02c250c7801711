"""`wedlm demo`: a page in the browser where the same weights answer a prompt by WeDLM and by AR, on one clock.

The page is that of `wedlm trace` with a form in front: what a request decodes is recorded and drawn as there. All
decoding is done by one thread, one request after the other, so that no run takes another's time, and two tabs share
nothing but the loaded models.
"""

import asyncio
import json
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..checkpoints import NANO
from ..checkpoints.packed import count_weights
from ..console.prompts import DEMO_PROMPTS
from ..console.streaming import AnswerStreamer
from ..eval.measure import Speed, decode, fingerprint
from ..eval.prompts import read_prompts
from ..eval.request import AnswerRequest
from ..eval.trace.page import Trace, escaped, page, render, to_json
from ..eval.trace.record import record
from ..generation.settings import WeDLMGenerationSettings
from . import smollm2

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
IN_MEMORY = 2  # models that stay loaded
LONGEST_ANSWER = 1024
LARGEST_BODY = 1 << 20  # bytes of a request
SMALL = 50_000_000  # parameters up to which a run is timed once more without being recorded
KEPT = 64  # replays that can still be saved, the last ones of all tabs together

Tell = Callable[[dict[str, Any]], None]


class Stopped(Exception):
    """The client that asked has gone."""


@dataclass(frozen=True)
class ModelChoice:
    """A model that is asked for."""

    model: str  # "smollm2", or a folder or Hub id; a folder named so is "./smollm2"
    adapter: str = ""  # folder or Hub id of a mask adapter; empty for none
    dtype: str = ""  # empty for the default one


@dataclass(frozen=True)
class Offer:
    """A model that the page names."""

    model: str  # as in [`ModelChoice`]
    title: str
    note: str  # what to know before it is picked
    prompts: list[str]  # to try it on
    verification: str = "none"  # what it begins with


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to decode."""

    name: str
    model: Any
    tokenizer: Any
    digests: dict[str, str]
    threads: int


@dataclass
class Models:
    """Loads what is asked for, and keeps the last few."""

    read: Callable[..., tuple[Any, Any]]  # model and tokenizer of a source; takes `adapter` and `dtype`
    loaded: OrderedDict[ModelChoice, Loaded] = field(default_factory=OrderedDict)
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def offers(self) -> list[Offer]:
        """wedlm-nano, and the real one where its adapter is."""
        note = "Trained from scratch, in this repository, on six kinds of prompts such as these. Others get nonsense."
        found = [Offer(str(NANO), "wedlm-nano, 1.9M parameters", note, list(DEMO_PROMPTS))]
        if (smollm2.ADAPTER / "adapter_config.json").is_file():
            note = "A real model with a mask adapter. The first time, 93 MB are fetched from the package index."
            file = smollm2.ADAPTER / "prompts-heldout.jsonl"
            heldout = read_prompts(file.name, file.read_text(encoding="utf-8"))
            prompts = list({prompt.task: prompt.text for prompt in heldout[::-1]}.values())[::-1]  # one of each kind
            found.append(Offer("smollm2", "SmolLM2-135M-Instruct + adapter", note, prompts, "exact"))
        return found

    def load(self, choice: ModelChoice, tell: Callable[[dict[str, Any]], None] = lambda event: None) -> Loaded:
        """The model, from memory if it is there; CPU threads are set to what it needs. `tell` is called with what is
        going on, where it takes long. Raises `OSError` or `ValueError` for what cannot be loaded."""
        loaded = self.loaded.pop(choice, None)
        if loaded is None:
            while len(self.loaded) >= IN_MEMORY:
                self.loaded.popitem(last=False)
            torch.set_num_threads(self.threads)
            loaded = self._load(choice, tell)
        self.loaded[choice] = loaded
        torch.set_num_threads(loaded.threads)
        return loaded

    def _load(self, choice: ModelChoice, tell: Callable[[dict[str, Any]], None]) -> Loaded:
        source, adapter = choice.model, choice.adapter
        name = NANO.name if source == str(NANO) else source
        if source == "smollm2":
            if not (smollm2.FOLDER / smollm2.GGUF_FILE).exists():
                tell({"at": "fetching"})
            name, adapter = "SmolLM2-135M-Instruct", adapter or str(smollm2.ADAPTER)
            source = str(smollm2.fetch(smollm2.FOLDER))
            tell({"at": "loading"})
        named = {"dtype": choice.dtype} if choice.dtype else {}
        model, tokenizer = self.read(source, adapter=adapter or None, **named)
        threads = torch.get_num_threads()
        for strategy in ("wedlm", "ar"):  # the first call costs more
            decode(model, tokenizer, [tokenizer("1, 2").input_ids], {"strategy": strategy, "max_new_tokens": 4})
        return Loaded(name, model, tokenizer, fingerprint(model, tokenizer), threads)


class Form(BaseModel):
    """What a tab asks for. Raises `ValidationError` for a field that is missing, unknown or not allowed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str
    model: str
    adapter: str = ""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    # Of these five, None is the model's own.
    verification: Literal["none", "exact"] | None = None
    window_size: int | None = None
    entropy_threshold: float | None = None
    distance_penalty: float | None = None
    adaptive_window: bool | None = None
    max_new_tokens: int = Field(128, ge=1, le=LONGEST_ANSWER)
    temperature: float = Field(0.0, ge=0, le=5)  # 0 is greedy
    seed: int = Field(0, ge=0, lt=2**63)
    keep: str = ""  # an earlier run whose AR answer will do, if it was asked for the same

    def check(self) -> None:
        """Raises `ValueError` for what cannot be decoded, before anything is loaded."""
        if not self.prompt.strip():
            raise ValueError("The prompt is empty: type a question or the beginning of a text.")
        if not self.model.strip():
            raise ValueError("No model is named: give the folder of a checkpoint, or its Hub id.")
        WeDLMGenerationSettings(strategy="wedlm", **self._window())

    @property
    def choice(self) -> ModelChoice:
        """The model."""
        return ModelChoice(self.model.strip(), self.adapter.strip(), self.dtype)

    @property
    def keywords(self) -> dict[str, Any]:
        """Of `generate`."""
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        return {"strategy": "wedlm", "max_new_tokens": self.max_new_tokens, **self._window(), **sampling}

    @property
    def about_ar(self) -> tuple[Any, ...]:
        """All that AR's answer depends on."""
        return self.choice, self.prompt, self.max_new_tokens, self.temperature, self.seed

    def _window(self) -> dict[str, Any]:
        names = ("verification", "window_size", "entropy_threshold", "distance_penalty", "adaptive_window")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.verification not in (None, "none") and "entropy_threshold" in given:
            given["draft_threshold"] = given.pop("entropy_threshold")  # one slider, τ, for both
        return given


class Demo:
    """The server's state: loaded models, the `first` of which the page begins with, the last replays, and the one
    thread that decodes."""

    def __init__(self, models: Models, first: ModelChoice):
        self.models, self.first = models, first
        self.kept: OrderedDict[str, tuple[Trace, tuple[Any, ...]]] = OrderedDict()  # and what its form says of AR
        self.worker = ThreadPoolExecutor(1, "decoding")

    def page(self, request: Request) -> Response:
        """The page with the form."""
        offers = [vars(offer) for offer in self.models.offers]
        about = {"models": offers, "first": vars(self.first), "longest": LONGEST_ANSWER}
        return HTMLResponse(render("demo.html", FOLDER, demo=escaped(json.dumps(about))))

    async def run(self, request: Request) -> Response:
        """Decodes: a line of JSON for each event, the last one with the trace or with what went wrong."""
        if request.headers.get("content-type") != "application/json":
            return JSONResponse({"error": "A request must be application/json."}, 415)
        if int(request.headers.get("content-length") or LARGEST_BODY + 1) > LARGEST_BODY:
            return JSONResponse({"error": f"A request may have {LARGEST_BODY:,} bytes."}, 413)
        try:
            form = Form.model_validate_json(await request.body())
            form.check()
        except ValidationError as error:
            return JSONResponse({"error": f"The request is malformed: {first_of(error)}."}, 422)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 422)
        return StreamingResponse(self._events(form, request), media_type="application/x-ndjson")

    def replay(self, request: Request) -> Response:
        """The replay page of a run, to be saved."""
        trace, _ = self.kept.get(request.path_params["name"], (None, ()))
        if trace is None:
            return HTMLResponse(f"This run is gone: the last {KEPT} are kept. Decode it once more.", 404)
        return HTMLResponse(page(trace), headers={"content-disposition": 'attachment; filename="replay.html"'})

    async def _events(self, form: Form, request: Request) -> AsyncIterator[str]:
        """Passes on the events of the worker, until it is done or the client has gone."""
        loop, queue, is_left = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None](), threading.Event()

        def tell(event: dict[str, Any]) -> None:
            if is_left.is_set():
                raise Stopped
            loop.call_soon_threadsafe(queue.put_nowait, event)

        work = loop.run_in_executor(self.worker, self._answer, form, tell)
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            event: dict[str, Any] | None = {"at": "waiting"}
            while event is not None:
                yield _line(event)
                heard = asyncio.ensure_future(queue.get())
                while not (await asyncio.wait({heard}, timeout=0.5))[0]:
                    if await request.is_disconnected():
                        return
                event = heard.result()
            yield await work
        finally:
            is_left.set()
            work.cancel()  # as long as it waits for its turn

    def _answer(self, form: Form, tell: Tell) -> str:
        """The last event of a request, as a line. Runs in the worker."""
        try:
            tell({"at": "loading"})
            return self._decode(form, tell)
        except Stopped:
            return ""
        except (OSError, ValueError, ImportError) as error:
            return _line({"error": " ".join(str(error).split())})
        except Exception as error:  # out of memory, a fault of ours: the page says so, and the server goes on
            logger.exception("A request failed")
            text = " ".join(str(error).split())
            return _line({"error": f"{type(error).__name__}: {text} (the server's terminal has the details)"})

    def _decode(self, form: Form, tell: Tell) -> str:
        loaded = self.models.load(form.choice, tell)
        earlier, about_ar = self.kept.get(form.keep, (None, ()))
        knows_ar = about_ar == form.about_ar

        def streamer(strategy: str) -> AnswerStreamer:
            def write(text: str, forwards: int) -> None:
                tell({"at": "decoding", "decoder": strategy, "tokens": len(own.tokens), "text": text})

            own = AnswerStreamer(loaded.tokenizer, write)
            tell({"at": "decoding", "decoder": strategy, "tokens": 0, "text": ""})
            return own

        raw = not loaded.tokenizer.chat_template

        repeats = int(count_weights(loaded.model) <= SMALL)

        def decoded(with_ar: bool, streamer: Callable[[str], AnswerStreamer] | None) -> Trace:
            asked = AnswerRequest([form.prompt], form.keywords, with_ar, raw, form.seed)
            about: dict[str, Any] = {"model_name": loaded.name, "digests": loaded.digests}
            return record(loaded.model, loaded.tokenizer, asked, repeats=repeats, streamer=streamer, **about)

        trace = decoded(not knows_ar, streamer)
        if earlier is not None and knows_ar:
            trace = with_ar_of(trace, earlier)
            if is_impossible(trace):  # the machine was busy at one of the two moments
                tell({"at": "timing"})
                trace, knows_ar = decoded(True, None), False
        name = secrets.token_urlsafe(8)
        self.kept[name] = trace, form.about_ar
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        about = {"run": name, "has_adapter": loaded.model.has_mask_adapter, "is_raw": raw, "kept_ar": knows_ar}
        return f'{json.dumps(about)[:-1]}, "trace": {to_json(trace)}}}\n'


def is_impossible(trace: Trace) -> bool:
    """Whether the speed against AR is above the tokens per forward."""
    run, ar = trace.recordings[0].runs
    return not Speed(ar.seconds / run.seconds, len(run.tokens) / len(run.steps)).is_possible


def with_ar_of(trace: Trace, other: Trace) -> Trace:
    """A trace without AR's run, with that of another trace of the same prompt and model."""
    (recording,), (earlier,) = trace.recordings, other.recordings
    return replace(
        trace,
        vocabulary={**other.vocabulary, **trace.vocabulary},
        special=sorted({*other.special, *trace.special}),
        recordings=[replace(recording, runs=[*recording.runs, earlier.runs[-1]])],
    )


def first_of(error: ValidationError) -> str:
    """The place of the first error in a form, what is wanted there, and what was found."""
    first = error.errors()[0]
    where, what = ".".join(map(str, first["loc"])) or "the request", first["msg"]
    got = "" if first["type"] in ("missing", "json_invalid") else f", got {first['input']!r:.40}"
    return f"{where}: {what[0].lower()}{what[1:]}{got}"


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event) + "\n"


def application(demo: Demo, hosts: list[str]) -> Starlette:
    """The web application, for requests for these host names only: no page of another site can use it through the
    visitor's browser."""
    post = Route("/runs", demo.run, methods=["POST"])
    routes = [Route("/", demo.page), post, Route("/runs/{name}.html", demo.replay)]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


def make_server(
    read: Callable[..., tuple[Any, Any]], model: str | None, adapter: str | None, is_local: bool
) -> uvicorn.Server:
    """The page's server, for this machine alone or for any, where `read` is as in [`Models`]. It begins with a model,
    a folder or Hub id (`None`: wedlm-nano). Raises `OSError` or `ValueError` for a model that cannot be loaded."""
    models = Models(read)
    first = ModelChoice(model or models.offers[0].model, adapter or "")
    models.load(first)  # what is wrong with it is said here, not on the page
    web = application(Demo(models, first), ["127.0.0.1", "localhost", "[::1]"] if is_local else ["*"])
    return uvicorn.Server(uvicorn.Config(web, log_level="warning", timeout_graceful_shutdown=1))
