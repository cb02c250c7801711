"""What training a mask adapter costs: seconds and memory of an optimizer step, and seconds of 1,000 answer tokens.

    python benchmarks/mask_training_cost.py                        # sizes of Qwen3-0.6B and Qwen3-1.7B
    python benchmarks/mask_training_cost.py --shapes qwen3-0.6b --threads 2

The weights are random and the layers few: what a layer costs is the difference of models with one and with three of
them, and what the table says is computed for all. Each model has a process of its own, whose peak memory is read.
With one thread, seconds are those of the thread's own work, which other processes disturb little.
"""

import json
import resource
import subprocess
import sys
import time
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from wedlm_hf.adapters.attach import add_mask_adapter, unload_mask_adapter
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.layout import DataCollatorForMaskRuns
from wedlm_hf.checkpoints.packed import pack
from wedlm_hf.generation.versions import CACHE

FEW, MORE = 1, 3  # layers that are measured
CONTEXT, TOGETHER = 128, 48  # tokens before, and answers that are written at once
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4},
    "qwen3-0.6b": {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28},
    "qwen3-1.7b": {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28},
}  # fmt: skip


def cost(shape: str, layers: int, answers: int, threads: int) -> dict[str, float]:
    """Of a model with some of its layers: mask `rows`, seconds of a `step` and of 1,000 `tokens`, peak `bytes`."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = time.thread_time if threads == 1 else time.perf_counter
    config = Qwen3Config(**SHAPES[shape] | {"num_hidden_layers": layers, "tie_word_embeddings": True})
    model = Qwen3ForCausalLM(config).eval()
    adapter = add_mask_adapter(model)
    distillation, optimizer = MaskDistillation(model), torch.optim.AdamW(adapter.parameters())
    draw = lambda count: torch.randint(config.vocab_size, (count,)).tolist()  # noqa: E731
    batch = DataCollatorForMaskRuns(0, distillation.num_masks, 3)(
        [[{"prompt_ids": draw(32), "response_ids": draw(128)} for _ in range(answers)]]
    )

    def step() -> None:
        distillation(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    began = clock()
    step()
    seconds = clock() - began
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unload_mask_adapter(model)
    pack(model)
    cache, ids = DynamicCache(), torch.randint(config.vocab_size, (TOGETHER, CONTEXT))
    with torch.inference_mode():
        model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        model(ids[:, :1], **{CACHE: cache}, use_cache=True)
        began = clock()
        model(ids[:, :1], **{CACHE: cache}, use_cache=True)
    token = (clock() - began) / TOGETHER
    rows = int((batch["labels"] != -100).sum())
    return {"rows": rows, "step": seconds, "bytes": peak, "tokens": 1000 * token}


def scaled(shape: str, answers: int, threads: int) -> dict[str, float]:
    """Of the whole model, from measurements of parts of it."""
    found = []
    for layers in (FEW, MORE):
        words = [sys.executable, __file__, "--part", f"{shape},{layers}", "--answers", str(answers)]
        result = subprocess.run([*words, "--threads", str(threads)], capture_output=True, text=True, check=True)
        found.append(json.loads(result.stdout.splitlines()[-1]))
    count = SHAPES[shape]["num_hidden_layers"]
    return {
        name: few if name == "rows" else few + (more - few) * (count - FEW) / (MORE - FEW)
        for (name, few), more in zip(found[0].items(), found[1].values(), strict=True)
    }


def main(
    shapes: Annotated[str, typer.Option(help=f"With commas, of {', '.join(SHAPES)}.")] = "qwen3-0.6b,qwen3-1.7b",
    answers: Annotated[int, typer.Option(help="In a step, of 128 tokens each.")] = 2,
    threads: int = 1,
    part: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure and print a table."""
    if part:
        shape, layers = part.split(",")
        print(json.dumps(cost(shape, int(layers), answers, threads)))
        return
    print("| model | mask rows of a step | seconds of a step | rows/s | peak memory, GB | s per 1,000 answer tokens |")
    print("|---|---:|---:|---:|---:|---:|")
    for shape in shapes.split(","):
        one = scaled(shape, answers, threads)
        rate = one["rows"] / one["step"]
        cells = f"{one['rows']:.0f} | {one['step']:.1f} | {rate:.1f} | {one['bytes'] / 1e9:.1f} | {one['tokens']:.1f}"
        print(f"| {shape} | {cells} |", flush=True)
    print(f"float32, answers by packed layers, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}")


if __name__ == "__main__":
    typer.run(main)
