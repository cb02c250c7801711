"""What a request may hold: OpenAI's fields, sampling settings of transformers, and those of parallel decoding.

A field that is not here is refused, and so is a value that cannot be honoured: nothing that a client asks for is
ignored in silence. Fields on which no answer depends are accepted, and so is a field that asks for nothing.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

from ..generation.settings import SETTING_NAMES, WeDLMGenerationSettings
from .calls import RequestError

MOST_ANSWERS = 128  # to one request, as in OpenAI's API
MOST_LIKELIEST = 20  # tokens that are listed at a place
MOST_STOPS, LONGEST_STOP = 32, 1000  # strings, characters
MOST_BIASES, MOST_WINDOW = 1024, 128  # tokens whose logits are shifted; slots: each takes logits of a whole vocabulary
MOST_PROBLEMS = 1000  # of a body, each of which takes two kilobytes to tell of

_Count = Annotated[int | None, Field(ge=1)]
_TokenId = Annotated[int, Field(strict=False)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Share = Annotated[float | None, Field(gt=0, le=1)]
# Whatever `apply_chat_template` takes is the server's to say, a template above all: it is a program.
_SET_BY_SERVER = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents", "kwargs"},
}


_ANY = TypeAdapter[Any](Any)


def from_json(text: str | bytes) -> Any:
    """The value of JSON, which is Unicode as a whole. Raises `ValueError`."""
    try:
        return _ANY.validate_json(text)
    except ValidationError as error:
        raise ValueError(error.errors(include_input=False)[0]["msg"].removeprefix("Invalid JSON: ")) from None


def _asks_for_nothing(value: Any) -> None:
    if value not in (0, "", [], {}):  # False is 0
        raise ValueError("this is not supported by this server")


_Nothing = Annotated[Any, BeforeValidator(_asks_for_nothing)]  # a field that is accepted while it asks for nothing


class _GenerationFields(BaseModel):
    """Settings of transformers' generation config."""

    min_new_tokens: Annotated[int | None, Field(ge=0)] = None
    max_time: Annotated[float | None, Field(gt=0)] = None
    do_sample: bool | None = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    typical_p: _Share = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    no_repeat_ngram_size: Annotated[int | None, Field(ge=0)] = None
    suppress_tokens: Annotated[list[int] | None, FailFast(), Field(max_length=MOST_BIASES)] = None


GENERATION_FIELDS = tuple(_GenerationFields.model_fields)


class _Closed(BaseModel):
    """An object of known fields."""

    model_config = ConfigDict(extra="forbid")


class _Open(BaseModel):
    """One with what else a chat template may read."""

    model_config = ConfigDict(extra="allow")


