"""The trained tokenizer: lossless text, lone digits, the chat template, the tasks' lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nano_tasks import TASKS, generate_samples
from nano_tokenizer import train_tokenizer
from transformers import AutoTokenizer


def task_texts(count: int = 300) -> list[str]:
    return [text for task in TASKS for s in generate_samples(task, count, 0) for text in (s.text, s.answers[0])]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(task_texts(), 1024)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Count to 3."},
    {"role": "assistant", "content": "1, 2, 3"},
    {"role": "user", "content": "Now code."},
    {"role": "assistant", "content": "    return 3\n"},
]


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_is_decoded_without_loss(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_each_digit_and_each_newline_is_a_token_of_its_own(tokenizer):
    assert tokenizer.tokenize("7+5+0=12\n\n") == [*"7+5+0=12", "Ċ", "Ċ"]
    assert not [token for token in tokenizer.get_vocab() if len(token) > 1 and any(c.isdigit() for c in token)]


def test_the_template_is_chatml_without_a_default_system_prompt_and_marks_every_answer_with_its_end(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION[1:3], tokenize=False)
    assert text == "<|im_start|>user\nCount to 3.<|im_end|>\n<|im_start|>assistant\n1, 2, 3<|im_end|>\n"
    row = tokenizer.apply_chat_template(CONVERSATION, return_assistant_tokens_mask=True, return_dict=True)
    kept = [token for token, kept in zip(row["input_ids"], row["assistant_masks"], strict=True) if kept]
    assert tokenizer.decode(kept) == "1, 2, 3<|im_end|>    return 3\n<|im_end|>"


@pytest.mark.parametrize("answer", ["1, 2", "    return 3", "\nx", " - y"])
def test_a_generation_prompt_is_a_prefix_of_the_whole_conversation_in_tokens(tokenizer, answer):
    turns = [*CONVERSATION[:2], {"role": "assistant", "content": answer}]
    prompt = tokenizer.apply_chat_template(turns[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert whole[: len(prompt)] == prompt


def test_every_sample_of_the_tasks_fits_into_384_tokens(tokenizer):
    for sample in (each for task in TASKS for each in generate_samples(task, 100, 5, "train")):
        turns = [*sample.messages, {"role": "assistant", "content": sample.answers[0]}]
        assert len(tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]) <= 384


def test_training_twice_gives_the_same_bytes_and_a_loaded_tokenizer_behaves_like_the_trained_one(tokenizer, tmp_path):
    train_tokenizer(iter(task_texts()), 1024).save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "first")
    first, again = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("first", "again")
    )
    assert first == again
    loaded = AutoTokenizer.from_pretrained(tmp_path / "first")
    trained, again = (each.apply_chat_template(CONVERSATION, return_dict=True) for each in (tokenizer, loaded))
    assert dict(again) == dict(trained)
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.mask_token_id) == (0, 2, 3)
    assert (loaded.padding_side, loaded.model_max_length) == ("left", 512)
