"""The display of `wedlm generate`."""

import io

from rich.console import Console
from tiny import tiny_tokenizer

from wedlm_hf.eval.trace.answers import compare
from wedlm_hf.eval.trace.record import Request


def test_control_characters_of_prompts_and_answers_do_not_reach_the_terminal(model):
    tokenizer = tiny_tokenizer()
    escape = tokenizer("\x1b").input_ids[0]
    others = [token for token in range(model.config.vocab_size) if token != escape]
    options = {"strategy": "wedlm", "max_new_tokens": 3, "suppress_tokens": others}
    for with_ar in (True, False):
        console = Console(file=io.StringIO())
        compare(model, tokenizer, Request(["hi\x1b[2J", "2"], options, with_ar, raw=True), console)
        output = console.file.getvalue()
        assert "› hi␛[2J\n␛␛␛\n" in output and "\x1b" not in output


def test_another_answer_of_ar_is_cleaned_too(model):
    tokenizer = tiny_tokenizer()
    kept = tokenizer("\x1b7").input_ids
    others = [token for token in range(model.config.vocab_size) if token not in kept]
    options = {"strategy": "wedlm", "entropy_threshold": 100.0, "max_new_tokens": 24, "suppress_tokens": others}
    console = Console(file=io.StringIO())
    compare(model, tokenizer, Request(["1, 2"], options, raw=True), console)
    output = console.file.getvalue()
    assert "␛" in output.split("its answer:")[1] and "\x1b" not in output
