"""What a trace records is what was decoded, and what its page shows in a real browser is what the trace holds.

Without a browser, the tests that need one are skipped: see the fixture `browser`."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import MASK, tiny_model, tiny_tokenizer

from wedlm_hf.adapters import add_mask_adapter
from wedlm_hf.eval.measure import ForwardCounter, decode_call
from wedlm_hf.eval.prompts import Prompt, encode_prompt
from wedlm_hf.eval.request import AnswerRequest
from wedlm_hf.eval.trace import page as pages
from wedlm_hf.eval.trace import record as recording_code
from wedlm_hf.eval.trace.page import COUNTS, FILLED, PENDING, PROMPT
from wedlm_hf.eval.trace.record import pieces_of, record, token_text

TEXT = "1, 2, 3"
SETTINGS = {
    "greedy": {"entropy_threshold": 1.5},
    "sampled": {"entropy_threshold": 1.5, "do_sample": True, "temperature": 1.3},
    "one at a time": {"entropy_threshold": 0.0, "distance_penalty": 0.3},
    "block": {"strategy": "block", "entropy_threshold": 1.5},
    "exact": {"verification": "exact", "window_size": 16},
    "exact, adaptive": {"verification": "exact", "slot_cost": 0.04},
    "exact, sampled": {"verification": "exact", "do_sample": True, "slot_cost": 0.04},
}


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    return model


@pytest.fixture(scope="module")
def recorded(model):
    """Records prompts of a few tokens, with the options of `generate` that are given."""
    kept = {}

    def recorded(options, prompts=(TEXT,), tokens=24, repeats=0, with_ar=True):
        key = repr((options, prompts, tokens, with_ar))
        if key not in kept or repeats:  # whoever counts repeats looks at what happens meanwhile
            options = {"strategy": "wedlm", "window_size": 6, "max_new_tokens": tokens, **options}
            request = AnswerRequest(list(prompts), options, with_ar, raw=True, seed=5)
            kept[key] = record(model, tiny_tokenizer(), request, model_name="tiny", repeats=repeats)
        return kept[key]

    return recorded


def replay(recording, run):
    """The new tokens and the counts, rebuilt from the rows of the steps and what they filled and committed.

    No step may contradict an earlier one, or the prompt.
    """
    settled, is_verified = dict(enumerate(recording.prompt_tokens)), run.settings.get("verification", "none") != "none"
    filled, rejected = {}, set()
    cached, start, counts = 0, len(settled), dict.fromkeys(COUNTS, 0)
    for number, step in enumerate(run.steps, 1):
        here, rows = f"forward {number}", list(zip(step.positions, step.tokens, step.kinds, strict=True))
        assert step.committed <= len(rows) and set(step.kinds) <= {PROMPT, PENDING, FILLED, pages.MASK}, here
        read = {position: token for position, token, kind in rows if kind == FILLED}
        assert read.items() <= filled.items(), f"{here} reads what nothing filled so"
        assert {step.kinds[row] for row in step.rejected} <= {FILLED}, f"{here} rejects what was no draft"
        rejected |= {(number, step.positions[row], step.tokens[row], step.final) for row in step.rejected}
        for prediction in step.predictions:
            if prediction.token is not None:
                filled[prediction.position] = prediction.token
                if prediction.by == "ar" or not is_verified:
                    settled[prediction.position] = prediction.token
        for position, token, _ in rows[: step.committed]:
            assert position == cached and settled.get(position) == token, f"{here} caches {position} out of turn"
            cached += 1
        while (end := start + counts["new_tokens"]) in settled and end < start + step.final:
            counts["new_tokens"] += 1
        assert end == start + step.final, f"{here} makes {end} final, which nothing filled"
        counts["forwards"] += 1
        counts["token_instances"] += len(rows) - step.kinds.count(PROMPT)
        if is_verified:
            counts["drafted"] += len(read)
            counts["accepted"] += len(read) - len(step.rejected)
    for number, position, token, final in rejected:
        assert position >= start + final or settled[position] != token, f"forward {number}: what is rejected is final"
    return [settled[start + offset] for offset in range(counts["new_tokens"])], counts


@pytest.mark.parametrize("name", SETTINGS)
def test_fills_and_commits_rebuild_exactly_what_generate_answers(model, recorded, name):
    with_ar = name in ("greedy", "sampled")
    trace = recorded(SETTINGS[name], with_ar=with_ar)
    (recording,) = trace.recordings
    run, *others = recording.runs
    inputs = tiny_tokenizer()(TEXT, return_tensors="pt")
    torch.manual_seed(5)
    settings = {"strategy": "wedlm", "window_size": 6, "max_new_tokens": 24, **SETTINGS[name]}
    with ForwardCounter(model) as counter:
        output = model.generate(**inputs, **settings, return_dict_in_generate=True)
    tokens = output.sequences[0, inputs.input_ids.shape[1] :].tolist()
    assert run.tokens == tokens
    assert run.text == "".join(run.pieces) == tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    expected = {name: getattr(output.stats, name).item() for name in COUNTS}
    assert run.stats == expected
    assert replay(recording, run) == (tokens, expected)
    assert [len(step.tokens) for step in run.steps] == [width for _, width in counter.shapes]
    assert name not in ("exact", "exact, sampled") or run.stats["drafted"] > run.stats["accepted"]
    assert len(others) == with_ar
    for ar in others:
        assert replay(recording, ar) == (ar.tokens, ar.stats)
        assert ar.stats["forwards"] == len(ar.steps) == len(ar.tokens)
    for step in run.steps:
        rows = list(zip(map("cpfm".index, step.kinds), step.positions, strict=True))
        assert rows == sorted(rows)  # prompt, pending, filled, masks, each from left to right: the physical order
    if name == "one at a time":  # slots are filled before their left neighbours
        assert any(step.positions != sorted(step.positions) for step in run.steps)


def test_of_drafts_that_branch_those_passed_that_generate_counted():
    model = tiny_model()
    add_mask_adapter(model)
    options = {"strategy": "wedlm", "verification": "exact", "slot_cost": 0.0, "max_new_tokens": 64}
    request = AnswerRequest([TEXT], options, with_ar=False, raw=True, seed=5)
    (recording,) = record(model, tiny_tokenizer(), request, model_name="tiny", repeats=0).recordings
    (run,) = recording.runs
    sequence, drafted, accepted, branching = recording.prompt_tokens + run.tokens, 0, 0, 0
    for step in run.steps:
        drafts = [row for row, kind in enumerate(step.kinds) if kind == FILLED]
        passed = {step.positions[row]: step.tokens[row] for row in drafts if row not in step.rejected}
        assert passed == {position: sequence[position] for position in passed}
        assert len(passed) == len(drafts) - len(step.rejected)
        branching += len({step.positions[row] for row in drafts}) < len(drafts)
        drafted, accepted = drafted + len(drafts), accepted + len(passed)
    assert branching and accepted and (drafted, accepted) == (run.stats["drafted"], run.stats["accepted"])


def test_entropies_are_those_of_the_model(model, recorded):
    (recording,) = recorded(SETTINGS["greedy"], tokens=6).recordings
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
            shares, tokens = log_probs[row].exp().topk(5)
            assert [token for token, _ in guess.likeliest] == tokens.tolist()[: len(guess.likeliest)]
            kept = [share for share in shares.tolist() if share >= 0.001]
            assert [share for _, share in guess.likeliest] == pytest.approx(kept, abs=1e-4)


def test_recording_ar_decoding_keeps_no_logits(model, monkeypatch):
    """Those of a long answer over a large vocabulary would take gigabytes."""
    outputs = []

    def spy(*args, **kwargs):
        outputs.append(decode_call(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr(recording_code, "decode_call", spy)
    decoders = {"ar": {"strategy": "ar", "max_new_tokens": 5}}
    made = recording_code.record_prompt(model, tiny_tokenizer(), "?", [5, 6, 7], decoders, repeats=0, seed=0)
    assert len(made.runs[0].steps) == 5 and all(output.logits is None for _, output, _ in outputs)


def test_the_settings_of_a_run_are_those_that_generate_used(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "window_size", 4, raising=False)
    monkeypatch.setattr(model.generation_config, "entropy_threshold", 1.5, raising=False)
    for options, window, threshold in (
        ({}, 4, 1.5),
        ({"verification": "exact"}, None, 0.4),  # what is stored was chosen for another decoder
        ({"window_size": 3, "verification": "exact"}, 3, 0.4),
    ):
        request = AnswerRequest([TEXT], {"strategy": "wedlm", "max_new_tokens": 5, **options}, with_ar=False, raw=True)
        trace = record(model, tiny_tokenizer(), request, model_name="tiny", repeats=0)
        settings = trace.recordings[0].runs[0].settings
        assert (settings["window_size"], settings["entropy_threshold"]) == (window, threshold)


def test_the_clock_starts_with_the_call_and_holds_medians_of_runs_that_record_nothing(recorded, monkeypatch):
    clocks = iter([[9.0] * 2, [0.0, 0.1], [0.0, 0.3], [0.0, 0.2]])  # the recording call, then the timed ones
    traces: list = []

    def call(*arguments, **options):
        decodings, output, _ = decode_call(*arguments, **options)
        traces.append(output.get("trace"))
        return decodings, output, SimpleNamespace(moments=next(clocks))

    monkeypatch.setattr(recording_code, "decode_call", call)
    run = recorded(SETTINGS["greedy"], tokens=1, repeats=3, with_ar=False).recordings[0].runs[0]
    assert [trace is None for trace in traces] == [False, True, True, True]
    assert ([step.start for step in run.steps], run.seconds, len(run.turns)) == ([0.0], 0.2, 3)


def test_more_turns_are_taken_while_the_speed_is_impossible(recorded, monkeypatch):
    def times(ar):
        def call(model, tokenizer, prompts, options, *rest, **keywords):
            (decoding,), *others = decode_call(model, tokenizer, prompts, options, *rest, **keywords)
            seconds = next(ar) if options["strategy"] == "ar" else 1.0
            return [replace(decoding, seconds=seconds)], *others

        return call

    for ar, turns in (([1.0] * 9, 2), ([99.0] * 9, 5), ([99.0, 99.0, 99.0, 1.0, 1.0, 1.0], 5)):
        monkeypatch.setattr(recording_code, "decode_call", times(iter(ar)))
        runs = recorded(SETTINGS["greedy"], tokens=8, repeats=2).recordings[0].runs
        assert [len(run.turns) for run in runs] == [turns, turns], ar


def test_characters_of_several_tokens_come_with_their_last_one():
    tokenizer = tiny_tokenizer()
    euro = tokenizer("€").input_ids
    assert pieces_of(tokenizer, [*tokenizer("a").input_ids, *euro, *euro[:1]]) == ["a", "", "", "€", "\ufffd"]
    assert [token_text(tokenizer, token) for token in euro] == ["⟨E2⟩", "⟨82⟩", "⟨AC⟩"]


STAMPS = "Maria has 7 boxes with 47 stamps in each box. How many stamps does Maria have now?"
HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=alert(1)> & \"<b>€</b>\""
STREAMED = {"strategy": "wedlm", "window_size": 16, "entropy_threshold": 0.1, "distance_penalty": 0.02}
DRAFTS = {"strategy": "wedlm", "verification": "exact", "window_size": 8}


def test_a_page_holds_the_trace_and_nothing_of_it_as_markup(recorded):
    prompt = "</script><script>alert(1)</script><!-- & \u2028 <b>"
    html = pages.page(recorded({}, prompts=[prompt], tokens=2))
    assert "alert(1)</script>" not in html and "\u2028" not in html
    data = html.split('<script id="trace" type="application/json">')[1].split("</script>")[0]
    assert not set("<>&") & set(data)
    assert json.loads(data)["recordings"][0]["prompt"] == prompt
    addresses = set(re.findall(r"https?://[^\s\"'`]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "innerHTML" not in html


@pytest.fixture(scope="module")
def trace(nano):
    return record(*nano, AnswerRequest([STAMPS, "Count to 3."], STREAMED), model_name="wedlm-nano", repeats=1)


@pytest.fixture(scope="module")
def drafts(nano):
    options = {**DRAFTS, "do_sample": True, "temperature": 1.5, "max_new_tokens": 24}
    return record(*nano, AnswerRequest([HOSTILE, STAMPS], options), model_name="wedlm-nano", repeats=1)


@pytest.fixture
def shown(opened, tmp_path):
    """Opens a trace's page."""

    def open_page(trace):
        (tmp_path / "trace.html").write_text(pages.page(trace), encoding="utf-8")
        page = opened((tmp_path / "trace.html").as_uri())
        page.set_default_timeout(5000)
        return page

    return open_page


