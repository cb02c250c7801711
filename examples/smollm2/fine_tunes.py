"""One mask adapter for all fine-tunes of its base: what the bundled adapter gives a fine-tune that it never saw, and
what ten minutes of `wedlm adapt --from` add.

    python examples/smollm2/fine_tunes.py extraction
    python examples/smollm2/fine_tunes.py reasoning
    python examples/smollm2/fine_tunes.py german

Each fine-tunes SmolLM2-135M-Instruct by TRL's `SFTTrainer` on so many examples, in another of the ways that people
do: all weights for messages as JSON, a LoRA that is merged for solutions to problems, and a LoRA beside the weights
for answers in German (the names of countries, their currencies, dates and amounts, as the package Babel has them).
Then the model decodes held-out prompts: AR, verified with the adapter of the base, and after `adapt` on answers of its
own to training prompts. A run with as many examples goes on where an earlier one ended.
"""

import argparse
import json
import random
import sys
from datetime import date, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from babel import Locale, dates, numbers
from datasets import Dataset
from peft import LoraConfig, PeftModel
from trl import SFTConfig, SFTTrainer

from wedlm_hf import load_mask_adapter, pack
from wedlm_hf.adapters.adapt import AdaptConfig, adapt
from wedlm_hf.checkpoints.loading import FASTEST, load_model, load_tokenizer
from wedlm_hf.checkpoints.merge import merge_adapter
from wedlm_hf.eval.compare import compare
from wedlm_hf.eval.decoders import AR, DECODERS, EXACT
from wedlm_hf.eval.prompts import Prompt

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "real-wedlm")]
import data  # noqa: E402
from smollm2 import FOLDER, fetch, give_way  # noqa: E402

ADAPTER = HERE
ALL, MERGED, BESIDE = "all weights", "LoRA, merged", "LoRA, beside"
WAYS = {"extraction": ALL, "reasoning": MERGED, "german": BESIDE}
RATES = {ALL: 2e-4, MERGED: 2.5e-3, BESIDE: 2.5e-3}  # of learning
BATCH = 8  # examples of a step
ASKED = 400  # training prompts that the fine-tune answers for `adapt`


def german(count: int, seed: int) -> list[tuple[str, str]]:
    """Questions and answers in German."""
    rng, locale, found = random.Random(f"german {seed}"), Locale("de"), []
    coins = {place: numbers.get_territory_currencies(place)[-1:] for place in locale.territories if len(place) == 2}
    coins = {place: coin[0] for place, coin in coins.items() if coin and coin[0] in locale.currencies}
    for _ in range(count):
        place, tongue = rng.choice(sorted(coins)), rng.choice(("en", "es", "fr", "it", "nl", "pl", "pt", "sv", "tr"))
        name, spoken, coin = locale.territories[place], locale.languages[tongue], coins[place]
        day, amount = date(1990, 1, 1) + timedelta(rng.randrange(15000)), rng.randrange(100, 10**7) / 100
        called, money = locale.currencies[coin], numbers.format_currency(amount, coin, locale=locale)
        weekday, _, written = dates.format_date(day, "full", locale).partition(", ")
        pairs = {
            f"Wie heißt {name} auf {spoken}?": f"Auf {spoken} heißt {name} „{Locale(tongue).territories[place]}“.",
            f"Womit bezahlt man dort: {name}?": f"Dort bezahlt man mit dieser Währung: {called} ({coin}).",
            f"Welcher Wochentag ist der {day:%d.%m.%Y}?": f"Der {written} ist ein {weekday}.",
            f"Schreibe {amount} {coin} auf Deutsch.": f"Auf Deutsch schreibt man {money}. Das sind {called}.",
        }
        found.append(rng.choice(list(pairs.items())))
    return found


def problems(task: str, count: int, is_held_out: bool) -> list[tuple[str, str]]:
    """Questions and answers. Those that are held out occur in no training."""
    if task == "german":
        learnt = dict(german(8000, 0))
        drawn = german(50 * count, 1) if is_held_out else list(learnt.items())
        return [pair for pair in dict(drawn).items() if not is_held_out or pair[0] not in learnt][:count]
    drawn_problems = data.held_out_problems(task, count, 1) if is_held_out else data.training_problems(task)
    return [(each.question, each.answer) for each in islice(drawn_problems, count)]


