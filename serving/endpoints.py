"""OpenAI's endpoints: from the body of a request to what the model is asked."""

import copy
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from transformers import GenerationConfig
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from ..eval.decoders import AR, EXACT, decoder_of, with_asked
from ..generation.grammar import Grammar, Thoughts
from ..generation.request import context_length
from ..generation.settings import SETTING_NAMES
from .calls import Asked, RequestError
from .conversation import Conversation
from .forms import message_form
from .limits import MOST_OBJECTS, can_be_built, may_have_tokens, objects_in
from .message import THOUGHTS, CallParser, MessageParser, PlainParser, ThoughtsParser
from .responses import ChatResponse, Response, TextResponse
from .schema import GENERATION_FIELDS, ChatRequest, CompletionRequest, Request, from_json, read, settings_of

GREEDY_BELOW = 1e-5  # a temperature so low is none, as in vLLM: logits divided by it would be infinite
# Longest answer where neither the request nor the checkpoint says, as in `transformers serve`.
DEFAULT_NEW_TOKENS = 1024
MOST_CHARACTERS = 2**24  # of a prompt, and bytes of a body, whatever the context
MOST_BYTES_BESIDE = 2**20  # what a body may have beside its prompt: biases, tools
LONGEST_ESCAPE = 12  # bytes of a character in JSON
MOST_CHANCES = 2**18  # log-probabilities in a response: about 20 MB of JSON
UNCHECKED = "a mask adapter gives drafts, which make no text unchecked: 'wedlm' takes 'exact', or take 'ar'."
GRAMMARS = 4  # that are kept; a large one takes 50 MB


