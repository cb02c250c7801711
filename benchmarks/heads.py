"""Trains a head of a finished mask adapter from states that are computed once.

    python benchmarks/heads.py root BASE ADAPTER OUT ANSWERS.jsonl [ANSWERS.jsonl ...] --new --passes 15
    python benchmarks/heads.py second BASE ADAPTER OUT ANSWERS.jsonl [ANSWERS.jsonl ...] --passes 10

`root` trains the root head; `second` averages the previous-token head with a new one, which learns from masks' states.
Answers are as `wedlm adapt` writes them (work/answers.jsonl). What is printed was measured on answers that are held
out.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from wedlm_hf.adapters.answers import read_answers
from wedlm_hf.adapters.attach import add_root_head, count_ngrams, save_mask_adapter
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.heads import BATCH, CUT_STRIDE, MEASURED, ShowRows, add_second_head, train_root_head
from wedlm_hf.adapters.loading import load_adapted

Passes = Annotated[float, typer.Option(help="How often each row is trained.")]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)


@app.command()
def root(
    base: str,
    adapter: str,
    out: Path,
    answers: list[Path],
    passes: Passes = 12,
    width: Annotated[int, typer.Option(help="Hidden units, where the adapter has no root head yet.")] = 1024,
    count: Annotated[bool, typer.Option(help="Add the n-grams of the answers.")] = True,
    new: Annotated[bool, typer.Option("--new", help="Begin with a new root head.")] = False,
    seed: int = 0,
) -> None:
    """Train the root head."""
    model, found, tokens = _read(base, adapter, answers, seed)
    if count:
        count_ngrams(model, found)
    if new:
        model.mask_adapter.root_head = None
    add_root_head(model, width)
    model.mask_adapter.root_head.float().requires_grad_(True)
    show = _showing(tokens)
    print(train_root_head(MaskDistillation(model), found, int(passes * tokens), seed, show))
    save_mask_adapter(model, out, torch.bfloat16)


@app.command()
def second(
    base: str,
    adapter: str,
    out: Path,
    answers: list[Path],
    passes: Passes = 10,
    width: Annotated[int, typer.Option(help="Hidden units of the second head.")] = 1024,
    seed: int = 0,
) -> None:
    """Add a second previous-token head."""
    model, found, tokens = _read(base, adapter, answers, seed)
    distillation = MaskDistillation(model)
    rows = tokens * distillation.num_masks // CUT_STRIDE
    print(add_second_head(distillation, found, int(passes * rows), seed, _showing(rows), width=width))
    print(f"The head has {len(model.mask_adapter.head.down):,} hidden units.")
    save_mask_adapter(model, out, torch.bfloat16)


def _read(base: str, adapter: str, answers: list[Path], seed: int) -> tuple[Any, list[Any], int]:
    """The model, the answers, and the tokens in them."""
    torch.manual_seed(seed)
    model, _ = load_adapted(base, adapter, dtype="bfloat16")
    found = [answer for file in answers for answer in read_answers(file)]
    tokens = sum(len(answer["response_ids"]) for answer in found)
    print(f"{len(found):,} answers, {tokens:,} tokens", flush=True)
    return model, found, tokens


def _showing(rows: int) -> ShowRows:
    def show(trained: int, measured: dict[str, float]) -> None:
        if measured and trained % (5 * MEASURED * BATCH) == 0:
            print(f"{trained / rows:.1f} passes: {measured}", flush=True)

    return show


if __name__ == "__main__":
    app()
