"""Whatever a model writes, the client gets an answer; no message that a client sends disappears."""

import json
import time
from functools import cache, partial
from pathlib import Path

import openai
import pytest
import trl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import ANSWER, CHAT, NAME, Server
from tiny import tiny_model, tiny_tokenizer
from transformers import GenerationConfig
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS, ReasoningText, ToolCall
from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS
from transformers.utils.chat_parsing.response_templates import load_response_template

from wedlm_hf.serving.calls import Answer, Asked, RequestError
from wedlm_hf.serving.endpoints import ChatEndpoint, ServedModel
from wedlm_hf.serving.forms import message_form
from wedlm_hf.serving.message import CallParser, MessageParser, PlainParser

TOKENIZER = tiny_tokenizer()
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = [path.stem for path in sorted(TEMPLATES.glob("*.jinja")) if "training" not in path.stem]
# What chat templates hold that transformers has no form for, by the type of the model.
LATER = {
    "llama": (TEMPLATES / "llama3_2.jinja").read_text(),
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "lfm2": "{{ '<|tool_call_start|>' }}",
    "gemma3_text": "{{ '<start_function_call>' }}",
    "gpt_oss": "{{ '<|channel|>' }}",
}


def form_of(template, model_type):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return message_form(tokenizer, model_type)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
FALLBACKS = {names[0]: "" for names in _RESPONSE_TEMPLATE_FALLBACKS}
FORMS = {name: form_of(template, name) for name, template in (FALLBACKS | LATER).items()}
PARSERS = {
    **{name: partial(MessageParser, load_response_template(form), "", TOOLS) for name, form in FORMS.items()},
    "plain": PlainParser,
    "call": partial(CallParser, ["f"]),
}
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>", "<function=f>",
         "</function>", "<parameter=a>", "</parameter>", "<|tool_call>call:f", "<tool_call|>", "<|channel>thought\n",
         "<channel|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|eot_id|>", "<|eom_id|>", "</s>",
         "<|tool_call_start|>", "<|tool_call_end|>", "<start_function_call>call:f", "<end_function_call>",
         "<end_of_turn>", "<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
         "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>", "<|end|>",
         "<|return|>"]  # fmt: skip
CALLS = ['{"name": "f"}', '{"name": "f", "parameters": {}}', '{"name": "f", "arguments": {"n": 3}}', '{"name": f}',
         '[{"name": "f", "arguments": null}]', '{"name": "f", "arguments": "{}"}', '{"name": 5, "arguments": {}}',
         '{"name": "f", "arguments": {"x": NaN}}', '{"function": {"name": "f"}}', '{"name": "\\ud800"}', "[]", "null",
         '{"name": "f", "arguments": [1]}']  # fmt: skip
ENOUGH = 10**6  # tokens
WHOLE = [f"<tool_call>{call}</tool_call>" for call in CALLS]
WHOLE += [f"[TOOL_CALLS]{call}" for call in CALLS] + ['[TOOL_CALLS]f[ARGS]{"n": 3}', '{"name": "f"}; {"name": "f"}']
WRITTEN = st.lists(st.sampled_from([*WHOLE, *MARKS, *CALLS, "{", "}", "\n", "Hi ", "é", "5"]), max_size=9).map("".join)


def answered(text, parser, *, stops=(), limit=ENOUGH, sizes=(1,)):
    """What an answer sends that a model writes so, in pieces of these sizes in turn."""
    sent, tokens = [], TOKENIZER(text).input_ids
    config = GenerationConfig(max_new_tokens=limit)
    answer = Answer(Asked([1], config, {}, parser=parser, stops=[*stops]), "id", TOKENIZER, sent.append, 0)
    while tokens:
        for size in sizes:
            answer.put(tokens[:size])
            tokens = tokens[size:]
    answer.finish("stop")
    assert [item is None for _, item, _ in sent] == [False] * (len(sent) - 1) + [True]  # one end, the last
    items = []
    for _, item, _ in sent[:-1]:
        if items and isinstance(item, str) and type(item) is type(items[-1]):
            item = type(item)(items.pop() + item)
        items.append(item)
    return items, answer


