"""What the AR head says of an answer, against its logits one forward at a time."""

import pytest
import torch
from tiny import MASK, tiny_model

from wedlm_hf.eval.ar_head import agreeing_tokens, answer_entropy
from wedlm_hf.eval.measure import decode

PROMPT = [20, 40, 9, 31, 77]
SHORT = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [MASK]}
AR = {"strategy": "ar", **SHORT}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_tokens_agree_where_ar_would_choose_them_after_the_same_prefix():
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    for options in ({"strategy": "ar"}, {"strategy": "wedlm", "entropy_threshold": 9.0, "window_size": 6}):
        (answer,) = decode(model, None, [PROMPT], {**options, "max_new_tokens": 12, "do_sample": False})
        agreeing = 0
        for index, token in enumerate(answer.tokens):  # one forward for each token, from scratch
            logits = model(torch.tensor([PROMPT + answer.tokens[:index]])).logits[0, -1]
            logits[MASK] = float("-inf")
            agreeing += int(logits.argmax()) == token
        assert agreeing_tokens(model, PROMPT, answer.tokens) == agreeing
        assert (agreeing == len(answer.tokens)) == (options["strategy"] == "ar")


def test_a_difference_counts_once_and_not_for_what_follows_it(model):
    def ar(prompt):
        return decode(model, None, [prompt], {**AR, "max_new_tokens": 6})[0].tokens

    answer = ar(PROMPT)
    other = [*answer[:2], answer[2] + 1]
    other += ar(PROMPT + other)[:3]  # what AR goes on with after the difference
    assert agreeing_tokens(model, PROMPT, other) == 5


def test_entropies_are_those_of_the_distributions_that_ar_chose_from(model):
    prompt = [20, 40, 9, 31]
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    rows = torch.cat(output.logits).log_softmax(-1)
    wanted = -(rows.exp() * rows).sum(-1).mean()
    assert answer_entropy(model, prompt, output.sequences[0, 4:].tolist()) == pytest.approx(float(wanted), rel=1e-4)
