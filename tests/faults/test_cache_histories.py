"""Histories of calls on one cache, with an exception at any line of our code: every later answer is a cold start's, or
there is a clear error.

`CACHE_HISTORIES=2000 pytest tests/faults/test_cache_histories.py -s` tries that many and prints what was tried.
"""

import gc
import os
import re
import sys
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from test_branches import adapted, foreseeing  # noqa: F401
from test_generation import new_tokens, padded
from tiny import PAD, VOCAB_SIZE, tiny_model
from transformers.generation.streamers import BaseStreamer

from wedlm_hf.generation import WindowCache, cache
from wedlm_hf.generation.versions import CACHE
from wedlm_hf.modeling_wedlm import modeling_wedlm

PHASES = [Phase.generate] + [Phase.shrink] * ("SHRINK" in os.environ)
HISTORIES = int(os.environ.get("CACHE_HISTORIES", "30"))
OUR_FOLDERS = tuple(str(Path(module.__file__).parent) + os.sep for module in (cache, modeling_wedlm))
NEW_TOKENS = 6
ENDS = [107, 151, 166, 227, 40, 77, 9]

CALLS = {
    "none": {"strategy": "wedlm", "entropy_threshold": 1.0},
    "exact": {"strategy": "wedlm", "verification": "exact"},
    "block": {"strategy": "block", "window_size": 4, "entropy_threshold": 1.0},
    "fixed": {"strategy": "wedlm", "verification": "exact", "window_size": 4},
}
CLEAR = re.compile("does not belong to the prompt|The cache holds .* rows, but|Nothing tells whether a cache belongs")


@contextmanager
def fault_at(line, hit, error):
    """Raises `error` where the `line`-th distinct line of our code runs for the `hit`-th time; never for `line` 0."""
    seen, hits = {}, 0

    def trace(frame, event, arg):
        nonlocal hits
        if event == "call":
            return trace if frame.f_code.co_filename.startswith(OUR_FOLDERS) else None
        place = frame.f_code, frame.f_lineno
        if event == "line" and seen.setdefault(place, len(seen) + 1) == line:
            hits += 1
            if hits == hit:
                raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace if line else before)
    try:
        yield
    finally:
        sys.settrace(before)


# A call runs about 900 distinct lines of ours.
lines = st.integers(1, 900)
errors = st.sampled_from([MemoryError, KeyboardInterrupt])
NO_FAULT = 0, 1, MemoryError
faults = st.one_of(st.just(NO_FAULT), st.tuples(lines, st.sampled_from([1, 1, 2, 5]), errors))


