"""Chat templates of public models: what is learnt of a conversation, with marks of the template and without."""

import re
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sft_trainer import CHATS, trainer_on
from tiny import tiny_model, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from wedlm_hf.training.sft_config import CHATML
from wedlm_hf.training.turns import Conversation

TRL = Path(trl.__file__).parent / "chat_templates"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL_2 = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
)
# The system's text stands in the last turn, if that is the user's.
MISTRAL_3 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""
PHI_4 = (
    "{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + "
    "message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + "
    "message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}"
    "{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
PHI_4_MINI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
# Template, its special tokens, the token that ends a turn, and whether a system's turn goes.
FAMILIES = {
    "Llama 3.1": ((TRL / "llama3_1.jinja").read_text(), "start_header_id end_header_id eot_id", "eot_id", True),
    "Llama 3.2": ((TRL / "llama3_2.jinja").read_text(), "start_header_id end_header_id eot_id", "eot_id", True),
    "Llama 3": ((TRL / "llama3.jinja").read_text(), "start_header_id end_header_id eot_id", "eot_id", True),
    "Mistral 0.2": (MISTRAL_2, "s /s [INST] [/INST]", "/s", False),
    "Mistral 0.3": (MISTRAL_3, "s /s [INST] [/INST]", "/s", False),
    "SmolLM2": (SMOLLM2, "im_start im_end", "im_end", True),
    "Gemma 3": ((TRL / "gemma3.jinja").read_text(), "bos start_of_turn end_of_turn", "end_of_turn", True),
    "Phi 3": ((TRL / "phi3.jinja").read_text(), "system user assistant end endoftext", "end", True),
    "Phi 3.5": ((TRL / "phi3_5.jinja").read_text(), "system user assistant end endoftext", "end", True),
    "Phi 4": (PHI_4, "im_start im_sep im_end", "im_end", True),
    "Phi 4 mini": (PHI_4_MINI, "system user assistant end endoftext", "end", True),
    "Qwen 3": ((TRL / "qwen3.jinja").read_text(), "im_start im_end", "im_end", True),
}
BARE = {"s", "/s", "bos", "start_of_turn", "end_of_turn"}


def spelled(name: str) -> str:
    return name if name.startswith("[") else f"<{name}>" if name in BARE else f"<|{name}|>"


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a family's template, and its special tokens."""
    template, names, end, _ = FAMILIES[family]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [spelled(name) for name in names.split()]})
    eos = names.split()[-1] if "endoftext" in names else end  # Phi's, behind the last turn alone
    tokenizer.eos_token, tokenizer.bos_token = spelled(eos), spelled(names.split()[0])
    tokenizer.chat_template = template
    return tokenizer


def learnt(folder: Path, family: str, turns: list[dict], **how) -> str:
    """What is learnt of a conversation."""
    tokenizer = tokenizer_of(family)
    data = Dataset.from_dict({"messages": [turns]})
    model = tiny_model(vocab_size=len(tokenizer) + 8, eos_token_id=tokenizer.eos_token_id)
    row = trainer_on(folder, data, tokenizer=tokenizer, model=model, **how).train_dataset[0]
    return tokenizer.decode([label for label in row["labels"] if label != -100])


SYSTEM = {"role": "system", "content": "Be brief"}
TWICE = [*CHATS[0], *CHATS[1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_public_template_teaches_each_answer_with_its_end_and_nothing_else(tmp_path, family):
    *_, end, has_system = FAMILIES[family]
    answers = [turn["content"] for turn in TWICE if turn["role"] == "assistant"]
    for turns in (TWICE, [SYSTEM, *TWICE])[: 1 + has_system]:
        said = learnt(tmp_path, family, turns)
        # Qwen 3 writes an empty thought before its last answer, Phi its end token behind it.
        said = re.sub(r"<think>\s*</think>\s*|<\|endoftext\|>", "", said)
        said = re.sub(r"(?<=>)\s+|\s+(?=<|$)", "", said).strip()
        assert said == "".join(answer + spelled(end) for answer in answers)


def test_a_template_that_moves_a_turn_is_told_by_its_line_and_what_is_advised_works(tmp_path):
    """Mistral 0.3 writes the system's text into the last turn of the user alone."""
    with pytest.raises(
        ValueError, match=r"has 'Be brief': the chat template leaves it out\. Take a `chat_template_path"
    ):
        learnt(tmp_path, "Mistral 0.3", [SYSTEM, *CHATS[0]])
    moving = "{% for m in messages %}\n{{ m.role }}:{{ m.content }}\n{% if loop.last %}\n{{ '(the end)' }}{% endif %}"
    FAMILIES["moving"] = (moving + "{% endfor %}", "im_start im_end", "im_end", True)
    try:
        expected = r"line 3 of the chat template writes '\(the end\).*' only until more turns follow"
        with pytest.raises(ValueError, match=expected) as error:
            learnt(tmp_path, "moving", TWICE)
        assert "`chat_template_path`" in str(error.value) and "`assistant_only_loss=False`" in str(error.value)
        assert learnt(tmp_path, "moving", TWICE, chat_template_path="chatml").count("<|im_end|>") == 2
        assert "(the end)" in learnt(tmp_path, "moving", TWICE, assistant_only_loss=False)
    finally:
        del FAMILIES["moving"]


ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
CONTENTS = st.text(alphabet='ab <|>/\n"{é', max_size=8).filter(str.strip)
# The generation prompt opens what no answer does; behind the last turn stands an end token.
ODD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% else %}{{ eos_token }}{% endif %}"
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ROLES, CONTENTS), min_size=1, max_size=6), st.sampled_from([CHATML.read_text(), ODD]))
def test_without_marks_the_same_is_found_as_with_them(turns, marked):
    tokenizer, notes = tiny_tokenizer(), []
    turns = [{"role": role, "content": content} for role, content in [("user", "Hi"), *turns]]
    read = Conversation(turns, 0, None, {}, "here")
    tokenizer.chat_template = marked
    text, spans = read.text(tokenizer, None, True, notes)
    tokenizer.chat_template = re.sub(r"\{%-? (end)?generation -?%\}", "", marked)
    same_text, found = read.text(tokenizer, None, True, notes)
    assert same_text == text and not notes
    wanted = [text[begin:end] for begin, end in spans]
    # White space and an end token that follow an answer are left out where tokens are marked.
    assert [text[begin:end].removesuffix("\n") for begin, end in found[:-1]] == wanted[:-1]
    assert [begin for begin, _ in found] == [begin for begin, _ in spans]
    assert not wanted or re.fullmatch(r"\s*(<\|im_end\|>)?", text[spans[-1][1] : found[-1][1]])
