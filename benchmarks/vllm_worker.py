"""vLLM's side of vllm_baseline.py: runs under the Python that has vLLM, and imports nothing of this package.

Standard input brings JSON lines, standard output takes one for each: first the engine's keywords, answered by its
version; then `{"prompts": [[token, …], …], "sampling": {…}}`, answered by `{"tokens": [[…], …], "seconds": …}`.
Between them the process sleeps, so that another one can be timed in turn.
"""

import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is logged or printed goes to standard error

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        vllm: Any = importlib.import_module("vllm")
    except ImportError as error:
        answer({"missing": str(error)})
        return
    lines = iter(sys.stdin.readline, "")
    engine = vllm.LLM(**json.loads(next(lines)))
    answer({"version": vllm.__version__})
    for line in lines:
        request = json.loads(line)
        sampling = vllm.SamplingParams(**request["sampling"])
        prompts = [{"prompt_token_ids": tokens} for tokens in request["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        answer({"tokens": [list(output.outputs[0].token_ids) for output in outputs], "seconds": seconds})


if __name__ == "__main__":
    main()
