"""A model's own answers: which prompts, whose text, and what a stopped run leaves behind."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import LINES, MASK, tiny_model, tiny_tokenizer

from wedlm_hf.adapters import answers as writing
from wedlm_hf.adapters.answers import AnswerConfig, check_conversations, read_answers, read_user_prompts, write_answers
from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_tokenizer

SMALL = AnswerConfig(batch_size=3, max_new_tokens=24)
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def chat_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def collect(file: Path, batches: int, prompts: Any = LINES, config: AnswerConfig = SMALL, model: Any = None) -> Any:
    list(islice(write_answers(model or tiny_model(), chat_tokenizer(), file, prompts, config), batches + 1))
    return read_answers(file)


def test_the_first_round_is_greedy_as_generate_without_its_generation_config_and_later_ones_are_sampled(tmp_path):
    model, expected = tiny_model(), {}
    for line in LINES:
        prompt = chat_tokenizer().encode(f"<|im_start|>{line}<|im_end|>", add_special_tokens=False)
        options = {"max_new_tokens": 24, "do_sample": False, "suppress_tokens": [MASK], "strategy": "ar"}
        expected[tuple(prompt)] = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    model.generation_config.update(do_sample=True, temperature=3.0, top_k=2, repetition_penalty=5.0)
    answers = collect(tmp_path / "answers.jsonl", 6, model=model)
    greedy, sampled = ([answer for answer in answers if answer["greedy"] is kind] for kind in (True, False))
    assert {answer["batch"] for answer in greedy} <= {0, 1}
    assert {answer["batch"] for answer in sampled} <= {2, 3, 4, 5}
    assert {tuple(answer["prompt_ids"]): answer["response_ids"] for answer in greedy} == {
        prompt: answer for prompt, answer in expected.items() if len(answer) > 3
    }
    rounds = [{tuple(a["prompt_ids"]) for a in answers if a["batch"] // 2 == number} for number in range(3)]
    assert rounds[0] & rounds[1] & rounds[2]
    assert len({tuple(answer["response_ids"]) for answer in sampled}) == len(sampled)


def test_noise_depends_on_the_seed_alone_and_a_run_that_was_killed_at_any_byte_goes_on(tmp_path):
    first, other, cut = (tmp_path / f"{name}.jsonl" for name in ("one", "other", "cut"))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    collect(first, 5)
    assert torch.equal(torch.get_rng_state(), state)
    collect(other, 5, config=AnswerConfig(batch_size=3, max_new_tokens=24, seed=1))
    assert first.read_bytes() != other.read_bytes()
    torch.manual_seed(6)
    content = first.read_bytes()
    for share in (0.01, 0.5, 0.999):
        cut.write_bytes(content[: int(share * len(content))])
        lines = read_answers(cut)
        collect(cut, 5 - (lines[-1]["batch"] if lines else 0))
        assert cut.read_bytes() == content


def test_a_model_writes_prompts_of_its_own(nano, tmp_path):
    """The chat template up to the user's turn, continued until the turn's end; no prompt twice."""
    model, tokenizer = nano
    config = AnswerConfig(batch_size=8, max_prompt_tokens=96, max_new_tokens=32)
    list(islice(write_answers(model, tokenizer, tmp_path / "answers.jsonl", config=config), 3))
    answers = read_answers(tmp_path / "answers.jsonl")
    assert len({tuple(answer["prompt_ids"]) for answer in answers}) == len(answers) >= 4
    turn = [{"role": "user", "content": "@@"}]
    head, _, tail = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).partition("@@")
    for answer in answers:
        text = tokenizer.decode(answer["prompt_ids"])
        assert text.startswith(head) and text.endswith(tail) and len(answer["prompt_ids"]) <= 96
        assert answer["greedy"] is (answer["batch"] == 0)


def test_a_model_without_template_and_bos_writes_prompts_too(nano, tmp_path):
    tokenizer, config = load_tokenizer(NANO), AnswerConfig(batch_size=8, max_new_tokens=16)
    tokenizer.chat_template = tokenizer.bos_token = None
    *_, last = islice(write_answers(nano[0], tokenizer, tmp_path / "answers.jsonl", None, config), 2)
    assert last.answers and all(writing.STARTERS)


def test_the_first_batch_that_a_model_asks_itself_is_a_small_one(nano, tmp_path, monkeypatch):
    def draw(writer: Any, rng: Any, count: int) -> list[tuple[int, ...]]:
        drawn.append(count)
        return [writer.template.prompt(f"Sort {rng.random()} {number}") for number in range(count)]

    drawn: list[int] = []
    monkeypatch.setattr(writing._Writer, "draw", draw)
    config = AnswerConfig(batch_size=48, max_new_tokens=4)
    *_, last = islice(write_answers(nano[0], nano[1], tmp_path / "answers.jsonl", None, config), 3)
    assert drawn[:2] == [12, 72] and last.answers > 8


def test_a_model_that_answers_nothing_is_named_and_so_are_prompts_that_are_all_too_long(tmp_path):
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(4, 320))
    with pytest.raises(ValueError, match="The model gave no answer in 5 batches: it answers none of the prompts"):
        collect(tmp_path / "answers.jsonl", 10, model=model)
    with pytest.raises(ValueError, match="All 5 prompts are longer than `max_prompt_tokens`, 4"):
        collect(tmp_path / "new.jsonl", 1, config=AnswerConfig(max_prompt_tokens=4))
    assert not (tmp_path / "new.jsonl").exists()


def test_a_single_turn_of_the_users_gives_the_answers_of_its_text(tmp_path):
    texts, chats = tmp_path / "p.txt", tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": line.strip().replace("\n", " ")} for line in LINES]
    texts.write_text("\n".join(turn["content"] for turn in turns))
    reply = [{"role": "assistant", "content": "left out"}]
    chats.write_text("".join(json.dumps({"messages": [turn, *reply]}) + "\n" for turn in turns))
    collect(tmp_path / "whole.jsonl", 4, prompts=read_user_prompts(texts))
    collect(tmp_path / "stopped.jsonl", 1, prompts=read_user_prompts(texts))
    collect(tmp_path / "stopped.jsonl", 3, prompts=read_user_prompts(chats))
    assert (tmp_path / "stopped.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_conversations_are_answered_behind_the_chat_template_unless_they_are_too_long(tmp_path):
    template = chat_tokenizer().apply_chat_template
    short, long = (template(turns, add_generation_prompt=True)["input_ids"] for turns in (TURNS, TURNS * 2))
    config = AnswerConfig(batch_size=9, max_new_tokens=24, max_prompt_tokens=len(long) - 1)
    answers = collect(tmp_path / "answers.jsonl", 1, [*LINES, TURNS, TURNS * 2], config)
    found = [answer["prompt_ids"] for answer in answers]
    assert short in found and long not in found


def test_conversations_need_a_chat_template_that_takes_their_roles(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT + "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
    check_conversations(tokenizer, [*LINES, [*TURNS[1:], *TURNS[1:]]])
    with pytest.raises(ValueError, match="The chat template refuses these messages: none"):
        check_conversations(tokenizer, [*LINES, TURNS])
    tokenizer.chat_template = None
    check_conversations(tokenizer, LINES)
    message = "Without a chat template, a prompt is a single turn of the user, got 2 turns"
    with pytest.raises(ValueError, match=message):
        check_conversations(tokenizer, [TURNS])
    with pytest.raises(ValueError, match=message):
        next(write_answers(tiny_model(), tokenizer, tmp_path / "answers.jsonl", [TURNS]))
