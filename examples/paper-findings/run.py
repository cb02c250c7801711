"""The paper's training findings at the size of a toy: what each choice does to quality and to tokens per forward.

What it does: trains a small character-level model by next-token prediction alone, then adapts it with dual-stream
training nine times, each time with one choice changed, and decodes held-out prompts at a range of thresholds τ.
Against the paper (§6.5): 0.2M parameters instead of 7B, three synthetic tasks instead of benchmarks. Two of the
alternatives, masks without a clean context and attention both ways within a block, exist only here, as other mask
functions.

    python examples/paper-findings/run.py --output-dir examples/paper-findings

Hardware: about an hour on one core (`--steps 20 --base-steps 20` for a try); the same command goes on with a run that
was stopped. Writes results.json, results.md and results.png; `--draw-only` makes the last two from the first again.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import matplotlib
import torch
import typer
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from wedlm_hf.checkpoints.files import write_text, written_whole
from wedlm_hf.eval.measure import pad_left
from wedlm_hf.modeling_wedlm import WeDLMConfig, WeDLMForCausalLM, dual_stream
from wedlm_hf.modeling_wedlm.dual_stream import dual_stream_mask_function
from wedlm_hf.training import DataCollatorForDualStreamMasking

sys.path.append(str(Path(__file__).parents[1] / "wedlm-nano"))
from nano_tasks import is_heldout
from nano_tokenizer import train_tokenizer

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TRAINED_BLOCK = 32
WINDOW = 8
DISTANCE_PENALTY = 0.05
THRESHOLDS = (0.0, 0.1, 0.4, 0.8, 1.6)
SHOWN = 0.4  # the τ of the table
LONGEST_ANSWER = 32
BLOCKS, WHOLE_BLOCKS = "blocks", "whole blocks"  # of 8 after the prompt; of 32, laid out as in training


# Tasks: (prompt, answer, whether an answer is right).


def make_counting(rng: random.Random) -> tuple[str, str]:
    """Five terms of a sequence: each can be had from the one before, or from the prompt at once."""
    start, step = rng.randrange(30), rng.randrange(1, 10)
    return f"count {start} +{step}:", " ".join(str(start + step * i) for i in range(5))


def make_sorting(rng: random.Random) -> tuple[str, str]:
    """Letters in order: all of them are settled by the prompt."""
    letters = rng.sample("abcdefghijkl", rng.randrange(4, 9))
    return f"sort {''.join(letters)}:", "".join(sorted(letters))


def make_shuffling(rng: random.Random) -> tuple[str, str]:
    """Letters in any order: each place is open until the others are filled, which parallel fills cannot see."""
    letters = rng.sample("abcdefghijkl", rng.randrange(4, 9))
    return f"shuffle {''.join(letters)}:", "".join(rng.sample(letters, len(letters)))


TASKS = {"counting": make_counting, "sorting": make_sorting, "shuffling": make_shuffling}


def is_right(task: str, prompt: str, answer: str, text: str) -> bool:
    """Whether `text` answers the prompt; a shuffle is right in any order."""
    return sorted(text) == sorted(answer) if task == "shuffling" else text == answer


class Samples(Dataset):
    """Endless tokenised samples of the training split; a function of the seed and the index."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, seed: int):
        self.tokenizer, self.size, self.seed = tokenizer, size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        rng = random.Random(f"{self.seed}-{index}")
        _, prompt, answer = draw(rng, heldout=False)
        tokens = self.tokenizer(prompt)["input_ids"]
        answer = [*self.tokenizer(answer)["input_ids"], self.tokenizer.eos_token_id]
        return {"input_ids": tokens + answer, "labels": [-100] * len(tokens) + answer}


def draw(rng: random.Random, heldout: bool, task: str | None = None) -> tuple[str, str, str]:
    """A task, a prompt of the wanted split, and its answer."""
    while True:
        name = task or rng.choice(list(TASKS))
        prompt, answer = TASKS[name](rng)
        if is_heldout(prompt) == heldout:
            return name, prompt, answer


# The two alternatives to the paper's visibility.