@dataclass(frozen=True)
class ServedModel:
    """A loaded model, and for requests that name none: settings of parallel decoding, and strings that end answers."""

    name: str
    model: Any
    tokenizer: Any
    settings: dict[str, Any]
    stops: list[str] = field(default_factory=list)

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the vocabulary."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @cached_property
    def special(self) -> dict[int, str]:
        """The special tokens, and how they are written."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        return {number: token.content for number, token in tokens if token.special}

    @cached_property
    def message(self) -> tuple[ResponseTemplate | None, dict[int, str]]:
        """How messages of the model are written, if that is known, and the special tokens in it."""
        stated = message_form(self.tokenizer, self.model.config.model_type)
        if stated is None:
            return None, {}
        template = load_response_template(stated)
        for each in template.fields.values():
            each.optional = True
        written = str(stated).replace("\\", "")  # of patterns, too
        return template, {number: text for number, text in self.special.items() if text in written}

    @cached_property
    def bounds(self) -> tuple[str, str]:
        """What opens thoughts and what ends them. Raises `RequestError` where nothing certain does."""
        fields = self.message[0].fields if self.message[0] else {}
        thoughts = next((fields[name] for name in THOUGHTS if name in fields), None)
        if thoughts is None or fields["content"].open_re is not None:
            raise RequestError("Where this model's thoughts end and an answer could follow a schema is not known.")
        return _literal(thoughts.open_literals, thoughts.open_re), _literal(thoughts.close_literals, thoughts.close_re)

    @cached_property
    def thoughts(self) -> Thoughts:
        """Thoughts in front of an answer that follows a grammar."""
        return Thoughts(self.tokenizer, self.bounds[1])

    @cached_property
    def grammar(self) -> Callable[[str], Grammar]:
        """Makes the grammar of a JSON schema, which is a text. Raises `ValueError` for one that cannot be followed or
        takes too long to prepare."""

        @lru_cache(GRAMMARS)
        def made(schema: str) -> Grammar:
            if not can_be_built(schema):
                raise ValueError("the JSON schema takes too long to prepare: make it simpler")
            return Grammar(self.tokenizer, json.loads(schema))

        return made

    @cached_property
    def context(self) -> int:
        """Tokens that the context holds."""
        return context_length(self.model.config)

    @cached_property
    def most_characters(self) -> int:
        """No prompt of more characters fits into the context."""
        return min(self.context * max(map(len, self.tokenizer.get_vocab())), MOST_CHARACTERS)

    @property
    def most_bytes(self) -> int:
        """Of the body of a request."""
        return min(self.most_characters * LONGEST_ESCAPE, MOST_CHARACTERS) + MOST_BYTES_BESIDE

    def check_name(self, name: str) -> None:
        """Raises `RequestError` for the name of another model."""
        if name != self.name:
            message = f"The model {name!r} is not served; this server has {self.name!r}."
            raise RequestError(message, 404, "model_not_found", "model")


class Endpoint:
    """What the endpoints have in common."""

    schema: type[Request]
    response: type[Response]
    prompt_field: str

    def __init__(self, served: ServedModel):
        self.served = served

    def read(self, body: bytes) -> tuple[Any, list[Asked]]:
        """A request, and what it asks for, answer by answer. Raises `RequestError` or `ValueError` for one that cannot
        be honoured. Takes its time: no other request should wait for it."""
        if objects_in(body) > MOST_OBJECTS:
            raise RequestError(f"The request has more than {MOST_OBJECTS} objects and lists.")
        try:
            fields = from_json(body.removeprefix(BOM_UTF8))
        except ValueError as error:
            raise RequestError(f"The body of the request must be a JSON object: {error}.") from None
        if isinstance(fields, dict) and isinstance(fields.get("model"), str):
            self.served.check_name(fields["model"])
        return self._read(self._request(fields))

    def _request(self, fields: Any) -> Any:
        return read(fields, self.schema)

    def _read(self, request: Any) -> tuple[Any, list[Asked]]:
        size = self.served.vocab_size
        for name in ("suppress_tokens", "logit_bias"):
            check_tokens(name, getattr(request, name) or [], size)
        settings = with_asked(self.served.settings, settings_of(request), self.served.model)
        is_ordered = decoder_of(settings, self.served.model) in (AR, EXACT)
        if not is_ordered and self.served.model.has_mask_adapter:
            field = "strategy" if settings["strategy"] == "block" else "verification"
            raise RequestError(f"`{field}`: {UNCHECKED}", param=field)
        looks_up = settings["strategy"] == "ar" and self.served.model.generation_config.prompt_lookup_num_tokens
        if request.likeliest is not None and looks_up:
            message = "`logprobs`: this server looks drafts up in the prompt (`prompt_lookup_num_tokens`)."
            raise RequestError(message, param="logprobs")
        rest = {
            "seed": request.seed,
            "stops": request.stop or self.served.stops,
            "special": self.served.special if request.skip_special_tokens else {},
            "likeliest": request.likeliest,
            "is_ordered": is_ordered,
        }
        asked = [
            Asked(prompt, self._config(request, prompt), settings, **rest | more)
            for prompt, more in self._prompts(request)
        ]
        needs = {
            "logprobs": request.likeliest is not None,
            "frequency_penalty": request.frequency_penalty,
            "repetition_penalty": request.repetition_penalty not in (None, 1),
            "no_repeat_ngram_size": request.no_repeat_ngram_size,
            "logit_bias": request.logit_bias,
            "tool_choice": getattr(request, "must_call", False),
            "response_format": any(each.grammar for each in asked),
        }
        if not is_ordered and (wrong := next((name for name, is_asked in needs.items() if is_asked), None)):
            message = f"`{wrong}` needs each token's predecessors"
            raise RequestError(f"{message}: ask for `verification`: 'exact' or `strategy`: 'ar'.", param=wrong)
        if request.seed is None:
            asked = [each for each in asked for _ in range(request.n)]
        elif request.n > 1:  # a seed gives each its own sample
            asked = [replace(each, seed=request.seed + index) for each in asked for index in range(request.n)]
        if request.likeliest is not None:
            count = sum(each.config.max_new_tokens for each in asked) * (request.likeliest + 1)
            if count > MOST_CHANCES:
                message = (
                    f"`logprobs`: the response could hold {count} of them, and {MOST_CHANCES} are the most: lower"
                )
                raise RequestError(f"{message} `n`, the limit of the answer or the alternatives.", param="logprobs")
        return request, asked

    def _prompts(self, request: Any) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """The prompts, in tokens, and what else [`Asked`] takes."""
        raise NotImplementedError

    def _tokens(self, text: str, **how: Any) -> list[int]:
        """Of a text. Raises `RequestError` for one that has too many characters or by far too many tokens."""
        tokenizer, context = self.served.tokenizer, self.served.context

        def count(part: str) -> int:
            return len(tokenizer(part, add_special_tokens=False).input_ids)

        if len(text) > self.served.most_characters or not may_have_tokens(text, context, count):
            message = f"The prompt has {len(text)} characters, but this model's context is {context} tokens."
            raise RequestError(message, 400, "context_length_exceeded", self.prompt_field)
        return list(tokenizer(text, **how).input_ids)

    def _config(self, request: Any, prompt: list[int]) -> GenerationConfig:
        """Of `generate`. Raises `RequestError` for a prompt that is empty or leaves no room in the context, and for a
        limit that does not fit or lies below `min_new_tokens`."""
        config: Any = copy.deepcopy(self.served.model.generation_config)
        for name in SETTING_NAMES:  # `generate` itself knows what applies of those that the checkpoint stores
            vars(config).pop(name, None)
        for name in (*GENERATION_FIELDS, "temperature", "top_p"):
            if (value := getattr(request, name)) is not None:
                setattr(config, name, value)
        if request.frequency_penalty is not None:
            config.repetition_penalty = 1 + request.frequency_penalty
        if request.logit_bias:
            config.sequence_bias = {(token,): bias for token, bias in request.logit_bias.items()}
        samples = [request.temperature, request.top_k, request.min_p, request.typical_p]
        if request.temperature is not None and request.temperature < GREEDY_BELOW:
            config.do_sample = False
        elif any(value is not None for value in samples) or request.top_p not in (None, 1):
            config.do_sample = True if request.do_sample is None else request.do_sample
        if not config.do_sample:  # transformers would warn of what has no effect
            config.temperature, config.top_p, config.top_k, config.min_p, config.typical_p = 1.0, 1.0, None, None, None
        config.return_dict_in_generate = True
        limits = [getattr(request, name, None) for name in ("max_completion_tokens", "max_tokens", "max_new_tokens")]
        self._fit(config, len(prompt), min(filter(None, limits), default=None))
        return config

    def _fit(self, config: Any, length: int, limit: int | None) -> None:
        context, code = self.served.context, "context_length_exceeded"
        if not 0 < length < context:
            message = f"The prompt must have 1 to {context - 1} tokens for this model's context, got {length}."
            raise RequestError(message, code=code if length else None, param=self.prompt_field)
        if limit is not None and length + limit > context:
            asked = f"{length + limit}: {length} in the prompt, {limit} for the answer"
            message = f"This model's context is {context} tokens, but the request asks for {asked}."
            raise RequestError(message, code=code, param=self.prompt_field)
        stored = self.served.model.generation_config.max_new_tokens or DEFAULT_NEW_TOKENS
        config.max_new_tokens = limit or min(stored, context - length)
        if (least := config.min_new_tokens or 0) > config.max_new_tokens:
            message = f"`min_new_tokens` is {least}, but the answer may have {config.max_new_tokens} tokens."
            raise RequestError(message, param="min_new_tokens")


class ChatEndpoint(Endpoint):
    """`/v1/chat/completions`."""

    schema, response, prompt_field = ChatRequest, ChatResponse, "messages"

    def _prompts(self, request: ChatRequest) -> Iterator[tuple[list[int], dict[str, Any]]]:
        served, tools = self.served, request.shown_tools or None
        if served.tokenizer.chat_template is None:
            raise RequestError("The model has no chat template: use /v1/completions.")
        if tools and "tools" not in str(served.tokenizer.chat_template):
            raise RequestError("`tools`: the model's chat template knows no tools.", param="tools")
        schema, names = request.wanted_schema
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        chat = Conversation(served.tokenizer, messages, tools)
        wants = chat.think(
            request.reasoning_effort, request.chat_template_kwargs or {}, has_grammar=schema is not None
        )
        text = chat.text()
        more: dict[str, Any] = {"makes_one_call": request.parallel_tool_calls is False}
        template, special = served.message
        parser: Callable[[], Any] = PlainParser
        if template is not None:
            begin = max((found.start() for found in template.start_anchor_re.finditer(text)), default=None)
            prefix = chat.generation_prompt() if begin is None else text[begin:]
            if not tools:  # nobody asked for calls
                fields = {name: field for name, field in template.fields.items() if name != "tool_calls"}
                template = replace(template, fields=fields)
            skipped = special.values() if request.skip_special_tokens else ()
            parser = partial(MessageParser, template, prefix, tools, skipped)
            if schema is None:
                more |= {"parser": parser, "parsed": special.keys()}
        thinks = parser().is_thinking
        chat.check_thoughts(thinks)
        if schema is not None:
            more |= {"grammar": self._grammar(schema, request)}
            text, begun = self._begun(text, wants, thinks, partial(CallParser, names) if names else PlainParser)
            more |= begun
        yield self._tokens(text, add_special_tokens=False), more

    def _begun(self, text: str, wants: bool, thinks: bool, behind: Callable[[], Any]) -> tuple[str, dict[str, Any]]:
        """The prompt of an answer that follows a grammar, behind thoughts if the prompt opens them or the client wants
        them, and what [`Asked`] takes for it."""
        if not (wants or thinks):
            return text, {"parser": behind}
        opening, closing = self.served.bounds
        parsed = [number for number, written in self.served.special.items() if written == closing]
        more = {"thoughts": self.served.thoughts, "parsed": parsed}
        return text if thinks else f"{text}{opening}\n", more | {"parser": lambda: ThoughtsParser(closing, behind())}

    def _grammar(self, schema: Any, request: ChatRequest) -> Grammar:
        field = "tool_choice" if request.must_call else "response_format"
        try:
            return self.served.grammar(json.dumps(schema))
        except (ImportError, ValueError) as error:
            raise RequestError(f"`{field}`: {error}", param=field) from None


def _literal(literals: list[str] | None, pattern: Any) -> str:
    """What a delimiter of a message is, where it is a text, maybe with white space behind it."""
    text = literals[0] if literals else re.sub(r"\\(.)", r"\1", pattern.pattern.removesuffix(r"\s*"))
    if not pattern.fullmatch(text):
        raise RequestError("This model's thoughts have no certain end, behind which an answer could follow a schema.")
    return text


class TextEndpoint(Endpoint):
    """`/v1/completions`."""

    schema, response, prompt_field = CompletionRequest, TextResponse, "prompt"

    def _prompts(self, request: CompletionRequest) -> Iterator[tuple[list[int], dict[str, Any]]]:
        for prompt in request.prompt:
            if isinstance(prompt, str):
                yield self._tokens(prompt), {}
            else:
                check_tokens("prompt", prompt, self.served.vocab_size)
                yield prompt, {}


def check_tokens(field: str, tokens: Any, vocab_size: int) -> None:
    """Raises `RequestError` for token ids that the model does not have."""
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        message = f"`{field}`: the model's token ids are 0 to {vocab_size - 1}, got {wrong[0]}."
        raise RequestError(message, param=field)
