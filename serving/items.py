"""`/v1/responses`, OpenAI's newer API, as a chat: items to messages, and an answer to items and their events."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall

from .calls import Asked, RequestError, as_request_error
from .endpoints import ChatEndpoint
from .responses import ChatResponse

# What a chat alone has, and what asks for nothing where it has one of these values.
CHAT_ONLY = ("messages", "n", "response_format", "max_tokens", "max_completion_tokens", "logprobs")
NO_DEMANDS: dict[str, tuple[Any, ...]] = {
    "background": (False,), "conversation": (), "include": ([], ["reasoning.encrypted_content"]), "prompt": (),
    "previous_response_id": (), "truncation": ("disabled",), "max_tool_calls": (), "top_logprobs": (0,),
    "context_management": ([],), "moderation": (),
}  # fmt: skip

# Items that come in parts: their own fields, and the part that their text is in.
OWN_FIELDS: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
PARTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}


def as_chat(body: Any) -> dict[str, Any]:
    """The body of a request as that of a chat. Raises `RequestError` for what a chat cannot do."""
    if not isinstance(body, dict):
        raise RequestError(f"The body of the request must be a JSON object, got {body!r:.80}.")
    body = {name: value for name, value in body.items() if value is not None}
    for name, harmless in NO_DEMANDS.items():
        if name in body and body.pop(name) not in harmless:
            raise RequestError(f"`{name}` is not supported by this server.", param=name)
    if wrong := next((name for name in CHAT_ONLY if name in body), None):
        raise RequestError(f"`{wrong}` is not a field of this endpoint.", param=wrong)
    chat: dict[str, Any] = {"messages": _messages(body.pop("instructions", None), body.pop("input", None))}
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body.pop("max_output_tokens")
    if (effort := _object(body.pop("reasoning", {}), "reasoning").get("effort")) is not None:
        chat["reasoning_effort"] = effort
    style = _object(body.pop("text", {}), "text")
    if style.get("verbosity") not in (None, "medium"):
        raise RequestError("`text.verbosity` is not supported by this server.", param="text.verbosity")
    wanted = _object(style.get("format") or {"type": "text"}, "text.format")
    if wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema", "json_schema": _without(wanted, "type")}
    chat["response_format"] = wanted
    if isinstance(tools := body.get("tools"), list):
        body["tools"] = [_with_function(_object(tool, f"tools.{number}")) for number, tool in enumerate(tools)]
    if isinstance(choice := body.get("tool_choice"), dict):
        body["tool_choice"] = _with_function(choice)
    return chat | body


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"`{field}` must be an object, got {value!r:.80}.", param=field)
    return value


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: part for key, part in value.items() if key != name and part is not None}


def _with_function(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.get("type"), "function": _without(tool, "type")}


def _messages(instructions: str | None, items: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise RequestError("`input` must be a text or a list of items.", param="input")
    thoughts = ""
    for number, item in enumerate(items):
        kind = _object(item, f"input.{number}").get("type", "message")
        try:
            if kind == "reasoning":  # it belongs to what follows
                thoughts += "".join(part["text"] for part in item.get("content") or [])
                continue
            if kind == "message":
                message = _without(item, "type") | {"id": None, "status": None, "phase": None}
            elif kind == "function_call":
                function = {key: item[key] for key in ("name", "arguments")}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant" and not thoughts:
                    messages[-1].setdefault("tool_calls", []).append(call)
                    continue
                message = {"role": "assistant", "tool_calls": [call]}
            elif kind == "function_call_output":
                message = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            else:
                raise RequestError(f"`input.{number}`: items of the type {kind!r} are not supported.", param="input")
            if thoughts and message["role"] == "assistant":
                message["reasoning_content"], thoughts = thoughts, ""
        except (AttributeError, KeyError, TypeError) as error:
            raise RequestError(f"`input.{number}` is no item of the Responses API: {error}.", param="input") from None
        messages.append(message)
    return messages


class ItemsResponse(ChatResponse):
    """Of `/v1/responses`: the items of one answer, and the events by which they come."""

    kind = "resp"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.items: list[dict[str, Any]] = []
        self.said: list[str] = []  # of the last item
        self.count = 0  # of events

    async def whole(self) -> Callable[[], str]:
        """See [`Response.whole`]."""
        async for _, item, _ in self._items():
            for _ in self._events(item):
                pass
        return lambda: json.dumps(self._response())

    async def chunks(self, includes_usage: bool, counts_always: bool = False) -> AsyncIterator[str]:
        """The lines of a stream."""
        try:
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", response=self._response())
            async for _, item, _ in self._items():
                for line in self._events(item):
                    yield line
            done = self._response()
            yield self._event(f"response.{done['status']}", response=done)
        except (RequestError, ValueError) as error:
            said = as_request_error(error).body()["error"]
            yield self._event("error", code=said["code"] or said["type"], message=said["message"], param=said["param"])
        finally:
            self.cancel()  # if the client has gone

    def _response(self) -> dict[str, Any]:
        answer = self.answers[0]
        reason = None if self.left or answer.finish_reason != "length" else {"reason": "max_output_tokens"}
        status = "in_progress" if self.left else "incomplete" if reason else "completed"
        usage = self.usage()
        details = usage.pop("completion_tokens_details")
        usage = {
            "input_tokens": usage.pop("prompt_tokens"),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage.pop("completion_tokens"),
            "output_tokens_details": details,
            **usage,
        }
        return {
            "id": self.about["id"],
            "object": "response",
            "created_at": self.about["created"],
            "model": self.about["model"],
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": self.items,
            "usage": None if self.left else usage,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": not answer.asked.makes_one_call,
        }

    def _event(self, kind: str, /, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self.count, **fields}
        self.count += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def _events(self, item: Any) -> Iterator[str]:
        """The events of what an answer has sent, and its items."""
        kind = "reasoning" if isinstance(item, ReasoningText) else "message" if isinstance(item, str) else None
        is_open = bool(self.items) and self.items[-1]["status"] == "in_progress"
        if is_open and self.items[-1]["type"] != kind:
            yield from self._close()
            is_open = False
        if item is None:
            if not self.items:
                yield from self._open("message", content=[], **OWN_FIELDS["message"])
                yield from self._close()
        elif isinstance(item, ToolCall):
            call_id = f"{self.about['id']}_tool_call_{len(self.items)}"
            yield from self._open("function_call", call_id=call_id, name=item.name, arguments="")
            place = self._place()
            yield self._event("response.function_call_arguments.delta", **place, delta=item.arguments)
            self.items[-1]["arguments"] = item.arguments
            done = {"name": item.name, "arguments": item.arguments}
            yield self._event("response.function_call_arguments.done", **place, **done)
            yield from self._close()
        else:
            if not is_open:
                yield from self._open(kind or "", content=[], **OWN_FIELDS[kind or ""])
            self.said.append(item)
            part = self.items[-1]["content"][0]
            yield self._event(f"response.{part['type']}.delta", **self._part_place(part), delta=str(item))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _part_place(self, part: dict[str, Any]) -> dict[str, Any]:
        more: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        return self._place() | {"content_index": 0} | more

    def _open(self, kind: str, **fields: Any) -> Iterator[str]:
        number = len(self.items)
        self.items.append({"id": f"{self.about['id']}_{number}", "type": kind, "status": "in_progress", **fields})
        yield self._event("response.output_item.added", output_index=number, item=self.items[-1])
        if kind in PARTS:
            part = dict(PARTS[kind])
            self.items[-1]["content"] = [part]
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _close(self) -> Iterator[str]:
        item, place = self.items[-1], self._place()
        item["status"] = "completed"
        if item["type"] in PARTS:
            part = item["content"][0]
            part["text"], self.said = "".join(self.said), []
            yield self._event(f"response.{part['type']}.done", **self._part_place(part), text=part["text"])
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)


class ItemsEndpoint(ChatEndpoint):
    """`/v1/responses`."""

    response = ItemsResponse

    def read(self, body: bytes) -> tuple[Any, list[Asked]]:
        """See [`Endpoint.read`]."""
        try:
            return super().read(body)
        except RequestError as error:
            if error.param and error.param.startswith("messages"):
                error.param = "input"
            raise

    def _request(self, fields: Any) -> Any:
        return super()._request(as_chat(fields))
