"""The work of `wedlm serve`: an OpenAI-compatible server for one model on one machine.

Requests are read by [`endpoints`], answered in `generate` calls by [`calls`], and responded to by [`responses`].
"""

import asyncio
import json
import re
import secrets
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.responses import Response as HTTPResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from uvicorn.config import LOGGING_CONFIG

from ..eval.decoders import AR, EXACT, decoder_of
from ..generation.settings import SETTING_NAMES
from .calls import Answer, CallManager, RequestError, as_request_error, log
from .endpoints import UNCHECKED, ChatEndpoint, Endpoint, ServedModel, TextEndpoint
from .items import ItemsEndpoint
from .page import page
from .page.page import Replays
from .responses import Response, Vocabulary

READERS = 32  # requests that are read at a time
# Of those that may take seconds to read; each takes the interpreter from the forwards.
DEAR_READERS, LONG, DEAR = 4, 2**15, re.compile(rb"schema|tool|\\u00[4-7]")
REQUEST_ID, PLAIN_ID = "x-request-id", re.compile(r"[\w.:-]{1,128}", re.ASCII)
SECONDS_TO_END = 20  # for forwards that run when the server ends


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request. Raises `RequestError` for one that is no JSON or has more than `most` bytes."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site may send other types without asking
        raise RequestError(f"The body of the request must be `application/json`, got {kind or 'no type'!r}.", 415)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise RequestError(f"The body of the request may have {most} bytes.", 413, "context_length_exceeded")
    except ClientDisconnect:
        raise RequestError("The client has gone before its request was whole.") from None
    return bytes(body)


class Desk:
    """Takes requests, has them read on threads of their own, and gives their responses back.

    Args:
        served: the model.
        calls: where its answers are made.
    """

    def __init__(self, served: ServedModel, calls: CallManager):
        self.served, self.calls = served, calls
        self.vocabulary = Vocabulary(served.tokenizer)
        self.running = WeakSet[Any]()  # answers and replays
        # Reading takes time where a prompt is long: the event loop, and with it all streams, would wait.
        self.readers = ThreadPoolExecutor(READERS, "wedlm-read")
        self.dear_readers = ThreadPoolExecutor(DEAR_READERS, "wedlm-read-long")

    async def answer(self, endpoint: Endpoint, request: Request) -> Any:
        """The response to a request. It is given up when the client goes away, or the server ends. Raises
        `RequestError` or `ValueError` for one that cannot be answered."""
        body = await read_body(request, self.served.most_bytes)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        put: Any = queue.put_nowait
        request_id = f"{endpoint.response.kind}-{request.state.request_id}"

        def read() -> tuple[Any, Response]:
            asks, asked = endpoint.read(body)
            send = partial(loop.call_soon_threadsafe, put)
            tokenizer = self.served.tokenizer
            answers = [Answer(each, request_id, tokenizer, send, index) for index, each in enumerate(asked)]
            return asks, endpoint.response(request_id, self.served.name, answers, asks.n, queue, self.vocabulary)

        is_dear = len(body) > LONG or DEAR.search(body) is not None
        asks, response = await loop.run_in_executor(self.dear_readers if is_dear else self.readers, read)
        self.running.update(response.answers)

        async def listen() -> None:
            await request.receive()  # behind the body: the client has gone
            response.cancel()

        listener = asyncio.create_task(listen())
        try:
            self.calls.submit(response.answers)
            if not asks.stream:
                made = await loop.run_in_executor(self.readers, await response.whole())
                return HTTPResponse(made, media_type="application/json")
            await response.begin()
        finally:
            listener.cancel()  # a stream listens itself
        usage = asks.stream_options
        lines = response.chunks(bool(usage.include_usage), bool(usage.continuous_usage_stats))
        return StreamingResponse(lines, media_type="text/event-stream")


