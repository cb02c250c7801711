"""What is taught is what was written: tool calls, thoughts, empty and odd turns; files as other systems write them."""

import csv
import json
import re
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sft_trainer import CHATS, GOOD, learnt_text, settings_of, trainer_on
from tiny import tiny_model, tiny_tokenizer, write_checkpoint

from wedlm_hf.training import WeDLMSFTTrainer
from wedlm_hf.training.examples import Reading, read_example, reading_of, unread_columns
from wedlm_hf.training.rows import load, row_of

USER, ANSWER = CHATS[0]
BEGIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TURN = "{% if m.role == 'assistant' %}{% generation %}BODY<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
END = "<|im_end|>{% endif %}\n{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
THOUGHT = "<think>{{ m.reasoning_content }}</think>"


def template(body: str, begin: str = "{{ tools | tojson if tools }}") -> str:
    return begin + BEGIN + TURN.replace("BODY", body) + END


TOOLS = template("{{ m.content }}" + CALLS)


def call_of(arguments, name: str = "weather") -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, content="") -> list[dict]:
    return [USER, {"role": "assistant", "content": content, "tool_calls": list(calls)}]


def rows_of(folder: Path, examples: list[dict], streaming: bool = False):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return load(str(path), streaming=streaming)


def taught(folder: Path, data, chat_template: str = TOOLS, **settings) -> list[str]:
    """What is learnt of a dataset, or of the rows of a file."""
    tokenizer, data = tiny_tokenizer(), rows_of(folder, data) if isinstance(data, list) else data
    tokenizer.chat_template = chat_template
    return [learnt_text(row) for row in trainer_on(folder, data, tokenizer=tokenizer, **settings).train_dataset]


# Tool calls.


def test_tool_calls_are_learnt_as_objects_whether_they_were_text_or_not(tmp_path):
    for content in ("", None):
        for arguments, expected in (
            ({"city": "Paris"}, '{"city": "Paris"}'), ('{"city": "Paris"}', '{"city": "Paris"}'),
            ("", "{}"),  # as the server reads it
        ):  # fmt: skip
            rows = [{"messages": calling(call_of(arguments), content=content)}]
            assert taught(tmp_path, rows) == [f"[weather{expected}]<|im_end|>"]


def test_the_arguments_of_one_call_get_none_of_another_and_a_null_that_was_written_stays(tmp_path):
    calls = [{"city": "Paris"}, {"name": "Ada", "unit": None}, {"city": 3.0, "big": 10**20}]
    examples = [{"messages": calling(call_of(arguments))} for arguments in calls]
    expected = [f"[weather{json.dumps(arguments)}]<|im_end|>" for arguments in calls]
    for streaming in (False, True):
        assert taught(tmp_path, rows_of(tmp_path, examples, streaming)) == expected
    table = Dataset.from_list(examples[:2])  # where each has the keys of both
    assert taught(tmp_path, table) == [expected[0], '[weather{"name": "Ada"}]<|im_end|>']


def test_tools_need_a_template_that_knows_them_may_be_json_text_and_hold_no_null_keys_of_a_table(tmp_path):
    tools = [{"type": "function", "function": {"name": name, "parameters": {name: "x"}}} for name in ("f", "g")]
    rows = [{"messages": [USER, ANSWER], "tools": [tool]} for tool in tools]
    texts = [row | {"tools": json.dumps(row["tools"])} for row in rows]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TOOLS
    for data in (Dataset.from_list(rows), rows_of(tmp_path, texts)):
        read = trainer_on(tmp_path, data, tokenizer=tokenizer).train_dataset
        shown = [tokenizer.decode(row["input_ids"]).split("<|im_start|>")[0] for row in read]
        assert shown == [json.dumps([tool]) for tool in tools]
    with pytest.raises(ValueError, match=r"data.jsonl:1 has `tools`: the chat template knows none"):
        taught(tmp_path, rows, template("", begin=""))


ODD = "{% if m.content == 'odd' %}"
PARIS, ROME = call_of({"city": "Paris"}), call_of({"city": "Rome"})
LEFT_OUT = "the chat template leaves it"


