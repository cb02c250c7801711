"""Ways to train a mask adapter, in small equal trials: same answers, same seed, same number of mask rows.

    python benchmarks/training_methods.py train cross-entropy BASE ANSWERS.jsonl build/ce
    python benchmarks/training_methods.py train variation BASE ANSWERS.jsonl build/tv --mask-rows 100000
    python benchmarks/training_methods.py table build/ce build/tv

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

from wedlm_hf.adapters.answers import read_answers
from wedlm_hf.adapters.attach import add_mask_adapter
from wedlm_hf.adapters.budget import MaskTrainingConfig
from wedlm_hf.adapters.distillation import MaskDistillation, Predicted, soft_cross_entropy
from wedlm_hf.adapters.layout import AnswerTokens
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings, PreviousTokenHead
from wedlm_hf.adapters.trainer import MaskAdapterTrainer
from wedlm_hf.checkpoints.files import write_text
from wedlm_hf.checkpoints.loading import load_model

ALL_SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Way:
    """One way to train: the shape of the adapter, settings of the training, the loss of a mask, made for what trains,
    and the previous-token head, made of the hidden size and of its width."""

    settings: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Predicted], torch.Tensor] = soft_cross_entropy
    loss_of: Callable[[MaskDistillation], Callable[[Predicted], torch.Tensor]] | None = None
    head: Callable[[int, int], nn.Module] | None = None
    answers: int | None = None


def total_variation(predicted: Predicted) -> torch.Tensor:
    """`(N,)`, 0 to 1: the chance that a sampled draft is rejected, 1 − Σ min(p, q), over the likely candidates."""
    chances = (predicted.logits - predicted.log_sums[:, None]).exp()
    return 1 - torch.minimum(predicted.targets, chances)[:, predicted.shares == 0].sum(-1)


def mixed(predicted: Predicted) -> torch.Tensor:
    """Cross-entropy and total variation in equal parts."""
    return 0.5 * soft_cross_entropy(predicted) + 0.5 * total_variation(predicted)


def acceptance(predicted: Predicted) -> torch.Tensor:
    """−log of the chance that a sampled draft is accepted, and a little cross-entropy where that chance is small."""
    return -(1.01 - total_variation(predicted)).log() + 0.1 * soft_cross_entropy(predicted)


def second(predicted: Predicted) -> torch.Tensor:
    """Cross-entropy; and where the base's likeliest token is not the mask's, half of that token's own cross-entropy
    among all others but the mask's: trees draft a second candidate."""
    likeliest, first = predicted.targets.argmax(-1, keepdim=True), predicted.logits.argmax(-1, keepdim=True)
    others = (predicted.logits + predicted.shares).scatter(-1, first, float("-inf")).logsumexp(-1)
    missed = others - predicted.logits.gather(-1, likeliest)[:, 0]
    return soft_cross_entropy(predicted) + 0.5 * missed.masked_fill((first == likeliest)[:, 0], 0)


def by_confidence(distillation: MaskDistillation) -> Callable[[Predicted], torch.Tensor]:
    """Cross-entropy, times the chance that all masks before are right, by the adapter's own confidence."""
    found: dict[str, torch.Tensor] = {}

    def note(module: nn.Module, args: Any, inputs: dict[str, torch.Tensor]) -> None:
        found["counted"] = inputs["labels"] != -100

    def loss(predicted: Predicted) -> torch.Tensor:
        counted, likeliest = found["counted"], predicted.logits.detach().max(-1).values
        chances = torch.ones(counted.shape).masked_scatter(counted, (likeliest - predicted.log_sums.detach()).exp())
        reached = torch.cat([torch.ones_like(chances[..., :1]), chances[..., :-1].cumprod(-1)], dim=-1)
        return reached[counted] * soft_cross_entropy(predicted)

    distillation.register_forward_pre_hook(note, with_kwargs=True)
    return loss


