"""Training of mask adapters: layout, loss, trainer."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import test_families
import torch
from peft import get_peft_model
from test_families import build
from test_mask_adapter import with_adapter
from tiny import EOS, tiny_model
from transformers import TrainerCallback

from wedlm_hf import add_mask_adapter, load_mask_adapter, save_mask_adapter
from wedlm_hf.adapters.adapter_files import StoredMaskAdapter
from wedlm_hf.adapters.answers import AnswerConfig
from wedlm_hf.adapters.budget import MaskTrainingConfig
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.evaluation import measure_acceptance
from wedlm_hf.adapters.layout import AnswerBatches, DataCollatorForMaskRuns
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.adapters.peft_method import MaskAdapterConfig
from wedlm_hf.adapters.trainer import MaskAdapterTrainer
from wedlm_hf.generation.attention import layer_types
from wedlm_hf.generation.state import keeps_state

K = 4


def answers(count: int = 5, seed: int = 0, vocabulary: int = 300) -> list[dict[str, Any]]:
    def tokens(length: int) -> list[int]:
        return torch.randint(4, vocabulary, (length,), generator=generator).tolist()

    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 20, (count, 2), generator=generator).tolist()
    return [{"prompt_ids": tokens(prompt), "response_ids": tokens(response)} for prompt, response in sizes]


def adapted_model(style: Any = "qwen3") -> Any:
    """A tiny model whose adapter does something everywhere."""
    return with_adapter(tiny_model(style))


def batch_of(some_answers: list[dict[str, Any]], stride: int = 3) -> dict[str, torch.Tensor]:
    return DataCollatorForMaskRuns(0, K, stride)([some_answers])


def states_behind(model: Any, tokens: torch.Tensor, cut: int) -> torch.Tensor:
    """The oracle: `(K, H)` from one causal forward of the tokens up to the cut, and masks behind the next token."""
    ids = torch.cat([tokens[: cut + 1], torch.zeros(K, dtype=torch.int64)])[None]
    positions = torch.tensor([*range(cut + 1), *range(cut + 2, cut + 2 + K)])
    causal, masks, config = torch.ones(len(positions), len(positions), dtype=torch.bool).tril(), {}, model.config
    for kind in sorted(set(layer_types(config))):
        seen = causal
        if kind == "sliding_attention":
            seen = causal & (positions > positions[:, None] - config.sliding_window)
        elif kind == "chunked_attention":
            chunks = positions // config.attention_chunk_size
            seen = causal & (chunks == chunks[:, None])
        masks[kind] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    mask = masks if len(masks) > 1 else next(iter(masks.values()))
    if keeps_state(model):
        mask = torch.ones_like(ids)
    with model.predicting(K) as slots:
        model(input_ids=ids, position_ids=positions[None], attention_mask=mask, use_cache=False)
    return slots.hidden[0]


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"sliding_window": 6, "attn_implementation": "eager"},
    "Cohere2": {"sliding_window": 3},  # shorter than a run
    "Llama4": {"attention_chunk_size": 6, "no_rope_layers": [1, 0]},
    "Granite": {"logits_scaling": 2.0},
    "GptOss": {"sliding_window": 6, "attn_implementation": "eager"},
}


def stock_model(name: str) -> Any:
    """A tiny random model of a family, with a mask adapter that does something everywhere."""
    shape = {"vocab_size": 320, "num_hidden_layers": 2}
    return with_adapter(build(name, test_families.FAMILIES[name][0] | shape | FAMILIES[name]))


def check_loss_and_gradient(model: Any, some: list[dict[str, Any]]) -> None:
    """Compares both with those of plain forwards of prefix and masks, one by one, with the base's own distributions.
    All of the adapter has a gradient, and nothing else."""
    adapter, head, vocabulary = model.mask_adapter, model.get_output_embeddings(), model.config.vocab_size
    distillation = MaskDistillation(model, num_masks=K, top_tokens=vocabulary, sampled_tokens=1)
    batch = batch_of(some)
    total, weights = torch.zeros(()), 0.0
    for row, answer in enumerate(some):
        tokens = torch.tensor(answer["prompt_ids"] + answer["response_ids"])
        with torch.no_grad():
            teacher = model(tokens[None], use_cache=False).logits[0].softmax(-1)
        for cut in filter(lambda cut: cut >= 0, batch["cuts"][row].tolist()):
            for depth, state in enumerate(states_behind(model, tokens, cut)[: len(tokens) - cut - 2]):
                before = model.get_input_embeddings()(tokens[[cut + depth, cut + depth + 1]])
                for share, hidden in ((1.0, adapter.head(state, before)), (0.5, state)):
                    log_probs = distillation.scaled(head(hidden)).log_softmax(-1)
                    total = total - 0.85**depth * share * (teacher[cut + depth + 1] * log_probs).sum()
                weights += 0.85**depth
    loss = distillation(**batch)["loss"]
    torch.testing.assert_close(loss, total / weights, atol=1e-4, rtol=1e-4)
    parameters = dict(adapter.named_parameters())
    expected = torch.autograd.grad(total / weights, parameters.values())
    loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("mask_adapter" in name), name
    for (name, parameter), right in zip(parameters.items(), expected, strict=True):
        largest = float(right.abs().max())
        assert largest > 0, name
        torch.testing.assert_close(parameter.grad, right, atol=2e-4 * largest, rtol=1e-3, msg=name)


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", *FAMILIES])
def test_the_loss_is_the_cross_entropy_with_the_bases_own_distributions(name):
    check_loss_and_gradient(stock_model(name) if name in FAMILIES else adapted_model(name), answers(3))


def test_sampled_candidates_stand_for_the_whole_vocabulary():
    model = adapted_model()
    for parameter in model.mask_adapter.parameters():
        parameter.data *= 0.05  # so that tokens are unlikely by themselves, as in a large vocabulary
    batch = batch_of(answers(3))
    exact = float(MaskDistillation(model, num_masks=K, top_tokens=320, sampled_tokens=1)(**batch)["loss"].detach())
    sampled = MaskDistillation(model, num_masks=K, top_tokens=16, sampled_tokens=80)
    losses = [sampled(**batch | {"noise_key": torch.tensor(key)})["loss"].detach() for key in range(20)]
    estimates = torch.stack(losses)
    assert float(estimates.mean()) == pytest.approx(exact, rel=0.05)
    with torch.no_grad():
        _, candidates, shares = sampled._teacher(torch.randn(5, 32), 0)
    assert len(candidates.unique()) == len(candidates)
    assert float(shares.exp().sum()) == pytest.approx(model.config.vocab_size, rel=1e-5)


def test_cuts_cover_the_response_have_the_tokens_behind_them_as_labels_and_depend_on_epoch_and_answer_alone():
    some, firsts = answers(20), set()
    collator = DataCollatorForMaskRuns(0, K, 3)
    batch = collator([some])
    for row, answer in enumerate(some):
        tokens = answer["prompt_ids"] + answer["response_ids"]
        cuts = [cut for cut in batch["cuts"][row].tolist() if cut >= 0]
        firsts.add(cuts[0] - len(answer["prompt_ids"]))
        assert cuts == sorted(set(cuts)) and len(answer["prompt_ids"]) - 1 <= cuts[0] and cuts[-1] < len(tokens) - 2
        for run, cut in enumerate(cuts):
            assert batch["labels"][row, run].tolist() == (tokens[cut + 2 : cut + 2 + K] + [-100] * K)[:K]
        alone = collator([[answer]])["cuts"][0].tolist()
        assert batch["cuts"][row].tolist() == alone + [-1] * (batch["cuts"].shape[1] - len(alone))
    assert firsts == {-1, 0, 1}  # the last token of the prompt is the first place
    for epoch in (1, 0):
        collator.set_epoch(epoch)
        assert torch.equal(collator([some])["cuts"], batch["cuts"]) == (epoch == 0)


def test_answers_may_share_their_cuts_and_every_place_is_as_likely():
    long = {"prompt_ids": [1] * 4, "response_ids": [2] * 32}  # 31 places
    short = {"prompt_ids": [1] * 9, "response_ids": [3] * 2}  # a single place
    collator, counts = DataCollatorForMaskRuns(0, K, 3, is_shared=True), torch.zeros(36)
    for epoch in range(1500):
        collator.set_epoch(epoch)
        cuts, own = collator([[long, short]])["cuts"].tolist()
        counts[[cut for cut in cuts if cut >= 0]] += 1
        assert [cut for cut in own if cut >= 0] == [8]
    assert counts[:3].sum() == counts[34:].sum() == 0
    assert (counts[3:34] / 1500 - 1 / 3).abs().max() < 0.06  # five standard deviations
    nothing, shifted = {"prompt_ids": [1] * 3, "response_ids": [3]}, {"prompt_ids": [1] * 5, "response_ids": [4] * 22}
    first, none, second = collator([[long, nothing, shifted]])["cuts"].tolist()
    assert max(none) == -1 and [cut for cut in first if 4 <= cut < 25] == [cut for cut in second if cut >= 0]


def test_batches_hold_every_answer_once_and_answers_that_teach_nothing_are_refused():
    settings = {"batch_slots": 48, "cut_stride": 3, "num_masks": K, "seed": 0}
    batches = AnswerBatches(answers(30), **settings)
    assert sorted(index for batch in batches.batches for index in batch) == list(range(30)) and len(batches) > 5
    nothing = [{"prompt_ids": [1], "response_ids": [2]}, {"prompt_ids": [], "response_ids": [2, 3]}]
    with pytest.raises(ValueError, match="None of the 2 answers has at least two tokens behind a prompt"):
        AnswerBatches(nothing, **settings)


def config(folder: Path, **settings: Any) -> MaskTrainingConfig:
    defaults: dict[str, Any] = {
        "output_dir": str(folder), "mask_rows": 600, "num_masks": K, "cut_stride": 3, "batch_slots": 40,
        "save_minutes": 1e9, "warmup_steps": 2, "logging_steps": 2, "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    return MaskTrainingConfig(**defaults | settings)


class StopAt(TrainerCallback):
    """Saves and stops after some steps, as a stop by hand does."""

    def __init__(self, step: int | None):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def trained(
    folder: Path, stop_at: int | None = None, resume: bool = False, count: int = 12, model: Any = None, **settings: Any
) -> MaskAdapterTrainer:
    model = model or tiny_model()
    torch.manual_seed(0)
    add_mask_adapter(model, MaskAdapterSettings(rank=settings.pop("rank", 4), head_width=8))
    trainer = MaskAdapterTrainer(model, config(folder, **settings), answers(count))
    trainer.add_callback(StopAt(stop_at))
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def weights_of(trainer: MaskAdapterTrainer) -> dict[str, torch.Tensor]:
    return trainer.model.model.mask_adapter.state_dict()


def assert_same_weights(trainer: MaskAdapterTrainer, other: MaskAdapterTrainer) -> None:
    for name, expected in weights_of(trainer).items():
        assert torch.equal(weights_of(other)[name], expected), name


def test_resumed_is_uninterrupted_in_the_budget_and_behind_it_with_more_answers_from_a_new_epoch_on(
    tmp_path, monkeypatch
):
    seen: list[tuple[int, int]] = []  # epoch of the cuts, index of the batch
    collate, get = DataCollatorForMaskRuns.__call__, AnswerBatches.__getitem__
    monkeypatch.setattr(AnswerBatches, "__getitem__", lambda self, index: [index, *get(self, index)])

    def recorded(self: Any, batches: Any) -> Any:
        seen.append((int(self._epoch), batches[0][0]))
        return collate(self, [batch[1:] for batch in batches])

    monkeypatch.setattr(DataCollatorForMaskRuns, "__call__", recorded)
    out, parts = tmp_path / "out", tmp_path / "parts"
    first = trained(out, mask_rows=300)
    before, lines = first.state.global_step, (out / "log.jsonl").read_text()
    assert (first.state.epoch or 0) > 1  # so that the epoch changes behind the stop
    assert 300 <= first.budget.mask_rows < 300 + 60
    log = [json.loads(line) for line in lines.splitlines()]
    rates = [line["learning_rate"] for line in log if "learning_rate" in line]
    assert rates[-1] == pytest.approx(1e-3 * 0.05, rel=0.5)  # it follows the budget
    assert {"loss", "accepted", "accepted_plain", "accuracy", "mask_rows", "minutes"} <= log[0].keys()
    assert len(log[0]["accuracy"]) == K
    trained(parts, stop_at=3, mask_rows=300)
    resumed = trained(parts, resume=True, mask_rows=300)
    assert (resumed.state.global_step, resumed.budget.mask_rows) == (before, first.budget.mask_rows)
    assert_same_weights(resumed, first)

    seen.clear()
    whole = trained(out, resume=True, count=40, mask_rows=900)
    epoch, batches = math.ceil(first.state.epoch or 0), len(whole.train_dataset)
    assert batches > before  # the steps so far would skip most of the first epoch of the new answers
    assert sorted(seen[:batches]) == [(epoch, index) for index in range(batches)]
    assert whole.state.epoch == pytest.approx(epoch + (whole.state.global_step - before) / batches)
    assert whole.budget.mask_rows >= 900
    log = (out / "log.jsonl").read_text()
    assert log.startswith(lines) and len(log) > len(lines)
    trained(parts, stop_at=before + 3, resume=True, count=40, mask_rows=900)
    assert_same_weights(trained(parts, resume=True, count=40, mask_rows=900), whole)


def test_a_run_does_not_go_on_with_other_masks_another_shape_or_another_base(tmp_path):
    trained(tmp_path, mask_rows=60)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    for changed, message in (
        ({"num_masks": 3}, "`num_masks` 4 cannot go on with 3"),
        ({"cut_stride": 2}, "`cut_stride` 3 cannot go on"),
        ({"rank": 2}, "rank=4.* cannot go on with .*rank=2"),
        ({"model": tiny_model(seed=5)}, "trained for another model"),
    ):
        with pytest.raises(ValueError, match=message):
            trained(tmp_path, resume=True, mask_rows=200, **changed)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before


@pytest.mark.parametrize(("asked", "trained_on"), [(None, 3), (2, 2)])
def test_as_many_masks_are_trained_as_the_adapter_states(tmp_path, asked, trained_on):
    model = tiny_model()
    add_mask_adapter(model, MaskAdapterSettings(rank=4, head_width=0, num_masks=3))
    trainer = MaskAdapterTrainer(model, config(tmp_path, num_masks=asked, mask_rows=40), answers(4))
    trainer.train()
    trainer.save_model()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {len(entry["accuracy"]) for entry in log if "accuracy" in entry} == {trained_on}
    assert StoredMaskAdapter.read(tmp_path).settings.num_masks == model.deepest == trained_on


def test_what_would_train_the_base_or_nothing_is_refused(tmp_path):
    model = tiny_model()
    add_mask_adapter(model, MaskAdapterSettings(rank=4, head_width=0))
    save_mask_adapter(model, tmp_path)
    loaded = tiny_model()
    load_mask_adapter(loaded, tmp_path)
    with pytest.raises(ValueError, match=r"\d+ parameters beside the mask adapter would train, 'model.embed_tokens"):
        MaskAdapterTrainer(loaded, config(tmp_path), answers(4))
    loaded.requires_grad_(False)
    with pytest.raises(ValueError, match="The mask adapter is frozen: load it with `is_trainable=True`"):
        MaskAdapterTrainer(loaded, config(tmp_path), answers(4))


def test_the_trainer_takes_a_peft_model_and_says_where_there_is_no_adapter(tmp_path):
    model = get_peft_model(tiny_model(), MaskAdapterConfig(rank=4, head_width=0))
    MaskAdapterTrainer(model, config(tmp_path, mask_rows=40), answers(4)).train()
    assert any(bool(up.detach().abs().max() > 0) for up in model.mask_adapter.up.values())
    with pytest.raises(ValueError, match="has no mask adapter"):
        MaskAdapterTrainer(tiny_model(), config(tmp_path), answers(4))


def test_accumulated_gradients_are_those_of_one_batch():
    some, distillation = answers(6), MaskDistillation(adapted_model(), num_masks=K, top_tokens=320, sampled_tokens=1)
    batches = [batch_of(some[:2]), batch_of(some[2:])]
    weight = sum(float(((batch["labels"] != -100) * distillation.depth_weights).sum()) for batch in batches)
    parts = sum(float(distillation(**batch, num_items_in_batch=weight)["loss"].detach()) for batch in batches)
    assert parts == pytest.approx(float(distillation(**batch_of(some))["loss"].detach()), rel=1e-5)


def test_a_trained_adapter_drafts_what_the_model_says(tmp_path):
    """Greedy answers of the model itself; what it learns by heart must be accepted, and real decoding agree."""
    model, data = tiny_model(), []
    for prompt in torch.randint(4, 300, (4, 5), generator=torch.Generator().manual_seed(3)):
        ids = model.generate(prompt[None], max_new_tokens=16, do_sample=False, eos_token_id=EOS)[0].tolist()
        data.append({"prompt_ids": ids[:5], "response_ids": ids[5:], "greedy": True})
    add_mask_adapter(model, MaskAdapterSettings(rank=16, head_width=64))
    args = config(tmp_path, mask_rows=8_000, learning_rate=1e-2, cut_stride=1, batch_slots=400)
    trainer = MaskAdapterTrainer(model, args, data, data)
    before = measure_acceptance(trainer.model, data)
    trainer.train()
    after = measure_acceptance(trainer.model, data)
    assert after[0] == sum(len(answer["response_ids"]) for answer in data)
    rates = [{replay: tokens / count for replay, count in forwards.items()} for tokens, forwards in (before, after)]
    assert rates[1]["branch", 3] > 1.5 * rates[0]["branch", 3] and rates[1]["branch", 3] >= rates[1]["chain", 3]


def test_impossible_settings_are_refused(tmp_path):
    for settings, message in (
        ({"mask_rows": None}, "needs a budget"),
        ({"mask_rows": 0}, "`mask_rows` must be a finite number greater than 0, got 0"),
        ({"minutes": float("inf")}, "`minutes` must be a finite number greater than 0"),
        ({"lr_scheduler_type": "polynomial"}, "`lr_scheduler_type` must be 'cosine' or 'linear'.*got .*polynomial"),
        (
            {"lr_scheduler_kwargs": {"num_cycles": 2}},
            "without `lr_scheduler_kwargs`; got .*cosine.* and {'num_cycles'",
        ),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}, "must be False: the"),
        ({"num_masks": 0}, "`num_masks`"),
        ({"gradient_checkpointing": True}, "`gradient_checkpointing` must be False"),
    ):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **settings)
    for name, least in (
        ("batch_size", "at least 1"),
        ("max_new_tokens", "at least 1"),
        ("temperature", "greater than 0"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be {least}, got 0"):
            AnswerConfig(**{name: 0})
    for shape, message in (
        ({"rank": "8", "root_width": True}, "stated in whole numbers; got `rank` '8', `root_width` True"),
        ({"target_modules": "o_proj"}, "`target_modules` is a list of names, got the text 'o_proj'"),
    ):
        with pytest.raises(ValueError, match=message):
            MaskAdapterSettings(**shape)


def test_a_run_that_its_steps_ended_trains_no_more_when_it_is_resumed(tmp_path):
    for _ in range(2):
        args = config(tmp_path, mask_rows=10**6, max_steps=2, batch_slots=20)
        trainer = MaskAdapterTrainer(adapted_model(), args, answers())
        trainer.train(any(tmp_path.glob("checkpoint-*")) or None)
        assert trainer.state.global_step == 2


def test_answers_that_are_not_the_models_are_refused_before_training(tmp_path):
    model, message = adapted_model(), r"0 to 319, as lists `prompt_ids` and `response_ids`; answer \d is {'prompt"
    for answer in ({"prompt_ids": [1], "response_ids": [5, 999]}, {"prompt_ids": [1]}, {"prompt_ids": "a"}):
        for some, held_out in (([answer], None), (answers(), [answer])):
            with pytest.raises(ValueError, match=message):
                MaskAdapterTrainer(model, config(tmp_path), some, held_out)
