"""From answers to responses in OpenAI's form, whole or in chunks."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall

from .calls import Answer, RequestError, as_request_error


class Response:
    """The response to a request.

    Args:
        request_id: begins with the endpoint's `kind`.
        model: its name.
        answers: in the order of the choices.
        samples: answers to the same prompt, next to each other.
        queue: what the answers send, see [`Answer`].
    """

    kind: str  # begins the ids of responses
    names: tuple[str, str]  # the field `object` of a whole response and of a chunk

    def __init__(
        self, request_id: str, model: str, answers: Sequence[Answer], samples: int, queue: asyncio.Queue[Any]
    ):
        self.answers, self.samples, self.queue = answers, samples, queue
        self.about = {"id": request_id, "created": int(time.time()), "model": model}
        self.left = len(answers)
        self.calls = [0 for _ in answers]
        self.begun: list[tuple[int, Any]] = []

    async def begin(self) -> None:
        """Waits for the first part of an answer. Raises what an answer failed with: a stream begins only when nothing
        is left to refuse."""
        self.begun.append(await self._next())

    async def whole(self) -> dict[str, Any]:
        """The response to a request that does not stream. Raises what an answer failed with."""
        found: list[list[Any]] = [[] for _ in self.answers]
        async for index, item in self._items():
            if item is not None:
                found[index].append(item)
        choices = [
            self.choice(index, items, False) | {"finish_reason": self.answers[index].finish_reason}
            for index, items in enumerate(found)
        ]
        return {**self.about, "object": self.names[0], "choices": choices, "usage": self.usage()}

    async def chunks(self, includes_usage: bool) -> AsyncIterator[str]:
        """The lines of a stream. The last chunk has the usage; where a client asks to include it, the usage has a
        chunk of its own, as in OpenAI's API."""
        about = {**self.about, "object": self.names[1]} | ({"usage": None} if includes_usage else {})
        try:
            for index in range(len(self.answers)):
                if (first := self.first(index)) is not None:
                    yield _line({**about, "choices": [first | {"finish_reason": None}]})
            async for index, item in self._items():
                choice = self.choice(index, [] if item is None else [item], True)
                reason = self.answers[index].finish_reason if item is None else None
                chunk = {**about, "choices": [choice | {"finish_reason": reason}]}
                if not self.left and not includes_usage:
                    chunk["usage"] = self.usage()
                yield _line(chunk)
            if includes_usage:
                yield _line({**about, "choices": [], "usage": self.usage()})
        except (RequestError, ValueError) as error:
            yield _line(as_request_error(error).body())
        finally:
            self.cancel()  # if the client has gone
        yield "data: [DONE]\n\n"

    def cancel(self) -> None:
        """Gives the answers up; those that are over stay so."""
        for answer in self.answers:
            answer.is_cancelled.set()

    def usage(self) -> dict[str, int]:
        """Tokens of the prompts and of all answers."""
        prompts = sum(len(answer.asked.prompt) for answer in self.answers[:: self.samples])
        new = sum(len(answer.tokens) for answer in self.answers)
        return {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}

    def choice(self, index: int, items: list[Any], is_chunk: bool) -> dict[str, Any]:
        """A choice of a whole response, or its part in a chunk: text, thoughts and tool calls."""
        raise NotImplementedError

    def first(self, index: int) -> dict[str, Any] | None:
        """The choice of a chunk in front of an answer's text, if there is one."""
        return None

    async def _next(self) -> tuple[int, Any]:
        index, item = await self.queue.get()
        if isinstance(item, Exception):
            self.cancel()
            raise item
        self.left -= item is None
        return index, item

    async def _items(self) -> AsyncIterator[tuple[int, Any]]:
        for each in self.begun:
            yield each
        while self.left:
            yield await self._next()


class ChatResponse(Response):
    """Of `/v1/chat/completions`."""

    kind, names = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def choice(self, index: int, items: list[Any], is_chunk: bool) -> dict[str, Any]:
        """See [`Response.choice`]."""
        message: dict[str, Any] = {} if is_chunk else {"role": "assistant", "content": None}
        calls = [self._call(index, item, is_chunk) for item in items if isinstance(item, ToolCall)]
        for item in items:
            if not isinstance(item, ToolCall):
                field = "reasoning_content" if isinstance(item, ReasoningText) else "content"
                message[field] = (message.get(field) or "") + item
        if calls:
            message["tool_calls"] = calls
        elif not is_chunk:
            message["content"] = message["content"] or ""
        return {"index": index, "delta" if is_chunk else "message": message, "logprobs": None}

    def first(self, index: int) -> dict[str, Any] | None:
        """See [`Response.first`]."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}}

    def _call(self, index: int, call: ToolCall, is_chunk: bool) -> dict[str, Any]:
        number = self.calls[index]
        self.calls[index] += 1
        function = {"name": call.name, "arguments": call.arguments}
        found = {"id": f"{self.about['id']}_{index}_tool_call_{number}", "type": "function", "function": function}
        return {"index": number, **found} if is_chunk else found


class TextResponse(Response):
    """Of `/v1/completions`."""

    kind, names = "cmpl", ("text_completion", "text_completion")

    def choice(self, index: int, items: list[Any], is_chunk: bool) -> dict[str, Any]:
        """See [`Response.choice`]."""
        return {"index": index, "text": "".join(items), "logprobs": None}


def _line(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