def wait_for(page, selector, attribute, value):
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_attribute(attribute, value, timeout=5000)


def text_of(page, run):
    return page.locator(f'[data-run="{run}"] .text').evaluate("node => node.textContent")


def number_of(page, run, name):
    return page.locator(f'[data-run="{run}"] [data-number="{name}"]').inner_text()


# Everything at once: each question costs the browser some milliseconds.
SHOWN = """run => {
    const all = selector => [...document.querySelectorAll(selector)], one = selector => all(selector)[0];
    const number = name => one(`[data-run="${run}"] [data-number="${name}"]`).innerText;
    return {
        states: all(`[data-run="${run}"] .slot`).map(slot => [+slot.dataset.position, slot.dataset.state]),
        text: one(`[data-run="${run}"] .text`).textContent,
        forwards: +number("forwards"),
        tokens: +number("tokens"),
        order: one("#drawing .caption[data-order]")?.dataset.order.split(" ").map(Number),
        boxes: all("#drawing g.physical .number").map(node => +node.textContent),
        struck: all("#drawing g.physical.rejected .number").map(node => +node.textContent),
        story: one("#story").innerText,
    };
}"""


def expected_states(recording, run, forwards):
    """The same, by the rows of the next forward and the commits so far."""
    length = len(recording.prompt_tokens)
    cached = sum(step.committed for step in run.steps[:forwards])
    final = run.steps[forwards - 1].final if forwards else 0
    states = {length + offset: "cached" if length + offset < cached else "pending" for offset in range(final)}
    if forwards < len(run.steps):
        step = run.steps[forwards]
        rows = zip(step.positions, step.kinds, strict=True)
        states |= {position: {"f": "filled", "m": "mask"}[kind] for position, kind in rows if kind in "fm"}
    return states