@pytest.mark.parametrize(
    ("answer", "chat_template", "message"),
    [({"tool_calls": [PARIS]}, template("{{ m.content }}"), "has `tool_calls`: the chat template knows none."),
     ({"tool_calls": [PARIS]}, template("{{ m.content }}{{ 'x' if m.tool_calls }}"), f"has 'city': {LEFT_OUT} out"),
     ({"tool_calls": [PARIS, ROME]}, TOOLS.replace("tool_calls or []", "get('tool_calls', [])[:1]"),
      f"has 'Rome': {LEFT_OUT} out."),
     ({"tool_calls": [PARIS], "content": "Well."},
      TOOLS.replace("m.content }}{% for", "m.content if not m.tool_calls }}{% for"),
      f"has 'Well.': {LEFT_OUT} out."),
     ({"tool_calls": [call_of("{")]}, TOOLS, "`arguments` of a tool call must be a JSON object, got '{'."),
     ({"tool_calls": [call_of("[1]")]}, TOOLS, "must be a JSON object, got '[1]'."),
     ({"tool_calls": [call_of(None)]}, TOOLS, "must be a JSON object, got None."),
     ({"tool_calls": "x"}, TOOLS, "`tool_calls` must be a list of objects, got 'x'."),
     ({"function_call": {"name": "f"}}, TOOLS, "do not know `function_call`: write it as one of `tool_calls`."),
     ({"weight": 0}, TOOLS, "`weight` must be 1, got 0"),
     ({"loss": False}, TOOLS, "`loss` must be 1, got False"),
     ({"train": False}, TOOLS, "`train` must be 1, got False"),
     ({"role": "Assistant"}, TOOLS, "`role` of the assistant must be 'assistant', got 'Assistant'."),
     ({"role": "note", "content": "42 %"}, TOOLS.replace("{% else", "{% elif m.role == 'user'"),
      f"has '42 %': {LEFT_OUT} out."),
     ({"thinking": "Hm"}, TOOLS, "has `reasoning_content`: the chat template knows no thoughts."),
     ({"content": "odd"}, template(ODD + "{{ 'x' + 3 }}{% endif %}{{ m.content }}"), "refuses it: can only conca"),
     ({"content": "odd"},
      template(ODD + "{{ raise_exception('No') }}{% endif %}{{ m.content }}"), "refuses it: No"),
     ({"content": "odd"},
      template("{{ m.content if m.content != 'odd' }}").replace("{% gen", ODD + "odd{% endif %}{% gen"),
      f"has 'odd': {LEFT_OUT} outside its {{% generation %}} markers."),
     ({"content": "It is <|mask|> here."}, TOOLS, "holds the mask token, '<|mask|>'")],
)  # fmt: skip
def test_what_a_template_would_leave_out_or_change_is_told_by_its_line(tmp_path, answer, chat_template, message):
    data = [GOOD, {"messages": [USER, {"role": "assistant", "content": ""} | answer]}]
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / 'data.jsonl'))}:2.*{re.escape(message)}"):
        taught(tmp_path, data, chat_template)
    with pytest.raises(ValueError, match=f"^Example 2 of the train dataset.*{re.escape(message)}"):
        taught(tmp_path, Dataset.from_list(data), chat_template)


def test_thoughts_are_learnt_under_each_of_their_names_and_a_template_that_drops_some_is_told_of(tmp_path, caplog):
    for name in ("reasoning_content", "reasoning", "thinking"):
        rows = [{"messages": [USER, ANSWER | {name: "Let me count."}]}]
        expected = f"<think>Let me count.</think>{ANSWER['content']}<|im_end|>"
        assert taught(tmp_path, rows, template(THOUGHT + "{{ m.content }}")) == [expected]
    turns = [USER, ANSWER | {"content": "<think>Hm</think>1, 2"}, USER, ANSWER]
    assert "leaves out thoughts" not in caplog.text
    last = template("{{ m.content.split('</think>')[-1] }}")
    assert taught(tmp_path, [{"messages": turns}], last) == ["1, 2<|im_end|>1, 2, 3, 4<|im_end|>"]
    assert "train dataset: 1 example; in 1, the chat template leaves out thoughts" in caplog.text


