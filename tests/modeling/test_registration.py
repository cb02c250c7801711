"""`import wedlm_hf` alone: what it makes known to transformers and PEFT, and what stock models say then."""

import subprocess
import sys

import pytest
import torch
from tiny import stock_twin, tiny_model

# What transformers imports of others is imported once, before a process is forked for each first import.
SEEN = """
import os, sys
import wedlm_hf
assert not {"torch", "transformers", "peft"} & set(sys.modules)
import huggingface_hub, scipy.optimize, tokenizers
import torch._dynamo, torch.distributed.tensor, torch.nn.attention.flex_attention
assert not {"transformers", "peft"} & set(sys.modules)
for how in sys.argv[1:]:
    if os.fork() == 0:
        exec(how)
        from transformers import AutoConfig, AutoModelForCausalLM
        assert type(AutoConfig.for_model("wedlm")) in AutoModelForCausalLM._model_mapping
        os._exit(0)
    assert os.wait()[1] == 0, how
"""
FIRST = [
    "from transformers import Qwen3ForCausalLM",
    "from transformers import PreTrainedModel; import transformers; transformers.GPT2LMHeadModel",
    "import peft; from transformers import Gemma3ForCausalLM; "
    "assert 'MASK_ADAPTER' in {kind.value for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING}",
]


def test_imported_before_transformers_and_peft_it_loads_neither_and_registers_whatever_of_them_comes_first():
    """After them: test_versions.py."""
    result = subprocess.run([sys.executable, "-c", SEEN, *FIRST], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_stock_model_says_what_parallel_decoding_needs():
    model = stock_twin(tiny_model())
    with pytest.raises(ValueError, match=r"`strategy='wedlm'` decodes in parallel, which Qwen3ForCausalLM cannot"):
        model.generate(torch.tensor([[7, 8]]), strategy="wedlm", max_new_tokens=2)
    with pytest.raises(ValueError, match="model_kwargs"):
        model.generate(torch.tensor([[7, 8]]), stratgy="wedlm", max_new_tokens=2)
