"""Generation in two processes, which run this file: waiting for each other (`synced_gpus`), and tensor parallel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from tiny import PAD, tiny_model

from wedlm_hf.modeling_wedlm import WeDLMForCausalLM

PROMPTS = torch.tensor([[PAD, PAD, 20, 40, 9], [31, 77, 5, 6, 7]])
STRATEGIES = {
    "ar": {},
    "wedlm": {"strategy": "wedlm", "entropy_threshold": 2.0},
    "block": {"strategy": "block", "entropy_threshold": 2.0},
    "exact": {"strategy": "wedlm", "verification": "exact"},
}
LIMITS = [4, 16]  # new tokens of each process


def decode(model, strategy, **options):
    inputs = {"input_ids": PROMPTS, "attention_mask": (PROMPTS != PAD).long()}
    return model.generate(**inputs, **STRATEGIES[strategy], **options).tolist()


def main(checkpoint, folder):
    torch.distributed.init_process_group("gloo")
    rank, told, forwards = torch.distributed.get_rank(), {}, []
    model, shared = tiny_model(), WeDLMForCausalLM.from_pretrained(checkpoint, tp_plan="auto")
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    # Stands for the collective operations of a sharded model: it hangs where not all processes take part.
    model.register_forward_pre_hook(lambda *_: torch.distributed.barrier())
    for strategy in STRATEGIES:
        forwards.clear()
        tokens = decode(model, strategy, max_new_tokens=LIMITS[rank], synced_gpus=True)
        told[strategy] = {
            "synced": tokens,
            "forwards": len(forwards),
            "tp": decode(shared, strategy, max_new_tokens=16),
        }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_that_finish_early_keep_the_others_company_and_share_weights(tmp_path):
    tiny_model().save_pretrained(tmp_path / "checkpoint")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    result = subprocess.run([*command, tmp_path / "checkpoint", tmp_path], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for strategy in STRATEGIES:
        short, long = (decode(tiny_model(), strategy, max_new_tokens=limit) for limit in LIMITS)
        assert [process[strategy]["synced"] for process in told] == [short, long]
        assert [process[strategy]["tp"] for process in told] == [long, long]
        assert told[0][strategy]["forwards"] == told[1][strategy]["forwards"]


if __name__ == "__main__":
    main(*sys.argv[1:])
