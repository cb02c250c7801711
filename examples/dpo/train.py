"""Preference optimisation of wedlm-nano with TRL's `DPOTrainer`, on its own rollouts by streaming parallel decoding.

What it does: answers fresh prompts of two tasks several times, by sampling with a bold threshold τ (many tokens per
forward, more mistakes); makes a pair of a right and a wrong answer wherever a prompt got both; trains on the pairs;
prints right answers and tokens per forward on held-out prompts, before and after, with the same bold decoder.
Log-probabilities come from `response_log_probs`: half the next-token head's, which are exact, and half the block-wise
bound under masks that policy and reference share. Against the paper, which stops at supervised fine-tuning: all of it.

    python examples/dpo/train.py --output-dir build/dpo

Hardware: a few minutes on two CPU cores; any GPU works too.
"""

import sys
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from datasets import Dataset
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase, set_seed
from trl import DPOConfig, DPOTrainer

from wedlm_hf import WeDLMForCausalLM
from wedlm_hf.checkpoints.loading import load_model, load_tokenizer
from wedlm_hf.eval.measure import measure, pad_left
from wedlm_hf.eval.prompts import LONGEST_ANSWER, Prompt, encode, encode_prompt
from wedlm_hf.training import DataCollatorForDualStreamMasking
from wedlm_hf.training.log_probs import response_log_probs

NANO = Path(__file__).parents[1] / "wedlm-nano"
sys.path.append(str(NANO))
from nano_tasks import generate_samples  # noqa: E402

TASKS = ("counting", "sorting")
BOLD = {
    "strategy": "wedlm",
    "window_size": 8,
    "entropy_threshold": 0.8,
    "distance_penalty": 0.05,
    "max_new_tokens": LONGEST_ANSWER,
}
SETTINGS = {"ar": {"strategy": "ar", "max_new_tokens": LONGEST_ANSWER}, "bold": BOLD}


class WeDLMDPOTrainer(DPOTrainer):
    """[`trl.DPOTrainer`] with the sigmoid loss on log-probabilities of the dual stream.

    Args:
        masks: collator that draws the masks: anew in every step, the same for policy and reference.
        args, kwargs: as in [`trl.DPOTrainer`]; `ref_model` is needed.

    Raises:
        ValueError: for another `loss_type`, or without a `ref_model`.
    """

    def __init__(self, *args: Any, masks: DataCollatorForDualStreamMasking, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.loss_types != ["sigmoid"] or self.ref_model is None:
            raise ValueError(
                f"WeDLMDPOTrainer needs `loss_type='sigmoid'` and a `ref_model`, got {self.loss_types} and "
                f"{self.ref_model and 'one'}."
            )
        self.masks = masks

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False) -> torch.Tensor:
        examples = self._examples(inputs)  # chosen answers, then rejected ones
        self.masks.set_epoch(self.state.global_step)
        policy = response_log_probs(model, examples, self.masks)
        with torch.no_grad():
            reference = response_log_probs(self.ref_model, examples, self.masks)
        ratios = {
            "ar": (policy.ar_tokens - reference.ar_tokens).sum(-1),
            "mask": (policy.mask_tokens - reference.mask_tokens).sum(-1),
        }
        chosen, rejected = ((ratios["ar"] + ratios["mask"]) / 2).chunk(2)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["rewards/margins"].append(self.beta * (chosen - rejected).mean().item())
        metrics["rewards/accuracies"].append((chosen > rejected).float().mean().item())
        for name, ratio in ratios.items():
            margin = torch.sub(*ratio.detach().chunk(2)).mean()
            metrics[f"log_ratios/{name}"].append(margin.item())
        return -F.logsigmoid(self.beta * (chosen - rejected)).mean()

    def _examples(self, inputs: dict[str, torch.Tensor]) -> list[dict[str, list[int]]]:
        """Rows without their padding, and without what a template puts behind the end token."""
        examples = []
        for tokens, marks in zip(inputs["input_ids"].tolist(), inputs["completion_mask"].tolist(), strict=True):
            stop = max(index for index, mark in enumerate(marks) if mark) + 1
            end = self.masks.tokenizer.eos_token_id
            if end in tokens[marks.index(1) : stop]:
                stop = stop - tokens[:stop][::-1].index(end)
            examples.append({"input_ids": tokens[:stop], "completion_mask": marks[:stop]})
        return examples


