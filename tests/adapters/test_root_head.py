"""Drafts without masks, of the root's state: right to the letter, learned, saved with the adapter."""

import copy
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_mask_adapter import SMALL, with_adapter
from test_mask_trainer import K, answers
from tiny import VOCAB_SIZE, stock_twin, tiny_model

from wedlm_hf import (
    MaskAdapterTrainer,
    MaskTrainingConfig,
    add_mask_adapter,
    load_mask_adapter,
    save_mask_adapter,
)
from wedlm_hf.adapters import attach, mask_adapter, root_head
from wedlm_hf.adapters import trainer as trainer_module
from wedlm_hf.adapters.adapter_files import KEY_PREFIX, MOST_FREQUENT, ROOT_TOKENS, WEIGHTS_NAME
from wedlm_hf.adapters.attach import ROOT_WEIGHT, _frequent, add_root_head
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.evaluation import accepted_runs
from wedlm_hf.adapters.mask_adapter import CatchInner, RootHead
from wedlm_hf.adapters.root_head import Batches, root_rows, train_root_head
from wedlm_hf.checkpoints.packed import can_pack, pack
from wedlm_hf.generation.drafter import Drafter, Seen, make_drafter
from wedlm_hf.generation.planner import Planner
from wedlm_hf.generation.sampling import TokenSampler

VERIFIED = {"strategy": "wedlm", "verification": "exact", "pad_token_id": 0}


needs_kernels = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")
LIMIT = {"max_new_tokens": 16, "pad_token_id": 0}
CHEAP = VERIFIED | LIMIT | {"slot_cost": 0.01}


@pytest.fixture
def maskless(monkeypatch):
    """No masks are planned."""
    spend = Planner._spend
    monkeypatch.setattr(Planner, "_spend", lambda planner, *args: spend(planner, *args[:-1], 0))


def rooted(model=None):
    """A model whose adapter has a root head that drafts among a few tokens."""
    model = with_adapter(model or stock_twin(tiny_model()), replace(SMALL, root_width=16))
    model.mask_adapter.root_head.draft_among([{"response_ids": [*range(20, 90)]}])
    return model


