"""What the decoding loop costs beside the forwards, and how that grows with length, on random weights.

    python benchmarks/random_weights.py                          # 86M parameters, batch sizes 1, 4 and 16
    python benchmarks/random_weights.py --shape qwen3-0.6b --long  # a step after 256 and after 4,096 new tokens

Random weights accept few drafts and fill few masks, so this says nothing of speed against AR: it compares times in and
outside the forwards (`own cost`), and memory. All decoders take turns; times are medians.
"""

import itertools
from statistics import median
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer

from wedlm_hf.eval.decoders import AR, DECODERS, EXACT, WEDLM
from wedlm_hf.eval.measure import ForwardCounter, decode
from wedlm_hf.modeling_wedlm import WeDLMConfig, WeDLMForCausalLM

PROMPT_TOKENS = 64
CONTEXT = 8192
LONG = (256, 4096)
LAST_STEPS = 64
# Sizes only. The first is Qwen3-0.6B's; the second is small enough to be timed on any CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "86m": {
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def random_model(shape: dict[str, Any], seed: int = 0) -> WeDLMForCausalLM:
    """In evaluation mode, without an end token."""
    ends = {"mask_token_id": shape["vocab_size"] - 1, "eos_token_id": None, "bos_token_id": None}
    torch.manual_seed(seed)
    return WeDLMForCausalLM(
        WeDLMConfig(**shape, max_position_embeddings=CONTEXT, tie_word_embeddings=True, **ends)
    ).eval()


def by_batch_size(model: WeDLMForCausalLM, sizes: list[int], max_new_tokens: int, repeats: int) -> pd.DataFrame:
    """A row for each batch size and decoder."""
    prompts = torch.randint(model.config.vocab_size - 1, (max(sizes), PROMPT_TOKENS)).tolist()
    rows = []
    for size, repeat, (name, keywords) in itertools.product(sizes, range(-1, repeats), DECODERS.items()):
        options = {**keywords, "max_new_tokens": max_new_tokens, "do_sample": False}
        decodings = decode(model, None, prompts[:size], options)
        if repeat >= 0:  # the first turn is a warm-up
            seconds, inside = (sum(getattr(d, key) for d in decodings) for key in ("seconds", "forward_seconds"))
            tokens, forwards = sum(len(d.tokens) for d in decodings), sum(d.forwards for d in decodings)
            rows.append((size, name, tokens / seconds, tokens / forwards, seconds / inside - 1))
    columns = ["batch size", "decoder", "tokens/s", "tokens per forward", "own cost"]
    return pd.DataFrame(rows, columns=columns).groupby(columns[:2], sort=False).median()


def by_length(model: WeDLMForCausalLM, lengths: tuple[int, ...], repeats: int) -> pd.DataFrame:
    """Time of a step, and on CUDA memory, at the end of short and long answers, a line for each decoder and length."""
    prompt = torch.randint(model.config.vocab_size - 1, (PROMPT_TOKENS,)).tolist()
    rows, peaks = [], dict[tuple[str, int], float]()
    for repeat, length, name in itertools.product(range(-1, repeats), lengths, (AR, WEDLM, EXACT)):
        options = {**DECODERS[name], "max_new_tokens": length, "do_sample": False}
        with ForwardCounter(model) as counter:
            (decoding,) = decode(model, None, [prompt], options)
        if repeat < 0:  # a warm-up
            continue
        peaks[name, length] = decoding.peak_bytes / 2**20
        steps = 1000 * np.diff(counter.starts)[-LAST_STEPS:]
        inside = [1000 * span for span in counter.spans[:-1][-LAST_STEPS:]]
        widths = [width for _, width in counter.shapes[:-1][-LAST_STEPS:]]
        rows.append((name, length, np.median(steps), median(inside), median(widths)))
    columns = ["decoder", "new tokens", "ms a step", "in the forward", "slots"]
    table = pd.DataFrame(rows, columns=columns).groupby(columns[:2], sort=False).median()
    return table.assign(**{"peak MiB": pd.Series(peaks)} if any(peaks.values()) else {})  # on CUDA alone


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "86m",
    batch_sizes: Annotated[str, typer.Option(help="With commas.")] = "1,4,16",
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    long: Annotated[bool, typer.Option("--long", help="How a step grows with length, instead.")] = False,
    dtype: str = "float32",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Measure and print a table."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"`--shape` takes one of {', '.join(SHAPES)}, got {shape!r}.")
    model = random_model(SHAPES[shape]).to(device=device, dtype=getattr(torch, dtype))
    sizes = [int(size) for size in batch_sizes.split(",")]
    table = by_length(model, LONG, repeats) if long else by_batch_size(model, sizes, max_new_tokens, repeats)
    print(table.reset_index().to_markdown(index=False, floatfmt=",.3f"))
    print(f"{shape}, {dtype}, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    typer.run(main)