def test_an_empty_turn_is_learnt_as_an_end_and_supervises_nothing_behind_it(tmp_path):
    bare = TOOLS.replace("<|im_start|>{{ m.role }}\n", "").replace("<|im_end|>\n{% endfor", "{% endfor")
    rows = [{"messages": [{"role": "assistant", "content": ""}, USER, ANSWER]}]
    assert taught(tmp_path, rows, bare) == [f"<|im_end|>{ANSWER['content']}<|im_end|>"]


def test_the_completion_of_a_chat_begins_where_the_prompt_ends_and_of_text_where_it_was_written(tmp_path, caplog):
    chat = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER | {"content": "7"}]}
    text = {"prompt": "Sort 7:\n", "completion": "7"}
    assert taught(tmp_path, [chat]) == taught(tmp_path, [text]) == ["7<|im_end|>"]
    assert taught(tmp_path, [text], completion_only_loss=False) == ["Sort 7:\n7<|im_end|>"]
    assert "a token holds the end" not in caplog.text
    text = {"prompt": "3 + 4 =", "completion": " 7"}  # where " = " is one token
    assert taught(tmp_path, [text])[0].strip() == "= 7<|im_end|>"
    assert "train dataset: 1 example; in 1, a token holds the end of the prompt" in caplog.text


# ShareGPT's and Alpaca's columns.

NAMES = {"user": ("human", "user"), "assistant": ("gpt", "bot"), "tool": ("observation", "function-response")}
WORD = st.text(alphabet="abc é7{", min_size=1, max_size=6).filter(str.strip)
ARGUMENTS = st.dictionaries(st.sampled_from("xyz"), st.one_of(WORD, st.integers(0, 99)), max_size=2)
TURN_DRAWN = st.one_of(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), WORD),
    st.tuples(st.just("call"), st.lists(st.tuples(WORD, ARGUMENTS), min_size=1, max_size=2)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TURN_DRAWN, min_size=1, max_size=5), st.integers(0, 1), st.booleans(), st.none() | WORD)
def test_conversations_of_sharegpt_are_read_as_the_messages_that_they_stand_for(drawn, spelling, one_alone, system):
    shared, messages = [], []
    for role, content in drawn:
        if role == "call":
            calls = [{"name": name, "arguments": arguments} for name, arguments in content]
            value = calls[0] if one_alone and len(calls) == 1 else calls
            shared.append({"from": ("function_call", "Function-Call")[spelling], "value": json.dumps(value)})
            calls = [{"type": "function", "function": call} for call in calls]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            shared.append({"from": NAMES[role][spelling], "value": content})
            messages.append({"role": role, "content": content})
    read = [
        read_example(row, "here", Reading("train", kind, "text", True, True, False), keeps_nulls=True)
        for kind, row in (
            ("conversations", {"conversations": shared} | ({"system": system} if system else {})),
            ("messages", {"messages": ([{"role": "system", "content": system}] if system else []) + messages}),
        )
    ]
    assert read[0] == read[1]


def test_a_call_of_sharegpt_is_learnt_or_refused_and_a_system_column_is_in_the_text(tmp_path):
    turns = [
        {"from": "human", "value": "Sun?"},
        {"from": "function_call", "value": '{"name": "sky", "arguments": {}}'},
    ]
    turns += [{"from": "observation", "value": "yes"}, {"from": "gpt", "value": "Yes."}]
    rows = [{"conversations": turns, "system": "Be brief."}]
    assert taught(tmp_path, rows) == ["[sky{}]<|im_end|>Yes.<|im_end|>"]
    whole = taught(tmp_path, rows, assistant_only_loss=False)[0]
    assert whole.startswith("<|im_start|>system\nBe brief.<|im_end|>") and "<|im_start|>tool\nyes" in whole
    with pytest.raises(ValueError, match="has `tool_calls`: the chat template knows none"):
        taught(tmp_path, rows, template("{{ m.content }}"))
    rows = [{"conversations": [turns[0] | {"from": "system"}, *turns], "system": "Be brief."}]
    with pytest.raises(ValueError, match="`system` must be a text where no turn is the system's"):
        taught(tmp_path, rows)
    turns[1]["value"] = "sky()"
    with pytest.raises(ValueError, match="a turn from 'function_call' must be JSON with `name` and `arguments`"):
        taught(tmp_path, [{"conversations": turns}])


