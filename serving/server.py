"""The work of `wedlm serve`: an OpenAI-compatible server for one model on one machine.

It is transformers' own (`transformers serve`: its handlers, its thread for `generate`), with a model that was loaded
here: transformers' loader takes `getattr(transformers, architecture)`. If it asked `AutoModelForCausalLM`, which our
classes are registered with, [`LoadedModel`] would not be needed.
"""

import asyncio
import logging
import socket
import uuid
from copy import deepcopy
from typing import Any
from weakref import WeakSet

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.config import LOGGING_CONFIG

from ..generation.request import context_length
from ..generation.settings import SETTING_NAMES
from .calls import CURRENT_CALL, Call, RequestError, log
from .handlers import ChatHandler, LoadedModel, OneThread, ParallelHandler, TextHandler

SECONDS_TO_END = 20  # for forwards that run when the server ends


async def answer(app: FastAPI, handler: ParallelHandler, request: Request, body: dict[str, Any], kind: str) -> Any:
    """The handler's answer to a request whose body has been read. It is given up when the client goes away, or the
    server ends."""
    call = Call()
    CURRENT_CALL.set(call)
    app.state.running.add(call)

    async def listen() -> None:
        await request.receive()  # behind the body: the client has gone
        call.is_cancelled.set()

    listener = asyncio.create_task(listen())
    try:
        return await handler.handle_request(body, f"{kind}-{uuid.uuid4().hex}")
    finally:
        listener.cancel()  # a stream listens itself


def build_app(name: str, model: Any, tokenizer: Any, settings: dict[str, Any]) -> FastAPI:
    """The server of a model that clients ask for by its name, with settings for requests that name none: keywords of
    `generate`, `strategy` among them. Raises `ValueError` for settings that this model cannot honour, and for a
    tokenizer that cannot stream."""
    if not tokenizer.is_fast:
        raise ValueError("The server streams text by a fast tokenizer, but the checkpoint has none (tokenizer.json).")
    ours = {key: value for key, value in settings.items() if key in SETTING_NAMES}
    first = torch.tensor([tokenizer("?").input_ids or [0]], device=model.device)
    trial = {**settings, "max_new_tokens": 2, "min_new_tokens": None}
    model.generate(first, tokenizer=tokenizer, **trial)  # it refuses what it cannot do
    model.generation_config.update(**{key: value for key, value in settings.items() if key not in ours})
    manager, state = LoadedModel(name, model, tokenizer, ours), OneThread()
    chat, text = ChatHandler(manager, state), TextHandler(manager, state)
    app = FastAPI(title="wedlm serve")
    app.state.calls, app.state.running = state.manager, WeakSet[Call]()

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: dict[str, Any]) -> Any:
        return await answer(app, chat, request, body, "chatcmpl")

    @app.post("/v1/completions")
    async def completions(request: Request, body: dict[str, Any]) -> Any:
        return await answer(app, text, request, body, "cmpl")

    length = context_length(model.config)
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "", "max_model_len": length}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{asked:path}")
    def the_model(asked: str) -> dict[str, Any]:
        manager.check_name(asked)
        return entry

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    for kind in (RequestError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    return app


async def refuse(request: Request, error: Any) -> JSONResponse:
    """The response to a request that failed by any exception, in OpenAI's form; a line in the log says why."""
    if isinstance(error, RequestValidationError):
        problem = error.errors()[0]
        why = problem.get("ctx", {}).get("error", problem["msg"])
        error = RequestError(f"The body of the request must be a JSON object: {why}.")
    elif isinstance(error, HTTPException):
        error = RequestError(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    elif not isinstance(error, RequestError):
        error = RequestError(f"{type(error).__name__}: {error}", 500)
    body = error.body()
    log.info("refused (%d): %s", error.status, body["error"]["message"])
    return JSONResponse(body, error.status)


class Server(uvicorn.Server):
    """uvicorn's, which cuts off what is being answered when it ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the server."""
        for call in self.config.app.state.running:  # type: ignore[union-attr]
            call.is_cancelled.set()
        await super().shutdown(sockets)


def run(app: FastAPI, listening: socket.socket, about: str) -> None:
    """Serves until Ctrl-C or SIGTERM; `about` is the first line of the log."""
    logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # it has a line for each request, too
    config = deepcopy(LOGGING_CONFIG)
    config["loggers"][log.name] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    server = Server(uvicorn.Config(app, log_config=config, timeout_graceful_shutdown=SECONDS_TO_END))
    log.info(about)
    try:
        server.run(sockets=[listening])
    finally:
        app.state.calls.submit(lambda: None).result(timeout=60)  # no forward may run while Python ends
