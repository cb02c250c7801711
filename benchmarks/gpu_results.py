"""What `gpu_hour.py` stores, part by part, and the tables that are made of it."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from wedlm_hf.checkpoints.files import write_text
from wedlm_hf.eval.table import SHORT, TITLES, as_markdown, cells, mark_same, summarise

Result = dict[str, Any]
Parts = Iterator[tuple[str, Callable[[], Result]]]
Lines = Iterator[dict[str, Any]]


def read(out: Path, piece: str) -> Result:
    """What there is of a piece: `job`, `is_complete`, and `parts` by name. Empty: nothing."""
    file = out / f"{piece}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def do_parts(out: Path, piece: str, job: Result, todo: Parts) -> None:
    """Does the parts of a piece that are missing, and then those that failed. All is stored after each.

    Raises:
        ValueError: if `out` holds results of another job.
    """
    stored: Result = {"job": job, "is_complete": False, "parts": {}} | read(out, piece)
    if stored["job"] != job:
        raise ValueError(f"{str(out)!r} holds results of {stored['job']}, not {job}: choose another `--out`.")
    parts, work = stored["parts"], dict(todo)
    for name in sorted(work, key=lambda name: name in parts):
        if "error" not in parts.get(name, {"error": ""}):
            continue
        parts[name] = {"error": "It did not end: it crashed, or its time was over."}
        write_text(out / f"{piece}.json", json.dumps(stored, indent=1) + "\n")
        began = time.perf_counter()
        try:
            parts[name] = work[name]()
        except Exception as error:  # the next part may do
            parts[name] = {"error": f"{type(error).__name__}: {error}"}
        parts[name]["part_seconds"] = time.perf_counter() - began
        stored["is_complete"] = not any("error" in parts.get(other, {"error": ""}) for other in work)
        write_text(out / f"{piece}.json", json.dumps(stored, indent=1) + "\n")
        print(f"{piece}: {name}: {parts[name].get('error', 'done')}", flush=True)


def tables(pieces: Mapping[str, Result]) -> dict[str, str]:
    """A table for each piece, as Markdown, and where and when it is not whole, what failed."""
    return {name: _table(stored, LINES.get(name, _answers)) for name, stored in pieces.items()}


def _table(stored: Result, lines_of: Callable[[Result], Lines]) -> str:
    if not stored:
        return "Not run yet.\n"
    job, parts = stored["job"], {name: part for name, part in stored["parts"].items() if "error" not in part}
    where = next((part["environment"] for part in parts.values() if "environment" in part), {})
    words = [Path(job["model"]).name, where.get("device", job["device"]), f"torch {where['torch']}" if where else ""]
    words += ["adapter not trained"] * any(part.get("adapter") == "untrained" for part in parts.values())
    words += ["batch-invariant products"] * any(part.get("batch_invariant") for part in parts.values())
    words += ["tiny: no measurement"] * job["tiny"] + ["**not whole**"] * (not stored["is_complete"])
    failed = [f"- {name}: {_short(part['error'])}" for name, part in stored["parts"].items() if "error" in part]
    made = as_markdown(pd.DataFrame(lines_of(parts)).fillna("–").astype(str)) if parts else ""
    return "\n".join([made, ", ".join(filter(None, words)) + ".", *(["", "Failed:", "", *failed] * bool(failed)), ""])


def _short(error: str) -> str:
    return " ".join(error.split())[-200:]


def _adapter(parts: Result) -> Lines:
    for part in parts.values():
        acceptance = part["acceptance"]
        for row in acceptance["rows"]:
            yield dict(zip(acceptance["columns"], row, strict=True))
        if not acceptance["rows"]:
            yield {"mask rows": part["mask_rows"], "tokens per forward": "not measured in so short a time"}


def _answers(parts: Result) -> Lines:
    for lot, group in groupby(parts.items(), lambda item: item[0].rpartition(", ")[0]):
        found = [part for _, part in group]
        measured = pd.DataFrame([row | {"repeat": 0} for part in found for row in part["rows"]])
        gaps = [gap for part in found for gap in part["gaps"]]
        made = cells(summarise(mark_same(measured), SHORT), SHORT)
        for decoder, line in made.iterrows():
            yield (
                {"decoder": decoder, "lot": lot, "answers": len(gaps)}
                | {TITLES[name]: line[name] for name in SHORT}
                | {"widest gap where they part": f"{max(gaps):.2g}" if decoder != "ar" else "–"}
            )


def _forwards(parts: Result) -> Lines:
    for dtype, part in parts.items():
        yield {"ms of n rows": dtype} | {count: f"{ms:.2f}" for count, ms in part["ms"].items()}


def _static(parts: Result) -> Lines:
    for name, part in parts.items():
        reference = parts.get(f"{name.split(', ')[0]}, ar, plain", part)["tokens"]
        same = sum(one == other for one, other in zip(part["tokens"], reference, strict=True))
        yield {
            "decoding": name, "first call, s": f"{part['first_seconds']:.2f}",
            "last call, s": f"{part['seconds']:.2f}",
            "tokens/s": f"{sum(map(len, part['tokens'])) / part['seconds']:.0f}",
            "same answers": f"{same} of {len(reference)}", "compiled frames": part["frames"],
            "graph breaks": part["graph_breaks"],
        }  # fmt: skip


def _training(parts: Result) -> Lines:
    for name, part in parts.items():
        for form, numbers in part["forms"].items():
            peak = f"{numbers['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in numbers else "–"
            yield {
                "attention": name if form == "ours" else "sdpa", "form": form, "loss": f"{numbers['loss']:.3f}",
                "tokens/s": f"{numbers['tokens_per_second']:,.0f}", "peak MiB": peak,
            }  # fmt: skip


def _fsdp(parts: Result) -> Lines:
    reference = next(iter(parts.values()))["losses"]
    for name, part in parts.items():
        losses = part["losses"]
        apart = max(abs(one - other) / other for one, other in zip(losses, reference, strict=True))
        ends = {f"{which} loss": f"{losses[place]:.6g}" for which, place in (("first", 0), ("last", -1))}
        yield {"way": name} | ends | {"largest relative difference": f"{apart:.1g}"}


def _vllm(parts: Result) -> Lines:
    for part in parts.values():
        rows = [line.strip("| ").split(" | ") for line in part["output"].splitlines() if line.startswith("| ")]
        for row in rows[1:]:
            yield dict(zip(rows[0], row, strict=True))
        if not rows:
            yield {"vLLM": part["output"]}


LINES: dict[str, Callable[[Result], Lines]] = {
    "adapt": _adapter, "forwards": _forwards, "static": _static, "training": _training, "fsdp": _fsdp, "vllm": _vllm,
}  # fmt: skip
