"""Rows of training data, likely and unlikely: each is read, or refused by its number."""

from hypothesis import given, settings
from hypothesis import strategies as st

from wedlm_hf.training.examples import Outcome, kind_of, read_example

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}]
SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
GOOD = {
    "messages": {"messages": TURNS, "prompt": "Hi", "labels": [1]},
    "conversations": {"conversations": SHARED, "chat_template_kwargs": None},
    "prompt": {"prompt": TURNS[:1], "completion": TURNS[1:], "tools": None},
    "text": {"text": "Hello", "id": 3},
    "input_ids": {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "text": "Hello"},
}
CHAT = {"messages", "tools", "chat_template_kwargs"}
COLUMNS = {
    "messages": CHAT,
    "conversations": CHAT,
    "prompt": {"prompt", "completion", "tools", "chat_template_kwargs"},
    "text": {"text", "tools", "chat_template_kwargs"},
    "input_ids": {"input_ids", "labels", "assistant_masks", "completion_mask", "seq_lengths"},
}


@st.composite
def rows(draw):
    """A good row with up to two columns, and one entry of a turn, made anything."""
    row = {**GOOD[draw(st.sampled_from(list(GOOD)))]}
    chats = [name for name, value in row.items() if isinstance(value, list) and isinstance(value[0], dict)]
    if chats and draw(st.booleans()):
        chat = draw(st.sampled_from(chats))
        turns = [{**turn} for turn in row[chat]]
        keys = st.sampled_from(["role", "content", "from", "value", "tool_calls"])
        turns[draw(st.integers(0, len(turns) - 1))][draw(keys)] = draw(anything)
        row[chat] = draw(st.sampled_from([turns, turns[::-1], turns[:1], [*turns, draw(anything)]]))
    names = sorted({"assistant_masks", "seq_lengths", "document_ids", *row, *set().union(*COLUMNS.values())})
    return row | draw(st.dictionaries(st.sampled_from(names), anything, max_size=2))


@settings(max_examples=400)
@given(rows(), st.booleans(), st.integers(0, 1))
def test_a_row_is_read_or_refused_by_its_number(row, needs_assistant, index):
    kind = kind_of(row, "text")
    try:
        read = read_example(row, index, name="train", kind=kind, text_field="text", needs_assistant=needs_assistant)
    except ValueError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert said.startswith(f"Example {index + 1} of the train dataset")
        return
    outcome = read.pop("outcome")
    assert set(read) <= COLUMNS[kind]
    turns = [read[name] for name in ("messages", "prompt", "completion") if isinstance(read.get(name), list)]
    for turn in (turn for column in turns for turn in column):
        assert isinstance(turn["role"], str) and isinstance(turn["content"], str | None)
    if needs_assistant and turns:
        learnt = any(turn["role"] == "assistant" for turn in turns[-1])
        assert outcome == (Outcome.WHOLE if learnt and all(turns) else Outcome.UNSUPERVISED)
