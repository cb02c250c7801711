"""vLLM's AR and verified decoding of a checkpoint in one process, in turn: tokens/s, tokens a step, equal answers.

    .venv-vllm/bin/python benchmarks/vllm_decoders.py --requests 200 --batches 1 8 64

Without a server between them, the ratio of the two is that of the engines. Times are wall-clock, so run it on a quiet
machine; the ratio of CPU seconds, printed beside them, suffers less where others compute too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

NANO = Path(__file__).parents[1] / "examples" / "wedlm-nano"
# For one CPU; what the environment says goes before.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
if not torch.cuda.is_available():
    ENVIRONMENT["VLLM_TARGET_DEVICE"] = "cpu"


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default=str(NANO))
    found.add_argument("--file", type=Path, default=NANO / "tasks.jsonl", help="JSONL: `prompt` or `messages`")
    found.add_argument("--mask-adapter")
    found.add_argument("--dtype", default="float32")
    found.add_argument(
        "--batches", dest="under_way", type=int, nargs="+", default=[1, 8, 64], help="requests at a time"
    )
    found.add_argument("--requests", type=int, default=200)
    found.add_argument("--max-tokens", type=int, default=160)
    found.add_argument("--max-model-len", type=int, default=512)
    found.add_argument("--num-speculative-tokens", type=int, default=16)
    found.add_argument("--kv-cache-memory-bytes", type=int, help="of each engine: two share a GPU")
    return found


def engine_options(options: argparse.Namespace, is_verified: bool) -> dict[str, Any]:
    """Keywords of `LLM` for AR or verified decoding."""
    found: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": max(options.under_way),
        "enforce_eager": True,
        "enable_prefix_caching": False,  # the same prompts come again
    }
    if options.kv_cache_memory_bytes:
        found["kv_cache_memory_bytes"] = options.kv_cache_memory_bytes
    if is_verified:
        proposer = "wedlm_hf.serving.vllm.Proposer"
        tokens = options.num_speculative_tokens
        found["speculative_config"] = {"model": proposer, "num_speculative_tokens": tokens}
        if options.mask_adapter:
            found["additional_config"] = {"wedlm": {"mask_adapter": options.mask_adapter}}
    return found


def read_chats(path: Path, count: int) -> list[Any]:
    """So many prompts of a JSONL file (`prompt` or `messages`), drawn with a fixed seed, as chats."""
    tasks = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    random.Random(0).shuffle(tasks)
    chats = [task.get("messages") or [{"role": "user", "content": task["prompt"]}] for task in tasks]
    return [chats[index % len(chats)] for index in range(count)]


def counts(engine: Any) -> tuple[float, float]:
    """Steps with drafts or masks, and accepted drafts, since the start."""
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return found["vllm:spec_decode_num_drafts"], found["vllm:spec_decode_num_accepted_tokens"]


def main() -> None:
    """Measures and prints a table."""
    options = parser().parse_args()
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    for name, value in (ENVIRONMENT | alone).items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    engines = [LLM(disable_log_stats=False, **engine_options(options, verified)) for verified in (False, True)]
    chats = read_chats(options.file, options.requests)
    greedy = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    for engine in engines:
        engine.chat(chats[:2], greedy, use_tqdm=False)
    print("| batch | equal | tokens per step | AR tokens/s | verified tokens/s | ratio | ratio of CPU seconds |")
    print("|---|---|---|---|---|---|---|")
    for size in options.under_way:
        before, seconds, cpu, texts = counts(engines[1]), [0.0, 0.0], [0.0, 0.0], [[], []]
        for first in range(0, len(chats), size):
            turn = [0, 1] if first // size % 2 else [1, 0]
            for number in turn:
                began, cpu_began = time.perf_counter(), time.process_time()
                outputs = engines[number].chat(chats[first : first + size], greedy, use_tqdm=False)
                seconds[number] += time.perf_counter() - began
                cpu[number] += time.process_time() - cpu_began
                texts[number] += [list(output.outputs[0].token_ids) for output in outputs]
        steps, accepted = (new - old for new, old in zip(counts(engines[1]), before, strict=True))
        tokens, equal = sum(map(len, texts[0])), sum(map(list.__eq__, *texts))
        cells = [
            size, f"{equal}/{len(chats)}", f"{1 + accepted / max(1, steps):.2f}", f"{tokens / seconds[0]:,.0f}",
            f"{tokens / seconds[1]:,.0f}", f"{seconds[0] / seconds[1]:.2f}", f"{cpu[0] / cpu[1]:.2f}",
        ]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    threads = os.environ["OMP_NUM_THREADS"]
    loads = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{options.model}, {options.dtype}, {threads} thread(s), load averages {loads}")


if __name__ == "__main__":
    main()