class _StreamOptions(_Closed, strict=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # as vLLM has it: in every chunk
    include_obfuscation: bool | None = None  # no answer depends on it


# Settings of parallel decoding, which `WeDLMGenerationSettings` checks; fields on which no answer depends; those of
# what this server does not do.
_SETTINGS = tuple(name for name in SETTING_NAMES if name not in ("mask_token_id", "output_trace"))
_UNUSED = ("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
           "service_tier", "store", "user")  # fmt: skip
_NOT_DONE = ("audio", "echo", "functions", "prediction", "presence_penalty", "suffix")
_OtherFields: Any = create_model(
    "_OtherFields",
    **dict.fromkeys((*_SETTINGS, *_UNUSED), (Any, None)),  # type: ignore[call-overload]
    **dict.fromkeys(_NOT_DONE, (_Nothing, None)),
)


class Request(_GenerationFields, _OtherFields):
    """Fields that both endpoints take. `generation_config` holds more of them, as an object or as JSON text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions = _StreamOptions()
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    max_tokens: _Count = None
    max_new_tokens: _Count = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=0, lt=2**63 - MOST_ANSWERS)] = None
    stop: list[str] | None = None
    frequency_penalty: Annotated[float | None, Field(ge=-0.99, le=2)] = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MOST_BIASES)] | None = None
    skip_special_tokens: bool = True

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, stop: Any) -> list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
            raise ValueError("it must be a text or a list of texts")
        if len(stops) > MOST_STOPS or max(map(len, stops), default=0) > LONGEST_STOP:
            raise ValueError(f"it may have {MOST_STOPS} texts of {LONGEST_STOP} characters")
        return [each for each in stops if each] or None

    @field_validator("suppress_tokens", "logit_bias")
    @classmethod
    def _none_if_empty(cls, value: Any) -> Any:
        return value or None

    @model_validator(mode="after")
    def _fits_together(self) -> "Request":
        if self.stream_options.include_usage and not self.stream:
            raise RequestError("`stream_options` goes with `stream`: true.", param="stream_options")
        if self.frequency_penalty is not None and self.repetition_penalty is not None:
            message = "`frequency_penalty` is a `repetition_penalty` of 1 more: leave one out."
            raise RequestError(message, param="frequency_penalty")
        return self


class _Function(_Open):
    name: str
    arguments: dict[str, Any] = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def _from_text(cls, arguments: Any) -> Any:
        return from_json(arguments or "{}") if isinstance(arguments, str | None) else arguments  # none, as ""


class _ToolCall(_Open):
    function: _Function


class _Part(_Closed):
    """A part of a message's content: text, or what a model said in place of an answer."""

    type: Literal["text", "refusal", "input_text", "output_text"]
    text: str = ""
    refusal: str = ""
    cache_control: Any = None  # no answer depends on these
    annotations: _Nothing = None
    logprobs: _Nothing = None


class _Message(_Open):
    role: str
    content: str = ""
    tool_calls: Annotated[list[_ToolCall] | None, FailFast()] = None

    @model_validator(mode="before")
    @classmethod
    def _asked_for(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        nothing: tuple[Any, ...] = (None, "", [], {})
        message = {
            name: value
            for name, value in message.items()
            if value not in nothing and (value is not False or name == "content")
        }
        if call := message.pop("function_call", None):  # what OpenAI's API had before tools
            message["tool_calls"] = [*message.get("tool_calls", []), {"type": "function", "function": call}]
        return message

    @field_validator("content", mode="before")
    @classmethod
    def _text_of(cls, content: Any) -> Any:
        try:
            if isinstance(content, list):
                known = get_args(_Part.model_fields["type"].annotation)
                for number, part in enumerate(content):
                    if isinstance(part, dict) and (kind := part.get("type", "text")) not in known:
                        raise ValueError(f"part {number} is of the type {kind!r:.40}, and only text is read here")
                return " ".join(part.text or part.refusal for part in map(_Part.model_validate, content))
        except ValidationError:
            content = None
        if not isinstance(content, str):
            raise ValueError('it must be a text or a list of parts such as {"type": "text", "text": "…"}')
        return content


class _ToolFunction(_Open):
    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] | None = None


class _Tool(_Open):
    type: Literal["function"]
    function: _ToolFunction


class _Name(_Closed):
    name: str


class _Choice(_Closed):
    """The tool that the model must call."""

    type: Literal["function"]
    function: _Name


class _Schema(_Closed, strict=True):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # whatever it is: the answer follows the schema
    wanted: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class _Format(_Closed):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


def moved(schema: Any, place: str) -> Any:
    """A JSON schema for a place inside another: its references begin there."""
    if isinstance(schema, list):
        return [moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: moved(part, place) for name, part in schema.items()}
    if isinstance(reference := found.get("$ref"), str) and reference.startswith("#"):
        found["$ref"] = f"#{place}{reference[1:]}"
    return found


def _call_schema(function: _ToolFunction, place: str) -> dict[str, Any]:
    arguments = moved(function.parameters or {"type": "object"}, f"{place}/properties/arguments")
    if "properties" in arguments:  # a function takes no others, if nothing else is said
        arguments = {"additionalProperties": False} | arguments
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": {"type": "object"} | arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class ChatRequest(Request):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1), FailFast()]
    max_completion_tokens: _Count = None
    tools: Annotated[list[_Tool] | None, FailFast()] = None
    tool_choice: Literal["auto", "none", "required"] | _Choice | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    function_call: _Nothing | Literal["auto", "none"] = None  # what OpenAI's API had before tools
    modalities: Annotated[list[Literal["text"]] | None, FailFast()] = None
    response_format: _Format | None = None
    logprobs: Annotated[bool | None, Field(strict=False)] = None  # 0 asks for nothing
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_LIKELIEST)] = None

    @property
    def likeliest(self) -> int | None:
        """How many tokens to tell of at each place; `None`: no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @model_validator(mode="after")
    def _has_what_goes_together(self) -> "ChatRequest":
        wanted, names = self.response_format, [tool.function.name for tool in self.tools or []]
        if wanted and (wanted.type == "json_schema") != bool(wanted.json_schema):
            message = "`response_format.json_schema` goes with the type 'json_schema', and is needed there."
            raise RequestError(message, param="response_format.json_schema")
        if self.chosen is not None and self.chosen not in names:
            message = f"`tool_choice` names {self.chosen!r}, which is none of the `tools`."
            raise RequestError(message, param="tool_choice")
        if self.tool_choice == "required" and not names:
            raise RequestError("`tool_choice`: 'required' goes with `tools`.", param="tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("`top_logprobs` goes with `logprobs`: true.", param="top_logprobs")
        return self

    @property
    def chosen(self) -> str | None:
        """The tool that the model must call."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, _Choice) else None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_unset=True) for tool in tools]

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def wanted_schema(self) -> tuple[dict[str, Any] | None, list[str]]:
        """The JSON schema that the answer must follow, and the names of tools that it may call in this form."""
        wanted = self.response_format
        is_free = wanted is None or wanted.type == "text"
        if is_free and not self.must_call:
            return None, []
        options: list[Callable[[str], dict[str, Any]]] = []
        if not self.must_call and wanted is not None:
            answer = wanted.json_schema and wanted.json_schema.wanted
            options.append(partial(moved, {"type": "object"} if answer is None else answer))
        functions = [tool.function for tool in self.tools or [] if self.tool_choice != "none"]
        functions = [each for each in functions if self.chosen in (None, each.name)]
        options += [partial(_call_schema, each) for each in functions]
        if len(options) == 1:
            return options[0](""), [each.name for each in functions]
        found = [option(f"/anyOf/{number}") for number, option in enumerate(options)]
        return {"anyOf": found}, [each.name for each in functions]

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leaves_ours(cls, words: dict[str, Any]) -> dict[str, Any]:
        if ours := sorted(_SET_BY_SERVER & set(words)):
            raise ValueError(f"{ours[0]!r} is set by the server")
        return words


