"""transformers' handlers of OpenAI's endpoints, for a model that decodes in parallel."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import torch
from fastapi.responses import StreamingResponse
from jinja2 import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, GenerationState

from ..eval.decoders import with_asked
from ..generation.settings import SETTING_NAMES
from .calls import CURRENT_CALL, CallManager, RequestError
from .schema import GENERATION_FIELDS, ChatRequest, CompletionRequest, Request, read, settings_of

GREEDY_BELOW = 1e-5  # a temperature so low is none, as in vLLM: logits divided by it would be infinite


class LoadedModel(ModelManager):
    """One model, already loaded: `transformers serve` loads only classes of its own package. Clients ask for it by its
    name; the settings of parallel decoding are for requests that name none."""

    def __init__(self, name: str, model: Any, tokenizer: Any, settings: dict[str, Any]):
        super().__init__(model_timeout=-1)
        self.force_model, self.model, self.tokenizer, self.settings = name, model, tokenizer, settings
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name as it is: a loaded model has no revision to choose."""
        return model_id

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        return self.model, self.tokenizer

    def check_name(self, name: str) -> None:
        """Raises `RequestError` for the name of another model."""
        if name != self.force_model:
            message = f"The model {name!r} is not served; this server has {self.force_model!r}."
            raise RequestError(message, 404, "model_not_found", "model")


class OneThread(GenerationState):
    """All requests share one [`CallManager`], and with it one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = CallManager()

    def get_manager(self, model_id: str, use_cb: bool = False) -> CallManager:
        """The manager."""
        return self.manager


class ParallelHandler(BaseHandler):
    """What the endpoints have in common: strict requests, settings of parallel decoding, errors before a stream."""

    model_manager: LoadedModel
    schema: type[Request]
    prompt_field: str

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answers a request. Raises `RequestError` for one that cannot be honoured: a stream begins only when nothing
        is left to refuse."""
        nested = body.get("generation_config")
        asked = {*body, *(nested if isinstance(nested, dict) else ())}
        try:
            response = await self._answer(body, request_id)
            if not body.get("stream"):
                return response
            events = _chunks(response)
            begun = [await anext(events)]
            while begun[-1]["choices"][0].get("delta", {}).get("role"):  # no answer yet
                begun.append(await anext(events))
            options = body.get("stream_options") or {}
            return StreamingResponse(_sent(begun, events, options), media_type="text/event-stream")
        except TemplateError as error:
            message = f"The chat template refuses these messages: {error}"
            raise RequestError(message, param=self.prompt_field) from None
        except (RequestError, ValueError) as error:
            refused = _as_request_error(error)
            if str(error).startswith(("The prompt", "This model's context")):
                refused.param = self.prompt_field
            elif refused.param is None:
                known = asked | self.schema.model_fields.keys()
                refused.param = next((name for name in re.findall(r"`(\w+)", str(error)) if name in known), None)
            raise refused from None

    async def _answer(self, body: dict[str, Any], request_id: str) -> Any:
        """transformers' response: whole, or one that streams."""
        return await super().handle_request(body, request_id)  # type: ignore[misc]

    def _validate_request(self, body: dict[str, Any]) -> None:
        if isinstance(body.get("model"), str):
            self.model_manager.check_name(body["model"])
        request = read(body, self.schema)
        self._check(request)
        body.clear()
        body.update(request.model_dump(exclude_none=True))
        call = CURRENT_CALL.get()
        call.settings = with_asked(self.model_manager.settings, settings_of(request))
        limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_new_tokens"))
        call.limit = min((limit for limit in limits if limit), default=None)
        call.seed = body.pop("seed", None)  # transformers would set it now, and the call may have to wait

    def _check(self, request: Any) -> None:
        """Raises `RequestError` for what this model cannot do."""
        size = self.model_manager.vocab_size
        for name in ("suppress_tokens", "logit_bias"):
            check_tokens(name, getattr(request, name) or [], size)

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        config: Any = super()._build_generation_config(body, model_generation_config, use_cb=use_cb)
        for name in SETTING_NAMES:  # `generate` itself knows what applies of those that the checkpoint stores
            vars(config).pop(name, None)
        for name in GENERATION_FIELDS:
            if name in body:
                setattr(config, name, body[name])
        if "logit_bias" in body:  # transformers reads it for chats alone
            config.sequence_bias = {(token,): bias for token, bias in body["logit_bias"].items()}
        asks = {name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p") if name in body}
        if body.get("temperature", 1) < GREEDY_BELOW:
            config.do_sample, config.temperature = False, 1.0
        elif asks - {"top_p"} or body.get("top_p", 1) != 1:
            config.do_sample = body.get("do_sample", True)
        config.return_dict_in_generate = True
        return config


class ChatHandler(ParallelHandler, ChatCompletionHandler):
    """`/v1/chat/completions`."""

    schema = ChatRequest
    prompt_field = "messages"

    def _check(self, request: ChatRequest) -> None:
        super()._check(request)
        template = self.model_manager.tokenizer.chat_template
        if template is None:
            raise RequestError("The model has no chat template: use /v1/completions.")
        if request.tools and "tools" not in str(template):
            raise RequestError("`tools`: the model's chat template knows no tools.")


class TextHandler(ParallelHandler, CompletionHandler):
    """`/v1/completions`. Identical to transformers' except that the prompt may be token ids."""

    schema = CompletionRequest
    prompt_field = "prompt"

    async def _answer(self, body: dict[str, Any], request_id: str) -> Any:
        self._validate_request(body)
        name, model, tokenizer = self._resolve_model(body)
        config, prompt = self._build_generation_config(body, model.generation_config), body["prompt"]
        if not isinstance(prompt, str):
            check_tokens("prompt", prompt, self.model_manager.vocab_size)
        tokens = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        inputs = {"input_ids": torch.tensor([tokens], dtype=torch.long)}
        rest = (request_id, model, tokenizer, name, inputs, config, self.generation_state.get_manager(name))
        return self._streaming(*rest) if body.get("stream") else await self._non_streaming(*rest)


def _as_request_error(error: Exception) -> RequestError:
    return error if isinstance(error, RequestError) else RequestError(str(error))


def check_tokens(field: str, tokens: Any, vocab_size: int) -> None:
    """Raises `RequestError` for token ids that the model does not have."""
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        message = f"`{field}`: the model's token ids are 0 to {vocab_size - 1}, got {wrong[0]}."
        raise RequestError(message, param=field)


async def _chunks(response: Any) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream of transformers', as they come. Raises whatever the answer failed with."""
    call = CURRENT_CALL.get()
    async for text in response.body_iterator:
        for line in filter(None, text.split("\n\n")):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise call.error or RequestError("The answer failed.", status=500)
            yield chunk


async def _sent(begun: list[Any], events: AsyncIterator[Any], options: dict[str, Any]) -> AsyncIterator[str]:
    """The lines of a stream. The last chunk has the usage; where `include_usage` is true, the usage has a chunk of its
    own, as in OpenAI's API."""
    asks, chunk = options.get("include_usage"), {}
    without = {"usage": None} if asks else {}
    try:
        for chunk in begun:
            yield _line(chunk | without)
        async for chunk in events:
            yield _line(chunk | without)
    except (RequestError, ValueError) as error:
        yield _line(_as_request_error(error).body())
    else:
        if asks:
            yield _line({**chunk, "choices": []})
    finally:
        CURRENT_CALL.get().is_cancelled.set()  # if the client has gone
    yield "data: [DONE]\n\n"


def _line(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps({name: value for name, value in chunk.items() if value is not None})}\n\n"
