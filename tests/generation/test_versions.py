"""Both names of the cache: what transformers calls `past_key_values` up to 5.23, and `cache` since 5.24."""

import inspect
import warnings

import pytest
import torch
from test_mask_adapter import with_adapter
from tiny import stock_twin, tiny_model
from transformers import DynamicCache

from wedlm_hf.generation.cache import WindowCache
from wedlm_hf.generation.versions import CACHE, OTHER_NAME, cache_of

IDS = torch.tensor([[5, 17, 40, 8, 60, 31]])
EXACT = {"strategy": "wedlm", "verification": "exact", "max_new_tokens": 6}
# A stock class takes the names that transformers gives it; ours takes both with every transformers.
STOCK_NAMES = ("cache", "past_key_values") if CACHE == "cache" else ("past_key_values",)


def attached():
    return with_adapter(stock_twin(tiny_model(), "sdpa"))


CALLS = [
    *[
        (kind, name)
        for kind in ("causal", "backbone", "attached causal")
        for name in ("cache", "past_key_values", None)
    ],
    *[("attached stock", name) for name in (*STOCK_NAMES, None)],
]


@pytest.mark.parametrize(("kind", "name"), CALLS)
@torch.no_grad()
def test_a_forward_takes_the_cache_by_either_name_and_by_position(kind, name):
    model = {"attached causal": lambda: with_adapter(tiny_model()), "attached stock": attached}.get(kind, tiny_model)()
    model = model.model if kind == "backbone" else model
    cache = DynamicCache(config=model.config)

    def step(ids):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers', of a caller that uses the older name
            return model(ids, None, None, cache, use_cache=True) if name is None else model(ids, **{name: cache})

    first, second = step(IDS[:, :4]), step(IDS[:, 4:])
    assert cache.get_seq_length() == 6 and cache_of(first) is cache
    whole = model(IDS)
    torch.testing.assert_close(second[0], whole[0][:, 4:], atol=1e-5, rtol=1e-4)
    assert CACHE in second and second[CACHE] is cache


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("make", [tiny_model, attached], ids=["causal", "attached stock"])
def test_generate_goes_on_from_a_cache_by_either_name(make, name):
    model = with_adapter(make()) if make is tiny_model else make()
    first = model.generate(IDS, **EXACT, return_dict_in_generate=True)
    cache = cache_of(first)
    assert isinstance(cache, WindowCache) and first[CACHE] is cache
    expected = model.generate(first.sequences, **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = model.generate(first.sequences, **EXACT, **{name: cache})
    assert found.tolist() == expected.tolist()


def test_both_names_at_once_are_refused():
    model, cache = tiny_model(), DynamicCache()
    with pytest.raises(TypeError, match=f"two names of one argument: pass `{CACHE}` alone"):
        model(IDS, cache=cache, past_key_values=DynamicCache())
    if CACHE == "past_key_values":  # otherwise transformers takes the newer one, with a warning
        with pytest.raises(TypeError, match="two names of one argument"):
            model.generate(IDS, **EXACT, **{CACHE: WindowCache(), OTHER_NAME: WindowCache()})


def test_the_signature_shows_the_installed_transformers_name():
    for function in (tiny_model().forward, tiny_model().model.forward):
        names = list(inspect.signature(function).parameters)
        assert names[3] == CACHE and OTHER_NAME not in names


def test_decoding_warns_of_nothing(recwarn):
    for model in (tiny_model(), attached()):
        for more in ({}, {"do_sample": True}, {"num_return_sequences": 2, "do_sample": True}):
            model.generate(IDS, **EXACT, **more)
    tiny_model().generate(IDS, strategy="wedlm", max_new_tokens=6)
    tiny_model().generate(IDS, max_new_tokens=6)
    assert not [str(each.message) for each in recwarn if issubclass(each.category, FutureWarning)]
