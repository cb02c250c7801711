"""A saved trace comes back whole; what is not whole, or was changed, is refused in one line."""

import io
import json
import random

import pytest
from rich.console import Console

from wedlm_hf.eval.trace.answers import comparison_table
from wedlm_hf.eval.trace.page import page
from wedlm_hf.eval.trace.record import decodings
from wedlm_hf.eval.trace.saved import load, save
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


@pytest.fixture
def saved(trace, tmp_path):
    """Path of a saved trace."""
    path = tmp_path / "trace.json"
    save(trace, path)
    return path


def refused(path, edit):
    """The one line that says why a file is refused once it is edited."""
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load(path)
    assert str(error.value).startswith(f"{str(path)!r} is no trace to be read: ") and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(["version"], 7), "version: input should be 1, got 7."),
        (change(["format"], "other"), "format: input should be 'wedlm-trace', got 'other'."),
        (change(["seed"], None), "seed: field required."),
        (change(["more"], 1), "more: unexpected keyword argument, got 1."),
        (
            change([*RUN, "seconds"], "soon"),
            "recordings[0].runs[0].seconds: input should be a valid number, got 'soon'.",
        ),
        (
            change([*RUN, "name"], "x"),
            "recordings[0].runs[0].name: input should be 'wedlm', 'block' or 'ar', got 'x'.",
        ),
        (change(["model"], "\ud800"), "the file: invalid JSON: unexpected end of hex escape"),
    ],
)
def test_a_trace_of_another_form_is_refused_in_words(saved, edit, message):
    assert message in refused(saved, edit)


@pytest.mark.parametrize(
    "edit",
    [
        change(["recordings"], []),
        change([*RUN, "tokens", 0], -1),
        change([*RUN, "tokens", 0], 9),
        change([*RUN, "text"], "other"),
        change([*RUN, "stats", "forwards"], 1),
        change([*RUN, "seconds"], 0),
        change([*RUN, "steps", 1, "committed"], 0),
        change([*RUN, "steps", 0, "final"], 9),
        change([*RUN, "steps", 0, "kinds"], "c"),
        change(["vocabulary"], {}),
        change(["recordings", 0, "runs"], []),
        change([*RUN, "settings"], {}),
        change([*RUN, "settings", "window_size"], "x"),
        change([*RUN, "settings", "top_k"], {}),
        change([*RUN, "settings", "top_k"], float("nan")),
        change([*RUN, "steps"], []),
        change([*RUN, "steps", 0, "rejected"], [7]),
        change(["fingerprint"], {}),
        change(["environment", "torch"], None),
        change(["hash"], None),
    ],
)
def test_a_trace_that_was_changed_is_refused(saved, edit):
    assert refused(saved, edit)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "[" * 10**5, '{"a":' * 10**5, "\udc80".encode(errors="surrogateescape"), "3"]
)
def test_what_is_no_trace_at_all_is_refused(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="is no trace"):
        load(path)


def test_deep_nesting_anywhere_is_refused(saved):
    whole = saved.read_text()
    for place in ('"seed":5', '"strategy":"wedlm"', '"prompt":"1, 2, 3"'):
        for depth in (3, 100, 900, 10**5):
            assert place in whole
            nested = "[" * depth + "]" * depth
            saved.write_text(whole.replace(place, f"{place.split(':')[0]}:{nested}", 1))
            with pytest.raises(ValueError, match="is no trace"):
                load(saved)


def places(data, path=()):
    """Paths of every value."""
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in children:
        yield (*path, key)
        yield from places(value, (*path, key))


def test_whatever_is_changed_a_trace_is_refused_in_words(recorded, tmp_path):
    trace, path = recorded({"verification": "exact", "entropy_threshold": 3.0}, tokens=8), tmp_path / "trace.json"
    save(trace, path)
    whole = path.read_text()
    paths = list(places(json.loads(whole)))
    values = [None, True, -1, 0, 7, 10**30, 0.5, 1e308, "", "ar", "none", "\x1b[2J", [], [0], {}, {"0": 1}]
    draw, same, refused = random.Random(0), 0, 0
    for _ in range(400):
        data = json.loads(whole)
        change(draw.choice(paths), draw.choice(values))(data)
        path.write_text(json.dumps(data))
        try:
            assert load(path) == trace  # the same value was put in its place
            same += 1
        except ValueError as error:
            refused += "is no trace to be read: " in str(error)
    assert same + refused == 400 and same < 50


def test_control_characters_of_a_trace_do_not_reach_the_terminal(recorded):
    trace = recorded({"verification": "exact", "entropy_threshold": 3.0}, prompts=["1, 2\x1b[2J"], tokens=8)
    console = Console(file=io.StringIO(), width=60)
    replay_in_terminal(trace, console)
    console.print(comparison_table(decodings(trace)))
    assert page(trace)
    assert "\x1b" not in console.file.getvalue()
