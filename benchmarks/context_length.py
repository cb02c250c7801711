"""Does a mask adapter draft as well behind a long chat as behind a short one?

    python benchmarks/context_length.py BASE examples/smollm2/prompts-heldout.jsonl --adapter examples/smollm2

Each question is asked behind a chat of the model's own answers to the other questions, of the first turns that fit a
length, and decoded with planned costs, which no clock changes: 3.5 % of a step for each row.
"""

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.eval.prompts import read_prompts


def answer(model: Any, tokenizer: Any, chat: list[dict[str, str]], max_new_tokens: int) -> tuple[str, Any, int]:
    """The text, the counts, and the prompt's tokens."""
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    options = {"strategy": "wedlm", "verification": "exact", "slot_cost": 0.035, "do_sample": False}
    output = model.generate(**inputs, **options, max_new_tokens=max_new_tokens, return_dict_in_generate=True)
    size = inputs["input_ids"].shape[1]
    return tokenizer.decode(output.sequences[0, size:], skip_special_tokens=True), output.stats, size


def main(
    base: str,
    prompts: Path,
    adapter: str | None = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the chat, separated by spaces.")] = "0 500 1000 2000",
    count: Annotated[int, typer.Option(help="Questions, spread over the file.")] = 16,
    max_new_tokens: int = 64,
    dtype: str = "float32",
) -> None:
    """Print a row for each length."""
    model, tokenizer = load_adapted(base, adapter, dtype=getattr(torch, dtype))
    questions = read_prompts(prompts.name, prompts.read_text(encoding="utf-8"))
    asked = questions[:: max(1, len(questions) // count)][:count]
    limits = [int(length) for length in lengths.split()]
    turns: list[tuple[list[dict[str, str]], int]] = []
    for question in questions:
        if question in asked or sum(size for _, size in turns) > max(limits):
            continue
        text, _, _ = answer(model, tokenizer, question.messages, 192)
        turn = [*question.messages, {"role": "assistant", "content": text}]
        turns.append((turn, len(tokenizer.apply_chat_template(turn, return_dict=True)["input_ids"])))
    rows = []
    for limit in limits:
        chat: list[dict[str, str]] = []
        size = 0
        for turn, tokens in turns:
            if size + tokens <= limit:
                chat, size = chat + turn, size + tokens
        found = [answer(model, tokenizer, chat + question.messages, max_new_tokens)[1:] for question in asked]
        tokens = sum(int(stats.new_tokens.sum()) for stats, _ in found)
        forwards = sum(int(stats.forwards.sum()) for stats, _ in found)
        length = sum(size for _, size in found) / len(found)
        rows.append({"tokens of the prompt": round(length), "tokens per forward": tokens / forwards})
        print(rows[-1], flush=True)
    print(f"{len(asked)} questions, at most {max_new_tokens} tokens\n")
    print(pd.DataFrame(rows).round(2).to_markdown(index=False))


if __name__ == "__main__":
    typer.run(main)
