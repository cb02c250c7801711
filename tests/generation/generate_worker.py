"""What `test_generate_distributed.py` runs in two processes: `generate_worker.py CHECKPOINT FOLDER`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed
from tiny import PAD, tiny_model

from wedlm_hf.modeling_wedlm import WeDLMForCausalLM

PROMPTS = torch.tensor([[PAD, PAD, 20, 40, 9], [31, 77, 5, 6, 7]])
STRATEGIES = {
    "ar": {},
    "wedlm": {"strategy": "wedlm", "entropy_threshold": 2.0},
    "block": {"strategy": "block", "entropy_threshold": 2.0},
    "exact": {"strategy": "wedlm", "verification": "exact", "draft_threshold": 2.0},
}
# New tokens of each process.
LIMITS = [4, 16]


def decode(model, strategy, **options):
    inputs = {"input_ids": PROMPTS, "attention_mask": (PROMPTS != PAD).long()}
    return model.generate(**inputs, **STRATEGIES[strategy], **options).tolist()


def main(checkpoint, folder):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for scenario, run in SCENARIOS.items():
        result = {strategy: run(checkpoint, strategy, rank) for strategy in STRATEGIES}
        (Path(folder) / f"{scenario}-{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def synced(checkpoint, strategy, rank):
    """Answers of different lengths, that end together."""
    model = tiny_model()
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    # Stands for the collective operations of a sharded model: it hangs where not all processes take part.
    model.register_forward_pre_hook(lambda *_: torch.distributed.barrier())
    tokens = decode(model, strategy, max_new_tokens=LIMITS[rank], synced_gpus=True)
    return {"tokens": tokens, "forwards": len(forwards)}


def tensor_parallel(checkpoint, strategy, rank):
    """Answers of one model, whose weights are shared out."""
    model = WeDLMForCausalLM.from_pretrained(checkpoint, tp_plan="auto")
    return {"tokens": decode(model, strategy, max_new_tokens=16)}


SCENARIOS = {"synced": synced, "tp": tensor_parallel}

if __name__ == "__main__":
    main(*sys.argv[1:])
