"""The collator against the slot-by-slot oracle, its noise, and its refusals."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import pytest
import torch
from dual_stream_oracle import IGNORE, batch_of, responses, slots_of
from hypothesis import given
from hypothesis import strategies as st
from tiny import EOS, MASK, START, tiny_tokenizer

from wedlm_hf.training import DataCollatorForDualStreamMasking

TOKENIZER = tiny_tokenizer()


def collator_with(**settings) -> DataCollatorForDualStreamMasking:
    return DataCollatorForDualStreamMasking(TOKENIZER, **settings)


def example_of(tokens: list[int], supervised: list[bool], **columns) -> dict:
    labels = [token if mark else IGNORE for token, mark in zip(tokens, supervised, strict=True)]
    return {"input_ids": tokens, "labels": labels, **columns}


def joined(lists: Iterable[list]) -> list:
    return list(chain.from_iterable(lists))


def slots_of_stream(batch: dict, row: int, document: int, stream: int) -> torch.Tensor:
    return (batch["document_ids"][row] == document) & (batch["stream_ids"][row] == stream)


def masked_positions(batch: dict, row: int, document: int, copy: int) -> set[int]:
    slots = slots_of_stream(batch, row, document, copy) & (batch["input_ids"][row] == MASK)
    return set(batch["position_ids"][row][slots].tolist())


# Runs of tokens: not supervised, supervised and closed by the end token, supervised and cut off.
run = st.tuples(st.sampled_from(["plain", "response", "truncated"]), st.integers(1, 9))


@st.composite
def documents(draw) -> tuple[list[int], list[bool]]:
    tokens: list[int] = []
    supervised: list[bool] = []
    for kind, length in draw(st.lists(run, min_size=1, max_size=5)):
        values = draw(st.lists(st.integers(4, 299), min_size=length, max_size=length))
        tokens += [*values[:-1], EOS] if kind == "response" else values
        supervised += [kind != "plain"] * length
    return tokens, supervised


packed_rows = st.lists(st.lists(documents(), min_size=1, max_size=3), min_size=1, max_size=3)
noises = st.fixed_dictionaries({
    "block_size": st.integers(1, 9), "num_eos": st.integers(1, 4), "ar_weight": st.sampled_from([0.0, 0.5, 1.0]),
    "num_copies": st.integers(1, 3), "ratio_sampler": st.sampled_from(["count", "stratified"]),
    "suffix_probability": st.sampled_from([0.0, 0.7]), "seed": st.integers(0, 5),
})  # fmt: skip


@given(packed_rows, noises, st.sampled_from(["seq_lengths", "document_ids"]))
def test_a_batch_is_what_the_oracle_lays_out_for_the_masks_drawn(rows, settings, packing):
    examples = []
    for row in rows:
        lengths = [len(tokens) for tokens, _ in row]
        packed = {"seq_lengths": lengths, "document_ids": joined([i] * length for i, length in enumerate(lengths))}
        tokens, marks = (joined(part) for part in zip(*row, strict=True))
        examples.append(example_of(tokens, marks, **{packing: packed[packing]}))
    batch = collator_with(**settings)(examples)

    expected_rows, expected_labels = [], []
    for number, row in enumerate(rows):
        slots, labels = [], []
        pieces = (piece for tokens, marks in row for piece in responses(tokens, marks, settings["num_eos"]))
        for index, piece in enumerate(pieces):
            masked = [masked_positions(batch, number, index, copy + 1) for copy in range(settings["num_copies"])]
            slots += slots_of(replace(piece, masked=masked), settings["block_size"], settings["ar_weight"], index)
            labels += example_of(piece.tokens, piece.supervised)["labels"]
        expected_rows.append(slots)
        expected_labels.append(torch.tensor(labels))
    expected = batch_of(expected_rows)
    expected["labels"] = torch.nn.utils.rnn.pad_sequence(expected_labels, batch_first=True, padding_value=IGNORE)
    assert batch.keys() == expected.keys()
    for name, values in batch.items():
        assert values.dtype == (torch.float32 if name == "loss_weights" else torch.int64)
        torch.testing.assert_close(values, expected[name], rtol=1e-6, atol=0, msg=lambda text, c=name: f"{c}: {text}")


def test_columns_of_marks_mean_what_labels_mean_and_no_column_means_everything():
    tokens, supervised = [START, 10, 10, 10, 10, *[11] * 5, EOS], [False] * 5 + [True] * 6
    collator = collator_with()
    batch = collator([example_of(tokens, supervised)])
    for column in ("assistant_masks", "completion_mask"):
        same = collator([{"input_ids": tokens, column: [int(mark) for mark in supervised]}])
        assert all(torch.equal(same[name], batch[name]) for name in batch)
    everything = collator([{"input_ids": torch.tensor(tokens)}])
    assert everything["labels"][0].tolist() == [IGNORE, *tokens[1:], *[EOS] * 7]


# Noise.

DOCUMENTS = [
    example_of(
        [START, *[10] * (2 + number % 5), *[11] * (19 + 7 * number % 40), EOS],
        [False] * (3 + number % 5) + [True] * (20 + 7 * number % 40),
    )
    for number in range(9)
]


def noise_of(batch: dict) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Masked positions of each document of a batch, under the document's clean tokens."""
    found = {}
    for row, documents in enumerate(batch["document_ids"]):
        for document in range(int(documents.max()) + 1):
            tokens = tuple(batch["input_ids"][row][slots_of_stream(batch, row, document, 0)].tolist())
            found[tokens] = tuple(sorted(masked_positions(batch, row, document, 1)))
    return found


