"""`import wedlm_hf` alone: what it makes known to transformers and PEFT, and what stock models say then."""

import subprocess
import sys

import pytest
import torch
from tiny import stock_twin, tiny_model

SEEN = """
import sys
import wedlm_hf
assert not [each for each in sys.meta_path if str(getattr(each, "__module__", "")).startswith("wedlm_hf")]
from transformers import AutoConfig, AutoModelForCausalLM
assert type(AutoConfig.for_model("wedlm")) in AutoModelForCausalLM._model_mapping
import peft
assert "MASK_ADAPTER" in {kind.value for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING}
"""


def test_imported_before_transformers_and_peft_it_registers_with_both():
    """Imported behind them: `test_versions.OTHER_VERSIONS`."""
    result = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "bitsandbytes" not in result.stderr and "gemm" not in result.stderr  # of its import by PEFT


def test_a_stock_model_says_what_parallel_decoding_needs():
    model = stock_twin(tiny_model())
    with pytest.raises(ValueError, match=r"`strategy='wedlm'` decodes in parallel, which Qwen3ForCausalLM cannot"):
        model.generate(torch.tensor([[7, 8]]), strategy="wedlm", max_new_tokens=2)
    with pytest.raises(ValueError, match="model_kwargs"):
        model.generate(torch.tensor([[7, 8]]), stratgy="wedlm", max_new_tokens=2)
