"""Prompts: rows of files, tokens, and when a reply is right."""

import json
from types import SimpleNamespace

import pytest
from tiny import tiny_model, tiny_tokenizer
from transformers import LlamaConfig, LlavaConfig

from wedlm_hf.console.prompts import STANDARD_INPUT, read_rows
from wedlm_hf.eval.prompts import Prompt, answer_limit, encode_prompt, read_prompts

SYSTEM = [{"role": "system", "content": "Be brief."}]


def rows(*items):
    return "".join(json.dumps(item) + "\n" for item in items)


@pytest.mark.parametrize(("text", "message"), [
    ("", "There is no prompt in 'data.jsonl'"),
    (rows({"prompt": "a"}) + "\n{oops\n", "data.jsonl, line 3: this is no JSON"),
    ("[" * 100_000, "data.jsonl, line 1: this is no JSON"),
    (rows(["a"]), "data.jsonl, line 1: a row must be a JSON object"),
    (rows({"prompt": "a"}, {"text": "b"}), "line 2: a row needs either `messages` or `prompt`, got text"),
    (rows({"prompt": "a", "answer": 3}), "line 1: `answer` must be a text or a list of texts, got 3"),
    (rows({"prompt": "a", "match": "fuzzy"}), "line 1: `match` must be one of exact, number, json, got 'fuzzy'"),
    (rows({"messages": [{"role": "assistant", "content": "b"}]}), "must be the user's .*, got assistant"),
    (rows({"messages": [{"role": "user", "content": " "}]}), "line 1: the last .* the user's .*, got noth"),
    (rows({"messages": SYSTEM}), "line 1: the last of the `messages` must be the user's .*, got system"),
    (rows({"prompt": SYSTEM}), "line 1: the last of the `prompt` must be the user's .*, got system"),
    (rows({"prompt": []}), "line 1: the last of the `prompt` must be the user's .*, got nothing"),
    (rows({"prompt": 3}), "line 1: `prompt` must be a text that is not empty, or a conversation, got 3"),
    (rows({"prompt": "\ud800"}), r"line 1: a prompt must be UTF-8 text, got '\\ud800'"),
    ("a\0b", "Prompts must be UTF-8 text, got a binary file: 'data.jsonl'"),
    (rows({"prompt": "a", "answer": "b"}, {"prompt": "c"}), "line 2: there is no `answer`, though line 1 has one"),
    (rows({"prompt": "a"}, {"prompt": "c", "answer": "b"}), "line 1: there is no `answer`, though line 2 has one"),
])  # fmt: skip
def test_malformed_rows_are_named_by_file_and_line(text, message):
    with pytest.raises(ValueError, match=message):
        read_prompts("data.jsonl", text)


def test_a_row_is_a_conversation_or_a_prompt_and_a_reply_at_its_end_is_left_out(caplog):
    question, reply = ({"role": role, "content": role} for role in ("user", "assistant"))
    known = {"prompt": "p", "task": "t", "answer": ["1", "2"], "match": "number"}
    first, second = read_prompts("d.jsonl", rows({"messages": [*SYSTEM, question], "answer": "x"}, known))
    assert first == Prompt([*SYSTEM, question], answers=("x",)) and first.text == "Be brief.\nuser"
    assert second == Prompt([{"role": "user", "content": "p"}], "t", ("1", "2"), "number")
    chats = [[question], [question, reply], [*SYSTEM, question, reply], [question, reply, question]]
    text = rows(*({"messages": chat} for chat in chats))
    assert [row.prompt for row in read_rows("d.jsonl", text)] == ["user", "user", [*SYSTEM, question], chats[3]]
    as_trl = rows(*({"prompt": chat, "completion": [reply]} for chat in chats[::2]))
    assert [row.prompt for row in read_rows("d.jsonl", as_trl)] == ["user", [*SYSTEM, question]]
    assert not caplog.messages and [prompt.text for prompt in read_prompts("d.jsonl", text)][1] == "user"
    assert caplog.messages == [
        "d.jsonl: answers are not compared with the replies in `messages`: give rows an `answer`."
    ]


def test_the_end_of_its_name_says_whether_a_file_holds_json_rows_and_lines_end_as_in_any_text_file():
    text = rows({"prompt": "a"})
    for name in ("d.jsonl", "d.ndjson", "d.json", "folder.txt/D.JSONL"):
        assert [row.prompt for row in read_rows(name, text)] == ["a"]
    for name in ("d.txt", "jsonl", "d.jsonl.txt", STANDARD_INPUT):
        assert [row.prompt for row in read_rows(name, text)] == [text.strip()]
    found = read_rows("d.txt", "\ufeffa\r\nb\r\n\rc\x0b\x85\u2029d\n \ne")
    assert [(row.line, row.prompt) for row in found] == [(1, "a"), (2, "b"), (4, "c\x0b\x85\u2029d"), (6, "e")]
    found = read_rows("d.jsonl", '{"prompt": "a\u2028\x85"}\r{"prompt": "\\r\\n b"}\r\n')
    assert [row.prompt for row in found] == ["a\u2028\x85", "\r\n b"]


def test_the_rule_of_a_prompt_decides_what_is_right():
    for match, answer, reply, right in (
        ("exact", "a b", " a b\n", True), ("exact", "a b", "a  b", False),
        ("number", "42", "42, no: 41", False), ("number", "-3", "It is -3.", True),
        ("json", '{"a": 1, "b": [2]}', '{"b":[2],"a":1}', True), ("json", '{"a": 1}', '{"a": true}', False),
    ):  # fmt: skip
        assert Prompt.of("p", answers=("other", answer), match=match).score(reply) == right, (match, answer)


def test_prompts_get_their_tokens_by_the_chat_template_or_as_they_are():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompt = Prompt.of("Sort 3, 1")
    raw = encode_prompt(model, tokenizer, prompt, raw=True)
    assert raw.tokens == tokenizer("Sort 3, 1")["input_ids"]
    assert len(encode_prompt(model, tokenizer, prompt).tokens) > len(raw.tokens)
    with pytest.raises(ValueError, match="Without a chat template, a row holds one turn, got 2"):
        encode_prompt(model, tokenizer, Prompt([*prompt.messages, *prompt.messages]), raw=True)
    small = tiny_model(max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"needs 1 to 7 tokens for this model, got \d+: 'Sort 3, 1'"):
        encode_prompt(small, tokenizer, prompt)


def test_an_answer_is_as_long_as_wanted_or_as_the_context_allows():
    model = tiny_model(max_position_embeddings=300)
    assert [answer_limit(model, 10), answer_limit(model, 100), answer_limit(model, 100, 7)] == [256, 200, 7]
    with_images = LlavaConfig(text_config=LlamaConfig(max_position_embeddings=32))
    assert answer_limit(SimpleNamespace(config=with_images), prompt_length=20, wanted=100) == 12
