"""`wedlm trace`: what is recorded is what was decoded, what is saved comes back, and it replays in a terminal."""

import dataclasses
import io
import json
import re
from collections import Counter

import pytest
import torch
from rich.console import Console
from tiny import MASK, tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.eval import trace as tracing
from wedlm_hf.eval.measure import ForwardCounter, encode_text
from wedlm_hf.eval.trace_page import page
from wedlm_hf.eval.trace_terminal import decode_in_terminal, printable, replay_in_terminal

PROMPT = "1, 2, 3"
SETTINGS = {
    "greedy": {"entropy_threshold": 1.5},
    "sampled": {"entropy_threshold": 1.5, "do_sample": True, "temperature": 1.3},
    "one at a time": {"entropy_threshold": 0.0, "distance_penalty": 0.3},
    "budget": {"entropy_budget": 4.0},
    "adaptive": {"adaptive_window": True, "slot_cost": 9.0, "entropy_threshold": 1.0},
    "block": {"strategy": "block", "entropy_threshold": 1.5},
    "exact": {"verification": "exact", "entropy_threshold": 3.0, "adaptive_window": False},
    "exact, adaptive": {"verification": "exact", "entropy_threshold": 3.0},
    "exact, sampled": {"verification": "exact", "entropy_threshold": 3.0, "do_sample": True},
    "typical": {"verification": "typical", "entropy_threshold": 3.0, "acceptance_epsilon": 0.001},
    "typical, sampled": {"verification": "typical", "entropy_threshold": 3.0, "do_sample": True},
}


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    return model


def recorded(model, name="greedy", prompts=(PROMPT,), tokens=24, **options):
    settings = {"strategy": "wedlm", "window_size": 6, "max_new_tokens": tokens, **SETTINGS[name]}
    keywords = {"raw": True, "seed": 5, "repeats": 1, **options}
    return tracing.record(model, tiny_tokenizer(), list(prompts), settings, model_name="tiny", **keywords)


def generated(model, name, tokens=24, seed=5):
    """The same by a direct call."""
    inputs = tiny_tokenizer()(PROMPT, return_tensors="pt")
    torch.manual_seed(seed)
    settings = {"strategy": "wedlm", "window_size": 6, "max_new_tokens": tokens, **SETTINGS[name]}
    with ForwardCounter(model) as counter:
        output = model.generate(**inputs, **settings, return_dict_in_generate=True)
    return output.sequences[0, inputs.input_ids.shape[1] :].tolist(), output.stats, counter


# --- recording ----------------------------------------------------------------------------------------------------


def rebuilt(recording, run):
    """The tokens by slots that forwards filled or chose, and by rows that they cached: a second reading of a trace."""
    canvas, cache = {}, []
    for step in run.steps:
        for guess in step.predictions:
            is_final = guess.by == "ar" or run.settings.get("verification", "none") == "none"
            if guess.token is not None and is_final:
                canvas[guess.position] = guess.token
        cache += list(zip(step.positions, step.tokens, strict=True))[: step.committed]
    length = len(recording.prompt_tokens)
    assert [position for position, _ in cache] == list(range(len(cache)))
    assert [token for _, token in cache] == (recording.prompt_tokens + run.tokens)[: len(cache)]
    return [canvas[length + offset] for offset in range(run.steps[-1].final)]


@pytest.mark.parametrize("name", SETTINGS)
def test_fills_and_commits_rebuild_exactly_what_generate_answers(model, name):
    trace = recorded(model, name)
    (recording,) = trace.recordings
    run, ar = recording.runs
    tokens, stats, counter = generated(model, name)
    assert run.tokens == tokens == rebuilt(recording, run) == tracing.replay(recording, run)
    assert ar.tokens == rebuilt(recording, ar)
    assert run.text == "".join(run.pieces) == tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    expected = {field.name: getattr(stats, field.name).item() for field in dataclasses.fields(stats)}
    assert run.stats == expected == tracing.counts_of(run)
    assert len(run.steps) == counter.forwards
    assert [len(step.tokens) for step in run.steps] == [width for _, width in counter.shapes]
    assert ar.stats["forwards"] == len(ar.steps) == len(ar.tokens)


