"""The model: configuration, network, dual-stream mask and loss, conversion, Hub bundle.

Importing this package registers `model_type: wedlm` with the Auto classes."""

from importlib import import_module
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .card import write_cards_on_save
from .configuration_wedlm import WeDLMConfig
from .convert import Conversion, convert
from .dual_stream import dual_stream_mask, forward_with_targets
from .hub import write_hub_files
from .modeling_wedlm import WeDLMForCausalLM, WeDLMModel, WeDLMPreTrainedModel
from .stock import explain_settings

AutoConfig.register("wedlm", WeDLMConfig, exist_ok=True)
AutoModel.register(WeDLMConfig, WeDLMModel, exist_ok=True)
AutoModelForCausalLM.register(WeDLMConfig, WeDLMForCausalLM, exist_ok=True)

explain_settings()
WeDLMConfig._hub_bundle = staticmethod(write_hub_files)
write_cards_on_save(WeDLMPreTrainedModel)
WeDLMModel._dual_stream_mask = dual_stream_mask
WeDLMForCausalLM._forward_with_targets = forward_with_targets


def _later(name: str) -> Any:
    """A method of mask adapters, which are a layer above this one: looked up when it is called."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module("..adapters", __package__), name)(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"See `wedlm_hf.{name}`."
    return method


for _name in ("add_mask_adapter", "load_mask_adapter"):
    setattr(WeDLMForCausalLM, _name, _later(_name))

__all__ = ["Conversion", "WeDLMConfig", "WeDLMForCausalLM", "WeDLMModel", "convert"]