def batch(*lengths):
    torch.manual_seed(0)
    rows = [torch.randint(4, 300, (length,)) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.mark.parametrize("lengths", [[5], [6, 3, 9]])
def test_drafts_are_the_likeliest_frequent_tokens_by_the_state_of_the_last_row(lengths, maskless, monkeypatch):
    model, checked = rooted(), []
    base, adapter = copy.deepcopy(model), model.mask_adapter
    own = Drafter.drafts

    def compared(drafter, sequence, masks, guesses):
        drafts = own(drafter, sequence, masks, guesses)
        if not masks:
            text = torch.tensor(sequence.tokens)
            with torch.no_grad():
                read = base.base_model(text[None, :-1], output_hidden_states=True)
                state = torch.cat([read.last_hidden_state, read.hidden_states[1]], -1)[0, -1]
                state = adapter.root_head(state, base.get_input_embeddings()(text[-2:]))
                frequent = adapter.root_head.frequent()
                scores = base.lm_head(state)[frequent]
            chances, places = scores.softmax(-1).topk(3)
            assert [draft.token for draft in drafts[:3]] == frequent[places].tolist()
            assert [draft.chance for draft in drafts[:3]] == pytest.approx(chances.tolist(), rel=1e-3, abs=1e-6)
            assert [draft.is_sibling for draft in drafts[:3]] == [False, True, True]
            checked.append(drafts)
        return drafts

    monkeypatch.setattr(Drafter, "drafts", compared)
    model.generate(**batch(*lengths), **CHEAP, do_sample=False)
    assert len(checked) > 3 * len(lengths)


@pytest.mark.parametrize(
    ("form", "lengths"),
    [("plain", [6, 3, 9]), *(pytest.param("packed", n, marks=needs_kernels) for n in ([5], [6, 3, 9]))],
)
def test_they_change_no_text_greedy_or_sampled(form, lengths, maskless):
    model = rooted() if form == "plain" else pack(rooted())
    for how in ({"do_sample": False}, {"do_sample": True, "temperature": 1.3}):
        texts = []
        for cost in (0.01, 0.02, 1e6):
            torch.manual_seed(1)
            texts.append(model.generate(**batch(*lengths), **VERIFIED | LIMIT, slot_cost=cost, **how))
        assert texts[0].equal(texts[1]) and texts[1].equal(texts[2])
        if how == {"do_sample": False}:
            expected = model.generate(**batch(*lengths), **LIMIT, do_sample=False)
            assert texts[0].tolist() == expected[:, : texts[0].shape[1]].tolist()


def test_it_drafts_among_the_most_frequent_tokens_of_answers_and_then_among_those_from_before():
    head = RootHead(8, 2)
    assert head.frequent().tolist() == []
    head.draft_among([{"prompt_ids": [5, 5, 5], "response_ids": [7, 8, 8]}, {"response_ids": [9, 8, 9]}])
    assert head.frequent().tolist() == [8, 9, 7]
    head.draft_among([{"response_ids": [3, 9]}])
    assert head.frequent().tolist() == [3, 9, 8, 7] and head.frequent(9).tolist() == [3, 8, 7]
    head.draft_among([{"response_ids": [*range(MOST_FREQUENT)]}])
    assert sorted(head.frequent().tolist()) == [*range(MOST_FREQUENT)]


def test_an_adapter_with_ngrams_drafts_among_the_single_tokens_of_these(tmp_path):
    model = rooted()
    save_mask_adapter(model, tmp_path)
    weights = load_file(tmp_path / WEIGHTS_NAME)
    ngrams = {
        "keys": torch.tensor([4, 6, 10, (4 << 21) | 6]),
        "tokens": torch.zeros(4, 3, dtype=torch.int32),
        "counts": torch.tensor([[1, 0, 0, 5], [2, 0, 0, 9], [1, 1, 0, 7], [3, 0, 0, 99]], dtype=torch.int32),
    }
    del weights[KEY_PREFIX + ROOT_TOKENS]
    save_file(weights | {f"{KEY_PREFIX}ngrams.{key}": value for key, value in ngrams.items()}, tmp_path / WEIGHTS_NAME)
    ours = stock_twin(tiny_model())
    load_mask_adapter(ours, tmp_path)
    for found in (ours, PeftModel.from_pretrained(stock_twin(tiny_model()), tmp_path)):
        assert found.mask_adapter.root_head.frequent().tolist() == [5, 9, 3]
        assert found.mask_adapter.root_head.up.equal(model.mask_adapter.root_head.up)


def test_it_learns_what_the_base_says_of_the_token_behind_the_one_that_a_row_predicts():
    model, some = rooted(), answers(3)
    adapter, distillation = model.mask_adapter, MaskDistillation(model, K)
    frequent, losses = adapter.root_head.frequent(), []
    for answer in some:
        tokens, first = torch.tensor(answer["prompt_ids"] + answer["response_ids"]), len(answer["prompt_ids"])
        for place in range(first, len(tokens) - 1):
            with torch.no_grad():
                read = model.base_model(tokens[None], output_hidden_states=True)
                wanted = model.lm_head(read.last_hidden_state[0, place])[frequent].softmax(-1)
                known = model.get_input_embeddings()(tokens[[place - 1, place]])
                state = torch.cat([read.last_hidden_state, read.hidden_states[1]], -1)[0, place - 1]
            scores = model.lm_head(adapter.root_head(state, known))[frequent]
            losses.append(-(wanted * scores.log_softmax(-1)).sum())
    found = Batches(distillation, root_rows(distillation, some))
    loss, _ = found.loss(torch.arange(len(found)))
    torch.testing.assert_close(loss, torch.stack(losses).mean(), atol=1e-5, rtol=1e-4)
    expected = torch.autograd.grad(torch.stack(losses).mean(), [*adapter.root_head.parameters()])
    loss.backward()
    for parameter, right in zip(adapter.root_head.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, right, atol=1e-5, rtol=1e-3)
    assert len(found) == len(losses) > 20
    assert found.measure()["loss_root"] == pytest.approx(float(loss.detach()), rel=1e-4)


def test_training_makes_it_right_and_says_how_often_and_masks_learn_as_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "ROOT_ROWS", 100)
    some = [{"prompt_ids": [5, 6], "response_ids": [7, 8, 9, 10, 11, 12, 13, 14]}] * 4
    weights = []
    for width in (16, 0):
        model = rooted()
        model.mask_adapter.root_head = model.mask_adapter.root_head if width else None
        args = MaskTrainingConfig(str(tmp_path / str(width)), mask_rows=600, report_to=[])
        trainer = MaskAdapterTrainer(model, args, some)
        trainer.train()
        weights.append({name: value for name, value in model.mask_adapter.state_dict().items() if "root" not in name})
        assert all(parameter.requires_grad for parameter in model.mask_adapter.parameters())
        found = [entry["accuracy_root"] for entry in trainer.state.log_history if "accuracy_root" in entry]
        assert [share > 0.8 for share in found] == [True] * bool(width)
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])


