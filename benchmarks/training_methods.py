"""Ways to train a mask adapter, in small equal trials: same answers, same number of mask rows, some seeds.

    python benchmarks/training_methods.py train default BASE ANSWERS.jsonl build/default
    python benchmarks/training_methods.py train annealed BASE ANSWERS.jsonl build/annealed --seed 1 --mask-rows 40000
    python benchmarks/training_methods.py table build/default build/annealed

ANSWERS are the base's own (`wedlm adapt` leaves them in `work/answers.jsonl`). Every tenth greedy answer is held out;
what a way is worth is tokens per forward on these, by the replay of `adapters/evaluation.py`, and by generation with
trees of up to 12 drafts. A trial that was stopped goes on. Seconds are those of the process, which other programs
disturb less than the clock.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import TrainerCallback

from wedlm_hf.adapters.answers import read_answers
from wedlm_hf.adapters.attach import add_mask_adapter, save_mask_adapter
from wedlm_hf.adapters.budget import MaskTrainingConfig
from wedlm_hf.adapters.distillation import Predicted, soft_cross_entropy
from wedlm_hf.adapters.layout import AnswerTokens
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.adapters.trainer import MaskAdapterTrainer
from wedlm_hf.checkpoints.files import write_text
from wedlm_hf.checkpoints.loading import load_model


@dataclass(frozen=True)
class Way:
    """One way to train: the shape of the adapter, and what else is changed of the training."""

    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[MaskAdapterTrainer], None] | None = None
    share: float = 1.0  # of the answers


def pace(trainer: MaskAdapterTrainer) -> None:
    """Cross-entropy, times what a right mask adds to the expected number of accepted drafts: the sum, over all depths
    from its own on, of the chances to get there (D-PACE, arXiv 2605.18810). No other weights of depths."""
    distillation, found = trainer.model, dict[str, torch.Tensor]()

    def note(module: nn.Module, args: Any, inputs: dict[str, torch.Tensor]) -> None:
        found["counted"] = inputs["labels"] != -100

    def loss(predicted: Predicted) -> torch.Tensor:
        counted, likeliest = found["counted"], predicted.targets.argmax(-1, keepdim=True)
        chances = (predicted.logits.gather(-1, likeliest)[:, 0] - predicted.log_sums).detach().exp()
        grid = torch.zeros(counted.shape, device=counted.device).masked_scatter(counted, chances)
        added = (0.5 + 0.5 * grid).masked_fill(~counted, 0).cumprod(-1).flip(-1).cumsum(-1).flip(-1)
        return added[counted] * soft_cross_entropy(predicted)

    distillation.register_forward_pre_hook(note, with_kwargs=True)
    distillation.loss = loss
    distillation.depth_weights.fill_(1.0)


class _Annealed(TrainerCallback):
    def __init__(self, trainer: MaskAdapterTrainer):
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.model.plain_weight = 1 - self.trainer.budget.progress(self.trainer.args)


def annealed(trainer: MaskAdapterTrainer) -> None:
    """The loss without the previous-token head weighs 1 at first and 0 in the end (arXiv 2605.29707)."""
    trainer.add_callback(_Annealed(trainer))


def weighted(weigh: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[MaskAdapterTrainer], None]:
    """Cross-entropy, times a weight of each of the base's distributions `(N, S)`; the mean weight is 1."""

    def prepare(trainer: MaskAdapterTrainer) -> None:
        def loss(predicted: Predicted) -> torch.Tensor:
            weights = weigh(predicted.targets)
            return weights / weights.mean().clamp(min=1e-6) * soft_cross_entropy(predicted)

        trainer.model.loss = loss

    return prepare


def head_rate(factor: float) -> Callable[[MaskAdapterTrainer], None]:
    """A learning rate of its own for the previous-token head."""

    def prepare(trainer: MaskAdapterTrainer) -> None:
        args, adapter = trainer.args, trainer.model.model.mask_adapter
        head = list(adapter.head.parameters())
        others = [each for each in adapter.parameters() if all(each is not own for own in head)]
        trainer.optimizer = torch.optim.AdamW(
            [{"params": others}, {"params": head, "lr": factor * args.learning_rate}],
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.weight_decay,
        )

    return prepare


