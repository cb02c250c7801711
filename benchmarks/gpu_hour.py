"""What was never run on a GPU, checked and measured there in at most 25 minutes; a call goes on where one was stopped.

    python benchmarks/gpu_hour.py --model FOLDER --out build/gpu               # --minutes 9, as often as it takes
    python benchmarks/gpu_hour.py --out build/gpu --page build/gpu.md          # its tables, on a page
    python benchmarks/gpu_hour.py --out build/tiny --device cpu --tiny         # all of it, tiny: shows that it runs

Each piece has a process of its own for at most 8 minutes: one that crashes or hangs takes no other with it.
OUT/PIECE.json is written whole after each part of a piece; a call does the parts that are missing, and those that
failed once more.
"""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from gpu_results import Parts, Result, do_parts, read, tables
from training_cost import SHAPES, SMALL, compare, random_model
from transformers import CompileConfig, DynamicCache
from transformers.utils.logging import disable_progress_bar

from wedlm_hf.adapters.adapt import adapt
from wedlm_hf.adapters.adapt_config import AdaptConfig
from wedlm_hf.adapters.attach import add_mask_adapter
from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.files import write_text
from wedlm_hf.checkpoints.loading import load_model, load_tokenizer
from wedlm_hf.eval.decoders import AR, DECODERS, EXACT
from wedlm_hf.eval.measure import ForwardCounter, ar_logits, environment, now, pad_left, take_turns, until_end
from wedlm_hf.eval.prompts import Prompt, encode_prompt, read_tasks
from wedlm_hf.generation.versions import CACHE

