"""What training a mask adapter costs, beside a dense forward of the same slots; what the adapter costs a forward.

    python benchmarks/mask_training_cost.py BASE ANSWERS.jsonl                    # BASE: a WeDLM checkpoint
    python benchmarks/mask_training_cost.py BASE ANSWERS.jsonl --threads 2 --repeats 5

*Training*: forward and backward of one batch. Ours runs the answers once without a graph, then the masks alone, with
logits where there is a target, over a part of the vocabulary (docs/adapters.md). The dense one runs answers and masks
as one dual stream, under one attention mask, with all logits of both. Both train the same adapter on the same slots.

*Decoding*: a forward of 16 rows, 12 of them slots, behind 128 cached tokens, with the adapter and without.

Both take turns. With one thread, seconds are those of the thread's own work, so that other processes disturb little.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional as F
from transformers import DynamicCache

from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.layout import AnswerBatches, DataCollatorForMaskRuns, load_answers
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.modeling_wedlm.loading import load_model

NUM_MASKS, CUT_STRIDE = 5, 3
CACHED, ROWS, SLOTS = 128, 16, 12
Batch = dict[str, torch.Tensor]


def dense_inputs(model: Any, batch: Batch) -> Batch:
    """The answers with all their masks behind them, `(B, L + M)`, under one mask, `(B, 1, L + M, L + M)`."""
    ids, cuts = batch["input_ids"], batch["cuts"].clamp(min=0)
    rows, length = ids.shape
    slots = cuts.shape[1] * NUM_MASKS
    places = (cuts[..., None] + 2 + torch.arange(NUM_MASKS)).flatten(1)
    run = torch.arange(slots) // NUM_MASKS
    in_run = (run[:, None] == run) & torch.ones(slots, slots, dtype=torch.bool).tril()
    visible = torch.zeros(rows, length + slots, length + slots, dtype=torch.bool)
    visible[:, :length, :length] = torch.ones(length, length, dtype=torch.bool).tril()
    visible[:, length:, :length] = torch.arange(length) <= cuts.repeat_interleave(NUM_MASKS, 1)[..., None]
    visible[:, length:, length:] = in_run
    return {
        "input_ids": torch.cat([ids, torch.full((rows, slots), model.config.mask_token_id)], dim=1),
        "position_ids": torch.cat([torch.arange(length).expand(rows, -1), places], dim=1),
        "attention_mask": torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, -torch.inf)[:, None],
    }


def dense_loss(model: Any, batch: Batch, inputs: Batch) -> torch.Tensor:
    """Cross-entropy of each mask with the base's distribution at its position, of all logits."""
    length, slots = batch["input_ids"].shape[1], batch["labels"].flatten(1).shape[1]
    attention = {"full_attention": inputs["attention_mask"]}
    logits = model(**inputs | {"attention_mask": attention}, slot_mask=slots, use_cache=False).logits
    counted = batch["labels"].flatten(1) != -100
    before = (inputs["position_ids"][:, length:] - 1)[counted]
    teacher = logits[counted.nonzero()[:, 0], before].detach()
    return F.cross_entropy(logits[:, length:][counted].float(), teacher.float().softmax(-1))


def in_turn(steps: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each, one after the other, without the first turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            began = clock()
            step()
            times[name].append(clock() - began)
    return {name: seconds[1:] for name, seconds in times.items()}


def training_cost(model: Any, batch: Batch, repeats: int, clock: Callable[[], float]) -> None:
    """Prints mask rows a second of both."""
    implementation = model.config._attn_implementation
    ours = MaskDistillation(model, num_masks=NUM_MASKS)
    inputs = dense_inputs(model, batch)

    def backward(loss: Callable[[], torch.Tensor], attention: str) -> Callable[[], None]:
        def step() -> None:
            model.set_attn_implementation(attention)
            model.zero_grad()
            loss().backward()

        return step

    steps = {
        "mask adapter": backward(lambda: ours(**batch)["loss"], model.config._attn_implementation),
        "dense dual stream": backward(lambda: dense_loss(model, batch, inputs), implementation),
    }
    rows = int((batch["labels"] != -100).sum())
    times = {name: median(seconds) for name, seconds in in_turn(steps, repeats, clock).items()}
    for name, seconds in times.items():
        print(f"{name}: {rows / seconds:.0f} mask rows/s")
    ratio = times["dense dual stream"] / times["mask adapter"]
    print(f"ratio: {ratio:.2f} ({rows} mask rows in {len(batch['input_ids'])} answers)")
    model.set_attn_implementation(implementation)


@torch.inference_mode()
def forward_cost(model: Any, pairs: int, clock: Callable[[], float]) -> None:
    """Prints how many times as long a forward takes with the adapter."""
    cache = DynamicCache(config=model.config)
    model(torch.arange(CACHED)[None] + 5, past_key_values=cache, use_cache=True)
    rows = torch.arange(ROWS)[None] + 5

    def forward(slots: int | None) -> Callable[[], None]:
        def step() -> None:
            model(rows, past_key_values=cache, use_cache=True, slot_mask=slots)
            cache.crop(-ROWS)

        return step

    times = in_turn({"with": forward(SLOTS), "without": forward(None)}, pairs, clock)
    ratio = median(one / other for one, other in zip(times["with"], times["without"], strict=True))
    shown = ", ".join(f"{1000 * median(seconds):.1f} ms {name}" for name, seconds in times.items())
    print(f"a forward of {ROWS} rows, {SLOTS} of them slots: {shown} the adapter, ratio {ratio:.3f} ({pairs} pairs)")


def main(
    base: Annotated[str, typer.Argument(help="Folder or Hub id of a WeDLM checkpoint.")],
    answers: Annotated[Path, typer.Argument(help="JSONL file of its own answers.")],
    threads: int = 1,
    repeats: Annotated[int, typer.Option(help="Training steps of each kind.")] = 3,
    pairs: Annotated[int, typer.Option(help="Forwards with and without the adapter.")] = 60,
    batch_slots: Annotated[int, typer.Option(help="Masks of a batch, about.")] = 640,
    dtype: str = "bfloat16",
) -> None:
    """Measure both."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = time.thread_time if threads == 1 else time.perf_counter
    model: Any = load_model(base, dtype=dtype).eval()
    adapter = model.add_mask_adapter(MaskAdapterSettings())
    for parameter in adapter.parameters():  # a new one multiplies with zeros
        parameter.data += 0.01 * torch.randn_like(parameter)
    batches = AnswerBatches(load_answers(answers, 640), batch_slots, CUT_STRIDE, NUM_MASKS, seed=0)
    batch = DataCollatorForMaskRuns(0, NUM_MASKS, CUT_STRIDE)([batches[len(batches) // 2]])
    training_cost(model, batch, repeats, clock)
    adapter.to(model.dtype).requires_grad_(False)
    forward_cost(model, pairs, clock)


if __name__ == "__main__":
    typer.run(main)
