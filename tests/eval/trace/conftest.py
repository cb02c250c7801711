"""Traces of a tiny model, recorded once for all tests that only look at them."""

import pytest
from tiny import MASK, tiny_model, tiny_tokenizer

from wedlm_hf.eval.request import AnswerRequest
from wedlm_hf.eval.trace.record import record

PROMPT = "1, 2, 3"


@pytest.fixture(scope="session")
def model():
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    return model


@pytest.fixture(scope="session")
def recorded(model):
    """Records prompts of a few tokens, with the options of `generate` that are given."""

    kept = {}

    def recorded(options, **how):
        key = repr((options, how))
        if key not in kept or "repeats" in how:  # whoever counts repeats looks at what happens meanwhile
            kept[key] = new(options, **how)
        return kept[key]

    def new(options, prompts=(PROMPT,), tokens=24, repeats=1, with_ar=True):
        options = {"strategy": "wedlm", "window_size": 6, "max_new_tokens": tokens, **options}
        request = AnswerRequest(list(prompts), options, with_ar, raw=True, seed=5)
        return record(model, tiny_tokenizer(), request, model_name="tiny", repeats=repeats)

    return recorded
