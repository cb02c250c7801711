"""Training of mask adapters: layout, loss, trainer."""

from typing import Any

import pytest
import torch
from tiny import MASK, tiny_model

from wedlm_hf.modeling_wedlm.mask_adapter_wedlm import MaskAdapterSettings
from wedlm_hf.training.mask_distillation import MaskDistillation
from wedlm_hf.training.mask_layout import AnswerBatches, DataCollatorForMaskRuns

K = 4


def answers(count: int = 5, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 20, (count, 2), generator=generator).tolist()
    return [
        {"prompt_ids": torch.randint(4, 300, (a,), generator=generator).tolist(),
         "response_ids": torch.randint(4, 300, (b,), generator=generator).tolist()}
        for a, b in sizes
    ]  # fmt: skip


def adapted_model(style: Any = "qwen3", **settings: Any) -> Any:
    """A tiny model whose adapter does something everywhere."""
    model = tiny_model(style)
    torch.manual_seed(1)
    adapter = model.add_mask_adapter(MaskAdapterSettings(**{"rank": 4, "head_width": 8} | settings))
    for parameter in adapter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def batch_of(some_answers: list[dict[str, Any]], stride: int = 3) -> dict[str, torch.Tensor]:
    return DataCollatorForMaskRuns(0, K, stride)([some_answers])


@pytest.mark.parametrize("style", ["qwen3", "qwen2.5"])
def test_each_masks_state_is_that_of_a_plain_causal_forward_of_prefix_and_run(style: Any) -> None:
    model = adapted_model(style)
    distillation = MaskDistillation(model, num_masks=K)
    some = answers()
    batch = batch_of(some)
    with torch.no_grad():
        _, memory = distillation._memory(batch["input_ids"])
        states = distillation._masks(memory, batch["cuts"])
        checked = 0
        for row, answer in enumerate(some):
            tokens = torch.tensor(answer["prompt_ids"] + answer["response_ids"])
            for run, cut in enumerate(batch["cuts"][row].tolist()):
                if cut < 0:
                    continue
                ids = torch.cat([tokens[: cut + 1], torch.full((K,), MASK)])[None]
                model.set_attn_implementation("sdpa")
                expected = model.model(input_ids=ids, slot_mask=K).last_hidden_state[0, -K:]
                torch.testing.assert_close(states[row, run], expected, atol=2e-5, rtol=2e-5)
                checked += 1
    assert checked > 10


def test_the_loss_is_the_cross_entropy_with_the_bases_own_distributions() -> None:
    model = adapted_model()
    distillation = MaskDistillation(model, num_masks=K, top_tokens=318, sampled_tokens=1)
    some = answers(2)
    batch = batch_of(some)
    result = distillation(**batch)
    total = weights = 0.0
    model.set_attn_implementation("sdpa")
    adapter = model.model.mask_adapter
    with torch.no_grad():
        for row, answer in enumerate(some):
            tokens = torch.tensor(answer["prompt_ids"] + answer["response_ids"])
            teacher = model(tokens[None]).logits[0]
            teacher[:, MASK] = float("-inf")
            for cut in batch["cuts"][row].tolist():
                if cut < 0:
                    continue
                ids = torch.cat([tokens[: cut + 1], torch.full((K,), MASK)])[None]
                hidden = model.model(input_ids=ids, slot_mask=K).last_hidden_state[0, -K:]
                for depth in range(K):
                    position = cut + 1 + depth
                    if position >= len(tokens):
                        continue
                    before = model.model.embed_tokens(tokens[[max(0, position - 2), position - 1]])
                    losses = []
                    for state in (hidden[depth], adapter.head(hidden[depth], before)):
                        logits = model.lm_head(state)
                        logits[MASK] = float("-inf")
                        target = teacher[position - 1].softmax(-1)
                        losses.append(-(target * logits.log_softmax(-1).clamp(min=-1e9)).sum())
                    weight = 0.2 if depth == 0 else 0.85 ** (depth - 1)
                    total += weight * float(losses[1] + 0.5 * losses[0])
                    weights += weight
    assert float(result["loss"].detach()) == pytest.approx(total / weights, rel=1e-4)


def test_only_the_adapter_gets_gradients_and_all_of_it_does() -> None:
    model = adapted_model()
    MaskDistillation(model, num_masks=K)(**batch_of(answers()))["loss"].backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("mask_adapter" in name), name
        if parameter.grad is not None:
            assert float(parameter.grad.abs().sum()) > 0, name


def test_sampled_candidates_stand_for_the_whole_vocabulary() -> None:
    model = adapted_model()
    for parameter in model.model.mask_adapter.parameters():
        parameter.data *= 0.05  # so that tokens are unlikely by themselves, as in a large vocabulary
    batch = batch_of(answers(3))
    exact = float(MaskDistillation(model, num_masks=K, top_tokens=318, sampled_tokens=1)(**batch)["loss"])
    sampled = MaskDistillation(model, num_masks=K, top_tokens=16, sampled_tokens=80)
    estimates = torch.tensor([sampled(**batch | {"noise_key": torch.tensor(key)})["loss"] for key in range(20)])
    assert float(estimates.mean()) == pytest.approx(exact, rel=0.05)
    with torch.no_grad():
        _, candidates, shares = sampled._teacher(torch.randn(5, 32), 0)
    assert MASK not in candidates.tolist()
    assert float(shares.exp().sum()) == pytest.approx(model.config.vocab_size - 1, rel=1e-5)


def test_cuts_depend_on_seed_epoch_and_answer_alone() -> None:
    some = answers()
    collator = DataCollatorForMaskRuns(0, K, 3)
    together = collator([some])["cuts"]
    for row, answer in enumerate(some):
        alone = collator([[answer]])["cuts"][0]
        assert torch.equal(together[row, : len(alone)], alone)
        assert bool((together[row, len(alone) :] == -1).all())
    collator.set_epoch(1)
    assert not torch.equal(collator([some])["cuts"], together)
    collator.set_epoch(0)
    assert torch.equal(collator([some])["cuts"], together)


def test_cuts_cover_the_response_and_labels_are_the_tokens_behind_them() -> None:
    some = answers(20)
    collator = DataCollatorForMaskRuns(0, K, 3)
    batch = collator([some])
    for row, answer in enumerate(some):
        tokens = answer["prompt_ids"] + answer["response_ids"]
        cuts = [cut for cut in batch["cuts"][row].tolist() if cut >= 0]
        assert cuts == sorted(cuts) and len(set(cuts)) == len(cuts)
        assert len(answer["prompt_ids"]) - 1 <= cuts[0] and cuts[-1] < len(tokens) - 1
        for run, cut in enumerate(cuts):
            expected = (tokens[cut + 1 : cut + 1 + K] + [-100] * K)[:K]
            assert batch["labels"][row, run].tolist() == expected


def test_batches_hold_every_answer_once() -> None:
    some = answers(30)
    batches = AnswerBatches(some, batch_slots=48, cut_stride=3, num_masks=K, seed=0)
    members = sorted(index for batch in batches.batches for index in batch)
    assert members == list(range(30))
    assert len(batches) > 5
