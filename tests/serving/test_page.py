"""The page of `wedlm serve` in a real browser, against a real server with wedlm-nano.

Without a browser, the tests that need one are skipped: see the fixture `browser`."""

import contextlib
import json
import re
import socket
import threading
import time
import urllib.request
import webbrowser
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pydantic import TypeAdapter
from served import CHAT, NAME, Server, post, refusal
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.adapters import add_mask_adapter
from wedlm_hf.console.prompts import DEMO_PROMPTS
from wedlm_hf.console.streaming import AnswerStreamer
from wedlm_hf.eval.prompts import Prompt, encode_prompt
from wedlm_hf.eval.trace.page import Trace
from wedlm_hf.serving import server as server_module
from wedlm_hf.serving.page import page as page_module

COUNT, APPLES, _, TO_JSON = DEMO_PROMPTS[:4]
HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=alert(1)>"
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
PATIENCE = 60_000  # milliseconds, on a machine that has other work


@pytest.fixture(scope="module")
def server(nano):
    with Server(*nano, {"strategy": "wedlm"}) as server:
        yield server


@pytest.fixture
def slow(nano):
    """Forwards take a tenth of a second: time to do something meanwhile."""
    hook = nano[0].register_forward_pre_hook(lambda *_: time.sleep(0.1))
    yield
    hook.remove()


class Wire:
    """Stands between a browser and a server, and can be cut."""

    def __init__(self, port):
        self.to, self.sockets = port, []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.mend()

    def mend(self):
        threading.Thread(target=self._accept, args=(self.listening,), daemon=True).start()

    def _accept(self, listening):
        while True:
            try:
                one, other = listening.accept()[0], socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                return
            self.sockets += [one, other]
            for pair in ((one, other), (other, one)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, one, other):
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self):
        """The server is gone, in the middle of whatever it says."""
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def restore(self):
        """It is there again."""
        self.listening = socket.create_server(("127.0.0.1", self.port))
        self.mend()


@pytest.fixture
def tab(opened, server):
    """Opens the page in a tab of its own."""

    def open_tab(port=None, **options):
        page = opened(f"http://127.0.0.1:{port or server.port}/", **options)
        page.set_default_timeout(PATIENCE)
        return page

    return open_tab


def until(page, holds):
    """Waits until an expression is true (the page forbids playwright's own way, which evaluates text)."""
    end = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(f"() => Boolean({holds})"):
        assert time.monotonic() < end, (holds, page.locator("main").inner_text())
        page.wait_for_timeout(50)


def ask(page, text, wait=True):
    until(page, "ABOUT")
    count = page.locator("#turns li").count()
    page.locator("#question").fill(text)
    page.keyboard.press("Enter")
    if wait:
        until(page, f"talk.turns.length === {count + 2} && !talk.controller")


def said(page):
    """The texts of the answers, as they are shown."""
    return page.locator("#turns .pane .said").all_text_contents()


def act(page, name):
    """Presses a button of the last answer."""
    page.locator("#turns li").last.locator("button", has_text=name).click()


def trace_of(page):
    """The trace that is shown, when it is there."""
    until(page, "stage.current && !$('replay').hidden && $('live').hidden")
    return TypeAdapter(Trace).validate_json(page.evaluate("() => stage.current.json"))


def generated(server, prompt, **options):
    model, tokenizer = server.model, server.tokenizer
    tokens = encode_prompt(model, tokenizer, Prompt.of(prompt)).tokens
    output = model.generate(torch.tensor([tokens]), max_new_tokens=300, **options)[0, len(tokens) :]
    return tokenizer.decode(output, skip_special_tokens=True)


