"""Verified decoding without any setting, beside AR and beside every fixed window: how far from the best choice is it?

    python benchmarks/fixed_windows.py examples/wedlm-nano examples/wedlm-nano/tasks.jsonl --windows "2 4 8 16"
    python benchmarks/fixed_windows.py BASE examples/smollm2/prompts-heldout.jsonl --dtype bfloat16
        --batch-sizes "1 4 16" --adapter examples/smollm2

All decode the same greedy answers in turn, on one clock. With a mask adapter a window is the most drafts of a step.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.eval.decoders import AR, DECODERS, EXACT
from wedlm_hf.eval.measure import default_threads, environment, measure
from wedlm_hf.eval.prompts import encode_prompt, read_prompts


def compare(
    model: Any, tokenizer: Any, prompts: Any, windows: list[int], batch_size: int, max_new_tokens: int
) -> pd.DataFrame:
    """A row per decoder: tokens per forward, tokens/s, and speed against AR."""
    shared = {"max_new_tokens": max_new_tokens, "do_sample": False, "repetition_penalty": 1.0}
    fixed = {f"window {size}": {"window_size": size, "adaptive_window": False} for size in windows}
    decoders = {AR: DECODERS[AR], EXACT: DECODERS[EXACT]} | {
        name: DECODERS[EXACT] | window for name, window in fixed.items()
    }
    decoders = {name: options | shared for name, options in decoders.items()}
    rows = measure(model, tokenizer, prompts, decoders, batch_size=batch_size, title=f"batch {batch_size}")
    sums = pd.DataFrame(rows).groupby("decoder", sort=False)[["new_tokens", "forwards", "seconds"]].sum()
    table = pd.DataFrame({"tokens per forward": sums["new_tokens"] / sums["forwards"]})
    table["tokens/s"] = sums["new_tokens"] / sums["seconds"]
    table["speed against AR"] = table["tokens/s"] / table.loc[AR, "tokens/s"]
    return table


def main(
    base: str,
    prompts: Path,
    adapter: str | None = None,
    windows: Annotated[str, typer.Option(help="Fixed windows, separated by spaces.")] = "1 2 3 4",
    batch_sizes: Annotated[str, typer.Option(help="Separated by spaces.")] = "1",
    dtype: str = "float32",
    count: Annotated[int, typer.Option(help="Prompts, spread over the file.")] = 16,
    max_new_tokens: int = 64,
    threads: int | None = None,
) -> None:
    """Print a table for each batch size, and how the default compares with the best fixed window."""
    model, tokenizer = load_adapted(base, adapter, dtype=getattr(torch, dtype))
    torch.set_num_threads(threads or default_threads(model.eval()))
    questions = read_prompts(prompts.name, prompts.read_text(encoding="utf-8"))
    questions = questions[:: max(1, len(questions) // count)][:count]
    mixed = [replace(question, task="all") for question in questions]  # or batches would be of one task each
    encoded = [encode_prompt(model, tokenizer, question) for question in mixed]
    where = environment(model)
    print(f"{len(encoded)} prompts, at most {max_new_tokens} tokens, {where['dtype']}, {where['threads']} threads")
    for size in map(int, batch_sizes.split()):
        table = compare(model, tokenizer, encoded, [int(one) for one in windows.split()], size, max_new_tokens)
        best = table["tokens/s"].drop([AR, EXACT]).max()
        print(f"\nbatch size {size}: without settings {table.loc[EXACT, 'tokens/s'] / best:.2f} of the best window\n")
        print(table.round(2).to_markdown())


if __name__ == "__main__":
    typer.run(main)
