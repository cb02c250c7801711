"""What a request may hold, and what is said of one that cannot be honoured."""

import gc
import inspect
import json
import re
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import openai
import pytest
import torch
from served import CHAT, ENDLESS, IMAGE, NAME, Server, post, refusal
from tiny import tiny_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerBase

from wedlm_hf.serving import calls as calls_module
from wedlm_hf.serving import conversation, limits
from wedlm_hf.serving import endpoints as endpoints_module
from wedlm_hf.serving import schema as schema_module
from wedlm_hf.serving.calls import Answer, Asked, Batch, CallManager, RequestError, Turns, as_request_error
from wedlm_hf.serving.conversation import Conversation
from wedlm_hf.serving.endpoints import GRAMMARS, ChatEndpoint, ServedModel, TextEndpoint
from wedlm_hf.serving.schema import ChatRequest, CompletionRequest
from wedlm_hf.serving.server import DEAR_READERS, READERS
from wedlm_hf.training.written import pieces


def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


SCHEMA = {"name": "x", "schema": {"not": {}}}
ASKS = b'{"messages": [{"role": "user", "content": "?"}], '
REFUSED = [  # what a request asks for beside a chat, or its whole body; what is said of it, and of which field
    ({"model": "gpt-5"}, "The model 'gpt-5' is not served; this server has 'nano'.", "model"),
    ({"beam": 2}, "`beam` is not supported by this server", "beam"),
    ({"audio": {"voice": "x"}}, "`audio`: this is not supported by this server", "audio"),
    ({"generation_config": "{"}, "`generation_config` is no JSON", "generation_config"),
    ({"top_k": 3, "generation_config": {"top_k": 4}}, "leave one out", "top_k"),
    ({"window_size": 0}, "must be an integer of at least 1, got 0", "window_size"),
    ({"strategy": "ar", "window_size": 4}, "`window_size=4` has no meaning", "window_size"),
    ({"frequency_penalty": 0.5}, "`frequency_penalty` needs each token's predecessors", "frequency_penalty"),
    ({"repetition_penalty": 1.2}, "`repetition_penalty` needs each token's predecessors", "repetition_penalty"),
    ({"no_repeat_ngram_size": 2}, "`no_repeat_ngram_size` needs each token's", "no_repeat_ngram_size"),
    ({"logit_bias": {"5": -100}}, "`logit_bias` needs each token's predecessors", "logit_bias"),
    ({"frequency_penalty": 0.5, "repetition_penalty": 1.2}, "leave one out", "frequency_penalty"),
    ({"logit_bias": {"99999": 1}}, "the model's token ids are 0 to", "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "at most 1024 items", "logit_bias"),
    ({"window_size": 129}, "`window_size` may be 128 at most for this server, got 129", "window_size"),
    ({"suppress_tokens": [3, -1]}, "the model's token ids are 0 to", "suppress_tokens"),
    ({"min_new_tokens": 9}, "is 9, but the answer may have 8 tokens", "min_new_tokens"),
    ({"chat_template_kwargs": {"tokenize": False}}, "'tokenize' is set by the server", "chat_template_kwargs"),
    ({"stream_options": {"usage": True}}, "`stream_options", "stream_options.usage"),
    ({"n": 129}, "`n`: Input should be less than or equal to 128, got 129", "n"),
    ({"n": "2"}, "`n`: Input should be a valid integer, got '2'", "n"),
    ({"max_new_tokens": True}, "`max_new_tokens`: Input should be a valid integer, got True", "max_new_tokens"),
    ({"response_format": {"type": "json_object"}}, "`response_format` needs each token's pred", "response_format"),
    ({"logprobs": True}, "`logprobs` needs each token's predecessors", "logprobs"),
    ({"top_logprobs": 2}, "goes with `logprobs`: true", "top_logprobs"),
    ({"response_format": {"type": "json_schema"}}, "goes with the type", "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, 'keys: ["not"]', "response_format"),
    ({"max_tokens": 500}, "context is 512 tokens, but the request asks for 520", "messages"),
    ({"messages": [{"content": "?"}]}, "`messages.0.role` is missing", "messages.0.role"),
    ({"messages": [{"role": "user", "content": "1, " * 600}]}, "must have 1 to 511 tokens", "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "of the type 'image_url', and only", "messages.0.content"),
    ({"messages": [{"role": "user", "content": False}]}, "must be a text or a list of parts", "messages.0.content"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "knows no tools", "tools"),
    ({"messages": ...}, "`messages` is missing", "messages"),
    (b"{", "JSON object", None),
    (b"[1]", "The body of the request must be a JSON object, got [1]", None),
    (b"[" * 10**4, "The body of the request", None),
    (b"\xff{", "must be a JSON object", None),
    (json.dumps({"messages": CHAT}).encode("utf-16"), "must be a JSON object", None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "unexpected end of hex", None),
    (ASKS + b'"\\ud800": 1}', "unexpected end of hex", None),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}
            ]
        },
        "hex escape",
        "messages.0.tool_calls.0.function.arguments",
    ),
    (ASKS + b'"temperature": Infinity}', "finite", "temperature"),
    (ASKS + b'"stream_options": {"include_usage": true}}', "goes with `stream`", "stream_options"),
]


