"""The model: configuration, network, dual-stream mask and loss, conversion, Hub bundle.

Importing this package registers `model_type: wedlm` with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_wedlm import WeDLMConfig
from .modeling_wedlm import WeDLMForCausalLM, WeDLMModel

AutoConfig.register("wedlm", WeDLMConfig, exist_ok=True)
AutoModel.register(WeDLMConfig, WeDLMModel, exist_ok=True)
AutoModelForCausalLM.register(WeDLMConfig, WeDLMForCausalLM, exist_ok=True)

__all__ = ["WeDLMConfig", "WeDLMForCausalLM", "WeDLMModel"]
