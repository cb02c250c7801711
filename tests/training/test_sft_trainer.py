"""`WeDLMSFTTrainer`: data of every kind, loss, evaluation, checkpoints, and what it refuses."""

import json
import logging
import re
from collections import defaultdict
from pathlib import Path

import pandas as pd
import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from dual_stream_oracle import IGNORE
from tiny import EOS, MASK, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer, TrainerCallback, TrainingArguments

from wedlm_hf.training import (
    DataCollatorForDualStreamMasking,
    WeDLMSFTConfig,
    WeDLMSFTTrainer,
    sft_config,
    sft_trainer,
)
from wedlm_hf.training.cpu import bf16_speedup
from wedlm_hf.training.metrics import masks_are_ready
from wedlm_hf.training.saving import newest_complete_checkpoint

CHATS = [
    [
        {"role": "user", "content": f"Count from {first} to {first + length}"},
        {"role": "assistant", "content": ", ".join(str(first + step) for step in range(length + 1))},
    ]
    for first, length in [(1, 3), (2, 7), (5, 4), (3, 1), (4, 9), (7, 2), (1, 8), (6, 5)]
]
MESSAGES = Dataset.from_dict({"messages": CHATS})


def settings_of(folder: Path, **settings) -> WeDLMSFTConfig:
    defaults = {
        "output_dir": str(folder), "max_steps": 1, "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0, "optim": "sgd",
        "max_length": 400, "block_size": 4, "num_eos": 3, "eval_decoding_samples": 0,
        "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    return WeDLMSFTConfig(**(defaults | settings))


def trainer_on(folder: Path, data=MESSAGES, *, model=None, tokenizer=None, eval_dataset=None, peft=None, **settings):
    args, tokenizer = settings_of(folder, **settings), tokenizer or tiny_tokenizer()
    return WeDLMSFTTrainer(model or tiny_model(), args, data, eval_dataset, tokenizer, peft_config=peft)


def learnt_text(example: dict) -> str:
    kept = [token for token, label in zip(example["input_ids"], example["labels"], strict=True) if label != IGNORE]
    return tiny_tokenizer().decode(kept)


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def write_llama_like(folder: Path) -> Path:
    """Saves the tiny tokenizer with the names of Llama 3's tokens and Llama 3.2's template. Returns the folder."""
    tiny_tokenizer().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text().replace("<|im_start|>", "<|start_header_id|>")
        text = text.replace("<|im_end|>", "<|eot_id|>")
        (folder / file).write_text(text.replace('"eos_token"', '"bos_token": "<|start_header_id|>", "eos_token"'))
    template = Path(trl.__file__).parent / "chat_templates" / "llama3_2.jinja"
    (folder / "chat_template.jinja").write_text(template.read_text())
    return folder


def decoded(model, chat: list[dict] = CHATS[0], max_new_tokens: int = 12, **settings):
    """What the model answers to the first turn of a chat, as a user would ask it."""
    how = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tiny_tokenizer().apply_chat_template(chat[:1], **how)
    settings |= {"strategy": "wedlm", "max_new_tokens": max_new_tokens, "do_sample": False}
    return model.eval().generate(**inputs, **settings)


# Data.

PROMPT, ANSWER = "Count from 1 to 4", "1, 2, 3, 4"
LEARNT = f"{ANSWER}<|im_end|>"
TURNS = CHATS[0]
SHARED = [{"from": "human", "value": PROMPT}, {"from": "gpt", "value": ANSWER}]
PARTS = [{**turn, "content": [{"type": "text", "text": part} for part in turn["content"]]} for turn in TURNS]
NOTHING = {"chat_template_kwargs": None, "tools": None}
IDS = [11, 12, 13, EOS]
FORMATS = {
    "messages": ({"messages": TURNS}, LEARNT),
    "conversations": ({"conversations": [SHARED[0] | {"from": "user"}, SHARED[1] | {"from": "assistant"}]}, LEARNT),
    "conversations of ShareGPT": ({"conversations": SHARED, "id": "a"}, LEARNT),
    "messages beside a prompt, as in UltraChat": ({"prompt": PROMPT, "prompt_id": "1f", "messages": TURNS}, LEARNT),
    "messages beside labels of something else": ({"messages": TURNS, "labels": [1, 0, 1]}, LEARNT),
    "messages whose template has no arguments": ({"messages": TURNS, **NOTHING}, LEARNT),
    "messages in parts": ({"messages": PARTS}, LEARNT),
    "prompt and completion of a chat": ({"prompt": TURNS[:1], "completion": TURNS[1:]}, LEARNT),
    "prompt and completion": ({"prompt": f"{PROMPT}\n", "completion": ANSWER}, LEARNT),
    "text": ({"text": f"{PROMPT}: {ANSWER}"}, f"{PROMPT}: {LEARNT}"),
    "input_ids": ({"input_ids": IDS}, tiny_tokenizer().decode(IDS)),
    "input_ids and marks": ({"input_ids": IDS, "assistant_masks": [0, 0, 1, 1]}, tiny_tokenizer().decode(IDS[2:])),
    "input_ids and labels": ({"input_ids": IDS, "labels": [IGNORE] * 2 + IDS[2:]}, tiny_tokenizer().decode(IDS[2:])),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_each_kind_of_data_supervises_what_it_should(tmp_path, kind):
    example, expected = FORMATS[kind]
    data = Dataset.from_list([example, example])
    for each in (data, data.to_iterable_dataset()):
        trainer = trainer_on(tmp_path, each)
        examples = list(trainer.train_dataset)
        assert [learnt_text(read) for read in examples] == [expected] * 2
        labels = trainer.data_collator(examples)["labels"]
        assert labels[0].tolist()[-3:] == [EOS] * 3  # the response's own end token and its copies


def test_every_assistant_turn_is_learnt_and_nothing_else(tmp_path):
    turns = [*TURNS, {"role": "user", "content": "Go on"}, {"role": "assistant", "content": "5, 6"}]
    data = Dataset.from_dict({"messages": [turns]})
    assert learnt_text(trainer_on(tmp_path, data).train_dataset[0]) == f"{LEARNT}5, 6<|im_end|>"
    everything = learnt_text(trainer_on(tmp_path, data, assistant_only_loss=False).train_dataset[0])
    assert everything.startswith(f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n{LEARNT}")


def test_packed_rows_hold_whole_documents_or_parts_of_texts_that_are_split_instead_of_cut(tmp_path):
    plain, packed = (trainer_on(tmp_path, packing=packing, max_length=60) for packing in (False, True))
    assert len(packed.train_dataset) < len(plain.train_dataset)
    assert max(map(len, packed.train_dataset["input_ids"])) <= 60
    pieces = [
        tuple(row["input_ids"][sum(row["seq_lengths"][:i]) :][:length])
        for row in packed.train_dataset
        for i, length in enumerate(row["seq_lengths"])
    ]
    assert sorted(pieces) == sorted(map(tuple, plain.train_dataset["input_ids"]))
    assert int(next(iter(packed.get_train_dataloader()))["document_ids"].max()) > 0
    # Text that is longer than the limit can be split instead of cut.
    data = Dataset.from_dict({"text": ["3 + 4 = 7, so 37 + 40 = 77. " * 6]})
    cut = trainer_on(tmp_path, data, max_length=20)
    assert cut.data_reports["train"].outcomes.total() == 1 and "1 shortened" in str(cut.data_reports["train"])
    split = trainer_on(tmp_path, data, max_length=20, packing=True, packing_strategy="bfd_split")
    tokens = [token for row in split.train_dataset["input_ids"] for token in row]
    assert sorted(tokens) == sorted(trainer_on(tmp_path, data).train_dataset["input_ids"][0])
    assert "shortened" not in str(split.data_reports["train"])


# Shortened, dropped, counted.


def test_a_cut_answer_is_never_taught_to_stop_and_each_loss_is_counted(tmp_path, caplog):
    tokenizer = tiny_tokenizer()
    lengths = [len(tokenizer.apply_chat_template(chat)["input_ids"]) for chat in CHATS]
    limit = sorted(lengths)[3]
    no_answer = [{"role": "user", "content": "Hi"}]
    endless = [{"role": "user", "content": "Count " * 100}, CHATS[0][1]]
    data = Dataset.from_dict({"messages": [*CHATS, no_answer, endless]})
    with caplog.at_level(logging.INFO, "wedlm_hf.training.sft_trainer"):
        trainer = trainer_on(tmp_path, data, max_length=limit)
    report = str(trainer.data_reports["train"])
    # The newline behind the last end token counts, and is never supervised: losing it alone loses nothing.
    shortened = sum(length > limit for length in lengths)
    assert report == (
        f"train dataset: 10 examples; {shortened} shortened to `max_length` (a cut answer is never taught to stop); "
        "1 dropped: longer than `max_length` before anything to learn; "
        "1 dropped: nothing to learn (no assistant turn, or no supervised token)"
    )
    assert report in caplog.text and caplog.records[-1].levelname == "WARNING"
    for row, length in zip(trainer.train_dataset, lengths, strict=True):
        assert len(row["input_ids"]) == min(length, limit)
        memory = trainer.data_collator([row])
        clean = memory["input_ids"][memory["stream_ids"] == 0].tolist()
        whole = EOS in row["input_ids"][20:] and row["labels"][-2:].count(EOS) > 0
        assert clean.count(EOS) == row["input_ids"].count(EOS) + 2 * whole
        assert whole or length > limit


def test_a_stream_counts_what_it_loses_too(tmp_path, caplog):
    data = Dataset.from_dict({"messages": [*CHATS, [*CHATS[0][:1], {"role": "assistant", "content": "9, " * 90}]]})
    trainer = trainer_on(tmp_path, data.to_iterable_dataset(), max_length=60, max_steps=2, dataloader_num_workers=1)
    trainer.train()
    report = trainer.data_reports["train"]
    assert report.outcomes[1] >= 1 and report.kept >= 9 and str(report) in caplog.text


USER = CHATS[0][0]
LONG = {"role": "user", "content": "a b c d " * 99}


@pytest.mark.parametrize(
    ("examples", "message"),
    [([{"messages": [USER]}] * 3, "3 examples; 3 dropped: nothing to learn"),
     ([{"messages": [LONG, CHATS[0][1]]}] * 2, "2 dropped: longer than `max_length` before anything to learn"),
     ([{"input_ids": [5, 6], "labels": [IGNORE] * 2}], "1 dropped: nothing to learn"),
     ([{"input_ids": [5], "labels": [5]}, {"input_ids": [], "labels": []}], "2 dropped: nothing to learn"),
     ([], "")],
    ids=["no assistant turn", "over-long", "no supervised token", "no tokens", "no example"],
)  # fmt: skip
def test_data_without_anything_to_learn_are_refused(tmp_path, examples, message):
    data = Dataset.from_list(examples)
    for name, datasets in (("Train", {"data": data}), ("Eval", {"eval_dataset": data})):
        said = f"There is nothing to train on. {name} dataset.*{re.escape(message)}"
        with pytest.raises(ValueError, match=said if examples else f"The {name.lower()} dataset is empty"):
            trainer_on(tmp_path, **datasets, max_length=60)
    with pytest.raises(ValueError, match="The train dataset is empty"):
        trainer_on(tmp_path, IterableDataset.from_generator(lambda: iter(())))


GOOD = {"messages": CHATS[0]}


@pytest.mark.parametrize(
    ("examples", "message"),
    [([{"question": "a"}], "Example 1 of the train dataset has the columns ['question']. It needs `messages`"),
     ([{"messages": "hello"}], "Example 1 of the train dataset: `messages` must be a list of turns, got 'hello'."),
     ([{"messages": []}], "Example 1 of the train dataset has no turn in `messages`."),
     ([GOOD, {"messages": [{"content": "a"}]}], "Example 2 of the train dataset: each turn of `messages` needs"),
     ([GOOD, {"messages": [USER, {"role": "assistant", "content": None}]}], "needs `role` and `content`: {"),
     ([{"conversations": [{"from": "human"}]}], "each turn of `conversations` needs `from` and `value`: {"),
     ([{"text": "abc"}, {"text": None}], "has the columns [] (text: null), and the first one has `text`"),
     ([{"text": "abc"}, {"prompt": "a", "completion": "b"}], "has `text`: all must be of one kind."),
     ([{"text": 3}], "Example 1 of the train dataset: `text` must be a string, got 3."),
     ([{"messages": [{"role": "user", "content": 3}]}], "`content` of each turn must be text, got 3."),
     ([{"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]}], "must be text, got [{"),
     ([{"prompt": "a", "completion": [CHATS[0][1]]}], "`prompt` and `completion` must be both strings, or both"),
     ([{"prompt": "a"}], "must be both strings, or both lists of turns, got ['a', None]."),
     ([{"input_ids": "abc"}], "`input_ids` must be a list of integers, got 'abc'."),
     ([{"input_ids": [5, 6], "labels": [5]}], "`labels` must be a list as long as `input_ids`, 2 entries, got"),
     ([{"input_ids": [5], "document_ids": [0]}], "say the lengths of packed documents by `seq_lengths`, not by"),
     ([{"input_ids": [5, 6]}, {"input_ids": [5, 999]}], "must lie in [0, 320), the model's vocabulary, got 5 to")],
)  # fmt: skip
def test_an_example_that_cannot_be_read_is_told_by_its_number(tmp_path, examples, message):
    data = IterableDataset.from_generator(lambda: iter(examples))
    with pytest.raises(ValueError, match=re.escape(message)):
        list(trainer_on(tmp_path, data).train_dataset)


def weights_of(model) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def test_batches_accumulation_packing_and_workers_change_no_digit(tmp_path):
    trainers = [
        trainer_on(tmp_path, **how)
        for how in (
            {},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "dataloader_num_workers": 1},
            {"packing": True, "max_length": 400},
            {"gradient_checkpointing": True},
        )
    ]
    for trainer in trainers:
        trainer.train()
    expected = weights_of(trainers[0].model)
    moved = float((expected - weights_of(tiny_model())).abs().max())
    assert moved > 0
    for trainer in trainers[1:]:
        assert f"{logged(trainer, 'loss')[0]:.4f}" == f"{logged(trainers[0], 'loss')[0]:.4f}"
        torch.testing.assert_close(weights_of(trainer.model), expected, rtol=0, atol=1e-4 * moved)


def test_the_loss_is_that_of_plain_forwards_over_the_whole_step(tmp_path):
    trainer = trainer_on(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=0.0)
    trainer.train()
    batch = trainer.data_collator(list(trainer.train_dataset))
    with torch.no_grad():
        output = tiny_model()(**batch)
    assert logged(trainer, "loss")[0] == pytest.approx(output.loss.item(), rel=1e-5)
    memory, learnt = batch["stream_ids"] == 0, batch["targets"] != IGNORE
    assert logged(trainer, "ar_nll")[0] == pytest.approx(output.token_nll[memory & learnt].mean().item(), rel=1e-5)
    assert logged(trainer, "mask_nll")[0] == pytest.approx(output.token_nll[~memory & learnt].mean().item(), rel=1e-5)
    speeds = logged(trainer, "tokens_per_second")[0], logged(trainer, "supervised_tokens_per_second")[0]
    counts = int(memory.sum()), int((batch["labels"] != IGNORE).sum())
    assert speeds[0] / speeds[1] == pytest.approx(counts[0] / counts[1])


def test_evaluation_divides_sums_over_tokens_once_whatever_the_batches(tmp_path):
    results = [
        trainer_on(tmp_path, eval_dataset=MESSAGES, per_device_eval_batch_size=size, **settings).evaluate()
        for size, settings in [(8, {}), (3, {"suffix_probability": 1.0, "num_eos": 5})]
    ]
    for name, value in results[0].items():
        if not any(word in name for word in ("runtime", "second", "time")):
            assert results[1][name] == pytest.approx(value, rel=1e-5), name

    # By definition, slot by slot.
    fixed = {"block_size": 4, "num_eos": 1, "ratio_sampler": "stratified", "seed": 0}
    collator = DataCollatorForDualStreamMasking(tiny_tokenizer(), **fixed)
    trainer = trainer_on(tmp_path, eval_dataset=MESSAGES)
    values, supervised = defaultdict(list), 0
    for batch in (collator([example]) for example in trainer.eval_dataset):
        with torch.no_grad():
            output = trainer.model(**batch)
        columns = ("input_ids", "stream_ids", "block_ids", "position_ids", "targets")
        slots = pd.DataFrame({name: batch[name][0].numpy() for name in columns})
        slots["is_learnable"] = batch["labels"][0].numpy()[slots["position_ids"]] != IGNORE
        slots["nll"], slots["correct"] = output.token_nll[0].numpy(), output.correct[0].numpy()
        supervised += int((batch["labels"] != IGNORE).sum())
        values["ar_nll"] += list(slots["nll"][(slots["targets"] != IGNORE) & (slots["stream_ids"] == 0)])
        for _, block in slots[slots["stream_ids"] == 1].groupby("block_ids"):
            masked = block[block["input_ids"] == MASK]
            ratio = len(masked) / block["is_learnable"].sum()
            values["bound"] += list(masked["nll"] / ratio)
            part = next(part for part in (25, 50, 75, 100) if ratio <= part / 100)
            values[f"mask_nll_ratio_{part}"] += list(masked["nll"])
            for offset, correct in zip(masked["position_ids"] % 4, masked["correct"], strict=True):
                values[f"accuracy_offset_{('0', '1', '2_3', '2_3')[offset]}"].append(correct)

    metrics = results[0]
    assert len(values["ar_nll"]) == supervised
    assert metrics["eval_elbo_nll"] == pytest.approx(sum(values.pop("bound")) / supervised, rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx((metrics["eval_ar_nll"] + metrics["eval_elbo_nll"]) / 2)
    assert len(values) >= 6
    for name, numbers in values.items():
        assert metrics[f"eval_{name}"] == pytest.approx(sum(numbers) / len(numbers), rel=1e-5), name


def test_evaluation_decodes_prompts_as_a_user_would_and_says_whether_the_masks_are_ready(tmp_path):
    trainer = trainer_on(tmp_path, eval_dataset=MESSAGES, eval_decoding_samples=3, eval_decoding_tokens=9)
    how = {"max_new_tokens": 9, "return_dict_in_generate": True}
    outputs = {
        name: [decoded(tiny_model(), chat, **how, **settings) for chat in CHATS[:3]]
        for name, settings in {"": {"verification": "exact", "slot_cost": 0.0}, "unverified_": {}}.items()
    }
    metrics = trainer.evaluate()
    for name, answers in outputs.items():
        new, forwards = (sum(int(getattr(each.stats, n)) for each in answers) for n in ("new_tokens", "forwards"))
        assert metrics[f"eval_{name}tokens_per_forward"] == pytest.approx(new / forwards)
    same = [torch.equal(a.sequences, b.sequences) for a, b in zip(*outputs.values(), strict=True)]
    assert metrics["eval_unverified_as_ar"] == sum(same) / 3
    trainer.save_model()
    assert metrics["eval_decoded_prompts"] == 3
    assert json.loads((tmp_path / "generation_config.json").read_text())["masks_ready"] is False


def test_of_several_datasets_each_must_find_the_masks_ready(tmp_path, monkeypatch):
    trainer = trainer_on(
        tmp_path, eval_dataset={"one": MESSAGES, "two": MESSAGES}, eval_decoding_samples=1, eval_decoding_tokens=2
    )
    for found, ready in (([False, True], False), ([True, False], False), ([True, True], True)):
        answers = iter(found)
        monkeypatch.setattr(sft_trainer, "masks_are_ready", lambda metrics, answers=answers: next(answers))
        trainer.evaluate()
        assert trainer.model.generation_config.masks_ready is ready


def test_masks_that_were_ready_are_not_once_they_are_trained_on(tmp_path):
    model = tiny_model()
    model.generation_config.masks_ready = True
    trainer_on(tmp_path, model=model, max_steps=1).train()
    assert model.generation_config.masks_ready is False


@pytest.mark.parametrize(
    ("same", "tokens", "count", "ready"),
    [(1.0, 2.0, 10, True), (0.9, 1.1, 30, True), (0.8, 9.0, 30, False), (1.0, 1.0, 30, False), (1.0, 9.0, 9, False)],
)
def test_masks_are_ready_where_nine_of_ten_answers_are_ars_in_fewer_forwards(same, tokens, count, ready):
    found = {"unverified_as_ar": same, "unverified_tokens_per_forward": tokens, "decoded_prompts": count}
    assert masks_are_ready(found) is ready


def test_trls_own_trainer_says_which_one_to_take(tmp_path):
    collator, how = DataCollatorForDualStreamMasking(tiny_tokenizer()), {"use_cpu": True, "report_to": "none"}
    args = trl.SFTConfig(str(tmp_path), max_steps=1, bf16=False, remove_unused_columns=False, **how)
    data = {"train_dataset": MESSAGES, "processing_class": tiny_tokenizer(), "data_collator": collator}
    with pytest.raises(ValueError, match=r"TRL's `SFTTrainer` does it.* train with `WeDLMSFTTrainer`"):
        trl.SFTTrainer(tiny_model(), args, **data).train()


def test_a_cpu_trains_in_what_it_multiplies_faster_unless_it_is_told(monkeypatch):
    assert bf16_speedup() > 0
    for speed, chosen in ((3.0, True), (1.0, False), (0.1, False)):
        monkeypatch.setattr(sft_config, "bf16_speedup", lambda speed=speed: speed)
        assert WeDLMSFTConfig("x", use_cpu=True).bf16 is chosen
        assert WeDLMSFTConfig("x", use_cpu=True, bf16=not chosen).bf16 is not chosen
    if not torch.accelerator.is_available():
        assert WeDLMSFTConfig("x", bf16=True).use_cpu  # which transformers would ask for


def test_an_example_longer_than_the_models_positions_is_told_of_and_a_larger_limit_is_not(tmp_path, caplog):
    trainer_on(tmp_path, max_length=4000)
    assert "positions" not in caplog.text
    trainer_on(tmp_path, max_length=4000, model=tiny_model(max_position_embeddings=30))
    assert "tokens with its end tokens, and the model 30 positions: a smaller `max_length`" in caplog.text
    assert "[RANK" not in caplog.text


# What is refused.


OTHER = tiny_model()
OTHER.config.model_type = "qwen3"


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"loss_type": "dft"}, "`loss_type` must be 'nll', got 'dft'"),
     ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be 0.0, got 0.1"),
     ({"padding_free": True}, "`padding_free` must be False, got True: `packing=True` puts documents side by side"),
     ({"packing": True, "packing_strategy": "wrapped"}, "must be 'bfd' or 'bfd_split', got 'wrapped'"),
     ({"packing": True, "packing_strategy": "bfd_split"}, "must be 'bfd' for data with responses, got 'bfd_split'"),
     ({"packing": True, "max_length": None}, "`packing=True` needs a `max_length`, got None."),
     ({"max_length": 1}, "`max_length` must be an integer of at least 2, got 1."),
     ({"eval_decoding_samples": -1}, "`eval_decoding_samples` must be an integer of at least 0, got -1."),
     ({"model": tiny_model(mask_token_id=7)}, "mask token is id 3, the model's is 7: they do not belong together"),
     ({"model": tiny_model(vocab_size=100)}, "and the model 100 embedding rows: they do not belong together."),
     ({"model": OTHER}, "`model` must be a WeDLM model, got one of type 'qwen3'")],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer_on(tmp_path, **settings)


def test_settings_or_a_tokenizer_of_another_kind_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"^`args` must be a WeDLMSFTConfig, got TrainingArguments\.$"):
        WeDLMSFTTrainer(tiny_model(), TrainingArguments(str(tmp_path)), MESSAGES)
    with pytest.raises(TypeError, match=r"^`processing_class` must be a tokenizer .*, or None, got str\.$"):
        trainer_on(tmp_path, tokenizer="tokenizer")


def test_what_is_advised_for_a_template_that_teaches_no_end_works(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match=r"would never learn to stop\. .*\(`chat_template_path='chatml'`\)"):
        trainer_on(tmp_path, tokenizer=tokenizer)
    trainer = trainer_on(tmp_path, tokenizer=tokenizer, chat_template_path="chatml")
    assert learnt_text(trainer.train_dataset[0]) == LEARNT
    for how in ({}, {"assistant_only_loss": False}):
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match=r"has no chat template: pass one as `chat_template_path` \('chatml' is"):
            trainer_on(tmp_path, tokenizer=tokenizer, **how)
        trainer_on(tmp_path, tokenizer=tokenizer, chat_template_path="chatml", **how)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|im_start|>"
    with pytest.raises(ValueError, match=r"ends in the end token '<\|im_start\|>'.*`eos_token='<\|im_end\|>'`"):
        trainer_on(tmp_path, tokenizer=tokenizer)
    trainer = trainer_on(tmp_path, tokenizer=tokenizer, eos_token="<|im_end|>")
    assert trainer.data_collator(list(trainer.train_dataset))["labels"].eq(EOS).sum() == 3 * len(CHATS)


def test_chatml_ends_turns_in_the_end_token_of_a_vocabulary_that_has_no_other(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_llama_like(tmp_path / "llama"))
    trainer = trainer_on(tmp_path, tokenizer=tokenizer, chat_template_path="chatml")
    assert tokenizer.decode(trainer.train_dataset[0]["input_ids"]).count("<|eot_id|>") == 2
    assert trainer.data_collator(list(trainer.train_dataset))["labels"].eq(EOS).sum() == 3 * len(CHATS)


def test_a_loss_that_is_not_finite_ends_the_training_and_nothing_is_resumed_without_a_complete_checkpoint(tmp_path):
    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                model.lm_head.weight.data[5] = float("nan")

    (tmp_path / "checkpoint-3").mkdir()
    trainer = trainer_on(tmp_path, max_steps=5, save_strategy="steps", save_steps=1)
    with pytest.raises(ValueError, match="There is no complete checkpoint to resume from in"):
        trainer.train(resume_from_checkpoint=True)
    trainer.add_callback(Poison())
    with pytest.raises(FloatingPointError, match="The loss of step 2 is nan: training ends before it reaches"):
        trainer.train()
    assert newest_complete_checkpoint(tmp_path).name == "checkpoint-1"


def test_a_stream_too_short_for_a_step_ends_after_its_first_pass(tmp_path):
    settings = {"data": MESSAGES.to_iterable_dataset(), "gradient_accumulation_steps": 4, "max_steps": 2}
    long_enough = trainer_on(tmp_path, per_device_train_batch_size=2, **settings)
    long_enough.train()
    assert long_enough.state.global_step == 2
    with pytest.raises(ValueError, match="fewer batches than `gradient_accumulation_steps`, 4 for each process, of"):
        trainer_on(tmp_path, per_device_train_batch_size=8, **settings).train()


@pytest.mark.parametrize("packing", [False, True])
def test_predicting_takes_the_data_that_evaluating_takes_and_gives_its_metrics(tmp_path, packing):
    trainer = trainer_on(tmp_path, packing=packing)
    expected = trainer.evaluate(MESSAGES)
    for data in (MESSAGES, MESSAGES.to_iterable_dataset())[: 2 - packing]:
        found = trainer.predict(data)
        assert found.predictions is None
        for name in ("loss", "ar_nll", "elbo_nll"):
            assert found.metrics[f"test_{name}"] == expected[f"eval_{name}"]
    assert trainer.predict(trainer.train_dataset, metric_key_prefix="x").metrics["x_loss"] == expected["eval_loss"]
