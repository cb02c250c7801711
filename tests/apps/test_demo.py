"""The server of `wedlm demo`: what it answers is what was decoded, and what is wrong is said."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from pydantic import TypeAdapter
from starlette.testclient import TestClient
from tiny import MASK, write_checkpoint
from typer.testing import CliRunner

from wedlm_hf import add_mask_adapter, cli, save_mask_adapter
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.apps import demo as server
from wedlm_hf.apps.demo import IN_MEMORY, Demo, Form, ModelChoice, Models, application
from wedlm_hf.checkpoints.loading import load_model
from wedlm_hf.cli.options import LoadingOptions
from wedlm_hf.eval.trace.page import Trace

PROMPT = "1, 2, 3"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), suppress_tokens=[MASK]))


@pytest.fixture(scope="module")
def demo(checkpoint):
    return Demo(Models(LoadingOptions().load), ModelChoice(checkpoint))


@pytest.fixture(scope="module")
def client(demo):
    with TestClient(application(demo, ["testserver"])) as client:
        yield client


@pytest.fixture
def run(client, checkpoint):
    """Sends a form and returns the status and the events."""

    def run(**fields):
        fields = {"prompt": PROMPT, "model": checkpoint, "max_new_tokens": 8, **fields}
        response = client.post("/runs", json={name: value for name, value in fields.items() if value is not None})
        return response.status_code, [json.loads(line) for line in response.text.splitlines()]

    return run


def trace_of(events):
    return TypeAdapter(Trace).validate_json(json.dumps(events[-1]["trace"]))


def test_a_run_holds_what_both_decoders_answer_and_tells_how_it_goes(run, demo, checkpoint):
    status, events = run(window_size=4, entropy_threshold=1.5, max_new_tokens=12)
    assert status == 200
    (recording,) = trace_of(events).recordings
    loaded = demo.models.load(ModelChoice(checkpoint))
    prompt = torch.tensor([recording.prompt_tokens])
    asked = ({"strategy": "wedlm", "window_size": 4, "entropy_threshold": 1.5}, {"strategy": "ar"})
    for answer, options in zip(recording.runs, asked, strict=True):
        tokens = loaded.model.generate(prompt, max_new_tokens=12, do_sample=False, **options)[0, prompt.shape[1] :]
        assert answer.tokens == tokens.tolist()
        told = [event["text"] for event in events if event.get("decoder") == options["strategy"]]
        assert "".join(told) == answer.text
    assert [event["at"] for event in events[:2]] == ["waiting", "loading"]


def test_ar_is_decoded_anew_only_where_its_answer_or_its_times_may_differ(run, monkeypatch):
    monkeypatch.setattr(server, "is_impossible", lambda trace: False)  # whatever the machine does meanwhile
    _, events = run()
    first, ar = events[-1], trace_of(events).recordings[0].runs[1]
    _, events = run(keep=first["run"], window_size=2, verification="exact")
    kept = trace_of(events)
    assert (kept.recordings[0].runs[1], kept.recordings[0].runs[0].settings["window_size"]) == (ar, 2)
    assert not any(event.get("decoder") == "ar" for event in events)
    assert events[-1]["kept_ar"] and not first["kept_ar"]
    with monkeypatch.context() as patch:
        patch.setattr(server, "is_impossible", lambda trace: True)
        _, events = run(keep=first["run"], window_size=2)
    assert not events[-1]["kept_ar"] and {"at": "timing"} in events
    assert len(trace_of(events).recordings[0].runs[1].turns) == len(trace_of(events).recordings[0].runs[0].turns)
    for change in ({"prompt": "Sort 31, 7"}, {"max_new_tokens": 5}, {"temperature": 1.0}, {"seed": 4}, {"keep": "?"}):
        _, events = run(**{"keep": first["run"], **change})
        assert any(event.get("decoder") == "ar" for event in events), change


def test_a_mask_adapter_is_verified_unless_the_tab_asks_for_something_else(run, checkpoint, tmp_path):
    base = load_model(checkpoint)
    add_mask_adapter(base, MaskAdapterSettings(rank=2))
    save_mask_adapter(base, tmp_path / "adapter")

    def verification(**fields):
        return trace_of(run(**fields)[1]).recordings[0].runs[0].settings["verification"]

    assert verification() == "none"
    assert verification(adapter=str(tmp_path / "adapter")) == "exact"
    assert verification(adapter=str(tmp_path / "adapter"), verification="none") == "none"


@pytest.mark.parametrize(("fields", "message"), [
    ({"prompt": " \n"}, "The prompt is empty: type a question or the beginning of a text."),
    ({"model": ""}, "No model is named: give the folder of a checkpoint, or its Hub id."),
    ({"window_size": 0}, "`window_size` must be an integer of at least 1, got 0."),
    ({"verification": "maybe"}, "verification: input should be 'none' or 'exact', got 'maybe'."),
    ({"temperature": 9}, "temperature: input should be less than or equal to 5, got 9"),
    ({"prompt": None}, "The request is malformed: prompt: field required."),
    ({"colour": "red"}, "The request is malformed: colour: extra inputs are not permitted, got 'red'."),
])  # fmt: skip
def test_a_wrong_request_is_refused_before_anything_is_loaded(run, monkeypatch, fields, message):
    monkeypatch.setattr(Models, "load", None)
    status, (answer,) = run(**fields)
    assert status == 422 and message in answer["error"]


def test_what_fails_later_is_said_and_the_server_goes_on(run, checkpoint, tmp_path, monkeypatch):
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"no weights")
    for fields, message in (
        ({"model": str(tmp_path / "missing")}, "There is no checkpoint folder"),
        ({"model": str(tmp_path)}, "it has no config.json"),
        ({"model": str(damaged)}, "damaged"),
        ({"adapter": str(tmp_path)}, str(tmp_path)),
        ({"prompt": "1" * 20_000}, "token"),
    ):
        status, events = run(**fields)
        assert status == 200 and message in events[-1]["error"] and "\n" not in events[-1]["error"], events[-1]
    with monkeypatch.context() as patch:
        patch.setattr(server, "record", Mock(side_effect=RuntimeError("out of memory")))
        assert run()[1][-1]["error"].startswith("RuntimeError: out of memory")
    assert "trace" in run()[1][-1]


def test_a_request_that_nobody_waits_for_stops(demo, checkpoint, run):
    tokens = []

    def tell(event):
        if event.get("tokens"):
            tokens.append(event)
            raise server.Stopped

    assert demo._answer(Form(prompt=PROMPT, model=checkpoint, max_new_tokens=500), tell) == ""
    assert len(tokens) == 1 and "trace" in run()[1][-1]


def test_requests_at_the_same_time_get_their_own_answers(run):
    prompts = ["1, 2, 3", "Sort 31, 7", '{"name"']
    with ThreadPoolExecutor(3) as pool:
        answers = [*pool.map(lambda prompt: run(prompt=prompt)[1], prompts)]
    for prompt, answer in zip(prompts, answers, strict=True):
        alone, together = (trace_of(events).recordings[0] for events in (run(prompt=prompt)[1], answer))
        assert (together.prompt, together.prompt_tokens) == (prompt, alone.prompt_tokens)
        assert [each.tokens for each in together.runs] == [each.tokens for each in alone.runs]


def test_pages_of_other_sites_cannot_use_it(client):
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    assert client.post("/runs", content="{}", headers={"content-type": "text/plain"}).status_code == 415
    large = client.post("/runs", content="1" * (1 << 20) + "1", headers={"content-type": "application/json"})
    assert large.status_code == 413
    assert client.get("/runs/other.html").status_code == 404


def test_only_the_last_models_stay_in_memory(checkpoint):
    models = Models(LoadingOptions().load)
    first = models.load(ModelChoice(checkpoint))
    assert models.load(ModelChoice(checkpoint)) is first
    for dtype in ("bfloat16", "float16"):
        assert str(models.load(ModelChoice(checkpoint, dtype=dtype)).model.dtype) == f"torch.{dtype}"
    assert len(models.loaded) == IN_MEMORY
    assert models.load(ModelChoice(checkpoint)) is not first


def test_the_command_says_where_the_page_is_and_what_is_wrong(monkeypatch):
    opened = []

    def make_server(read, model, adapter, is_local):
        assert (read.__self__.dtype, model, adapter) == ("float32", "my-wedlm", None)
        return SimpleNamespace(run=lambda sockets: opened.append((sockets[0].getsockname(), is_local)))

    monkeypatch.setattr(server, "make_server", make_server)
    monkeypatch.setattr("webbrowser.open", opened.append)
    words = ["demo", "--model", "my-wedlm", "--dtype", "float32", "--port", "0"]
    result = CliRunner().invoke(cli.app, words)
    address, ((host, port), is_local) = opened
    assert result.exit_code == 0 and is_local
    assert address == f"http://{host}:{port}" and address in result.stdout
    result = CliRunner().invoke(cli.app, [*words, "--host", "0.0.0.0", "--no-browser"])
    assert "can load any checkpoint" in result.stderr and opened[2][1] is False and len(opened) == 3
