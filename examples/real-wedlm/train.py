"""Trains SmolLM2-135M-Instruct into a WeDLM model that reasons and extracts, or into a plain AR model beside it.

What it does: fetches the base, converts it, trains a LoRA by dual-stream masking on the problems of data.py, writes
the whole model, trains a mask adapter on its masks for a tenth of the minutes, and decodes a few problems that it has
not seen in all ways. `--method sft` trains a LoRA of the same rank by TRL's own SFTTrainer, on the same problems in
the same order. Both run for `--minutes` in all, go on where an earlier run of the same command ended, and give way to
other programs.

Against the paper (examples/recipes has its settings): a LoRA in place of all weights, blocks of 16 instead of 32, most
of them masked from a random token to their end, as decoding meets them, and two prediction copies of each example.
The mask adapter is this library's: a mask knows nothing of the drafts before it, and the adapter's head reads them.

    python examples/real-wedlm/train.py --minutes 20
    python examples/real-wedlm/train.py --minutes 600
    python examples/real-wedlm/train.py --method sft --minutes 600

Hardware: two CPU cores make 8 examples in some 25 seconds. What is published is in the folders `wedlm`, the LoRA, and
`adapter` beside this file.
"""

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from wedlm_hf import WeDLMForCausalLM
from wedlm_hf.adapters.adapt import AdaptConfig, adapt
from wedlm_hf.checkpoints.files import write_text
from wedlm_hf.checkpoints.loading import load_model
from wedlm_hf.checkpoints.merge import merge_adapter
from wedlm_hf.modeling_wedlm.convert import convert
from wedlm_hf.training import WeDLMSFTConfig, WeDLMSFTTrainer

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "smollm2")]
import data  # noqa: E402
from smollm2 import FOLDER, fetch, give_way  # noqa: E402

METHODS = ("wedlm", "sft")
PUBLISHED, RUN = Path("build/real-wedlm"), Path("build/real-wedlm-run")  # whole models: published, of a run
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
BOTH: dict[str, Any] = {
    "learning_rate": 2.5e-3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10, "weight_decay": 0.0,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_train_epochs": 1, "max_length": 512,
    "save_strategy": "steps", "save_steps": 25, "save_total_limit": 2, "logging_steps": 5, "report_to": "none",
    "disable_tqdm": True,
}  # fmt: skip
MASKS: dict[str, Any] = {
    "block_size": 16, "suffix_probability": 0.7, "num_copies": 2, "ratio_sampler": "stratified", "num_eos": 4,
}  # fmt: skip
# Problems of each task that are mixed: of extraction, masks learn far more in the same time.
COUNTS = {"extraction": 8000, "reasoning": 2000}
# Of the mask adapter. With a root head, it had no more tokens per forward.
ADAPTER: dict[str, Any] = {"rank": 16, "root_width": 0, "num_masks": 16}
ADAPTER_SHARE, LEAST_ADAPTER = 0.1, 2  # of the minutes; minutes in which it learns anything
# That it learns from: of the mixed problems, and more of reasoning, whose drafts it learns more slowly.
ANSWERS, MORE_REASONING = 5200, 2000
LEAST = 0.05  # of the learning rate, which falls along a cosine of the minutes


class Minutes(TrainerCallback, ExportableState):
    """Ends training after so many minutes of all runs together, and lowers the learning rate as they pass."""

    def __init__(self, minutes: float, seconds: float):
        self.minutes, self.seconds = minutes, seconds
        self._moment = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self._moment = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Lowers the learning rate along a cosine of the minutes."""
        done = min(1.0, self.seconds / (60 * self.minutes))
        for group in optimizer.param_groups:
            group["lr"] *= max(LEAST, (1 + math.cos(math.pi * done)) / 2)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts, and stops in time."""
        moment = time.monotonic()
        self.seconds, self._moment = self.seconds + moment - self._moment, moment
        if self.seconds >= 60 * self.minutes:
            control.should_training_stop = control.should_save = True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    @staticmethod
    def seconds_of(checkpoint: str | None) -> float:
        """Seconds of training behind a checkpoint."""
        if checkpoint is None:
            return 0.0
        state = json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        return float(state["stateful_callbacks"][Minutes.__name__]["attributes"]["seconds"])


def write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a checkpoint: all of it, or nothing where that is interrupted."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as unfinished:
        made = Path(unfinished, folder.name)
        tokenizer.save_pretrained(made)
        model.save_pretrained(made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def base(folder: Path) -> Path:
    """The base as a WeDLM checkpoint, converted once."""
    wanted = folder / "base"
    if not wanted.exists():
        conversion = convert(str(fetch(FOLDER)))
        write(conversion.model.float(), conversion.tokenizer, wanted)
    return wanted


def examples(tasks: tuple[str, ...], seed: int) -> Dataset:
    """The training problems of these tasks, mixed, as prompts and completions."""
    problems = list(chain.from_iterable(islice(data.training_problems(task), COUNTS[task]) for task in tasks))
    random.Random(seed).shuffle(problems)
    return Dataset.from_list(as_chats(problems))


def as_chats(problems: Iterable[data.Problem]) -> list[dict[str, Any]]:
    """Problems as prompts and completions."""
    answer = {"role": "assistant"}
    return [{"prompt": each.prompt, "completion": [answer | {"content": each.answer}]} for each in problems]


def trainer(method: str, tasks: tuple[str, ...], folder: Path, seed: int, callback: TrainerCallback) -> Any:
    """What trains a LoRA in the folder's subfolder of that method."""
    output, checkpoint = folder / method, base(folder)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    common: dict[str, Any] = {**BOTH, "output_dir": str(output), "seed": seed, "completion_only_loss": True}
    common |= {"use_cpu": not torch.cuda.is_available(), "bf16": False, "gradient_checkpointing": False}
    rows, lora = examples(tasks, seed), LoraConfig(**LORA)
    if method == "wedlm":
        model: Any = WeDLMForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        args: Any = WeDLMSFTConfig(**common, **MASKS, assistant_only_loss=False)
        return WeDLMSFTTrainer(model, args, rows, None, tokenizer, callbacks=[callback], peft_config=lora)
    model = load_model(str(fetch(FOLDER)), dtype=torch.float32)
    return SFTTrainer(
        model, SFTConfig(**common), train_dataset=rows, processing_class=tokenizer, callbacks=[callback],
        peft_config=lora,
    )  # fmt: skip


def check_run(output: Path, facts: dict[str, Any]) -> None:
    """Notes what a run trains on; raises `ValueError` where the folder holds a run of other data or settings."""
    file = output / "run.json"
    there = json.loads(file.read_text(encoding="utf-8")) if file.exists() else facts
    if differing := [
        f"{name}: {there.get(name)!r} there, {facts[name]!r} now" for name in facts if there.get(name) != facts[name]
    ]:
        raise ValueError(f"{output} holds another run ({'; '.join(differing)}). Take another `--output`.")
    output.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(facts, indent=2))


