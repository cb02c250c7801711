"""N-grams of a model's answers: counted as by hand, and drafts from them change no text."""

import json
import random
from collections import Counter, defaultdict

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_mask_adapter import SMALL
from tiny import EOS, VOCAB_SIZE, stock_twin, tiny_model

from wedlm_hf import add_mask_adapter, count_ngrams, load_mask_adapter
from wedlm_hf.adapters.adapter_files import CONFIG_NAME
from wedlm_hf.adapters.ngrams import LEAST_REACH, NGramDrafter, NGrams
from wedlm_hf.adapters.peft_method import MaskAdapterConfig
from wedlm_hf.generation.rows import Row


def texts(count, seed=0, tokens=5):
    """Answers of few tokens, some of them empty."""
    draw = random.Random(seed)
    lengths = [(draw.randrange(4), draw.randrange(9)) for _ in range(count)]
    return [
        {"prompt_ids": draw.choices(range(tokens), k=p), "response_ids": draw.choices(range(tokens), k=r)}
        for p, r in lengths
    ]


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


@pytest.mark.parametrize("parts", [1, 3])
def test_counts_are_those_by_hand_in_one_go_or_in_parts(parts):
    answers, ngrams = texts(300, tokens=3), None
    for part in range(parts):
        ngrams = NGrams.of(answers[part::parts], ngrams)
    drafter, expected = NGramDrafter(ngrams), by_hand(answers)
    assert len(ngrams.keys) == len(expected) and bool((ngrams.keys.diff() > 0).all())
    for ngram, followers in expected.items():
        found = drafter.followers(ngram)
        assert [chance for _, chance in found] == pytest.approx(chances(followers))
        assert all(followers[token] / (followers.total() + 1) == pytest.approx(chance) for token, chance in found)


def test_the_longest_known_ngram_counts_and_nothing_follows_an_unknown_one():
    same = {"prompt_ids": [1], "response_ids": [2, 3, 4]}
    other = {"prompt_ids": [7], "response_ids": [3, 5]}
    drafter = NGramDrafter(NGrams.of([same, same, *[other] * 3]))
    assert drafter.followers([9, 2, 3]) == [(4, 2 / 3)]
    assert [token for token, _ in drafter.followers([9, 3])] == [5, 4]
    assert drafter.followers([8]) == drafter.followers([]) == []
    assert NGrams.of([]).keys.shape == NGrams.of([same]).keys.shape == (0,)


def test_the_most_frequent_are_kept(monkeypatch):
    monkeypatch.setattr("wedlm_hf.adapters.ngrams.MOST", 2)
    answers = [{"prompt_ids": [1], "response_ids": [2]}] * 3 + [{"prompt_ids": [5], "response_ids": [6]}] * 2
    drafter = NGramDrafter(NGrams.of([*answers, *[{"prompt_ids": [3], "response_ids": [4]}] * 4]))
    assert drafter.followers([5]) == [] and drafter.followers([1]) == [(2, 3 / 4)]
    assert drafter.followers([3]) == [(4, 4 / 5)]


def test_drafts_are_a_tree_whose_siblings_share_a_chance_and_that_ends_where_the_text_does():
    drafter = NGramDrafter(NGrams.of([*texts(400), *[{"prompt_ids": [0, 1], "response_ids": [EOS, 4, 4]}] * 200]))
    ends = 0
    for text, drafts in (([3, 4], []), ([0, 1], []), ([4], [Row(1, 1, -1, 0.5), Row(0, 2, 0, 0.6)])):
        given = list(drafts)
        drafter.extend(drafts, text, {EOS})
        assert drafts[: len(given)] == given and len(drafts) > len(given)
        children, reaches = defaultdict(list), {-1: 1.0}
        for place, draft in enumerate(drafts):
            assert draft.parent < place and draft.position == 1 + (
                drafts[draft.parent].position if draft.parent + 1 else 0
            )
            assert draft.is_sibling == bool(children[draft.parent]) or place < len(given)
            children[draft.parent].append(draft)
            reaches[place] = reaches[draft.parent] * draft.chance
            assert reaches[place] >= LEAST_REACH
            ends += draft.token == EOS
        for parent, own in children.items():
            assert len({draft.token for draft in own}) == len(own) and sum(draft.chance for draft in own) <= 1
            assert parent < 0 or drafts[parent].token != EOS
    assert ends


