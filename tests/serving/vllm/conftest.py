"""Real vLLM engines in this process, on wedlm-nano. Where there is no vLLM, these tests are skipped in one line:
`make test-vllm` sets up an environment that has it."""

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from wedlm_hf.adapters.attach import save_mask_adapter

NANO = Path(__file__).parents[3] / "examples" / "wedlm-nano"
PROPOSER = "wedlm_hf.serving.vllm.Proposer"

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# Without vLLM, test_available.py is left, and says so.
NEED_VLLM = ["test_equality.py", "test_requests.py", "test_server.py", "test_start_up.py"]
NEED_TRL = ["test_options.py"]  # as tests/tiny.py does, which vLLM's environment has not
HAS_VLLM = bool(importlib.util.find_spec("vllm"))
collect_ignore = NEED_TRL if HAS_VLLM else NEED_VLLM


def check_entry_point() -> None:
    """Ends the tests where vLLM would not find the plug-in: it then takes our checkpoints for ones with code of their
    own. Metadata that an older build left in a folder hide those of the installed package."""
    if not any(each.name == "wedlm" for each in importlib.metadata.entry_points(group="vllm.general_plugins")):
        found = [getattr(each, "_path", "") for each in importlib.metadata.distributions(name="wedlm-hf")]
        pytest.exit(f"vLLM does not find its plug-in: install this folder, or delete old metadata: {found}", 2)


if HAS_VLLM:
    check_entry_point()
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # with kernels for CPUs beside it, vLLM does not see that


ENGINES: list[Any] = []  # none may go before the others: with it goes what the engines of a process share


def start_engine(model: str | Path = NANO, tokens: int = 0, **options: Any) -> Any:
    """An engine; with `tokens`, one of verified decoding with so many speculative tokens."""
    from prometheus_client import REGISTRY, CollectorRegistry
    from vllm import LLM

    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32, "block_size": 32}
    if tokens:
        options["speculative_config"] = {"model": PROPOSER, "num_speculative_tokens": tokens}
    engine = LLM(str(model), disable_log_stats=False, **defaults | options)
    ENGINES.append(engine)
    # The next engine of this process takes the place of this one's metrics.
    engine.metrics = CollectorRegistry()
    for metric in list(REGISTRY._collector_to_names):
        if getattr(metric, "_name", "").startswith("vllm:"):
            engine.metrics.register(metric)
    return engine


@pytest.fixture(scope="session")
def nano() -> Path:
    return NANO


@pytest.fixture(scope="session")
def start() -> Callable[..., Any]:
    return start_engine


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of all tasks in turn, as tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(NANO, trust_remote_code=False)
    tasks: dict[str, list[list[int]]] = {}
    for line in (NANO / "tasks.jsonl").read_text(encoding="utf-8").splitlines():
        task = json.loads(line)
        chat = task.get("messages") or [{"role": "user", "content": task["prompt"]}]
        if len(tasks.setdefault(task["task"], [])) < 10:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            tasks[task["task"]].append(list(ids))
    return [prompt for turn in zip(*tasks.values(), strict=True) for prompt in turn]


@pytest.fixture(scope="session")
def ar() -> Iterator[Any]:
    """vLLM's own AR decoding."""
    return start_engine()


@pytest.fixture(scope="session")
def verified() -> Iterator[Any]:
    """Verified parallel decoding, which drafts in every step, whatever the clock says."""
    return start_engine(tokens=16, additional_config={"wedlm": {"always_draft": True}})


@pytest.fixture(scope="session")
def tight() -> Iterator[Any]:
    """Verified decoding with room for 384 tokens in all, which runs long prompts in parts."""
    return start_engine(
        tokens=16, num_gpu_blocks_override=12, max_model_len=256, max_num_batched_tokens=48, max_num_seqs=16
    )


@pytest.fixture(scope="session")
def complete() -> Callable[..., list[Any]]:
    """`complete(engine, prompts, **sampling)`: what the engine makes of prompts; greedy unless told otherwise."""
    from vllm import SamplingParams

    def run(engine: Any, prompts: Sequence[list[int]], **sampling: Any) -> list[Any]:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 96} | sampling)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs[0] for output in engine.generate(inputs, params, use_tqdm=False)]

    return run


@pytest.fixture(scope="session")
def metrics() -> Callable[[Any], dict[str, Any]]:
    """vLLM's own metrics of an engine, by the last part of their names."""

    from vllm.v1.metrics import reader

    def read(engine: Any) -> dict[str, Any]:
        found = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "REGISTRY", engine.metrics)
            all_of_them = engine.get_metrics()
        for metric in all_of_them:
            value = getattr(metric, "value", getattr(metric, "values", None))
            found[metric.name.removeprefix("vllm:").removeprefix("spec_decode_")] = value
        return found

    return read


@pytest.fixture(scope="session")
def random_adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A mask adapter of wedlm-nano with random updates of fused layers too, and the model that has it."""
    from wedlm_hf import WeDLMForCausalLM, add_mask_adapter
    from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings

    torch.manual_seed(0)
    model = WeDLMForCausalLM.from_pretrained(NANO)
    targets = ("o_proj", "down_proj", "k_proj", "up_proj")
    settings = MaskAdapterSettings(rank=4, target_modules=targets, head_width=16, layers_to_transform=(1, 2, 3))
    adapter = add_mask_adapter(model, settings)
    for parameter in [*adapter.up.values(), adapter.head.up, adapter.mask_embedding]:
        torch.nn.init.normal_(parameter, std=0.02)
    folder = tmp_path_factory.mktemp("adapter")
    save_mask_adapter(model, folder)
    return folder, model.eval().requires_grad_(False)
