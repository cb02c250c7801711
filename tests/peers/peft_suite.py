"""PEFT's own tests of decoders, put to WeDLM, and to Qwen3 for comparison. Run by `make test-peers`."""

import sys
import types

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_tokenizer
from wedlm_hf.modeling_wedlm import WeDLMConfig, WeDLMForCausalLM

sys.modules.setdefault("diffusers", types.SimpleNamespace(StableDiffusionPipeline=type(None)))  # asked for types alone
from peft_tests import test_decoder_models as tests  # noqa: E402

TOKENIZER = load_tokenizer(NANO)
SIZES = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "tiny-wedlm": lambda: WeDLMForCausalLM(WeDLMConfig(**SIZES, mask_token_id=3)),
    "tiny-qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}
for models in (tests.PEFT_DECODER_MODELS_TO_TEST, tests.SMALL_GRID_MODELS):
    models[:] = MODELS


@pytest.fixture(scope="module", autouse=True)
def _models(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        make().save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


class TestDecoders(tests.TestDecoderModels):
    pass


# Those that name models of the Hub.
for name in dir(TestDecoders):
    marks = [mark for mark in getattr(getattr(TestDecoders, name), "pytestmark", ()) if mark.name == "parametrize"]
    if name.startswith("test_") and not any("model_id" in mark.args[0] for mark in marks):
        setattr(TestDecoders, name, None)