BOTH = f"() => ['wedlm', 'ar'].map({SHOWN})"


def final_text(run, forwards):
    final = run.steps[forwards - 1].final if forwards else 0
    return "".join(run.pieces[:final])


def ends(run):
    """Seconds until the outcome of each forward is known."""
    return [step.start for step in run.steps[1:]] + [run.seconds]


def test_each_forward_is_shown_as_it_was(shown, trace, nano):
    page = shown(trace)
    recording = trace.recordings[0]
    run, ar = recording.runs
    filled_out_of_order = 0
    for forwards in range(len(run.steps) + 1):
        states, seen, beside = (expected_states(recording, run, forwards), *page.evaluate(BOTH))
        assert dict(map(tuple, seen["states"])) == states
        filled_out_of_order += list(states.values()).count("filled")
        assert seen["text"].startswith(final_text(run, forwards)) and seen["forwards"] == forwards
        assert seen["tokens"] == (run.steps[forwards - 1].final if forwards else 0)
        time = ends(run)[forwards - 1] if forwards else 0.0
        known = sum(end <= time for end in ends(ar))
        assert (beside["forwards"], beside["text"]) == (known, final_text(ar, known))
        if forwards:
            step = run.steps[forwards - 1]
            order = [position for position, kind in zip(step.positions, step.kinds, strict=True) if kind != "c"]
            assert seen["order"] == seen["boxes"] == order
        page.keyboard.press("ArrowRight")
    assert filled_out_of_order > 20
    page.keyboard.press("End")
    model, tokenizer = nano
    prompt = encode_prompt(model, tokenizer, Prompt.of(STAMPS)).tokens
    for name, answer in (("wedlm", run), ("ar", ar)):
        options = STREAMED if name == "wedlm" else {}
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=256, **options)[0, len(prompt) :]
        assert text_of(page, name) == tokenizer.decode(tokens, skip_special_tokens=True) == answer.text
        assert number_of(page, name, "tokens per forward") == f"{len(tokens) / len(answer.steps):.2f}"


