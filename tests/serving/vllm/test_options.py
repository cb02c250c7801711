"""The plug-in without vLLM: options of an engine, and the message where vLLM is missing."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
from tiny import edit, tiny_model

from wedlm_hf import add_mask_adapter, save_mask_adapter
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.serving.vllm.options import PROPOSER, EngineOptions


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("name", ["wedlm_hf.serving.vllm:Proposer", "wedlm_hf.serving.vllm.plugin:register"])
def test_without_vllm_the_plug_in_names_the_install(name):
    module, _, attribute = name.partition(":")
    with pytest.raises(ImportError, match=r"pip install '\.\[vllm\]'"):
        getattr(importlib.import_module(module), attribute)


def engine(folder, model, **own):
    config = SimpleNamespace(model=str(folder), hf_config=model.config)
    method = own.pop("rejection_sample_method", "standard")
    spec = SimpleNamespace(model=PROPOSER, num_speculative_tokens=8, rejection_sample_method=method)
    drafting = spec if own.pop("drafts", True) else None
    given = {"speculative_config": drafting, "additional_config": {"wedlm": own}, "model_config": config}
    return SimpleNamespace(**given, lora_config=None)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_an_adapter_of_another_base_is_refused_before_anything_is_loaded(tmp_path, shard):
    base, other = tiny_model(seed=1), tiny_model(seed=2)
    for name, model in {"base": base, "other": other}.items():
        model.save_pretrained(tmp_path / name, max_shard_size=shard)
    add_mask_adapter(base, MaskAdapterSettings(rank=2))
    save_mask_adapter(base, tmp_path / "adapter")
    own = {"mask_adapter": str(tmp_path / "adapter")}

    def check(folder, model, **options):
        config = engine(tmp_path / folder, model, **own, **options)
        EngineOptions.of(config).check(config)

    check("base", base)
    with pytest.raises(ValueError, match=r"another model of this shape.*'any_base': true"):
        check("other", other)
    check("other", other, any_base=True)
    file = tmp_path / "adapter" / "adapter_config.json"
    edit(file, base=json.loads(file.read_text())["base"] | {"hidden_size": 8})
    with pytest.raises(ValueError, match="hidden_size: 8, not"):
        check("base", base, any_base=True)


def test_what_an_engine_may_not_be_asked_for_is_refused():
    model = tiny_model()
    for own, said in (
        ({"always_draft": 1}, "true or false"),
        ({"drafts": False, "always_draft": True}, "goes with `speculative_config`"),
        ({"colour": 1}, "may hold"),
        ({"verification": "none"}, "may hold 'mask_adapter', 'any_base', 'always_draft', got"),
        ({"rejection_sample_method": "block"}, "must be 'standard', got 'block'"),
    ):
        config = engine("folder", model, **own)
        with pytest.raises(ValueError, match=said):
            EngineOptions.of(config).check(config)