def build_app(
    name: str,
    model: Any,
    tokenizer: Any,
    settings: dict[str, Any],
    api_key: str | None = None,
    origins: Sequence[str] = (),
) -> FastAPI:
    """The server of a model that clients ask for by its name.

    Args:
        name: of the model, for clients.
        model: in evaluation mode.
        tokenizer: its own.
        settings: keywords of `generate`, `strategy` among them, for requests that name none.
        api_key: what clients must send as their key; `None`: whoever reaches the server may ask.
        origins: of pages that may ask from a browser, such as `https://chat.example.org`; `*`: of all.

    Raises:
        ValueError: for settings that this model cannot honour, a tokenizer that cannot stream, and an empty key.
    """
    if api_key == "":
        raise ValueError("The API key must not be empty.")
    served = _served(name, model, tokenizer, settings)
    app = FastAPI(title="wedlm serve", docs_url=None, redoc_url=None)  # whose pages load from elsewhere
    app.state.desk = Desk(served, CallManager(model))
    _add_routes(app, app.state.desk, served)
    _add_page(app, app.state.desk)
    for kind in (RequestError, ValueError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    if api_key is not None:
        app.add_middleware(WithKey, key=api_key)
    app.add_middleware(WithRequestId)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    return app


def _served(name: str, model: Any, tokenizer: Any, settings: dict[str, Any]) -> ServedModel:
    """The model under its name. Raises `ValueError` for settings that it cannot honour, and for a slow tokenizer."""
    if not tokenizer.is_fast:
        raise ValueError("The server streams text by a fast tokenizer, but the checkpoint has none (tokenizer.json).")
    if model.has_mask_adapter and decoder_of(settings, model) not in (AR, EXACT):
        raise ValueError(f"{decoder_of(settings, model)!r}: {UNCHECKED}")
    ours = {key: value for key, value in settings.items() if key in SETTING_NAMES}
    first = torch.tensor([tokenizer("?").input_ids or [0]], device=model.device)
    trial = {**settings, "max_new_tokens": 2, "min_new_tokens": None}
    model.generate(first, tokenizer=tokenizer, **trial)  # it refuses what it cannot do
    model.generation_config.update(**{key: value for key, value in settings.items() if key not in ours})
    stops = model.generation_config.stop_strings or []
    model.generation_config.stop_strings = None  # an answer ends itself
    return ServedModel(name, model, tokenizer, ours, [stops] if isinstance(stops, str) else stops)


def _add_routes(app: FastAPI, desk: Desk, served: ServedModel) -> None:
    """OpenAI's routes, and one that says that the server is up."""
    chat, items, text = ChatEndpoint(served), ItemsEndpoint(served), TextEndpoint(served)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await desk.answer(chat, request)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Any:
        return await desk.answer(items, request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await desk.answer(text, request)

    entry = {"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "wedlm"}
    entry |= dict.fromkeys(("max_model_len", "context_length"), served.context)  # vLLM's name, and that of most others

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{asked:path}")
    async def the_model(asked: str) -> dict[str, Any]:
        served.check_name(asked)
        return entry

    @app.post("/load_model")
    async def load_model(request: Request) -> Any:  # `transformers chat` asks for it and waits
        try:
            body = json.loads(await read_body(request, LONG) or b"null")
        except RecursionError:
            body = None
        asked = body.get("model") if isinstance(body, dict) else None
        served.check_name(str(asked))
        event = {"status": "ready", "model": asked, "cached": True}
        return HTTPResponse(f"data: {json.dumps(event)}\n\n", media_type="text/event-stream")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}


def _add_page(app: FastAPI, desk: Desk) -> None:
    """The page for people, and what it asks beside OpenAI's routes."""
    served = desk.served
    endpoint = ChatEndpoint(served) if served.tokenizer.chat_template else TextEndpoint(served)
    replays = Replays(served, desk.calls, endpoint)
    app.add_api_route("/", page.html, include_in_schema=False)
    app.add_api_route("/page/replay", page.empty_replay, include_in_schema=False)

    @app.get("/page/about", include_in_schema=False)
    def about() -> dict[str, Any]:
        return page.about(served)

    @app.post("/page/replay", include_in_schema=False)
    async def replay(request: Request, with_ar: bool = False) -> Any:
        body = await read_body(request, served.most_bytes)
        return await replays.answer(body, with_ar, desk.running.add)


class WithRequestId:
    """Gives each request an id, the client's own if it sends a plain one, and each response its header."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request, as ASGI has it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"").decode("latin-1")
        found = given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = found

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = found
            await send(message)

        await self.app(scope, receive, send_with_id)


class WithKey:
    """Refuses requests without the key, but for `/health` and the page, which asks for it."""

    def __init__(self, app: Any, key: str):
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request, as ASGI has it."""
        if scope["type"] == "http" and scope["path"] not in ("/health", "/"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self.expected):
                error = RequestError("The API key is missing or wrong.", 401, "invalid_api_key")
                await (await refuse(Request(scope), error))(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """The response to a request that failed by any exception, in OpenAI's form; a line in the log says why."""
    if isinstance(error, HTTPException):
        error = RequestError(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    elif not isinstance(error, RequestError | ValueError):
        log.exception("%s failed", request.url.path, exc_info=error)
        error = RequestError(f"{type(error).__name__}: {error}", 500)
    error = as_request_error(error)
    body = error.body()
    log.info("refused (%d): %s", error.status, body["error"]["message"])
    headers = {REQUEST_ID: request.state.request_id}  # no middleware sees the response to an unforeseen exception
    return JSONResponse(body, error.status, headers)


class Server(uvicorn.Server):
    """uvicorn's, which cuts off what is being answered when it ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the server."""
        for answer in self.config.app.state.desk.running:  # type: ignore[union-attr]
            answer.is_cancelled.set()
        await super().shutdown(sockets)


def run(app: FastAPI, listening: socket.socket, about: str) -> None:
    """Serves until Ctrl-C or SIGTERM; `about` is the first line of the log."""
    config = deepcopy(LOGGING_CONFIG)
    config["loggers"][log.name] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    server = Server(uvicorn.Config(app, log_config=config, timeout_graceful_shutdown=SECONDS_TO_END))
    log.info(about)
    try:
        server.run(sockets=[listening])
    finally:
        app.state.desk.calls.wait()  # no forward may run while Python ends