COLUMNS = {
    "messages": [USER, ANSWER], "conversations": [USER, ANSWER], "prompt": "Sort 7:\n", "completion": "7",
    "instruction": "Sort 7", "input": "9", "output": "7, 9", "history": [["a", "b"]], "system": "Be brief.",
    "text": "3 + 4", "tools": [{"name": "now"}], "id": 7, "source": "web",
}  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.sets(st.sampled_from([*COLUMNS]), min_size=1))
def test_each_column_is_in_the_text_or_named_as_not_read(names):
    row = {name: COLUMNS[name] for name in names}
    args = settings_of(Path("out"))
    try:
        reading = reading_of(Dataset.from_list([row]), "train", args)
        read = read_example(row, "here", reading, keeps_nulls=True)
    except ValueError as error:
        assert "It needs `messages`" in str(error) or "both" in str(error)  # noqa: PT017
        return
    unread = unread_columns(row, reading)
    shown = json.dumps([read.turns, read.tools]) if hasattr(read, "turns") else read.text
    for name in names - set(unread):
        value = COLUMNS[name]
        for piece in (
            re.findall(r'[^"\\\[\]{}]{3,}', json.dumps(value)) if isinstance(value, list) else [str(value).strip()]
        ):
            assert piece.strip(" ,:") in shown, name


def test_columns_that_are_not_read_are_told_once_and_pictures_are_refused(tmp_path, caplog):
    rows = [{"messages": [USER, ANSWER], "id": 1, "score": 0.5}] * 3
    for streaming in (False, True):
        caplog.clear()
        trainer = trainer_on(tmp_path, rows_of(tmp_path, rows, streaming))
        trainer.train()
        assert caplog.text.count("these columns are not read: id, score") == 1
    for name in ("image", "images", "videos", "audio"):
        with pytest.raises(ValueError, match=f"has `{name}`, and only text is trained: leave the column out of"):
            taught(tmp_path, [{"messages": [USER, ANSWER], name: ["a.png"]}])
        assert taught(tmp_path, [{"messages": [USER, ANSWER], name: []}])


@pytest.mark.parametrize(
    ("text", "message"),
    [("prompt,completion\na,b,c\n", "line 2 must have 2 cells, as the first line says, got 3"),
     ('prompt,completion\n"a\nb",c\n,,\n', "line 4 must have 2 cells"),
     ("prompt,prompt,completion\na,b,c\n", "the column 'prompt' is there twice")],
)  # fmt: skip
def test_no_cell_of_a_csv_file_is_moved_or_lost(tmp_path, text, message):
    (tmp_path / "data.csv").write_text(text, encoding="utf-8")
    for streaming in (False, True):
        with pytest.raises(ValueError, match=re.escape(message)):
            load(str(tmp_path / "data.csv"), streaming=streaming)


