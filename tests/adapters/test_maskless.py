"""Drafts without masks, of n-grams and of the root's state: right to the letter, learned, saved with the adapter."""

import copy
import json
import random
from collections import Counter, defaultdict
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_mask_adapter import SMALL, with_adapter
from test_mask_trainer import K, answers
from tiny import EOS, VOCAB_SIZE, stock_twin, tiny_model

from wedlm_hf import (
    MaskAdapterTrainer,
    MaskTrainingConfig,
    add_mask_adapter,
    count_ngrams,
    load_mask_adapter,
    save_mask_adapter,
    unload_mask_adapter,
)
from wedlm_hf.adapters import heads
from wedlm_hf.adapters import trainer as trainer_module
from wedlm_hf.adapters.adapter_files import WEIGHTS_NAME
from wedlm_hf.adapters.attach import MOST_FREQUENT, ROOT_WEIGHT, _frequent, add_root_head
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.evaluation import accepted_runs
from wedlm_hf.adapters.heads import Batches, add_second_head, mask_rows, mean_of_heads, root_rows, train_root_head
from wedlm_hf.adapters.mask_adapter import CatchInner, PreviousTokenHead
from wedlm_hf.adapters.ngrams import LEAST_REACH, NGramDrafter, NGrams
from wedlm_hf.adapters.peft_method import MaskAdapterConfig
from wedlm_hf.checkpoints.find import ADAPTER_FILE
from wedlm_hf.checkpoints.packed import can_pack, pack
from wedlm_hf.generation.drafter import UNIT
from wedlm_hf.generation.planner import Planner
from wedlm_hf.generation.rows import Row
from wedlm_hf.generation.sampling import TokenSampler
from wedlm_hf.generation.tree_drafter import TreeDrafter

VERIFIED = {"strategy": "wedlm", "verification": "exact", "pad_token_id": 0}


def texts(count, seed=0, tokens=5):
    """Answers of few tokens, some of them empty."""
    draw = random.Random(seed)
    lengths = [(draw.randrange(4), draw.randrange(9)) for _ in range(count)]
    return [
        {"prompt_ids": draw.choices(range(tokens), k=p), "response_ids": draw.choices(range(tokens), k=r)}
        for p, r in lengths
    ]


def same(ngrams, other):
    return all(torch.equal(getattr(ngrams, name), getattr(other, name)) for name in ("keys", "tokens", "counts"))


def by_hand(answers):
    found = defaultdict(Counter)
    for answer in answers:
        text, start = answer["prompt_ids"] + answer["response_ids"], len(answer["prompt_ids"])
        for place in range(start, len(text)):
            for size in range(1, min(3, place) + 1):
                found[tuple(text[place - size : place])][text[place]] += 1
    return {ngram: followers for ngram, followers in found.items() if followers.total() > 1}


def chances(followers):
    """The counts of the three most frequent ones, as chances."""
    return sorted((count / (followers.total() + 1) for count in followers.values()), reverse=True)[:3]


def test_counts_are_those_by_hand_in_parts_or_in_one_go():
    answers, ngrams = texts(300, tokens=3), None
    for part in range(3):
        ngrams = NGrams.of(answers[part::3], ngrams)
    assert same(ngrams, NGrams.of(answers))
    drafter, expected = NGramDrafter(ngrams, VOCAB_SIZE), by_hand(answers)
    assert len(ngrams.keys) == len(expected) and bool((ngrams.keys.diff() > 0).all())
    for ngram, followers in expected.items():
        found = drafter.followers(ngram)
        assert [chance for _, chance in found] == pytest.approx(chances(followers))
        assert all(followers[token] / (followers.total() + 1) == pytest.approx(chance) for token, chance in found)


