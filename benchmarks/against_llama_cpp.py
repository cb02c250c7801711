"""llama.cpp and this library on the same GGUF file: tokens a second, memory, and the texts side by side.

    python benchmarks/against_llama_cpp.py FILE.gguf ADAPTER QUESTIONS.jsonl --threads 2

Each engine is a process of its own, so that its memory can be told, and holds the model in one way: llama.cpp as it
reads the file; plain `generate` in float32 and in bfloat16; AR (`ar`) and verified decoding with the adapter
(`wedlm+exact`) as this library does without any setting. They answer each question one right after the other, in an
order that turns, greedily, all with the same tokens before the answer. Seconds include the prompt's.
A model without a chat template continues the questions.

Needs llama-cpp-python, which pip builds from source with a C++ compiler.
"""

import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import psutil
import typer

# What a process imports is a part of its memory: each imports what it needs where it needs it.

LLAMA_CPP = "llama.cpp"
PLAIN = {f"plain AR, {dtype}": dtype for dtype in ("float32", "bfloat16")}
FASTEST = ("ar", "wedlm+exact")  # in the format that this machine multiplies fastest

# This process' engine by its name: what answers a prompt's tokens, given the end tokens and the longest answer.
answers: dict[str, Callable[[list[int], list[int], int], dict[str, Any]]] = {}


