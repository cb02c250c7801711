"""One process and two train the same model: data parallel (DDP), sharded (FSDP2) and tensor parallel, over gloo."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from distributed_worker import SCENARIOS, STEPS, main, save_starts
from tiny import tiny_model

from wedlm_hf.modeling_wedlm import WeDLMForCausalLM
from wedlm_hf.training.callback import refuse_context_parallelism

EXAMPLES = Path(__file__).parents[2] / "examples" / "distributed"
CONTEXT_PARALLEL = "context parallel"
EQUAL = sorted(set(SCENARIOS) - {CONTEXT_PARALLEL, "sft"} - {name for name in SCENARIOS if "bf16" in name})


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """Runs of a single process."""
    folder = tmp_path_factory.mktemp("one")
    save_starts(folder)
    threads = torch.get_num_threads()
    main(folder, ["plain", "plain qwen2.5", "sft"])
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    """Runs of all scenarios by two processes."""
    folder = tmp_path_factory.mktemp("two")
    save_starts(folder)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    worker = str(Path(__file__).with_name("distributed_worker.py"))
    result = subprocess.run(
        [*launch, worker, str(folder), *SCENARIOS], env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return folder


def log_of(folder: Path, name: str) -> dict[str, list[float]]:
    return json.loads((folder / name / "log.json").read_text())


def assert_same_run(folder: Path, name: str, reference: Path, reference_name: str, rtol: float, share: float) -> None:
    """Losses, gradient norms, and how far each weight moved."""
    log, expected = log_of(folder, name), log_of(reference, reference_name)
    assert len(expected["loss"]) == STEPS
    for key, values in expected.items():
        assert log[key] == pytest.approx(values, rel=rtol), key
    weights = WeDLMForCausalLM.from_pretrained(folder / name).state_dict()
    style = "qwen2.5" if "qwen2.5" in name else "qwen3"
    start = tiny_model(style).state_dict()
    for key, weight in WeDLMForCausalLM.from_pretrained(reference / reference_name).state_dict().items():
        moved = (weight - start[key]).abs().max().item()
        assert moved > 0, key
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=share * moved)


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_make_the_steps_of_one(one_process, two_processes, name):
    reference = "plain qwen2.5" if "qwen2.5" in name else "plain"
    assert_same_run(two_processes, name, one_process, reference, rtol=1e-6, share=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCENARIOS if "bf16" in name])
def test_bf16_makes_nearly_the_same_steps(one_process, two_processes, name):
    assert_same_run(two_processes, name, one_process, "plain", rtol=1e-2, share=0.2)


@pytest.mark.slow
def test_a_resumed_run_of_two_processes_is_the_uninterrupted_one(two_processes):
    assert log_of(two_processes, "resumed") == log_of(two_processes, "plain")
    resumed, whole = (WeDLMForCausalLM.from_pretrained(two_processes / name) for name in ("resumed", "plain"))
    for weight, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(weight, expected)


def history_of(folder: Path, name: str) -> list[dict[str, float]]:
    """All that the trainer logged, but for times."""
    log = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return [
        {key: value for key, value in entry.items() if not re.search("second|runtime|train_loss|flos", key)}
        for entry in log
    ]


@pytest.mark.slow
def test_two_processes_train_evaluate_and_decode_as_one_and_resume_digit_by_digit(one_process, two_processes):
    expected = history_of(one_process, "sft")
    names = {key for entry in expected for key in entry}
    for name in ("ar_nll", "elbo_nll", "mask_nll_ratio_50", "accuracy_offset_2_3", "tokens_per_forward"):
        assert f"eval_{name}" in names
    for entry, reference in zip(history_of(two_processes, "sft"), expected, strict=True):
        assert entry == pytest.approx(reference, rel=1e-5)
    for folder in (one_process, two_processes):
        assert history_of(folder, "sft resumed") == history_of(folder, "sft")
        resumed, whole = (WeDLMForCausalLM.from_pretrained(folder / name) for name in ("sft resumed", "sft"))
        for weight, other in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert torch.equal(weight, other)


@pytest.mark.slow
def test_context_parallelism_is_refused_with_the_reason(two_processes):
    refused = (two_processes / "refused.txt").read_text()
    assert refused.startswith("Context and sequence parallelism cannot train a dual stream: they cut the row")


def test_the_model_itself_refuses_a_row_that_was_cut():
    layout = dict.fromkeys(("stream_ids", "block_ids", "targets"), torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape of the input, \(1, 4\), got \(1, 8\)\. Context parallelism"):
        tiny_model()(input_ids=torch.zeros(1, 4, dtype=torch.int64), **layout)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_accelerate_reads_every_config(file):
    config = load_config_from_file(str(file))
    expected = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "fsdp2_nodes": "FSDP"}
    assert config.distributed_type == expected.get(file.stem, "DEEPSPEED")
    if "fsdp" in file.name:
        # What accelerate itself would make of it; unknown keys raise.
        settings = {key.removeprefix("fsdp_"): value for key, value in config.fsdp_config.items()}
        settings["fsdp_version"] = settings.pop("version")
        settings["cpu_offload"] = settings.pop("offload_params")
        plugin = FullyShardedDataParallelPlugin(**settings)
        assert plugin.fsdp_version == 2
        assert "FULL" in str(plugin.state_dict_type)  # else `save_model` would save nothing
    if config.parallelism_config:
        sizes = [config.parallelism_config[f"parallelism_config_dp_{name}_size"] for name in ("replicate", "shard")]
        assert sizes[0] == config.num_machines
        assert sizes[0] * sizes[1] == config.num_processes


def test_the_slurm_script_is_valid_and_names_a_config_that_exists():
    script = EXAMPLES / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "examples/distributed/fsdp2.yaml" in script.read_text() and (EXAMPLES / "fsdp2.yaml").exists()


@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"sp_size": 2, "sp_backend": "deepspeed"}])
def test_parallelism_that_cuts_rows_is_refused_and_none_is_not(sizes):
    refuse_context_parallelism(None)
    refuse_context_parallelism(ParallelismConfig(dp_replicate_size=2))
    with pytest.raises(ValueError, match="Context and sequence parallelism cannot train a dual stream"):
        refuse_context_parallelism(ParallelismConfig(**sizes))
