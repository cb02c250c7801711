"""Which road for which budget: two fine-tunes of SmolLM2-135M-Instruct, decoded in all ways that there are.

    python examples/real-wedlm/compare.py --task extraction --count 40 --seed 1
    python examples/real-wedlm/compare.py --task reasoning --count 300 --json > reasoning.json
    python examples/real-wedlm/compare.py --draw extraction.json reasoning.json

Both fine-tunes have the same base, data and rank of LoRA. `sft` is TRL's: `sft ar` is plain `generate`,
`sft+adapter exact` with the mask adapter of examples/smollm2, which was never trained for it. `wedlm` is trained by
dual-stream masking: `ar`, `exact` (verified, AR's own text, with the mask adapter that was trained on its masks),
`masks exact` (verified, without the adapter), `block` and `none` (unverified, in a stream).

What is published beside this file (`wedlm`, `adapter`) is decoded, or with `--run` each fine-tune that train.py wrote
into a folder. Problems that are decoded never occurred in training. An extraction is right if its JSON has the wanted
value, a solution if its last number has.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from rich.console import Console
from rich.table import Table

from wedlm_hf import load_mask_adapter
from wedlm_hf.checkpoints.find import ADAPTER_FILE
from wedlm_hf.checkpoints.loading import FASTEST, load_model, load_tokenizer
from wedlm_hf.eval.compare import compare
from wedlm_hf.eval.decoders import AR, BLOCK, DECODERS, EXACT, WEDLM
from wedlm_hf.eval.prompts import Prompt

HERE = Path(__file__).parent
sys.path.append(str(HERE))
import data  # noqa: E402
from train import METHODS, PUBLISHED, whole_model  # noqa: E402

BUNDLED = HERE.parent / "smollm2"  # mask adapter of the base
METRICS = {"extraction": "json", "reasoning": "number"}
LONGEST = 320  # new tokens: no answer is longer
THRESHOLDS, PENALTIES = (0.05, 0.2, 0.4), (0.02, 0.1)  # τ in nats, λ in nats per position
SHOWN = {"decoder": "decoder", "right": "right, %", "tokens_per_forward": "tokens per forward"}
SHOWN |= {"tokens_per_second": "tokens per second"}


def decoders(methods: Sequence[str], has_adapter: bool) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by name; `model` among them, by the name that [`load`] knows."""
    found: dict[str, dict[str, Any]] = {}
    if "sft" in methods:
        found["sft ar"] = {"model": "sft"}  # a stock class, which knows no strategy
        found["sft+adapter exact"] = {"model": "sft+adapter", **DECODERS[EXACT]}
    if "wedlm" in methods:
        found["wedlm ar"] = {"model": "wedlm", **DECODERS[AR]}
        found["wedlm exact"] = {"model": "wedlm+adapter" if has_adapter else "wedlm", **DECODERS[EXACT]}
        if has_adapter:
            found["wedlm masks exact"] = {"model": "wedlm", **DECODERS[EXACT]}
        middle = {"entropy_threshold": THRESHOLDS[1], "distance_penalty": PENALTIES[0]}
        found["wedlm block"] = {"model": "wedlm", **DECODERS[BLOCK], **middle}
        for tau, penalty in product(THRESHOLDS, PENALTIES):
            settings = {"entropy_threshold": tau, "distance_penalty": penalty}
            found[f"wedlm none τ={tau:g} λ={penalty:g}"] = {"model": "wedlm", **DECODERS[WEDLM], **settings}
    return found


def load(names: Iterable[str], run: Path | None, dtype: str) -> tuple[dict[str, Any], Any]:
    """The models by name, and their tokenizer."""
    loras, found, tokenizer = run or HERE, {}, None
    for name in sorted(set(names)):
        method, _, has_adapter = name.partition("+")
        path = str(whole_model(method, loras / method, run or PUBLISHED))
        found[name] = load_model(path, dtype=dtype)
        tokenizer = tokenizer or load_tokenizer(path)
        if has_adapter:
            is_own = method == "wedlm"
            load_mask_adapter(found[name], loras / "adapter" if is_own else BUNDLED, any_base=not is_own)
    return found, tokenizer


