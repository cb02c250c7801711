"""Drafts from the text: what the slow search finds, and AR's own output in fewer forwards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_branches import adapted, ar_outputs
from test_generation import generate, prompts_of

from wedlm_hf.generation.lookup import AGREED_MATCH, LONGEST_MATCH, OCCURRENCES, SURE_MATCH, TextLookup

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def continued(text, known, least, count):
    """The continuation of the longest earlier occurrence of what ends with `known`, by comparing everywhere."""
    whole = text + known
    matches = []
    for end in range(1, min(len(text), len(whole) - 1) + 1):
        length = 0
        while length < min(end, LONGEST_MATCH + len(known)) and text[end - 1 - length] == whole[-1 - length]:
            length += 1
        if length >= 2:
            matches.append((length, end))
    matches = [(length, end) for length, end in matches[-OCCURRENCES:] if length >= least]
    if not matches:
        return []
    _, end = max(matches)
    found = list(whole)
    for place in range(end, end + count):
        found.append(found[place])
    return known + found[len(whole) :]


@settings(max_examples=300, deadline=None)
@given(text=TOKENS, drafts=st.lists(st.integers(0, 2), max_size=3), count=st.integers(1, 9), cut=st.integers(0, 40))
def test_drafts_are_those_of_a_search_everywhere(text, drafts, count, cut):
    lookup = TextLookup()
    if text[:cut]:
        lookup.drafts(text[:cut], drafts, count)  # an earlier step
    expected = continued(text, [], SURE_MATCH, count) or (
        continued(text, drafts[:1], AGREED_MATCH, count) if drafts else []
    )
    assert lookup.drafts(text, drafts, count) == expected[:count]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.05, "top_k": 0}])
def test_answers_that_repeat_themselves_are_those_of_ar_decoding_in_fewer_forwards(sampling, monkeypatch):
    model = adapted(initializer_range=0.1)
    forwards = {}
    for is_on in (True, False):
        if not is_on:
            monkeypatch.setattr(TextLookup, "drafts", lambda *arguments: [])
        forwards[is_on] = 0
        for seed, prompt in enumerate(prompts_of([5, 9, 3, 7], seed=2)):
            torch.manual_seed(seed)
            output, (row,) = generate(model, [prompt], verification="exact", slot_cost=0.01, **sampling)
            torch.manual_seed(seed)
            if is_on and not sampling:
                assert row == ar_outputs(model, [prompt])[0]
            assert row == generate(model, [prompt], verification="exact", slot_cost=1000.0, **sampling)[1][0]
            forwards[is_on] += output.stats.forwards.item()
    assert forwards[True] < forwards[False]