def test_the_longest_known_ngram_counts_nothing_follows_an_unknown_one_and_the_most_frequent_are_kept(monkeypatch):
    same = {"prompt_ids": [1], "response_ids": [2, 3, 4]}
    other = {"prompt_ids": [7], "response_ids": [3, 5]}
    drafter = NGramDrafter(NGrams.of([same, same, *[other] * 3]), VOCAB_SIZE)
    assert drafter.followers([9, 2, 3]) == [(4, 2 / 3)]
    assert [token for token, _ in drafter.followers([9, 3])] == [5, 4]
    assert drafter.followers([8]) == drafter.followers([]) == []
    assert NGrams.of([]).keys.shape == NGrams.of([same]).keys.shape == (0,)
    monkeypatch.setattr("wedlm_hf.adapters.ngrams.MOST", 2)
    pairs = [(1, 2)] * 3 + [(5, 6)] * 2 + [(3, 4)] * 4
    drafter = NGramDrafter(
        NGrams.of([{"prompt_ids": [first], "response_ids": [second]} for first, second in pairs]), VOCAB_SIZE
    )
    assert [drafter.followers([token]) for token in (5, 1, 3)] == [[], [(2, 3 / 4)], [(4, 4 / 5)]]
    assert NGramDrafter(NGrams(2), VOCAB_SIZE).followers([-1]) == []  # a table that nobody filled


def test_drafts_are_a_tree_whose_siblings_share_a_chance_and_that_ends_where_the_text_does():
    drafter = NGramDrafter(
        NGrams.of([*texts(400), *[{"prompt_ids": [0, 1], "response_ids": [EOS, 4, 4]}] * 200]), VOCAB_SIZE
    )
    ends = 0
    for text, drafts in (([3, 4], []), ([0, 1], []), ([4], [Row(1, 1, -1, 0.5), Row(0, 2, 0, 0.6)])):
        given = list(drafts)
        drafter.extend(drafts, text, {EOS})
        assert drafts[: len(given)] == given and len(drafts) > len(given)
        children, reaches = defaultdict(list), {-1: 1.0}
        for place, draft in enumerate(drafts):
            above = drafts[draft.parent].position if draft.parent >= 0 else 0
            assert draft.parent < place and draft.position == 1 + above
            assert draft.is_sibling == bool(children[draft.parent]) or place < len(given)
            children[draft.parent].append(draft)
            reaches[place] = reaches[draft.parent] * draft.chance
            assert reaches[place] >= LEAST_REACH
            ends += draft.token == EOS
        for parent, own in children.items():
            assert len({draft.token for draft in own}) == len(own) and sum(draft.chance for draft in own) <= 1
            assert parent < 0 or drafts[parent].token != EOS
    assert ends


def test_without_any_training_a_model_repeats_its_answers_in_fewer_forwards_and_to_the_letter():
    def written(prompts, **how):
        how = {"max_new_tokens": 40, "return_dict_in_generate": True, "pad_token_id": 0} | how
        return model.generate(torch.tensor(prompts), **how)

    model = stock_twin(tiny_model(), "sdpa")
    prompts = [[token, token + 1, token + 2] for token in range(20, 32, 2)]
    expected = [written([prompt], do_sample=False).sequences[0].tolist() for prompt in prompts]
    add_mask_adapter(model, SMALL)
    seen = [{"prompt_ids": text[:3], "response_ids": text[3:]} for text in expected[:4]]
    count_ngrams(model, seen * 2)
    cheap = VERIFIED | {"slot_cost": 0.05}
    batch = written(prompts, **cheap, do_sample=False).sequences.tolist()
    assert [row[: len(own)] for row, own in zip(batch, expected, strict=True)] == expected
    outputs = [written([prompt], **cheap, do_sample=False) for prompt in prompts]
    assert [output.sequences[0].tolist() for output in outputs] == expected
    assert sum(int(output.stats.forwards) for output in outputs[:4]) < 0.6 * sum(map(len, expected[:4]))
    draws = []
    for ngrams, window_size in ((model.mask_adapter.ngrams, 4), (model.mask_adapter.ngrams, 31), (None, 31)):
        model.mask_adapter.ngrams = ngrams
        torch.manual_seed(3)
        draws.append([written([each], do_sample=True, window_size=window_size, **cheap) for each in prompts[:2]])
    for first, *others in zip(*draws, strict=True):
        assert all(torch.equal(first.sequences, other.sequences) for other in others)


def counted():
    """A model with a mask adapter and n-grams."""
    model = stock_twin(tiny_model())
    add_mask_adapter(model, SMALL)
    count_ngrams(model, texts(200))
    return model