class CompletionRequest(Request):
    """A body of `/v1/completions`."""

    prompt: Annotated[list[str | list[int]], SkipValidation]  # as it is checked below
    best_of: int | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_LIKELIEST)] = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _is_number(cls, count: Any) -> Any:
        if count is True:
            raise ValueError("it must be a number: how many tokens to tell of at each place")
        return None if count is False else count

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_prompts(cls, prompt: Any) -> Any:
        prompts = [prompt] if isinstance(prompt, str) or (prompt and _are_tokens(prompt)) else prompt
        if not isinstance(prompts, list) or not all(isinstance(each, str) or _are_tokens(each) for each in prompts):
            raise ValueError("it must be a text, a list of token ids, or a list of such prompts")
        if not prompts:
            raise ValueError("a request has at least 1 item in its list of prompts")
        return prompts

    @property
    def likeliest(self) -> int | None:
        """See [`ChatRequest.likeliest`]."""
        return self.logprobs

    @model_validator(mode="after")
    def _are_not_too_many(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise RequestError(f"`best_of` must be `n`, {self.n}, got {self.best_of}.", param="best_of")
        if len(self.prompt) * self.n > MOST_ANSWERS:
            raise RequestError(f"A request has at most {MOST_ANSWERS} answers, `n` to each `prompt`.", param="prompt")
        return self


def _are_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def read(body: Any, schema: type[Request]) -> Any:
    """What a request asks for, of the type `schema`. Raises `RequestError` for a field or a value that is not taken,
    and `ValueError` for settings of parallel decoding that are out of range."""
    if not isinstance(body, dict):
        raise RequestError(f"The body of the request must be a JSON object, got {_shown(body)}.")
    body = _asked(body)
    nested = body.pop("generation_config", None) or {}
    if isinstance(nested, str):
        try:
            nested = from_json(nested)
        except ValueError as error:
            raise RequestError(f"`generation_config` is no JSON: {error}.", param="generation_config") from None
    if not isinstance(nested, dict):
        message = f"`generation_config` must be an object, got {_shown(nested)}."
        raise RequestError(message, param="generation_config")
    nested.pop("transformers_version", None)  # which `to_json_string` of a generation config adds
    if twice := sorted(body.keys() & nested.keys()):
        message = f"`{twice[0]}` stands in the request and in its `generation_config`: leave one out."
        raise RequestError(message, param=twice[0])
    given = body | _asked(nested)
    try:
        request = schema.model_validate(given)
    except ValidationError as error:
        if (number := error.error_count()) > MOST_PROBLEMS:
            raise RequestError(f"{number} fields or values of the request are not supported by this server.") from None
        problems = error.errors()
        said = dict.fromkeys(_said(problem, given) for problem in problems)
        raise RequestError("; ".join([*said][:3]), param=_field(problems[0], given)) from None
    settings = WeDLMGenerationSettings(**settings_of(request))
    if (settings.window_size or 0) > MOST_WINDOW:
        message = f"`window_size` may be {MOST_WINDOW} at most for this server, got {settings.window_size}."
        raise RequestError(message, param="window_size")
    return request


def _asked(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that ask for something: a null asks for nothing."""
    return {name: value for name, value in fields.items() if value is not None}


def settings_of(request: Request) -> dict[str, Any]:
    """The settings of parallel decoding that a request names."""
    return {name: value for name in _SETTINGS if (value := getattr(request, name)) is not None}


def _field(problem: Any, body: Any) -> str | None:
    """Where in the body a problem is: pydantic names its own branches, too."""
    path: list[str] = []
    for step in problem["loc"]:
        is_there = step in body if isinstance(body, dict) else isinstance(body, list) and isinstance(step, int)
        if is_there or (problem["type"] == "missing" and step == problem["loc"][-1]):
            path.append(str(step))
            body = body[step] if is_there else None
    return ".".join(path) or None


def _said(problem: Any, body: Any) -> str:
    """A problem that pydantic found, in one sentence."""
    field, said = _field(problem, body), problem["msg"].removeprefix("Value error, ")
    if field is None:
        return str(said)
    if problem["type"] == "extra_forbidden":
        return f"`{field}` is not supported by this server"
    if problem["type"] == "missing":
        return f"`{field}` is missing"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        said = "it must be an object"
    return f"`{field}`: {said}, got {_shown(problem['input'])}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