@pytest.mark.parametrize(("asked", "said", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_request_that_cannot_be_honoured_is_refused_in_openais_form_and_names_the_field(server, asked, said, param):
    bodies = [asked]
    if isinstance(asked, dict):
        whole = {"messages": CHAT, "max_tokens": 8} | asked
        body = {name: value for name, value in whole.items() if value is not ...}
        bodies = [body, body | {"stream": True}]
    for body in bodies:
        status, error = refusal(server, body)
        assert status == (404 if param == "model" else 400)
        assert (error["type"], said in error["message"]) == ("invalid_request_error", True), error
        assert param is None or error["param"] == param


def test_a_body_may_begin_with_a_byte_order_mark(server):
    assert post(server, b"\xef\xbb\xbf" + ASKS + b'"max_tokens": 1}').status == 200


@pytest.mark.parametrize(("asked", "param"), [
    ({"input": "x" * 10**6}, "input"), ({"input": "1, " * 600}, "input"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input"), ({"input": [5]}, "input.0"), ({"input": 5}, "input"),
    ({"input": [{"content": "?"}]}, "input"), ({"input": [{"type": "function_call"}]}, "input"),
    ({"input": [{"role": "assistant", "content": "Hi", "tool_calls": 5},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "reasoning", "content": [5]}]}, "input"), ({"input": [{"type": "image"}]}, "input"),
    ({"text": 5}, "text"), ({"text": {"format": "x"}}, "text.format"), ({"reasoning": "high"}, "reasoning"),
    ({"tools": [5]}, "tools.0"), ({"tools": {"a": 1}}, "tools"), ({"tool_choice": {}}, "tool_choice"),
    ({"background": True}, "background"), ({"n": 2}, "n"),
], ids=lambda value: str(value)[:50])  # fmt: skip
def test_responses_name_the_field_that_they_have(server, asked, param):
    status, error = refusal(server, {"input": "Hi", "max_output_tokens": 2} | asked, path="v1/responses")
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] is not None and error["param"].startswith(param), error
    assert "Error:" not in error["message"]


@pytest.fixture(scope="module")
def endpoints(nano):
    served = ServedModel("nano", *nano, {"strategy": "wedlm", "verification": "exact"})
    return {
        "messages": (ChatEndpoint(served), {"messages": CHAT, "max_tokens": 2}),
        "prompt": (TextEndpoint(served), {"prompt": "Count", "max_tokens": 2}),
    }


REFUSES = "The chat template refuses these messages:"
NOTHING = [0, "", False, [], {}]
ODD = [-1, 0.5, 1e300, 10**400, "x", "none", True, [0], [None], [[[]]], {"a": None}, {"type": {}}, [{"role": 5}]]
ODD += [[IMAGE]]
CASES = [(kind, field) for kind, schema in (("messages", ChatRequest), ("prompt", CompletionRequest))
         for field in (*schema.model_fields, "generation_config", "beam")]  # fmt: skip
OURS = re.compile(r"\b_[A-Z]|list\[|\.str\b|BaseModel|Request\b|NoneType|Input should be (False|True)\b")


@pytest.mark.parametrize(("kind", "field"), CASES)
def test_a_field_is_read_or_refused_by_its_name_whatever_it_holds_and_null_asks_for_nothing(endpoints, kind, field):
    endpoint, body = endpoints[kind]
    if field != kind:
        endpoint.read(json.dumps(body | {field: None}).encode())
    for value in NOTHING + ODD:
        try:
            endpoint.read(json.dumps(body | {field: value}).encode())
        except (RequestError, ValueError) as error:
            refused = as_request_error(error)
            assert refused.status in (400, 404), value
            assert not OURS.search(str(refused)), value
            named = str(refused.param).removeprefix("generation_config.").split(".")[0]
            is_named = named == field or field == "generation_config" or "goes with" in str(refused)
            assert is_named or value == 10**400, value  # the text of that number is no JSON of Python's


@pytest.mark.parametrize("asked", [
    {"messages": [0] * 10**5}, {"messages": [{}] * 10**5}, {"tools": [0] * 10**5}, {"suppress_tokens": ["x"] * 10**5},
    {"modalities": [0] * 10**5}, {"messages": [{"role": "user", "tool_calls": [0] * 10**5}]},
    {f"field{number}": 1 for number in range(10**5)}, {"stream_options": {str(each): 1 for each in range(10**5)}},
], ids=lambda asked: str(asked)[:40])  # fmt: skip
def test_a_body_that_is_wrong_in_many_places_is_not_told_of_in_all_of_them(endpoints, monkeypatch, asked):
    """Each takes two kilobytes: a body of some megabytes would fill the memory."""
    endpoint, body = endpoints["messages"]
    said = []
    monkeypatch.setattr(schema_module, "_said", lambda *problem: said.append(problem) or "wrong")
    with pytest.raises(RequestError):
        endpoint.read(json.dumps(body | asked).encode())
    assert len(said) <= 2


def test_answers_to_one_prompt_are_asked_for_once_and_a_seed_for_each(endpoints):
    for endpoint, body in endpoints.values():
        _, asked = endpoint.read(json.dumps(body | {"n": 100}).encode())
        assert len(asked) == 100 and len({id(each) for each in asked}) == 1
        _, asked = endpoint.read(json.dumps(body | {"n": 3, "seed": 5}).encode())
        assert [each.seed for each in asked] == [5, 6, 7]


@pytest.mark.parametrize("asked", [
    {"tool_choice": "none"}, {"parallel_tool_calls": False}, {"functions": []}, {"function_call": "none"},
    {"audio": {}}, {"n": 1}, {"logprobs": False}, {"top_logprobs": 0}, {"stop": []}, {"stop": ""}, {"stop": "x"},
    {"logit_bias": {}}, {"logprobs": 0}, {"stream_options": {}}, {"stream_options": {"include_usage": False}},
    {"tools": []}, {"modalities": ["text"]}, {"response_format": {"type": "text"}}, {"top_p": 0}, {"seed": 0},
    {"top_k": 0}, {"presence_penalty": 0}, {"min_new_tokens": 0},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}], "name": None, "tool_calls": []}]},
], ids=str)  # fmt: skip
def test_what_asks_for_nothing_is_taken(endpoints, asked):
    for endpoint, body in endpoints.values():
        if endpoint.schema.model_fields.keys() >= asked.keys():
            endpoint.read(json.dumps(body | asked).encode())