@settings(max_examples=600, deadline=None)
@given(
    WRITTEN,
    st.sampled_from(sorted(PARSERS)),
    st.integers(1, 60) | st.just(ENOUGH),
    st.sampled_from([(), ("5",), ("</tool_call>", "}")]),
)
def test_whatever_a_model_writes_is_an_answer_the_same_in_whatever_pieces_it_comes(text, name, limit, stops):
    items, answer = answered(text, PARSERS[name], stops=stops, limit=limit)
    assert answered(text, PARSERS[name], stops=stops, limit=limit, sizes=(3, 1, 7))[0] == items
    assert answer.finish_reason in ("stop", "length", "tool_calls")
    for item in items:
        if isinstance(item, ToolCall):
            assert isinstance(json.loads(item.arguments), dict) and item.name in text
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) == len(items) and not stops and limit == ENOUGH:  # nothing but marks disappears
        there, written = "".join(texts), text
        for mark in MARKS:
            there, written = there.replace(mark, ""), written.replace(mark, "")
        assert "".join(there.split()) == "".join(written.split())


THINKS = "So <tool_call> it\n</think>\nHi"


@pytest.mark.parametrize(("text", "expected"), [
    (f"<think>{THINKS}", [ReasoningText("So <tool_call> it\n"), "\nHi"]),
    ('<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", "{}")]),
    ('<tool_call>[{"name": "f"}, {"name": "f", "parameters": {"a": 1}}]</tool_call>',
     [ToolCall("f", "{}"), ToolCall("f", '{"a": 1}')]),
    ('Hi<tool_call>{"name": </tool_call> rest', ['Hi<tool_call>{"name": </tool_call> rest']),
    (f"<tool_call>{'[' * 1500}</tool_call>", [f"<tool_call>{'[' * 1500}</tool_call>"]),
    ('<tool_call>{"name": 5}</tool_call><tool_call>{"name": "f"}</tool_call>',
     ['<tool_call>{"name": 5}</tool_call>', ToolCall("f", "{}")]),
])  # fmt: skip
def test_calls_are_calls_thoughts_are_thoughts_and_all_else_is_content(text, expected):
    assert answered(text, PARSERS["qwen2"])[0] == expected


def test_a_call_that_is_cut_is_no_call():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    items, answer = answered(text, PARSERS["qwen2"], limit=len(TOKENIZER(text).input_ids) - 1)
    assert all(isinstance(item, str) for item in items) and answer.finish_reason == "length"
    xml = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    for limit in range(1, len(TOKENIZER(xml).input_ids)):  # its beginning would be a call with fewer arguments
        assert all(isinstance(item, str) for item in answered(xml, PARSERS["qwen3_5"], limit=limit)[0])


BLANK = " " * 40000
XML = "<tool_call><function=f><parameter=a>b{}c</parameter></function></tool_call>"
UNENDED = {"qwen3_5": "<tool_call><function=f><parameter=a>{}c</function></tool_call>"}
UNENDED["gpt_oss"] = "<|channel|>commentary to=functions.f<|channel|>commentary{}c"


@pytest.mark.parametrize(
    ("name", "text"),
    [*((name, "Hi{}Hi") for name in sorted(PARSERS)), ("qwen3_5", XML), *UNENDED.items()],
    ids=str,
)
def test_white_space_is_read_once_however_long_it_is(name, text):
    """Else each of these would take half a minute, in which no other thread has a turn."""
    parser = PARSERS[name]()
    before, behind = text.split("{}")
    start = time.thread_time()
    pieces = [parser.read(piece) for piece in (before, BLANK[:20000], BLANK[20000:], behind)]
    pieces.append(parser.end(is_cut=False))
    assert time.thread_time() - start < 2
    items = [item for found in pieces for item in found]
    if text != UNENDED.get(name):
        assert "".join(map(str, items)).split() == ["Hi", "Hi"] or items == [ToolCall("f", f'{{"a": "b{BLANK}c"}}')]


N3 = [ToolCall("f", '{"n": 3}')]


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("llama", '{"name": "f", "parameters": {"n": "3"}}', N3),
    ("llama", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"n": 3}}<|eom_id|>', N3),
    ("llama", '{"type": "function", "function": {"name": "f", "arguments": {"n": 3}}}', N3),
    ("llama", '{"name": "f", "parameters": {"n": 3}}; {"name": "f", "parameters": {"n": 3}}', N3 * 2),
    ("llama", 'So: {"name": "f", "parameters": {"n": 3}}', ["So: ", *N3]),
    ("llama", '{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
    ("llama", '{"name": "f", "parameters": {"n": 3}', ['{"name": "f", "parameters": {"n": 3}']),
    ("llama", '<|python_tag|>f.call(n=3)', ["<|python_tag|>f.call(n=3)"]),
    ("llama", '{"a": 1}', ['{"a": 1}']), ("llama", '[{"name": "f", "parameters": {"n": 3}}]', N3),
    ("llama", '[{"name": "Bob"}]', ['[{"name": "Bob"}]']),
    ("qwen2", '<tool_call><tool_call>{"name": "f"}</tool_call>', ['<tool_call><tool_call>{"name": "f"}</tool_call>']),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 3}, "id": "abcdefghi"}]</s>', N3),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 3}', N3), ("mistral", '[TOOL_CALLS]f{"n": 3}[TOOL_CALLS]f{"n": 3}', N3 * 2),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"n": 3}', N3),
    ("mistral", "Hi [TOOL_CALLS] x", ["Hi [TOOL_CALLS] x"]),
    # A mark says that it is a call, of whatever name; bare JSON is one by its name alone.
    ("mistral", '[TOOL_CALLS] [{"name": "g", "arguments": {}}]</s>', [ToolCall("g", "{}")]),
    ("qwen2", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', [ToolCall("g", "{}")]),
    ("llama", '<|python_tag|>{"name": "g", "parameters": {}}<|eom_id|>', [ToolCall("g", "{}")]),
    ("llama", '{"name": "g", "parameters": {}}', ['{"name": "g", "parameters": {}}']),
    pytest.param("lfm2", "<|tool_call_start|>[f(n=3), f(n=3)]<|tool_call_end|>Hi", [*N3 * 2, "Hi"],
                 marks=pytest.mark.skipif("python-call-list" not in CONTENT_PARSERS, reason="an older transformers")),
    ("lfm2", "<|tool_call_start|>[f(3)]<|tool_call_end|>", ["<|tool_call_start|>[f(3)]<|tool_call_end|>"]),
    ("gemma3_text", "<start_function_call>call:f{n:3}<end_function_call>", N3),
    ("gemma3_text", "<start_function_call>call:f{s:<escape>a<escape>}<end_function_call>",
     [ToolCall("f", '{"s": "a"}')]),
    ("gpt_oss", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
     [ReasoningText("So."), "Hi"]),
    ("gpt_oss", "<|channel|>final<|message|>Hi<|return|>", ["Hi"]),
    ("gpt_oss", '<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f '
     '<|constrain|>json<|message|>{"n": "3"}<|call|>', ["I look.", *N3]),
    ("gpt_oss", '<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.f<|channel|>commentary json'
     '<|message|>{"n": 3}<|call|>', [ReasoningText("So."), *N3]),
    ("gpt_oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{",
     ["<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"]),
    ("qwen2", '<tool_call>[{"name": "f", "arguments": {"n": "3"}}]</tool_call>', N3),  # SmolLM2's
    ("qwen2", '<tool_call>{"name": "f", "arguments": {"n": 3}}{"name": "f", "arguments": {"n": 3}}</tool_call>',
     N3 * 2),
], ids=str)  # fmt: skip
def test_each_family_calls_in_its_own_form(name, text, expected):
    assert answered(text, PARSERS[name])[0] == answered(text, PARSERS[name], sizes=(5,))[0] == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_form_is_found_by_the_chat_template_whatever_the_models_type(name):
    """So a fine-tuned Llama with the template of Qwen is read as Qwen."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    found = form_of(template, "gpt2")
    marks = ("<tool_call>", "<|tool_call>", "<|tool_call_start|>", '"parameters": ', "<|channel|>", "</think>")
    assert (found is not None) == any(mark in template for mark in marks)
    if found:
        load_response_template(found)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WRITTEN)
def test_a_client_gets_the_same_answer_whole_and_streamed_of_a_chat_and_of_responses(scripted, text):
    scripted.text = text
    whole = scripted.chat().choices[0]
    delta = {"content": "", "reasoning_content": ""}
    calls = []
    for chunk in scripted.chat(stream=True):
        found = chunk.choices[0].delta.model_dump(exclude_none=True)
        for name in delta:
            delta[name] += found.get(name, "")
        calls += [call["function"] for call in found.get("tool_calls", [])]
    assert delta["content"] == (whole.message.content or "")
    assert delta["reasoning_content"] == getattr(whole.message, "reasoning_content", "")
    assert calls == [call.function.model_dump() for call in whole.message.tool_calls or []]
    assert chunk.choices[0].finish_reason == whole.finish_reason
    asked = {"model": NAME, "input": "Hi"}
    items = scripted.client.responses.create(**asked)
    with scripted.client.responses.stream(**asked) as stream:
        last = list(stream)[-1]
    assert items.output_text == last.response.output_text == delta["content"]
    named = [item.name for item in items.output if item.type == "function_call"]
    assert named == [item.name for item in last.response.output if item.type == "function_call"]
    assert named == [call["name"] for call in calls]
    # What the server returned is accepted when it is sent back.
    scripted.chat([*CHAT, whole.message.model_dump(), *CHAT])
    scripted.client.responses.create(model=NAME, input=[*CHAT, *(each.model_dump() for each in items.output), *CHAT])


@pytest.fixture(scope="module")
def scripted():
    """A server whose model writes a given text."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()

    def write(batch, is_let_in=False):
        for answer in batch:
            answer.put(tokenizer(server.text).input_ids)
            answer.finish("stop")

    with Server(tiny_model(max_position_embeddings=10**5), tokenizer, {"strategy": "ar"}) as server:
        server.app.state.desk.calls._generate = write
        yield server


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
NAMED = tiny_tokenizer()
NAMED.add_special_tokens({"additional_special_tokens": SPECIAL})
NAMED.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
CUT = st.sampled_from(SPECIAL).flatmap(
    lambda name: st.tuples(st.integers(0, len(name) - 1), st.integers(1, len(name))).map(
        lambda place: name[place[0] : place[0] + place[1]]
    )
)


