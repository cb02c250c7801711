"""In bfloat16 on a CPU, real rows attend one by one: the logits of verified decoding are those of AR, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from test_attach import SMALL, llama
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from wedlm_hf import add_mask_adapter
from wedlm_hf.generation.attention import ROWS_ALIKE, attends_by_row, grouped_mask, grouped_sdpa, keys_of
from wedlm_hf.generation.versions import CACHE, cache_of

MODULE = SimpleNamespace(num_key_value_groups=3, is_causal=True)


def test_a_row_that_attends_alone_has_the_bits_of_an_ar_step():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 5, 16, generator=generator).bfloat16()
    key, value = torch.randn(2, 1, 2, 45, 16, generator=generator).bfloat16()
    keys = torch.arange(45)
    # The root, a draft, its sibling behind the root, and two masks behind that one.
    seen = [keys < 41, keys < 42, (keys < 41) | (keys == 42), (keys < 41) | ((keys > 41) & (keys < 44)), keys != 41]
    visible = torch.stack(seen)[None, None]

    mask = grouped_mask(visible[:, :, 3:], 3, torch.bfloat16)
    output = grouped_sdpa(query, key, value, mask, [keys_of(row) for row in seen[:3]])

    together = grouped_sdpa(query, key, value, grouped_mask(visible, 3, torch.bfloat16))
    torch.testing.assert_close(output, together, rtol=0, atol=0.02)
    assert output.shape == together.shape
    for row, own in enumerate(seen[:3]):
        ar, _ = sdpa_attention_forward(MODULE, query[:, :, row : row + 1], key[:, :, own], value[:, :, own], None)
        assert torch.equal(output[:, row : row + 1], ar)


@pytest.mark.parametrize(
    ("do_sample", "attention", "autocast"),
    [(False, "sdpa", False), (True, "sdpa", False), (False, "eager", False), (False, "sdpa", True)],
)
def test_logits_in_bfloat16_are_those_of_ar_to_the_bit(do_sample, attention, autocast):
    assert not attends_by_row(llama())
    # Widths of whole vectors, as in real models: what is left over is computed by other instructions.
    model = llama(hidden_size=128, intermediate_size=256, vocab_size=128, initializer_range=0.1)
    model = model.to(torch.float32 if autocast else torch.bfloat16)
    model.set_attn_implementation(attention)
    add_mask_adapter(model, SMALL)
    model.mask_adapter.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        assert attends_by_row(model)
        for layer in (each for each in model.modules() if isinstance(each, torch.nn.Linear)):
            for rows in torch.randn(20, ROWS_ALIKE, layer.in_features).bfloat16():  # few of them have other bits
                if not torch.equal(torch.cat([layer(row[None]) for row in rows]), layer(rows)):
                    pytest.skip("the matrix products of this processor give a row other bits in company")
        assert sum(accepted_of_an_answer(model, seed, do_sample) for seed in range(2))


def accepted_of_an_answer(model, seed, do_sample):
    """Compares the logits of an answer with those of forwards of one row each, over the tokens that were found."""
    prompt = torch.randint(4, 60, (1, 9), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    options = {"max_new_tokens": 24, "do_sample": do_sample, "output_logits": True, "return_dict_in_generate": True}
    found = model.generate(prompt, strategy="wedlm", verification="exact", slot_cost=0.0, **options)
    cache, ids = None, prompt
    for logits, token in zip(found.logits, found.sequences[0, 9:], strict=True):
        step = model(ids, **{CACHE: cache}, use_cache=True)
        assert torch.equal(step.logits[:, -1].float(), logits)
        cache, ids = cache_of(step), token[None, None]
    return int(found.stats.accepted.sum())
