"""Answers that follow a JSON schema: valid, and AR's under the same constraint."""

import json
import random
from copy import deepcopy

import pytest
import torch
from json_schemas import DECODERS, PROMPTS, answers, fault, random_schema
from tiny import EOS, PAD

from wedlm_hf import add_mask_adapter
from wedlm_hf.eval.measure import pad_left
from wedlm_hf.eval.prompts import encode
from wedlm_hf.generation.grammar import Grammar, JSONConstraint, Thoughts

STATIC = {"cache_implementation": "static", "disable_compile": True}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 4}


@pytest.mark.parametrize("seed", [0, 3, 40])
def test_answers_follow_a_random_schema_and_are_those_of_ar_decoding_one_by_one_and_in_batches(nano, seed):
    schema = random_schema(random.Random(seed))
    expected, _ = answers(*nano, schema, PROMPTS, 40, **DECODERS["ar"])
    for count in (1, len(PROMPTS)):
        texts, _ = answers(*nano, schema, PROMPTS[:count], 40, **DECODERS["exact"], slot_cost=0.0)  # many drafts
        assert texts == expected[:count]
        assert all(said is None or said.startswith("cut off") for said in (fault(text, schema) for text in texts))


@pytest.mark.parametrize(("seed", "has_adapter"), [(seed, seed % 3 > 0) for seed in range(12)])
def test_any_cache_window_batch_and_limit_give_ars_text_under_the_same_constraint(model, tokenizer, seed, has_adapter):
    chance = random.Random(seed)
    used = deepcopy(model)
    if has_adapter:
        add_mask_adapter(used)
    for _ in range(3):
        schema = chance.choice([{"type": "object"}, NUMBERS, {"const": "Ada"}, random_schema(chance)])
        generator, rows = torch.Generator().manual_seed(seed), chance.randrange(1, 4)
        prompts = [torch.randint(4, 300, (chance.randrange(1, 13),), generator=generator) for _ in range(rows)]
        inputs = pad_left([prompt.tolist() for prompt in prompts], PAD, used.device)
        grammar, limit = Grammar(tokenizer, schema), chance.choice([1, 2, 9, 30])
        thoughts = chance.choice([None, None, Thoughts(tokenizer, "0")])
        cache = chance.choice([{}, STATIC])
        how = {**DECODERS["exact"], **cache, "window_size": chance.choice([None, 1, 2, 3, 6, 12])}

        def answer(settings, inputs=inputs, limit=limit, about=(grammar, [EOS], thoughts)):
            constraint = JSONConstraint(*about)
            return used.generate(**inputs, max_new_tokens=limit, logits_processor=[constraint], **settings).tolist()

        assert answer(how) == answer(DECODERS["ar"]), (schema, how)


@pytest.mark.parametrize(
    "cache", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=["own", "static"]
)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("has_adapter", [False, True], ids=["own-masks", "adapter"])
def test_an_answer_may_end_inside_a_draft_and_a_grammar_may_allow_no_draft(
    model, tokenizer, monkeypatch, cache, window, has_adapter
):
    used, ids = deepcopy(model), torch.randint(4, 300, (2, 7), generator=torch.Generator().manual_seed(0))
    if has_adapter:
        add_mask_adapter(used)
    grammar, asked, allows = Grammar(tokenizer, {"const": "Ada"}), [], JSONConstraint.allows
    how = {"max_new_tokens": 12, "return_dict_in_generate": True, "pad_token_id": PAD}

    def answer(**settings):
        return used.generate(ids, logits_processor=[JSONConstraint(grammar, [EOS])], **how, **settings)

    def watched(constraint, path):
        asked.append((path[-1], allows(constraint, path)))
        return asked[-1][1]

    expected = answer(**DECODERS["ar"]).sequences
    monkeypatch.setattr(JSONConstraint, "allows", watched)
    output = answer(**DECODERS["exact"], **cache, window_size=window)
    assert torch.equal(output.sequences, expected) and (EOS, True) in asked
    assert (output.stats.forwards < output.stats.new_tokens).all()
    monkeypatch.setattr(JSONConstraint, "allows", lambda *_: False)
    output = answer(**DECODERS["exact"], **cache, window_size=window)
    assert torch.equal(output.sequences, expected) and not output.stats.accepted.any()


