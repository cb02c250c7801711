"""Trains the root head of a mask adapter alone: the base's states are computed once, so that its epochs are short.

    python benchmarks/root_head.py BASE ADAPTER OUT ANSWERS.jsonl [ANSWERS.jsonl ...] --minutes 15

Answers are as `wedlm adapt` writes them (work/answers.jsonl). The n-grams of all of them are added to the adapter's
first, unless `--no-count` says that it has them.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from wedlm_hf.adapters.attach import MOST_FREQUENT, add_root_head
from wedlm_hf.adapters.loading import load_adapted

PART = 16  # answers whose states are computed at once


@torch.inference_mode()
def rows_of(model: Any, answers: Sequence[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row that predicts a token of an answer, but for the first token: the last hidden states `(N, H)` of the
    row before and of itself, and the tokens `(N, 2)` of both."""
    states, targets, tokens = [], [], []
    for part in _parts(answers):
        texts = [torch.tensor(answer["prompt_ids"] + answer["response_ids"]) for answer in part]
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        for answer, text, own in zip(part, texts, hidden, strict=True):
            first, end = len(answer["prompt_ids"]), len(text) - 1
            states.append(own[first - 1 : end - 1].bfloat16())
            targets.append(own[first:end].bfloat16())
            tokens.append(torch.stack([text[first - 1 : end - 1], text[first:end]], 1))
    return torch.cat(states), torch.cat(targets), torch.cat(tokens)


def _parts(answers: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    ordered = sorted(answers, key=lambda answer: len(answer["prompt_ids"]) + len(answer["response_ids"]))
    for first in range(0, len(ordered), PART):
        yield ordered[first : first + PART]


def main(
    base: str,
    adapter: str,
    out: Path,
    answers: list[Path],
    minutes: float = 15,
    width: Annotated[int, typer.Option(help="Hidden units, where the adapter has no root head yet.")] = 1024,
    batch: int = 512,
    learning_rate: float = 2e-3,
    held_out: Annotated[int, typer.Option(help="The last answers, which it is measured on.")] = 48,
    count: Annotated[bool, typer.Option(help="Add the n-grams of the answers.")] = True,
    seed: int = 0,
) -> None:
    """Print accuracy on answers that are held out, every 500 steps, and write the adapter."""
    torch.manual_seed(seed)
    model, _ = load_adapted(base, adapter, dtype="bfloat16")
    mask_adapter, table = model.mask_adapter, model.get_input_embeddings().weight.detach().float()
    lines = [json.loads(line) for file in answers for line in file.read_text(encoding="utf-8").splitlines()]
    if count:
        model.count_ngrams(lines[:-held_out])
    frequent = mask_adapter.ngrams.frequent(MOST_FREQUENT)
    head_rows = model.get_output_embeddings().weight.detach().float()[frequent].T.contiguous()
    states, targets, tokens = (part.clone() for part in rows_of(model, lines[:-held_out]))
    tested = [part.clone() for part in rows_of(model, lines[-held_out:])]
    add_root_head(model, width)
    head = mask_adapter.root_head
    head.float().requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    print(f"{len(lines)} answers, {len(states)} rows; tested on {len(tested[0])}.", flush=True)

    def accuracy() -> dict[str, float]:
        own, following, ids = tested
        with torch.no_grad():
            likeliest = (following.float() @ model.get_output_embeddings().weight.float().T).argmax(-1, keepdim=True)
            found = frequent[(head(own.float(), table[ids]) @ head_rows).topk(3).indices]
        hits = found == likeliest
        return {"first": float(hits[:, 0].float().mean()), "first three": float(hits.any(1).float().mean())}

    began, step = time.monotonic(), 0
    while (used := (time.monotonic() - began) / 60 / minutes) < 1:
        chosen = torch.randint(len(states), (batch,))
        scores = head(states[chosen].float(), table[tokens[chosen]]) @ head_rows
        wanted = (targets[chosen].float() @ head_rows).softmax(-1)
        loss = -(wanted * scores.log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1, step / 100) * max(0.03, 0.5 * (1 + math.cos(math.pi * used)))
        optimizer.step()
        step += 1
        if step % 500 == 0:
            print(step, f"{minutes * used:.1f} minutes", f"{float(loss):.3f}", accuracy(), flush=True)
    print(step, "steps:", accuracy())
    model.save_mask_adapter(out, torch.bfloat16)


if __name__ == "__main__":
    typer.run(main)
