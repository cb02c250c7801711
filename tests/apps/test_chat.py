"""`wedlm chat` on wedlm-nano: answers are those of `generate` on the whole conversation, no prompt is read twice."""

import io
import json
import os
import time
from unittest.mock import Mock

import pytest
import torch
from command_faults import start
from rich.console import Console
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.apps.chat import Chat
from wedlm_hf.apps.conversation import AnswerStopped, Conversation
from wedlm_hf.checkpoints import NANO
from wedlm_hf.eval.decoders import DECODERS
from wedlm_hf.eval.measure import ForwardCounter
from wedlm_hf.eval.prompts import encode

COUNT = "Count from 5 to 50 by 5."
QUESTIONS = (COUNT, "Sort from largest to smallest: 31, 7, 86, 12, 54, 23", "Count from 3 to 30 by 3.")
ANSWERS = ("5, 10, 15, 20, 25, 30, 35, 40, 45, 50", "86, 54, 31, 23, 12, 7")  # to each as the first question


def nothing(text, group):
    """Shows nothing."""


def ask(talk, question):
    """The turn of a question, whose answer is that of `generate` to the whole conversation without a cache, and the
    rows of its first forward."""
    ids = torch.tensor([encode(talk.tokenizer, [*talk.all_messages, {"role": "user", "content": question}])])
    output = talk.model.generate(ids, **{"max_new_tokens": 100, **talk.options})
    with ForwardCounter(talk.model) as counter:
        turn = talk.ask(question, nothing)
    assert turn.text == talk.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return turn, counter.shapes[0][1]


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_answer_is_that_of_generate_and_only_new_tokens_are_computed(nano, decoder):
    options = DECODERS[decoder]
    talk = Conversation(*nano, {**options, "max_new_tokens": 100})
    for number, question in enumerate(QUESTIONS):
        turn, first = ask(talk, question)
        if number == 0 or decoder == "ar":  # AR decoding takes no window cache
            assert turn.cached_tokens == 0
            assert first >= turn.prompt_tokens
        else:  # all of the turns before, but for the tokens of the answer that no forward has read
            earlier = talk.turns[-2]
            is_verified = options.get("verification", "none") != "none"
            unread = 1 + (1 if is_verified else nano[0].generation_config.window_size)
            assert turn.cached_tokens >= earlier.prompt_tokens + earlier.new_tokens - unread
            assert first <= turn.prompt_tokens - turn.cached_tokens + 2 * 32
            assert first < turn.prompt_tokens
    assert talk.messages[1] == {"role": "assistant", "content": ANSWERS[0]}


def test_the_cache_is_kept_as_far_as_the_conversation_is_the_same_whatever_the_decoder(nano):
    talk = Conversation(*nano, DECODERS["wedlm"])
    first, _ = ask(talk, QUESTIONS[0])
    talk.messages[-1]["content"] = "5, 10, 99"  # the template writes the answer in other tokens
    turn, _ = ask(talk, QUESTIONS[1])
    assert first.prompt_tokens < turn.cached_tokens < first.prompt_tokens + first.new_tokens
    for decoder in ("ar", "wedlm+exact", "wedlm"):
        talk.options = DECODERS[decoder]
        turn, _ = ask(talk, QUESTIONS[1])
        assert (turn.cached_tokens > 3) == (decoder != "ar")
    talk.system = "Be brief."
    turn, _ = ask(talk, QUESTIONS[1])
    assert turn.cached_tokens < 3


@pytest.mark.parametrize(
    ("decoder", "is_pressed_twice"), [("ar", False), ("wedlm", True), ("wedlm+exact", False), ("wedlm+exact", True)]
)
def test_a_stopped_answer_stays_as_far_as_it_came(nano, decoder, is_pressed_twice):
    talk = Conversation(*nano, DECODERS[decoder])

    def stop_after(groups):
        def write(text, group):
            if group >= groups and talk.stop() and is_pressed_twice:
                raise AnswerStopped

        return write

    assert not talk.stop()
    turn = talk.ask(QUESTIONS[0], stop_after(3))
    assert turn.ended_by == "stop"
    assert ANSWERS[0].startswith(turn.text) and 0 < len(turn.text) < len(ANSWERS[0])
    assert talk.messages[-1]["content"] == turn.text
    for question in QUESTIONS[1:]:
        after, _ = ask(talk, question)
        assert (after.cached_tokens >= turn.prompt_tokens) == (decoder != "ar" and not is_pressed_twice)
        turn = talk.ask("And now?", stop_after(1))
        assert turn.ended_by == "stop"