COUNTING = [f"Count from 5 to {last} by 5." for last in (20, 35)]


@pytest.mark.parametrize("closing", ["</think>", "<|im_start|>", ", 25", "0"])
def test_thoughts_are_ars_without_a_constraint_up_to_their_end_and_the_json_follows(nano, closing):
    """What ends them is a text that the model writes, or one that stands where it would end its answer."""
    model, tokenizer = nano
    grammar, thoughts, ends = Grammar(tokenizer, NUMBERS), Thoughts(tokenizer, closing), [tokenizer.eos_token_id]
    ids = [encode(tokenizer, [{"role": "user", "content": text}]) for text in COUNTING]
    found = []
    exact = DECODERS["exact"] | {"slot_cost": 0.0}
    for settings, batch in ((DECODERS["ar"], ids), (exact, ids), *((exact, [each]) for each in ids)):
        inputs = pad_left(batch, tokenizer.pad_token_id, model.device)
        constraint = JSONConstraint(grammar, ends, thoughts)
        output = model.generate(**inputs, max_new_tokens=90, logits_processor=[constraint], **settings)
        width = inputs["input_ids"].shape[1]
        found += [tokenizer.decode(row[width:]).partition("<|im_end|>")[0] for row in output]
    assert found == found[: len(COUNTING)] * (len(found) // len(COUNTING))
    for text, last in zip(found, (20, 35), strict=False):
        plain = ", ".join(map(str, range(5, last + 1, 5)))
        before, _, answer = text.partition(closing)
        assert before == plain.partition(closing)[0]
        assert all(0 <= number <= 99 for number in json.loads(answer))


def test_a_character_that_is_not_whole_does_not_end_thoughts(tokenizer):
    constraint = JSONConstraint(Grammar(tokenizer, NUMBERS), [EOS], Thoughts(tokenizer, "</think>"))
    scores = torch.zeros(1, 300)
    scores[0, EOS] = 1
    whole = tokenizer("aé").input_ids
    allowed = [constraint(torch.tensor([[5, *whole[:count]]]), scores).isfinite() for count in range(len(whole) + 1)]
    first = tokenizer("</think>").input_ids[0]
    assert [row.nonzero().tolist() == [[0, first]] for row in allowed] == [True, True, False, True]


@pytest.mark.parametrize("settings", DECODERS.values(), ids=DECODERS)
def test_samples_follow_the_schema_too(model, tokenizer, settings):
    prompts = torch.randint(4, 300, (3, 5), generator=torch.Generator().manual_seed(0))
    constraint = JSONConstraint(Grammar(tokenizer, NUMBERS), [EOS])
    torch.manual_seed(0)
    sampled = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 40}
    for row in model.generate(prompts, **settings, **sampled, logits_processor=[constraint])[:, 5:]:
        numbers = json.loads(tokenizer.decode(row, skip_special_tokens=True))
        assert 0 < len(numbers) <= 4 and all(0 <= number <= 99 for number in numbers)


def test_what_is_allowed_depends_on_the_answer_alone_in_whatever_order_it_is_asked_for(tokenizer):
    grammar, chance = Grammar(tokenizer, NUMBERS), random.Random(0)
    prompt, scores = [9, 9], torch.zeros(1, 320)
    kept, answers_so_far = JSONConstraint(grammar), [[]]
    assert kept(torch.tensor([prompt]), scores).isfinite().any()
    for _ in range(140):
        answer = chance.choice(answers_so_far)
        allowed = kept(torch.tensor([[*prompt, *answer]]), scores)[0].isfinite()
        fresh = JSONConstraint(grammar)
        fresh(torch.tensor([prompt]), scores)
        assert torch.equal(fresh(torch.tensor([[*prompt, *answer]]), scores)[0].isfinite(), allowed)
        assert allowed.any() and not allowed[len(tokenizer) :].any()
        token = int(chance.choice(allowed.nonzero()))
        if token != EOS:
            answers_so_far.append([*answer, token])
    assert len(kept.states) <= 128