@pytest.fixture(scope="module")
def speaker():
    """A server whose model writes given tokens, and none of them ends an answer."""

    def write(batch, is_let_in=False):
        for answer in batch:
            answer.ends = set()
            for token in NAMED("".join(server.pieces), add_special_tokens=False).input_ids:
                answer.put([token])
            answer.finish("stop")

    model = tiny_model(vocab_size=len(NAMED), max_position_embeddings=10**4)
    with Server(model, NAMED, {"strategy": "ar"}) as server:
        server.app.state.desk.calls._generate = write
        yield server


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([*SPECIAL, "1", "23 ", "\n", "é"]), max_size=8),
    st.lists(CUT, max_size=4),
    st.sampled_from(["chat", "tools", "text"]),
)
def test_a_stop_string_in_the_name_of_a_special_token_leaves_no_part_of_it(speaker, pieces, stops, kind):
    """Whole and streamed; the whole name is one that an answer ends before."""
    speaker.pieces = pieces
    more = {"tools": TOOLS} if kind == "tools" else {}

    def told(stop, stream=False):
        if kind == "text":
            made = speaker.complete("?", stop=stop, stream=stream)
            return "".join(each.choices[0].text for each in (made if stream else [made])), "", []
        made = speaker.chat(stop=stop, stream=stream, **more)
        parts = [each.choices[0].delta for each in made] if stream else [made.choices[0].message]
        texts = [
            "".join(getattr(part, name, None) or "" for part in parts) for name in ("content", "reasoning_content")
        ]
        return *texts, [call.function.model_dump() for part in parts for call in part.tool_calls or []]

    whole = told(stops)
    assert told(stops, stream=True) == whole
    assert not set("".join(whole[:2])) - set("123 \né")
    said = pieces[: min((place for place, piece in enumerate(pieces) if piece in stops), default=len(pieces))]
    speaker.pieces = said
    assert told([]) == whole
    if kind == "text":
        assert whole[0] == "".join(piece for piece in said if piece not in SPECIAL)


