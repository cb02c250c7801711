"""transformers' own tests of models, put to WeDLM, and to Qwen3 for comparison. Run by `make test-peers`."""

import unittest
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.auto import modeling_auto
from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers_tests.test_training_mixin import TrainingTesterMixin

from wedlm_hf.modeling_wedlm import WeDLMConfig, WeDLMForCausalLM, WeDLMModel

# By these names the mixins know what kind of model a class is.
modeling_auto.MODEL_MAPPING_NAMES["wedlm"] = "WeDLMModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["wedlm"] = "WeDLMForCausalLM"


class Tester:
    """What the mixins read of a model: sizes, a config, inputs."""

    batch_size, seq_length, num_hidden_layers, num_attention_heads, hidden_size = 3, 7, 2, 4, 32
    is_training = True

    def __init__(self, config_class: type[Any], causal_lm_class: type[Any]):
        self.config_class, self.causal_lm_class = config_class, causal_lm_class

    def get_config(self) -> Any:
        """A tiny model's."""
        own = {"mask_token_id": 3} if self.config_class is WeDLMConfig else {}
        return self.config_class(
            vocab_size=99, hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads, num_key_value_heads=2, head_dim=8, intermediate_size=37,
            max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2, **own,
        )  # fmt: skip

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """The config, and keywords of `forward`."""
        ids = ids_tensor([self.batch_size, self.seq_length], 99)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class Suite(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    config_class: type[Any]

    def setUp(self) -> None:
        self.model_tester = Tester(self.config_class, self.all_model_classes[1])


class WeDLMTest(Suite, unittest.TestCase):
    config_class, all_model_classes = WeDLMConfig, (WeDLMModel, WeDLMForCausalLM)


class Qwen3Test(Suite, unittest.TestCase):
    config_class, all_model_classes = Qwen3Config, (Qwen3Model, Qwen3ForCausalLM)
