"""`wedlm serve` as its clients see it: the stock `openai` client, on wedlm-nano."""

import gc
import json
import logging
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai
import pytest
import torch
from command_faults import start
from hypothesis import given
from hypothesis import strategies as st
from served import ANSWER, CHAT, ENDLESS, NAME, Server, post
from tiny import tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS, ToolCall
from typer.testing import CliRunner

from wedlm_hf import WeDLMForCausalLM, cli
from wedlm_hf.eval.prompts import encode
from wedlm_hf.generation.grammar import Grammar, JSONConstraint
from wedlm_hf.serving.calls import Answer, Asked
from wedlm_hf.serving.message import MessageParser
from wedlm_hf.serving.server import build_app
from wedlm_hf.serving.text import AnswerText


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "wedlm_hf.serving")

    def wait_for(pattern, count=1):
        """The matches of a pattern in the log, once there are so many."""
        for _ in range(600):
            found = re.findall(pattern, caplog.text)
            if len(found) >= count:
                return found
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} is not in the log:\n{caplog.text}")

    return wait_for


def generated(server, **options):
    """Text and number of tokens that `generate` itself gives."""
    ids = torch.tensor([encode(server.tokenizer, CHAT)])
    output = server.model.generate(ids, **{"max_new_tokens": 100, **options})[0, ids.shape[1] :]
    return server.tokenizer.decode(output, skip_special_tokens=True), len(output)


def tokens(response):
    """Those of the prompts and of the answers: how many drafts are made is a matter of times."""
    return response.usage.prompt_tokens, response.usage.completion_tokens


def clients(count):
    """Threads that ask at once."""
    gc.collect()  # a stream that failed before, closed by one that holds httpcore's lock, would wait for it for good
    return ThreadPoolExecutor(count)


def test_the_command_serves_until_ctrl_c(tmp_path):
    """First of this file: it forks, before there are threads of a server."""
    run = start(["serve", "--port", "0", "--threads", "1", "--served-model-name", "x"], tmp_path)
    end = time.monotonic() + 60
    while not (address := re.search(rb"http://\S+/v1", run.output)) and time.monotonic() < end:
        run.wait(0.05)
    with openai.OpenAI(base_url=address[0].decode(), api_key="-", max_retries=5) as client:
        answer = client.chat.completions.create(model="x", messages=CHAT)
        assert answer.choices[0].message.content == ANSWER
        stream = client.chat.completions.create(model="x", messages=CHAT, stream=True, extra_body=ENDLESS)
        next(iter(stream))
        os.kill(run.pid, signal.SIGINT)
        run.wait()
    assert (run.code, b"Traceback" in run.output) == (130, False)


BLOCK = {"strategy": "block", "window_size": 4, "entropy_threshold": 0.1}


@pytest.mark.parametrize("settings", [{}, {"strategy": "ar"}, {"verification": "exact"}, BLOCK], ids=str)
def test_a_chat_is_answered_as_generate_answers_it_streaming_or_not(server, settings):
    text, count = generated(server, **{"strategy": "wedlm", **settings})
    whole = server.chat(extra_body=settings)
    assert whole.choices[0].message.content == text
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("stop", count)
    assert whole.usage.prompt_tokens == len(encode(server.tokenizer, CHAT))
    streamed, last = server.streamed(extra_body={"generation_config": settings})
    assert (streamed, last.choices[0].finish_reason, tokens(last)) == (text, "stop", tokens(whole))


def test_text_is_completed_streaming_or_not(server):
    prompt = server.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = server.tokenizer(prompt).input_ids
    options = {"extra_body": {"generation_config": '{"verification": "exact"}'}}
    for either in (prompt, ids):
        whole = server.complete(either, **options)
        chunks = list(server.complete(either, stream=True, **options))
        assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
        assert tokens(chunks[-1]) == tokens(whole)
    several = server.complete([prompt, ids], n=2, **options)
    assert [(choice.index, choice.text) for choice in several.choices] == [(index, ANSWER) for index in range(4)]
    assert several.usage.prompt_tokens == 2 * len(ids)
    for said, wrong in {"token ids are 0 to": [99999], "at least 1 item": [], "must be a text": [[1], 2]}.items():
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            server.complete(wrong, **options)
        assert caught.value.param.startswith("prompt")
    options = {"max_tokens": 3, "extra_body": {"strategy": "ar"}}
    bias = {str(server.tokenizer("7").input_ids[-1]): 100}
    assert server.complete(prompt, logit_bias=bias, **options).choices[0].text == "777"