ROOT = Path(__file__).parents[1]
MOST_SECONDS, ADAPT_MINUTES = 480.0, 7.0  # of a piece; the rest of `adapt` is loading
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
KEPT = "decoder prompt task tokens new_tokens forwards token_instances seconds".split()


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Attributes:
        model: folder of a causal model.
        device: such as cuda.
        tiny: little of everything.
        adapter: folder of a trained mask adapter; without one, that of the piece `adapt`, or else an untrained one.
        batch_invariant: in the piece `parity`, matrix products give a row the same bits beside any others.
    """

    model: str
    device: str
    tiny: bool
    adapter: str | None
    batch_invariant: bool

    def adapter_in(self, out: Path) -> str | None:
        """The trained adapter, if there is one."""
        return self.adapter or (str(out / "adapter") if (out / "adapter" / "adapter_config.json").exists() else None)

    def load(self, out: Path, dtype: str) -> tuple[Any, Any, list[Prompt]]:
        """The model with its mask adapter, the tokenizer, and 200 prompts that any model can read."""
        if adapter := self.adapter_in(out):
            model, tokenizer = load_adapted(self.model, adapter, dtype=dtype, device=self.device)
        else:
            model = load_model(self.model, dtype=dtype, device=self.device)
            tokenizer = load_tokenizer(self.model)
            add_mask_adapter(model)
        tasks = read_tasks(NANO)
        some = tasks[:: len(tasks) // 200][:200]
        return model.eval(), tokenizer, [replace(encode_prompt(model, tokenizer, one), task="all") for one in some]


def adapting(job: Job, out: Path) -> Parts:
    """`wedlm adapt`, with its curve. It goes on by itself where it was stopped."""
    small: Result = {"rank": 2, "head_width": 8, "minutes": 0.05, "prompts": NANO / "tasks.jsonl"}
    config = AdaptConfig(**{"minutes": ADAPT_MINUTES, "device": job.device} | (small if job.tiny else {}))
    yield "adapter", lambda: adapt(job.model, out / "adapter", config)


def answers(job: Job, out: Path, lots: list[tuple[str, str, int, int, int]]) -> Parts:
    """AR and verified decoding in turn. A lot: dtype, attention, prompts at a time and in all, tokens of an answer."""
    load, warm = functools.lru_cache(1)(job.load), set[tuple[Any, ...]]()

    def part(lot: tuple[str, str, int, int, int], first: int) -> Result:
        dtype, attention, size, count, limit = lot
        model, tokenizer, prompts = load(out, dtype)
        model.set_attn_implementation(attention)
        shared = {"max_new_tokens": limit, "do_sample": False, "repetition_penalty": 1.0}
        decoders = {name: {**DECODERS[name], **shared} for name in (AR, EXACT)}
        batch = range(first, min(first + size, count))
        if lot not in warm:
            take_turns(model, tokenizer, prompts, decoders, batch)
        warm.add(lot)
        rows = take_turns(model, tokenizer, prompts, decoders, batch)
        pairs = zip(rows[: len(batch)], rows[len(batch) :], strict=True)
        gaps = [gap(model, list(prompts[ar["prompt"]].tokens), ar["tokens"], own["tokens"]) for ar, own in pairs]
        kept = [{name: row[name] for name in KEPT} for row in rows]
        adapter = job.adapter_in(out) or "untrained"
        return {"rows": kept, "gaps": gaps, "adapter": adapter, "environment": environment(model)}

    for lot in lots:
        lot = (*lot[:3], lot[2], 8) if job.tiny else lot
        for first in range(0, lot[3], lot[2]):
            yield f"{lot[0]}, {lot[1]}, {lot[2]} at a time, {first}", functools.partial(part, lot, first)


def gap(model: Any, prompt: list[int], answer: list[int], other: list[int]) -> float:
    """Between the logits of two tokens where answers part, 0 being a tie; 0 for equal answers."""
    place = next((at for at, pair in enumerate(zip(answer, other, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return 0.0
    logits = ar_logits(model, prompt, answer[: place + 1])[-1]
    return abs(float(logits[answer[place]] - logits[other[place]]))


def parity(job: Job, out: Path) -> Parts:
    """Answers in float32 and in bfloat16: 200, 8 at a time, or 48 alone, whose rows attend alone, too, where products
    are batch-invariant."""
    size, count = (1, 48) if job.batch_invariant else (8, 200)
    for name, part in answers(job, out, [(dtype, "sdpa", size, count, 64) for dtype in ("float32", "bfloat16")]):
        yield name, functools.partial(batch_invariant, part) if job.batch_invariant else part


def batch_invariant(part: Callable[[], Result]) -> Result:
    """Does a part with the matrix products of batch_invariant_ops, which take the place of aten's."""
    from batch_invariant_ops import set_batch_invariant_mode

    with set_batch_invariant_mode():
        return {**part(), "batch_invariant": True}


def batches(job: Job, out: Path) -> Parts:
    """Speed by batch size, in bfloat16."""
    return answers(job, out, [("bfloat16", "sdpa", size, max(size, 8), 96) for size in (1, 4, 16, 64)])


def attention(job: Job, out: Path) -> Parts:
    """Each implementation, a prompt at a time: others than sdpa and eager take no batches."""
    names = ["sdpa", "eager", "flex_attention", "flash_attention_2"]
    if job.tiny:
        names.remove("flex_attention")  # which is compiled for minutes
    return answers(job, out, [("bfloat16", name, 1, 8, 64) for name in names])


def forwards(job: Job, out: Path) -> Parts:
    """t(n): a forward of n rows behind 256 cached tokens, medians."""

    def part(dtype: str) -> Result:
        model, *_ = job.load(out, dtype)
        ids = torch.randint(model.config.vocab_size, (1, 256), device=model.device)
        cache, counts = DynamicCache(), ROWS[:4] if job.tiny else ROWS
        with torch.no_grad():
            model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            with ForwardCounter(model) as counter:
                for count in counts * (3 if job.tiny else 12):
                    model(ids[:, :count], **{CACHE: cache}, use_cache=True)
                    cache.crop(-count)
        taken: dict[int, list[float]] = {count: [] for count in counts}
        for (_, count), seconds in zip(counter.shapes, counter.spans, strict=True):
            taken[count].append(1000 * seconds)
        return {"ms": {count: median(times[1:]) for count, times in taken.items()}, "environment": environment(model)}

    return ((dtype, functools.partial(part, dtype)) for dtype in ("bfloat16", "float32"))