def test_noise_depends_on_seed_epoch_document_and_copy_alone():
    collator, before = collator_with(seed=3), torch.get_rng_state()
    expected = noise_of(collator(DOCUMENTS))
    assert len(expected) == len(DOCUMENTS)
    packed = {name: joined(example[name] for example in DOCUMENTS) for name in ("input_ids", "labels")}
    packed["seq_lengths"] = [len(example["input_ids"]) for example in DOCUMENTS]
    for other in (DOCUMENTS[::-1], [packed]):
        assert noise_of(collator(other)) == expected
    for example in DOCUMENTS:
        assert noise_of(collator([example])).items() <= expected.items()
    assert torch.equal(torch.get_rng_state(), before)
    for seed, epoch in ((4, 0), (3, 1)):
        other = collator_with(seed=seed)
        other.set_epoch(epoch)
        noise = noise_of(other(DOCUMENTS))
        assert noise.keys() == expected.keys() and all(noise[tokens] != expected[tokens] for tokens in expected)
    twins = [{"input_ids": [4, *range(first, first + 40)]} for first in (10, 60)]
    assert len(set(noise_of(collator(twins)).values())) == 2
    batch = collator_with(num_copies=2)(DOCUMENTS[:1])
    assert masked_positions(batch, 0, 0, 1) != masked_positions(batch, 0, 0, 2)


# Bad input.


def tokenizer_with(name, token):
    tokenizer = tiny_tokenizer()
    setattr(tokenizer, name, token)
    return {"tokenizer": tokenizer}


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"block_size": 0}, "`block_size` must be an integer of at least 1, got 0."),
     ({"ar_weight": -0.5}, "`ar_weight` must be a number of at least 0, got -0.5."),
     ({"ar_weight": float("inf")}, "`ar_weight` must be a number of at least 0, got inf."),
     ({"suffix_probability": 1.5}, "`suffix_probability` must lie in [0, 1], got 1.5."),
     ({"ratio_sampler": "beta"}, "`ratio_sampler` must be one of ('count', 'stratified'), got 'beta'."),
     (tokenizer_with("mask_token", None), "The tokenizer has no `mask_token_id`, which dual-stream"),
     (tokenizer_with("eos_token", None), "The tokenizer has no `eos_token_id`, which dual-stream"),
     (tokenizer_with("eos_token", "<|mask|>"), "`mask_token_id` must differ from the end token, got 3")],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DataCollatorForDualStreamMasking(**{"tokenizer": TOKENIZER} | settings)
    with pytest.raises(ValueError, match=r"^`epoch` must be at least 0, got -1.$"):
        collator_with().set_epoch(-1)


@pytest.mark.parametrize(
    ("example", "message"),
    [({"text": "hi", "labels": [1]}, "An example needs `input_ids`, got the columns ['labels', 'text']."),
     ({"input_ids": [4, 5], "labels": [5]}, "`labels` must be a list as long as `input_ids`, 2 entries, got [5]."),
     ({"input_ids": [4, 5], "labels": "positive"}, "`labels` must be a list as long as `input_ids`, 2 entries, got"),
     ({"input_ids": [4], "assistant_masks": []}, "`assistant_masks` must be a list as long as `input_ids`, 1 "),
     ({"input_ids": [4, 5], "labels": [5, -100]}, "`labels` must repeat `input_ids`, unshifted, wherever they are"),
     ({"input_ids": []}, "must hold at least one token"),
     ({"input_ids": [4, 5], "seq_lengths": [1]}, "add up to their number; got 2 tokens and lengths [1]."),
     ({"input_ids": [4, 5], "seq_lengths": [2, 0]}, "must be positive"),
     ({"input_ids": [4, 5], "document_ids": [0]}, "(or the runs of `document_ids`) must be positive and add up")],
)  # fmt: skip
def test_an_example_that_does_not_fit_together_is_refused(example, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        collator_with()([example])
