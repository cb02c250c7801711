"""What a request may hold: OpenAI's fields, sampling settings of transformers, and those of parallel decoding.

A field that is not here is refused, and so is a value that cannot be honoured: nothing that a client asks for is
ignored in silence. Fields on which no answer depends are accepted.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from ..generation.settings import SETTING_NAMES, WeDLMGenerationSettings
from .calls import RequestError

_Nothing = Annotated[float | None, Field(ge=0, le=0)]
_Count = Annotated[int | None, Field(ge=1)]
_Share = Annotated[float | None, Field(gt=0, le=1)]
_SET_BY_SERVER = set("add_generation_prompt conversation return_dict return_tensors tokenize tools".split())


class _GenerationFields(BaseModel):
    """Settings of transformers' generation config that its handlers do not know."""

    min_new_tokens: _Count = None
    max_time: Annotated[float | None, Field(gt=0)] = None
    do_sample: bool | None = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    typical_p: _Share = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    no_repeat_ngram_size: Annotated[int | None, Field(ge=0)] = None
    suppress_tokens: list[int] | None = None


GENERATION_FIELDS = tuple(_GenerationFields.model_fields)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None


# Settings of parallel decoding, which `WeDLMGenerationSettings` checks, and fields on which no answer depends.
_SETTINGS = tuple(name for name in SETTING_NAMES if name not in ("mask_token_id", "output_trace"))
_UNUSED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
_AnyValue: Any = create_model("_AnyValue", **dict.fromkeys((*_SETTINGS, *_UNUSED), (Any, None)))  # type: ignore


class Request(_GenerationFields, _AnyValue):
    """Fields that both endpoints take. `generation_config` holds more of them, as an object or as JSON text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Count = None
    max_new_tokens: _Count = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: _Share = None
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    stop: str | list[str] | None = None
    frequency_penalty: Annotated[float | None, Field(gt=-1, le=2)] = None
    logit_bias: dict[int, float] | None = None

    # Only one value of these can be honoured.
    n: Literal[1] | None = None
    presence_penalty: _Nothing = None
    logprobs: Literal[False] | None = None

    @field_validator("stop")
    @classmethod
    def _without_empty(cls, stop: str | list[str] | None) -> list[str] | None:
        return list(filter(None, [stop] if isinstance(stop, str) else stop or [])) or None

    @field_validator("suppress_tokens", "logit_bias")
    @classmethod
    def _none_if_empty(cls, value: Any) -> Any:
        return value or None

    @model_validator(mode="after")
    def _fits_together(self) -> "Request":
        if self.stream_options and not self.stream:
            raise ValueError("`stream_options` goes with `stream`: true")
        if self.frequency_penalty is not None and self.repetition_penalty is not None:
            raise ValueError("`frequency_penalty` is a `repetition_penalty` of 1 more: leave one out")
        return self


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")  # what else a chat template may read


class _TextPart(_Part):
    type: Literal["text"]
    text: str


class _Function(_Part):
    name: str
    arguments: Annotated[
        dict[str, Any], BeforeValidator(lambda text: json.loads(text) if isinstance(text, str) else text)
    ]


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

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leaves_ours(cls, words: dict[str, Any] | None) -> dict[str, Any] | None:
        if ours := sorted(_SET_BY_SERVER & set(words or ())):
            raise ValueError(f"{ours[0]!r} is set by the server")
        return words


class CompletionRequest(Request):
    """A body of `/v1/completions`."""

    prompt: str | Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_one(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            raise ValueError("a request has one prompt, a text or token ids: send a request for each")
        return prompt


def read(body: dict[str, Any], schema: type[Request]) -> Request:
    """What a request asks for. Raises `RequestError` for a field or a value that is not taken, and `ValueError` for
    settings of parallel decoding that are out of range."""
    body = dict(body)
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"The request is not Unicode text: {error.reason}.") from None
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
        problems = [_said(problem) for problem in error.errors()]
        raise RequestError("; ".join(problems[:3]), param=_field(error.errors()[0])) from None
    WeDLMGenerationSettings(**settings_of(request))
    return request


def settings_of(request: Request) -> dict[str, Any]:
    """The settings of parallel decoding that a request names."""
    return {name: value for name in _SETTINGS if (value := getattr(request, name)) is not None}


def _field(problem: Any) -> str | None:
    return ".".join(map(str, problem["loc"])) or None


def _said(problem: Any) -> str:
    """A problem that pydantic found, in one sentence."""
    field, said = _field(problem), problem["msg"].removeprefix("Value error, ")
    if field is None:
        return str(said)
    if problem["type"] == "extra_forbidden":
        return f"`{field}` is not supported by this server"
    if problem["type"] == "missing":
        return f"`{field}` is missing"
    shown = repr(problem["input"])
    return f"`{field}`: {said}, got {shown if len(shown) <= 80 else f'{shown[:80]}…'}"