def static(job: Job, out: Path) -> Parts:
    """Fixed shapes and compiled steps: CUDA graphs on a GPU. No hooks, which would be compiled with the model."""
    load = functools.cache(job.load)

    def part(size: int, decoder: str, fixed: bool) -> Result:
        model, tokenizer, prompts = load(out, "bfloat16")
        options: Result = {**DECODERS[decoder], "do_sample": False, "repetition_penalty": 1.0}
        options["max_new_tokens"] = 8 if job.tiny else 64
        if fixed:
            options["cache_implementation"] = "static"
        if fixed and job.tiny:
            options["compile_config"] = CompileConfig(backend="eager", mode=None)
            options["compile_config"]._compile_all_devices = True
        tokens = [list(one.tokens) for one in prompts[:size]]
        inputs, ends = pad_left(tokens, 0, model.device), model.generation_config.eos_token_id
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        marks = [now(model)]
        for _ in range(2 if job.tiny else 4):  # the first ones compile
            output = model.generate(**inputs, **options)
            marks.append(now(model))
        counters = torch._dynamo.utils.counters
        counted = {"frames": counters["frames"]["ok"], "graph_breaks": sum(counters["graph_break"].values())}
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        found = [until_end(row, ends if isinstance(ends, list) else [ends], tokenizer.pad_token_id) for row in rows]
        times = {"first_seconds": marks[1] - marks[0], "seconds": marks[-1] - marks[-2]}
        return {"tokens": found, **times, **counted, "environment": environment(model)}

    for size in (1, 8):
        for name in (AR, EXACT):
            yield f"{size} at a time, {name}, plain", functools.partial(part, size, name, False)
            yield f"{size} at a time, {name}, compiled", functools.partial(part, size, name, True)


def training(job: Job, out: Path) -> Parts:
    """Dual-stream training beside the dense form, with random weights."""

    def part(name: str) -> Result:
        model = random_model(SMALL if job.tiny else SHAPES["qwen3-0.6b"]).to(job.device).train()
        model = model if job.tiny else model.bfloat16()  # in which many CPUs are slow
        return {"forms": compare(model, *((1, 1) if job.tiny else (2, 5)), name), "environment": environment(model)}

    names = ("sdpa",) if job.device == "cpu" else ("sdpa", "flex_attention")  # which has no gradients on a CPU
    return ((name, functools.partial(part, name)) for name in names)