def test_buttons_keys_and_slider_lead_to_the_same_places(shown, trace):
    page = shown(trace)
    run, ar = trace.recordings[0].runs
    controls = page.locator("button, select, input")
    names = controls.evaluate_all("all => all.map(node => node.ariaLabel || node.labels[0])")
    assert len(names) == 11 and all(names)

    def forwards():
        return tuple(int(number_of(page, name, "forwards")) for name in ("wedlm", "ar"))

    page.keyboard.press("c")  # the clock that counts forwards
    keys = {"ArrowRight": 1, "ArrowRight ": 2, "ArrowLeft": 1, "End": len(ar.steps), "ArrowLeft ": len(ar.steps) - 1}
    for key, expected in {**keys, "Home": 0}.items():
        page.keyboard.press(key.strip())
        assert forwards() == (min(expected, len(run.steps)), expected)
    places = {"step": 1, "back": 0, "last": len(ar.steps), "first": 0}
    for button, expected in places.items():
        page.locator(f"#{button}").click()
        assert forwards() == (min(expected, len(run.steps)), expected)

    page.evaluate("location.hash = '#forward=3'")
    wait_for(page, "#panes [data-run=wedlm]", "data-forwards", "3")
    page.evaluate("location.hash = '#prompt=99&forward=x'")
    wait_for(page, "#panes [data-run=wedlm]", "data-forwards", "0")
    assert page.locator("#chooser").input_value() == "1"
    page.locator("#chooser").select_option("0")


