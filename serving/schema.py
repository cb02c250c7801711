"""What a request may hold: OpenAI's fields, sampling settings of transformers, and those of parallel decoding.

A field that is not here is refused, and so is a value that cannot be honoured: nothing that a client asks for is
ignored in silence. Fields on which no answer depends are accepted.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..generation.settings import SETTING_NAMES, WeDLMGenerationSettings
from .calls import RequestError

_Nothing = Annotated[float | None, Field(ge=0, le=0)]
_Count = Annotated[int | None, Field(ge=1)]
_NotNegative = Annotated[float | None, Field(ge=0)]
_Share = Annotated[float | None, Field(gt=0, le=1)]


class _GenerationFields(BaseModel):
    """Settings of transformers' generation config that its handlers do not know."""

    min_new_tokens: _Count = None
    max_time: Annotated[float | None, Field(gt=0)] = None
    do_sample: bool | None = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    typical_p: _Share = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    no_repeat_ngram_size: Annotated[int | None, Field(ge=0)] = None
    suppress_tokens: list[int] | None = None


GENERATION_FIELDS = tuple(_GenerationFields.model_fields)


class Request(_GenerationFields):
    """Fields that both endpoints take. `generation_config` holds more of them, as an object or as JSON text."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool | None = None
    max_tokens: _Count = None
    max_new_tokens: _Count = None
    temperature: _NotNegative = None
    top_p: _Share = None
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    stop: str | list[str] | None = None
    frequency_penalty: Annotated[float | None, Field(gt=-1, le=2)] = None
    logit_bias: dict[int, float] | None = None

    # Settings of parallel decoding; `WeDLMGenerationSettings` checks them.
    strategy: Any = None
    verification: Any = None
    window_size: Any = None
    entropy_threshold: Any = None
    distance_penalty: Any = None
    acceptance_epsilon: Any = None
    acceptance_delta: Any = None
    adaptive_window: Any = None
    slot_cost: Any = None

    # No answer depends on these.
    metadata: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None  # the last chunk always has the usage
    user: Any = None

    # Only one value of these can be honoured.
    n: Literal[1] | None = None
    presence_penalty: _Nothing = None
    logprobs: Literal[False] | None = None


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")  # what else a chat template may read


class _TextPart(_Part):
    type: Literal["text"]
    text: str


class _Function(_Part):
    name: str
    arguments: str | dict[str, Any]


class _ToolCall(_Part):
    function: _Function


class _Message(_Part):
    role: str
    content: str | list[_TextPart] | None = None
    tool_calls: list[_ToolCall] | None = None


class _TextFormat(BaseModel):
    type: Literal["text"]


class ChatRequest(Request):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: _Count = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: _TextFormat | None = None
    tool_choice: Literal["auto"] | None = None
    top_logprobs: _Nothing = None


class CompletionRequest(Request):
    """A body of `/v1/completions`."""

    prompt: str
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None


def read(body: dict[str, Any], schema: type[Request]) -> Request:
    """What a request asks for.

    Args:
        body: the JSON object that the client sent.
        schema: of the endpoint.

    Raises:
        RequestError: for a field or a value that is not taken.
        ValueError: for settings of parallel decoding that are out of range.
    """
    body = dict(body)
    nested = body.pop("generation_config", None) or {}
    if isinstance(nested, str):
        try:
            nested = json.loads(nested)
        except ValueError as error:
            raise RequestError(f"`generation_config` is no JSON: {error}.") from None
    if not isinstance(nested, dict):
        raise RequestError(f"`generation_config` must be an object, got {nested!r}.")
    if twice := sorted(body.keys() & nested.keys()):
        raise RequestError(f"`{twice[0]}` stands in the request and in its `generation_config`: leave one out.")
    try:
        request = schema.model_validate(body | nested)
    except ValidationError as error:
        raise RequestError("; ".join(_said(problem) for problem in error.errors())) from None
    WeDLMGenerationSettings(**settings_of(request))
    return request


def settings_of(request: Request) -> dict[str, Any]:
    """The settings of parallel decoding that a request names."""
    return {name: value for name in SETTING_NAMES if (value := getattr(request, name, None)) is not None}


def _said(problem: Any) -> str:
    """A problem that pydantic found, in one sentence."""
    field = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"`{field}` is not supported by this server"
    if problem["type"] == "missing":
        return f"`{field}` is missing"
    shown = repr(problem["input"])
    return f"`{field}`: {problem['msg']}, got {shown if len(shown) <= 80 else f'{shown[:80]}…'}"
