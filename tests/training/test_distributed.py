"""One process and two train the same model: data parallel (DDP), sharded (FSDP2) and tensor parallel, over gloo."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from distributed_worker import REFUSED, SCENARIOS, STEPS, main, save_starts
from safetensors.torch import load_file
from test_adapt import write_base
from test_sft_trainer import CHATS, weights_of
from tiny import tiny_model, write_checkpoint
from typer.testing import CliRunner

from wedlm_hf.cli import app
from wedlm_hf.modeling_wedlm import WeDLMForCausalLM
from wedlm_hf.training import DynamicMaskingCallback
from wedlm_hf.training.saving import newest_complete_checkpoint
from wedlm_hf.training.train import main as train

EXAMPLES = Path(__file__).parents[2] / "examples" / "distributed"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """Runs of a single process."""
    folder, threads = save_starts(tmp_path_factory.mktemp("one")), torch.get_num_threads()
    main(folder, ["plain", "plain qwen2.5", "sft", "adapter"])
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    """Runs of all scenarios by two processes."""
    folder, worker = save_starts(tmp_path_factory.mktemp("two")), Path(__file__).with_name("distributed_worker.py")
    launch = [*TORCHRUN, str(worker), str(folder), *SCENARIOS, *REFUSED]
    result = subprocess.run(launch, env=ONE_THREAD, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-5000:]
    return folder


def log_of(folder: Path, name: str) -> dict[str, list[float]]:
    return json.loads((folder / name / "log.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - {"sft", "adapter"}))
def test_two_processes_make_the_steps_of_one(one_process, two_processes, name):
    """Losses, gradient norms, and how far each weight moved: in sixteen bits nearly so."""
    rtol, share = (1e-2, 0.2) if "bf16" in name else (1e-6, 1e-3)
    style = "qwen2.5" if "qwen2.5" in name else "qwen3"
    reference = "plain qwen2.5" if "qwen2.5" in name else "plain"
    log, expected = log_of(two_processes, name), log_of(one_process, reference)
    assert len(expected["loss"]) == STEPS
    for key, values in expected.items():
        assert log[key] == pytest.approx(values, rel=rtol), key
    folders = two_processes / name, one_process / reference
    found, expected = (WeDLMForCausalLM.from_pretrained(folder) for folder in folders)
    start, weights = tiny_model(style).state_dict(), found.state_dict()
    for key, weight in expected.state_dict().items():
        moved = (weight - start[key]).abs().max().item()
        assert moved > 0, key
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=share * moved)


def assert_same_weights(folder: Path, *names: str) -> None:
    resumed, whole = (weights_of(WeDLMForCausalLM.from_pretrained(folder / name)) for name in names)
    assert torch.equal(resumed, whole)


def history_of(folder: Path, name: str) -> list[dict[str, float]]:
    """All that the trainer logged, but for times."""
    log = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return [
        {key: value for key, value in entry.items() if not re.search("second|runtime|minutes|train_loss|flos", key)}
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
        assert_same_weights(folder, "sft resumed", "sft")
    assert log_of(two_processes, "resumed") == log_of(two_processes, "plain")
    assert_same_weights(two_processes, "resumed", "plain")


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(two_processes, name):
    assert REFUSED[name][1] in (two_processes / f"{name}.txt").read_text()


@pytest.mark.slow
def test_two_processes_train_and_evaluate_a_mask_adapter_as_one(one_process, two_processes):
    histories = [history_of(folder, "adapter") for folder in (two_processes, one_process)]
    assert len(histories[0]) == len(histories[1]) > 10
    for entry, expected in zip(*histories, strict=True):
        for key, value in expected.items():  # numbers are rounded for the log
            assert entry[key] == pytest.approx(value, rel=1e-4, abs=2e-3), key
    weights = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (two_processes, one_process)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-4, atol=1e-4)


def test_adapt_refuses_a_launcher_before_any_work(tmp_path, monkeypatch):
    base = write_base(tmp_path / "llama")
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun and accelerate set it
    result = CliRunner().invoke(app, ["adapt", str(base), str(tmp_path / "out"), "--minutes", "1"])
    assert result.exit_code == 2 and "is one process, got WORLD_SIZE=2: call it without a launcher" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_recipe_under_torchrun_loses_a_process_and_goes_on_under_accelerate_as_if_uninterrupted(tmp_path):
    write_checkpoint(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    words = [f"--model_name_or_path={tmp_path / 'model'}", f"--dataset={tmp_path / 'chats.jsonl'}"]
    words += (
        "--max_steps 30 --use_cpu true --bf16 false --block_size 4 --optim sgd --learning_rate 0.01 --logging_steps 1 "
        "--gradient_accumulation_steps 1 --disable_tqdm true --save_strategy steps --save_steps 1 --save_total_limit 2"
    ).split()
    threads = torch.get_num_threads()
    train([*words, f"--output_dir={tmp_path / 'one'}", "--per_device_train_batch_size=4"])
    torch.set_num_threads(threads)

    two, module = tmp_path / "two", ["-m", "wedlm_hf.training.train"]
    words += [f"--output_dir={two}", "--per_device_train_batch_size=2", "--resume_from_checkpoint=auto"]
    with subprocess.Popen([*TORCHRUN, *module, *words], env=ONE_THREAD) as launched:
        while not (two / "checkpoint-2").exists():
            assert launched.poll() is None
            time.sleep(0.01)
        psutil.Process(launched.pid).children()[-1].kill()
    assert launched.returncode != 0 and newest_complete_checkpoint(two).name != "checkpoint-30"

    accelerate = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={EXAMPLES / 'ddp.yaml'}"]
    accelerate += ["--num_processes=2", "--mixed_precision=no"]  # the file's bf16 goes before the command line's
    subprocess.run([*accelerate, *module, *words], env=ONE_THREAD, check=True, timeout=300)
    losses = [
        [entry["loss"] for entry in json.loads((folder / "trainer_state.json").read_text())["log_history"][:-1]]
        for folder in (tmp_path / "one", two)
    ]
    assert len(losses[0]) == 30 and losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_accelerate_reads_every_config(file):
    config = load_config_from_file(str(file))
    expected = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "fsdp2_nodes": "FSDP"}
    assert config.distributed_type == expected.get(file.stem, "DEEPSPEED")
    if "fsdp" in file.name:  # what accelerate itself would make of it; unknown keys raise
        settings = {key.removeprefix("fsdp_"): value for key, value in config.fsdp_config.items()}
        settings |= {"fsdp_version": settings.pop("version"), "cpu_offload": settings.pop("offload_params")}
        plugin = FullyShardedDataParallelPlugin(**settings)
        assert plugin.fsdp_version == 2 and "FULL" in str(plugin.state_dict_type)  # else nothing would be saved
    if sizes := config.parallelism_config:
        outer, inner = (sizes[f"parallelism_config_dp_{name}_size"] for name in ("replicate", "shard"))
        assert outer == config.num_machines and outer * inner == config.num_processes


def test_parallelism_that_cuts_rows_is_refused():
    for sizes in ({"cp_size": 2}, {"sp_size": 2, "sp_backend": "deepspeed"}):
        args = SimpleNamespace(parallelism_config=ParallelismConfig(**sizes))
        with pytest.raises(ValueError, match="Context and sequence parallelism cannot train a dual stream"):
            DynamicMaskingCallback().on_train_begin(args, None, None)
