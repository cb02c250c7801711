"""The page of `wedlm trace` in a real browser: what it shows is what the trace holds.

They are skipped where there is none, see the fixture `browser`.
"""

import json
import re

import pytest
import torch

from wedlm_hf.eval.prompts import Prompt, encode_prompt
from wedlm_hf.eval.request import AnswerRequest
from wedlm_hf.eval.trace import page as pages
from wedlm_hf.eval.trace.record import record

STAMPS = "Maria has 7 boxes with 47 stamps in each box. How many stamps does Maria have now?"
HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=alert(1)> & \"<b>€</b>\""
SETTINGS = {"strategy": "wedlm", "window_size": 16, "entropy_threshold": 0.1, "distance_penalty": 0.02}
DRAFTS = {"strategy": "wedlm", "verification": "exact", "draft_threshold": 2.5, "window_size": 8}


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
    return record(*nano, AnswerRequest([STAMPS, HOSTILE], SETTINGS), model_name="wedlm-nano", repeats=1)


@pytest.fixture(scope="module")
def drafts(nano):
    options = {**DRAFTS, "do_sample": True, "temperature": 1.5, "max_new_tokens": 24, "adaptive_window": False}
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
        options = SETTINGS if name == "wedlm" else {}
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=256, **options)[0, len(prompt) :]
        assert text_of(page, name) == tokenizer.decode(tokens, skip_special_tokens=True) == answer.text
        assert number_of(page, name, "tokens per forward") == f"{len(tokens) / len(answer.steps):.2f}"


def test_buttons_keys_and_slider_lead_to_the_same_places(shown, trace):
    page = shown(trace)
    run, ar = trace.recordings[0].runs
    controls = page.locator("button, select, input")
    names = controls.evaluate_all("all => all.map(node => node.ariaLabel || node.labels[0])")
    assert len(names) == 10 and all(names)

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
