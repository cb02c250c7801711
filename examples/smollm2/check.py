"""Is verified decoding SmolLM2's own text? Two checks against the stock model as it was loaded, without an adapter.

    python examples/smollm2/check.py                  # 208 greedy answers, and 3 x 1,920 samples
    python examples/smollm2/check.py --dtype 4bit --answers 64 --samples 0 --batch-size 4
    python examples/smollm2/check.py --dtype 8bit --answers 16 --samples 0 --batch-size 4 --lora

Greedy answers must equal those of plain `generate` token for token. Samples must be distributed as the model's
probabilities say: the first tokens of many draws from one prompt, a chi-square test over all sequences that can occur.
Both have the same packed layers, and with `--lora` the same LoRA of random numbers beside their layers.
Every step checks drafts, whatever that costs, so that these are what is tested.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from scipy import stats
from smollm2 import FOLDER, fetch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from wedlm_hf import load_mask_adapter
from wedlm_hf.checkpoints.loading import load_model, load_tokenizer, set_format
from wedlm_hf.checkpoints.packed import PACKINGS
from wedlm_hf.eval.prompts import read_prompts

HERE = Path(__file__).parent
TOPICS = (
    "volcanoes, photosynthesis, the French Revolution, inflation, black holes, vaccines, chess, the water cycle, DNA, "
    "democracy, coffee, whales, electric cars, Mozart, the Great Wall of China, earthquakes, the heart, recycling"
).split(", ")
FORMS = (
    "Tell me three facts about {}.", "Explain {} to a child.", "Write a short paragraph about {}.",
    "Why is {} important?", "Write a poem about {}.", "List five words that have to do with {}.",
    "What do most people get wrong about {}?", "Write a Python dictionary that describes {}.",
)  # fmt: skip
SAMPLED = (
    "Write a story about a dog.", "Name a color and say why you like it.", "Give me an idea for dinner tonight.",
)  # fmt: skip
TOP_K, LENGTH, SIGNIFICANCE = 3, 4, 1e-3


def encode(tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, `(B, P)`, padded on the left."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True)
        for one in questions
    ]
    return dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False))


def check_greedy(
    model: Any, stock: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> bool:
    """Whether all greedy answers are the stock class' own; prints what differs."""
    held_out = HERE / "prompts-heldout.jsonl"
    questions = [prompt.text for prompt in read_prompts(held_out.name, held_out.read_text(encoding="utf-8"))]
    questions = (questions + [form.format(topic) for form in FORMS for topic in TOPICS])[: options.answers]
    same = tokens = forwards = drafted = accepted = 0
    for start in range(0, len(questions), options.batch_size):
        part = questions[start : start + options.batch_size]
        inputs = encode(tokenizer, part)
        settings = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "repetition_penalty": 1.0}
        expected = stock.generate(**inputs, **settings, pad_token_id=tokenizer.pad_token_id)
        output = model.generate(
            **inputs, **settings, strategy="wedlm", verification="exact", window_size=options.drafts,
            return_dict_in_generate=True,
        )  # fmt: skip
        length = inputs["input_ids"].shape[1]
        for question, own, other in zip(part, output.sequences, expected, strict=True):
            is_same = answer(own[length:], tokenizer) == answer(other[length:], tokenizer)
            same += is_same
            if not is_same:
                print(f"Differs: {question}")
        tokens, forwards = tokens + int(output.stats.new_tokens.sum()), forwards + int(output.stats.forwards.sum())
        drafted, accepted = drafted + int(output.stats.drafted.sum()), accepted + int(output.stats.accepted.sum())
        print(f"{same} equal, {tokens} tokens, {forwards} forwards", file=sys.stderr)
    format_name = options.dtype + ", a LoRA beside" * options.lora
    print(
        f"Greedy: {same} of {len(questions)} answers of at most {options.max_new_tokens} tokens equal plain "
        f"`generate`'s ({format_name}); {tokens / forwards:.2f} tokens per forward, {accepted} of {drafted} drafts "
        "accepted."
    )
    return same == len(questions)


