"""The model: configuration, network, dual-stream mask and loss, conversion, Hub bundle.

Importing this package registers `model_type: wedlm` with the Auto classes."""

import sys

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .card import write_cards_on_save
from .configuration_wedlm import WeDLMConfig
from .convert import Conversion, convert
from .hub import write_hub_files
from .modeling_wedlm import WeDLMForCausalLM, WeDLMModel, WeDLMPreTrainedModel

AutoConfig.register("wedlm", WeDLMConfig, exist_ok=True)
AutoModel.register(WeDLMConfig, WeDLMModel, exist_ok=True)
AutoModelForCausalLM.register(WeDLMConfig, WeDLMForCausalLM, exist_ok=True)

WeDLMConfig._hub_bundle = staticmethod(write_hub_files)
write_cards_on_save(WeDLMPreTrainedModel)


def _register_with_peft() -> None:
    """Makes PEFT know mask adapters, where it is imported: importing it here would cost every command seconds."""
    if "peft" in sys.modules:
        from ..adapters.peft_method import register

        register()


_register_with_peft()
WeDLMModel._on_construction = staticmethod(_register_with_peft)

__all__ = ["Conversion", "WeDLMConfig", "WeDLMForCausalLM", "WeDLMModel", "convert"]