@pytest.mark.parametrize("between", [",", ";", "\t"])
def test_cells_have_commas_semicolons_or_tabs_between_them_as_spreadsheets_write_them(tmp_path, between):
    rows = [("instruction", "output"), ("a, b; c\td", "x"), ("1", "2,5")]
    for name in ("data.csv", "data.tsv")[: 2 if between == "\t" else 1]:
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file, delimiter=between).writerows(rows)
        read = list(load(str(tmp_path / name)))
        assert read == [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


@pytest.mark.parametrize(
    ("name", "text", "row"),
    [("data.tsv", "instruction, if any\toutput\na; b\tc\n", {"instruction, if any": "a; b", "output": "c"}),
     ("data.tsv", "text; of, all; kinds\na\n", {"text; of, all; kinds": "a"}),
     ("data.csv", "text (a; b)\none\ntwo; three\n", {"text (a; b)": "one"}),
     ("data.csv", '"text\n(a;\tb)"\none\n', {"text\n(a;\tb)": "one"}),
     ("data.csv", "one; two; three,text\na;b;c,d\n", {"one; two; three": "a;b;c", "text": "d"})],
)  # fmt: skip
def test_what_a_text_has_parts_no_cells(tmp_path, name, text, row):
    (tmp_path / name).write_text(text, encoding="utf-8")
    for streaming in (False, True):
        assert next(iter(load(str(tmp_path / name), streaming=streaming))) == row


def test_a_cell_of_a_csv_file_may_be_long(tmp_path):
    (tmp_path / "data.csv").write_text(f"text\n{'a' * 200_000}\n", encoding="utf-8")
    assert len(load(str(tmp_path / "data.csv"))[0]["text"]) == 200_000


def test_alpacas_columns_are_a_chat_also_from_a_csv_file_whose_cells_stay_text(tmp_path):
    (tmp_path / "data.csv").write_text(
        'instruction,input,output\n"Sort, please","9\n7",NA\nAdd,,007\n', encoding="utf-8"
    )
    for streaming in (False, True):
        data = load(str(tmp_path / "data.csv"), streaming=streaming)
        assert taught(tmp_path, data) == ["NA<|im_end|>", "007<|im_end|>"]
    whole = taught(tmp_path, data, assistant_only_loss=False)
    assert (
        whole[0].startswith("<|im_start|>user\nSort, please\n\n9\n7<|im_end|>") and "user\nAdd<|im_end|>" in whole[1]
    )
    turns = json.dumps([USER, ANSWER]).replace('"', '""')
    (tmp_path / "chats.csv").write_text(f'messages\n"{turns}"\n', encoding="utf-8")
    assert taught(tmp_path, load(str(tmp_path / "chats.csv"))) == [ANSWER["content"] + "<|im_end|>"]
    with pytest.raises(ValueError, match="`history` must be a list of \\[question, answer\\], got"):
        taught(tmp_path, [{"instruction": "a", "output": "b", "history": [["x"]]}])


# Files.

TEXT = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\r\n" for text in ("Café", "naïve", "x\u2028y"))


def test_files_of_windows_are_read_as_they_were_meant(tmp_path):
    path = tmp_path / "DATA.JSONL"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        path.write_bytes(("\r\n" + TEXT).encode(encoding))
        for streaming in (False, True):
            read = [row_of(row, 0, "train") for row in load(str(path), streaming=streaming)]
            assert [row["text"] for row, *_ in read] == ["Café", "naïve", "x\u2028y"]
            assert [place for _, place, _ in read] == [f"{path}:{number}" for number in (2, 3, 4)]


OBJECT = "each line must be a JSON object: "


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("data.jsonl", b'{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n', f":3: {OBJECT}Expecting ',' del"),
     ("data.jsonl", b"prompt;answer\r\nPet?;goat\r\n",
      f":1: {OBJECT}Expecting value at column 1 of 'prompt;answer'."),
     ("data.json", b'\n[{"text": "a"},\n {"text": }]',
      f":3: {OBJECT}Expecting value at column 11 of ' {{\"text\": }}]'."),
     ("data.json", b'{\n "text": "a"}', f":1: {OBJECT}Expecting property name enclosed in double quotes at c"),
     ("data.jsonl", b'{"text": "a"}\n[1, 2]\n', f":2: {OBJECT}not an object, got '[1, 2]'."),
     ("data.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', f":2: {OBJECT}the text is not UTF-8. Save"),
     ("data.jsonl", TEXT.encode("utf-16-le"), f":1: {OBJECT}"),  # without a mark
     ("data.jsonl", TEXT.encode("utf-16")[:-1], ": the text is not UTF-16. Save the file as UTF-8."),
     ("data.jsonl", b"", ": there is no example in this file."),
     ("data.json", b"[]", ": there is no example in this file."),
     ("data.json", b'[{"text": "a"}, 7]', f", example 2: {OBJECT}"),
     ("data.parquet", b"PAR1 no more", ": cannot be read as parquet")],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_told_by_name_and_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    for streaming in (False, True):
        with pytest.raises(ValueError, match=re.escape(f"{path}{message}")):
            list(load(str(path), streaming=streaming))


def test_half_a_surrogate_pair_is_told_by_its_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}:2 holds half of a surrogate pair")):
        trainer_on(tmp_path, load(str(path)))