def test_a_row_of_the_model_that_is_no_token_of_the_tokenizer_is_not_allowed_and_breaks_nothing(tokenizer):
    constraint, rows = JSONConstraint(Grammar(tokenizer, NUMBERS), [EOS]), len(tokenizer) + 9
    constraint(torch.tensor([[9]]), scores := torch.zeros(1, rows))
    (first, *_) = constraint(torch.tensor([[9]]), scores)[0].isfinite().nonzero()[:, 0].tolist()
    for answer in ([rows - 1], [first, rows - 1], [first, rows - 1, 5]):
        assert not constraint.allows(answer) and constraint.allows([first])
    allowed = JSONConstraint(Grammar(tokenizer, NUMBERS), [EOS])
    allowed(torch.tensor([[9]]), scores)
    behind = torch.tensor([[9, first]])
    assert constraint(behind, scores).equal(allowed(behind, scores))


def test_what_a_schema_leaves_no_choice_about_is_drafted_behind_what_masks_say(nano):
    model, tokenizer = nano
    prompt = tokenizer(PROMPTS[0], return_tensors="pt")
    schema = {"type": "object", "properties": {"population": {"enum": [5, 10]}, "city": {"const": "London"}},
              "required": ["population", "city"], "additionalProperties": False}  # fmt: skip
    silent = type("Silent", (JSONConstraint,), {"ahead": lambda *_: []})
    for branches in ({}, STATIC):
        settings = {**DECODERS["exact"], "slot_cost": 0.04, "max_new_tokens": 60, **branches}
        constraints = [kind(Grammar(tokenizer, schema)) for kind in (JSONConstraint, silent)]
        with_ahead, without = (
            model.generate(**prompt, **settings, logits_processor=[each], return_dict_in_generate=True)
            for each in constraints
        )
        assert with_ahead.sequences.tolist() == without.sequences.tolist()
        assert with_ahead.stats.forwards.item() < 0.7 * without.stats.forwards.item()


def test_a_constraint_expects_what_it_forces_and_what_the_answer_did_before(tokenizer):
    schema = {"type": "object", "properties": {"ab": {"const": 7}, "cb": {"const": 7}}, "required": ["ab", "cb"],
              "additionalProperties": False}  # fmt: skip
    constraint = JSONConstraint(Grammar(tokenizer, schema))
    answer = tokenizer.encode('{"ab":7,"', add_special_tokens=False)
    expected = constraint.ahead(answer, 12)
    text = tokenizer.decode([*answer, *(token for token, _ in expected)], skip_special_tokens=True)
    assert text == '{"ab":7,"cb":7' and expected[0][1] == 1.0
    assert None in [chance for _, chance in expected]  # no space before and behind the colon, as before
    assert constraint.ahead(answer, 2) == expected[:2]
    whole = tokenizer.encode('{"ab":7,"cb":7}', add_special_tokens=False)
    assert constraint.ahead(whole, 4) == [(EOS, 1.0)] and constraint.ahead([*whole, EOS], 4) == []
    assert constraint.allows([*answer, expected[0][0]]) and not constraint.allows([*answer, answer[0]])
    assert not constraint.allows([*answer, EOS])


def test_a_constraint_is_for_one_call_and_its_schema_is_checked_before(model, tokenizer):
    prompt = torch.tensor([[5, 6, 7]])
    constraint = JSONConstraint(Grammar(tokenizer, NUMBERS))
    output = model.generate(prompt, strategy="ar", max_new_tokens=20, logits_processor=[constraint])
    for other in (torch.cat([output, prompt], 1), prompt[:, :2]):
        with pytest.raises(ValueError, match="make another for each call of `generate`"):
            model.generate(other, strategy="ar", max_new_tokens=2, logits_processor=[constraint])
    with pytest.raises(ValueError, match="JSONConstraint needs the tokens before each position"):
        model.generate(prompt, strategy="wedlm", logits_processor=[JSONConstraint(Grammar(tokenizer, NUMBERS))])
    refused = [({"type": "x"}, "type"), ({"uniqueItems": True}, r'keys: \["uniqueItems"\]'), ({"enum": []}, "empty"),
               ({"$ref": "#"}, "NoExtensionBias$")]  # fmt: skip
    for schema, said in refused:
        with pytest.raises(ValueError, match=f"The JSON schema cannot be followed: .*{said}"):
            Grammar(tokenizer, schema)


def test_a_grammar_without_its_library_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setattr("wedlm_hf.generation.grammar.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"llguidance: pip install 'wedlm-hf\[grammar\]'"):
        Grammar(tokenizer)
