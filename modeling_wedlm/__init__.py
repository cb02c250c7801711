"""The model: configuration, network, dual-stream mask and loss, Hub bundle; convert.py makes one of another.

Importing this package registers `model_type: wedlm` with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..checkpoints.card import write_cards_on_save
from .configuration_wedlm import WeDLMConfig
from .hub import write_hub_files
from .modeling_wedlm import WeDLMForCausalLM, WeDLMModel, WeDLMPreTrainedModel
from .stock import explain_settings

AutoConfig.register("wedlm", WeDLMConfig, exist_ok=True)
AutoModel.register(WeDLMConfig, WeDLMModel, exist_ok=True)
AutoModelForCausalLM.register(WeDLMConfig, WeDLMForCausalLM, exist_ok=True)

explain_settings()
WeDLMConfig._hub_bundle = staticmethod(write_hub_files)
write_cards_on_save(WeDLMPreTrainedModel)

__all__ = ["WeDLMConfig", "WeDLMForCausalLM", "WeDLMModel"]
