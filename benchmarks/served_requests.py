"""Random requests from many clients to `wedlm serve` on wedlm-nano: are all answered, and as if each were alone?

    python benchmarks/served_requests.py --requests 1000 --clients 150

Clients send fields that are null, odd or huge, seeds beside none, bytes that are no character, and go away in the
middle. Every answer that a request determines is compared with that of `generate`, and asked for whole and streamed;
memory is looked at in between, that of the server, which is a process of its own, and that of the clients.

A client waits as long as the server answers others: how long its turn takes depends on the machine. That nobody is
answered for five minutes is a fault, which ends the run.
"""

import argparse
import atexit
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_model, load_tokenizer
from wedlm_hf.eval.prompts import encode
from wedlm_hf.generation.grammar import Grammar, JSONConstraint
from wedlm_hf.serving.schema import ChatRequest, CompletionRequest

DECODERS: list[dict[str, Any]] = [{"strategy": "ar"}, {"strategy": "wedlm", "verification": "exact"}, {}]
PATIENCE = 300  # seconds without an answer to anyone
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ODD: list[Any] = [None, 0, -1, "", False, True, [], {}, 1e300, 10**30, "x" * 5000, [None], {"a": [1]}, "\ud800", 0.5]


def question(chance: random.Random) -> str:
    """One of 60, so that answers of `generate` are soon known; some hold characters of several bytes."""
    number = chance.randrange(60)
    return [f"Count from 5 to {number} by 5.", f"Sort {number}, 7, 12", f"ä中😀 {number}"][number % 3]


def request(chance: random.Random) -> tuple[str, dict[str, Any], str]:
    """A path, a body, and what is to be expected: `same` as `generate`, `any` answer or refusal, or a client that
    `leaves`."""
    decoder, text = chance.choice(DECODERS), question(chance)
    kind = chance.choices(
        ["plain", "sampled", "field", "broken", "leaves", "bytes", "json"],
        [30, 8, 14, 4, 50, 7, 4],  # a third leaves: each that determines its answer is asked twice
    )[0]
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": chance.choice([4, 16, 40]), "stream": chance.random() < 0.5, **decoder}
    path = "v1/chat/completions"
    if kind == "plain" and chance.random() < 0.3:
        path, body = "v1/completions", {"prompt": [text], **{k: v for k, v in body.items() if k != "messages"}}
    if kind == "plain":
        return (
            path,
            body | ({"stop": chance.choice(["5", "\n", [", 1", "zz"]])} if chance.random() < 0.3 else {}),
            "same",
        )
    if kind == "sampled":
        return path, body | {"temperature": 2, "seed": chance.choice([None, 1, 2])}, "any"
    if kind == "json":
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        return path, body | DECODERS[1] | {"response_format": format}, "same"
    if kind == "bytes":
        body = body | {"temperature": 50, "top_k": 1000, "n": chance.choice([1, 3])}
        return (
            path,
            body | {"logprobs": bool(decoder), "verification": "exact"} if decoder.get("verification") else body,
            "any",
        )
    if kind == "field":
        field = chance.choice(
            [*ChatRequest.model_fields, *CompletionRequest.model_fields, "generation_config", "beam"]
        )
        return path, body | {field: chance.choice(ODD)}, "any"
    if kind == "broken":
        return (
            path,
            chance.choice([{}, {"messages": messages, "x" * 99: 1}, {"messages": [[]]}, {"prompt": "1, " * 10**6}]),
            "any",
        )
    return path, body | {"max_tokens": 400, "min_new_tokens": 400, "strategy": "ar", "verification": None}, "leaves"


def send(port: int, path: str, body: dict[str, Any], leaves: bool) -> tuple[int, str]:
    """The status and the text of the answer, or of the error."""
    data = json.dumps(body).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=0.3 if leaves else None) as response:
            text = response.read(200 if leaves else None).decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (TimeoutError, urllib.error.URLError):
        if leaves:
            return 0, ""
        raise
    if leaves or not text.startswith("data:"):
        choice = None if leaves else json.loads(text)["choices"][0]
        return 200, "" if choice is None else choice["text"] if "text" in choice else choice["message"]["content"]
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    if any("error" in chunk for chunk in chunks):
        return 599, text[-300:]
    parts = [chunk["choices"][0] for chunk in chunks]
    return 200, "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)


