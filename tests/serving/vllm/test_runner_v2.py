"""vLLM's model runner V2: the same engines, `ModelState`s in place of the proposer. On a CPU its kernels need Triton's
interpreter, which must be there before vLLM is imported and is slow: `make test-vllm` runs this file by itself."""

import pytest
import torch
from vllm.exceptions import VLLMClientError

from wedlm_hf import WeDLMForCausalLM


def tokens_of(outputs):
    return [list(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def verified(start):
    """Verified decoding, with fewer rows than elsewhere."""
    return start(tokens=8, max_num_seqs=8)


@pytest.fixture(scope="module")
def streaming(start):
    """The decoder without verification."""
    return start(
        additional_config={"wedlm": {"verification": "none", "window_size": 8}}, max_num_seqs=8, max_model_len=256
    )


@pytest.fixture
def steps(monkeypatch):
    """`steps(engine)`: a list that grows with each forward of it."""

    def count(engine):
        runner, seen = engine.llm_engine.model_executor.driver_worker.model_runner, []
        execute = runner.execute_model
        monkeypatch.setattr(runner, "execute_model", lambda *args, **kw: seen.append(1) or execute(*args, **kw))
        return seen

    return count


def test_verified_output_is_the_ar_output_in_fewer_steps(ar, verified, prompts, complete, steps):
    assert verified.llm_engine.vllm_config.use_v2_model_runner
    expected = tokens_of(complete(ar, prompts[:3], max_tokens=40))
    seen = steps(verified)
    assert tokens_of(complete(verified, prompts[:3], max_tokens=40)) == expected
    assert len(seen) < max(map(len, expected)) / 2
    assert tokens_of(complete(verified, prompts[:1], max_tokens=40)) == expected[:1]


def test_requests_of_many_kinds_share_a_batch(ar, verified, prompts):
    from vllm import SamplingParams

    kinds = [
        {}, {"stop": ["1"]}, {"extra_args": {"wedlm_strategy": "ar"}}, {"extra_args": {"wedlm_window_size": 3}},
        {"logprobs": 1}, {"repetition_penalty": 1.3}, {"min_tokens": 12},
    ]  # fmt: skip
    params = [SamplingParams(**{"temperature": 0.0, "max_tokens": 16} | kind) for kind in kinds]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts[: len(kinds)]]
    expected, found = (engine.generate(inputs, params, use_tqdm=False) for engine in (ar, verified))
    assert [list(each.outputs[0].token_ids) for each in found] == [
        list(each.outputs[0].token_ids) for each in expected
    ]


def test_a_mask_adapter_leaves_the_answers_as_they_are(ar, start, prompts, complete, random_adapter, steps):
    options = {"mask_adapter": str(random_adapter[0])}
    engine = start(tokens=8, additional_config={"wedlm": options}, max_num_seqs=4)
    model = engine.llm_engine.model_executor.driver_worker.model_runner.model
    seen = steps(engine)
    outputs = tokens_of(complete(engine, prompts[:2], max_tokens=14))
    assert outputs == tokens_of(complete(ar, prompts[:2], max_tokens=14))
    assert model.adapter.flags.any() and len(seen) <= 16


@pytest.mark.parametrize(
    "own", [{}, {"entropy_threshold": 0.1, "distance_penalty": 0.1}, {"window_size": 3}, {"entropy_threshold": 0.0}]
)
def test_without_verification_tokens_are_those_of_transformers(streaming, nano, prompts, complete, own):
    model = WeDLMForCausalLM.from_pretrained(nano)
    options = {f"wedlm_{name}": value for name, value in own.items()}
    outputs = complete(streaming, prompts[:3], max_tokens=20, extra_args=options)
    for prompt, output in zip(prompts, outputs, strict=False):
        settings = {"strategy": "wedlm", "verification": "none", "window_size": 8} | own
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, **settings)[0, len(prompt) :]
        assert list(output.token_ids) == expected.tolist()


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"repetition_penalty": 1.2}, "`repetition_penalty` is not supported without verification"),
        ({"logprobs": 1}, "`logprobs` is not supported without verification"),
        ({"extra_args": {"wedlm_strategy": "ar"}}, "goes with verified decoding"),
        ({"extra_args": {"wedlm_window_size": 9}}, "can be at most the engine's, 8, got 9"),
        ({"extra_args": {"wedlm_distance_penalty": -1}}, "`distance_penalty` must be a number of at least 0, got -1"),
    ],
)
def test_what_streaming_cannot_honour_is_refused(streaming, prompts, complete, sampling, message):
    with pytest.raises(VLLMClientError, match=message):
        complete(streaming, prompts[:1], **sampling)
    assert complete(streaming, prompts[:1], max_tokens=2)[0].token_ids
