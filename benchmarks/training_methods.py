"""Ways to train a mask adapter, in small equal trials: same answers, same number of mask rows, some seeds.

    python benchmarks/training_methods.py train default BASE ANSWERS.jsonl build/default
    python benchmarks/training_methods.py train wide-head BASE ANSWERS.jsonl build/wide --seed 1 --mask-rows 40000
    python benchmarks/training_methods.py table build/default build/wide
    python benchmarks/training_methods.py replay BASE examples/smollm2/prompts-heldout.jsonl examples/smollm2

ANSWERS are the base's own (`wedlm adapt` leaves them in `work/answers.jsonl`). Every tenth greedy answer is held out;
what a way is worth is tokens per forward on these, by the replay of `adapters/evaluation.py`. A trial that was stopped
goes on. Seconds are those of the process, which other programs disturb less than the clock. `replay` measures finished
adapters in the same way, on the base's answers to questions.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from wedlm_hf.adapters.answers import read_answers
from wedlm_hf.adapters.attach import add_mask_adapter, save_mask_adapter
from wedlm_hf.adapters.budget import MaskTrainingConfig
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.evaluation import measure_acceptance
from wedlm_hf.adapters.layout import AnswerTokens
from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.adapters.trainer import MaskAdapterTrainer
from wedlm_hf.checkpoints.files import write_text
from wedlm_hf.checkpoints.loading import load_model
from wedlm_hf.eval.prompts import encode_prompt, read_prompts

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "wide-head": {"head_width": 1920},
    # Of a model of 30 layers: 22 updates in place of 60.
    "upper-layers": {"target_modules": ("down_proj",), "layers_to_transform": tuple(range(8, 30))},
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)


@app.command()
def train(
    way: Annotated[str, typer.Argument(help=f"One of {', '.join(WAYS)}.")],
    base: str,
    answers: Path,
    out: Path,
    mask_rows: int = 100_000,
    batch_slots: Annotated[int, typer.Option(help="Masks of an optimizer step, about.")] = 400,
    learning_rate: float = 1e-3,
    seed: int = 0,
    threads: int = 1,
    dtype: str = "float32",
) -> None:
    """Train in one way and measure; what was found is in OUT/result.json."""
    if way not in WAYS:
        raise typer.BadParameter(f"WAY is one of {', '.join(WAYS)}, got {way!r}.")
    torch.set_num_threads(threads)
    found = read_answers(answers)
    held_out = [answer for answer in found if answer["greedy"]][::10]
    prompts = {tuple(answer["prompt_ids"]) for answer in held_out}
    trained_on = [answer for answer in found if tuple(answer["prompt_ids"]) not in prompts]
    model: Any = load_model(base, dtype=dtype)
    torch.manual_seed(seed)
    add_mask_adapter(model, MaskAdapterSettings(**WAYS[way]))
    args = MaskTrainingConfig(
        output_dir=str(out),
        mask_rows=mask_rows,
        batch_slots=batch_slots,
        learning_rate=learning_rate,
        seed=seed,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = MaskAdapterTrainer(model, args, trained_on, held_out, clock=time.process_time)
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")) or None)
    save_mask_adapter(model, out)
    curve = [entry for entry in trainer.state.log_history if "eval_tokens_per_forward_branch_4" in entry]
    result = {
        "way": way,
        "mask_rows": trainer.budget.mask_rows,
        "seconds": trainer.budget.seconds,
        "passes": trainer.state.epoch,
        "parameters": sum(parameter.numel() for parameter in model.mask_adapter.parameters()),
        "tokens": curve[-1]["eval_tokens"],
        "tokens_per_forward": [curve[-1][f"eval_tokens_per_forward_branch_{drafts}"] for drafts in (1, 2, 3, 4)],
    }
    write_text(out / "result.json", json.dumps(result, indent=2) + "\n")
    table([out])


@app.command()
def replay(base: str, prompts: Path, adapters: list[str], max_new_tokens: int = 96, dtype: str = "float32") -> None:
    """Print tokens per forward of adapters with a fixed number of drafts as a Markdown table."""
    answers: list[AnswerTokens] = []
    found = []
    model, tokenizer = load_adapted(base, adapters[0], dtype=dtype)
    for question in read_prompts(prompts.name, prompts.read_text(encoding="utf-8")):
        prompt = encode_prompt(model, tokenizer, question).tokens
        how = {"strategy": "ar", "do_sample": False, "max_new_tokens": max_new_tokens}
        (text,) = model.generate(torch.tensor([prompt]), **how).tolist()
        answers.append({"prompt_ids": prompt, "response_ids": text[len(prompt) :]})
    for adapter in adapters:
        model, _ = load_adapted(base, adapter, dtype=dtype)
        tokens, forwards = measure_acceptance(MaskDistillation(model), answers)
        rates = {f"{kind} {drafts}": tokens / count for (kind, drafts), count in forwards.items()}
        found.append({"adapter": adapter, "tokens": tokens} | rates)
    print(pd.DataFrame(found).round(3).to_markdown(index=False))


@app.command()
def table(trials: list[Path]) -> None:
    """Print the results of some trials as a Markdown table."""
    columns = ("way", "mask rows", "passes", "rows/s", "parameters", *(f"{n} drafts" for n in (1, 2, 3, 4)))
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for trial in trials:
        one = json.loads((trial / "result.json").read_text())
        rates = [f"{rate:.3f}" for rate in one["tokens_per_forward"]]
        speed = f"{one['mask_rows'] / one['seconds']:.0f}"
        cells = [one["way"], f"{one['mask_rows']:,}", f"{one['passes']:.1f}", speed, f"{one['parameters']:,}", *rates]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    app()
