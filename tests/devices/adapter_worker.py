"""What `test_two_processes.py` runs in one process and in two: `python adapter_worker.py FOLDER SCENARIO…`.

Every optimizer step sees the same two batches of answers, however they are spread over processes.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from test_mask_trainer import StopAt, answers
from tiny import tiny_model
from transformers.distributed import DistributedConfig

from wedlm_hf.adapters.budget import MaskTrainingConfig
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.adapters.trainer import MaskAdapterTrainer
from wedlm_hf.modeling_wedlm import WeDLMForCausalLM

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
# How each run differs from the plain one.
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "resumed": {"stop_at": 3},
    "long": {"mask_rows": 4000, "save_minutes": 1e-9},
    "fsdp": {"parallel": {"fsdp_size": 2}},
    "tp": {"parallel": {"tp_size": 2}},
}


def run(
    folder: Path, name: str, parallel: dict[str, int] | None = None, stop_at: int | None = None, **settings: Any
) -> None:
    """Trains, and writes `FOLDER/NAME`: the adapter, and the trainer's log."""
    settings = {"mask_rows": 900, "save_minutes": 1e9} | settings

    def train(stop_at: int | None = None) -> MaskAdapterTrainer:
        sharding = DistributedConfig(**parallel) if parallel and PROCESSES > 1 else None
        model = WeDLMForCausalLM.from_pretrained(folder / "start", distributed_config=sharding)
        torch.manual_seed(0)
        model.add_mask_adapter(MaskAdapterSettings(rank=4, head_width=8))
        args = MaskTrainingConfig(
            output_dir=str(folder / name), num_masks=4, batch_slots=40, warmup_steps=2, logging_steps=1, use_cpu=True,
            disable_tqdm=True, max_grad_norm=1e9, gradient_accumulation_steps=2 // PROCESSES,
            ddp_backend="gloo" if PROCESSES > 1 else None, **settings,
        )  # fmt: skip
        trainer = MaskAdapterTrainer(model, args, answers(17), answers(3, seed=1))
        if stop_at is not None:
            trainer.add_callback(StopAt(stop_at))
        trainer.train(resume_from_checkpoint=any((folder / name).glob("checkpoint-*")) or None)
        return trainer

    if stop_at is not None:
        train(stop_at)
    trainer = train()
    trainer.save_model(str(folder / name / "adapter"))
    if trainer.is_world_process_zero():
        (folder / name / "log.json").write_text(json.dumps(trainer.state.log_history))


def main(folder: Path, scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    # accelerate takes tensor parallelism on accelerators only; all that follows its check works on CPUs as well.
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    for name in scenarios:
        try:
            run(folder, name, **SCENARIOS[name])
        except ValueError as error:
            (folder / f"{name}.txt").write_text(str(error))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def save_start(folder: Path) -> None:
    """The model that all runs start from."""
    tiny_model().save_pretrained(folder / "start")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
