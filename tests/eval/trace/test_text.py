"""Text of tokens, and text for terminals."""

from tiny import tiny_tokenizer

from wedlm_hf.eval.trace.text import pieces_of, printable, token_text


def test_characters_of_several_tokens_come_with_their_last_one():
    tokenizer = tiny_tokenizer()
    euro = tokenizer("€").input_ids
    assert pieces_of(tokenizer, [*tokenizer("a").input_ids, *euro, *euro[:1]]) == ["a", "", "", "€", "\ufffd"]
    assert [token_text(tokenizer, token) for token in euro] == ["⟨E2⟩", "⟨82⟩", "⟨AC⟩"]


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[31m\x07\tb\n\x9b\x7f") == "a␛[31m␇\tb\n\ufffd␡"
