"""Where the time of a step goes.

    python benchmarks/step_time.py parts BASE ADAPTER PROMPTS.jsonl --dtype packed
    python benchmarks/step_time.py matrices --threads 2
    python benchmarks/step_time.py operators BASE

`parts`: verified decoding with a mask adapter, beside its steps of one row and AR decoding. A few prompts are answered
with fixed numbers of drafts, each number in turn, and with `--planned 4` as the planner decides. A column shows the
steps with one number of rows and one of masks, the commonest; times are medians.

`matrices`: linear layers by the number of rows, in all formats, which take turns. Random weights in the shapes of real
models, all layers and the head; with `--layers`, some are timed, and their time is multiplied.

`operators`: how many operators a step of AR decoding calls, those within others counted.

With one thread, times are the thread's own: other programs disturb little.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import pandas as pd
import torch
import typer
from torch import nn
from torch.profiler import ProfilerActivity, profile

from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.adapters.mask_adapter import Update
from wedlm_hf.checkpoints import packed
from wedlm_hf.checkpoints.loading import load_model
from wedlm_hf.checkpoints.matrices import in_one_thread
from wedlm_hf.checkpoints.packed import PACKINGS, pack
from wedlm_hf.checkpoints.packed_layers import PackedLinear, Product
from wedlm_hf.eval.prompts import encode_prompt, read_prompts
from wedlm_hf.generation.decoding import ParallelDecoder
from wedlm_hf.generation.verify import VerifyRule

FORWARD, WHOLE = "forward", "whole step"
INNER = ("head", "other linear layers", "updates of masks", "attention kernel", "norms")  # parts of the forward
OUTER = ("reading logits", "planning")
Times = dict[str, list[float]]
# Hidden size, width of the MLP, layers, width of all queries, of all keys, and vocabulary.
SHAPES = {
    "SmolLM2-135M": (576, 1536, 30, 576, 192, 49152),
    "Qwen3-0.6B": (1024, 3072, 28, 2048, 1024, 151936),
    "Qwen3-1.7B": (2048, 6144, 28, 2048, 1024, 151936),
}
Shape = StrEnum("Shape", {name: name for name in SHAPES})
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 64)
app = typer.Typer()


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
                    is_head = module is model.get_output_embeddings()
                    watch(module, "forward", "head" if is_head else "other linear layers")
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


@app.command()
def parts(
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
        is_raw = tokenizer.chat_template is None
        ids = torch.tensor([encode_prompt(model, tokenizer, question, raw=is_raw).tokens])
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


@app.command()
def matrices(
    model: Shape = Shape["SmolLM2-135M"],
    layers: Annotated[int, typer.Option(help="So many are timed; default: all.")] = 0,
    rows: Annotated[list[int] | None, typer.Option(help="Default: 1 to 64.")] = None,
    repeats: int = 7,
    threads: int = 1,
) -> None:
    """Print a table."""
    torch.set_num_threads(threads)
    print(torch.backends.cpu.get_cpu_capability(), f"{threads} threads", model.value)

    def measure() -> None:
        clock = time.thread_time if threads == 1 else time.perf_counter
        table = pd.DataFrame(list(matrix_times(SHAPES[model], layers, rows or ROWS, repeats, clock)))
        print(table.set_index("rows").to_markdown(floatfmt=".1f"))

    in_one_thread(measure) if threads == 1 else measure()


@torch.no_grad()
def matrix_times(
    shape: tuple[int, ...], most: int, rows: Sequence[int], repeats: int, clock: Callable[[], float]
) -> Iterator[dict[str, float]]:
    """The milliseconds of each format, by numbers of rows."""
    hidden, width, layers, queries, keys, vocabulary = shape
    timed = min(most or layers, layers)
    block = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    block += [(hidden, width), (hidden, width), (width, hidden)]
    plain = [[nn.Linear(*size, bias=False) for size in part] for part in (block * timed, [(hidden, vocabulary)])]
    formats: dict[str, list[list[Any]]] = {
        name: [[PackedLinear(layer, product=Product([layer.weight], bits)) for layer in part] for part in plain]
        for name, bits in PACKINGS.items()
    }
    formats |= {"bfloat16": [[deepcopy(layer).bfloat16() for layer in part] for part in plain], "float32": plain}
    for count in rows:
        taken: dict[str, list[float]] = {name: [] for name in formats}
        for _ in range(repeats):
            for name, (decoder, head) in formats.items():
                dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
                inputs = {size: torch.randn(count, size).to(dtype) for size in (hidden, queries, width)}
                marks = [clock()]
                for part in (decoder, head):
                    for layer in part:
                        layer(inputs[layer.in_features])
                    marks.append(clock())
                seconds = [after - before for before, after in pairwise(marks)]
                taken[name].append(seconds[0] * layers / timed + seconds[1])
        yield {"rows": count} | {name: 1e3 * median(times) for name, times in taken.items()}


@app.command()
def operators(base: str) -> None:
    """Print a table: of the model as transformers has it, and packed, with what is fused and without."""
    stock = load_model(base, dtype=torch.float32)
    stock.generation_config.eos_token_id = None
    rows = [{"format": "as transformers has it", "calls": str(operator_calls(stock)), "not fused": "–"}]
    for name, bits in PACKINGS.items():
        with patch.object(packed, "fuse", lambda model: None):
            unfused = operator_calls(pack(deepcopy(stock), bits))
        calls = operator_calls(pack(deepcopy(stock), bits))
        rows.append({"format": name, "calls": str(calls), "not fused": str(unfused)})
    print(pd.DataFrame(rows).to_markdown(index=False))


def operator_calls(model: Any) -> int:
    """Of the last of a few steps of `generate`."""
    counts = []
    for tokens in (4, 5):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=tokens)
        counts.append(sum(event.count for event in found.key_averages()))
    return counts[1] - counts[0]


if __name__ == "__main__":
    app()