def test_transformers_chat_finds_the_model_loaded_and_may_send_what_it_sends(server):
    with post(server, {"model": NAME}, "load_model") as response:
        assert json.loads(response.read().decode().removeprefix("data: "))["status"] == "ready"
    for body in ({"model": "other"}, [], b"[" * 10**4):
        assert refusal(server, body, "load_model")[0] == 404
    config = GenerationConfig(do_sample=False, max_new_tokens=9).to_json_string()
    with post(server, {"model": NAME, "messages": CHAT, "stream": True, "generation_config": config}) as response:
        assert response.read().decode().endswith("data: [DONE]\n\n")


def test_a_request_may_ask_for_no_least_length_where_the_checkpoint_stores_one(endpoints, nano, monkeypatch):
    monkeypatch.setattr(nano[0].generation_config, "min_new_tokens", 9)
    for endpoint, body in endpoints.values():
        with pytest.raises(RequestError, match="`min_new_tokens` is 9, but the answer may have 2 tokens"):
            endpoint.read(json.dumps(body).encode())
        _, (asked,) = endpoint.read(json.dumps(body | {"min_new_tokens": 0}).encode())
        assert asked.config.min_new_tokens == 0


@pytest.mark.parametrize(("arguments", "read"), [('{"n": 3}', {"n": 3}), ("", {}), (None, {})])
def test_a_message_reaches_the_template_whole(model, arguments, read):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "assistant", "content": "Hi", "tool_calls": [call], "reasoning_content": "so"}, *CHAT]
    shown = "{{ m.content }}|{{ m.get('tool_calls', [{}])[0].get('function', {}) }}|{{ m.get('reasoning_content') }};"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    endpoint = ChatEndpoint(ServedModel("tiny", model, tokenizer, {"strategy": "ar"}))
    _, (asked,) = endpoint.read(json.dumps({"messages": turns, "max_tokens": 2}).encode())
    expected = f"Hi|{ {'name': 'f', 'arguments': read} }|so;{CHAT[0]['content']}|{{}}|None;"
    assert tokenizer.decode(asked.prompt) == expected


