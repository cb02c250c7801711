"""What `test_distributed.py` runs in one process and in two: `python distributed_worker.py FOLDER SCENARIO…`.

Every optimizer step sees all documents, however they are spread over processes, rows and micro-batches, so that all
scenarios minimise the same loss. The noise is new in every epoch.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from test_mask_trainer import answers
from test_sft_trainer import MESSAGES, trainer_on
from test_trainer import EXAMPLES as DOCUMENTS
from tiny import tiny_model, tiny_tokenizer
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from wedlm_hf import add_mask_adapter
from wedlm_hf.adapters.budget import MaskTrainingConfig
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.adapters.trainer import MaskAdapterTrainer
from wedlm_hf.modeling_wedlm import WeDLMForCausalLM
from wedlm_hf.training import DataCollatorForDualStreamMasking, DynamicMaskingCallback

# Two documents a row.
PACKED = [
    {
        "input_ids": first["input_ids"] + second["input_ids"],
        "labels": first["labels"] + second["labels"],
        "document_ids": [0] * len(first["input_ids"]) + [1] * len(second["input_ids"]),
    }
    for first, second in zip(DOCUMENTS[::2], DOCUMENTS[1::2], strict=True)
]
STEPS = 3
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
BACKEND = "gloo" if PROCESSES > 1 else None
ARGUMENTS: dict[str, Any] = {
    "num_train_epochs": STEPS, "learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd",
    "max_grad_norm": 1e9,  # so that the norm is logged
    "logging_steps": 1, "save_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
# How each run differs from the plain one.
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed accumulated": {"packed": True, "gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True},
    "bf16": {"bf16": True, "gradient_checkpointing": True},
    "resumed": {"resume": True},
    "fsdp": {"parallel": {"fsdp_size": 2}},
    "fsdp checkpointed": {"parallel": {"fsdp_size": 2}, "gradient_checkpointing": True},
    "fsdp bf16": {"parallel": {"fsdp_size": 2}, "bf16": True, "gradient_checkpointing": True},
    "tp": {"parallel": {"tp_size": 2}},
    "tp checkpointed": {"parallel": {"tp_size": 2}, "gradient_checkpointing": True},
    "tp qwen2.5": {"parallel": {"tp_size": 2}, "style": "qwen2.5"},
    "plain qwen2.5": {"style": "qwen2.5"},
    "sft": {},
    "adapter": {},
}
# What is refused, and why. Context parallelism comes last: afterwards the processes are no longer in step.
SHARDED = "Resuming is not supported for models sharded at load time (`DistributedConfig`)"
CUTS = "Context and sequence parallelism cannot train a dual stream: they cut the sequence"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp resumed": ({"parallel": {"fsdp_size": 2}, "resume": True}, SHARDED),
    "tp resumed": ({"parallel": {"tp_size": 2}, "resume": True}, SHARDED),
    "adapter fsdp": ({"parallel": {"fsdp_size": 2}}, "is sharded. Drafting calls"),
    "adapter tp": ({"parallel": {"tp_size": 2}}, "needs whole rows: load it"),
    "context parallel": ({"parallelism_config": ParallelismConfig(cp_size=2)}, CUTS),
}


def load_start(folder: Path, style: str, parallel: dict[str, int] | None) -> WeDLMForCausalLM:
    sharding = DistributedConfig(**parallel) if parallel and PROCESSES > 1 else None
    return WeDLMForCausalLM.from_pretrained(folder / f"start-{style}", distributed_config=sharding)


def run(
    folder: Path, name: str, packed: bool = False, parallel: dict[str, int] | None = None, resume: bool = False,
    style: Any = "qwen3", gradient_accumulation_steps: int = 1, **settings: Any,
) -> None:  # fmt: skip
    """Trains, and writes `FOLDER/NAME`: the model, and losses and gradient norms of all steps in log.json."""
    data_parallel = 1 if parallel and "tp_size" in parallel else PROCESSES
    rows, checkpoints = PACKED if packed else DOCUMENTS, folder / f"{name} checkpoints"

    def trainer() -> Trainer:
        args = TrainingArguments(
            str(checkpoints), gradient_accumulation_steps=gradient_accumulation_steps,
            per_device_train_batch_size=len(rows) // data_parallel // gradient_accumulation_steps,
            save_strategy="steps" if resume else "no", ddp_backend=BACKEND, **ARGUMENTS | settings,
        )  # fmt: skip
        collator = DataCollatorForDualStreamMasking(tiny_tokenizer(), block_size=4, num_eos=3)
        model = load_start(folder, style, parallel)
        return Trainer(model, args, collator, rows, callbacks=[DynamicMaskingCallback()])

    run = trainer()
    run.train()
    if resume:
        run = trainer()
        run.train(resume_from_checkpoint=str(checkpoints / "checkpoint-2"))
    run.save_model(str(folder / name))
    if run.is_world_process_zero():
        log = [entry for entry in run.state.log_history if "loss" in entry]
        numbers = {key: [float(entry[key]) for entry in log] for key in ("loss", "grad_norm")}
        (folder / name / "log.json").write_text(json.dumps(numbers))


def run_sft(folder: Path) -> None:
    """`WeDLMSFTTrainer` with AdamW, evaluation and checkpoints: `FOLDER/sft` whole, `FOLDER/sft resumed` from step 2.

    Seven examples to evaluate on: the last batch is not full.
    """
    settings: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4 // PROCESSES, "per_device_eval_batch_size": 3,
        "optim": "adamw_torch", "max_grad_norm": 1.0, "eval_strategy": "steps", "eval_steps": 2,
        "eval_decoding_samples": 2, "eval_decoding_tokens": 6, "save_strategy": "steps", "save_steps": 2,
        "ddp_backend": BACKEND,
    }  # fmt: skip
    for name, checkpoint in (("sft", None), ("sft resumed", str(folder / "sft" / "checkpoint-2"))):
        trainer = trainer_on(folder / name, eval_dataset=MESSAGES.select(range(7)), **settings)
        trainer.train(checkpoint)
        trainer.save_model()
        trainer.save_state()


def run_adapter(folder: Path, name: str, parallel: dict[str, int] | None = None) -> None:
    """Trains a mask adapter, two batches of answers a step, and writes `FOLDER/NAME`."""
    model = load_start(folder, "qwen3", parallel)
    torch.manual_seed(0)
    add_mask_adapter(model, MaskAdapterSettings(rank=4, head_width=8))
    args = MaskTrainingConfig(
        output_dir=str(folder / name), num_masks=4, batch_slots=40, mask_rows=900, save_minutes=1e9, warmup_steps=2,
        logging_steps=1, use_cpu=True, disable_tqdm=True, max_grad_norm=1e9,
        gradient_accumulation_steps=2 // PROCESSES, ddp_backend=BACKEND,
    )  # fmt: skip
    trainer = MaskAdapterTrainer(model, args, answers(17), answers(3, seed=1))
    trainer.train()
    trainer.save_model()
    trainer.save_state()


def save_starts(folder: Path) -> Path:
    """The models that all runs start from."""
    for style in ("qwen3", "qwen2.5"):
        tiny_model(style).save_pretrained(folder / f"start-{style}")
    return folder


def main(folder: Path, scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    # accelerate takes tensor parallelism on accelerators only; all that follows its check works on CPUs as well.
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    for name in scenarios:
        train = run_adapter if name.startswith("adapter") else run
        if name == "sft":
            run_sft(folder)
        elif name in SCENARIOS:
            train(folder, name, **SCENARIOS[name])
        else:
            try:
                train(folder, name, **REFUSED[name][0])
            except ValueError as error:
                (folder / f"{name}.txt").write_text(str(error))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