def rollouts(
    model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, samples: list[Prompt], count: int
) -> list[list[str]]:
    """`count` answers to each sample, by sampling with the bold decoder."""
    generator: Any = model
    answers = []
    for start in range(0, len(samples), 16):
        prompts = [encode(tokenizer, sample.messages) for sample in samples[start : start + 16]]
        inputs = pad_left(prompts, tokenizer.pad_token_id, model.device)
        output = generator.generate(**inputs, **BOLD, do_sample=True, temperature=0.8, num_return_sequences=count)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers += [texts[row : row + count] for row in range(0, len(texts), count)]
    return answers


def preferences(samples: list[Prompt], answers: list[list[str]]) -> Dataset:
    """A right and a wrong answer to each prompt that got both."""
    pairs: dict[str, list[Any]] = {"prompt": [], "chosen": [], "rejected": []}
    for sample, texts in zip(samples, answers, strict=True):
        right = [text for text in texts if sample.score(text)]
        wrong = [text for text in texts if text not in right]
        if right and wrong:
            pairs["prompt"].append(sample.messages)
            pairs["chosen"].append([{"role": "assistant", "content": right[0]}])
            pairs["rejected"].append([{"role": "assistant", "content": wrong[0]}])
    if not pairs["prompt"]:
        raise typer.BadParameter("No prompt got both a right and a wrong answer: raise `--prompts` or `--rollouts`.")
    return Dataset.from_dict(pairs)


def report(model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: int, title: str) -> None:
    """Prints right answers and tokens per forward on held-out prompts."""
    held_out = [sample for task in TASKS for sample in generate_samples(task, prompts, seed=7, split="heldout")]
    encoded = [encode_prompt(model, tokenizer, sample) for sample in held_out]
    rows = pd.DataFrame(measure(model.eval(), tokenizer, encoded, SETTINGS))
    for name, own in rows.groupby("decoder", sort=False):
        tokens_per_forward = own["new_tokens"].sum() / own["forwards"].sum()
        print(f"{title}, {name}: {own['right'].mean():.1%} right, {tokens_per_forward:.2f} tokens per forward")


def main(
    output_dir: Annotated[Path, typer.Option(help="Folder for the model.")],
    model_name: Annotated[str, typer.Option("--model", help="Folder or Hub id of a WeDLM checkpoint.")] = str(NANO),
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each task to roll out.")] = 400,
    count: Annotated[int, typer.Option("--rollouts", min=2, help="Answers to each prompt.")] = 8,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pairs.")] = 2,
    held_out: Annotated[int, typer.Option(min=1, help="Held-out prompts of each task.")] = 100,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = 5e-5,
    seed: Annotated[int, typer.Option(help="Seed of prompts, rollouts and masks.")] = 0,
) -> None:
    """Roll out, make pairs, train, and compare."""
    set_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(model_name, dtype="float32").to(device).eval(), load_tokenizer(model_name)
    report(model, tokenizer, held_out, "before")
    samples = [sample for task in TASKS for sample in islice(generate_samples(task, prompts, seed, "train"), prompts)]
    pairs = preferences(samples, rollouts(model, tokenizer, samples, count))
    print(f"{len(pairs)} pairs from {len(samples)} prompts; the others got only right or only wrong answers")
    trainer = WeDLMDPOTrainer(
        model,
        ref_model=deepcopy(model),
        args=DPOConfig(
            str(output_dir),
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            learning_rate=learning_rate,
            beta=0.1,
            logging_steps=5,
            save_strategy="no",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=device == "cpu",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=pairs,
        processing_class=tokenizer,
        masks=DataCollatorForDualStreamMasking(
            tokenizer, block_size=16, num_copies=4, ratio_sampler="stratified", seed=seed
        ),
    )
    trainer.train()
    report(model, tokenizer, held_out, "after")
    trainer.save_model()


if __name__ == "__main__":
    typer.run(main)
