"""The page of `wedlm demo` in a real browser, against a real server with wedlm-nano."""

import json
import re
import threading
import time
from dataclasses import fields

import pytest
import torch
import uvicorn
from pydantic import TypeAdapter

from wedlm_hf.apps.demo import Demo, ModelChoice, Models, application
from wedlm_hf.checkpoints import NANO
from wedlm_hf.cli.options import LoadingOptions
from wedlm_hf.console.prompts import DEMO_PROMPTS
from wedlm_hf.eval.prompts import Prompt, encode_prompt
from wedlm_hf.eval.trace.page import Run, Trace

HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=alert(1)>"
IDLE = "!document.querySelector('.busy')"
PATIENCE = 60_000  # milliseconds, on a machine that has other work


@pytest.fixture(scope="module")
def demo():
    return Demo(Models(LoadingOptions().load), ModelChoice(str(NANO)))


@pytest.fixture(scope="module")
def address(demo):
    server = uvicorn.Server(uvicorn.Config(application(demo, ["127.0.0.1"]), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture
def tab(opened, address):
    """Opens the page in a tab of its own, and waits for the run that it begins with."""

    def open_tab(**options):
        page = opened(address, **options)
        page.set_default_timeout(PATIENCE)
        finished(page, 1)
        return page

    return open_tab


def until(page, holds):
    """Waits until an expression is true (the page forbids playwright's own way, which evaluates text)."""
    end = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(f"() => Boolean({holds})"):
        assert time.monotonic() < end, (holds, page.locator("#error").inner_text())
        page.wait_for_timeout(50)


def finished(page, count):
    """Waits until so many runs are in the table."""
    until(page, f"asked.runs.length === {count} && {IDLE}")


def trace_of(page):
    """The trace that is shown, without what the page adds to its runs."""
    data = page.evaluate("() => asked.current.trace")
    names = {field.name for field in fields(Run)}
    for recording in data["recordings"]:
        recording["runs"] = [{name: run[name] for name in names} for run in recording["runs"]]
    return TypeAdapter(Trace).validate_json(json.dumps(data))


def ask(page, text, count=1):
    page.locator("#ask-prompt").fill(text)
    page.locator("#decode").click()
    until(page, f"asked.current?.form.prompt === {json.dumps(text)}")
    finished(page, count)


def text_of(page, run):
    return page.locator(f'#panes [data-run="{run}"] .text').evaluate("node => node.textContent")


def answer(demo, prompt, **options):
    loaded = demo.models.load(ModelChoice(str(NANO)))
    tokens = encode_prompt(loaded.model, loaded.tokenizer, Prompt.of(prompt)).tokens
    output = loaded.model.generate(torch.tensor([tokens]), max_new_tokens=128, **options)
    return loaded.tokenizer.decode(output[0, len(tokens) :], skip_special_tokens=True)


def test_both_answers_are_shown_as_they_are_and_compared(tab, demo):
    page = tab()
    page.locator("#last").click()
    for prompt in (DEMO_PROMPTS[0], HOSTILE):
        if prompt != DEMO_PROMPTS[0]:
            ask(page, prompt)
        page.locator("#last").click()
        own, ar = answer(demo, prompt, strategy="wedlm"), answer(demo, prompt)
        assert (text_of(page, "wedlm"), text_of(page, "ar")) == (own, ar)
        badge = page.locator("#panes .outcome").first.inner_text()
        assert ("✓ identical to AR" in badge) == (own == ar)
        assert ("✗ differs from AR at token" in badge) == (own != ar)
        cells = page.locator("#runs tr").first.locator("td").all_text_contents()
        assert ("✓ identical to AR" in cells) == (own == ar)
    assert page.title() == "See it decode" and page.locator("img").count() == 0


def test_a_speed_that_cannot_be_is_a_range_and_another_answer_than_ars_is_marked(tab):
    page = tab()
    page.evaluate("""() => {
        const entry = structuredClone(asked.current), [run, ar] = entry.trace.recordings[0].runs;
        Object.assign(run, {seconds: 1, turns: [1, 0.5]});
        Object.assign(ar, {seconds: 24, turns: [24, 4]});
        ar.tokens[2] = ar.tokens[0];
        asked.runs = [entry];
        reopen(entry, true);
    }""")
    outcome = page.locator("#panes .outcome")
    assert "4.0 to 48.0× as fast as AR: busy machine" in outcome.first.inner_text()
    assert "4.0 to 48.0×" in page.locator("#runs td").all_text_contents()
    assert "✗ differs from AR at token 3" in outcome.first.inner_text()
    assert page.locator("#panes [data-run=wedlm] .slot.differs").count() == 1
    outcome.locator(".bad", has_text="differs").hover()  # another says so where it is slower
    assert page.locator("#tip").inner_text().startswith("Token 3: ")


def test_a_setting_decodes_again_at_once_and_keeps_ars_run(tab):
    page = tab()
    ar = trace_of(page).recordings[0].runs[1]
    slider = page.locator('[data-setting="window_size"] input[type=range]')
    assert slider.input_value() == "6"  # the checkpoint's own
    slider.fill("2")
    finished(page, 2)
    run, kept = trace_of(page).recordings[0].runs
    assert (run.settings["window_size"], kept.tokens) == (2, ar.tokens)
    assert kept == ar or not page.evaluate("() => asked.current.kept_ar")
    assert max(step.kinds.count("m") for step in run.steps) == 2
    assert page.locator('#panes [data-run=wedlm] [data-number="forwards"]').inner_text() == str(len(run.steps))
    assert page.locator("#lanes [data-moment]").count() == len(run.steps) + len(ar.steps)
    page.locator("#verification label", has_text="exact").click()
    finished(page, 3)
    settings = trace_of(page).recordings[0].runs[0].settings
    assert (settings["verification"], settings["window_size"]) == ("exact", 2)
    penalty = page.locator('[data-setting="distance_penalty"] input[type=range]')
    assert penalty.is_disabled()  # drafts are one run
    page.locator("#verification label", has_text="none").click()
    finished(page, 4)
    penalty.fill("0.5")
    page.locator('[data-setting="entropy_threshold"] input[type=number]').fill("0.3")
    until(page, f"asked.current.form.entropy_threshold === 0.3 && {IDLE}")
    settings = trace_of(page).recordings[0].runs[0].settings
    assert (settings["entropy_threshold"], settings["distance_penalty"]) == (0.3, 0.5)
    # A run of the table comes back with its settings.
    count = page.locator("#runs tr").count()
    page.locator("#runs tr").last.click()
    assert slider.input_value() == "6" and page.locator("#runs tr").count() == count
    assert page.locator("#runs tr").last.get_attribute("aria-current") == "true"


def test_the_likeliest_tokens_of_a_slot_are_told_on_hover(tab):
    page = tab()
    run = trace_of(page).recordings[0].runs[0]
    words = trace_of(page).vocabulary
    page.locator("#last").click()
    position = len(trace_of(page).recordings[0].prompt_tokens) + 1
    guess = next(guess for step in run.steps for guess in step.predictions if guess.position == position)
    slot = page.locator(f'#panes [data-run=wedlm] [data-position="{position}"]')
    slot.hover()
    told = [page.locator(f"#tip {part}").all_text_contents() for part in ("b", "em")]
    assert len(guess.likeliest) > 0
    for text, percent, (token, share) in zip(*told, guess.likeliest, strict=True):
        assert text == words[str(token)].replace(" ", "␣")
        assert float(percent.removesuffix(" %")) == pytest.approx(100 * share, abs=0.6)
    tip = page.locator("#tip").inner_text()
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()
    slot.focus()  # by keyboard, too
    assert page.locator("#tip").inner_text() == tip and f"position {position}" in tip


def test_acceptance_by_depth_is_what_generate_counted(tab):
    page = tab()
    page.locator("#verification label", has_text="exact").click()
    finished(page, 2)
    is_kept = page.evaluate("() => asked.current.kept_ar")  # not where the machine was busy
    assert ("AR's run was kept" in page.locator("#status").inner_text()) == is_kept
    bars = page.locator("#bars span").evaluate_all("all => all.map(bar => [+bar.dataset.tried, +bar.dataset.passed])")
    stats = trace_of(page).recordings[0].runs[0].stats
    assert [sum(counts) for counts in zip(*bars, strict=True)] == [stats["drafted"], stats["accepted"]]
    assert "✓ identical to AR" in page.locator("#panes .outcome").first.inner_text()


def test_a_replay_is_saved_as_a_page_of_its_own(tab, tmp_path):
    page = tab()
    with page.expect_download() as download:
        page.locator("#export").click()
    download.value.save_as(tmp_path / "replay.html")
    saved = (tmp_path / "replay.html").read_text()
    data = json.loads(saved.split('<script id="trace" type="application/json">')[1].split("</script>")[0])
    assert TypeAdapter(Trace).validate_json(json.dumps(data)) == trace_of(page)
    assert "<form" not in saved


def test_bad_input_is_said_and_the_page_goes_on(tab, tmp_path):
    page = tab()
    error = page.locator("#error")

    def expect(text):
        until(page, f"document.getElementById('error').textContent.includes({json.dumps(text)})")
        assert error.is_visible()

    page.locator("#ask-prompt").fill("  ")
    page.locator("#decode").click()
    expect("The prompt is empty")
    assert page.locator("#tried").is_hidden()  # it was tried on another prompt
    ask(page, DEMO_PROMPTS[0])
    page.locator("#window_size").fill("1.5")
    expect("window_size: input should be a valid integer, got 1.5.")
    assert page.locator("#tried").is_visible()
    page.locator("#window_size").fill("")
    page.locator("#model").select_option("own")
    page.locator("#decode").click()
    expect("No model is named")
    page.locator("#own").fill(str(tmp_path))
    page.locator("#decode").click()
    expect("it has no config.json")
    page.locator("#own").fill(str(NANO))
    page.locator("#adapter").fill("an-adapter")
    page.locator("#adapter").blur()
    assert page.locator("input[value=exact]").is_checked()
    page.locator("#adapter").fill("")
    page.locator("#decode").click()
    until(page, f"asked.current && {IDLE}")
    assert error.is_hidden()
    assert text_of(page, "ar") is not None


def test_it_fits_a_phone_in_the_dark_and_every_control_has_a_name(tab):
    page = tab(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("summary").click()
    ask(page, DEMO_PROMPTS[2])
    until(page, "document.getElementById('replay').getBoundingClientRect().top < innerHeight / 2")
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    named = "node => (node.ariaLabel || node.labels?.[0]?.textContent || node.textContent).trim()"
    nameless = page.locator("button, select, input, textarea").evaluate_all(
        f"nodes => nodes.filter(node => !({named})(node)).map(node => node.outerHTML)"
    )
    assert nameless == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background)[:3])) < 100