def test_a_model_that_peft_made_saves_them_too_and_they_are_saved_again(tmp_path):
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    for below in (stock_twin(tiny_model()), get_peft_model(stock_twin(tiny_model()), lora)):
        model = get_peft_model(below, MaskAdapterConfig(rank=4, head_width=8))
        count_ngrams(model, texts(200))
        with pytest.raises(ValueError, match=r"PEFT made the mask adapter of PeftModelForCausalLM: call the `unload"):
            unload_mask_adapter(model)
        save_mask_adapter(model, tmp_path / "ours")
        model.save_pretrained(tmp_path)
        assert (tmp_path / "ours" / WEIGHTS_NAME).read_bytes() == (tmp_path / WEIGHTS_NAME).read_bytes()
        other, kept = stock_twin(tiny_model()), model.mask_adapter.ngrams
        load_mask_adapter(other, tmp_path)
        assert same(other.mask_adapter.ngrams, kept)
        save_mask_adapter(other, tmp_path / "again", torch.bfloat16)
        assert json.loads((tmp_path / "again" / ADAPTER_FILE).read_text())["ngrams"] == len(kept.keys)


def test_tokens_that_are_not_the_models_are_refused():
    model = stock_twin(tiny_model())
    add_mask_adapter(model, SMALL)
    for token in (-1, VOCAB_SIZE, 2**21):
        with pytest.raises(ValueError, match=f"tokens of the model, 0 to 319, as lists .*{token}"):
            count_ngrams(model, [{"prompt_ids": [4], "response_ids": [5, token]}])
        assert model.mask_adapter.ngrams is None


def test_a_damaged_table_is_refused(tmp_path):
    for damage, message in (
        (lambda ngrams: ngrams.keys.copy_(ngrams.keys.flip(0)), "n-grams are damaged"),
        (lambda ngrams: ngrams.keys[:1].zero_(), "n-grams are damaged"),
        (lambda ngrams: ngrams.counts.neg_(), "n-grams are damaged"),
        (lambda ngrams: ngrams.keys.masked_fill_(ngrams.keys == 5, 5000), "have token 4999, and the model 320 tokens"),
        (lambda ngrams: ngrams.tokens.add_(VOCAB_SIZE), "n-grams have token 324, and the model 320 tokens"),
    ):
        model = counted()
        damage(model.mask_adapter.ngrams)
        save_mask_adapter(model, tmp_path)
        other = stock_twin(tiny_model())
        with pytest.raises(ValueError, match=message):
            load_mask_adapter(other, tmp_path)
        assert not hasattr(other, "mask_adapter")


# The root head.

needs_kernels = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")
LIMIT = {"max_new_tokens": 16, "pad_token_id": 0}
CHEAP = VERIFIED | LIMIT | {"slot_cost": 0.01}


@pytest.fixture
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


@pytest.mark.parametrize("lengths", [[5], [6, 3, 9]])
def test_drafts_are_the_likeliest_frequent_tokens_by_the_state_of_the_last_row(lengths, maskless, monkeypatch):
    model, checked = rooted(), []
    base, adapter = copy.deepcopy(model), model.mask_adapter
    own = TreeDrafter._drafts

    def compared(drafter, sequence, masks, numbers):
        ngrams, drafter.ngrams = drafter.ngrams, Mock(mixed=lambda drafts, text: drafts)  # they know nothing
        drafts, drafter.ngrams = own(drafter, sequence, masks, numbers), ngrams
        if not masks:
            text = torch.tensor(sequence.tokens)
            with torch.no_grad():
                read = base.base_model(text[None, :-1], output_hidden_states=True)
                state = torch.cat([read.last_hidden_state, read.hidden_states[1]], -1)[0, -1]
                state = adapter.root_head(state, base.get_input_embeddings()(text[-2:]))
                frequent = adapter.ngrams.frequent(MOST_FREQUENT, VOCAB_SIZE)
                scores = base.lm_head(state)[frequent]
            chances, places = scores.softmax(-1).topk(3)
            assert [draft.token for draft in drafts[:3]] == frequent[places].tolist()
            assert [draft.chance for draft in drafts[:3]] == pytest.approx(chances.tolist(), rel=1e-3, abs=1e-6)
            assert [draft.is_sibling for draft in drafts[:3]] == [False, True, True]
            checked.append(drafts)
        return drafts

    monkeypatch.setattr(TreeDrafter, "_drafts", compared)
    model.generate(**batch(*lengths), **CHEAP, do_sample=False)
    assert len(checked) > 3 * len(lengths)