CALL = {"id": "c", "type": "function", "function": {"name": "verb", "arguments": '{"noun": "value"}'}}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "function", "critic"])},
    optional={"content": st.sampled_from(["", "words", None, "parts"]), "tool_calls": st.sampled_from([[CALL], None]),
              "name": st.just("Ann"), "reasoning_content": st.just("thoughts"), "refusal": st.none()},
)  # fmt: skip


MODEL = tiny_model(max_position_embeddings=10**5)


@cache
def endpoint_of(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return ChatEndpoint(ServedModel(NAME, MODEL, tokenizer, {"strategy": "ar"}))


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(NAMES), st.lists(MESSAGE, min_size=1, max_size=5))
def test_a_message_is_in_the_prompt_or_refused_by_its_name(name, messages):
    endpoint = endpoint_of((TEMPLATES / f"{name}.jinja").read_text())
    tokenizer, words = endpoint.served.tokenizer, []
    for number, message in enumerate(messages):
        if message.get("content"):
            words.append(f"word{number}word")
            parts = [{"type": "text", "text": words[-1]}]
            message["content"] = parts if message["content"] == "parts" else words[-1]
        if message.get("tool_calls"):
            words += ["verb", "noun", "value"]
        if message.get("name") and message["role"] not in ("tool", "function"):
            words.append("Ann")
    refused, prompt = None, ""
    try:
        _, (asked,) = endpoint.read(json.dumps({"messages": messages, "max_tokens": 2}).encode())
        prompt = tokenizer.decode(asked.prompt)
    except RequestError as error:
        refused = error.status, str(error.param).split(".")[0]
    assert refused == (400, "messages") or [word for word in words if word not in prompt] == []


