"""What the benchmarks on vLLM share: their options, the two engines that they compare, and prompts."""

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import torch

NANO = Path(__file__).parents[1] / "examples" / "wedlm-nano"
# For one CPU; what the environment says goes before.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
if not torch.cuda.is_available():
    ENVIRONMENT["VLLM_TARGET_DEVICE"] = "cpu"


def parser(description: str | None, under_way: str, counts: list[int], requests: int) -> argparse.ArgumentParser:
    """The options.

    Args:
        description: of the script.
        under_way: name of the option that says how many requests are decoded together.
        counts: its default.
        requests: how many there are in all, unless told otherwise.
    """
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default=str(NANO))
    found.add_argument("--file", type=Path, default=NANO / "tasks.jsonl", help="JSONL: `prompt` or `messages`")
    found.add_argument("--mask-adapter")
    found.add_argument("--dtype", default="float32")
    found.add_argument(under_way, dest="under_way", type=int, nargs="+", default=counts, help="requests at a time")
    found.add_argument("--requests", type=int, default=requests)
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


def as_flags(keywords: dict[str, Any]) -> list[str]:
    """The same for `vllm serve`."""
    flags = []
    for name, value in keywords.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def read_chats(path: Path, count: int) -> list[Any]:
    """So many prompts of a JSONL file (`prompt` or `messages`), drawn with a fixed seed, as chats."""
    tasks = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    random.Random(0).shuffle(tasks)
    chats = [task.get("messages") or [{"role": "user", "content": task["prompt"]}] for task in tasks]
    return [chats[index % len(chats)] for index in range(count)]


def load_averages() -> str:
    """How busy this machine is."""
    return ", ".join(f"{value:.1f}" for value in os.getloadavg())