def expected(model: Any, tokenizer: Any, path: str, body: dict[str, Any]) -> str:
    """The text by `generate` itself, up to a stop string."""
    ids = encode(tokenizer, body["messages"]) if "messages" in body else tokenizer(body["prompt"][0]).input_ids
    options = {name: body[name] for name in ("strategy", "verification") if name in body} or {"strategy": "wedlm"}
    if "response_format" in body:
        options["logits_processor"] = [JSONConstraint(Grammar(tokenizer, SCHEMA))]
    output = model.generate(torch.tensor([ids]), max_new_tokens=body["max_tokens"], **options)
    text = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    stops = body.get("stop") or []
    places = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops)]
    return str(text[: min((place for place in places if place >= 0), default=len(text))])


def sent(pool: ThreadPoolExecutor, port: int, asked: list[tuple[str, dict[str, Any], str]]) -> list[tuple[int, str]]:
    """What came back to requests, all sent at once. Raises `TimeoutError` where nobody is answered any more."""
    answers = [pool.submit(send, port, path, body, kind == "leaves") for path, body, kind in asked]
    waiting = set(answers)
    while waiting:
        done, waiting = wait(waiting, PATIENCE, FIRST_COMPLETED)
        if not done:
            raise TimeoutError(f"{len(waiting)} requests are not answered, and nobody was for {PATIENCE} seconds")
    return [answer.result() for answer in answers]


def with_twins(asked: list[tuple[str, dict[str, Any], str]]) -> list[tuple[str, dict[str, Any], str]]:
    """The requests, each that determines its answer followed by its twin: streamed if it is whole, else whole."""
    found = []
    for path, body, kind in asked:
        found.append((path, body, kind))
        if kind == "same":
            found.append((path, body | {"stream": not body["stream"]}, kind))
    return found


def memory(process: int) -> float:
    """MiB that a process holds."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def start_server() -> tuple[subprocess.Popen[str], int]:
    """`wedlm serve`, and its port."""
    words = "serve --host 127.0.0.1 --port 0 --threads 1 --strategy wedlm --verification none".split()
    command = [sys.executable, "-c", "import wedlm_cli; wedlm_cli.main()", *words]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    assert server.stderr is not None
    port = next(int(found[1]) for line in server.stderr if (found := re.search(r"http://\S+:(\d+)/v1", line)))
    threading.Thread(target=lambda: [None for _ in server.stderr or ()], daemon=True).start()  # else its log is full
    return server, port


def main() -> None:
    """Sends them, and prints what came back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(NANO), load_tokenizer(NANO)
    server, port = start_server()
    chance = random.Random(options.seed)
    asked = with_twins([request(chance) for _ in range(options.requests)])[: options.requests]
    found: list[Any] = []
    for start in range(0, len(asked), 200):
        with ThreadPoolExecutor(options.clients) as pool:
            try:
                found += sent(pool, port, asked[start : start + 200])
            except TimeoutError:
                server.kill()  # else those who wait would keep this process
                raise
        held = f"the server {memory(server.pid):.0f} MiB, the clients {memory(os.getpid()):.0f}"
        print(f"{len(found)} requests, {held}", flush=True)
    known: dict[str, str] = {}
    wrong = []
    for (path, body, kind), (status, text) in zip(asked, found, strict=True):
        if kind == "same":
            key = json.dumps([path, {name: value for name, value in body.items() if name != "stream"}])
            if key not in known:
                known[key] = expected(model, tokenizer, path, body)
            if (status, text) != (200, known[key]):
                wrong.append((body, status, text, known[key]))
        elif status >= 500 and status != 0:
            wrong.append((body, status, text, ""))
    print(
        "answers by kind and status:",
        dict(Counter((kind, status) for (_, _, kind), (status, _) in zip(asked, found, strict=True))),
    )
    print(f"{len(known)} answers of `generate`, {len(wrong)} wrong or lost")
    for each in wrong[:5]:
        print(each)
    server.send_signal(signal.SIGINT)
    server.wait(timeout=60)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
