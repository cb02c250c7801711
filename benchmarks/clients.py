"""First examples of clients against `wedlm serve`, each installed from its package into an environment of its own.

    python benchmarks/clients.py              # all; or names: openai litellm transformers

Prints a line for each, and ends with code 1 if one failed. The model is wedlm-nano, under Qwen3's chat template, which
knows tools and thoughts: what it answers matters less than that each client can send its request and read the answer.
Needs a network or a mirror of PyPI; about 300 MB for each client, in a folder that is kept: build/clients.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import trl

from wedlm_hf.checkpoints import NANO

FOLDER = Path(__file__).parents[1] / "build" / "clients"
QUESTION = "Count from 5 to 50 by 5."
PRELUDE = f"""
import json, os, sys
from pydantic import BaseModel, Field
address, question = os.environ["OPENAI_BASE_URL"], {QUESTION!r}
messages = [{{"role": "user", "content": question}}]
class Number(BaseModel, extra="forbid"):
    value: int = Field(ge=0, le=99)  # else a small model may write digits until its context is full
class Add(BaseModel, extra="forbid"):
    "Adds numbers."
    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)
"""
OPENAI = """
from openai import OpenAI, pydantic_function_tool
client = OpenAI(max_retries=0)
whole = client.chat.completions.create(model="nano", messages=messages).choices[0].message.content
told = {"stream": True, "stream_options": {"include_usage": True}}
parts = client.chat.completions.create(model="nano", messages=messages, **told)
assert whole == "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert isinstance(client.completions.create(model="nano", prompt="def add(a, b):").choices[0].text, str)
assert client.chat.completions.parse(model="nano", messages=messages, response_format=Number).choices[0].message.parsed
tools = [pydantic_function_tool(Add, name="add")]
for choice in ("required", {"type": "function", "function": {"name": "add"}}):
    asked = {"model": "nano", "messages": messages, "tools": tools, "tool_choice": choice}
    answer = client.chat.completions.parse(**asked).choices[0].message
    assert isinstance(answer.tool_calls[0].function.parsed_arguments, Add)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "7"}
    client.chat.completions.create(model="nano", messages=[*messages, answer, result], tools=tools)
response = client.responses.create(model="nano", input=question)
assert response.output_text == whole
with client.responses.stream(model="nano", input=question, instructions="Be brief.", tools=[]) as stream:
    events = [event.type for event in stream]
assert events[-1] == "response.completed", events
assert client.responses.parse(model="nano", input=question, text_format=Number).output_parsed
print(client.models.list().data[0].context_length, response.usage)
"""
LITELLM = """
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # else it asks the network for prices
import litellm
asked = {"model": "openai/nano", "api_base": address, "messages": messages}
whole = litellm.completion(**asked).choices[0].message.content
assert whole == "".join(part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True))
assert litellm.responses(model="openai/nano", api_base=address, input=question).output
print(whole)
"""
LANGCHAIN = """
from langchain_openai import ChatOpenAI
for responses in (False, True):
    model = ChatOpenAI(model="nano", use_responses_api=responses)
    assert model.invoke([("system", "Be brief."), ("human", question)]).text
    assert "".join(part.text for part in model.stream(question))
    assert isinstance(model.with_structured_output(Number).invoke(question), Number)
    assert model.bind_tools([Add], tool_choice="Add").invoke(question).tool_calls
print(model.with_structured_output(Number, method="function_calling").invoke(question))
"""
INSTRUCTOR = """
import instructor
from openai import OpenAI
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    found = client.chat.completions.create(model="nano", response_model=Add, messages=messages)
    assert isinstance(found, Add), found
print(found)
"""
AGENTS = """
import asyncio
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled
set_tracing_disabled(True)
@function_tool
def add(a: int, b: int) -> int:
    "Adds numbers."
    return a + b
async def main():
    for api in ("responses", "chat_completions"):
        set_default_openai_api(api)
        agent = Agent(name="Counter", instructions="Be brief.", model="nano", tools=[add])
        assert isinstance((await Runner.run(agent, question)).final_output, str)
        run = Runner.run_streamed(agent, question)
        assert [event.type async for event in run.stream_events()] and isinstance(run.final_output, str)
        must = agent.clone(model_settings=ModelSettings(tool_choice="required"))
        assert any(item.type == "tool_call_output_item" for item in (await Runner.run(must, question)).new_items)
        typed = Agent(name="Typed", instructions="Be brief.", model="nano", output_type=Number)
        print((await Runner.run(typed, question)).final_output)
asyncio.run(main())
"""
TRANSFORMERS = """
import subprocess
program = os.path.join(os.path.dirname(sys.executable), "transformers")
command = [program, "chat", "nano", address.removesuffix("/v1"), "do_sample=False", "max_new_tokens=60"]
said = subprocess.run(command, input=question + "\\n!exit\\n", text=True, capture_output=True)
assert "35, 40, 45, 50" in said.stdout, said.stdout + said.stderr
print(said.stdout.splitlines()[-3:])
"""
CLIENTS = {
    "openai": (["openai", "pydantic"], OPENAI),
    "litellm": (["litellm"], LITELLM),
    "langchain-openai": (["langchain-openai"], LANGCHAIN),
    "instructor": (["instructor"], INSTRUCTOR),
    "openai-agents": (["openai-agents"], AGENTS),
    "transformers": (["transformers", "typer", "rich", "httpx", "pydantic", "pyyaml"], TRANSFORMERS),
}


def interpreter(name: str, packages: list[str]) -> Path:
    """The Python of an environment that has the packages."""
    home = FOLDER / name
    python = home / "bin" / "python"
    if not python.exists():
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "venv", "-q", home], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", python, *packages], check=True)
    return python


def main(names: list[str]) -> int:
    """Runs the examples of some clients, or of all. Returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(NANO, model)
        template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
        shutil.copy(template, model / "chat_template.jinja")
        port = os.environ.get("PORT", "8765")
        command = ["serve", str(model), "--verification", "exact", "--port", port, "--served-model-name", "nano"]
        with open(Path(folder) / "log", "w") as log:
            server = subprocess.Popen([Path(sys.executable).with_name("wedlm"), *command], stderr=log, stdout=log)
        try:
            address = f"http://localhost:{port}"
            while server.poll() is None:
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(0.5)
            env = os.environ | {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none"}
            for name in names or CLIENTS:
                packages, example = CLIENTS[name]
                python = interpreter(name, packages)
                run = subprocess.run([python, "-c", PRELUDE + example], env=env, capture_output=True, text=True)
                failed += run.returncode != 0
                output = run.stdout if run.returncode == 0 else run.stdout + run.stderr
                print(f"{name}: {'failed' if run.returncode else 'works'}\n{output.strip()}", flush=True)
            if failed:
                print((Path(folder) / "log").read_text())
        finally:
            server.terminate()
            server.wait()
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