def test_a_run_that_is_stopped_while_it_learns_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    made = []
    for name in ("whole", "stopped"):
        args = MaskTrainingConfig(str(tmp_path / name), mask_rows=200, report_to=[])
        if name == "stopped":
            with monkeypatch.context() as patched:
                patched.setattr(trainer_module, "train_root_head", Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    MaskAdapterTrainer(rooted(), args, answers(4)).train()
        trainer = MaskAdapterTrainer(rooted(), args, answers(4))
        trainer.train(resume_from_checkpoint=name == "stopped")
        made.append((trainer.state.global_step, trainer.model.model.mask_adapter.state_dict()))
    (steps, expected), (found, weights) = made
    assert found == steps and all(weights[name].equal(expected[name]) for name in expected)


def test_it_stays_as_it_was_where_training_makes_it_worse(monkeypatch):
    model, some = rooted(), answers(3)
    before = copy.deepcopy(model.mask_adapter.root_head.state_dict())
    monkeypatch.setattr(root_head, "LEARNING_RATE", 50.0)
    shown: list[float] = []
    found = train_root_head(MaskDistillation(model, K), some, 1100, show=lambda share, found: shown.append(share))
    after = model.mask_adapter.root_head.state_dict()
    assert list(dict.fromkeys(shown)) == [0, 1 / 3, 2 / 3, 1] and all(
        after[name].equal(before[name]) for name in before
    )
    assert found == train_root_head(MaskDistillation(model, K), some, 0)


@pytest.mark.parametrize("more", [8, -270])  # its tokens are 20 to 89
def test_an_embedding_that_was_resized_meanwhile_is_read_from_the_first_step_on(more, maskless):
    model, prompt = rooted(), {"input_ids": torch.tensor([[4, 2, 30, 21, 22]])}
    model.resize_token_embeddings(VOCAB_SIZE + more, mean_resizing=False)
    expected = model.generate(**prompt, **LIMIT, do_sample=False)
    for how in (CHEAP, CHEAP | {"slot_cost": 1e6}):
        assert model.generate(**prompt, **how, do_sample=False).tolist() == expected.tolist()


def seen(before, root, logits=None, hidden=None):
    """Of two sequences, by the two tokens before `(2, 1, 2)` and the root's states."""
    return Seen(before[:, 0], torch.zeros(2, 1).long(), [0, 1], logits, hidden, root, logits is not None)


@needs_kernels
def test_packed_heads_are_read_tied_or_not_and_the_adapter_may_have_another_dtype(maskless):
    model = pack(rooted())
    model.mask_adapter.bfloat16()
    assert _frequent(model) is not None and _frequent(model) is _frequent(model)
    model.generate(**batch(5), **CHEAP, do_sample=False)
    before = _frequent(model)
    model.mask_adapter.root_head.draft_among([{"response_ids": [7]}])
    assert _frequent(model) is not before


@needs_kernels
def test_a_loaded_adapters_matrices_are_packed_before_the_first_answer(tmp_path, monkeypatch):
    save_mask_adapter(rooted(), tmp_path)
    model = pack(tiny_model())
    load_mask_adapter(model, tmp_path, any_base=True)
    packs = Mock()
    for module in (mask_adapter, attach):
        monkeypatch.setattr(module, "near_matrix", packs)
    model.generate(torch.tensor([[5, 6, 7]]), strategy="wedlm", verification="exact", max_new_tokens=8)
    assert not packs.called


def test_a_head_with_a_bias_and_one_whose_family_scales_it_are_read_whole(maskless):
    model = rooted()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB_SIZE), requires_grad=False)
    model.config.logit_scale = 0.25
    states, last = torch.randn(2, 1, 2 * model.config.hidden_size), model.config.hidden_size
    with torch.no_grad():
        tokens, head = _frequent(model)
        expected = model.lm_head(states[..., :last])[..., tokens]
        torch.testing.assert_close(head(states[..., :last]), expected, atol=1e-5, rtol=1e-5)
        drafter = make_drafter(model, TokenSampler([], False, None, torch.zeros(1, 1)), frozenset(), True)
        shortlist, before = torch.randint(VOCAB_SIZE, (2, 9)), torch.randint(4, VOCAB_SIZE, (2, 1, 2))
        scores = drafter.sources[0]._scores(states[:, 0], shortlist, before, None)
        expected = 0.25 * model.lm_head(model.draft_hidden(states, before)).gather(2, shortlist[:, None])
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
        _, (drafted, chances), _ = drafter.guess(seen(before, states))
        of_root = 0.25 * model.lm_head(model.root_hidden(states, before))[:, 0, tokens]
        likeliest = of_root.softmax(-1).topk(3)
        assert drafted[:, 0].equal(tokens[likeliest.indices])
        torch.testing.assert_close(chances[:, 0], likeliest.values, atol=1e-4, rtol=1e-3)


