"""What differs between versions of transformers: both names of the cache (`past_key_values` up to 5.23, `cache` since
5.24), versions outside the tested range, and later formats of ours."""

import inspect
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from test_mask_adapter import with_adapter
from tiny import edit, stock_twin, tiny_model
from transformers import DynamicCache

import wedlm_hf
from wedlm_hf import WeDLMForCausalLM, load_mask_adapter, save_mask_adapter
from wedlm_hf.checkpoints.loading import load_model
from wedlm_hf.generation import versions
from wedlm_hf.generation.cache import WindowCache
from wedlm_hf.generation.versions import CACHE, OTHER_NAME, cache_of

IDS = torch.tensor([[5, 17, 40, 8, 60, 31]])
EXACT = {"strategy": "wedlm", "verification": "exact", "max_new_tokens": 6}
MODELS = {
    "causal": tiny_model,
    "backbone": lambda: tiny_model().model,
    "attached causal": lambda: with_adapter(tiny_model()),
    "attached stock": lambda: with_adapter(stock_twin(tiny_model(), "sdpa")),
}
# A stock class takes the names that transformers gives it; ours takes both with every transformers.
NAMES = {kind: {"cache", "past_key_values"} for kind in MODELS} | {"attached stock": {"past_key_values", CACHE}}
OLDER_NAME = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers', of a caller that uses it


@OLDER_NAME
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in MODELS for name in (*sorted(NAMES[kind]), None)])
@torch.no_grad()
def test_a_forward_takes_the_cache_by_either_name_and_by_position(kind, name):
    model = MODELS[kind]()
    cache = DynamicCache(config=model.config)

    def step(ids):
        return model(ids, None, None, cache, use_cache=True) if name is None else model(ids, **{name: cache})

    first, second = step(IDS[:, :4]), step(IDS[:, 4:])
    assert cache.get_seq_length() == 6 and cache_of(first) is second[CACHE] is cache
    torch.testing.assert_close(second[0], model(IDS)[0][:, 4:], atol=1e-5, rtol=1e-4)


@OLDER_NAME
@pytest.mark.parametrize("kind", ["attached causal", "attached stock"])
def test_generate_goes_on_from_a_cache_by_either_name(kind):
    model = MODELS[kind]()
    for name in ("cache", "past_key_values"):
        first = model.generate(IDS, **EXACT, return_dict_in_generate=True)
        assert isinstance(cache_of(first), WindowCache) and first[CACHE] is cache_of(first)
        expected = model.generate(first.sequences, **EXACT).tolist()
        assert model.generate(first.sequences, **EXACT, **{name: cache_of(first)}).tolist() == expected


def test_both_names_at_once_are_refused():
    model, cache = tiny_model(), cache_of(tiny_model()(IDS, use_cache=True))
    with pytest.raises(TypeError, match=f"two names of one argument: pass `{CACHE}` alone"):
        model(IDS, cache=cache, past_key_values=DynamicCache())
    if CACHE == "past_key_values":  # otherwise transformers takes the newer one, with a warning
        with pytest.raises(TypeError, match="two names of one argument"):
            model.generate(IDS, **EXACT, **{CACHE: WindowCache(), OTHER_NAME: WindowCache()})