def test_a_question_is_answered_as_generate_does_and_read_copied_regenerated_and_found_again(tab, server):
    page = tab(permissions=["clipboard-read", "clipboard-write"])
    ask(page, COUNT)
    ask(page, HOSTILE)
    assert page.locator("#turns .you").all_text_contents() == [COUNT, HOSTILE]
    own = {"strategy": "wedlm"}
    assert said(page) == [generated(server, COUNT, **own), generated(server, HOSTILE, **own)]
    assert page.title() == NAME and page.locator("img").count() == 0  # what looks like markup is text
    chips = page.locator("#turns .pane .chips").first.inner_text()
    assert re.search(r"\d+ tokens\s.*\d tokens a second", chips, flags=re.DOTALL)
    act(page, "Copy")
    until(page, "[...document.querySelectorAll('.acts button')].some(button => button.textContent === 'Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == said(page)[1]
    ask(page, TO_JSON)
    shown = page.locator("#turns .pane pre")
    assert json.loads(shown.inner_text()) == json.loads(generated(server, TO_JSON, **own))
    assert shown.inner_text().count("\n") > 5 and shown.locator(".key").count() > 2
    before = said(page)
    act(page, "Regenerate")
    until(page, "!talk.controller")
    assert said(page) == before
    page.reload()
    until(page, "ABOUT && talk.turns.length === 6")
    assert said(page) == before
    page.locator("#history").select_option("")
    assert page.locator("#turns li").count() == 0
    ask(page, COUNT)
    assert page.locator("#history option").count() == 3
    page.locator("#history").select_option(index=2)
    assert said(page) == before
    page.locator("#forget").click()
    assert page.locator("#history option").count() == 2


def test_an_answer_is_stopped_while_it_comes_and_replayed_as_far_as_it_came(tab, server, slow):
    page = tab()
    ask(page, APPLES, wait=False)
    page.locator("#turns .said").last.filter(has_text="5").wait_for()
    page.keyboard.press("Escape")
    until(page, "!talk.controller")
    assert "stopped" in page.locator("#turns .pane .chips").inner_text()
    (text,) = said(page)
    assert text and generated(server, APPLES, strategy="wedlm").startswith(text)
    assert page.locator("#send").is_visible() and page.evaluate("document.activeElement.id") == "question"
    act(page, "Replay")
    (recording,) = trace_of(page).recordings
    assert [run.name for run in recording.runs] == ["wedlm"] and recording.runs[0].text.startswith(text)
    assert len(recording.runs[0].tokens) < 80
    assert "The same text as in the conversation" in page.locator("#status").inner_text()
    page.keyboard.press("End")
    assert page.locator("#panes .text").evaluate("node => node.textContent") == recording.runs[0].text
    page.locator("#leave").click()
    assert page.locator("#talk").is_visible() and page.locator("#replay").is_hidden()
    focused = page.evaluate("document.activeElement.textContent")
    assert focused == "Replay"  # where the reader was


def test_a_race_shows_both_answers_on_one_clock_and_proves_them_equal(tab, server, tmp_path):
    page = tab()
    ask(page, APPLES)
    act(page, "Race")
    run, ar = trace_of(page).recordings[0].runs
    assert (run.text, ar.text) == (generated(server, APPLES, strategy="wedlm"), generated(server, APPLES))
    assert page.evaluate("scrollY") == 0 and page.locator("#asked").inner_text() == APPLES
    page.locator("#last").click()
    badge = page.locator("#panes .outcome").first.inner_text()
    assert ("✓ identical to AR" in badge) == (run.tokens == ar.tokens)
    for name, each in (("wedlm", run), ("ar", ar)):
        number = page.locator(f'[data-run="{name}"] dd').all_inner_texts()
        rates = (f"{len(each.tokens) / len(each.steps):.2f}", f"{len(each.tokens) / each.seconds:,.0f}")
        assert tuple(number[2:4]) == rates
    # Other settings: AR's run is kept, since its answer does not depend on them.
    page.locator("#settings-box summary").click()
    page.locator("#decoder").select_option("wedlm+exact")
    page.locator("#again").click()
    until(page, "stage.entries.length === 2")
    trace = trace_of(page)
    assert trace.recordings[0].runs[0].settings["verification"] == "exact"
    assert trace.recordings[0].runs[1] == ar and "AR’s run was kept" in page.locator("#status").inner_text()
    rows = page.locator("#runs tr")
    assert rows.count() == 2 and "✓ identical to AR" in rows.first.inner_text()
    rows.last.click()
    assert page.locator("#decoder").input_value() == "wedlm" and rows.last.get_attribute("aria-current") == "true"
    with page.expect_download() as download:
        page.locator("#save").click()
    download.value.save_as(tmp_path / "replay.html")
    kept = (tmp_path / "replay.html").read_text()
    data = json.loads(kept.split('<script id="trace" type="application/json">')[1].split("</script>")[0])
    assert data == json.loads(page.evaluate("() => stage.current.json")) and "<form" not in kept
    page.go_back()
    assert page.locator("#talk").is_visible() and page.locator("#decoder").input_value() == "wedlm"


def test_a_speed_that_cannot_be_is_a_range_and_another_answer_than_ars_is_marked(tab):
    page = tab()
    ask(page, COUNT)
    act(page, "Race")
    trace_of(page)
    page.evaluate("""() => {
        const trace = JSON.parse(stage.current.json), [run, ar] = trace.recordings[0].runs;
        Object.assign(run, {seconds: 1, turns: [1, 0.5]});
        Object.assign(ar, {seconds: 24, turns: [24, 4]});
        ar.tokens[2] = ar.tokens[0];
        stage.entries = [{...stage.current, json: JSON.stringify(trace)}];
        showEntry(stage.entries[0]);
        seek(duration());
    }""")
    outcome = page.locator("#panes .outcome")
    assert "4.0 to 48.0× as fast as AR: busy machine" in outcome.first.inner_text()
    assert "4.0 to 48.0×" in page.locator("#runs td").all_text_contents()
    assert "✗ differs from AR at token 3" in outcome.first.inner_text()
    assert page.locator("#panes [data-run=wedlm] .slot.differs").count() == 1
    outcome.locator(".bad", has_text="differs").hover()  # another says so where it is slower
    assert page.locator("#tip").inner_text().startswith("Token 3: ")


def test_when_the_server_dies_the_page_says_so_keeps_what_came_and_goes_on_when_it_is_back(tab, server, slow):
    wire = Wire(server.port)
    page = tab(wire.port)
    ask(page, APPLES, wait=False)
    page.locator("#turns .said").last.filter(has_text="5").wait_for()
    wire.cut()
    until(page, "!talk.controller")
    assert "The server broke off" in page.locator("#error").inner_text()
    (text,) = said(page)
    assert text and "broken off" in page.locator("#turns .pane .chips").inner_text()
    act(page, "Try again")
    until(page, "!talk.controller")
    assert "Is `wedlm serve` still running?" in page.locator("#error").inner_text()
    assert page.locator("#question").input_value() == APPLES and page.locator("#turns li").count() == 0
    wire.restore()
    page.locator("#send").click()
    until(page, "talk.turns.length === 2 && !talk.controller")
    assert page.locator("#error").is_hidden() and said(page)[0].startswith(text)


def test_two_tabs_have_conversations_of_their_own(tab, server, slow):
    first = tab()
    second = first.context.new_page()
    second.goto(first.url)
    ask(first, COUNT, wait=False)
    ask(second, APPLES, wait=False)
    for page in (first, second):
        until(page, "talk.turns.length === 2 && !talk.controller")
    assert [said(page) for page in (first, second)] == [
        [generated(server, prompt, strategy="wedlm")] for prompt in (COUNT, APPLES)
    ]
    first.reload()
    until(first, "ABOUT && talk.turns.length === 2")
    assert first.locator("#turns .you").all_text_contents() == [COUNT]
    assert len(first.locator("#history option").all_text_contents()) == 3


def test_the_key_is_asked_for_and_a_wrong_one_is_not_taken(tab, nano):
    with Server(*nano, {"strategy": "wedlm"}, api_key="open sesame") as locked:
        assert refusal(locked, {"messages": CHAT}, path="page/replay")[0] == 401
        page = tab(locked.port)
        page.locator("#key").fill("wrong")
        page.keyboard.press("Enter")
        page.locator("#key-story", has_text="missing or wrong").wait_for()
        page.locator("#key").fill("open sesame")
        page.keyboard.press("Enter")
        ask(page, COUNT)
        assert len(said(page)) == 1 and page.locator("#key-box").is_hidden()
        page.reload()  # it stays in the tab
        ask(page, COUNT)
        other = tab(locked.port)
        other.locator("#no-key").click()
        assert "The server asks for a key." in other.locator("#error").inner_text()
        for each in (page, other):
            each.close()


def test_what_cannot_be_answered_is_said_and_the_question_stays(tab):
    page = tab()
    until(page, "ABOUT")
    page.locator("#send").click()
    assert page.locator("#error").inner_text() == "Type a question first."
    page.locator("#settings-box summary").click()
    page.locator("#window_size").fill("1.5")
    ask(page, COUNT, wait=False)
    until(page, "document.getElementById('error').textContent.includes('`window_size` must be an integer')")
    assert page.locator("#question").input_value() == COUNT and page.locator("#turns li").count() == 0
    page.locator("#defaults").click()
    page.locator("#format").select_option("json_schema")
    page.locator("#schema").fill("{")
    page.locator("#send").click()
    until(page, "document.getElementById('error').textContent.includes('The schema is no JSON')")
    page.locator("#schema").fill(json.dumps(SCHEMA))
    page.locator("#decoder").select_option("wedlm+exact")
    page.locator("#max_tokens").fill("40")
    page.locator("#send").click()
    until(page, "talk.turns.length === 2 && !talk.controller")
    assert json.loads(said(page)[0])["a"] == 1
    act(page, "Replay")
    assert json.loads(trace_of(page).recordings[0].runs[0].text)["a"] == 1
    assert "The same text" in page.locator("#status").inner_text()


def test_thoughts_code_and_json_are_set_apart_from_the_rest_of_an_answer(tab):
    page = tab()
    until(page, "ABOUT")

    def shown(content, thoughts="", **options):
        turn = {"role": "assistant", "content": content, "thoughts": thoughts, "options": options, "ended": "done"}
        page.evaluate("turn => { talk.turns = [{role: 'user', content: '?'}, turn]; showTurns(); }", turn)
        folded = page.locator("#turns .thoughts:not([hidden]) > div").all_text_contents()
        return folded, said(page)[0], page.locator("#turns pre").all_text_contents()

    assert shown("7", "3 + 4 ...") == (["3 + 4 ..."], "7", [])
    assert shown("<think>\n3 + 4 ...\n</think>\n\n7") == (["3 + 4 ..."], "7", [])
    assert shown("<think>3 + 4") == (["3 + 4"], "", [])  # cut before it was over
    assert shown("Try\n```py\nprint(1)\n```\nso.") == ([], "Try\nprint(1)so.", ["print(1)"])
    assert shown("[1] says so") == ([], "[1] says so", [])
    assert shown('{"a":[1,{}],"b":"x{"}')[2] == ['{\n  "a": [\n    1,\n    {}\n  ],\n  "b": "x{"\n}']
    assert shown('{"a":[1', response_format={"type": "json_object"})[2] == ['{\n  "a": [\n    1']  # cut, too


def test_it_fits_a_phone_in_the_dark_says_where_it_scrolls_and_every_control_has_a_name(tab):
    page = tab(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    ask(page, COUNT)
    page.locator("#settings-box summary").click()
    narrow = "document.documentElement.scrollWidth <= 390"
    assert page.evaluate(narrow)
    act(page, "Race")
    trace_of(page)
    page.evaluate("pause(), seek(duration())")  # where the chips say most
    assert page.evaluate("""() => [...document.querySelectorAll(".two .chip")].every(
        chip => chip.getBoundingClientRect().right <= chip.closest(".pane").getBoundingClientRect().right)""")
    page.evaluate("seek(moments(runs()[0])[3])")
    assert page.evaluate(narrow)
    assert page.locator(".controls").bounding_box()["height"] < 844 / 6
    for box in ("#drawing", "#tried .scroll"):
        scrolls = page.locator(box).evaluate("box => [box.scrollWidth > box.clientWidth, box.parentNode.className]")
        assert scrolls == [True, "scrolls more-right"]
    page.locator("#drawing").evaluate("box => { box.scrollLeft = 9999; }")
    until(page, "document.getElementById('drawing').parentNode.className === 'scrolls more-left'")
    assert page.locator("#drawing .link").count()
    crossed = page.evaluate("""() => {
        const {left, right, top, bottom} = document.querySelector("#drawing [data-order]").getBoundingClientRect();
        return [...document.querySelectorAll("#drawing .link")].filter(link => {
            const box = link.getBoundingClientRect();
            return box.bottom > top && box.top < bottom && box.right > left && box.left < right;
        }).length;
    }""")
    assert crossed == 0
    named = "node => (node.ariaLabel || node.labels?.[0]?.textContent || node.textContent).trim()"
    nameless = page.locator("button, select, input, textarea").evaluate_all(
        f"nodes => nodes.filter(node => !({named})(node)).map(node => node.outerHTML)"
    )
    assert nameless == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background)[:3])) < 100