def draw(found: list[list[dict[str, Any]]], file: Path) -> None:
    """Right answers against tokens per forward and per second, a row of panels for each task."""
    figure, panels = plt.subplots(len(found), 2, figsize=(11, 4.2 * len(found)), squeeze=False, layout="constrained")
    for rows, pair in zip(found, panels, strict=True):
        table = pd.DataFrame(rows)
        for panel, name in zip(pair, ("tokens_per_forward", "tokens_per_second"), strict=True):
            for kind, part in table.groupby(table["decoder"].str.replace(r" τ.*", "", regex=True), sort=False):
                panel.errorbar(
                    part[name], 100 * part["right"], 100 * part["right_error"].fillna(0).astype(float),
                    part[f"{name}_error"].fillna(0).astype(float), "o", label=kind, capsize=2,
                )  # fmt: skip
            panel.set(xlabel=name.replace("_", " "), ylabel="right answers, %", title=table["task"][0])
            panel.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=data.TASKS)
    parser.add_argument("--count", type=int, default=40, help="problems to decode")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--batch-size", type=int, default=1, help="problems that are decoded together")
    parser.add_argument("--only", nargs="+", metavar="DECODER", help="these rows of the table alone")
    parser.add_argument("--dtype", default=FASTEST, help="format of the weights; default: this machine's fastest")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--run", type=Path, help="a folder of train.py; default: the published LoRA")
    parser.add_argument("--draw", type=Path, nargs="+", help="draw what earlier calls printed with --json, and stop")
    options = parser.parse_args()
    if options.draw:
        picture = (options.run or PUBLISHED) / "compare.png"
        draw([json.loads(file.read_text(encoding="utf-8")) for file in options.draw], picture)
        print(f"Drawn in {picture}.")
        return
    if options.task is None:
        parser.error("--task is needed: extraction or reasoning")
    loras = options.run or HERE
    methods = [method for method in METHODS if (loras / method / ADAPTER_FILE).exists()]
    if not methods:
        command = f"python {Path(sys.argv[0]).with_name('train.py')} --output {loras}"
        raise OSError(f"There are no weights in {loras}: `{command}` trains them.")
    asked = decoders(methods, (loras / "adapter" / ADAPTER_FILE).exists())
    if unknown := [name for name in options.only or () if name not in asked]:
        parser.error(f"--only: there is no {unknown[0]!r}, but {', '.join(map(repr, asked))}")
    asked = {name: how for name, how in asked.items() if name in (options.only or asked)}
    data.check()
    problems = data.held_out_problems(options.task, options.count, options.seed)
    models, tokenizer = load((how["model"] for how in asked.values()), options.run, options.dtype)
    asked = {name: how | {"model": models[how["model"]]} for name, how in asked.items()}
    prompts = [Prompt(each.prompt, each.task, (each.answer,), METRICS[each.task]) for each in problems]
    title, size = f"{options.task} problems", options.batch_size
    rows = compare(next(iter(models.values())), tokenizer, prompts, asked, batch_size=size, title=title)
    rows = [{"task": options.task, "count": options.count, "seed": options.seed, **row} for row in rows]
    if options.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    table = Table(*SHOWN.values(), title=f"{options.count} held-out problems, {options.task}")
    for row in rows:
        cells = []
        for name in list(SHOWN)[1:]:
            scale, error = (100 if name == "right" else 1), row[f"{name}_error"]
            cells.append(f"{scale * row[name]:.3g}" + (f" ± {scale * error:.2g}" if error is not None else ""))
        table.add_row(row["decoder"], *cells)
    console = Console()
    console.print(table)
    for row in rows:
        if row["advice"]:
            console.print(f"{row['decoder']}: {row['advice']}", highlight=False)


if __name__ == "__main__":
    main()
