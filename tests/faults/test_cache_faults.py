"""What the fuzzer of cache histories found, one by one."""

import pytest
import torch
from test_branches import adapted
from tiny import MASK, tiny_model

from wedlm_hf.generation import WindowCache

TEXT, NEW = torch.tensor([[20, 31, 9, 111]]), torch.tensor([[50, 51]])
AR = {"max_new_tokens": 6, "suppress_tokens": [MASK]}
EXACT = AR | {"strategy": "wedlm", "verification": "exact"}


def filled(model):
    cache = WindowCache()
    with torch.no_grad():
        model(TEXT, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("length", [2, 5, 6, 7])
def test_new_tokens_alone_follow_a_cache_where_the_mask_covers_both(length):
    """transformers drops a mask of ones, and with it what it says; a mask of the input's length makes it the whole."""
    model, mask = tiny_model(), torch.ones(1, length, dtype=torch.long)
    whole = {2: NEW, 6: torch.cat([TEXT, NEW], dim=1)}

    def answer(**options):
        return model.generate(NEW, attention_mask=mask, past_key_values=filled(model), **options)[:, 2:].tolist()

    if length in whole:
        prompt = whole[length]
        assert answer(**AR) == model.generate(prompt, **AR)[:, prompt.shape[1] :].tolist()
    else:
        with pytest.raises(ValueError, match=f"`attention_mask` is {length} tokens long, but there are 2 in the"):
            answer(**AR)
    if length != 2:
        with pytest.raises(ValueError, match="`attention_mask` must have the shape of `input_ids`"):
            answer(**EXACT)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("before", [0, 4])
def test_a_forward_that_was_cut_off_is_refused_until_it_is_cropped(layer, before):
    model = tiny_model()
    cache = filled(model) if before else WindowCache()

    def fail(*arguments):
        raise KeyboardInterrupt

    handle = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(NEW, past_key_values=cache, use_cache=True)
    handle.remove()
    with torch.no_grad():
        if layer == 0:  # the last layer holds nothing of it
            refused = pytest.raises(ValueError, match="A forward on this cache was cut off before its last layer")
            for _ in range(2):  # a call that is refused leaves it refused
                mask = torch.ones(1, before + 4, dtype=torch.long)
                with refused:
                    model.generate(NEW, attention_mask=mask, **AR, past_key_values=cache)
            with refused:
                model(NEW, past_key_values=cache, use_cache=True)
            cache.crop(-2 if before else -cache.get_seq_length())
        text = torch.cat([TEXT[:, :before], *[NEW] * (1 + layer)], dim=1)
        logits = model(NEW, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(logits, model(text).logits[:, -2:])


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_loops_that_do_not_ask_whose_tokens_a_cache_holds_are_refused(options):
    model = tiny_model()
    with pytest.raises(ValueError, match="Greedy decoding and sampling can use a `WindowCache`"):
        model.generate(TEXT, **AR, **options, past_key_values=WindowCache())


def test_slots_of_an_interrupted_forward_touch_no_other_forward():
    model = adapted()

    def interrupt(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        expected = model(TEXT).logits
        hook = model.model.layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), model.predicting(2):
            model(TEXT)
        hook.remove()
        assert torch.equal(model(TEXT).logits, expected)


def test_embeddings_can_be_decoded_with_a_mask_adapter():
    model = adapted()
    embeds = model.get_input_embeddings()(TEXT)
    given = model.generate(inputs_embeds=embeds, **EXACT)
    assert given.tolist() == model.generate(TEXT, **AR)[:, 4:].tolist()
