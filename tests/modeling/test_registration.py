"""`import wedlm_hf` alone: what it makes known to transformers and PEFT, and what stock models say then."""

import subprocess
import sys

import pytest
import torch
from tiny import stock_twin, tiny_model

SEEN = """
import sys, wedlm_hf
assert not {"torch", "transformers", "peft"} & set(sys.modules)
import transformers, peft
assert transformers.AutoConfig.for_model("wedlm").model_type == "wedlm"
assert "MASK_ADAPTER" in {kind.value for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING}
"""


def test_importing_the_package_before_transformers_and_peft_registers_it_and_loads_neither():
    """After them: test_versions.py."""
    result = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("how", [
    "from transformers import LlamaForCausalLM", "from transformers import Qwen3ForCausalLM",
    "import transformers; transformers.GPT2LMHeadModel", "from transformers import PreTrainedModel, Qwen2Model",
    "from peft import PeftModel; from transformers import Gemma3ForCausalLM",
])  # fmt: skip
def test_any_class_of_transformers_may_be_the_first_import_behind_it(how):
    known = "from transformers import AutoConfig, AutoModelForCausalLM; config = AutoConfig.for_model('wedlm')"
    seen = f"import wedlm_hf; {how}; {known}; assert type(config) in AutoModelForCausalLM._model_mapping"
    result = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_stock_model_says_what_parallel_decoding_needs():
    model = stock_twin(tiny_model())
    with pytest.raises(ValueError, match=r"`strategy='wedlm'` decodes in parallel, which Qwen3ForCausalLM cannot"):
        model.generate(torch.tensor([[7, 8]]), strategy="wedlm", max_new_tokens=2)
    with pytest.raises(ValueError, match="model_kwargs"):
        model.generate(torch.tensor([[7, 8]]), stratgy="wedlm", max_new_tokens=2)