def answer(tokens: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of an answer up to its end."""
    ids = tokens.tolist()
    return ids[: ids.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in ids else ids


@torch.no_grad()
def probabilities(
    stock: LlamaForCausalLM,
    prompt: torch.Tensor,
    eos_token_id: int,
    before: tuple[int, ...] = (),
    reached: float = 1.0,
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence of `LENGTH` tokens that top-k sampling can draw, with its probability."""
    if len(before) == LENGTH or eos_token_id in before:
        yield before, reached
        return
    logits = stock(torch.cat([prompt, prompt.new_tensor([before])], dim=1)).logits[0, -1]
    values, tokens = logits.topk(TOP_K)
    for token, share in zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True):
        yield from probabilities(stock, prompt, eos_token_id, (*before, token), reached * share)


def check_samples(
    model: Any, stock: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> bool:
    """Whether samples are distributed as the stock class' probabilities say; prints the tests' p-values."""
    is_alike = True
    for question in SAMPLED:
        inputs = encode(tokenizer, [question])
        expected = dict(probabilities(stock, inputs["input_ids"], tokenizer.eos_token_id))
        counts: Counter[tuple[int, ...]] = Counter()
        drafted = accepted = 0
        torch.manual_seed(0)
        while counts.total() < options.samples:
            output = model.generate(
                **inputs, do_sample=True, temperature=1.0, top_k=TOP_K, top_p=1.0, repetition_penalty=1.0,
                max_new_tokens=LENGTH, num_return_sequences=64, strategy="wedlm", verification="exact",
                window_size=options.drafts, return_dict_in_generate=True,
            )  # fmt: skip
            new = output.sequences[:, inputs["input_ids"].shape[1] :]
            counts.update(tuple(answer(row, tokenizer)) for row in new)
            drafted, accepted = drafted + int(output.stats.drafted.sum()), accepted + int(output.stats.accepted.sum())
        strangers = counts.keys() - expected.keys()
        # Cells with few expected draws are joined, as the test wants.
        total = counts.total()
        large = [cell for cell, share in expected.items() if share * total >= 5]
        rest = max(1e-12, 1 - sum(expected[cell] for cell in large))
        seen = [counts[cell] for cell in large] + [total - sum(counts[cell] for cell in large)]
        wanted = [*(expected[cell] * total for cell in large), rest * total]
        p_value = stats.chisquare(seen, wanted, sum_check=False).pvalue
        print(
            f"Sampling, {question!r}: {total} draws, {len(large)} cells, p = {p_value:.3f}, {len(strangers)} "
            f"sequences that cannot occur, {accepted} of {drafted} drafts accepted."
        )
        is_alike &= not strangers and p_value >= SIGNIFICANCE
    return is_alike


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=208, help="greedy answers to compare, at most 208; 0: none")
    parser.add_argument("--samples", type=int, default=1920, help="draws from each prompt; 0: no sampling")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--drafts", type=int, default=2, help="checked in every step, at most")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the model is kept")
    parser.add_argument("--adapter", type=Path, default=HERE, help="folder of the mask adapter")
    parser.add_argument("--dtype", choices=("float32", *PACKINGS), default="float32")
    parser.add_argument("--lora", action="store_true", help="both models have a LoRA beside their layers")
    options = parser.parse_args()
    source = str(fetch(options.folder))
    stock, tokenizer = load_model(source, dtype=torch.float32), load_tokenizer(source)
    if options.lora:
        torch.manual_seed(0)
        small = LoraConfig(r=8, lora_alpha=1, target_modules="all-linear", init_lora_weights=False)
        stock = inject_adapter_in_model(small, stock).eval()
    model = deepcopy(stock)
    for each in (stock, model):
        set_format(each, options.dtype, "cpu")
    load_mask_adapter(model, options.adapter)
    checks = [check_greedy] * (options.answers > 0) + [check_samples] * (options.samples > 0)
    results = [check(model, stock, tokenizer, options) for check in checks]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