def test_usage_comes_with_the_last_chunk_or_alone_and_a_stream_ends_as_openais(server):
    plain = list(server.chat(stream=True))
    alone = list(server.chat(stream=True, stream_options={"include_usage": True}))
    assert plain[-1].usage and plain[-1].choices
    assert (alone[-1].choices, tokens(alone[-1])) == ([], tokens(plain[-1]))
    assert not any(chunk.usage for chunk in alone[:-1]) and len(alone) > 6
    with post(server, {"messages": CHAT, "stream": True}) as response:
        assert response.read().decode().endswith("\n\ndata: [DONE]\n\n")


def test_the_log_says_what_an_answer_took(server, log):
    server.chat(extra_body={"verification": "exact"})
    server.chat(extra_body={"strategy": "ar"})
    server.app.state.desk.calls.wait()  # an answer is there before its line
    pattern = r"(\d+) new in (\d+) forwards \((\d+\.\d\d) tokens per forward\)(.*) \(\d+ tokens/s\)"
    exact, ar = log(pattern, count=2)[-2:]  # an answer whose client left an earlier test may come first
    assert (exact[0], ar[:3]) == ("29", ("29", "29", "1.00"))
    assert float(exact[2]) > 2 and re.match(r", \d+ of \d+ drafts accepted, ", exact[3])


def test_a_limit_ends_an_answer_for_its_length(server):
    late = {"extra_body": {**ENDLESS, "max_time": 0.05}}
    for options in ({"max_tokens": 4}, {"max_completion_tokens": 4}, late):
        answer = server.chat(**options)
        assert answer.choices[0].finish_reason == "length" and (options is late or answer.usage.completion_tokens == 4)
    assert server.streamed(**late)[1].choices[0].finish_reason == "length"
    assert server.chat(max_tokens=29).choices[0].finish_reason == "stop"  # the last token is the end


def test_an_answer_ends_before_a_stop_string_which_is_looked_for_in_the_answer_alone(server):
    for options in ({}, {"extra_body": {"strategy": "ar"}}):
        assert server.text(stop=["25", "nothing"], **options) == "5, 10, 15, 20, "
        assert server.streamed(stop="5, 3", **options)[0] == "5, 10, 15, 20, 2"
        whole = server.chat(stop=["\n5"], **options).choices[0]  # the header of the answer ends in a newline
        assert (whole.finish_reason, whole.message.content) == ("stop", ANSWER)
    for nothing in ("", [], [""]):
        assert server.text(stop=nothing) == ANSWER


