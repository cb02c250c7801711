"""What the measuring core counts, and what the AR head says of an answer."""

from types import SimpleNamespace

import pytest
import torch
from tiny import MASK, tiny_model

from wedlm_hf.eval import measure as measuring
from wedlm_hf.eval.measure import Decoding, ForwardCounter, decode, measure
from wedlm_hf.eval.prompts import Prompt

SHORT = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [MASK]}
AR = {"strategy": "ar", **SHORT}
FAST = {"strategy": "wedlm", "entropy_threshold": 2.0, **SHORT}
EXACT = {**FAST, "verification": "exact", "window_size": 16}  # rows of a batch adapt together
PROMPTS = [[20, 40, 9, 31, 77], [11, 12, 13], [50, 60, 70, 80, 90, 100, 110, 120]]


@pytest.mark.parametrize("options", [AR, FAST, EXACT, {**FAST, "strategy": "block"}])
def test_a_batch_counts_for_each_prompt_what_it_costs_alone(model, tokenizer, options):
    together = decode(model, tokenizer, PROMPTS, options)
    for prompt, batched in zip(PROMPTS, together, strict=True):
        (alone,) = decode(model, tokenizer, [prompt], options)
        counts = [(run.tokens, run.text, run.forwards, run.token_instances) for run in (alone, batched)]
        assert counts[0] == counts[1]
        assert alone.text == tokenizer.decode(alone.tokens, skip_special_tokens=True)
        if options is AR:
            assert alone.forwards == len(alone.tokens) == alone.token_instances + 1


def test_answers_end_after_the_first_end_token(model, tokenizer):
    (endless,) = decode(model, tokenizer, PROMPTS[:1], AR)
    end = endless.tokens[4]
    stopping = tiny_model()
    for stopping.generation_config.eos_token_id in (end, [end, 2]):
        for options in (AR, EXACT):
            first, _ = decode(stopping, tokenizer, PROMPTS[:2], options)
            assert first.tokens == endless.tokens[: endless.tokens.index(end) + 1]


def test_the_counter_sees_and_times_every_forward_inside_its_block(model, tokenizer, monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    with ForwardCounter(model) as counter:
        model(torch.tensor([[20, 40]]))
        model(torch.tensor([[20], [40], [9]]))
    model(torch.tensor([[20, 40]]))
    # The clock is read at both ends of the block, and three times for each forward: its start, before and after it.
    assert (counter.starts, counter.spans) == ([1, 4], [1, 1])
    assert counter.moments == [1, 4, 7]
    assert (counter.shapes, counter.forwards) == ([(1, 2), (3, 1)], 2)
    monkeypatch.undo()
    monkeypatch.setattr(ForwardCounter, "_count", lambda self, *args: None)
    with pytest.raises(AssertionError, match="0 forwards were seen"):  # statistics that disagree are noticed
        decode(model, tokenizer, PROMPTS[:1], FAST)


def test_decoders_take_turns_on_each_prompt_after_a_warm_up(model, tokenizer, monkeypatch):
    calls = []

    def recorded(model, tokenizer, prompts, options, **kwargs):
        calls.append((options["strategy"], prompts))
        return [Decoding([1], "", 1, 1, len(calls)) for _ in prompts]  # the clock of call n says n

    monkeypatch.setattr(measuring, "decode", recorded)
    prompts = [Prompt.of(text, tokens=tokens) for text, tokens in zip("ab", PROMPTS, strict=False)]
    rows = measure(model, tokenizer, prompts, {"ar": AR, "wedlm": FAST}, repeats=3)
    turns = [(prompt, repeat, name) for prompt in range(2) for repeat in range(3) for name in ("ar", "wedlm")]
    asked = [("ar", 0), ("wedlm", 0), *((name, prompt) for prompt, _, name in turns)]
    assert calls == [(name, [PROMPTS[prompt]]) for name, prompt in asked]
    seen = [(row["prompt"], row["repeat"], row["decoder"], row["seconds"]) for row in rows]
    assert seen == [(*turn, 3 + number) for number, turn in enumerate(turns)]


def test_tokens_agree_where_ar_would_choose_them_after_the_same_prefix():
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    for options in ({"strategy": "ar"}, {"strategy": "wedlm", "entropy_threshold": 9.0, "window_size": 6}):
        (answer,) = decode(model, None, PROMPTS[:1], {**options, "max_new_tokens": 12, "do_sample": False})
        agreeing = 0
        for index, token in enumerate(answer.tokens):  # one forward for each token, from scratch
            logits = model(torch.tensor([PROMPTS[0] + answer.tokens[:index]])).logits[0, -1]
            logits[MASK] = float("-inf")
            agreeing += int(logits.argmax()) == token
        assert measuring.agreeing_tokens(model, PROMPTS[0], answer.tokens) == agreeing
        assert (agreeing == len(answer.tokens)) == (options["strategy"] == "ar")


def test_entropies_are_those_of_the_distributions_that_ar_chose_from(model):
    prompt = [20, 40, 9, 31]
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    output = model.generate(torch.tensor([prompt]), **options, output_logits=True, return_dict_in_generate=True)
    rows = torch.cat(output.logits).log_softmax(-1)
    wanted = -(rows.exp() * rows).sum(-1).mean()
    assert measuring.answer_entropy(model, prompt, output.sequences[0, 4:].tolist()) == pytest.approx(
        float(wanted), rel=1e-4
    )


def test_a_small_model_gets_one_thread_and_a_large_one_all(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    sizes = {"nano": 1_900_000, "SmolLM2": 135_000_000, "7B": 7_000_000_000}
    with torch.device("meta"):
        models = {name: torch.nn.Linear(size, 1, bias=False) for name, size in sizes.items()}
    assert {name: measuring.default_threads(model) for name, model in models.items()} == {
        "nano": 1,
        "SmolLM2": 7,
        "7B": 8,
    }
