"""Drafts without masks, from the root's state: right to the letter, learned from the base, saved with the adapter."""

import copy
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_mask_adapter import SMALL, with_adapter
from test_mask_trainer import K, answers, batch_of
from tiny import stock_twin, tiny_model

from wedlm_hf import MaskAdapterTrainer, MaskTrainingConfig, count_ngrams, load_mask_adapter
from wedlm_hf.adapters.adapter_files import WEIGHTS_NAME
from wedlm_hf.adapters.attach import MOST_FREQUENT, _frequent, add_root_head
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.ngrams import NGramDrafter, NGrams
from wedlm_hf.checkpoints.packed import can_pack, pack
from wedlm_hf.generation.planner import Planner
from wedlm_hf.generation.rows import Row
from wedlm_hf.generation.tree_drafter import TreeDrafter

VERIFIED = {"strategy": "wedlm", "verification": "exact", "max_new_tokens": 24, "pad_token_id": 0}
needs_kernels = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")
CHEAP = VERIFIED | {"slot_cost": 0.01}


@pytest.fixture(autouse=True)
def maskless(monkeypatch):
    """No masks are planned."""
    spend = Planner._spend
    monkeypatch.setattr(Planner, "_spend", lambda planner, *args: spend(planner, *args[:-1], 0))


def rooted(model=None):
    """A model whose adapter has a root head, and n-grams of a few answers."""
    model = with_adapter(model or stock_twin(tiny_model()), replace(SMALL, root_width=16))
    count_ngrams(model, [{"prompt_ids": [1, 2], "response_ids": [*range(20, 90)]}] * 2)
    return model


