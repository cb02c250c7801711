"""`vllm serve` with verified decoding under many clients, some of which go away."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest


@pytest.fixture(scope="module")
def server(nano, tmp_path_factory):
    """The address of a server of wedlm-nano."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(nano)]
    command += ["--served-model-name", "nano"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
    command += ["--enforce-eager", "--max-num-seqs", "64", "--speculative-config"]
    command += [json.dumps({"model": "wedlm_hf.serving.vllm.Proposer", "num_speculative_tokens": 16})]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url + "/health").close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_500_requests_are_answered_and_wrong_ones_refused(server, prompts):
    async def run():
        client = openai.AsyncOpenAI(base_url=server + "/v1", api_key="none", max_retries=0, timeout=600)

        async def one(number):
            options = {"model": "nano", "max_tokens": 8 + number % 40, "temperature": float(number % 2)}
            if number % 5 == 4:
                options["extra_body"] = {"vllm_xargs": {"wedlm_strategy": "ar"}}
            if number % 50 == 49:
                options["extra_body"] = {"vllm_xargs": {"wedlm_strategy": "none"}}
            chat = [{"role": "user", "content": f"Count from {number} to {number + 40} by 4."}]
            if number % 2:
                answer = await client.chat.completions.create(messages=chat, **options)
                return answer.usage.completion_tokens
            chunks = await client.chat.completions.create(messages=chat, stream=True, **options)
            return sum([bool(chunk.choices and chunk.choices[0].delta.content) async for chunk in chunks])

        try:
            return await asyncio.gather(*map(one, range(500)), return_exceptions=True)
        finally:
            await client.close()

    results = asyncio.run(run())
    refused = [results[number] for number in range(49, 500, 50)]
    assert all(isinstance(error, openai.BadRequestError) for error in refused)
    assert "`wedlm_strategy` must be one of" in str(refused[0])
    assert all(isinstance(count, int) and count > 0 for number, count in enumerate(results) if number % 50 != 49)