def test_files_of_each_kind_hold_the_same_examples_and_slices_keep_the_places(tmp_path):
    examples = [{"text": str(number)} for number in range(9)]
    for kind in ("jsonl", "json", "parquet"):
        path = tmp_path / f"data.{kind}"
        data = Dataset.from_list(examples)
        data.to_parquet(path) if kind == "parquet" else data.to_json(path, lines=kind == "jsonl")
        for streaming in (False, True):
            read = load(str(path), streaming=streaming)
            assert [row_of(row, 0, "train")[0] for row in read] == examples
            assert next(iter(read)) == next(iter(load(str(path), "any[:1]")))
        with pytest.raises(ValueError, match="A configuration belongs to a dataset of the Hub, not to the file"):
            load(str(path), config_name="main")
    path = tmp_path / "data.json"
    part = load(str(path), "anything[4:6]")
    assert [row_of(row, 0, "train")[1] for row in part] == [f"{path}, example {number}" for number in (5, 6)]
    with pytest.raises(ValueError, match=r"A stream is read from its beginning: .* got 'train\[:1\]'"):
        load(str(path), "train[:1]", streaming=True)


def test_a_transform_is_refused_a_formatting_function_makes_text_and_formats_are_read_as_plain(tmp_path):
    data = Dataset.from_list([{"question": "a"}])
    with pytest.raises(ValueError, match=r"The train dataset has a transform .*Apply it by `map`"):
        trainer_on(tmp_path, data.with_transform(lambda rows: {"text": rows["question"]}))
    args = settings_of(tmp_path)
    text = WeDLMSFTTrainer(
        tiny_model(), args, data, processing_class=tiny_tokenizer(), formatting_func=lambda row: row["question"] + " 9"
    )
    assert learnt_text(text.train_dataset[0]) == "a 9<|im_end|>"
    tokens = Dataset.from_list([{"input_ids": [11, 12, 13]}])
    assert trainer_on(tmp_path, tokens.with_format("torch")).train_dataset[0]["labels"] == [11, 12, 13]
    with pytest.raises(TypeError, match="must be a `Dataset` or an `IterableDataset`, got <class 'list'>"):
        trainer_on(tmp_path, [{"text": "a"}])


def test_the_settings_of_the_caller_stay_as_they_are(tmp_path):
    args = settings_of(tmp_path, model_init_kwargs={"dtype": "float32"})
    trainer = WeDLMSFTTrainer(str(write_checkpoint(tmp_path / "model")), args, Dataset.from_list([GOOD]))
    assert (args.assistant_only_loss, args.model_init_kwargs) == (None, {"dtype": "float32"})
    assert trainer.args.assistant_only_loss is None
    texts, chats = Dataset.from_list([{"text": "a b c"}]), Dataset.from_list([GOOD])
    both = WeDLMSFTTrainer(tiny_model(), args, texts, chats, tiny_tokenizer())  # each as what it is
    assert learnt_text(both.train_dataset[0]) == "a b c<|im_end|>"
    assert learnt_text(both.eval_dataset[0]) == ANSWER["content"] + "<|im_end|>"


def test_a_model_without_a_pad_token_is_trained_with_the_end_token_or_the_one_that_is_asked_for(tmp_path):
    for how, pad in (({}, "<|im_end|>"), ({"pad_token": "<|endoftext|>"}, "<|endoftext|>")):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = None
        trainer = trainer_on(tmp_path, tokenizer=tokenizer, **how)
        trainer.train()
        assert trainer.processing_class.pad_token == pad
