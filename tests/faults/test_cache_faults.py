"""What the fuzzer of cache histories found, one by one."""

import pytest
import torch
from test_branches import adapted
from tiny import MASK

TEXT = torch.tensor([[20, 31, 9, 111]])
AR = {"max_new_tokens": 6, "suppress_tokens": [MASK]}


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
