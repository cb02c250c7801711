"""Options of single requests under verified decoding on vLLM, and the log's word on whether drafts gain."""

import pytest
from vllm.exceptions import VLLMClientError

from wedlm_hf.generation.step_times import StepTimes
from wedlm_hf.serving.vllm import proposer


def tokens_of(outputs):
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"min_tokens": 30},
        {"stop_token_ids": [20, 30, 40, 50]},
        {"stop": ["1", "e "], "include_stop_str_in_output": True},
        {"ignore_eos": True, "max_tokens": 60},
    ],
)
def test_greedy_output_with_options_is_that_of_ar(ar, verified, prompts, complete, sampling):
    expected, outputs = (complete(engine, prompts[:6], **sampling) for engine in (ar, verified))
    assert tokens_of(outputs) == tokens_of(expected)
    assert [each.text for each in outputs] == [each.text for each in expected]
    assert [each.stop_reason for each in outputs] == [each.stop_reason for each in expected]


def test_structured_output_keeps_its_drafts(ar, verified, complete, metrics, prompts):
    from vllm.sampling_params import StructuredOutputsParams

    grammar = {"structured_outputs": StructuredOutputsParams(regex=r"(\d+, ){4,12}\d+"), "max_tokens": 80}
    before = metrics(verified)["num_accepted_tokens"]
    outputs = complete(verified, prompts[:12:6], **grammar)
    assert tokens_of(outputs) == tokens_of(complete(ar, prompts[:12:6], **grammar))
    assert all(set(output.text) <= set("0123456789, ") for output in outputs)
    assert metrics(verified)["num_accepted_tokens"] > before


def test_one_request_can_switch_parallel_decoding_off(ar, verified, prompts, complete, metrics):
    before = metrics(verified)
    outputs = complete(verified, prompts[:4], extra_args={"wedlm_strategy": "ar"})
    assert tokens_of(outputs) == tokens_of(complete(ar, prompts[:4]))
    assert metrics(verified)["num_drafts"] == before["num_drafts"]


def test_one_request_can_bound_its_window(ar, verified, prompts, complete, metrics):
    before = metrics(verified)["num_accepted_tokens_per_pos"]
    outputs = complete(verified, prompts[:4], extra_args={"wedlm_window_size": 3})
    assert tokens_of(outputs) == tokens_of(complete(ar, prompts[:4]))
    after = metrics(verified)["num_accepted_tokens_per_pos"]
    gained = [new - old for new, old in zip(after, before, strict=True)]
    assert gained[0] > 0 and not any(gained[2:])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"extra_args": {"wedlm_windowsize": 3}}, "Unknown WeDLM option 'wedlm_windowsize'"),
        ({"extra_args": {"wedlm_window_size": 0}}, "`wedlm_window_size` must be a whole number of at least 1, got 0"),
        ({"extra_args": {"wedlm_strategy": "fast"}}, "`wedlm_strategy` must be one of ar, wedlm, got 'fast'"),
        ({"extra_args": {"wedlm_entropy_threshold": 0.4}}, "a request may have wedlm_strategy, wedlm_window_size"),
        ({"min_p": 0.1, "temperature": 1.0}, "not yet supported with speculative decoding"),
    ],
)
def test_a_wrong_request_is_refused_and_the_engine_goes_on(verified, prompts, complete, sampling, message):
    with pytest.raises(VLLMClientError, match=message):
        complete(verified, prompts[:1], **sampling)
    with pytest.raises((VLLMClientError, ValueError), match=r"[Mm]aximum|longer|max_model_len"):
        complete(verified, [[5] * 600])
    assert complete(verified, prompts[:1], max_tokens=4)[0].token_ids


def test_answers_stream_and_an_abort_leaves_nothing_behind(ar, verified, prompts, complete):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    expected = tokens_of(complete(ar, prompts[:6], ignore_eos=True))
    engine = verified.llm_engine
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    names = [
        engine.add_request(f"stream-{index}", {"prompt_token_ids": prompt}, params)
        for index, prompt in enumerate(prompts[:6])
    ]
    streamed, aborted, steps = {index: [] for index in range(6)}, {1, 4}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            streamed[int(output.request_id.removeprefix("stream-").split("-")[0])] += output.outputs[0].token_ids
        steps += 1
        if steps == 6:
            engine.abort_request([f"stream-{index}" for index in aborted])
    for index, tokens in streamed.items():
        if index in aborted:
            assert 0 < len(tokens) < 96 and tokens == expected[index][: len(tokens)]
        else:
            assert tokens == expected[index]
    assert steps < 60, names  # several tokens at a time
    complete(verified, prompts[:1], max_tokens=2)
    runner = engine.model_executor.driver_worker.model_runner
    assert len(runner.drafter.states) <= 1 and len(runner.requests) <= 1
    scheduler = engine.engine_core.engine_core.scheduler
    assert not scheduler.requests and scheduler.kv_cache_manager.usage == 0


def test_an_engine_says_when_drafting_begins_and_ends_and_why(start, prompts, complete, monkeypatch):
    lines = []
    monkeypatch.setattr(proposer.logger, "info", lambda text, *words: lines.append(text % words))
    monkeypatch.setattr(proposer, "PAUSE", 0.0)
    llm = start(tokens=12, num_gpu_blocks_override=64)
    drafter = llm.llm_engine.model_executor.driver_worker.model_runner.drafter
    for slot_cost in (0.02, 9.0):
        drafter.planner.times = StepTimes(slot_cost)
        complete(llm, prompts[:8])
    assert [line.split(":")[0] for line in lines] == ["Parallel decoding", "AR steps"]
    assert " tokens a step more than AR steps" in lines[0] and " fewer than AR steps" in lines[1]
