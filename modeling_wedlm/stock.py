"""What stock models say of the settings of parallel decoding."""

from functools import wraps
from typing import Any

from transformers import GenerationMixin

from ..generation.settings import SETTING_NAMES


def explain_settings() -> None:
    """Has `generate` of models without parallel decoding say what a setting of it needs. transformers alone would say
    that the keyword is "not used by the model"."""
    check: Any = GenerationMixin._validate_model_kwargs
    if getattr(check, "knows_settings", False):
        return

    @wraps(check)
    def with_reason(self: Any, model_kwargs: dict[str, Any]) -> None:
        """The parent's. Raises `ValueError` for a setting of ours, which a model of ours would have taken out."""
        for name in (name for name in SETTING_NAMES if name in model_kwargs):
            raise ValueError(
                f"`{name}={model_kwargs[name]!r}` decodes in parallel, which {type(self).__name__} cannot by itself: "
                "put a mask adapter on the model (`load_mask_adapter`; `wedlm adapt` trains one), or load a WeDLM "
                "checkpoint (`WeDLMForCausalLM`, `wedlm convert`)."
            )
        check(self, model_kwargs)

    with_reason.knows_settings = True  # type: ignore[attr-defined]
    GenerationMixin._validate_model_kwargs = with_reason  # type: ignore[method-assign]
