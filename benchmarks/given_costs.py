"""Speed of verified decoding where forwards take given times: the same on every machine, however busy.

    python benchmarks/given_costs.py BASE examples/smollm2/prompts-heldout.jsonl examples/smollm2 [ADAPTER ...]
    python benchmarks/given_costs.py examples/wedlm-nano examples/wedlm-nano/tasks.jsonl

The planner's clock shows times of forwards by their rows, and so much more where masks are among them: those of
SmolLM2 on packed layers, on a Xeon with AVX-512 and without AMX, in AR steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import typer

from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.eval.prompts import encode_prompt, read_prompts
from wedlm_hf.generation.decoding import ParallelDecoder
from wedlm_hf.generation.verify import VerifyRule

# AR steps that a forward takes, by its rows.
TIMES = {1: 1.0, 2: 1.15, 3: 1.23, 4: 1.3, 5: 1.36, 6: 1.41, 8: 1.48, 9: 1.53, 12: 1.64, 16: 2.05, 32: 3.5}
MASK = 0.01  # each
ROOT = 0.04  # what drafts from the root's state take in a step, where the adapter has a root head


class Clock:
    """Moves by the times of forwards."""

    def __init__(self, masks: float):
        self.masks, self.now, self.forwards = masks, 0.0, 0

    def __call__(self) -> float:
        """AR steps so far."""
        return self.now

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Within this context, it is decoding's, and each forward but those of prompts moves it."""
        forward = ParallelDecoder._forward

        def timed(decoder: ParallelDecoder, step: Any) -> Any:
            if decoder.steps > 0:
                assert isinstance(decoder.rule, VerifyRule)
                masks = max(step.masks)
                time = np.interp(step.input_ids.shape[1], list(TIMES), list(TIMES.values()))
                self.now += float(time) + (self.masks + MASK * masks) * (masks > 0)
                self.now += ROOT * decoder.rule.drafter.reads_root
                self.forwards += 1
            return forward(decoder, step)

        planned = patch("wedlm_hf.generation.decoding.step_clock", lambda device: self)
        with patch.object(ParallelDecoder, "_forward", timed), planned:
            yield


def main(
    base: str,
    prompts: Path,
    adapters: Annotated[list[str] | None, typer.Argument(help="None: the masks of the base, a WeDLM model.")] = None,
    count: Annotated[int, typer.Option(help="Questions, spread over the file.")] = 16,
    max_new_tokens: int = 96,
    masks: Annotated[float, typer.Option(help="AR steps that masks add, beside 0.01 for each.")] = 0.26,
    dtype: str = "float32",
    free: Annotated[bool, typer.Option("--free", help="Rows cost nothing: each step checks up to 12 drafts.")] = False,
) -> None:
    """Print a row for each adapter."""
    rows = []
    for adapter in adapters or [None]:
        model, tokenizer = load_adapted(base, adapter, dtype=getattr(torch, dtype))
        questions = read_prompts(prompts.name, prompts.read_text(encoding="utf-8"))
        clock, tokens = Clock(masks), 0
        for question in questions[:: max(1, len(questions) // count)][:count]:
            ids = torch.tensor([encode_prompt(model, tokenizer, question).tokens])
            with clock.ticking():
                how = {"strategy": "wedlm", "verification": "exact", "do_sample": False}
                how |= {"slot_cost": 0.0} if free else {}
                output = model.generate(ids, **how, max_new_tokens=max_new_tokens)
            tokens += output.shape[1] - ids.shape[1] - 1  # the first one is the prompt's forward's
        speed = {
            "tokens per forward": tokens / clock.forwards,
            "speed against AR": None if free else tokens / clock.now,
        }
        rows.append({"adapter": adapter, "tokens": tokens} | speed)
    print(pd.DataFrame(rows).round(2).to_markdown(index=False))


if __name__ == "__main__":
    typer.run(main)