# --- what the page asks beside OpenAI's endpoints ------------------------------------------------------------------


def replayed(server, body, query=""):
    """The events of a replay."""
    with post(server, body, f"page/replay{query}") as response:
        lines = response.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_replay_decodes_what_a_request_asks_for_with_every_step_kept(server):
    body = {"messages": CHAT, "verification": "exact", "temperature": 0.8, "seed": 3, "stop": "30"}
    *parts, last = replayed(server, body, "?with_ar=true")
    run, ar = TypeAdapter(Trace).validate_python(last["trace"]).recordings[0].runs
    own = "".join(event["text"] for event in parts if event["decoder"] == "wedlm")
    assert own == run.text and run.steps and (run.settings["temperature"], ar.name) == (0.8, "ar")
    whole = server.chat(extra_body={"verification": "exact"}, temperature=0.8, seed=3, stop="30")
    assert run.text.partition("30")[0] == whole.choices[0].message.content
    time.sleep(0.5)  # a call ends a moment after its answer is read
    state = torch.get_rng_state()
    replayed(server, body)
    deadline = time.monotonic() + 10
    while not torch.equal(state, torch.get_rng_state()):  # a seed is its request's alone
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_short_answers_are_made_between_the_forwards_of_a_replay_which_shows_its_own_alone(server, monkeypatch):
    body, calls = {"messages": CHAT, "verification": "exact"}, server.app.state.desk.calls
    let_in, away, is_begun, is_read = calls._let_in, [], threading.Event(), threading.Event()

    def let_three_in():
        """Between the first forwards: it takes a second more."""
        start = time.perf_counter()
        if not is_begun.is_set():
            is_begun.set()
            while len(calls.waiting) < 3 and time.perf_counter() < start + 20:
                time.sleep(0.01)
            let_in()
            is_read.wait(20)
            time.sleep(1)
        away.append(time.perf_counter() - start)

    monkeypatch.setattr(page_module, "SMALL", 0)  # else the seconds are another run's
    found = [replayed(server, body, "?with_ar=true")[-1]]
    monkeypatch.setattr(calls, "_let_in", let_three_in)
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        replay = pool.submit(replayed, server, body, "?with_ar=true")
        assert is_begun.wait(20)
        texts = [pool.submit(server.text, max_tokens=3) for _ in range(3)]
        assert {text.result() for text in texts} == {"5, 1"}
        assert not replay.done()
        is_read.set()
        found.append(replay.result()[-1])
    seconds = time.perf_counter() - start
    alone, beside = (each["trace"]["recordings"][0]["runs"] for each in found)
    assert [run["tokens"] for run in alone] == [run["tokens"] for run in beside]
    assert [len(step["tokens"]) for step in alone[1]["steps"]] == [len(step["tokens"]) for step in beside[1]["steps"]]
    assert sum(run["seconds"] for run in beside) < seconds - sum(away)  # those of the others are none of its own