def batch(*lengths):
    torch.manual_seed(0)
    rows = [torch.randint(4, 300, (length,)) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class Unmixed:
    """N-grams that know nothing."""

    def mixed(self, drafts, text):
        return drafts

    def extend(self, drafts, text, end_tokens):
        pass


@pytest.mark.parametrize("lengths", [[5], [6, 3, 9]])
def test_drafts_are_the_likeliest_frequent_tokens_by_the_state_of_the_last_row(lengths, monkeypatch):
    model, checked = rooted(), []
    base, adapter = copy.deepcopy(model), model.mask_adapter
    own = TreeDrafter._drafts

    def compared(drafter, sequence, masks, numbers):
        ngrams, drafter.ngrams = drafter.ngrams, Unmixed()
        drafts, drafter.ngrams = own(drafter, sequence, masks, numbers), ngrams
        if not masks:
            text = torch.tensor(sequence.tokens)
            with torch.no_grad():
                state = base.base_model(text[None, :-1]).last_hidden_state[0, -1]
                state = adapter.root_head(state, base.get_input_embeddings()(text[-2:]))
                frequent = adapter.ngrams.frequent(MOST_FREQUENT)
                scores = base.lm_head(state)[frequent]
            expected = frequent[scores.topk(3).indices].tolist()
            assert [draft.token for draft in drafts[:3]] == expected
            assert [draft.chance for draft in drafts[:3]] == pytest.approx(
                scores.softmax(-1).topk(3).values.tolist(), rel=1e-3, abs=1e-6
            )
            assert [draft.is_sibling for draft in drafts[:3]] == [False, True, True]
            checked.append(drafts)
        return drafts

    monkeypatch.setattr(TreeDrafter, "_drafts", compared)
    model.generate(**batch(*lengths), **CHEAP, do_sample=False)
    assert len(checked) > 3 * len(lengths)


@pytest.mark.parametrize("lengths", [[5], [6, 3, 9]])
@pytest.mark.parametrize("form", ["plain", pytest.param("packed", marks=needs_kernels)])
def test_they_change_no_text_greedy_or_sampled(lengths, form):
    model = rooted() if form == "plain" else pack(rooted())
    for how in ({"do_sample": False}, {"do_sample": True, "temperature": 1.3}):
        texts = []
        for options in (CHEAP, VERIFIED | {"slot_cost": 0.02}, VERIFIED | {"slot_cost": 1e6}):
            torch.manual_seed(1)
            texts.append(model.generate(**batch(*lengths), **options, **how))
        assert texts[0].equal(texts[1]) and texts[1].equal(texts[2])
    expected = model.generate(**batch(*lengths), max_new_tokens=24, pad_token_id=0, do_sample=False)
    found = model.generate(**batch(*lengths), **CHEAP, do_sample=False)
    assert found.tolist() == expected[:, : found.shape[1]].tolist()


def test_chances_are_mixed_with_those_of_ngrams():
    drafter = NGramDrafter(
        NGrams.of([{"prompt_ids": [1], "response_ids": [2, 3]}, {"prompt_ids": [1], "response_ids": [2, 4]}] * 2)
    )
    drafts = [Row(9, 1, -1, 0.5), Row(3, 1, -1, 0.4, True)]
    found = drafter.mixed(drafts, [1, 2])
    assert [row.token for row in found] == [3, 9, 4] and [row.is_sibling for row in found] == [False, True, True]
    chances = 0.65 * 0.4 + 0.35 * 2 / 5, 0.65 * 0.5, 0.35 * 2 / 5
    assert [row.chance for row in found] == pytest.approx(chances)
    assert drafter.mixed(drafts, [8]) == drafts


def test_it_learns_at_every_place_and_alters_nothing_of_what_masks_learn():
    model, some = rooted(), answers(3)
    batch_, vocabulary = batch_of(some), model.config.vocab_size
    adapter, distillation = model.mask_adapter, MaskDistillation(model, K, top_tokens=vocabulary, sampled_tokens=1)
    loss = distillation(**batch_)["loss"]
    root_head, adapter.root_head = adapter.root_head, None
    without = distillation(**batch_)["loss"]
    adapter.root_head = root_head
    total, places = torch.zeros(()), set()
    for row, cuts in enumerate(batch_["cuts"].tolist()):
        for place in {cut + 1 + depth for cut in cuts for depth in range(K)}:
            tokens = torch.tensor(some[row]["prompt_ids"] + some[row]["response_ids"])
            if any(
                batch_["labels"][row, number, place - cut - 1] != -100
                for number, cut in enumerate(cuts)
                if 0 <= place - cut - 1 < K
            ):
                with torch.no_grad():
                    hidden = model.base_model(tokens[None]).last_hidden_state[0]
                    wanted = model.lm_head(hidden[place]).softmax(-1)
                    known = model.get_input_embeddings()(tokens[[place - 1, place]])
                total = total - (wanted * model.lm_head(root_head(hidden[place - 1], known)).log_softmax(-1)).sum()
                places.add((row, place))
    weights = float((0.85 ** torch.arange(K) * (batch_["labels"] != -100)).sum())
    torch.testing.assert_close(loss - without, total / weights, atol=1e-4, rtol=1e-4)
    expected = torch.autograd.grad(total / weights, [*root_head.parameters()])
    loss.backward()
    for parameter, right in zip(root_head.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, right, atol=1e-4, rtol=1e-3)
    assert len(places) > 20


def test_training_makes_it_right_and_says_how_often(tmp_path):
    model, some = rooted(), [{"prompt_ids": [5, 6], "response_ids": [7, 8, 9, 10, 11, 12, 13, 14]}] * 4
    args = MaskTrainingConfig(str(tmp_path), mask_rows=2500, learning_rate=2e-2, logging_steps=5, report_to=[])
    trainer = MaskAdapterTrainer(model, args, some)
    trainer.train()
    shares = [entry["accuracy_root"] for entry in trainer.state.log_history if "accuracy_root" in entry]
    assert shares[-1] > max(0.8, shares[0])


@pytest.mark.parametrize("load", [load_mask_adapter, PeftModel.from_pretrained])
def test_it_is_saved_and_loaded_with_the_adapter(tmp_path, load):
    model = rooted()
    model.save_mask_adapter(tmp_path / "adapter", torch.float32)
    other = stock_twin(tiny_model())
    load(other, tmp_path / "adapter")
    for name, weight in model.mask_adapter.root_head.state_dict().items():
        assert weight.equal(other.mask_adapter.root_head.state_dict()[name])
    output = model.generate(**batch(5), **CHEAP, do_sample=False, return_dict_in_generate=True)
    again = other.generate(**batch(5), **CHEAP, do_sample=False, return_dict_in_generate=True)
    assert output.stats.drafted.equal(again.stats.drafted)


def test_a_root_head_of_another_size_than_stated_is_refused(tmp_path):
    rooted().save_mask_adapter(tmp_path)
    weights = load_file(tmp_path / WEIGHTS_NAME)
    name = next(name for name in weights if name.endswith("root_head.down"))
    save_file(weights | {name: weights[name][:-1].clone()}, tmp_path / WEIGHTS_NAME, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="`root_width` 16"):
        load_mask_adapter(stock_twin(tiny_model()), tmp_path)


def test_an_embedding_that_was_resized_meanwhile_is_read_from_the_first_step_on():
    model = rooted()
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    expected = model.generate(**batch(5), max_new_tokens=24, pad_token_id=0, do_sample=False)
    for cost in (0.01, 1e6):
        assert model.generate(**batch(5), **VERIFIED, slot_cost=cost, do_sample=False).tolist() == expected.tolist()


@needs_kernels
def test_packed_heads_are_read_tied_or_not_and_the_adapter_may_have_another_dtype():
    model = pack(rooted())
    model.mask_adapter.bfloat16()
    assert _frequent(model) is not None and _frequent(model) is _frequent(model)
    model.generate(**batch(5), **CHEAP, do_sample=False)
    before = _frequent(model)
    count_ngrams(model, [{"prompt_ids": [1], "response_ids": [7, 7, 7, 7]}])
    assert _frequent(model) is not before


@pytest.mark.parametrize(("key", "message"), [(5000, "token 4999"), (0, "damaged")])
def test_ngrams_of_tokens_that_the_model_lacks_are_refused(key, message):
    ngrams = NGrams.of([{"prompt_ids": [1, 2], "response_ids": [3, 4]}] * 2)
    ngrams.keys[0] = key
    ngrams.keys.copy_(ngrams.keys.sort().values)
    with pytest.raises(ValueError, match=message):
        ngrams.check(320)


def test_an_adapter_without_one_gets_one_once():
    model = with_adapter(stock_twin(tiny_model()))
    add_root_head(model, 12)
    head = model.mask_adapter.root_head
    add_root_head(model, 99)
    assert model.mask_adapter.root_head is head and model.mask_adapter.settings.root_width == len(head.down) == 12
    assert "mask_adapter.root_head.down" in model._keys_to_ignore_on_save
