"""Work and memory grow with what a client sends, and not faster."""

import asyncio
import json
import re
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import CHAT
from tiny import tiny_model, tiny_tokenizer
from transformers.cli.serving.utils import ReasoningText

from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_tokenizer
from wedlm_hf.serving import limits
from wedlm_hf.serving.calls import Chances, RequestError
from wedlm_hf.serving.conversation import MOST_FIELDS, Conversation
from wedlm_hf.serving.endpoints import ChatEndpoint, ServedModel, TextEndpoint
from wedlm_hf.serving.items import ItemsResponse
from wedlm_hf.serving.limits import MOST_OBJECTS, may_have_tokens
from wedlm_hf.serving.message import CallParser
from wedlm_hf.serving.responses import ChatResponse, TextResponse

TOKENIZER = load_tokenizer(NANO)
WRITES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def served(context, template=WRITES):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return ServedModel("m", tiny_model(max_position_embeddings=context), tokenizer, {"strategy": "ar"})


def read(endpoint, **body):
    return endpoint(served(1000)).read(json.dumps(body).encode())


@pytest.fixture
def busy():
    """Fails where more than some seconds of a processor were taken; what grows with a square takes minutes here."""
    start = time.thread_time()
    yield
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("piece", ["1 a", "a\n", "7", "é"])
def test_a_text_with_far_more_tokens_than_the_context_is_never_tokenized_as_a_whole(monkeypatch, piece):
    """Each token takes half a kilobyte while a text is tokenized."""
    model, sizes = served(10**5), []
    kind = type(model.tokenizer)
    call = kind.__call__
    text = piece * (model.most_characters // len(piece))
    monkeypatch.setattr(kind, "__call__", lambda self, text, **how: sizes.append(len(text)) or call(self, text, **how))
    chat = [{"role": "user", "content": text[len("user: \n") :]}]
    for endpoint, asked in ((TextEndpoint, {"prompt": text}), (ChatEndpoint, {"messages": chat})):
        with pytest.raises(RequestError, match="context is 100000 tokens") as refused:
            endpoint(model).read(json.dumps(asked).encode())
        assert refused.value.code == "context_length_exceeded"
    assert sizes and max(sizes) < 10**5 < len(text)


PIECES = st.sampled_from(
    [" ", "\n", "a", "Count from ", "def function(self):", "é", "中", "1, 2, 3", "=" * 40, " " * 600]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PIECES, st.integers(1, 60)), min_size=1, max_size=12), st.sampled_from([300, 512]))
def test_a_text_that_fits_is_never_refused_for_its_parts(pieces, size):
    text = "".join(piece * count for piece, count in pieces)
    count = lambda part: len(TOKENIZER(part, add_special_tokens=False).input_ids)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LONGEST_PART", 0)
        patch.setattr(limits, "PARTS", re.compile(rf".{{1,{size}}}\S{{0,16}}", re.DOTALL))
        assert may_have_tokens(text, count(text), count)
        assert "".join(part[0] for part in limits.PARTS.finditer(text)) == text


def test_a_body_has_a_limit_of_objects_before_they_are_read():
    for asked in ({"messages": CHAT * MOST_OBJECTS}, {"messages": CHAT, "metadata": [[]] * MOST_OBJECTS}):
        with pytest.raises(RequestError, match="more than 65536 objects and lists"):
            read(ChatEndpoint, **asked)
    text = '[{"' * MOST_OBJECTS  # as a text may have
    assert (
        limits.objects_in(json.dumps({"messages": [{"role": "user", "content": text + "\\"}], "n": [{}]}).encode())
        == 5
    )
    with pytest.raises(RequestError, match="at most 1024 items"):
        read(TextEndpoint, prompt=["?"] * 100, suppress_tokens=[5] * 1025)


def test_fields_that_a_template_may_know_are_few(monkeypatch):
    def compared(count):
        model = served(1000, "{% for m in messages %}{{ m }}{% endfor %}")
        chat = Conversation(model.tokenizer, [CHAT[0] | {f"field{each}": "x" for each in range(count)}], None)
        write, texts = chat._written, []
        chat._written = lambda *args, **how: texts.append(1) or write(*args, **how)
        chat.text()
        return len(texts)

    assert compared(MOST_FIELDS) == MOST_FIELDS + 2
    with pytest.raises(RequestError, match=f"more than {MOST_FIELDS} fields"):
        compared(MOST_FIELDS + 1)


def test_messages_that_become_one_are_joined_once(busy):
    turns = [{"role": "developer", "content": "x" * 800}] * 20000
    (message,) = Conversation(served(1000).tokenizer, turns, None).messages
    assert message["role"] == "system" and len(message["content"]) == 802 * 20000 - 2


def test_a_template_has_so_much_time_of_a_processor_however_few_its_lines_are(monkeypatch):
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.2)
    joins = "{% set all = namespace(text='') %}{% for m in messages %}{% set all.text = all.text + m.content %}\n"
    tokenizer = served(1000, joins + "{% endfor %}{{ all.text }}").tokenizer
    turns = [{"role": "user", "content": "x" * 800}] * 10000
    with pytest.raises(RequestError, match="it takes too long"):
        Conversation(tokenizer, turns, None).text()


def response(kind, likeliest=None):
    asked = SimpleNamespace(likeliest=likeliest, makes_one_call=False)
    return kind("id", "m", [SimpleNamespace(asked=asked)], 1, asyncio.Queue(), SimpleNamespace(name=str))


COUNT = 10**5


def test_a_long_answer_is_put_together_once(busy):
    choice = response(TextResponse, likeliest=0).choice(0, [], [Chances(5, -1.0, [])] * COUNT, False)
    assert choice["logprobs"]["text_offset"] == [*range(COUNT)]
    texts = [ReasoningText("so it goes")] * COUNT + ["so it is"] * COUNT
    message = response(ChatResponse).choice(0, texts, [], False)["message"]
    assert len(message["content"]) == 8 * COUNT and len(message["reasoning_content"]) == 10 * COUNT
    items = response(ItemsResponse)
    for text in ("so it goes",) * COUNT + (None,):
        for _ in items._events(text):
            pass
    assert len(items.items[0]["content"][0]["text"]) == 10 * COUNT
    parser = CallParser(["f"])
    for _ in range(COUNT):
        parser.read("so it goes")
    assert len(parser.end(is_cut=False)[0]) == 10 * COUNT
