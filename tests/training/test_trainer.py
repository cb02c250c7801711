"""Plain `transformers.Trainer` with the collator and nothing overridden."""

from pathlib import Path

import pytest
import torch
from dual_stream_oracle import IGNORE
from test_sft_trainer import logged, weights_of
from tiny import EOS, START, tiny_model, tiny_tokenizer
from transformers import Trainer, TrainerCallback, TrainingArguments

from wedlm_hf.training import DataCollatorForDualStreamMasking, DynamicMaskingCallback

LENGTHS = [3, 9, 5, 14, 4, 11, 7, 2, 6, 12, 8, 10, 5, 3, 13, 4]
EXAMPLES = [
    {
        "input_ids": [START, *range(10 + number, 14 + number % 3 + number), *[50 + number] * length, EOS],
        "labels": [IGNORE] * (5 + number % 3) + [50 + number] * length + [EOS],
    }
    for number, length in enumerate(LENGTHS)
]


def collator_with(**settings) -> DataCollatorForDualStreamMasking:
    return DataCollatorForDualStreamMasking(tiny_tokenizer(), **({"block_size": 4, "num_eos": 3} | settings))


def trainer_on(folder: Path, *, collator=None, train_dataset=EXAMPLES, eval_dataset=None, callbacks=None, **settings):
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    arguments, collator = TrainingArguments(**(defaults | settings)), collator_with() if collator is None else collator
    return Trainer(tiny_model(), arguments, collator, train_dataset, eval_dataset, callbacks=callbacks)


Noise = dict[tuple[int, ...], tuple[int, ...]]


def record_noise(trainer: Trainer) -> tuple[list[Noise], list[Noise]]:
    """What the model will see in each epoch of training, and in each evaluation: the input under its clean labels."""
    epochs: list[Noise] = []
    evaluations: list[Noise] = [{}]

    class Recorder(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            epochs.append({})

        def on_evaluate(self, args, state, control, **kwargs):
            evaluations.append({})

    def record(model, args, kwargs):
        seen = epochs[-1] if model.training else evaluations[-1]
        for row in range(len(kwargs["labels"])):
            inputs = kwargs["input_ids"][row][kwargs["stream_ids"][row] >= 0]
            labels = kwargs["labels"][row]
            seen[tuple(labels[labels != IGNORE].tolist())] = tuple(inputs.tolist())

    trainer.add_callback(Recorder())
    trainer.model.register_forward_pre_hook(record, with_kwargs=True)
    return epochs, evaluations


def test_evaluation_gives_the_loss_and_never_the_logits(tmp_path):
    with torch.no_grad():
        expected = tiny_model()(**collator_with()(EXAMPLES[:5])).loss.item()
    for loss_only in (True, False):
        settings = {"per_device_eval_batch_size": 5, "prediction_loss_only": loss_only}
        trainer = trainer_on(tmp_path, eval_dataset=EXAMPLES[:5], **settings)
        first, second = trainer.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"]
        assert first == second == pytest.approx(expected, rel=1e-6)
        assert not trainer.predict(EXAMPLES[:5]).predictions


def expected_noise(epoch: int) -> Noise:
    collator, noise = collator_with(), {}
    collator.set_epoch(epoch)
    for batch in (collator([example]) for example in EXAMPLES):
        noise[tuple(batch["labels"][batch["labels"] != IGNORE].tolist())] = tuple(batch["input_ids"][0].tolist())
    return noise


@pytest.mark.parametrize(
    "settings",
    [{"remove_unused_columns": False}, {"dataloader_num_workers": 1},
     {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}],
    ids=["main process", "workers", "persistent workers"],
)  # fmt: skip
def test_each_epoch_has_its_own_noise_and_evaluation_always_the_same(tmp_path, settings):
    settings |= {"num_train_epochs": 3, "eval_strategy": "epoch", "eval_dataset": EXAMPLES}
    trainer = trainer_on(tmp_path, callbacks=[DynamicMaskingCallback()], **settings)
    epochs, evaluations = record_noise(trainer)
    trainer.train()
    assert epochs == [expected_noise(0), expected_noise(1), expected_noise(2)]
    assert evaluations[:3] == [expected_noise(0)] * 3
    assert sum(epochs[1][document] != epochs[2][document] for document in epochs[0]) > len(EXAMPLES) / 2


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    settings = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1, "optim": "sgd"}
    settings |= {"per_device_train_batch_size": 8}
    whole = trainer_on(tmp_path / "whole", callbacks=[DynamicMaskingCallback()], **settings)
    whole.train()
    for step in (2, 3):  # at the end of an epoch of 2 steps, and in the middle of one
        how = settings | {"save_strategy": "no"}
        resumed = trainer_on(tmp_path / "resumed", callbacks=[DynamicMaskingCallback()], **how)
        epochs, _ = record_noise(resumed)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert logged(resumed, "loss") == logged(whole, "loss")
        assert torch.equal(weights_of(resumed.model), weights_of(whole.model)) and epochs[-1] == expected_noise(2)


def test_the_callback_refuses_another_collator(tmp_path):
    trainer = trainer_on(tmp_path, collator=list, callbacks=[DynamicMaskingCallback()])
    with pytest.raises(ValueError, match="needs a `data_collator` of type DataCollatorForDualStreamMasking, got type"):
        trainer.train()