def test_what_the_root_head_makes_of_the_row_weighs_in_the_draft_of_its_first_mask_alone():
    model, size = rooted(), 48
    adapter, hidden = model.mask_adapter, torch.randn(2, 3, model.config.hidden_size)
    root, before = torch.randn(2, 1, 2 * model.config.hidden_size), torch.randint(4, VOCAB_SIZE, (2, 1, 2))
    drafter = make_drafter(model, TokenSampler([], False, None, torch.zeros(1, 1)), frozenset(), True)
    assert drafter.reads_root
    with torch.no_grad():
        found = drafter.guess(seen(before, root, torch.randn(2, 3, size), hidden))
        alone = drafter.guess(seen(before, root))
        assert (len(found[0]), found[1]) == (3, None) and alone[0] is None and len(alone[1]) == 2
        of_root = adapter.root_head(root, model.get_input_embeddings()(before))
        own = adapter.head(hidden[:, :1], model.get_input_embeddings()(before))
        mixed = (1 - ROOT_WEIGHT) * own + ROOT_WEIGHT * of_root
        torch.testing.assert_close(model.draft_hidden(hidden[:, :1], before, of_root), mixed)
        shown = []
        score = lambda *inputs: shown.append(inputs[3]) or torch.randn(2, inputs[2].shape[1], size - 1)  # noqa: E731
        drafter.sources[0]._scores = score
        drafter.guess(seen(before, root, torch.randn(2, 3, size), hidden))
    assert shown[0].equal(of_root) and shown[1:] == [None, None]


def test_a_replay_drafts_as_decoding_does_with_the_root_head():
    model = rooted()
    distillation, some = MaskDistillation(model, K), answers(2)
    for answer in some:
        tokens, first = [*answer["prompt_ids"], *answer["response_ids"]], len(answer["prompt_ids"])
        runs = accepted_runs(distillation, answer).tolist()
        for place in range(first - 1, len(tokens) - 2):
            ids, before = torch.tensor([tokens]), torch.tensor([tokens[place : place + 2]])
            memory = distillation.memory(ids, torch.tensor([[place]]))[1]
            with torch.no_grad():
                hidden = distillation.masks(memory, torch.tensor([[place]]))[0, 0, :1]
                own = model.mask_adapter.head(hidden, model.get_input_embeddings()(before))
                of_root = model.root_hidden(distillation.hidden(ids)[0, place : place + 1], before)
                draft = model.lm_head((1 - ROOT_WEIGHT) * own + ROOT_WEIGHT * of_root).argmax(-1)
            assert (runs[place - first + 1] > 0) == (int(draft) == tokens[place + 2])


