"""transformers' handlers of OpenAI's endpoints, for a model that decodes in parallel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

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


class LoadedModel(ModelManager):
    """One model, already loaded: `transformers serve` loads only classes of its own package.

    Args:
        name: by which clients ask for it.
        model: in evaluation mode.
        tokenizer: the model's, a fast one.
        settings: of parallel decoding, for requests that name none.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, settings: dict[str, Any]):
        super().__init__(model_timeout=-1)
        self.force_model = name
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name as it is: a loaded model has no revision to choose."""
        return model_id

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        return self.model, self.tokenizer


class OneAfterTheOther(GenerationState):
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

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answers a request.

        Raises:
            RequestError: for one that cannot be honoured. A stream begins only when nothing is left to refuse.
            ValueError: for what `generate` refuses.
        """
        try:
            response = await super().handle_request(body, request_id)  # type: ignore[misc]
        except TemplateError as error:
            raise RequestError(f"The chat template refuses these messages: {error}") from None
        if isinstance(response, StreamingResponse):
            await CURRENT_CALL.get().has_begun
            response.body_iterator = _ended(response.body_iterator)
        return response

    def _validate_request(self, body: dict[str, Any]) -> None:
        served = self.model_manager.force_model
        if body.get("model") not in (None, served):
            message = f"The model {body['model']!r} is not served; this server has {served!r}."
            raise RequestError(message, status=404, code="model_not_found")
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

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        config: Any = super()._build_generation_config(body, model_generation_config, use_cb=use_cb)
        for name in SETTING_NAMES:  # `generate` itself knows what applies of those that the checkpoint stores
            vars(config).pop(name, None)
        for name in GENERATION_FIELDS:
            if name in body:
                setattr(config, name, body[name])
        asks = {name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p") if name in body}
        if body.get("temperature") == 0:
            config.do_sample, config.temperature = False, 1.0
        elif asks - {"top_p"} or body.get("top_p", 1) != 1:
            config.do_sample = body.get("do_sample", True)
        config.return_dict_in_generate = True
        return config


class ChatHandler(ParallelHandler, ChatCompletionHandler):
    """`/v1/chat/completions`."""

    schema = ChatRequest

    def _check(self, request: ChatRequest) -> None:
        template = self.model_manager.tokenizer.chat_template
        if template is None:
            raise RequestError("The model has no chat template: use /v1/completions.")
        if request.tools and "tools" not in str(template):
            raise RequestError("`tools`: the model's chat template knows no tools.")


class TextHandler(ParallelHandler, CompletionHandler):
    """`/v1/completions`."""

    schema = CompletionRequest


async def _ended(chunks: Any) -> AsyncIterator[str]:
    """The chunks of a stream, and the line that OpenAI's ends with."""
    async for chunk in chunks:
        yield chunk
    yield "data: [DONE]\n\n"