def load(name: str, base: str, adapter: str, context: int, threads: int) -> dict[str, Any]:
    """Makes this process an engine for texts of so many tokens. Returns its format, how far that is from the
    unpacked model (nats per token), and the MiB that the process held before it read the model."""
    if name == LLAMA_CPP:
        from llama_cpp import Llama

        before = memory()
        model = Llama(base, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
        answers[name] = partial(answer_llama_cpp, model)
        return {"format": "as in the file", "distance": None, "libraries": before}
    import torch
    from transformers.utils.logging import disable_progress_bar

    from wedlm_hf.adapters.loading import load_adapted
    from wedlm_hf.checkpoints.loading import load_model
    from wedlm_hf.checkpoints.packed import format_of
    from wedlm_hf.eval.decoders import AR, DECODERS, EXACT

    torch.set_num_threads(threads)
    disable_progress_bar()
    before = memory()
    if name == EXACT:
        model = load_adapted(base, adapter, dtype="fastest")[0]
    else:
        model = load_model(base, dtype=PLAIN.get(name, "fastest"))
    answers[name] = partial(answer_generate, model, DECODERS.get(name, DECODERS[AR]))
    distance = getattr(model, "packed_distance", None)
    return {"format": format_of(model), "distance": distance, "libraries": before}


def answer_llama_cpp(model: Any, prompt: list[int], ends: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Greedily. Nothing is left of the last question, whose first tokens may be the same."""
    model.reset()
    began, tokens = perf_counter(), list[int]()
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        tokens.append(token)
        if token in ends or len(tokens) == max_new_tokens:
            break
    seconds = perf_counter() - began
    return {"tokens": tokens, "forwards": len(tokens), "token_instances": len(tokens) - 1, "seconds": seconds}


def answer_generate(model: Any, how: Any, prompt: list[int], ends: list[int], max_new_tokens: int) -> dict[str, Any]:
    """By `generate` with these keywords; a model of a GGUF file knows its end tokens."""
    from wedlm_hf.eval.measure import decode

    return vars(decode(model, None, [prompt], {**how, "do_sample": False, "max_new_tokens": max_new_tokens})[0])


def ask(name: str, prompt: list[int], ends: list[int], max_new_tokens: int) -> dict[str, Any]:
    """An engine's answer to one prompt, with the MiB that its process holds then."""
    found = answers[name](prompt, ends, max_new_tokens)
    return {**found, "new_tokens": len(found["tokens"]), "memory": memory()}


def memory() -> float:
    """MiB that this process holds, the pages of files that it reads in place included."""
    return float(psutil.Process().memory_info().rss / 2**20)


def main(
    base: str,
    adapter: str,
    prompts: Path,
    count: Annotated[int, typer.Option(help="Questions, spread over the file.")] = 6,
    max_new_tokens: int = 128,
    threads: Annotated[int, typer.Option(help="Default: as many as the machine has cores.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements instead.")] = False,
) -> None:
    """Print the texts and a table."""
    if find_spec("llama_cpp") is None:
        raise SystemExit("This needs llama-cpp-python, and a C++ compiler to build it: pip install llama-cpp-python")
    from wedlm_hf.checkpoints.gguf import end_token_ids
    from wedlm_hf.checkpoints.loading import load_tokenizer
    from wedlm_hf.eval.prompts import encode, read_prompts

    threads = threads or psutil.cpu_count(logical=False) or 1
    tokenizer = load_tokenizer(base)
    questions = read_prompts(prompts.name, prompts.read_text(encoding="utf-8"))
    questions = questions[:: max(1, len(questions) // count)][:count]
    if tokenizer.chat_template is None:  # a base model continues them
        encoded = [list(tokenizer(question.text)["input_ids"]) for question in questions]
    else:
        encoded = [encode(tokenizer, question.messages) for question in questions]
    ends = end_token_ids(tokenizer)
    context, spawn = max(map(len, encoded)) + max_new_tokens, multiprocessing.get_context("spawn")
    engines = {name: ProcessPoolExecutor(1, spawn) for name in (LLAMA_CPP, *PLAIN, *FASTEST)}
    try:
        loaded = {
            name: engine.submit(load, name, base, adapter, context, threads).result()
            for name, engine in engines.items()
        }
        for name, engine in engines.items():  # a warm-up
            engine.submit(ask, name, encoded[0], ends, 8).result()
        measured = []
        for number, prompt in enumerate(encoded):
            names = [*engines]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found = engines[name].submit(ask, name, prompt, ends, max_new_tokens).result()
                text = tokenizer.decode(found["tokens"], skip_special_tokens=True)
                measured.append({"decoder": name, "prompt": number, **loaded[name], **found, "text": text})
    finally:
        for engine in engines.values():
            engine.shutdown(cancel_futures=True)
    if as_json:
        print(json.dumps({"threads": threads, "questions": [each.text for each in questions], "answers": measured}))
    else:
        show(measured, [each.text for each in questions])
        print(f"{len(questions)} questions, at most {max_new_tokens} tokens, {threads} threads.")


def show(measured: list[dict[str, Any]], questions: list[str]) -> None:
    """Prints each question with its texts, equal ones once, and the table."""
    import pandas as pd

    from wedlm_hf.eval.table import SHORT, TITLES, as_markdown, cells, mark_same, summarise

    for number, question in enumerate(questions):
        print(f"## {question}\n")
        own = sorted((row["text"], row["decoder"]) for row in measured if row["prompt"] == number)
        for text, rows in groupby(own, key=lambda each: each[0]):
            print(f"[{', '.join(name for _, name in rows)}]\n{text.strip()}\n")
    table = mark_same(pd.DataFrame(measured))
    by_decoder = table.groupby("decoder", sort=False)
    lines = summarise(table, SHORT).loc[[LLAMA_CPP, *PLAIN, *FASTEST]]
    shown = cells(lines, SHORT).rename(columns=TITLES)
    against = lines["tokens_per_second"] / lines.loc[LLAMA_CPP, "tokens_per_second"]
    shown["against llama.cpp"] = against.map("{:.2f}×".format)
    shown.insert(0, "format", by_decoder["format"].first())
    distances = table.drop_duplicates("decoder").set_index("decoder")["distance"]
    shown["nats from unpacked"] = ["–" if pd.isna(each) else f"{each:.2g}" for each in distances[lines.index]]
    shown["MiB"] = by_decoder["memory"].max().map("{:.0f}".format)
    shown["of them libraries"] = by_decoder["libraries"].first().map("{:.0f}".format)
    print(as_markdown(shown.reset_index()))


if __name__ == "__main__":
    typer.run(main)