class Failing(BaseStreamer):
    """A user's streamer, criterion or processor that fails when it is called for the n-th time."""

    def __init__(self, calls):
        self.calls = calls

    def put(self, value):
        self.calls -= 1
        if self.calls == 0:
            raise RuntimeError("the user's callback failed")

    def end(self):
        self.put(None)

    def stop(self, input_ids, scores, **kwargs):
        self.put(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def process(self, input_ids, scores):
        self.put(scores)
        return scores


CALLBACKS = {
    "none": lambda calls: {},
    "streamer": lambda calls: {"streamer": Failing(calls)},
    "criterion": lambda calls: {"stopping_criteria": [Failing(calls).stop]},
    "processor": lambda calls: {"logits_processor": [Failing(calls).process]},
}


class Histories(RuleBasedStateMachine):
    """`texts` are the last call's prompts and answers."""

    tried = Counter()
    cold_answers = {}
    answers = defaultdict(list)  # of the call under way: what drafts are made of

    @initialize(has_branches=st.booleans())
    def begin(self, has_branches):
        self.model = self.models[has_branches]
        self.cache = WindowCache()
        self.texts = [[20, 31, 9]]
        self.has_failed = False

    def prompts(self, kind, seed):
        random = Random(seed)
        tokens = [random.randrange(4, VOCAB_SIZE) for _ in range(12)]
        if kind == "on":
            return [text + tokens[row : row + 1 + seed % 3] for row, text in enumerate(self.texts)]
        if kind == "fork":
            return [text[: random.randint(1, len(text))] + tokens[:2] for text in self.texts]
        if kind == "new":
            return [tokens[row : row + random.randint(1, 6)] for row in range(random.choice([1, 1, 2, 3]))]
        return self.texts

    def answer(self, prompts, call, cache, embeds=False, **more):
        """New tokens of each row."""
        inputs = padded(prompts)
        width = 0 if embeds else inputs["input_ids"].shape[1]
        if embeds:
            inputs["inputs_embeds"] = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": ENDS, "pad_token_id": PAD, "suppress_tokens": [3]}
        return new_tokens(
            self.model.generate(**inputs, **options, **CALLS[call], **more, **{CACHE: cache}), width, ENDS
        )

    def cold(self, prompts, call):
        key = self.model, str(prompts), call
        if key not in self.cold_answers:
            self.answers.clear()
            self.cold_answers[key] = self.answer(prompts, call, None)
        return self.cold_answers[key]

    @rule(
        kind=st.sampled_from(["on", "on", "same", "fork", "new"]), seed=st.integers(0, 9),
        call=st.sampled_from(sorted(CALLS)),
        callback=st.sampled_from(["processor", "none", "streamer", "criterion", "none"]), calls=st.integers(1, 12),
        fault=faults,
    )  # fmt: skip
    def generate(self, kind, seed, call, callback, calls, fault):
        if call in ("none", "block") and callback == "processor":
            callback = "criterion"
        self.run(self.prompts(kind, seed), call, fault, **CALLBACKS[callback](calls))

    @rule(seed=st.integers(0, 9), call=st.sampled_from(["none", "exact"]), fault=faults)
    def generate_from_embeddings(self, seed, call, fault):
        self.run(self.prompts("on" if seed % 2 else "new", seed), call, fault, embeds=True)

    def failed(self, error):
        assert "injected" in str(error) or "callback failed" in str(error)
        self.tried["faults"] += 1
        self.has_failed = True

    def refused(self, error):
        assert CLEAR.search(str(error)), error
        self.tried["refused"] += 1

    def run(self, prompts, call, fault, **how):
        """Asks; an answer must be the expected one, and a failure must leave nothing."""
        expected = self.cold(prompts, call)
        self.tried["calls"] += 1
        self.answers.clear()
        self.answers.update(enumerate(expected))
        before, was_warm = list(self.cache.lengths), any(self.cache.lengths)
        try:
            with torch.no_grad(), fault_at(fault[0], fault[1], fault[2]("injected")):
                found = self.answer(prompts, call, self.cache, **how)
        except (MemoryError, KeyboardInterrupt, RuntimeError) as error:
            self.failed(error)
            lengths = self.cache.lengths  # it may have failed before the cache was touched
            assert not any(lengths) or all(now <= then for now, then in zip(lengths, before, strict=True))
        except ValueError as error:
            self.refused(error)
            assert self.cache.lengths == before
        else:
            assert found == expected
            self.tried["answers"] += 1
            self.tried["answers after a fault"] += self.has_failed and was_warm
            self.texts = [prompt + row for prompt, row in zip(prompts, found, strict=True)]
            if len(self.cache.lengths) != len(self.texts):
                self.cache = WindowCache()

    @rule(count=st.integers(0, 6))
    def crop(self, count):
        self.cache.crop(-count)

    @rule(seed=st.integers(0, 9), fault=faults)
    def select(self, seed, fault):
        if not any(self.cache.lengths):
            return
        random = Random(seed)
        chosen = [random.randrange(len(self.texts)) for _ in range(random.randint(1, 3))]
        try:
            with fault_at(fault[0] % 20, 1, fault[2]("injected")):
                self.cache.batch_select_indices(torch.tensor(chosen))
        except (MemoryError, KeyboardInterrupt) as error:
            self.failed(error)
            return
        self.texts = [self.texts[index] for index in chosen]

    def teardown(self):
        """A history ends with a call that nothing disturbs."""
        if hasattr(self, "cache"):
            self.generate("on", 1, "exact", "none", 0, NO_FAULT)
            self.tried["histories"] += 1
            if self.tried["histories"] % 100 == 0:
                print(dict(self.tried), flush=True)


def test_after_a_fault_at_any_line_an_answer_is_that_of_a_cold_start_or_a_clear_error(foreseeing):  # noqa: F811
    foreseeing(Histories.answers, errors=0.3)
    Histories.models = tiny_model().double(), adapted().double()
    how = settings(
        max_examples=HISTORIES, stateful_step_count=10, phases=PHASES, report_multiple_bugs=False, database=None,
        derandomize="CACHE_HISTORIES" not in os.environ,
    )  # fmt: skip
    run_state_machine_as_test(Histories, settings=how)
    print(dict(Histories.tried))
    assert Histories.tried["histories"] >= HISTORIES and Histories.tried["answers after a fault"] > 0


def test_a_call_leaves_no_tensor_to_the_garbage_collector():
    """It would come gigabytes later."""
    model, prompt = tiny_model(), torch.tensor([[5, 6, 7]])

    def call_all():
        for how in (*CALLS.values(), CALLS["fixed"] | {"cache_implementation": "static"}):
            model.generate(prompt, **how, max_new_tokens=4)
        gc.collect()

    call_all()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call_all()
        assert not [each for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
