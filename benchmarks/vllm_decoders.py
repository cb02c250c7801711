"""vLLM's AR and verified decoding of a checkpoint in one process, in turn: tokens/s, tokens a step, equal answers.

    .venv-vllm/bin/python benchmarks/vllm_decoders.py --requests 200 --batches 1 8 64

Without a server between them, the ratio of the two is that of the engines. Times are wall-clock, so run it on a quiet
machine; the ratio of CPU seconds, printed beside them, suffers less where others compute too.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm_engines import ENVIRONMENT, engine_options, load_averages, parser, read_chats


def counts(engine: Any) -> tuple[float, float]:
    """Steps with drafts or masks, and accepted drafts, since the start."""
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return found["vllm:spec_decode_num_drafts"], found["vllm:spec_decode_num_accepted_tokens"]


def main() -> None:
    """Measures and prints a table."""
    options = parser(__doc__, "--batches", [1, 8, 64], 200).parse_args()
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
    print(f"{options.model}, {options.dtype}, {threads} thread(s), load averages {load_averages()}")


if __name__ == "__main__":
    main()