@pytest.mark.parametrize("lengths", [[5], [6, 3, 9]])
@pytest.mark.parametrize("form", ["plain", pytest.param("packed", marks=needs_kernels)])
def test_they_change_no_text_greedy_or_sampled(lengths, form, maskless):
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


def test_chances_are_mixed_with_those_of_ngrams():
    drafter = NGramDrafter(
        NGrams.of([{"prompt_ids": [1], "response_ids": [2, last]} for last in (3, 4)] * 2), VOCAB_SIZE
    )
    drafts = [Row(9, 1, -1, 0.5), Row(3, 1, -1, 0.4, True)]
    found = drafter.mixed(drafts, [1, 2])
    assert [row.token for row in found] == [3, 9, 4] and [row.is_sibling for row in found] == [False, True, True]
    chances = 0.8 * 0.4 + 0.2 * 2 / 5, 0.8 * 0.5, 0.2 * 2 / 5
    assert [row.chance for row in found] == pytest.approx(chances) and drafter.mixed(drafts, [8]) == drafts


def test_it_learns_what_the_base_says_of_the_token_behind_the_one_that_a_row_predicts():
    model, some = rooted(), answers(3)
    adapter, distillation = model.mask_adapter, MaskDistillation(model, K)
    frequent, losses = adapter.ngrams.frequent(MOST_FREQUENT, VOCAB_SIZE), []
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
    found = Batches(distillation, root_rows(distillation, some), adapter.root_head)
    loss, _ = found.loss(torch.arange(len(found)))
    torch.testing.assert_close(loss, torch.stack(losses).mean(), atol=1e-5, rtol=1e-4)
    expected = torch.autograd.grad(torch.stack(losses).mean(), [*adapter.root_head.parameters()])
    loss.backward()
    for parameter, right in zip(adapter.root_head.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, right, atol=1e-5, rtol=1e-3)
    assert len(found) == len(losses) > 20
    assert found.measure("root")["loss_root"] == pytest.approx(float(loss.detach()), rel=1e-4)


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
    monkeypatch.setattr(heads, "LEARNING_RATE", 50.0)
    shown: list[int] = []
    found = train_root_head(MaskDistillation(model, K), some, 1100, show=lambda rows, found: shown.append(rows))
    after = model.mask_adapter.root_head.state_dict()
    assert list(dict.fromkeys(shown)) == [0, 512, 1024, 1536] and all(
        after[name].equal(before[name]) for name in before
    )
    assert found == train_root_head(MaskDistillation(model, K), some, 0)


@pytest.mark.parametrize("more", [8, -270])  # the n-grams' tokens are 20 to 89
def test_an_embedding_that_was_resized_meanwhile_is_read_from_the_first_step_on(more, maskless):
    model, prompt = rooted(), {"input_ids": torch.tensor([[4, 2, 30, 21, 22]])}
    model.resize_token_embeddings(VOCAB_SIZE + more, mean_resizing=False)
    expected = model.generate(**prompt, **LIMIT, do_sample=False)
    for how in (CHEAP, CHEAP | {"slot_cost": 1e6}):
        assert model.generate(**prompt, **how, do_sample=False).tolist() == expected.tolist()


@needs_kernels
def test_packed_heads_are_read_tied_or_not_and_the_adapter_may_have_another_dtype(maskless):
    model = pack(rooted())
    model.mask_adapter.bfloat16()
    assert _frequent(model) is not None and _frequent(model) is _frequent(model)
    model.generate(**batch(5), **CHEAP, do_sample=False)
    before = _frequent(model)
    count_ngrams(model, [{"prompt_ids": [1], "response_ids": [7, 7, 7, 7]}])
    assert _frequent(model) is not before


