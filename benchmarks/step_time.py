"""Where the time of a step goes: verified decoding with a mask adapter, beside its steps of one row and AR decoding.

    python benchmarks/step_time.py BASE ADAPTER PROMPTS.jsonl --dtype packed

A few prompts are answered with fixed numbers of drafts, each number in turn, and with `--planned 4` as the planner
decides. A column shows the steps with one number of rows and one of masks, the commonest; times are medians. With one
thread they are the thread's own: other programs disturb little.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import pandas as pd
import torch
import typer

from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.adapters.mask_adapter import Update
from wedlm_hf.eval.prompts import encode_prompt, read_prompts
from wedlm_hf.generation.decoding import ParallelDecoder
from wedlm_hf.generation.verify import VerifyRule

FORWARD, WHOLE = "forward", "whole step"
INNER = ("linear layers", "updates of masks", "attention kernel", "norms")  # parts of the forward
OUTER = ("reading logits", "planning")
Times = dict[str, list[float]]


class StepTimer:
    """Notes the seconds of each step's parts, by the step's numbers of rows and masks."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self._seconds = clock, Counter[str]()
        self.found: dict[tuple[int, int], Times] = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose seconds count for a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[part] += self.clock() - began

        return call

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A step, whose parts are noted when it ends."""
        whole = self.timed(WHOLE, function)

        def call(decoder: Any) -> Any:
            self._seconds.clear()
            outcome = whole(decoder)
            times = self.found.setdefault((len(outcome.step.rows[0]), outcome.step.masks[0]), defaultdict(list))
            for part in (*INNER, FORWARD, *OUTER, WHOLE):
                times[part].append(self._seconds[part])
            return outcome

        return call

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Within this context, the parts of a model's steps are timed."""
        with ExitStack() as stack:

            def watch(owner: Any, name: str, part: str) -> None:
                stack.enter_context(patch.object(owner, name, self.timed(part, getattr(owner, name))))

            for module in model.modules():
                if hasattr(module, "in_features"):
                    watch(module, "forward", "linear layers")
                elif type(module).__name__.endswith("Norm"):
                    watch(module, "forward", "norms")
            watch(torch.nn.functional, "scaled_dot_product_attention", "attention kernel")
            watch(Update, "__call__", "updates of masks")
            watch(ParallelDecoder, "_forward", FORWARD)
            watch(VerifyRule, "read", "reading logits")
            watch(ParallelDecoder, "_plan", "planning")
            stack.enter_context(patch.object(ParallelDecoder, "_step", self.step(ParallelDecoder._step)))
            yield


def columns(found: dict[tuple[int, int], Times], most: int) -> list[dict[str, float]]:
    """Of the commonest kinds of steps, in the order of their rows."""
    commonest = sorted(found.items(), key=lambda item: -len(item[1][WHOLE]))[:most]
    return [column(*kind, times) for kind, times in sorted(commonest)]


def column(rows: int, masks: int, times: Times) -> dict[str, float]:
    """Rows and masks of a step, how many such steps there were, and the milliseconds of its parts."""
    ms = {part: 1e3 * median(seconds) for part, seconds in times.items()}
    inner, outer = {part: ms[part] for part in INNER}, {part: ms[part] for part in OUTER}
    parts = inner | {"rest of the forward": ms[FORWARD] - sum(inner.values())} | outer
    parts["rest of the step"] = ms[WHOLE] - ms[FORWARD] - sum(outer.values())
    return {"rows": rows, "of them masks": masks, "steps": len(times[WHOLE])} | parts | {WHOLE: ms[WHOLE]}


def ar_seconds(model: Any, ids: torch.Tensor, max_new_tokens: int, clock: Callable[[], float]) -> list[float]:
    """What each token after the second takes in AR decoding."""
    times: list[float] = []

    def never(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        times.append(clock())
        return torch.zeros(len(ids), dtype=torch.bool)

    model.generate(ids, strategy="ar", do_sample=False, max_new_tokens=max_new_tokens, stopping_criteria=[never])
    return [after - before for before, after in pairwise(times[1:])]


def main(
    base: str,
    adapter: str,
    prompts: Path,
    dtype: str = "bfloat16",
    drafts: Annotated[list[int] | None, typer.Option(help="Checked in every step, at most; default: 1, 2, 4.")] = None,
    planned: Annotated[int, typer.Option(help="Show so many kinds of the planner's own steps, too.")] = 0,
    count: Annotated[int, typer.Option(help="Prompts.")] = 4,
    max_new_tokens: int = 64,
    threads: int = 1,
) -> None:
    """Print a table."""
    torch.set_num_threads(threads)
    model, tokenizer = load_adapted(base, adapter, dtype=dtype)
    model.eval()
    questions = read_prompts(prompts.name, prompts.read_text(encoding="utf-8"))
    questions = questions[:: max(1, len(questions) // count)][:count]
    shared = {"strategy": "wedlm", "verification": "exact", "max_new_tokens": max_new_tokens, "do_sample": False}
    fixed = [{"window_size": size} for size in drafts or (1, 2, 4)]
    ways: dict[str, Any] = {"one row": {"slot_cost": 1e9}}  # with a row that costs so much, none is added
    ways |= {f"drafts: {way['window_size']}": way for way in fixed} | ({"planned": {}} if planned else {})
    clock = time.thread_time if threads == 1 else time.perf_counter
    timers, of_ar = [StepTimer(clock) for _ in ways], []
    for number, question in enumerate([questions[0], *questions]):
        ids = torch.tensor([encode_prompt(model, tokenizer, question).tokens])
        for timer, way in zip(timers, ways.values(), strict=True):
            with timer.watching(model):
                model.generate(ids, **shared, **way)
            if not number:  # the first is a warm-up
                timer.found.clear()
        of_ar += ar_seconds(model, ids, max_new_tokens, clock) if number else []
    found = [
        (label, each)
        for label, timer in zip(ways, timers, strict=True)
        for each in columns(timer.found, planned if label == "planned" else 1)
    ]
    table = pd.DataFrame([each for _, each in found], [label for label, _ in found]).T
    print(
        f"Milliseconds of a step, {threads} thread{'s' * (threads > 1)}; of AR decoding, {1e3 * median(of_ar):.1f}:\n"
    )
    print(table.to_markdown(floatfmt=".1f"))


if __name__ == "__main__":
    typer.run(main)