def written(model, prompts, tokens=40, **how):
    how = {"max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0} | how
    return [model.generate(torch.tensor([prompt]), **how) for prompt in prompts]


VERIFIED = {"strategy": "wedlm", "verification": "exact", "slot_cost": 0.05}


def test_without_any_training_a_model_repeats_its_answers_in_fewer_forwards_and_to_the_letter(tmp_path):
    model = stock_twin(tiny_model(), "sdpa")
    prompts = [[token, token + 1, token + 2] for token in range(20, 32)]
    expected = [output.sequences[0].tolist() for output in written(model, prompts)]
    add_mask_adapter(model, SMALL)
    seen = [{"prompt_ids": text[:3], "response_ids": text[3:]} for text in expected[:8]]
    count_ngrams(model, seen * 2)
    for outputs in (written(model, prompts, **VERIFIED), [model.generate(**_batch(prompts), **VERIFIED)]):
        texts = [row for output in outputs for row in getattr(output, "sequences", output).tolist()]
        assert [row[: len(own)] for row, own in zip(texts, expected, strict=True)] == expected
    outputs = written(model, prompts, **VERIFIED)
    assert sum(int(output.stats.forwards) for output in outputs[:8]) < 0.6 * sum(map(len, expected[:8]))
    draws = []
    for how in ({}, VERIFIED):
        torch.manual_seed(3)
        draws.append(
            written(model, prompts[:2], do_sample=True, **{**VERIFIED, **how, "window_size": 4 + 9 * len(how)})
        )
    model.mask_adapter.ngrams = None
    torch.manual_seed(3)
    draws.append(written(model, prompts[:2], do_sample=True, **VERIFIED))
    for one, *others in zip(*draws, strict=True):
        assert all(torch.equal(one.sequences, other.sequences) for other in others)


def _batch(prompts):
    ids = torch.tensor(prompts)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "pad_token_id": 0}


@pytest.mark.parametrize("load", [load_mask_adapter, PeftModel.from_pretrained])
def test_they_are_saved_and_loaded_with_the_adapter(tmp_path, load):
    model = stock_twin(tiny_model())
    add_mask_adapter(model, SMALL)
    count_ngrams(model, texts(200))
    kept = model.mask_adapter.ngrams
    model.save_mask_adapter(tmp_path / "adapter", torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    other = type(stock_twin(tiny_model())).from_pretrained(tmp_path / "base")
    load(other, tmp_path / "adapter")
    found = other.mask_adapter.ngrams
    for name in ("keys", "tokens", "counts"):
        assert torch.equal(getattr(found, name), getattr(kept, name))
    assert other.mask_adapter.settings.ngrams == len(kept.keys) > 0
    other.save_mask_adapter(tmp_path / "again", torch.bfloat16)
    assert json.loads((tmp_path / "again" / CONFIG_NAME).read_text())["ngrams"] == len(kept.keys)


@pytest.mark.parametrize("has_lora", [False, True])
def test_a_model_that_peft_made_saves_them_too(tmp_path, has_lora):
    base = stock_twin(tiny_model())
    below = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")) if has_lora else base
    model = get_peft_model(below, MaskAdapterConfig(rank=4, head_width=8))
    model.count_ngrams(texts(200))
    model.save_pretrained(tmp_path)
    other = stock_twin(tiny_model())
    load_mask_adapter(other, tmp_path)
    assert torch.equal(other.mask_adapter.ngrams.tokens, model.mask_adapter.ngrams.tokens)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**21])
def test_tokens_that_are_not_the_models_are_refused(token):
    model = stock_twin(tiny_model())
    add_mask_adapter(model, SMALL)
    with pytest.raises(ValueError, match=f"tokens of the model, 0 to 319; got .*{token}"):
        count_ngrams(model, [{"prompt_ids": [4], "response_ids": [5, token]}])
    assert model.mask_adapter.ngrams is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda ngrams: ngrams.keys.copy_(ngrams.keys.flip(0)), "n-grams are damaged"),
        (lambda ngrams: ngrams.counts.neg_(), "n-grams are damaged"),
        (lambda ngrams: ngrams.tokens.add_(VOCAB_SIZE), "n-grams have token 324, and the model 320 tokens"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path, damage, message):
    model = stock_twin(tiny_model())
    add_mask_adapter(model, SMALL)
    count_ngrams(model, texts(200))
    damage(model.mask_adapter.ngrams)
    model.save_mask_adapter(tmp_path)
    other = stock_twin(tiny_model())
    with pytest.raises(ValueError, match=message):
        load_mask_adapter(other, tmp_path)
    assert not hasattr(other, "mask_adapter")


def test_a_table_that_is_not_the_stated_one_is_refused(tmp_path):
    model = stock_twin(tiny_model())
    add_mask_adapter(model, SMALL)
    count_ngrams(model, texts(200))
    model.save_mask_adapter(tmp_path)
    file = tmp_path / CONFIG_NAME
    size = model.mask_adapter.settings.ngrams
    for value, message in (
        ("7", "do not fit its adapter_config.json: .*`ngrams` 7"),
        ('"a"', "whole numbers; got 8 and 'a'"),
    ):
        text = file.read_text()
        file.write_text(text.replace(f'"ngrams": {size}', f'"ngrams": {value}'))
        with pytest.raises(ValueError, match=message):
            load_mask_adapter(stock_twin(tiny_model()), tmp_path)
        file.write_text(text)