def test_a_head_with_a_bias_and_one_whose_family_scales_it_are_read_whole(maskless):
    model = rooted()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB_SIZE), requires_grad=False)
    model.config.logit_scale = 0.25
    states, last = torch.randn(2, 1, 2 * model.config.hidden_size), model.config.hidden_size
    with torch.no_grad():
        tokens, head = _frequent(model)
        expected = model.lm_head(states[..., :last])[..., tokens]
        torch.testing.assert_close(head(states[..., :last]), expected, atol=1e-5, rtol=1e-5)
        drafter = model.make_drafter(TokenSampler([], False, None, torch.zeros(1, 1)), frozenset(), True)
        shortlist, before = torch.randint(VOCAB_SIZE, (2, 9)), torch.randint(4, VOCAB_SIZE, (2, 1, 2))
        scores = drafter._scores(states[:, 0], shortlist, before)
        expected = 0.25 * model.lm_head(model.draft_hidden(states, before)).gather(2, shortlist[:, None])
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
        (drafted, chances) = drafter.guess(None, None, before[:, 0], torch.zeros(2, 1).long(), [0, 1], states)
        of_root = 0.25 * model.lm_head(model.root_hidden(states, before))[:, 0, tokens]
        likeliest = of_root.softmax(-1).topk(3)
        assert drafted.equal(tokens[likeliest.indices])
        torch.testing.assert_close(chances * UNIT, likeliest.values, atol=1e-4, rtol=1e-3)


def test_what_the_root_head_makes_of_the_row_weighs_in_the_draft_of_its_first_mask_alone():
    model, size = rooted(), 48
    adapter, hidden = model.mask_adapter, torch.randn(2, 3, model.config.hidden_size)
    root, before = torch.randn(2, 1, 2 * model.config.hidden_size), torch.randint(4, VOCAB_SIZE, (2, 1, 2))
    drafter = model.make_drafter(TokenSampler([], False, None, torch.zeros(1, 1)), frozenset(), True)
    assert drafter.reads_root
    with torch.no_grad():
        places = torch.zeros(2, 1).long()
        found = drafter.guess(torch.randn(2, 3, size), hidden, before[:, 0], places, [0, 1], root, True)
        alone = drafter.guess(None, None, before[:, 0], places, [0, 1], root)
        assert (len(found), len(alone)) == (9, 2)
        of_root = adapter.root_head(root, model.get_input_embeddings()(before))
        own = adapter.head(hidden[:, :1], model.get_input_embeddings()(before))
        mixed = (1 - ROOT_WEIGHT) * own + ROOT_WEIGHT * of_root
        torch.testing.assert_close(model.draft_hidden(hidden[:, :1], before, of_root), mixed)
        shown = []
        drafter._scores = lambda *inputs: shown.append(inputs[3]) or torch.randn(2, inputs[2].shape[1], size - 1)
        drafter.guess(torch.randn(2, 3, size), hidden, before[:, 0], places, [0, 1], root, True)
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


def test_the_mean_of_two_heads_is_one_head_that_gives_the_mean_of_what_they_give():
    some = [PreviousTokenHead(8, width) for width in (5, 3)]
    for head in some:
        torch.nn.init.normal_(head.up)
    states, previous = torch.randn(4, 8), torch.randn(4, 2, 8)
    expected = sum(head(states, previous) for head in some) / 2
    torch.testing.assert_close(mean_of_heads(*some)(states, previous), expected)


def test_a_second_head_learns_what_the_base_says_at_masks_and_the_mean_stays_where_it_is_better(monkeypatch):
    model = rooted()
    distillation, adapter = MaskDistillation(model, K), model.mask_adapter
    some = [{"prompt_ids": [5, 6], "response_ids": [7, 8, 9, 10, 11, 12, 13, 14]}] * 4
    rows = mask_rows(distillation, some[:1])
    tokens = torch.tensor([*some[0]["prompt_ids"], *some[0]["response_ids"]])
    read = distillation.hidden(tokens[None])[0, :, : model.config.hidden_size]
    assert len(rows.states) == len(rows.tokens) == len(rows.targets) > K
    for (first, last), target in zip(rows.tokens.tolist(), rows.targets.tolist(), strict=True):
        assert last == first + 1  # the answer counts
        torch.testing.assert_close(rows.bases[target], read[tokens.tolist().index(last)], atol=1e-5, rtol=1e-4)
    tests = mask_rows(distillation, some[:1], 1)
    before = Batches(distillation, tests, adapter.head).measure("mask")
    units = len(adapter.head.down)
    found = add_second_head(distillation, some, 20_000, width=12)
    assert found["loss_mask"] < before["loss_mask"]
    assert found == Batches(distillation, tests, adapter.head).measure("mask")
    assert len(adapter.head.down) == adapter.settings.head_width == units + 12
    kept, broken = adapter.head, copy.deepcopy(adapter.head)
    broken.up.data.fill_(torch.nan)
    monkeypatch.setattr(heads, "mean_of_heads", lambda *some: broken)
    assert add_second_head(distillation, some, 0, width=3) == found and adapter.head is kept