def train(method: str, tasks: tuple[str, ...], folder: Path, minutes: float, seed: int) -> Path:
    """Trains, or trains on; returns the folder of the LoRA."""
    data.check()
    output = folder / method
    problems = {task: COUNTS[task] for task in tasks}
    check_run(output, {"data": data.DIGEST, "problems": problems, "seed": seed, "lora": LORA, "masks": MASKS})
    checkpoint = get_last_checkpoint(str(output))
    callback = Minutes(minutes, Minutes.seconds_of(checkpoint))
    if callback.seconds < 60 * minutes:
        own = trainer(method, tasks, folder, seed, callback)
        own.train(resume_from_checkpoint=checkpoint)
        for weight in own.model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.bfloat16()  # half the size of the file
        own.save_model()
    return output


def whole_model(method: str, lora: Path, folder: Path) -> Path:
    """The base with a LoRA merged into it, written where it is missing or older than the LoRA."""
    wanted = folder / f"{method}-model"
    written, made = wanted / "model.safetensors", lora / "adapter_model.safetensors"
    if not written.exists() or written.stat().st_mtime < made.stat().st_mtime:
        tokenizer = AutoTokenizer.from_pretrained(base(folder))
        source = base(folder) if method == "wedlm" else fetch(FOLDER)
        merged = merge_adapter(load_model(str(source), dtype=torch.float32), lora)
        if method == "wedlm":
            merged.config.masks_trained = True  # which the base's are not
        write(merged, tokenizer, wanted)
    return wanted


def mask_adapter(model: Path, tasks: tuple[str, ...], folder: Path, minutes: float, seed: int) -> Path:
    """Trains a mask adapter on the whole model, or trains on; returns its folder. It learns what the model says along
    the answers of the data, which are nearly its own: so no time goes into writing some."""
    output, answers, tokenizer = folder / "adapter", folder / "answers.jsonl", AutoTokenizer.from_pretrained(model)
    began, made = output / "work" / "adapt.json", model / "model.safetensors"
    if began.exists() and began.stat().st_mtime < made.stat().st_mtime:
        print(f"The model was trained on: the adapter in {output}, of earlier weights, begins anew.", flush=True)
        shutil.rmtree(output)
    rows = list(islice(reversed(list(examples(tasks, seed))), ANSWERS))  # the model learned from few of the last ones
    if "reasoning" in tasks:
        first = COUNTS["reasoning"]
        rows += as_chats(islice(data.training_problems("reasoning"), first, first + MORE_REASONING))
        random.Random(seed).shuffle(rows)
    lines = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
        answer = tokenizer.encode(row["completion"][0]["content"], add_special_tokens=False)
        tokens = {"prompt_ids": prompt["input_ids"], "response_ids": [*answer, tokenizer.eos_token_id]}
        # As greedy answers, of which some are held out.
        lines.append(json.dumps(tokens | {"greedy": True, "batch": len(lines)}) + "\n")
    write_text(answers, "".join(lines))
    adapt(model, output, AdaptConfig(minutes=minutes, answers=answers, seed=seed, **ADAPTER))
    return output


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, default="wedlm")
    parser.add_argument("--tasks", nargs="+", choices=data.TASKS, default=data.TASKS)
    parser.add_argument("--minutes", type=float, default=600, help="of training, all runs of this folder together")
    parser.add_argument("--output", type=Path, default=RUN)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=6, help="problems of each task to decode in the end; 0: none")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's")
    options = parser.parse_args()
    give_way()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tasks, minutes = tuple(options.tasks), ADAPTER_SHARE * options.minutes  # the latter are the adapter's
    if options.method == "sft" or minutes < LEAST_ADAPTER:
        minutes = 0
    lora = train(options.method, tasks, options.output, options.minutes - minutes, options.seed)
    model = whole_model(options.method, lora, options.output)
    print(f"The LoRA is in {lora}, the model in {model}.", flush=True)
    if minutes:
        adapter = mask_adapter(model, tasks, options.output, minutes, options.seed)
        print(f"The mask adapter is in {adapter}.", flush=True)
    for task in options.tasks if options.count else ():
        count = ["--task", task, "--count", str(options.count)]
        subprocess.run([sys.executable, str(HERE / "compare.py"), *count, "--run", str(options.output)], check=True)


if __name__ == "__main__":
    main()