def test_a_client_cannot_say_what_the_server_gives_the_template_nor_bring_one(endpoints):
    endpoint, body = endpoints["messages"]
    ours = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents", "kwargs"}
    assert {"chat_template", "truncation", "tokenizer_kwargs"} <= ours
    for name in (*ours, "messages"):
        with pytest.raises(RequestError, match=f"'{name}' is set by the server") as caught:
            endpoint.read(json.dumps(body | {"chat_template_kwargs": {name: "x"}}).encode())
        assert caught.value.param == "chat_template_kwargs"
    endpoint.read(json.dumps(body | {"chat_template_kwargs": {"enable_thinking": False}}).encode())
    for unread in ({"enable_thinking": True}, {"documents": [{"text": "It rains."}]}):  # by this template
        with pytest.raises(RequestError, match=f"does not read '{next(iter(unread))}'"):
            endpoint.read(json.dumps(body | {"chat_template_kwargs": unread}).encode())


def test_whatever_a_template_raises_is_an_error_of_the_messages_and_a_slow_one_holds_nobody_up(model):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'slow' %}{% for a in range(250) %}{% for b in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ m.content + 1 if m.content == 'bad' else m.content }}{% endfor %}"
    )
    bad, slow, fast = ({"messages": [{"role": "user", "content": text}]} for text in ("bad", "slow", "fast"))
    with Server(model, tokenizer, {"strategy": "ar", "max_new_tokens": 2}) as server:
        status, error = refusal(server, bad)
        assert (status, error["param"]) == (400, "messages")
        assert f"{REFUSES} can only concatenate str" in error["message"]
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(refusal, server, slow) for _ in range(3)]
            time.sleep(0.2)
            post(server, fast)
            assert not any(each.done() for each in waiting)
        assert {each.result()[1]["message"] for each in waiting} == {f"{REFUSES} it takes too long"}


def test_a_prompt_too_long_for_the_context_is_refused_before_it_is_read(server, monkeypatch):
    monkeypatch.setattr(type(server.tokenizer), "__call__", None)  # it would fail
    long = "1, " * 10**4
    chat = {"messages": [{"role": "user", "content": long}]}
    for path, body in {"v1/chat/completions": chat, "v1/completions": {"prompt": [long]}}.items():
        status, error = refusal(server, body, path)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", *body)
        assert re.match(r"The prompt has \d+ characters, but this model's context is 512 tokens", error["message"])
    status, error = refusal(server, {"prompt": long * 100}, "v1/completions")
    assert (status, error["code"]) == (413, "context_length_exceeded")
    assert refusal(server, {"messages": CHAT}, Content_Type="text/plain")[0] == 415


