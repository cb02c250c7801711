"""Offered load against latency and throughput: vLLM's AR decoding and verified decoding, each on a server of its own.

    .venv-vllm/bin/python benchmarks/serving.py --model examples/wedlm-nano --file examples/wedlm-nano/tasks.jsonl

One server process at a time serves on the loopback interface; the two take turns. A client in this process keeps a
number of requests under way (closed loop): the offered load. Writes a table (CSV, Markdown) and a picture:

- time to first token, medians and 95th percentiles, in ms;
- time per token after the first, of each request, the same;
- throughput: tokens of all requests per second of the run;
- the server's own count of tokens a step (mean acceptance length);
- whether the greedy answers are those of AR decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from vllm_engines import ENVIRONMENT, as_flags, engine_options, load_averages, parser, read_chats

COLUMNS = (
    "decoder", "requests under way", "requests", "tokens/s", "first token ms", "first token p95 ms",
    "ms per token", "ms per token p95", "tokens per step", "equal answers",
)  # fmt: skip


@dataclass
class Answer:
    """What a request gave.

    Attributes:
        text: of the answer.
        tokens: how many.
        first: seconds until the first arrived.
        seconds: until the last arrived.
    """

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    seconds: float = 0.0


@dataclass
class Server:
    """A server that runs.

    Attributes:
        url: of its API.
        model: the name it serves.
        texts: of greedy answers, by prompt.
    """

    url: str
    model: str
    texts: dict[str, str] = field(default_factory=dict)

    def accepted(self) -> tuple[float, float]:
        """Steps with drafts or masks, and accepted drafts, since the start."""
        with urllib.request.urlopen(self.url.replace("/v1", "/metrics")) as page:
            lines = page.read().decode().splitlines()
        found = {"num_drafts_total": 0.0, "num_accepted_tokens_total": 0.0}
        for line in lines:
            for name in found:
                if line.startswith(f"vllm:spec_decode_{name}"):
                    found[name] += float(line.rsplit(" ", 1)[1])
        return found["num_drafts_total"], found["num_accepted_tokens_total"]


@contextmanager
def serve(options: argparse.Namespace, is_verified: bool) -> Iterator[Server]:
    """Starts a server and stops it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += as_flags(engine_options(options, is_verified))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT | dict(os.environ))
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process, options.patience, log)
            yield Server(url + "/v1", options.model)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(url: str, process: subprocess.Popen[bytes], patience: float, log: Any) -> None:
    """Returns once the server answers. Raises `SystemExit` with the end of its log if it does not."""
    end = time.monotonic() + patience
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url + "/health").close()
            return
        except OSError:
            time.sleep(1)
    log.seek(0)
    raise SystemExit("The server did not start:\n" + "".join(log.readlines()[-15:]))


async def ask(client: openai.AsyncOpenAI, server: Server, chat: Any, options: argparse.Namespace) -> Answer:
    """One streamed request."""
    answer, began = Answer(), time.perf_counter()
    stream = await client.chat.completions.create(
        model=server.model,
        messages=chat,
        max_tokens=options.max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            answer.first = answer.first or time.perf_counter() - began
            answer.text += chunk.choices[0].delta.content
        if chunk.usage:
            answer.tokens = chunk.usage.completion_tokens
    answer.seconds = time.perf_counter() - began
    return answer


async def load(server: Server, chats: list[Any], under_way: int, options: argparse.Namespace) -> list[Answer]:
    """Answers of all chats, with so many requests under way at a time."""
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", timeout=600, max_retries=0)
    room = asyncio.Semaphore(under_way)

    async def one(chat: Any) -> Answer:
        async with room:
            return await ask(client, server, chat, options)

    try:
        return await asyncio.gather(*map(one, chats))
    finally:
        await client.close()


def measure(server: Server, decoder: str, chats: list[Any], under_way: int, options: argparse.Namespace) -> dict:
    """A row of the table."""
    before, began = server.accepted(), time.perf_counter()
    answers = asyncio.run(load(server, chats, under_way, options))
    seconds = time.perf_counter() - began
    steps, accepted = (after - start for after, start in zip(server.accepted(), before, strict=True))
    server.texts |= {json.dumps(chat): answer.text for chat, answer in zip(chats, answers, strict=True)}
    per_token = [1e3 * (each.seconds - each.first) / (each.tokens - 1) for each in answers if each.tokens > 1]
    first = [1e3 * each.first for each in answers if each.first]
    values = (
        decoder, under_way, len(chats), sum(each.tokens for each in answers) / seconds, statistics.median(first),
        percentile(first), statistics.median(per_token), percentile(per_token), 1 + accepted / steps if steps else 1.0,
        "",
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def percentile(values: list[float], share: float = 0.95) -> float:
    """The value that so large a share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def write(rows: list[dict], folder: Path, title: str) -> None:
    """The table and the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [[f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *texts)]
    (folder / "serving.md").write_text(f"{title}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    (folder / "serving.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, name in zip(axes, ("tokens/s", "first token ms", "ms per token"), strict=True):
        for decoder in dict.fromkeys(row["decoder"] for row in rows):
            points = [(row["requests under way"], row[name]) for row in rows if row["decoder"] == decoder]
            axis.plot(*zip(*points, strict=True), marker="o", label=decoder)
        axis.set(xscale="log", xlabel="requests under way", ylabel=name, ylim=(0, None))
        axis.set_xticks(sorted({row["requests under way"] for row in rows}), minor=False)
        axis.get_xaxis().set_major_formatter("{x:.0f}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(folder / "serving.png", dpi=110)


def main() -> None:
    """Measures and writes."""
    arguments = parser(__doc__, "--loads", [1, 4, 16, 64], 64)
    arguments.add_argument("--repeats", type=int, default=1, help="turns of the two servers")
    arguments.add_argument("--patience", type=float, default=300, help="seconds that a server may take to start")
    arguments.add_argument("--output", type=Path, default=Path("build/serving"))
    options = arguments.parse_args()
    rows: list[dict] = []
    with serve(options, False) as ar, serve(options, True) as verified:
        servers = {"AR": ar, "verified": verified}
        for server in servers.values():
            measure(server, "", read_chats(options.file, 4), 2, options)  # warm-up
        for under_way in options.under_way:
            chats = read_chats(options.file, max(under_way, min(options.requests, 16 * under_way)))
            for _ in range(options.repeats):
                rows += [measure(server, name, chats, under_way, options) for name, server in servers.items()]
                pairs = [(ar.texts[text], verified.texts[text]) for text in map(json.dumps, chats)]
                rows[-1]["equal answers"] = f"{sum(one == other for one, other in pairs)}/{len(pairs)}"
    title = f"{Path(options.model).name}, {options.dtype}, {os.cpu_count()} CPUs (load averages: {load_averages()})"
    write(rows, options.output, title)


if __name__ == "__main__":
    main()