class _Muon(torch.optim.AdamW):
    """Muon (Jordan, 2024) for stacks of matrices, with updates of AdamW's size; AdamW for all else."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step."""
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.ndim > 1 and each.grad is not None):
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.05)
                update = _orthogonal(parameter.grad.lerp(momentum, 0.95))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * max(parameter.shape[-2:]) ** 0.5 * group["lr"])
                parameter.grad = None
        return super().step(closure)


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest half-orthogonal matrices, about, by five Newton-Schulz steps."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if is_tall else matrices
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = found @ found.mT
        found = 3.4445 * found + (-4.7750 * square + 2.0315 * square @ square) @ found
    return found.mT if is_tall else found


def muon(trainer: MaskAdapterTrainer) -> None:
    """Muon in place of AdamW."""
    args, adapter = trainer.args, trainer.model.model.mask_adapter
    trainer.optimizer = _Muon(
        adapter.parameters(),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.weight_decay,
    )


WAYS = {
    "default": Way(),
    # Fewer answers, seen more often.
    "quarter": Way(share=0.25),
    "fast-head": Way(prepare=head_rate(3.0)),
    "faster-head": Way(prepare=head_rate(8.0)),
    "slow-head": Way(prepare=head_rate(0.3)),
    "muon": Way(prepare=muon),
    # Distributions that are hard to learn count more, or not at all.
    "flat": Way(prepare=weighted(lambda targets: 0.5 - (targets * targets.clamp(min=1e-9).log()).sum(-1))),
    "easy": Way(prepare=weighted(lambda targets: (targets.amax(-1) > 0.3).float())),
    "pace": Way(prepare=pace),
    "annealed": Way(prepare=annealed),
    "wide-head": Way(settings={"head_width": 1920}),
    # Of a model of 30 layers: 22 updates in place of 60.
    "upper-layers": Way(settings={"target_modules": ("down_proj",), "layers_to_transform": tuple(range(8, 30))}),
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
    trees: Annotated[bool, typer.Option(help="Generate with trees, too: some minutes more.")] = True,
) -> None:
    """Train in one way and measure; what was found is in OUT/result.json."""
    if way not in WAYS:
        raise typer.BadParameter(f"WAY is one of {', '.join(WAYS)}, got {way!r}.")
    torch.set_num_threads(threads)
    chosen, found = WAYS[way], read_answers(answers)
    held_out = [answer for answer in found if answer["greedy"]][::10]
    prompts = {tuple(answer["prompt_ids"]) for answer in held_out}
    trained_on = [answer for answer in found if tuple(answer["prompt_ids"]) not in prompts]
    trained_on = trained_on[: round(chosen.share * len(trained_on))]
    model: Any = load_model(base, dtype=dtype)
    torch.manual_seed(seed)
    add_mask_adapter(model, MaskAdapterSettings(**chosen.settings))
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
    if chosen.prepare is not None:
        chosen.prepare(trainer)
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
        "with_trees": with_trees(model, held_out) if trees else None,
    }
    write_text(out / "result.json", json.dumps(result, indent=2) + "\n")
    table([out])


def with_trees(model: Any, answers: list[AnswerTokens]) -> float:
    """Tokens per forward of verified decoding where rows cost nothing, so that each step checks up to 12 drafts."""
    verified = {"strategy": "wedlm", "verification": "exact", "slot_cost": 0.0, "do_sample": False}
    forwards = 0
    for answer in answers:
        prompt, count = torch.tensor([answer["prompt_ids"]], device=model.device), len(answer["response_ids"])
        output = model.generate(prompt, **verified, max_new_tokens=count, return_dict_in_generate=True)
        forwards += int(output.stats.forwards.sum())
    return sum(len(answer["response_ids"]) for answer in answers) / forwards


@app.command()
def table(trials: list[Path]) -> None:
    """Print the results of some trials as a Markdown table."""
    columns = ("way", "mask rows", "passes", "rows/s", "parameters", *(f"{n} drafts" for n in (1, 2, 3, 4)), "trees")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for trial in trials:
        one = json.loads((trial / "result.json").read_text())
        rates = [f"{rate:.3f}" if rate else "" for rate in (*one["tokens_per_forward"], one["with_trees"])]
        speed = f"{one['mask_rows'] / one['seconds']:.0f}"
        cells = [one["way"], f"{one['mask_rows']:,}", f"{one['passes']:.1f}", speed, f"{one['parameters']:,}", *rates]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    app()
