"""Where the time of a step of verified decoding with a mask adapter goes.

    python benchmarks/step_time.py BASE ADAPTER PROMPTS.jsonl     # BASE: a WeDLM checkpoint

A few prompts are answered with a fixed number of drafts, under Python's profiler, on one thread: the seconds are those
of the thread's own work, so that other processes disturb little. The profiler itself makes Python's part look larger.
"""

import cProfile
import pstats
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.eval.prompts import encode_prompt, read_prompts

# Of the profile's functions: a part of their file's name, their own names, and whether they are parts of the forward.
PARTS = {
    "matrices of the base and its head": ("", "<built-in method torch._C._nn.linear>"),
    "attention kernel": ("", "<built-in method torch._C._nn.scaled_dot_product_attention>"),
    "norms": ("modeling_qwen3", "forward"),
    "updates of the mask adapter": ("mask_adapter", "__call__"),
    "choosing the next drafts": ("drafter", "draft guess"),
    "planning": ("planner", "plan"),
}
OF_FORWARD = 4  # of these, the first ones


def seconds_in(stats: pstats.Stats, file: str, name: str, line: int | None = None) -> float:
    """Seconds in a function, or in several, and in what they call."""
    found = stats.stats.items()  # type: ignore[attr-defined]
    return sum(
        row[3]
        for (path, at, function), row in found
        if file in path and (function == name or function in name.split()) and line in (None, at)
    )


def main(
    base: str,
    adapter: str,
    prompts: Path,
    dtype: str = "bfloat16",
    drafts: Annotated[int, typer.Option(help="Checked in every step, at most.")] = 4,
    count: Annotated[int, typer.Option(help="Prompts.")] = 4,
    max_new_tokens: int = 64,
) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    model, tokenizer = load_adapted(base, adapter, dtype=getattr(torch, dtype))
    model.eval()
    questions = read_prompts(prompts.name, prompts.read_text(encoding="utf-8"))
    questions = questions[:: max(1, len(questions) // count)][:count]
    settings = {"strategy": "wedlm", "verification": "exact", "adaptive_window": False, "window_size": drafts}
    settings |= {"max_new_tokens": max_new_tokens, "do_sample": False, "repetition_penalty": 1.0}
    profile = cProfile.Profile(time.thread_time)
    for number, question in enumerate([questions[0], *questions]):
        ids = torch.tensor([encode_prompt(model, tokenizer, question).tokens])
        if number:  # the first is a warm-up
            profile.enable()
        model.generate(ids, **settings)
        profile.disable()
    stats = pstats.Stats(profile)
    norm_line = type(model.model.norm).forward.__code__.co_firstlineno
    seconds = {
        name: seconds_in(stats, file, function, norm_line if name == "norms" else None)
        for name, (file, function) in PARTS.items()
    }
    whole, forward = seconds_in(stats, "decoding", "_step"), seconds_in(stats, "decoding", "_forward")
    steps = sum(row[0] for key, row in stats.stats.items() if key[2] == "_step" and "decoding" in key[0])  # type: ignore[attr-defined]
    names = list(seconds)
    inner = sum(seconds[name] for name in names[:OF_FORWARD])
    rows = {name: seconds[name] for name in names[:OF_FORWARD]} | {"rest of the forward": forward - inner}
    rows |= {name: seconds[name] for name in names[OF_FORWARD:]}
    rows["rest of the step"] = whole - sum(rows.values())
    print(f"{steps} steps, {1e3 * whole / steps:.1f} ms each\n\n| part | ms a step | share |\n|---|---:|---:|")
    for name, value in rows.items():
        print(f"| {name} | {1e3 * value / steps:.1f} | {value / whole:.0%} |")


if __name__ == "__main__":
    typer.run(main)