def test_a_key_is_asked_for_and_a_page_of_another_origin_may_ask_if_it_is_named(model, tokenizer):
    options = {"api_key": "secret", "origins": ["https://a.example"]}
    with Server(model, tokenizer, {"strategy": "ar"}, **options) as server:
        body = {"prompt": "1", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, error = refusal(server, body, "v1/completions", **headers)
            assert (status, error["code"]) == (401, "invalid_api_key")
        for origin, allowed in {"https://a.example": "https://a.example", "https://b.example": None}.items():
            with post(server, body, "v1/completions", Authorization="Bearer secret", Origin=origin) as response:
                assert response.headers["Access-Control-Allow-Origin"] == allowed
        assert server.client.with_options(api_key="secret").models.list().data
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()


def test_a_response_says_the_id_of_its_request_the_clients_own_if_it_is_plain(server):
    answer = server.chat(max_tokens=1)
    assert answer._request_id and answer.id == f"chatcmpl-{answer._request_id}"
    assert server.chat(max_tokens=1, extra_headers={"x-request-id": "mine-1"})._request_id == "mine-1"
    for wrong in ("a b", "x" * 200, ""):
        assert server.chat(max_tokens=1, extra_headers={"x-request-id": wrong})._request_id != wrong
    with pytest.raises(openai.BadRequestError) as caught:
        server.chat(max_tokens=0)
    assert caught.value.request_id


def test_what_takes_too_long_is_refused_and_keeps_nobody_waiting(nano):
    def dear(number):
        schema = {"type": "integer", "multipleOf": number}
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}

    with Server(*nano, {"strategy": "wedlm", "verification": "exact"}) as server:
        asked = {"messages": CHAT, "max_tokens": 5}
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(refusal, server, asked | dear(4000009 + 2 * each)) for each in range(4)]
            post(server, asked)
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5)
            assert not all(each.done() for each in waiting)
        for each in waiting:
            status, error = each.result()
            assert (status, error["param"]) == (400, "response_format")
            assert "takes too long to prepare" in error["message"]
        status, error = refusal(server, asked | {"n": 128, "max_tokens": 400, "logprobs": True, "top_logprobs": 20})
        assert (status, error["param"]) == (400, "logprobs")
        deep = json.loads('{"items":' * 200 + "{}" + "}" * 200)
        form = {"type": "json_schema", "json_schema": {"schema": deep}}
        assert refusal(server, asked | {"response_format": form})[0] == 400


WRITES = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
ESCAPES = "{% for m in messages %}{{ m | tojson(ensure_ascii=True) }}{% endfor %}"
SYSTEM_LAST = WRITES.replace("in messages", "in messages[1:] + messages[:1]")
SORTED = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}" \
         "{{ call.function.arguments | dictsort }}{% endfor %}{% endfor %}"  # fmt: skip
LONG = "and more " * 450


def call_of(**arguments):
    return {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(("template", "turn"), [
    (WRITES, lambda number: {"content": f"says {number}"}),
    (WRITES, lambda number: {"content": f"says {number} {LONG}"}),
    (WRITES, lambda number: call_of(text=f"says {number} {LONG}")),
    (WRITES, lambda number: {"content": "a"} if number % 50 else {"content": f"says {number}"}),
    (SYSTEM_LAST, lambda number: {"content": f"says {number} {LONG}"}),
    (ESCAPES, lambda number: {"content": f'"\n\\{number}"' * 400}),
    (ESCAPES, lambda number: {"content": f"😀{number}ä" * 400}),
    (ESCAPES, lambda number: call_of(text=f"😀{number}ä" * 400)),
    ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
     lambda number: {"content": f"{LONG}</think>says {number}"}),
    (SORTED, lambda number: call_of(**{f"key{9 - place}": f"value{number}" for place in range(10)})),
], ids="short long calls repeated moved quotes unicode calls-unicode thoughts sorted".split())  # fmt: skip
def test_what_is_compared_of_a_long_chat_grows_with_its_length_alone(monkeypatch, template, turn):
    made = []

    class Counting(conversation.Prompt):
        def __init__(self, text):
            super().__init__(text)
            made.append(self)

    monkeypatch.setattr(conversation, "Prompt", Counting)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    turns = [{"role": "assistant", **turn(number)} for number in range(400)]
    text = Conversation(tokenizer, turns, None).text()
    compared = conversation.MOST_COMPARED - made[-1].left
    assert 0 < compared < 12 * len(text) + 5000 * sum(len(pieces(turn)) for turn in turns)