def test_a_trace_shows_slots_that_are_filled_before_their_left_neighbours(model):
    run = recorded(model, "one at a time").recordings[0].runs[0]
    reordered = [step for step in run.steps if step.positions != sorted(step.positions)]
    assert reordered
    for step in run.steps:
        kinds = step.kinds.lstrip("c").lstrip("p").lstrip("f")
        assert set(kinds) <= {"m"}  # pending, filled, masks: the physical order
        for kind in "cpfm":
            positions = [
                position for position, letter in zip(step.positions, step.kinds, strict=True) if letter == kind
            ]
            assert positions == sorted(positions)


def test_rejected_drafts_are_those_that_generate_counted_and_are_not_what_became_final(model):
    seen = 0
    for name in ("exact", "exact, sampled", "typical, sampled"):
        (recording,) = recorded(model, name, tokens=40).recordings
        run = recording.runs[0]
        assert run.stats["drafted"] - run.stats["accepted"] == sum(len(step.rejected) for step in run.steps)
        sequence = recording.prompt_tokens + run.tokens
        for step in run.steps:
            drafts = dict(zip(step.positions, step.tokens, strict=True))
            kept = [position for position in step.rejected if position < len(recording.prompt_tokens) + step.final]
            assert all(drafts[position] != sequence[position] for position in kept)
            seen += len(step.rejected)
    assert seen > 0


def test_entropies_are_those_of_the_model(model):
    (recording,) = recorded(model, "greedy", tokens=6).recordings
    run, ar = recording.runs
    for step in (run.steps[0], ar.steps[0]):
        ids, positions = torch.tensor([step.tokens]), torch.tensor([step.positions])
        with torch.no_grad():
            logits = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits[0].double()
        log_probs = logits.log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        for guess in step.predictions:
            row = step.positions.index(guess.position if guess.by == "mask" else guess.position - 1)
            assert guess.entropy == pytest.approx(entropies[row].item(), abs=2e-4)


def test_the_clock_starts_with_the_call_and_holds_medians_of_runs_that_record_nothing(model, monkeypatch):
    clocks = iter([[9.0] * 100, [0.0, 0.1], [0.0, 0.3], [0.0, 0.2]])  # the recording call, then the timed ones

    class Call(tracing._Call):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            assert self.output.get("trace") is None or not timed
            clock = next(clocks)
            timed.append(clock)
            self.clock = [*clock[:1], *clock[1:2]]

    timed: list = []
    monkeypatch.setattr(tracing, "_Call", Call)
    run = recorded(model, tokens=1, repeats=3, with_ar=False).recordings[0].runs[0]
    assert ([step.start for step in run.steps], run.seconds, run.timed_runs) == ([0.0], 0.2, 3)
    assert run.ends == [0.2]


def test_characters_of_several_tokens_come_with_their_last_one():
    tokenizer = tiny_tokenizer()
    euro = tokenizer("€").input_ids
    assert tracing.pieces_of(tokenizer, [*tokenizer("a").input_ids, *euro, *euro[:1]]) == ["a", "", "", "€", "\ufffd"]
    assert [tracing.token_text(tokenizer, token) for token in euro] == ["⟨E2⟩", "⟨82⟩", "⟨AC⟩"]


# --- files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(model):
    return recorded(model, "greedy", prompts=[PROMPT, "Sort 31, 7"])