def test_a_root_head_that_has_not_learned_counts_nothing():
    model, other = rooted(), rooted()
    model.mask_adapter.root_head.up.data.zero_()
    other.mask_adapter.root_head = None
    assert rooted().drafts_from_root and not model.drafts_from_root
    runs = [
        [accepted_runs(MaskDistillation(each, K), answer).tolist() for answer in answers(3)] for each in (model, other)
    ]
    assert runs[0] == runs[1]
    text = model.generate(**batch(5), **CHEAP, do_sample=False, return_dict_in_generate=True)
    expected = other.generate(**batch(5), **CHEAP, do_sample=False, return_dict_in_generate=True)
    assert text.sequences.equal(expected.sequences) and text.stats.drafted.equal(expected.stats.drafted)


def test_a_previous_token_head_and_a_root_head_that_give_nan_change_no_text():
    for name in ("head", "root_head"):
        model = rooted()
        expected = model.generate(**batch(5), **LIMIT, do_sample=False)
        getattr(model.mask_adapter, name).up.data.fill_(torch.nan)
        for cost in (0.0, 0.01):
            assert model.generate(**batch(5), **CHEAP | {"slot_cost": cost}, do_sample=False).equal(expected)


def test_an_adapter_without_one_gets_one_once():
    model = with_adapter(stock_twin(tiny_model()))
    add_root_head(model, 12)
    head = model.mask_adapter.root_head
    add_root_head(model, 99)
    assert model.mask_adapter.root_head is head and model.mask_adapter.settings.root_width == len(head.down) == 12
    assert model.mask_adapter.settings.root_layer == 1 and head.down.shape[1] == 4 * model.config.hidden_size
    assert sum(isinstance(hook, CatchInner) for hook in model.model.layers[0]._forward_hooks.values()) == 1
    assert "mask_adapter.root_head.down" in model._keys_to_ignore_on_save


@pytest.mark.parametrize("layer", [0, 1])
def test_it_reads_the_states_that_its_settings_name_and_is_saved_with_them(layer, tmp_path):
    model = with_adapter(stock_twin(tiny_model()), replace(SMALL, root_width=16, root_layer=layer))
    model.mask_adapter.root_head.draft_among([{"response_ids": [*range(20, 90)]}])
    ids = batch(7)["input_ids"]
    with torch.no_grad():
        read = model.base_model(ids, output_hidden_states=True)
        expected = torch.cat([read.last_hidden_state, *[read.hidden_states[1]] * layer], -1)
        assert MaskDistillation(model, K).hidden(ids).equal(expected)
    text = model.generate(ids, **CHEAP, do_sample=False)
    save_mask_adapter(model, tmp_path)
    again = stock_twin(tiny_model())
    load_mask_adapter(again, tmp_path)
    assert again.mask_adapter.settings == model.mask_adapter.settings
    assert again.generate(ids, **CHEAP, do_sample=False).equal(text)


def test_a_layer_that_the_model_lacks_or_no_root_head_reads_is_refused():
    with pytest.raises(ValueError, match=r"`root_layer` is 3; .* has 2 layers"):
        add_mask_adapter(stock_twin(tiny_model()), replace(SMALL, root_width=16, root_layer=3))
    with pytest.raises(ValueError, match="`root_layer` 1 goes with a `root_width`"):
        replace(SMALL, root_layer=1)


@pytest.mark.parametrize(("rows", "decay"), [(10, 2.0), (512_000, 512 / (2.3e-3 * 512_000))])
def test_its_weights_decay_by_passes_over_the_rows(rows, decay, monkeypatch):
    model, optimizer = rooted(), Mock(wraps=torch.optim.AdamW)
    monkeypatch.setattr(torch.optim, "AdamW", optimizer)
    monkeypatch.setattr(Batches, "__len__", lambda self: rows)
    monkeypatch.setattr(Batches, "measure", lambda self: {"loss_root": 0.0})
    train_root_head(MaskDistillation(model, K), answers(3), 0)
    assert optimizer.call_args.kwargs["weight_decay"] == pytest.approx(decay)
