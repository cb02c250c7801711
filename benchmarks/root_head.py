"""Trains the root head of a mask adapter alone.

    python benchmarks/root_head.py BASE ADAPTER OUT ANSWERS.jsonl [ANSWERS.jsonl ...] --passes 12

Answers are as `wedlm adapt` writes them (work/answers.jsonl). Their n-grams are added to the adapter's first, unless
`--no-count` says that it has them. What is printed was measured on answers that are held out.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from wedlm_hf.adapters.answers import read_answers
from wedlm_hf.adapters.attach import add_root_head, count_ngrams, save_mask_adapter
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.adapters.root_head import BATCH, MEASURED, train_root_head


def main(
    base: str,
    adapter: str,
    out: Path,
    answers: list[Path],
    passes: Annotated[float, typer.Option(help="How often each row is trained.")] = 12,
    width: Annotated[int, typer.Option(help="Hidden units, where the adapter has no root head yet.")] = 1024,
    count: Annotated[bool, typer.Option(help="Add the n-grams of the answers.")] = True,
    new: Annotated[bool, typer.Option("--new", help="Begin with a new root head.")] = False,
    seed: int = 0,
) -> None:
    """Print what is measured on held-out answers, and write the adapter."""
    torch.manual_seed(seed)
    model, _ = load_adapted(base, adapter, dtype="bfloat16")
    found = [answer for file in answers for answer in read_answers(file)]
    if count:
        count_ngrams(model, found)
    if new:
        model.mask_adapter.root_head = None
    add_root_head(model, width)
    model.mask_adapter.root_head.float().requires_grad_(True)
    rows = sum(len(answer["response_ids"]) for answer in found)

    def show(trained: int, measured: dict[str, float]) -> None:
        if measured and trained % (5 * MEASURED * BATCH) == 0:
            print(f"{trained / rows:.1f} passes: {measured}", flush=True)

    print(f"{len(found):,} answers, {rows:,} rows", flush=True)
    print(train_root_head(MaskDistillation(model), found, int(passes * rows), seed, show))
    save_mask_adapter(model, out, torch.bfloat16)


if __name__ == "__main__":
    typer.run(main)