def test_it_plays_to_the_end_and_pauses(shown, trace):
    page = shown(trace)
    run, ar = trace.recordings[0].runs
    page.locator("#clock").select_option("forwards")
    page.locator("#speed").select_option("4")
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-label") == "Pause"
    wait_for(page, "#panes [data-run=ar]", "data-forwards", re.compile(r"[3-9]|\d\d"))
    page.locator("#play").click()
    assert page.locator("#play").get_attribute("aria-label") == "Play"
    stopped = number_of(page, "ar", "forwards")
    page.wait_for_timeout(200)
    assert number_of(page, "ar", "forwards") == stopped != str(len(ar.steps))
    page.locator("#speed").select_option("32")
    page.locator("#play").click()
    wait_for(page, "#panes [data-run=ar]", "data-forwards", str(len(ar.steps)))
    assert page.locator("#play").get_attribute("aria-label") == "Play"
    assert text_of(page, "wedlm") == run.text


def test_rejected_drafts_are_shown_as_such(shown, drafts):
    page = shown(drafts)
    page.keyboard.press("c")
    rejections = 0
    for number, (recording, run) in enumerate((r, r.runs[0]) for r in drafts.recordings):
        page.locator("#chooser").select_option(str(number))
        for forwards in range(1, len(run.steps) + 1):
            page.keyboard.press("ArrowRight")
            seen, step = page.evaluate(SHOWN, "wedlm"), run.steps[forwards - 1]
            assert dict(map(tuple, seen["states"])) == expected_states(recording, run, forwards)
            assert seen["struck"] == [step.positions[row] for row in step.rejected]
            rejections += len(step.rejected)
            if drafted := step.kinds.count("f"):
                assert f"accepted {drafted - len(step.rejected)} of " in seen["story"]
        assert text_of(page, "wedlm") == run.text
    assert rejections > 0
    assert page.title() == "See it decode" and page.locator("img").count() == 0  # what looks like markup is text