def fsdp(job: Job, out: Path) -> Parts:
    """Ten steps of wedlm-nano by one process: alone, by transformers' FSDP2, by accelerate's."""
    words = f"--model_name_or_path {NANO} --dataset {out / 'chats.jsonl'} --max_steps {2 if job.tiny else 10}"
    words += " --block_size 8 --bf16 false --logging_steps 1 --gradient_accumulation_steps 1 --save_strategy no"
    words += f" --disable_tqdm true --learning_rate 1e-4 --use_cpu {str(job.device == 'cpu').lower()}"
    launch, config = "-m torch.distributed.run --standalone --nproc-per-node=1", "examples/distributed/fsdp2.yaml"
    accelerate = f"-m accelerate.commands.launch --config_file={ROOT / config} --num_processes=1 --mixed_precision=no"
    sharded = ["--model_init_kwargs", json.dumps({"distributed_config": {"fsdp_size": 1}})]
    ways: dict[str, tuple[str, list[str]]] = {"one process": ("", []), "FSDP2 of transformers": (launch, sharded)}
    if job.device != "cpu":  # where accelerate would train without it, and say nothing
        ways["FSDP2 of accelerate"] = accelerate, []

    def part(name: str, before: str, behind: list[str]) -> Result:
        turns = [[*one.messages, {"role": "assistant", "content": one.answers[0]}] for one in read_tasks(NANO)[::10]]
        write_text(out / "chats.jsonl", "".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
        place = out / "fsdp" / name.replace(" ", "-")
        ran([*before.split(), "-m", "wedlm_hf.training.train", *words.split(), f"--output_dir={place}", *behind])
        log = json.loads((place / "trainer_state.json").read_text())["log_history"]
        return {"losses": [entry["loss"] for entry in log if "loss" in entry]}

    return ((name, functools.partial(part, name, *way)) for name, way in ways.items())


def vllm(job: Job, out: Path) -> Parts:
    """AR and verified decoding on vLLM's engine, where this Python has it."""

    def part() -> Result:
        if importlib.util.find_spec("vllm") is None:
            return {"output": "vLLM was not installed.\n"}
        words = f"--dtype bfloat16 --requests 64 --max-tokens 96 --kv-cache-memory-bytes {2 << 30}".split()
        words += ["--model", job.model, *(["--mask-adapter", adapter] if (adapter := job.adapter_in(out)) else [])]
        return {"output": ran([str(ROOT / "benchmarks" / "vllm_decoders.py"), *words])}

    yield "vllm", part


def ran(words: list[str]) -> str:
    """What Python prints, run with these words. Raises `RuntimeError` with its last lines if it fails."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return done.stdout


PIECES: dict[str, Callable[[Job, Path], Parts]] = {
    "adapt": adapting, "parity": parity, "forwards": forwards, "attention": attention, "static": static,
    "batches": batches, "training": training, "fsdp": fsdp, "vllm": vllm,
}  # fmt: skip


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    model: Annotated[str, typer.Option(help="Folder of a causal model, such as Qwen3-0.6B's.")] = str(NANO),
    adapter: Annotated[str | None, typer.Option(help="Folder of its mask adapter; else that of `adapt`.")] = None,
    device: str = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="Little of everything, to see that it runs.")] = False,
    minutes: Annotated[float, typer.Option(help="After which no piece goes on.")] = 25.0,
    pieces: Annotated[str, typer.Option(help="With commas.")] = ",".join(PIECES),
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="`parity` with the products of batch_invariant_ops.")
    ] = False,
    page: Annotated[Path | None, typer.Option(help="Markdown file to be written with the tables.")] = None,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Do what is missing, or write a page of what there is."""
    job, deadline = Job(model, device, tiny, adapter, batch_invariant), time.monotonic() + 60 * minutes
    if page is not None:
        made = tables({name: read(out, name) for name in PIECES})
        write_text(page, "\n".join(f"## {name}\n\n{PIECES[name].__doc__}\n\n{table}" for name, table in made.items()))
        return
    if one:
        disable_progress_bar()
        do_parts(out, one, asdict(job), PIECES[one](job, out))
        return
    if not Path(model).is_dir():
        raise typer.BadParameter(f"`--model` takes a folder, got {model!r}: nothing is downloaded.")
    if batch_invariant and importlib.util.find_spec("batch_invariant_ops") is None:
        raise typer.BadParameter(
            "`--batch-invariant` needs the package batch_invariant_ops, which is on no index: "
            "pip install git+https://github.com/thinking-machines-lab/batch_invariant_ops"
        )
    for name in pieces.split(","):
        left = min(MOST_SECONDS, deadline - time.monotonic())
        stored = read(out, name)
        if left <= 0 or (stored.get("is_complete") and stored["job"] == asdict(job)):
            print(f"{name}: {'done before' if left > 0 else 'no time is left: the same call goes on'}", flush=True)
            continue
        with subprocess.Popen([sys.executable, *sys.argv, "--one", name], start_new_session=True) as process:
            try:
                process.wait(left)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise


if __name__ == "__main__":
    typer.run(main)
