"""`wedlm serve` in a thread of this process, and clients for it."""

import json
import socket
import threading
import urllib.error
import urllib.request

import openai
import pytest
import uvicorn

from wedlm_hf.serving.server import build_app

NAME = "nano"
CHAT = [{"role": "user", "content": "Count from 5 to 50 by 5."}]
ANSWER = "5, 10, 15, 20, 25, 30, 35, 40, 45, 50"
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
ENDLESS = {"strategy": "ar", "min_new_tokens": 400}  # a second or more


class Server:
    """The server in a thread of this process, a client, and what the server logs."""

    def __init__(self, model, tokenizer, settings, **options):
        self.model, self.tokenizer = model, tokenizer
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.app = build_app(NAME, model, tokenizer, settings, **options)
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.app, log_level="warning"))
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [listening]})
        self.thread.start()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0)

    def chat(self, messages=CHAT, **options):
        return self.client.chat.completions.create(**{"model": NAME, "messages": messages, **options})

    def complete(self, prompt, **options):
        return self.client.completions.create(**{"model": NAME, "prompt": prompt, **options})

    def text(self, **options):
        return self.chat(**options).choices[0].message.content

    def streamed(self, **options):
        """The text that arrives piece by piece, and the last chunk."""
        chunks = list(self.chat(stream=True, **options))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1]

    def stop(self):
        self.client.close()
        self.uvicorn.should_exit = True
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def post(server, body, path="v1/chat/completions", **headers):
    """The response to a body, bytes or what JSON has; raises `urllib.error.HTTPError` for a refusal."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/{path}", data, headers)
    return urllib.request.urlopen(request, timeout=60)


def refusal(server, *args, **kwargs):
    """The status and the error object of a refused request."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, *args, **kwargs)
    return refused.value.code, json.load(refused.value)["error"]