def test_an_answer_that_is_stopped_before_it_begins_is_no_turn_and_nor_is_one_that_the_context_has_no_room_for(
    nano, monkeypatch
):
    talk = Conversation(*nano, {"strategy": "wedlm", "max_new_tokens": 4})
    with monkeypatch.context() as patch:
        patch.setattr(type(nano[0]), "forward", Mock(side_effect=AnswerStopped))
        turn = talk.ask(QUESTIONS[0], nothing)
    assert (turn.ended_by, turn.new_tokens, talk.messages, talk.turns) == ("stop", 0, [], [])
    turn = talk.ask(QUESTIONS[0], nothing)
    assert (turn.text, turn.ended_by, turn.new_tokens) == ("5, 10", "limit", 4)
    with pytest.raises(ValueError, match="A prompt needs 1 to 511 tokens for this model, got"):
        talk.ask("1, " * 500, nothing)
    assert (len(talk.turns), len(talk.messages)) == (1, 2)


@pytest.fixture
def chat(nano):
    """`chat(line)` is what the program prints on it."""
    console = Console(file=io.StringIO(), width=100)
    talk = Chat(Conversation(*nano, {"strategy": "wedlm", "window_size": 4, "max_new_tokens": 100}), console)

    def say(line):
        start = console.file.tell()
        talk.handle(line)
        return console.file.getvalue()[start:]

    say.conversation, say.program = talk.conversation, talk
    return say


def test_another_decoder_has_its_own_settings_and_the_first_one_gets_its_back(chat):
    for name, options in {
        "": {"strategy": "wedlm", "window_size": 4},
        " wedlm+exact": {"strategy": "wedlm", "verification": "exact"},
        " ar": {"strategy": "ar"},
        " wedlm": {"strategy": "wedlm", "window_size": 4, "verification": "none"},
    }.items():
        assert chat(f"/strategy{name}") == f"Decoding by {name.strip() or 'wedlm'}.\n"
        assert chat.conversation.options == {**options, "max_new_tokens": 100}
    assert "Unknown decoder 'fast': choose among ar, block, wedlm" in chat("/strategy fast").replace("\n", " ")


def test_an_answer_is_followed_by_what_it_took_stats_are_those_of_all_and_reset_forgets_them(chat):
    assert "no answer yet" in chat("/stats")
    answer, costs = chat(QUESTIONS[0]).split("\n", 1)
    chat(QUESTIONS[1])
    turns = chat.conversation.turns
    assert answer == ANSWERS[0] and "0 of 20 prompt tokens from the cache" in costs
    assert f"29 tokens in {turns[0].forwards} forwards ({29 / turns[0].forwards:.2f} tokens per forward)" in costs
    shown = chat("/stats").replace("\n", " ")
    assert shown.startswith(f"2 answers: {sum(turn.new_tokens for turn in turns)} tokens in ")
    assert f"; {turns[1].cached_tokens} of {sum(turn.prompt_tokens for turn in turns)} prompt tokens" in shown
    chat("/reset")
    assert "no answer yet" in chat("/stats")


def test_a_conversation_is_saved_as_training_reads_it_and_replaces_nothing(chat, tmp_path):
    chat("/system Count well.")
    assert "stays" in chat("/reset")
    chat(QUESTIONS[0])
    file = tmp_path / "talk.jsonl"
    assert "The conversation is in" in chat(f"/save {file}")
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row == {"messages": chat.conversation.all_messages}
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
    assert "is there already" in chat(f"/save {file}").replace("\n", " ")
    assert chat("/save").startswith("Error: /save needs the name of a file.")
    assert chat(f"/save {tmp_path}/no\0name").startswith("Error: ")
    assert "no system message" in chat("/system")
    assert len(chat.conversation.all_messages) == 2