class GatedHead(PreviousTokenHead):
    """A previous-token head whose hidden units are gated by the mask's state and the tokens before it."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__(hidden_size, width)
        self.gate = nn.Parameter(self.down.detach().flip(0).clone())

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """See the parent's."""
        scaled = previous.float() / previous.float().std(-1, keepdim=True).clamp(min=1e-6)
        rows = torch.cat([hidden.float(), scaled.flatten(-2)], dim=-1).to(self.down.dtype)
        inner = nn.functional.silu(nn.functional.linear(rows, self.gate)) * nn.functional.linear(rows, self.down)
        return hidden + nn.functional.linear(inner, self.up).to(hidden.dtype)


WAYS = {
    "cross-entropy": Way(),
    "variation": Way(loss=mixed),
    "acceptance": Way(loss=acceptance),
    "five-masks": Way(training={"num_masks": 5}),
    "rank-128": Way(settings={"rank": 128}),
    "all-targets": Way(settings={"rank": 16, "target_modules": ALL_SEVEN}),
    # Of a model of 30 layers: 22 updates in place of 60.
    "upper-layers": Way(settings={"target_modules": ("down_proj",), "layers_to_transform": tuple(range(8, 30))}),
    "small-steps": Way(training={"batch_slots": 200}),
    "few-answers": Way(answers=50),
    "by-confidence": Way(loss_of=by_confidence),
    "second": Way(loss=second),
    "gated-head": Way(settings={"head_width": 480}, head=GatedHead),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)


@app.command()
def train(
    way: Annotated[str, typer.Argument(help=f"One of {', '.join(WAYS)}.")],
    base: str,
    answers: Path,
    out: Path,
    mask_rows: int = 100_000,
    learning_rate: float = 1e-3,
    seed: int = 0,
    threads: int = 1,
    dtype: str = "float32",
    also: Path | None = None,
) -> None:
    """Train in one way and measure; what was found is in OUT/result.json. Answers of ALSO take the place of half of
    those that are trained on."""
    if way not in WAYS:
        raise typer.BadParameter(f"WAY is one of {', '.join(WAYS)}, got {way!r}.")
    torch.set_num_threads(threads)
    chosen, found = WAYS[way], read_answers(answers)
    held_out = [answer for answer in found if answer["greedy"]][::10]
    prompts = {tuple(answer["prompt_ids"]) for answer in held_out}
    trained_on = [answer for answer in found if tuple(answer["prompt_ids"]) not in prompts][: chosen.answers]
    if also is not None:
        half = len(trained_on) // 2
        trained_on = trained_on[:half] + read_answers(also)[: len(trained_on) - half]
    model: Any = load_model(base, dtype=dtype)
    torch.manual_seed(seed)
    adapter = add_mask_adapter(model, MaskAdapterSettings(**chosen.settings))
    if chosen.head is not None:
        adapter.head = chosen.head(len(adapter.mask_embedding), adapter.settings.head_width)
    args = MaskTrainingConfig(
        output_dir=str(out),
        **{"mask_rows": mask_rows, "learning_rate": learning_rate, "seed": seed} | chosen.training,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = MaskAdapterTrainer(model, args, trained_on, held_out, clock=time.process_time)
    trainer.model.loss = chosen.loss if chosen.loss_of is None else chosen.loss_of(trainer.model)
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")) or None)
    model.save_mask_adapter(out)
    curve = [entry for entry in trainer.state.log_history if "eval_tokens_per_forward_branch_4" in entry]
    result = {
        "way": way,
        "mask_rows": trainer.budget.mask_rows,
        "seconds": trainer.budget.seconds,
        "passes": trainer.state.epoch,
        "parameters": sum(parameter.numel() for parameter in model.mask_adapter.parameters()),
        "tokens": curve[-1]["eval_tokens"],
        "tokens_per_forward": [curve[-1][f"eval_tokens_per_forward_branch_{drafts}"] for drafts in (1, 2, 3, 4)],
        "with_trees": with_trees(model, held_out),
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
        rates = [f"{rate:.3f}" for rate in (*one["tokens_per_forward"], one["with_trees"])]
        speed = f"{one['mask_rows'] / one['seconds']:.0f}"
        cells = [one["way"], f"{one['mask_rows']:,}", f"{one['passes']:.1f}", speed, f"{one['parameters']:,}", *rates]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    app()
