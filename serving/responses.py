"""From answers to responses in OpenAI's form, whole or in chunks."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .calls import Answer, Chances, RequestError, as_request_error

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of tokenizers that fall back to bytes


class Vocabulary:
    """Names of tokens for clients."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.added = set(tokenizer.get_added_vocab().values())
        is_byte_level = "ByteLevel" in repr(tokenizer._tokenizer.decoder)
        self.bytes = {letter: byte for byte, letter in bytes_to_unicode().items()} if is_byte_level else {}

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; some tokens are a part of a character."""
        written = self.tokenizer.convert_ids_to_tokens(token) or ""
        if self.bytes and token not in self.added:
            return bytes(self.bytes[letter] for letter in written if letter in self.bytes)
        if byte := BYTE.fullmatch(written):
            return bytes([int(byte[1], 16)])
        return str(self.tokenizer.decode([token])).encode()

    def name(self, token: int) -> str:
        """The token's text, or its bytes where they are none, as OpenAI's API writes them."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def entry(self, token: int, log_prob: float) -> dict[str, Any]:
        """A token among the log-probabilities of a chat."""
        found = self.bytes_of(token)
        return {"token": found.decode(errors="replace"), "logprob": log_prob, "bytes": list(found)}


class Response:
    """The response to a request.

    Args:
        request_id: begins with the endpoint's `kind`.
        model: its name.
        answers: in the order of the choices.
        samples: answers to the same prompt, next to each other.
        queue: what the answers send, see [`Answer`].
        vocabulary: names tokens.
    """

    kind: str  # begins the ids of responses
    names: tuple[str, str]  # the field `object` of a whole response and of a chunk

    def __init__(
        self,
        request_id: str,
        model: str,
        answers: Sequence[Answer],
        samples: int,
        queue: asyncio.Queue[Any],
        vocabulary: "Vocabulary",
    ):
        self.answers, self.samples, self.queue, self.vocabulary = answers, samples, queue, vocabulary
        self.about = {"id": request_id, "created": int(time.time()), "model": model}
        self.left = len(answers)
        self.calls = [0 for _ in answers]
        self.lengths = [0 for _ in answers]
        self.begun: list[tuple[int, Any, list[Chances]]] = []

    async def begin(self) -> None:
        """Waits for the first part of an answer. Raises what an answer failed with: a stream begins only when nothing
        is left to refuse."""
        self.begun.append(await self._next())

    async def whole(self) -> Callable[[], str]:
        """What makes the response to a request that does not stream, as JSON; it may take its time. Raises what an
        answer failed with."""
        found: list[tuple[list[Any], list[Chances]]] = [([], []) for _ in self.answers]
        async for index, item, chances in self._items():
            found[index][0].extend([] if item is None else [item])
            found[index][1].extend(chances)

        def made() -> str:
            about = {**self.about, "object": self.names[0], "usage": self.usage()}
            choices = [
                json.dumps(self.choice(index, items, chances, False) | {"finish_reason": answer.finish_reason})
                for index, ((items, chances), answer) in enumerate(zip(found, self.answers, strict=True))
            ]
            return f'{json.dumps(about)[:-1]}, "choices": [{", ".join(choices)}]}}'

        return made

    async def chunks(self, includes_usage: bool, counts_always: bool = False) -> AsyncIterator[str]:
        """The lines of a stream. The last chunk has the usage; where a client asks to include it, the usage has a
        chunk of its own, as in OpenAI's API; with `counts_always` every chunk has that of all tokens so far."""
        about = {**self.about, "object": self.names[1]} | ({"usage": None} if includes_usage else {})
        try:
            for index in range(len(self.answers)):
                if (first := self.first(index)) is not None:
                    yield _line({**about, "choices": [first | {"finish_reason": None}]})
            async for index, item, chances in self._items():
                choice = self.choice(index, [] if item is None else [item], chances, True)
                reason = self.answers[index].finish_reason if item is None else None
                chunk = {**about, "choices": [choice | {"finish_reason": reason}]}
                if counts_always or (not self.left and not includes_usage):
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

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts and of all answers, and what these took."""
        prompts = sum(len(answer.asked.prompt) for answer in self.answers[:: self.samples])
        new = sum(len(answer.tokens) for answer in self.answers)
        accepted = sum(answer.accepted for answer in self.answers)
        forwards = sum(answer.forwards_taken for answer in self.answers)
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(answer.drafted for answer in self.answers) - accepted,
            "reasoning_tokens": sum(answer.thought_count for answer in self.answers),
        }
        return {
            "prompt_tokens": prompts,
            "completion_tokens": new,
            "total_tokens": prompts + new,
            "completion_tokens_details": details,
            "tokens_per_forward": round(new / max(1, forwards), 3),
        }

    def choice(self, index: int, items: list[Any], chances: list[Chances], is_chunk: bool) -> dict[str, Any]:
        """A choice of a whole response, or its part in a chunk: text, thoughts and tool calls."""
        raise NotImplementedError

    def first(self, index: int) -> dict[str, Any] | None:
        """The choice of a chunk in front of an answer's text, if there is one."""
        return None

    def _has_chances(self, index: int) -> bool:
        return self.answers[index].asked.likeliest is not None

    async def _next(self) -> tuple[int, Any, list[Chances]]:
        index, item, chances = await self.queue.get()
        if isinstance(item, Exception):
            self.cancel()
            raise item
        self.left -= item is None
        return index, item, chances

    async def _items(self) -> AsyncIterator[tuple[int, Any, list[Chances]]]:
        for each in self.begun:
            yield each
        while self.left:
            yield await self._next()


class ChatResponse(Response):
    """Of `/v1/chat/completions`."""

    kind, names = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def choice(self, index: int, items: list[Any], chances: list[Chances], is_chunk: bool) -> dict[str, Any]:
        """See [`Response.choice`]."""
        message: dict[str, Any] = {} if is_chunk else {"role": "assistant", "content": None}
        calls = [self._call(index, item, is_chunk) for item in items if isinstance(item, ToolCall)]
        texts = [item for item in items if not isinstance(item, ToolCall)]
        for field, kind in {"reasoning_content": ReasoningText, "content": str}.items():
            if found := [text for text in texts if type(text) is kind]:
                message[field] = "".join(found)
        if calls:
            message["tool_calls"] = calls
        elif not is_chunk:
            message["content"] = message["content"] or ""
        logprobs = None
        if self._has_chances(index):
            entry = self.vocabulary.entry
            logprobs = {
                "content": [
                    entry(each.token, each.log_prob) | {"top_logprobs": [entry(*other) for other in each.likeliest]}
                    for each in chances
                ],
                "refusal": None,
            }
        return {"index": index, "delta" if is_chunk else "message": message, "logprobs": logprobs}

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

    def choice(self, index: int, items: list[Any], chances: list[Chances], is_chunk: bool) -> dict[str, Any]:
        """See [`Response.choice`]."""
        logprobs = None
        if self._has_chances(index):
            name = self.vocabulary.name
            tokens = [name(each.token) for each in chances]
            *starts, self.lengths[index] = accumulate(map(len, tokens), initial=self.lengths[index])
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [each.log_prob for each in chances],
                "top_logprobs": [{name(token): value for token, value in each.likeliest} for each in chances],
                "text_offset": starts,
            }
        return {"index": index, "text": "".join(items), "logprobs": logprobs}


def _line(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