def both_ways_mask_function(
    stream_ids: torch.Tensor, block_ids: torch.Tensor, document_ids: torch.Tensor, memory_ends: None = None
) -> Any:
    """As in dual-stream training, but within a block of the prediction stream all slots see each other."""
    causal = dual_stream_mask_function(stream_ids, block_ids, document_ids)

    def visible(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        same = (stream_ids[batch, query] == stream_ids[batch, key]) & (stream_ids[batch, query] > 0)
        same &= (block_ids[batch, query] == block_ids[batch, key]) & (
            document_ids[batch, query] == document_ids[batch, key]
        )
        return causal(batch, head, query, key) | same

    return visible


def single_stream_mask_function(
    stream_ids: torch.Tensor, block_ids: torch.Tensor, document_ids: torch.Tensor, memory_ends: None = None
) -> Any:
    """Without the memory stream's clean context: a block sees the *masked* blocks before it, as in a single stream.

    The prompt's blocks have no masks, and so no copy in the prediction stream: they are seen in the memory stream.
    """
    causal = dual_stream_mask_function(stream_ids, block_ids, document_ids)
    group = (document_ids + 1) * (block_ids.max() + 2) + block_ids + 1
    masked_groups = (group[:, :, None] == group[:, None, :]) & (stream_ids > 0)[:, None, :]
    has_masks = masked_groups.any(-1)

    def visible(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        is_prediction = stream_ids[batch, query] > 0
        clean = is_prediction & (stream_ids[batch, key] == 0) & has_masks[batch, key]
        earlier = is_prediction & (stream_ids[batch, query] == stream_ids[batch, key])
        earlier &= (block_ids[batch, key] < block_ids[batch, query]) & (
            document_ids[batch, query] == document_ids[batch, key]
        )
        return (causal(batch, head, query, key) & ~clean) | earlier

    return visible


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        name: in the table and the picture.
        mask_function: who sees whom.
        collator: settings of the collator that are not the paper's.
    """

    name: str
    mask_function: Callable[..., Any] = dual_stream_mask_function
    collator: dict[str, Any] = field(default_factory=dict)

    def patches(self) -> dict[str, Any]:
        """What stands in the place of which function of `dual_stream`."""
        patches: dict[str, Any] = {"dual_stream_mask_function": self.mask_function}
        if self.mask_function is not dual_stream_mask_function:  # observed tokens see more than the memory does
            patches["leave_out_repeats"] = dual_stream.Compact.whole
        return patches

    @property
    def is_causal(self) -> bool:
        """Whether the streaming decoder, whose cache is causal, can decode it."""
        return self.mask_function is not both_ways_mask_function


PAPER = "paper"
ATTENTION = "attention within a block"
SMALL_BLOCKS = "dual stream, blocks of 8"
VARIANTS = (
    Variant(PAPER),
    Variant("without dual stream", single_stream_mask_function),
    # A block that ends where the text ends would tell every slot how long the answer is: end tokens fill it up.
    Variant("both ways within blocks", both_ways_mask_function, {"num_eos": TRAINED_BLOCK}),
    Variant("block size 4", collator={"block_size": 4}),
    Variant("block size 8", collator={"block_size": 8}),
    Variant("block size 8, without dual stream", single_stream_mask_function, {"block_size": 8}),
    Variant("AR weight 0", collator={"ar_weight": 0.0}),
    Variant("suffix masks", collator={"suffix_probability": 1.0}),
    Variant("half suffix masks", collator={"suffix_probability": 0.5}),
)
PANELS = {
    "dual stream": ("without dual stream",),
    SMALL_BLOCKS: ("block size 8, without dual stream",),
    ATTENTION: ("both ways within blocks",),
    "block size (paper: 32)": ("block size 4", "block size 8"),
    "AR weight (paper: 1)": ("AR weight 0",),
    "mask layout (paper: uniform)": ("suffix masks", "half suffix masks"),
}
REFERENCES = {SMALL_BLOCKS: "block size 8"}  # what is compared with another than the paper's


# Training.


def build_model(tokenizer: PreTrainedTokenizerBase) -> WeDLMForCausalLM:
    """A Qwen3-style model with random weights."""
    config = WeDLMConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.05,
    )
    model = WeDLMForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def train(model: WeDLMForCausalLM, samples: Samples, collator: Any, steps: int, learning_rate: float) -> float:
    """Seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=64,
                learning_rate=learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=steps // 10,
                adam_beta2=0.98,
                logging_steps=100,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=samples,
            data_collator=collator,
        )
        start = time.perf_counter()
        trainer.train()
        return time.perf_counter() - start


# Evaluation.


@torch.no_grad()
def ar_nll(model: WeDLMForCausalLM, samples: list[dict[str, list[int]]], collator: DataCollatorForSeq2Seq) -> float:
    """Nats per token of the answers, from the next-token head."""
    batch = collator(samples)
    return model(**batch).loss.item()


@torch.no_grad()
def decode_blocks(
    model: WeDLMForCausalLM, prompt: list[int], threshold: float, *, both_ways: bool, size: int, as_trained: bool
) -> tuple[list[int], int]:
    """Block-wise decoding by definition, without a cache, one prompt at a time; returns new tokens and forwards.

    For attention both ways within the block, which a causal cache cannot hold; causal, it equals `strategy="block"`.
    Rows: the known tokens, causal; then the block, filled slots first.

    Args:
        model: in evaluation mode.
        prompt: tokens.
        threshold: τ, nats.
        both_ways: whether all slots of the block see each other.
        size: of a block.
        as_trained: blocks begin at multiples of `size`, the first one with the prompt's end; else after the prompt.
    """
    end, mask = model.config.eos_token_id, model.config.mask_token_id
    limit = len(prompt) + LONGEST_ANSWER
    known, forwards = list(prompt), 0
    if as_trained:
        known = prompt[: len(prompt) // size * size]
    while len(known) < limit:
        places = range(len(known), len(known) + size if as_trained else min(len(known) + size, limit))
        block = {place: prompt[place] for place in places if place < len(prompt)}
        while len(block) < len(places):
            masks = [place for place in places if place not in block]
            order = [*range(len(known)), *sorted(block), *masks]
            tokens = torch.tensor([known + [block[place] for place in sorted(block)] + [mask] * len(masks)])
            visible = torch.ones(len(order), len(order), dtype=torch.bool).tril()
            if both_ways:
                visible[len(known) :, len(known) :] = True
            logits = model(tokens, position_ids=torch.tensor([order]), attention_mask=visible[None, None]).logits
            forwards += 1
            logits = logits[0, len(order) - len(masks) :].float()
            distance = torch.tensor(masks) - masks[0]
            entropy = torch.distributions.Categorical(logits=logits).entropy() + DISTANCE_PENALTY * distance
            chosen = (entropy < threshold).nonzero().flatten().tolist() or [int(entropy.argmin())]
            logits[:, mask] = -torch.inf
            for index in chosen:
                block[masks[index]] = int(logits[index].argmax())
            run = takewhile(lambda place: place in block, places)  # noqa: B023 (used up at once)
            answer = (known + [block[place] for place in run])[len(prompt) : limit]
            if end in answer:
                return answer[: answer.index(end) + 1], forwards
        known += [block[place] for place in places]
    return known[len(prompt) : limit], forwards


def decode_all(
    model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, tests: list[tuple[str, str, str]], **options: Any
) -> dict[str, Any]:
    """Share of right answers, pooled and by task, and tokens per forward.

    `options` are those of `generate`, except that `both_ways` (bool) asks for [`decode_blocks`] as trained.
    """
    prompts = [tokenizer(prompt)["input_ids"] for _, prompt, _ in tests]
    answers: list[list[int]]
    if "both_ways" in options:
        decoded = [
            decode_blocks(
                model,
                prompt,
                options["entropy_threshold"],
                both_ways=options["both_ways"],
                size=TRAINED_BLOCK,
                as_trained=True,
            )
            for prompt in prompts
        ]
        answers = [answer for answer, _ in decoded]
        new_tokens, forwards = sum(map(len, answers)), sum(count for _, count in decoded)
    else:
        inputs = pad_left(prompts, tokenizer.pad_token_id)
        output = model.generate(**inputs, max_new_tokens=LONGEST_ANSWER, return_dict_in_generate=True, **options)
        answers = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        stats = getattr(output, "stats", None)
        new_tokens, forwards = (int(stats.new_tokens.sum()), int(stats.forwards.sum())) if stats else (1, 1)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [is_right(*test, text) for test, text in zip(tests, texts, strict=True)]
    by_task = {
        task: sum(ok for (name, *_), ok in zip(tests, right, strict=True) if name == task)
        / sum(name == task for name, *_ in tests)
        for task in TASKS
    }
    return {"accuracy": sum(right) / len(right), "tokens_per_forward": new_tokens / forwards, "by_task": by_task}


def evaluate(
    variant: Variant, model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts_per_task: int, seed: int
) -> dict[str, Any]:
    """AR loss and accuracy, and quality against tokens per forward of each decoder over all thresholds."""
    model.eval()
    rng = random.Random(f"heldout-{seed}")
    tests = [draw(rng, heldout=True, task=task) for task in TASKS for _ in range(prompts_per_task)]
    encoded = []
    for _, prompt, answer in tests:
        tokens = tokenizer(prompt)["input_ids"]
        answer_tokens = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        encoded.append({"input_ids": tokens + answer_tokens, "labels": [-100] * len(tokens) + answer_tokens})
    window = {"window_size": WINDOW, "distance_penalty": DISTANCE_PENALTY}
    result: dict[str, Any] = {
        "ar_nll": ar_nll(model, encoded, DataCollatorForSeq2Seq(tokenizer)),
        "ar": decode_all(model, tokenizer, tests, strategy="ar"),
    }
    if variant.is_causal:
        result["verified"] = decode_all(model, tokenizer, tests, strategy="wedlm", verification="exact", **window)
        for key, strategy in (("streaming", "wedlm"), (BLOCKS, "block")):
            result[key] = {
                str(threshold): decode_all(
                    model, tokenizer, tests, strategy=strategy, entropy_threshold=threshold, **window
                )
                for threshold in THRESHOLDS
            }
    if variant.name in (PAPER, *PANELS[ATTENTION]):
        result[WHOLE_BLOCKS] = {
            str(threshold): decode_all(
                model, tokenizer, tests, entropy_threshold=threshold, both_ways=not variant.is_causal
            )
            for threshold in THRESHOLDS
        }
    return result


# Table, verdicts and picture.

# What the paper says of each choice (§4: the reason for two streams and for the AR loss; §6.5: measured).
CLAIMS = {
    "dual stream": "masks learn best behind a clean context",
    SMALL_BLOCKS: "the same, where an answer has several blocks",
    ATTENTION: "causal is better than both ways",
    "block size (paper: 32)": "4, 8 and 32 differ by less than a point",
    "AR weight (paper: 1)": "the AR loss keeps the next-token head",
    "mask layout (paper: uniform)": "–",
}


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    header = (
        "| training | AR loss | AR | blocks τ=0 | blocks τ=0.4 | tokens/forward | streaming τ=0.4 | tokens/forward "
        "| verified | tokens/forward |\n| --- |" + " --: |" * 9
    )
    lines = [header]
    rows = [
        (f"{name}, {WHOLE_BLOCKS}" if key == WHOLE_BLOCKS else name, key, result)
        for name, result in results["variants"].items()
        for key in (BLOCKS, WHOLE_BLOCKS)
        if key in result
    ]
    for name, key, result in rows:
        cells = [name, f"{result['ar_nll']:.3f}", f"{result['ar']['accuracy']:.1%}"]
        cells.append(f"{result[key]['0.0']['accuracy']:.1%}")
        others = result if key == BLOCKS else {}
        for score in (result[key][str(SHOWN)], others.get("streaming", {}).get(str(SHOWN)), others.get("verified")):
            cells += (
                ["–", "–"] if score is None else [f"{score['accuracy']:.1%}", f"{score['tokens_per_forward']:.2f}"]
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def verdicts(results: dict[str, Any]) -> str:
    """Markdown: each alternative against the paper's choice, in points of right answers, and whether that is noise.

    A difference counts as noise within two standard errors of independent prompts (both answer the same ones, so this
    is cautious). AR is the next-token head; τ=0 fills one token a step, as in the paper's quality tables.
    """
    prompts = len(TASKS) * results["settings"]["prompts_per_task"]
    lines = [
        "| choice | paper | alternative | AR | blocks τ=0 | blocks τ=0.4 | tokens/forward τ=0.4 |",
        "| --- | --- | --- | --: | --: | --: | --: |",
    ]

    def accuracies(result: dict[str, Any], key: str) -> list[float]:
        return [result["ar"]["accuracy"], *(result[key][str(t)]["accuracy"] for t in (0.0, SHOWN))]

    for choice, others in PANELS.items():
        paper = results["variants"].get(REFERENCES.get(choice, PAPER))
        for name in others:
            if paper is None or name not in results["variants"]:
                continue
            result, key = results["variants"][name], compared_key(choice)
            cells = [choice, CLAIMS[choice], name]
            for theirs, ours in zip(accuracies(result, key), accuracies(paper, key), strict=True):
                error = ((theirs * (1 - theirs) + ours * (1 - ours)) / prompts) ** 0.5
                difference = f"{100 * (theirs - ours):+.1f}"
                cells.append(f"**{difference}**" if abs(theirs - ours) > 2 * error else f"{difference} (noise)")
            speeds = [each[key][str(SHOWN)]["tokens_per_forward"] for each in (result, paper)]
            cells.append(f"{speeds[0] / speeds[1] - 1:+.0%}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def compared_key(choice: str) -> str:
    """Which decoding is compared: attention both ways needs whole blocks, and its rival gets them too."""
    return WHOLE_BLOCKS if choice == ATTENTION else BLOCKS


def picture(results: dict[str, Any], path: Path) -> None:
    """A panel for each choice: right answers over tokens per forward, one point for each τ."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(20, 3.6), sharey=True, layout="constrained")
    for axis, (title, others) in zip(axes, PANELS.items(), strict=True):
        for name in (REFERENCES.get(title, PAPER), *others):
            if name not in results["variants"]:
                continue
            scores = results["variants"][name][compared_key(title)].values()
            axis.plot(
                [score["tokens_per_forward"] for score in scores],
                [100 * score["accuracy"] for score in scores],
                marker="o",
                markersize=4,
                label=name,
            )
        axis.set(title=title, xlabel="tokens per forward")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("right answers, %")
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=110, format="png")


def main(
    output_dir: Annotated[Path, typer.Option(help="Folder for results.json, results.md and results.png.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each variant.")] = 2000,
    base_steps: Annotated[int, typer.Option(min=1, help="Steps of the next-token training before.")] = 2500,
    prompts_per_task: Annotated[int, typer.Option(min=1, help="Held-out prompts of each task.")] = 120,
    only: Annotated[list[str] | None, typer.Option(help="Names of the variants to train; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, samples and noise.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    draw_only: Annotated[bool, typer.Option(help="Only make table and picture of a results.json again.")] = False,
) -> None:
    """Train every variant, decode, and write the results."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    if draw_only:
        write_results(json.loads((output_dir / "results.json").read_text(encoding="utf-8")), output_dir)
        return
    unknown = set(only or ()) - {variant.name for variant in VARIANTS}
    if unknown:
        raise typer.BadParameter(f"There is no variant {sorted(unknown)}; there are {[v.name for v in VARIANTS]}.")
    set_seed(seed)
    characters = [f"{prompt}{answer}" for _, prompt, answer in (draw(random.Random(i), False) for i in range(100))]
    tokenizer = train_tokenizer(characters, vocab_size=260)  # bytes alone
    base = build_model(tokenizer)
    settings = {
        "seed": seed,
        "steps": steps,
        "base_steps": base_steps,
        "prompts_per_task": prompts_per_task,
        "window_size": WINDOW,
        "distance_penalty": DISTANCE_PENALTY,
        "parameters": base.num_parameters(),
        "threads": threads,
        "torch": torch.__version__,
    }
    results = earlier_results(output_dir, settings)
    missing = [v for v in VARIANTS if v.name not in results["variants"] and (not only or v.name in only)]
    if missing:
        collator = DataCollatorForSeq2Seq(tokenizer)
        seconds = train(base, Samples(tokenizer, 64 * base_steps, seed), collator, base_steps, 3e-3)
        before = evaluate(Variant(PAPER), base, tokenizer, prompts_per_task, seed)
        results["base"] = {"ar_nll": before["ar_nll"], "ar": before["ar"], "seconds": round(seconds)}
        print(f"base: {seconds:.0f} s, AR loss {before['ar_nll']:.3f}, {before['ar']}", flush=True)
    for variant in missing:
        model = deepcopy(base)
        dual = DataCollatorForDualStreamMasking(tokenizer, **({"seed": seed} | variant.collator))
        set_seed(seed)
        with patch.multiple(dual_stream, **variant.patches()):
            seconds = train(model, Samples(tokenizer, 64 * steps, seed + 1), dual, steps, 2e-3)
        result = evaluate(variant, model, tokenizer, prompts_per_task, seed)
        results["variants"][variant.name] = result | {"seconds": round(seconds)}
        shown = result.get(BLOCKS, result.get(WHOLE_BLOCKS))[str(SHOWN)]
        print(f"{variant.name}: {seconds:.0f} s, AR loss {result['ar_nll']:.3f}, blocks {shown}", flush=True)
        write_results(results, output_dir)  # what is there so far


def earlier_results(output_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run with the same settings left in the folder, to go on from there."""
    path = output_dir / "results.json"
    if not path.exists():
        return {"settings": settings, "variants": {}}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if results["settings"] != settings:
        raise typer.BadParameter(
            f"{str(path)!r} holds results of other settings: {results['settings']}; these are {settings}.",
            param_hint="--output-dir",
        )
    return results


def write_results(results: dict[str, Any], output_dir: Path) -> None:
    """JSON, table and picture."""
    found = results["variants"]
    results = {**results, "variants": {v.name: found[v.name] for v in VARIANTS if v.name in found}}
    write_text(output_dir / "results.json", json.dumps(results, indent=1) + "\n")
    write_text(output_dir / "results.md", f"{table(results)}\nAgainst the paper's choice:\n\n{verdicts(results)}")
    picture(results, output_dir / "results.png")


if __name__ == "__main__":
    typer.run(main)