def test_a_chat_whose_order_a_template_turns_round_has_a_limit_for_what_is_compared(monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SORTED
    turn = {"role": "assistant", **call_of(**{f"{number * 7919 % 9973:04}": number * 31 for number in range(3000)})}
    Conversation(tokenizer, [turn], None).text()
    monkeypatch.setattr(conversation, "MOST_COMPARED", 2**20)
    with pytest.raises(RequestError, match="takes too long to find these messages"):
        Conversation(tokenizer, [turn], None).text()


@pytest.mark.parametrize("tools", ["", "{{ tools }}"])
def test_a_call_is_in_the_prompt_or_refused_though_a_tool_of_its_name_is_there(tools):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tools + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turn = {"role": "assistant", **call_of()}
    with pytest.raises(RequestError, match=r"`messages.0`: the chat template leaves .*'f'.* out"):
        Conversation(tokenizer, [turn], [{"type": "function", "function": {"name": "f"}}]).text()


def test_all_templates_of_a_request_count_their_lines_together(endpoints):
    tokenizer = endpoints["messages"][0].served.tokenizer
    chat = Conversation(tokenizer, CHAT, None)
    chat.generation_prompt()  # twice
    once = (limits.MOST_LINES - chat.lines.left) // 2
    chat.text()
    assert limits.MOST_LINES - chat.lines.left >= 4 * once > 0
    chat.lines.left = 1
    with pytest.raises(RequestError, match="it takes too long"):
        chat.text()


def test_dear_requests_are_read_by_few_threads_and_others_do_not_wait_for_them(nano, monkeypatch):
    """As many as there are threads for all: schemas, also in escapes of JSON, tools and long bodies."""
    running, most, go_on = [], [], threading.Event()

    def wait(schema):
        running.append(1)
        most.append(len(running))
        go_on.wait(60)
        running.pop()
        return True

    monkeypatch.setattr(endpoints_module, "can_be_built", wait)
    form = {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}
    with Server(*nano, {"strategy": "ar"}) as server, ThreadPoolExecutor(READERS + 4) as pool:
        body = {"messages": CHAT, "max_tokens": 2}
        plain = json.dumps(body | {"response_format": form})
        bodies = [plain.encode(), plain.replace("schema", "\\u0073chema").encode()] * (READERS // 2 + 2)
        waiting = [pool.submit(post, server, each) for each in bodies]
        wait_until(lambda: len(running) >= DEAR_READERS)
        post(server, body)
        assert not any(each.done() for each in waiting)
        go_on.set()
        assert all(each.result().status == 200 for each in waiting)
        assert max(most) == DEAR_READERS


@pytest.mark.parametrize("more", [{}, {"seed": 3, "temperature": 2}], ids=str)
def test_a_short_answer_is_made_between_two_forwards_of_a_longer_call_and_both_are_as_if_alone(
    nano, monkeypatch, more
):
    """And the longer call goes on for as long before the next, on a clock on which a position takes a second."""
    with Server(*nano, {"strategy": "ar"}) as server:
        asked = {"max_tokens": 80, "extra_body": {"min_new_tokens": 80, **more}}
        alone = server.text(**asked), server.text(max_tokens=6)
        lengths, calls, are_read = [], server.app.state.desk.calls, threading.Event()
        monkeypatch.setattr(calls_module, "time", SimpleNamespace(perf_counter=lambda: sum(lengths)))
        hook = server.model.register_forward_hook(
            lambda model, args, words, output: lengths.append(output.logits.shape[0] * words["input_ids"].shape[1]),
            with_kwargs=True,
        )
        take, taken = calls._let_in, []

        def let_in():
            if len(lengths) > 10 and len(taken) < 2:
                wait_until(lambda: calls.waiting)
            before, count = sum(lengths), len(lengths)
            take()
            if len(lengths) > count:
                taken.append((before, sum(lengths), len(lengths) - count))
            if len(taken) == 2:
                are_read.wait(60)

        calls._let_in = let_in
        with ThreadPoolExecutor(3) as pool:
            long = pool.submit(server.chat, **asked, logprobs=True, top_logprobs=3)
            wait_until(lambda: len(lengths) >= 10)
            texts = [pool.submit(server.text, max_tokens=6, seed=seed) for seed in (1, 2)]
            assert [each.result() for each in texts] == [alone[1]] * 2
            assert not long.done()
            are_read.set()
            choice = long.result().choices[0]
        hook.remove()
        assert choice.message.content == alone[0]
        assert "".join(each.token for each in choice.logprobs.content) == alone[0]
        (start, end, count), (begin, _, _) = taken
        assert begin - end >= end - start > 2 * count == 12  # the prompt's time counts


def test_an_answer_that_is_let_in_has_random_numbers_of_its_own_and_takes_none_of_the_longer_calls(nano):
    model, tokenizer = nano
    asked = Asked([5], GenerationConfig(max_new_tokens=12, do_sample=True, temperature=6.0), {"strategy": "ar"})
    answers = [Answer(asked, "id", tokenizer, lambda _: None, 0) for _ in range(2)]
    for answer in answers:
        torch.manual_seed(0)
        state = torch.get_rng_state()
        CallManager(model)._generate([answer], is_let_in=True)
        assert torch.equal(torch.get_rng_state(), state)
    assert answers[0].tokens != answers[1].tokens


@pytest.mark.parametrize("strategy", ["ar", "wedlm"])
def test_a_longer_call_lets_others_in_at_most_once_a_forward_and_then_runs_for_as_long(
    tokenizer, monkeypatch, strategy
):
    asked = Asked([5], GenerationConfig(max_new_tokens=1000), {"strategy": strategy})
    now, entered = SimpleNamespace(seconds=0), []
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(perf_counter=lambda: now.seconds))

    def let_in():
        entered.append(now.forward)
        now.seconds += now.takes

    for now.takes, expected in ((0, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6]), (20, [0])):
        entered.clear()
        batch = Batch([Answer(asked, "id", tokenizer, print, 0) for _ in range(2)], Turns(let_in).take)
        batch.put(torch.tensor([[5], [5]]))
        for now.forward in range(8):
            now.seconds += 1
            if strategy == "wedlm":
                batch.put_step([(0, 0, 0), (1, 0, 0)])
            for _ in range(1 if strategy == "ar" else 4):  # positions
                batch.put(torch.tensor([6, 6]))
        assert entered == expected


