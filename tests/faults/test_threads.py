"""Threads that decode with one model at the same time."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_branches import adapted
from test_generation import generate, prompts_of
from tiny import tiny_model

DECODERS = [{"entropy_threshold": 1.0}, {"verification": "exact", "draft_threshold": 100.0}]


@pytest.mark.parametrize("make", [tiny_model, adapted], ids=["plain", "mask adapter"])
def test_eight_threads_on_one_model_answer_as_one_does(make):
    model = make()
    prompts = [prompts_of(lengths, seed) for seed in range(5) for lengths in ([4], [2, 7])]
    calls = [(rows, options) for rows in prompts for options in DECODERS]

    def answer(call):
        return generate(model, call[0], **call[1], max_new_tokens=8)[1]

    expected = [answer(call) for call in calls]
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns every few lines
    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(answer, calls * 5))
    finally:
        sys.setswitchinterval(switch_interval)
    assert len(found) == 100 and found == expected * 5  # 200 calls with both models