def test_a_replay_shows_so_many_tokens_at_most(server, monkeypatch):
    monkeypatch.setattr(page_module, "MOST_TOKENS", 8)
    for asked, shown in {4: 4, 9: 8, None: 8}.items():
        [run] = replayed(server, {"messages": CHAT, "max_tokens": asked})[-1]["trace"]["recordings"][0]["runs"]
        assert len(run["tokens"]) == shown


def test_text_of_a_replay_takes_work_that_grows_with_it_alone(tokenizer):
    """Else the thread of all calls would spend hours on a long one."""
    decoded = []

    class Counting:
        def decode(self, tokens, **how):
            decoded.append(len(tokens))
            return tokenizer.decode(tokens, **how)

    texts = []
    streamer = AnswerStreamer(Counting(), lambda text, _: texts.append(text))
    ids = tokenizer("Count: ä中😀 " * 200, return_tensors="pt").input_ids
    streamer.put(ids[:, :1])
    for token in ids[0]:
        streamer.put(token[None])
    streamer.end()
    assert "".join(texts) == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert sum(decoded) < 20 * ids.numel()


def test_what_a_replay_cannot_show_is_refused(server):
    assert refusal(server, {"messages": CHAT, "n": 2}, path="page/replay")[1]["message"] == (
        "A replay shows one answer, and the request asks for 2."
    )
    code, error = refusal(server, {"messages": CHAT, "window_size": 0}, path="page/replay")
    assert code == 400 and error["param"] == "window_size"