@torch.no_grad()
def test_generate_reads_the_prefix_of_prefix_tuning():
    model = get_peft_model(tiny_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    for parameter in model.prompt_encoder.parameters():
        parameter.normal_(0, 2)
    expected = []
    for network in (model, model.get_base_model()):
        ids = IDS
        for _ in range(6):
            ids = torch.cat([ids, network(ids).logits[:, -1:].argmax(-1)], dim=1)
        expected.append(ids.tolist())
    found = model.generate(input_ids=IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert found.tolist() == expected[0] != expected[1]


def test_the_signature_shows_the_installed_transformers_name():
    for function in (tiny_model().forward, tiny_model().model.forward):
        names = list(inspect.signature(function).parameters)
        assert names[3] == CACHE and OTHER_NAME not in names


def test_decoding_warns_of_nothing(recwarn):
    for kind in ("causal", "attached stock"):
        for more in ({}, {"do_sample": True}, {"num_return_sequences": 2, "do_sample": True}):
            MODELS[kind]().generate(IDS, **EXACT, **more)
    for strategy in ("wedlm", "ar"):
        tiny_model().generate(IDS, strategy=strategy, max_new_tokens=6)
    assert not [str(each.message) for each in recwarn if issubclass(each.category, FutureWarning)]


def test_the_tested_versions_are_those_that_setup_cfg_and_the_pins_name():
    root, (oldest, newest) = Path(wedlm_hf.__file__).parent, versions.TESTED
    names = ("setup.cfg", "requirements.txt", "requirements-lowest.txt")
    setup, pins, lowest = ((root / name).read_text(encoding="utf-8") for name in names)
    assert f"\n    transformers>={oldest.removesuffix('.0')},<6\n" in setup
    assert f"transformers=={newest}\n" in pins and f"transformers=={oldest}\n" in lowest
    assert f"wedlm-hf {wedlm_hf.__version__.rpartition('.')[0]}" == versions.RELEASE


@pytest.mark.parametrize("version", ["5.19.0", "5.24.9"])
def test_a_tested_transformers_is_nothing_to_speak_of(monkeypatch, caplog, version):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    spec = spec_from_file_location("versions_with_another_transformers", versions.__file__)
    within = module_from_spec(spec)
    spec.loader.exec_module(within)
    within.warn_if_untested()
    assert (caplog.text, within.explained(int)) == ("", int)


# In a process of its own, with one transformers after the other. Beyond the range: a model, another, and an adapter
# on a stock one give one warning; then something deep inside has another signature. Below it: what moved away, and
# what a person types.
OTHER_VERSIONS = """
import gc
gc.disable()  # what is imported stays
import logging, re, sys, torch, transformers, peft
model_class = transformers.Qwen3Model  # puts another module into sys.modules
sys.modules["transformers"].__version__ = "6.0.0.dev0"
import wedlm_hf  # registers what it has with both
assert not [each for each in sys.meta_path if str(getattr(each, "__module__", "")).startswith("wedlm_hf")]
assert type(transformers.AutoConfig.for_model("wedlm")) in transformers.AutoModelForCausalLM._model_mapping
assert "MASK_ADAPTER" in {kind.value for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING}
records = []
logging.getLogger("wedlm_hf").addHandler(handler := logging.Handler())
handler.emit = records.append
from tiny import stock_twin, tiny_model
from test_mask_adapter import with_adapter
model = tiny_model()
attached = with_adapter(stock_twin(model, "sdpa"))
(record,) = records
said = record.getMessage()
from wedlm_hf.generation.versions import RELEASE
assert said.startswith(f"transformers 6.0.0.dev0 is newer than what {RELEASE} was tested with, 5.19 to 5."), said
def fails(*args, **kwargs):
    raise TypeError("got multiple values for argument 'cache'")
model_class.forward = fails
ids = torch.tensor([[5, 6, 7]])
exact = {"strategy": "wedlm", "verification": "exact", "max_new_tokens": 4}
for call in (
    lambda: model(ids), lambda: model.generate(ids), lambda: model.generate(ids, **exact),
    lambda: attached.generate(ids, **exact),
):
    try:
        call()
    except TypeError as error:
        assert error.__notes__[0].startswith("transformers 6.0.0.dev0 is newer") and len(error.__notes__) == 1, error
    else:
        raise AssertionError("nothing failed")

sys.modules["transformers"].__version__ = "5.17.0"
for name in "transformers.core_model_loading", "transformers.masking_utils", "trl":
    sys.modules[name] = None
for statement in (
    *(f"from wedlm_hf import {name}" for name in ("WeDLMForCausalLM", "load_mask_adapter", "convert")),
    "import wedlm_hf.modeling_wedlm", "from wedlm_hf.adapters import save_mask_adapter",
):
    for name in [name for name in sys.modules if name.startswith("wedlm_hf")]:
        del sys.modules[name]
    try:
        exec(statement)
    except ImportError as error:
        assert re.search(r"needs transformers 5\\.19 to 5\\.\\d+, got 5\\.17\\.0: pip ", str(error)), error
    else:
        raise AssertionError(statement)
"""


def test_beyond_the_range_failures_deep_inside_say_so_and_below_it_whatever_is_imported_first_names_the_range():
    result = subprocess.run([sys.executable, "-c", OTHER_VERSIONS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "bitsandbytes" not in result.stderr and "gemm" not in result.stderr  # of its import by PEFT


def test_a_checkpoint_of_a_later_format_is_one_sentence(tmp_path):
    said = rf"The checkpoint has format 2, of a later wedlm-hf, and {versions.RELEASE} reads format 1: pip install -"
    model = with_adapter(tiny_model())
    model.save_pretrained(tmp_path / "model")
    save_mask_adapter(model, tmp_path / "adapter")
    for file in (tmp_path / "model/config.json", tmp_path / "adapter/adapter_config.json"):
        edit(file, wedlm_format=2)
    for load in (
        lambda: WeDLMForCausalLM.from_pretrained(tmp_path / "model"),
        lambda: load_model(str(tmp_path / "model")),
        lambda: load_mask_adapter(tiny_model(), tmp_path / "adapter"),
        lambda: PeftModel.from_pretrained(tiny_model(), str(tmp_path / "adapter")),
    ):
        with pytest.raises(ValueError, match=said):
            load()