def test_a_second_head_needs_a_first_and_ngrams_and_changes_no_noise_of_the_caller():
    some, state = answers(3), torch.get_rng_state()
    for settings, lacking in ((replace(SMALL, head_width=0), "previous-token head"), (SMALL, "n-grams: call `count")):
        model = with_adapter(stock_twin(tiny_model()), settings)
        with pytest.raises(ValueError, match=f"The mask adapter has no {lacking}"):
            add_second_head(MaskDistillation(model, K), some, 10, width=4)
    model = rooted()
    model.mask_adapter.requires_grad_(False)
    torch.set_rng_state(state)
    with torch.no_grad():
        add_second_head(MaskDistillation(model, K), some, 2000, width=4)
    assert torch.get_rng_state().equal(state)
    assert len(model.mask_adapter.head.down) > SMALL.head_width and not model.mask_adapter.head.down.requires_grad


def test_a_previous_token_head_and_a_root_head_that_give_nan_change_no_text():
    for name in ("head", "root_head"):
        model = rooted()
        expected = model.generate(**batch(5), **LIMIT, do_sample=False)
        getattr(model.mask_adapter, name).up.data.fill_(torch.nan)
        for cost in (0.0, 0.01):
            assert model.generate(**batch(5), **CHEAP | {"slot_cost": cost}, do_sample=False).equal(expected)


def test_an_adapter_begins_without_ngrams_whatever_its_settings_say():
    model = stock_twin(tiny_model())
    add_mask_adapter(model, replace(rooted().mask_adapter.settings, ngrams=7))
    assert model.mask_adapter.ngrams is None and model.mask_adapter.settings.ngrams == 0


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
    count_ngrams(model, [{"prompt_ids": [1, 2], "response_ids": [*range(20, 90)]}] * 2)
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


def test_an_adapter_from_before_loads_with_a_root_head_of_the_last_states_alone_through_peft_too(tmp_path):
    model = with_adapter(stock_twin(tiny_model()), replace(SMALL, root_width=16, root_layer=0))
    count_ngrams(model, [{"prompt_ids": [1, 2], "response_ids": [*range(20, 90)]}] * 2)
    save_mask_adapter(model, tmp_path)
    config = json.loads((tmp_path / ADAPTER_FILE).read_text())
    del config["root_layer"]
    (tmp_path / ADAPTER_FILE).write_text(json.dumps(config))
    ids = batch(7)["input_ids"]
    text = model.generate(ids, **CHEAP, do_sample=False)
    again = stock_twin(tiny_model())
    load_mask_adapter(again, tmp_path)
    for found in (again, PeftModel.from_pretrained(stock_twin(tiny_model()), tmp_path)):
        assert found.generate(input_ids=ids, **CHEAP, do_sample=False).equal(text)


@pytest.mark.parametrize(("rows", "decay"), [(10, 2.0), (512_000, 512 / (2.3e-3 * 512_000))])
def test_its_weights_decay_by_passes_over_the_rows(rows, decay, monkeypatch):
    model, optimizer = rooted(), Mock(wraps=torch.optim.AdamW)
    monkeypatch.setattr(torch.optim, "AdamW", optimizer)
    monkeypatch.setattr(Batches, "__len__", lambda self: rows)
    monkeypatch.setattr(Batches, "measure", lambda self, name: {"loss_root": 0.0})
    train_root_head(MaskDistillation(model, K), answers(3), 0)
    assert optimizer.call_args.kwargs["weight_decay"] == pytest.approx(decay)