def test_bytes_that_are_no_character_are_text_like_any_other():
    """With a tokenizer as Llama 2 and Gemma have theirs: a token for each byte."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), ",", "<mask>"]
    vocab = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<unk>", "mask_token": "<mask>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    model = tiny_model(vocab_size=len(vocab), pad_token_id=0, eos_token_id=2, mask_token_id=260)
    with Server(model, tokenizer, {"strategy": "ar"}) as server:
        bias = {vocab["<0x41>"]: 100, vocab["<0xE4>"]: 90, vocab[","]: 80}  # "A", a part of a character, ","
        options = {"max_tokens": 3, "logit_bias": bias, "logprobs": 0, "extra_body": {"no_repeat_ngram_size": 1}}
        choice = server.complete("Hello", **options).choices[0]
        assert (choice.text, choice.logprobs.tokens) == ("A\ufffd,", ["A", r"bytes:\xe4", ","])
        assert len(server.complete([*map(str, range(40))], max_tokens=24).choices) == 40


TOKENIZER = tiny_tokenizer()


@given(st.lists(st.integers(0, 299)), st.text())
def test_tokens_one_by_one_are_decoded_as_all_of_them(tokens, text):
    for ids in (tokens, TOKENIZER(text).input_ids):
        text = AnswerText(TOKENIZER._tokenizer, special=TOKENIZER.all_special_ids)
        assert "".join(map(text.feed, ids)) + text.rest() == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_a_seed_gives_the_same_sample_whatever_else_is_asked_for_and_n_answers_are_those_to_the_seeds_that_follow(
    server,
):
    asked = {"temperature": 6, "max_tokens": 12, "extra_body": {"verification": "exact"}}
    alone = [server.text(**asked, seed=seed) for seed in (3, 4, 5)]
    assert len(set(alone)) == 3
    with clients(3) as pool:
        together = [pool.submit(server.text, **asked, seed=seed) for seed in (3, 4, 5)]
    assert [each.result() for each in together] == alone
    whole = server.chat(**asked, seed=3, n=3)
    assert [choice.message.content for choice in whole.choices] == alone
    texts = ["", "", ""]
    for chunk in server.chat(**asked, seed=3, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert (texts, tokens(chunk)) == (alone, tokens(whole))
    assert whole.usage.completion_tokens > whole.usage.prompt_tokens
    assert server.text(temperature=0, seed=3) == server.text(temperature=1e-300) == ANSWER
    for settings in ({"strategy": "ar"}, {"verification": "exact"}):  # nothing is left behind for the next request
        server.app.state.desk.calls.wait()
        state = torch.get_rng_state()
        server.text(temperature=1, seed=3, max_tokens=2, extra_body=settings)
        server.app.state.desk.calls.wait()  # the answer is there before its call is over
        assert torch.equal(torch.get_rng_state(), state)


def log_probs(server, count, **options):
    """Of the tokens that `generate` gives, by its logits, and its likeliest tokens."""
    ids = torch.tensor([encode(server.tokenizer, CHAT)])
    keep = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 100}
    output = server.model.generate(ids, **keep, **options)
    table = torch.cat(output.logits).log_softmax(-1)
    tokens = output.sequences[0, ids.shape[1] :]
    return table.gather(1, tokens[:, None])[:-1, 0], table.topk(count)  # the end token is no part of the text


@pytest.mark.parametrize("settings", [{"strategy": "ar"}, {"strategy": "wedlm", "verification": "exact"}], ids=str)
def test_log_probabilities_are_those_of_the_logits_that_tokens_were_chosen_from(server, settings):
    expected, (values, _) = log_probs(server, 2, **settings)
    asked = {"logprobs": True, "top_logprobs": 2, "extra_body": settings}
    whole = server.chat(**asked).choices[0]
    told = whole.logprobs.content
    assert "".join(one.token for one in told) == whole.message.content == ANSWER
    torch.testing.assert_close(torch.tensor([one.logprob for one in told]), expected)
    found = torch.tensor([[other.logprob for other in one.top_logprobs] for one in told])
    torch.testing.assert_close(found, values[: len(found)])
    chunks = [chunk.choices[0] for chunk in server.chat(**asked, stream=True)]
    streamed = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in told]
    torch.testing.assert_close(torch.tensor([one.logprob for one in streamed]), expected)
    cut = server.chat(**asked, stop=["25"], n=2)
    for choice in cut.choices:  # two in a call; what the stop string took away is not listed
        assert "".join(one.token for one in choice.logprobs.content) == "5, 10, 15, 20, "


def test_an_answer_follows_the_schema_that_it_is_asked_to_as_generate_does(server):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", 5]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for settings in ({"strategy": "ar"}, {"strategy": "wedlm", "verification": "exact"}):
        constraint = JSONConstraint(Grammar(server.tokenizer, schema))
        text, _ = generated(server, logits_processor=[constraint], **settings)
        answer = server.chat(response_format=wanted, max_tokens=100, n=2, extra_body=settings)
        assert [choice.message.content for choice in answer.choices] == [text, text]
        assert json.loads(text)["a"] in ("x", 5)
        anything = server.text(response_format={"type": "json_object"}, max_tokens=5, extra_body=settings)
        assert anything.startswith("{")


CALL = '<tool_call>{"name": "f", "arguments": {"n": 3}}</tool_call>'
BROKEN = '<tool_call>{"name": </tool_call> rest'


@pytest.mark.parametrize(("text", "one", "expected"), [
    (f"Hi{CALL}{CALL}", False, ["Hi", "f", "f"]), (f"Hi{CALL}{CALL}", True, ["Hi", "f"]),
    (f"Hi{BROKEN}", False, [f"Hi{BROKEN}"]), ("Hi<tool_call>{", False, ["Hi<tool_call>{"]),
])  # fmt: skip
def test_a_tool_call_is_one_and_what_is_none_is_text(text, one, expected):
    sent = []
    (template,) = [found for names, found in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in names]
    config = GenerationConfig(eos_token_id=2, max_new_tokens=500)
    parser = partial(MessageParser, template, "<|im_start|>assistant\n")
    asked = Asked([1], config, {}, parser=parser, makes_one_call=one)
    answer = Answer(asked, "id", TOKENIZER, sent.append, 0)
    answer.put(TOKENIZER(text).input_ids)
    answer.finish("stop")
    items = [item for _, item, _ in sent]
    assert answer.is_over and items.pop() is None
    texts = "".join(item for item in items if isinstance(item, str))
    calls = [item.name for item in items if isinstance(item, ToolCall)]
    assert [texts, *calls] == expected
    assert answer.finish_reason == ("tool_calls" if calls else "stop")


def test_concurrent_requests_share_calls_and_are_all_answered(server, log):
    def ask(last, **options):
        question = [{"role": "user", "content": f"Count from 5 to {last} by 5."}]
        return server.text(messages=question, extra_body={"verification": "exact"}, **options)

    with clients(9) as pool:
        cut = pool.submit(ask, 30, max_tokens=4)  # a limit of its own
        answers = {last: pool.submit(ask, last) for last in range(20, 60, 5)}
    assert cut.result() == "5, 10"
    assert all(answer.result().split(", ")[-1] == str(last) for last, answer in answers.items())
    log(r"beside \d others")


def test_the_model_is_listed(server):
    (model,) = server.client.models.list().data
    assert server.client.models.retrieve(NAME) == model
    assert (model.id, model.max_model_len) == (NAME, 512)
    with pytest.raises(openai.NotFoundError, match="'org/other' is not served"):
        server.client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings: Not Found"):
        server.client.embeddings.create(model=NAME, input="?")


def fail_at(patch, is_bad, reason):
    """Lets forwards fail by their number, from 1."""
    forward, calls = WeDLMForCausalLM.forward, []

    def failing(*args, **kwargs):
        calls.append(None)
        if is_bad(len(calls)):
            raise RuntimeError(reason)
        return forward(*args, **kwargs)

    patch.setattr(WeDLMForCausalLM, "forward", failing)


@pytest.mark.parametrize(("stream", "good"), [(False, 0), (True, 0), (True, 5)])
def test_a_failure_of_the_model_is_an_error_of_its_request_alone(server, monkeypatch, log, stream, good):
    with monkeypatch.context() as patch:
        fail_at(patch, lambda number: number > good, 'no memory for a "tensor"')
        with pytest.raises(openai.APIError, match='could not be generated: no memory for a "tensor"') as caught:
            list(server.chat(stream=stream, extra_body={"strategy": "ar"}))
    assert caught.value.type == "server_error"
    assert isinstance(caught.value, openai.InternalServerError) == (good == 0)  # later the status has been sent
    log("RuntimeError: no memory")
    assert server.text() == ANSWER


def test_what_ends_one_answer_of_a_call_ends_no_other(server, monkeypatch, log):
    """An answer that cannot be read fails alone; and if the call itself fails, all others are made anew."""
    prompts, options = [*map(str, range(8))], {"max_tokens": 12, "extra_body": {"strategy": "ar"}}
    alone = [choice.text for choice in server.complete(prompts, **options).choices]
    with monkeypatch.context() as patch:
        fail_at(patch, lambda number: number == 5, "one sequence is to blame")
        assert [choice.text for choice in server.complete(prompts, **options).choices] == alone
    read, failed = Answer._read, []

    def fail(answer, text):
        if answer.asked.likeliest is not None and len(answer.tokens) > 3:
            failed.append(answer)
            raise RuntimeError("it cannot be read")
        read(answer, text)

    monkeypatch.setattr(Answer, "_read", fail)
    with clients(8) as pool:
        found = [pool.submit(server.complete, one, logprobs=1 if one == "5" else None, **options) for one in prompts]
    texts = ["failed" if each.exception() else each.result().choices[0].text for each in found]
    assert texts == [*alone[:5], "failed", *alone[6:]]
    assert len(failed) == 1  # it takes nothing more


def test_generation_stops_when_the_client_of_a_stream_or_of_a_whole_answer_goes_away(server, log):
    for strategy in ("ar", "wedlm"):
        with server.chat(stream=True, extra_body={**ENDLESS, "strategy": strategy}) as stream:
            next(iter(stream))
    for _ in range(2):  # one that is answered, one that waits
        with pytest.raises(openai.APITimeoutError):
            server.chat(timeout=0.2, extra_body=ENDLESS)
    counts = log(r"stopped after (\d+) new tokens", count=4)
    assert all(int(count) < 400 for count in counts)
    assert server.text() == ANSWER


def test_a_host_or_a_port_that_cannot_be_had_ends_the_command_and_an_address_for_all_without_a_key_is_warned_of(
    monkeypatch,
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for said in ("--host host.invalid --port 0", f"--port {taken.getsockname()[1]}"):
            result = CliRunner().invoke(cli.app, ["serve", *said.split()])
            assert result.exit_code == 2
            assert said in result.stderr and result.stderr.count("\n") == 1
    monkeypatch.setattr("wedlm_hf.serving.server.run", lambda *_: None)
    for words, warns in {"": False, "--host 0.0.0.0": True, "--host 0.0.0.0 --api-key k": False}.items():
        result = CliRunner().invoke(cli.app, ["serve", "--port", "0", *words.split()])
        assert (result.exit_code, "Everyone who reaches this address may ask" in result.stderr) == (0, warns)


def test_a_checkpoint_without_a_mask_token_and_an_empty_key_end_the_start(tokenizer):
    start = partial(build_app, "tiny", tiny_model(mask_token_id=None), tokenizer)
    with pytest.raises(ValueError, match="needs a mask token"):
        start({"strategy": "wedlm"})
    start({"strategy": "ar"})  # which needs none
    with pytest.raises(ValueError, match="The API key must not be empty"):
        start({"strategy": "ar"}, api_key="")