def test_a_developer_speaks_as_the_system_where_a_template_knows_none():
    endpoint = endpoint_of((TEMPLATES / "qwen2_5.jinja").read_text())

    def prompt(*roles):
        turns = [{"role": role, "content": f"Be {role[0]}."} for role in roles] + CHAT
        (asked,) = endpoint.read(json.dumps({"messages": turns}).encode())[1]
        return endpoint.served.tokenizer.decode(asked.prompt)

    assert prompt("developer") == prompt("system").replace("Be s.", "Be d.")
    assert "Be s.\n\nBe d." in prompt("system", "developer")


@pytest.fixture(scope="module")
def thinker(nano):
    """A server of wedlm-nano under templates that open thoughts, of which one can do without."""
    model, tokenizer = nano
    tokenizer = tokenizer.__class__.from_pretrained(tokenizer.name_or_path)
    opens = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
    has_switch = tokenizer.chat_template + "{% if add_generation_prompt %}{# tools #}" + opens + "{% endif %}"
    has_none = has_switch.replace(opens, "<think>\n")
    with Server(model, tokenizer, {"strategy": "wedlm", "verification": "exact"}) as server:
        server.templates = {"switch": has_switch, "none": has_none}
        yield server


def told(choice):
    """Content, thoughts, calls, and why it ended."""
    calls = [call.function.model_dump() for call in choice.message.tool_calls or []]
    return choice.message.content or "", getattr(choice.message, "reasoning_content", ""), calls, choice.finish_reason


ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
ONE_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": ONE}}
F = {"type": "function", "function": {"name": "f", "parameters": ONE}}


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["switch", "none"]),
    st.sampled_from([None, False, True]),
    st.sampled_from([{"response_format": ONE_FORM}, {"response_format": {"type": "json_object"}},
                     {"tools": [F], "tool_choice": "required"}, {"tools": [F], "response_format": ONE_FORM}]),
    st.sampled_from([3, 60]),
    st.sampled_from([{}, {"stop": ["25"]}, {"logprobs": True}, {"n": 2}]),
)  # fmt: skip
def test_thoughts_are_thoughts_and_what_follows_them_is_json(thinker, template, thinks, asked, limit, more):
    """Whole, streamed and by AR decoding alike."""
    thinker.tokenizer.chat_template = thinker.templates[template]
    words = {} if thinks is None or template == "none" else {"chat_template_kwargs": {"enable_thinking": thinks}}
    asked = {"max_tokens": limit, **asked, **more}
    whole, ar = (thinker.chat(**asked, extra_body=words | how).choices for how in ({}, {"strategy": "ar"}))
    assert [*map(told, ar)] == [*map(told, whole)]
    delta = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in thinker.chat(**asked, extra_body=words, stream=True):
        if chunk.choices[0].index == 0:
            found = chunk.choices[0].delta.model_dump(exclude_none=True)
            delta["content"] += found.get("content", "")
            delta["reasoning_content"] += found.get("reasoning_content", "")
            delta["calls"] += [each["function"] for each in found.get("tool_calls", [])]
    content, thoughts, calls, reason = told(whole[0])
    assert (delta["content"], delta["reasoning_content"], delta["calls"]) == (content, thoughts, calls)
    has_thoughts = template == "none" or thinks is True
    assert bool(thoughts) == has_thoughts
    if has_thoughts and (limit == 3 or "stop" in more):
        assert (content, reason) == ("", "length" if limit == 3 else "stop")
    elif has_thoughts:
        assert thoughts == ANSWER
    if reason == "tool_calls":
        assert json.loads(calls[0]["arguments"]) == {"a": 1}
    elif reason == "stop" and "stop" not in more:
        json.loads(content)


