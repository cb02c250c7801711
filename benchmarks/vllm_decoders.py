"""vLLM's AR and verified decoding of a checkpoint in one process, in turn: tokens/s, tokens a step, equal answers.

    .venv-vllm/bin/python benchmarks/vllm_decoders.py --prompts 200 --batches 1 8 64

Without a server between them, the ratio of the two is that of the engines. Times are wall-clock, so run it on a quiet
machine; the ratio of CPU seconds, printed beside them, suffers less where others compute too.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from serving import NANO, PROPOSER, read_chats

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip


def start(options: argparse.Namespace, is_verified: bool) -> Any:
    """An engine."""
    from vllm import LLM

    keywords: dict[str, Any] = {}
    if is_verified:
        tokens = options.num_speculative_tokens
        keywords["speculative_config"] = {"model": PROPOSER, "num_speculative_tokens": tokens}
        if options.mask_adapter:
            keywords["additional_config"] = {"wedlm": {"mask_adapter": options.mask_adapter}}
    return LLM(
        options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=options.max_model_len,
        max_num_seqs=max(options.batches),
        enable_prefix_caching=False,  # the same prompts come again
        disable_log_stats=False,
        **keywords,
    )


def counts(engine: Any) -> tuple[float, float]:
    """Steps with drafts or masks, and accepted drafts, since the start."""
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return found["vllm:spec_decode_num_drafts"], found["vllm:spec_decode_num_accepted_tokens"]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(NANO))
    parser.add_argument("--file", type=Path, default=NANO / "tasks.jsonl")
    parser.add_argument("--mask-adapter")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--num-speculative-tokens", type=int, default=16)
    options = parser.parse_args()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from vllm import SamplingParams

    engines = [start(options, is_verified) for is_verified in (False, True)]
    chats = read_chats(options.file, options.prompts)
    greedy = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    for engine in engines:
        engine.chat(chats[:2], greedy, use_tqdm=False)
    print("| batch | equal | tokens per step | AR tokens/s | verified tokens/s | ratio | ratio of CPU seconds |")
    print("|---|---|---|---|---|---|---|")
    for size in options.batches:
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
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{options.model}, {options.dtype}, {os.environ['OMP_NUM_THREADS']} thread(s), load averages {load}")


if __name__ == "__main__":
    main()