def test_a_replay_nobody_waits_for_ends(server, slow):
    forwards = []
    hook = server.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        response = post(server, {"messages": CHAT, "strategy": "ar", "min_new_tokens": 400}, "page/replay")
        response.readline()
        response.close()
        time.sleep(1)
        count = len(forwards)
        time.sleep(1)
        assert len(forwards) <= count + 2 < 100
    finally:
        hook.remove()


def test_the_page_offers_the_decoders_that_suit_the_model(server):
    def about(server):
        return json.load(urllib.request.urlopen(f"http://127.0.0.1:{server.port}/page/about"))

    model = tiny_model()
    add_mask_adapter(model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with Server(model, tokenizer, {"strategy": "wedlm", "verification": "exact"}) as adapted:
        found = about(adapted)
        assert ([*found["decoders"]], found["decoder"], found["is_chat"]) == (
            ["wedlm+exact", "ar"],
            "wedlm+exact",
            False,
        )
        *_, last = replayed(adapted, {"prompt": "1, 2", "max_tokens": 5})
        assert len(last["trace"]["recordings"][0]["runs"][0]["tokens"]) == 5
        with pytest.raises(urllib.error.HTTPError) as refused:  # what nothing checks would be no text
            post(adapted, {"prompt": "1, 2", "verification": "none"}, "v1/completions")
        assert json.load(refused.value)["error"]["param"] == "verification"
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(adapted, {"prompt": "1, 2", "strategy": "block"}, "v1/completions")
        assert json.load(refused.value)["error"]["param"] == "strategy"
        with pytest.raises(urllib.error.HTTPError, match="404"):  # FastAPI's page, which loads from elsewhere
            urllib.request.urlopen(f"http://127.0.0.1:{adapted.port}/docs")
    with pytest.raises(ValueError, match="'wedlm': a mask adapter gives drafts, which make no text unchecked"):
        Server(model, tokenizer, {"strategy": "wedlm", "verification": "none"}).__enter__()
    found = about(server)
    assert [*found["decoders"]] == ["ar", "block", "wedlm", "wedlm+exact"] and found["is_toy"]
    assert found["decoders"]["wedlm"]["settings"]["window_size"] == 6  # the checkpoint's own


def test_streams_tell_the_usage_in_every_chunk_where_they_are_asked_to(server):
    chunks = list(server.chat(stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) > 3 and counts == sorted(counts) and counts[-1] == server.chat().usage.completion_tokens


def test_when_the_server_ends_a_replay_does_too(nano, slow):
    with Server(*nano, {"strategy": "ar"}) as server:
        response = post(server, {"messages": CHAT, "min_new_tokens": 400}, "page/replay")
        response.readline()
        (watcher,) = server.app.state.desk.running
        watcher.is_cancelled.set()  # as the server's shutdown does
        assert "the server ends" in response.read().decode()


def test_the_command_opens_the_page_of_wedlm_nano(monkeypatch):
    opened, served = [], []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(server_module, "run", lambda app, listening, about: served.append(about))
    for words in ([], ["--open"]):
        result = CliRunner().invoke(cli.app, ["serve", "--port", "0", "--threads", "1", *words])
        assert result.exit_code == 0, result.stderr
    assert len(opened) == 1 and served[1] == f"wedlm-nano: {opened[0]}/v1, and a page at {opened[0]}"