def test_where_thoughts_end_must_be_known_if_json_is_to_follow_them(nano):
    model, tokenizer = nano
    tokenizer = tokenizer.__class__.from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    form = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n"}
    content = {"close": "<|im_end|>", "content": "text"}
    endpoint = ChatEndpoint(ServedModel(NAME, model, tokenizer, {"strategy": "ar"}))
    asked = json.dumps({"messages": CHAT, "response_format": ONE_FORM}).encode()
    for pattern, closing in {r"</think>\s*": "</think>", r"<\|im_start\|>": "<|im_start|>", "(.)<": None}.items():
        thoughts = {"open": "<think>", "close_pattern": pattern, "content": "text"}
        tokenizer.response_template = form | {"fields": {"thinking": thoughts, "content": content}}
        endpoint = ChatEndpoint(ServedModel(NAME, model, tokenizer, {"strategy": "ar"}))
        if closing:
            assert endpoint.read(asked)[1][0].thoughts.closing == tokenizer(closing).input_ids
        else:
            with pytest.raises(RequestError, match="no certain end"):
                endpoint.read(asked)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("asked", "wishes"), [
    ({"chat_template_kwargs": {"enable_thinking": True}}, True), ({"reasoning_effort": "high"}, True),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False), ({"reasoning_effort": "none"}, False),
    ({"chat_template_kwargs": {"thinking": True}}, True), ({"reasoning_effort": "minimal"}, None),
    ({"chat_template_kwargs": {"reasoning_effort": "none"}}, False),
    *[({"chat_template_kwargs": {"enable_thinking": nothing}}, None) for nothing in (None, "", "minimal")],
], ids=str)  # fmt: skip
def test_who_asks_for_what_a_template_without_a_switch_does_anyway_gets_it_and_others_are_told_how_to_go_on(
    thinks, asked, wishes
):
    opens = "{{ '<think>\n' if true }}".replace("true", str(thinks).lower())
    endpoint = endpoint_of((TEMPLATES / "qwen2_5.jinja").read_text() + opens)
    body = json.dumps({"messages": CHAT} | asked).encode()
    if wishes in (thinks, None):
        prompt = endpoint.served.tokenizer.decode(endpoint.read(body)[1][0].prompt)
        assert prompt.endswith("<think>\n" if thinks else "assistant\n")
        return
    with pytest.raises(RequestError, match=r"(always opens|knows no) thoughts: leave it out") as refused:
        endpoint.read(body)
    assert (refused.value.status, refused.value.param) == (400, *asked)


@pytest.mark.parametrize("asked", [
    {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False, "enable_thinking": True}},
], ids=str)  # fmt: skip
def test_of_several_wishes_none_is_dropped(asked):
    with pytest.raises(RequestError, match="knows no thoughts: leave it out"):
        endpoint_of((TEMPLATES / "qwen2_5.jinja").read_text()).read(json.dumps({"messages": CHAT} | asked).encode())


def test_a_tool_that_must_be_called_is_called(nano):
    model, tokenizer = nano
    tokenizer = tokenizer.__class__.from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    parameters = {"$defs": {"A": {"enum": [3, 4]}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}
    parameters |= {"required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    named = {"type": "function", "function": {"name": "g"}}
    with Server(model, tokenizer, {"strategy": "wedlm", "verification": "exact"}) as server:
        for choice, names in {"required": ["f", "g"], json.dumps(named): ["g"]}.items():
            asked = {"tools": tools, "tool_choice": named if "{" in choice else choice, "max_tokens": 80}
            whole = server.chat(**asked).choices[0]
            (call,) = whole.message.tool_calls
            assert whole.finish_reason == "tool_calls" and call.function.name in names
            assert json.loads(call.function.arguments)["a"] in (3, 4)
            chunks = [chunk.choices[0].delta.tool_calls for chunk in server.chat(stream=True, **asked)]
            assert [each[0].function.arguments for each in chunks if each] == [call.function.arguments]
        with pytest.raises(openai.BadRequestError, match="none of the `tools`"):
            server.chat(tools=tools[:1], tool_choice=named)