def fine_tune(task: str, folder: Path, count: int) -> Path:
    """Trains by TRL's trainer, and writes what it writes: a whole model, or a LoRA."""
    output = folder / "fine-tune"
    if (output / "training_args.bin").exists():
        return output
    chats = [
        {"prompt": [{"role": "user", "content": asked}], "completion": [{"role": "assistant", "content": answer}]}
        for asked, answer in problems(task, 8000, False)
    ]
    random.Random(0).shuffle(chats)
    way, base = WAYS[task], str(fetch(FOLDER))
    args = SFTConfig(
        output_dir=str(output), max_steps=max(1, count // BATCH), learning_rate=RATES[way], warmup_steps=10,
        lr_scheduler_type="constant_with_warmup", per_device_train_batch_size=1, gradient_accumulation_steps=BATCH,
        max_length=512, completion_only_loss=True, use_cpu=not torch.cuda.is_available(), bf16=False,
        gradient_checkpointing=False, save_strategy="no", logging_steps=5, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        load_model(base, dtype=torch.float32), args, train_dataset=Dataset.from_list(chats),
        processing_class=load_tokenizer(base), peft_config=None if way == ALL else lora,
    )  # fmt: skip
    trainer.train()
    if way == MERGED:
        trainer.model = trainer.model.merge_and_unload()
    elif way == BESIDE:
        trainer.model.peft_config["default"].base_model_name_or_path = base  # a model of a GGUF file names none
    trainer.save_model()
    return output


def merged(task: str, fine_tune: Path) -> Path:
    """The fine-tune as a whole model, which `adapt` takes."""
    if WAYS[task] != BESIDE:
        return fine_tune
    output = fine_tune.with_name("merged")
    if not (output / "tokenizer_config.json").exists():  # which is written last
        merge_adapter(load_model(str(fetch(FOLDER)), dtype=torch.float32), fine_tune).save_pretrained(output)
        load_tokenizer(str(fine_tune)).save_pretrained(output)
    return output


def decode(task: str, model: Path, adapter: Path, count: int) -> dict[str, dict[str, Any]]:
    """AR decoding and verified decoding with an adapter, on held-out prompts."""
    tokenizer = load_tokenizer(str(model))
    if WAYS[task] == BESIDE:
        loaded = pack(PeftModel.from_pretrained(load_model(str(fetch(FOLDER))), model).get_base_model())
    else:
        loaded = load_model(str(model), dtype=FASTEST)
    load_mask_adapter(loaded, adapter, any_base=True)
    prompts = [Prompt.of(asked, task=task) for asked, _ in problems(task, count, True)]
    rows = compare(loaded, tokenizer, prompts, {"ar": DECODERS[AR], "exact": DECODERS[EXACT]}, title=task)
    return {row["decoder"]: row for row in rows}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=WAYS)
    parser.add_argument("--examples", type=int, default=240, help="to fine-tune on")
    parser.add_argument("--minutes", type=float, default=10, help="of `adapt`")
    parser.add_argument("--count", type=int, default=12, help="held-out prompts to decode")
    parser.add_argument("--output", type=Path, default=Path("build/fine-tunes"))
    options = parser.parse_args()
    give_way()
    folder = options.output / f"{options.task}-{options.examples}"
    folder.mkdir(parents=True, exist_ok=True)
    model, own = fine_tune(options.task, folder, options.examples), folder / "adapter"
    asked = folder / "prompts.jsonl"
    lines = [{"prompt": question} for question, _ in problems(options.task, 8000, False)[-ASKED:]]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    adapt(merged(options.task, model), own, AdaptConfig(minutes=options.minutes, prompts=asked, start=str(ADAPTER)))
    rows = []
    for name, adapter in {"the base's": ADAPTER, "trained further": own}.items():
        found = decode(options.task, model, adapter, options.count)
        ar, exact = found["ar"], found["exact"]
        speed = exact["tokens_per_second"] / ar["tokens_per_second"]
        tokens, error = exact["tokens_per_forward"], exact["tokens_per_forward_error"]
        rows.append((options.task, WAYS[options.task], name, tokens, error, speed))
    columns = ["fine-tune", "trained", "adapter", "tokens per forward", "±", "speed against AR"]
    print(pd.DataFrame(rows, columns=columns).to_markdown(index=False, floatfmt=".2f"))


if __name__ == "__main__":
    main()