def test_a_saved_trace_comes_back_whole(trace, tmp_path):
    tracing.save(trace, tmp_path / "new" / "trace.json")
    assert tracing.load(tmp_path / "new" / "trace.json") == trace
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
        (change(["version"], 7), "its version is 7, this program reads 1."),
        (change(["format"], "other"), 'it has no `"format": "wedlm-trace"`.'),
        (change(["seed"], None), "the file lacks ['seed']."),
        (change(["more"], 1), "the file has unknown ['more']."),
        (change(["recordings"], []), "it has no recordings."),
        (
            change([*RUN, "seconds"], "soon"),
            'recordings[0].runs[0].seconds must be a number of at least 0, got "soon".',
        ),
        (
            change([*RUN, "name"], "x"),
            "recordings[0].runs[0].name must be one of ('wedlm', 'block', 'ar'), got \"x\".",
        ),
        (
            change([*RUN, "tokens", 0], -1),
            "recordings[0].runs[0].tokens[0] must be a whole number of at least 0, got -1.",
        ),
        (change([*RUN, "tokens", 0], 9), "recordings[0], wedlm: the steps do not lead to the tokens."),
        (change([*RUN, "text"], "other"), "recordings[0], wedlm: the pieces are not the text."),
        (change([*RUN, "stats", "forwards"], 1), "recordings[0], wedlm: the counts are not those of the steps"),
        (change([*RUN, "seconds"], 0), "recordings[0], wedlm: the clock runs backwards."),
        (change([*RUN, "steps", 1, "committed"], 0), "is cached out of turn."),
        (change([*RUN, "steps", 0, "final"], 9), "is final, and nothing filled it."),
        (change([*RUN, "steps", 0, "kinds"], "c"), "rows of different lengths."),
        (change(["vocabulary"], {}), "vocabulary: no text for token"),
    ],
)
def test_a_trace_that_is_not_whole_or_contradicts_itself_is_refused(trace, tmp_path, edit, message):
    data = json.loads(tracing.to_json(trace))
    edit(data)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        tracing.load(path)
    assert str(error.value).startswith(f"{str(path)!r} is no trace to be read: ")
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udc80".encode(errors="surrogateescape"), "3"])
def test_what_is_no_trace_at_all_is_refused(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="is no trace"):
        tracing.load(path)


def test_a_trace_of_another_model_is_refused(model, trace, tmp_path):
    tokenizer = tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    tracing.check_model(trace, "tiny", *tracing_load(tmp_path))
    other = tiny_model()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match="another model than 'other': weights differ from those of 'tiny'"):
        tracing.check_model(trace, "other", other, tokenizer)
    tokenizer.add_tokens(["new"])
    other = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 9_000.0})
    with pytest.raises(ValueError, match="config and tokenizer differ"):
        tracing.check_model(trace, "other", other, tokenizer)


def tracing_load(folder):
    from wedlm_hf.eval.measure import load

    return load(folder)


def test_a_page_holds_the_trace_and_nothing_of_it_as_markup(model):
    prompt = "</script><script>alert(1)</script><!-- & \u2028 <b>"
    html = page(recorded(model, prompts=[prompt], tokens=2))
    assert "alert(1)</script>" not in html and "\u2028" not in html
    data = html.split('<script id="trace" type="application/json">')[1].split("</script>")[0]
    assert not set("<>&") & set(data)
    assert json.loads(data)["recordings"][0]["prompt"] == prompt
    addresses = set(re.findall(r"https?://[^\s\"'`]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "innerHTML" not in html


# --- in a terminal ------------------------------------------------------------------------------------------------


def written(show, terminal=False, width=120, **options):
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, color_system="standard" if terminal else None
    )
    show(console, **options)
    return console.file.getvalue()


def test_without_a_terminal_a_replay_is_one_line_for_each_forward(trace):
    text = written(lambda console: replay_in_terminal(trace, console))
    assert "\x1b" not in text
    for recording in trace.recordings:
        for run in recording.runs:
            assert f"{run.label}: {len(run.tokens)} tokens in {len(run.steps)} forwards" in text
    lines = [line for line in text.splitlines() if line.startswith("WeDLM: forward ")]
    assert len(lines) == sum(len(recording.runs[0].steps) for recording in trace.recordings)
    first = trace.recordings[0].runs[0]
    assert f"final {''.join(first.pieces[: first.steps[0].final])!r}" in lines[0]


def test_a_terminal_shows_all_of_the_answer(trace):
    text = written(lambda console: replay_in_terminal(trace, console, pace=0.0001), terminal=True)
    assert "\x1b" in text
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text)
    run = trace.recordings[0].runs[0]
    assert printable(run.text).split("\n")[0][:20] in plain
    assert f"{len(run.tokens)} tokens, forward {len(run.steps)}, " in plain
    assert "of the measured speed" in text