def test_few_grammars_are_tried_at_a_time_as_each_may_take_a_gigabyte(monkeypatch):
    running, most = [], []

    def run(*args, **options):
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(limits.subprocess, "run", run)
    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(limits.can_be_built, ["{}"] * 24))
    assert 1 < max(most) <= limits.TRIALS


def test_a_request_of_many_answers_lets_others_in(model, tokenizer):
    sent = []
    asked = Asked([5], GenerationConfig(max_new_tokens=1), {"strategy": "ar"})
    calls = CallManager(model)
    calls.waiting = [Answer(asked, "many", tokenizer, sent.append, index) for index in range(20)]
    calls.waiting.append(Answer(replace(asked, seed=1), "one", tokenizer, sent.append, 0))
    batches = [calls.next_batch() for _ in range(4)]
    assert [(batch[0].request_id, len(batch)) for batch in batches] == [
        ("many", 8),
        ("one", 1),
        ("many", 8),
        ("many", 4),
    ]


def test_answers_to_one_prompt_share_a_call_but_for_settings_that_reach_others_in_it(model, tokenizer):
    for more, sizes in ({}, [3]), ({"repetition_penalty": 1.5}, [1, 1, 1]), ({"max_time": 9.0}, [1, 1, 1]):
        asked = Asked([5], GenerationConfig(max_new_tokens=1, **more), {"strategy": "ar"})
        calls = CallManager(model)
        calls.waiting = [Answer(asked, "many", tokenizer, print, index) for index in range(3)]
        assert [len(calls.next_batch()) for _ in sizes] == sizes and not calls.waiting


def objects_left(server):
    """How many objects there are, all of them and by each of our classes."""
    wait_until(lambda: not server.uvicorn.server_state.connections)
    gc.collect()
    kinds = Counter(type(each) for each in gc.get_objects())
    own = {kind.__name__: count for kind, count in kinds.items() if str(kind.__module__).startswith("wedlm_hf")}
    return {"all": sum(kinds.values()) / 8, **own}  # one for each request would be seen, and what is under way is not


def test_a_server_keeps_nothing_of_the_requests_that_it_has_answered(server):
    rounds = 5

    def chat_of(number):
        return {"messages": [{"role": "user", "content": f"Sort {number}, 7"}], "max_tokens": 3}

    def ask_for_json(number):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": number}}}
        post(server, chat_of(number) | {"verification": "exact", "response_format": form}).read()

    def ask(number):
        chat, logprobs = chat_of(number), {"strategy": "ar", "logprobs": True, "top_logprobs": 2}
        for more in ({}, {"stream": True}, logprobs, {"seed": number, "n": 2}):
            post(server, chat | more).read()
        ask_for_json(number)
        refusal(server, chat | {"top_k": [number]})
        refusal(server, chat | {f"field{number}": 1})
        post(server, chat, "page/replay").read()
        post(server, chat | ENDLESS | {"stream": True, "max_tokens": 400}).close()
        server.app.state.desk.calls.wait()

    ask(0)  # what is made once
    for number in range(1, GRAMMARS):  # what is kept for a while
        ask_for_json(number)
    before = objects_left(server)
    for number in range(rounds):
        ask(GRAMMARS + number)
    grown = {name: count - before.get(name, 0) for name, count in objects_left(server).items()}
    assert max(grown.values()) < rounds, {name: count for name, count in grown.items() if count > 0}
