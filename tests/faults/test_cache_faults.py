"""What the fuzzer of cache histories found, one by one."""

import torch
from test_branches import adapted
from tiny import MASK

from wedlm_hf.modeling_wedlm import mask_adapter

TEXT = torch.tensor([[20, 31, 9, 111]])
AR = {"max_new_tokens": 6, "suppress_tokens": [MASK]}
EXACT = AR | {"strategy": "wedlm", "verification": "exact"}


def test_slots_that_an_interrupted_forward_left_behind_touch_no_other_forward():
    model = adapted()
    with torch.no_grad():
        expected = model(TEXT).logits
        weights = model.model.mask_adapter._weights(torch.float32)
        token = mask_adapter._SLOTS.set(mask_adapter._Slots(4, None, weights))
        try:
            assert torch.equal(model(TEXT).logits, expected)
        finally:
            mask_adapter._SLOTS.reset(token)


def test_embeddings_can_be_decoded_with_a_mask_adapter():
    model = adapted()
    embeds = model.get_input_embeddings()(TEXT)
    given = model.generate(inputs_embeds=embeds, **EXACT)
    assert given.tolist() == model.generate(TEXT, **AR)[:, 4:].tolist()