def test_help_lists_every_command_and_what_is_none_or_what_generate_refuses_is_said_and_dropped(chat):
    shown = chat("/help")
    assert all(f"{name} " in shown for name in chat.program.commands)
    assert "There is no command /strateg:" in chat("/strateg")
    assert chat("") == chat("  ") == ""
    assert "not UTF-8" in chat("\udcff")
    chat.conversation.options = {"strategy": "wedlm", "repetition_penalty": 1.2}
    assert "Error: RepetitionPenaltyLogitsProcessor needs the tokens before" in chat("Hello")
    assert chat.conversation.messages == []
    chat.conversation.options = {"strategy": "wedlm"}
    assert chat(QUESTIONS[0]).startswith(ANSWERS[0])
    chat("/exit")
    assert chat.program.is_over


def test_lines_that_are_piped_in_are_answered_in_turn(nano):
    lines = "\n".join([QUESTIONS[0], "", "/stats", "/reset", "/strategy wedlm+exact", QUESTIONS[1]])
    result = CliRunner().invoke(cli.app, ["chat", "--threads", "1"], input=lines)
    assert result.exit_code == 0, result.output
    assert "type /reset before the next" in result.stderr  # what wedlm-nano, the default, can do
    for question, answer in zip(QUESTIONS, ANSWERS, strict=False):
        assert f"> {question}\n{answer}\n" in result.stdout
    assert "1 answer: " in result.stdout
    assert result.stdout.count("tokens per forward") == 3


@pytest.fixture
def typing(tmp_path, monkeypatch):
    """A chat on a terminal of its own: waits until it shows something, then types; returns what came before that."""
    runs = []

    def begin(terminal, *words):
        monkeypatch.setenv("TERM", terminal)
        monkeypatch.setenv("COLUMNS", "200")  # nothing is wrapped
        monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # this terminal does not answer
        run = start(["chat", str(NANO), "--threads", "1", *words], tmp_path, typing=True)
        runs.append(run)

        def type_once(shown, keys):
            end = time.monotonic() + 100
            while shown not in run.output and run.code is None and time.monotonic() < end:
                run.wait(0.05)
            assert shown in run.output, run.output
            seen, _, run.output = run.output.partition(shown)
            os.write(run.terminal, keys)
            return seen

        return type_once

    yield begin
    for run in runs:
        run.wait()
        assert (run.code, b"Traceback" in run.output) == (0, False)


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_keys_wait_for_the_prompt_and_ctrl_c_stops_an_answer(nano, typing, terminal):
    type_once = typing(terminal, "--strategy", "ar", "--set", "min_new_tokens=150", "--max-new-tokens", "150")
    type_once(b"Ctrl-D ends.", b"Count from 5 to 50 by 5.\r")
    type_once(b", ", b"/stats\r")
    shown = type_once(b"1 answer: ", b"Count from 3 to 30 by 3.\r")
    assert shown.index(b"Cut off after 150 tokens.") < shown.index(b"/stats")
    type_once(b"from the cache", b"")
    type_once(b", ", b"\x03")
    type_once(b"Stopped.", b"\x03/stats\r")
    type_once(b"2 answers: ", b"\x04")


def test_a_paste_is_one_turn_however_long_it_is(nano, typing):
    type_once = typing("xterm")
    type_once(b"Ctrl-D ends.", b"\x1b[200~Count from 5\nto 50 by 5.\x1b[201~\r")
    type_once(b"from the cache", b"/stats\r")
    type_once(b"1 answer: ", b"/reset\r")
    text = "7 " * 4000
    type_once(b"forgotten", b"\x1b[200~" + text.encode() + b"\x1b[201~\r")
    length = len(encode(nano[1], [{"role": "user", "content": text.strip()}]))
    type_once(f"got {length}".encode(), b"\x04")