@pytest.mark.parametrize("name", ["greedy", "exact", "block", "one at a time"])
def test_live_lines_tell_what_the_trace_tells(model, name):
    (recording,) = recorded(model, name).recordings
    settings = {"strategy": "wedlm", "window_size": 6, "max_new_tokens": 24, **SETTINGS[name]}
    options = {"raw": True, "seed": 5, "with_ar": False}
    text = written(
        lambda console: decode_in_terminal(model, tiny_tokenizer(), [PROMPT], settings, console, **options), width=500
    )
    run = recording.runs[0]
    lines = [line for line in text.splitlines() if ": forward " in line]
    assert len(lines) == len(run.steps)
    for index, line in enumerate(lines[:-1]):
        kinds = Counter(run.steps[index + 1].kinds)
        window = line.split("  window ")[1] if "  window " in line else ""
        assert window.split(" ").count("_") == kinds["m"], line
    assert text.splitlines()[-1].startswith(f"{run.label}: {len(run.tokens)} tokens in {len(run.steps)} forwards")


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[31m\x07\tb\n\x9b\x7f") == "a␛[31m␇\tb\n\ufffd␡"


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def wedlm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, stdin=""):
        result = CliRunner().invoke(cli.app, ["trace", *map(str, arguments)], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def test_the_command_writes_a_page_and_keeps_the_trace(wedlm, checkpoint, tmp_path):
    short = ("--model", checkpoint, "--max-new-tokens", 6, "--repeats", 1)
    code, output, errors = wedlm(*short, "--save", "kept/trace.json", "--raw", PROMPT)
    assert (code, "Error" in errors) == (0, False), errors
    assert output.splitlines()[-2:] == ["kept/trace.json", "build/trace.html"]
    assert "tokens per forward" in output
    kept = tracing.load("kept/trace.json")
    model, tokenizer = tracing_load(checkpoint)
    assert kept.recordings[0].prompt_tokens == encode_text(model, tokenizer, PROMPT, True)
    assert (tmp_path / "build" / "trace.html").read_text() == page(kept)

    again = wedlm("--from", "kept/trace.json", "--output", "again.html", "--model", checkpoint)
    assert (again[0], again[2]) == (0, "")
    assert (tmp_path / "again.html").read_text() == page(kept)
    code, output, errors = wedlm("--from", "kept/trace.json", "--terminal")
    assert code == 0 and "WeDLM: forward 1" in output
    code, output, errors = wedlm(*short[:4], "--terminal", "--raw", PROMPT, "--no-compare")
    assert code == 0 and "WeDLM: forward 1" in output and "AR" not in output
    assert not (tmp_path / "build" / "trace.html").samefile(tmp_path / "again.html")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "ar", "hi"], "`--strategy` must be wedlm or block, got 'ar'."),
        (["--from", "trace.json", "hi"], "PROMPTS: a saved trace (`--from`) is shown as it is, nothing is decoded."),
        (["--from", "trace.json", "--window-size", "4"], "`--window-size`: a saved trace"),
        (["--from", "trace.json", "--threads", "1"], "`--threads`: a saved trace"),
        (["--from", "missing.json"], "No such file or directory: 'missing.json'"),
        (["--pace", "1", "hi"], "`--pace`: goes with `--terminal`"),
        (["--terminal", "--repeats", "2", "hi"], "`--repeats`: decoding is shown live, once"),
        (["--output", ".", "hi"], "'.' is a folder; a file is to be written."),
        (["--save", "trace.json/x", "hi"], "File exists: 'trace.json'"),
        (["--window-size", "0", "hi"], "`window_size` must be an integer of at least 1, got 0."),
        (["--from", "trace.json", "--model", cli.NANO], "The trace was made with another model than"),
        ([" "], "A prompt must not be empty."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(wedlm, trace, arguments, message):
    tracing.save(trace, "trace.json")
    code, output, errors = wedlm(*arguments)
    assert (code, output) == (2, "")
    assert message in errors and errors.startswith("Error: ") and errors.count("\n") == 1
