"""Verified decoding on vLLM gives vLLM's own AR output, whatever else the engine does meanwhile."""

from collections import Counter

import pytest
from vllm import SamplingParams


def tokens_of(outputs):
    return [list(output.token_ids) for output in outputs]


def test_greedy_output_is_the_ar_output_at_batch_1_and_8(ar, verified, prompts, complete, metrics):
    expected = tokens_of(complete(ar, prompts[:24]))
    before = metrics(verified)
    assert tokens_of(complete(verified, prompts[:24])) == expected
    assert [tokens_of(complete(verified, [prompt]))[0] for prompt in prompts[:6]] == expected[:6]
    for start in (0, 8, 16):
        assert tokens_of(complete(verified, prompts[start : start + 8])) == expected[start : start + 8]
    after = metrics(verified)
    drafts, accepted = (after[name] - before[name] for name in ("num_drafts", "num_accepted_tokens"))
    assert 1 + accepted / drafts > 2.2


def test_a_mask_token_in_a_prompt_is_ordinary_text(ar, verified, prompts, complete):
    prompt = [*prompts[0][:4], 3, *prompts[0][4:]]
    assert tokens_of(complete(verified, [prompt])) == tokens_of(complete(ar, [prompt]))


def test_preempted_requests_and_prompts_in_parts_change_nothing(ar, tight, prompts, complete, metrics):
    long = [(prompts[place] + prompts[place + 1] + prompts[place + 2])[:100] for place in range(8)]
    expected = tokens_of(complete(ar, [*long, *prompts[:8]], max_tokens=120))
    assert tokens_of(complete(tight, [*long, *prompts[:8]], max_tokens=120)) == expected
    assert metrics(tight)["num_preemptions"] > 0


def test_prompts_from_the_prefix_cache_change_nothing(ar, verified, prompts, complete, metrics):
    shared = (prompts[0] + prompts[1] + prompts[2])[:64]
    both = [shared + prompts[3], shared + prompts[4]]
    expected = tokens_of(complete(ar, both))
    complete(verified, both[:1])
    before = metrics(verified)["prefix_cache_hits"]
    assert [tokens_of(complete(verified, [prompt]))[0] for prompt in both] == expected
    assert metrics(verified)["prefix_cache_hits"] > before


@pytest.mark.parametrize("room", [1, 2, 3, 5, 20])
def test_answers_may_run_up_to_the_longest_length(ar, verified, prompts, complete, room):
    long = [token for prompt in prompts for token in prompt][: 512 - room]
    for both in ([long], [long, prompts[0], prompts[3]]):
        expected = complete(ar, both, max_tokens=40, ignore_eos=True)
        outputs = complete(verified, both, max_tokens=40, ignore_eos=True)
        assert tokens_of(outputs) == tokens_of(expected)
        assert len(outputs[0].token_ids) == room and outputs[0].finish_reason == "length"


def test_samples_are_distributed_as_ar_samples(ar, verified, prompts, metrics):
    before = metrics(verified)["num_accepted_tokens"]
    for sampling in ({"temperature": 1.3}, {"temperature": 1.8, "top_k": 5, "top_p": 0.9}):
        counts = []
        for engine in (ar, verified):
            params = SamplingParams(n=700, max_tokens=5, seed=5, ignore_eos=True, **sampling)
            output = engine.generate({"prompt_token_ids": prompts[2]}, params, use_tqdm=False)[0]
            counts.append([Counter(tuple(each.token_ids)[:place] for each in output.outputs) for place in (2, 4, 5)])
        for expected, found in zip(*counts, strict=True):
            distance = sum(abs(expected[key] - found[key]) for key in expected | found) / 1400
            # Two samples of 700 from one distribution differ by about half of sqrt(2 · keys / (π · 350)).
            keys = sum(count + found[key] >= 6 for key, count in expected.items()) + 1
            rare = sum(count for key, count in expected.items() if count + found[key] < 6) / 700
            assert distance < 0.75 * (2 * keys / (3.14 * 350)) ** 0.5 + rare, (sampling, distance, keys, rare)
    assert metrics(verified)["num_accepted_tokens"] > before
