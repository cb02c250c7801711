"""A saved trace comes back whole; what is not whole, or contradicts itself, is refused in one line."""

import io
import json
import random

import pytest
from rich.console import Console

from wedlm_hf.eval.trace.answers import comparison_table
from wedlm_hf.eval.trace.page import page
from wedlm_hf.eval.trace.record import decodings
from wedlm_hf.eval.trace.saved import load, save, to_json
from wedlm_hf.eval.trace.terminal import replay_in_terminal


def test_a_saved_trace_comes_back_whole(trace, tmp_path):
    save(trace, tmp_path / "new" / "trace.json")
    assert load(tmp_path / "new" / "trace.json") == trace
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["trace.json"]


def change(path, value):
    def edit(data):
        *parents, last = path
        for key in parents:
            data = data[key]
        if value is None:
            del data[last]
        else:
            data[last] = value

    return edit


RUN = ["recordings", 0, "runs", 0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(["version"], 7), "version: input should be 1, got 7."),
        (change(["format"], "other"), "format: input should be 'wedlm-trace', got 'other'."),
        (change(["seed"], None), "seed: field required."),
        (change(["more"], 1), "more: unexpected keyword argument, got 1."),
        (change(["recordings"], []), "it has no recordings."),
        (
            change([*RUN, "seconds"], "soon"),
            "recordings[0].runs[0].seconds: input should be a valid number, got 'soon'.",
        ),
        (
            change([*RUN, "name"], "x"),
            "recordings[0].runs[0].name: input should be 'wedlm', 'block' or 'ar', got 'x'.",
        ),
        (
            change([*RUN, "tokens", 0], -1),
            "recordings[0].runs[0].tokens[0]: input should be greater than or equal to 0, got -1.",
        ),
        (change([*RUN, "tokens", 0], 9), "recordings[0], wedlm: the steps do not lead to the tokens."),
        (change([*RUN, "text"], "other"), "recordings[0], wedlm: the pieces are not the text."),
        (change([*RUN, "stats", "forwards"], 1), "recordings[0], wedlm: the counts are not those of the steps"),
        (change([*RUN, "seconds"], 0), "recordings[0], wedlm: the clock runs backwards."),
        (change([*RUN, "steps", 1, "committed"], 0), "is cached out of turn."),
        (change([*RUN, "steps", 0, "final"], 9), "is final, and nothing filled it."),
        (change([*RUN, "steps", 0, "kinds"], "c"), "rows of different lengths."),
        (change(["vocabulary"], {}), "vocabulary: no text for token"),
        (
            change(["recordings", 0, "runs"], []),
            "recordings[0].runs must be wedlm's or block's, then perhaps ar's, got [].",
        ),
        (change([*RUN, "settings"], {}), "recordings[0], wedlm: settings lacks ['distance_penalty', "),
        (change([*RUN, "settings", "window_size"], "x"), "`window_size` must be an integer of at least 1, got 'x'."),
        (
            change([*RUN, "settings", "top_k"], {}),
            "recordings[0].runs[0].settings.top_k: a setting is a number, text, ",
        ),
        (change([*RUN, "steps"], []), "recordings[0], wedlm: there is no prompt, or no step."),
        (change([*RUN, "steps", 0, "rejected"], [7]), "forward 1: what was no draft is rejected."),
        (change([*RUN, "steps", 0, "kinds"], "cpfmx"), "forward 1: rows of different lengths."),
        (change(["fingerprint"], {}), "fingerprint lacks ['config', 'tokenizer', 'weights']."),
        (change(["environment", "torch"], None), "environment lacks ['torch']."),
        (change(["model"], "\ud800"), "the file: invalid JSON: unexpected end of hex escape"),
    ],
)
def test_a_trace_that_is_not_whole_or_contradicts_itself_is_refused(trace, tmp_path, edit, message):
    data = json.loads(to_json(trace))
    edit(data)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load(path)
    assert str(error.value).startswith(f"{str(path)!r} is no trace to be read: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "[" * 10**5, '{"a":' * 10**5, "\udc80".encode(errors="surrogateescape"), "3"]
)
def test_what_is_no_trace_at_all_is_refused(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="is no trace"):
        load(path)


def test_deep_nesting_anywhere_is_refused(trace, tmp_path):
    path = tmp_path / "trace.json"
    for place in ('"seed":5', '"strategy":"wedlm"', '"prompt":"1, 2, 3"'):
        for depth in (3, 100, 900, 10**5):
            text = to_json(trace)
            assert place in text
            nested = "[" * depth + "]" * depth
            path.write_text(text.replace(place, f"{place.split(':')[0]}:{nested}", 1))
            with pytest.raises(ValueError, match="is no trace"):
                load(path)


def places(data, path=()):
    """Paths of every value."""
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in children:
        yield (*path, key)
        yield from places(value, (*path, key))


def test_whatever_is_changed_a_trace_is_refused_in_words_or_can_be_shown(recorded, tmp_path):
    whole = to_json(recorded({"verification": "exact", "entropy_threshold": 3.0}, tokens=8))
    paths = list(places(json.loads(whole)))
    values = [None, True, -1, 0, 7, 10**30, 0.5, 1e308, "", "ar", "none", "\x1b[2J", [], [0], {}, {"0": 1}]
    draw, refused = random.Random(0), 0
    path = tmp_path / "trace.json"
    for _ in range(400):
        data = json.loads(whole)
        change(draw.choice(paths), draw.choice(values))(data)
        path.write_text(json.dumps(data))
        try:
            trace = load(path)
        except ValueError:
            refused += 1
            continue
        console = Console(file=io.StringIO(), width=60)
        replay_in_terminal(trace, console)
        console.print(comparison_table(decodings(trace)))
        assert page(trace)
        assert "\x1b" not in console.file.getvalue()
    assert 250 < refused < 400
