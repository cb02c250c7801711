"""Log-probabilities of responses against the slot-by-slot oracle and plain forwards."""

import pytest
import torch
from dual_stream_oracle import Document, document_losses, last_nll
from tiny import EOS, START, tiny_model, tiny_tokenizer

from wedlm_hf.training import DataCollatorForDualStreamMasking
from wedlm_hf.training.log_probs import response_log_probs

BLOCK = 4
EXAMPLES = [
    {"input_ids": [START, *range(20, 26), *range(40, 49), EOS], "completion_mask": [0] * 7 + [1] * 10},
    {"input_ids": [START, 30, 31, 50, 51, EOS], "completion_mask": [0, 0, 0, 1, 1, 1]},
    # Two responses, and a template's newline after the last.
    {
        "input_ids": [START, 60, 61, 62, EOS, 63, 64, 65, 66, 67, EOS, 68],
        "assistant_masks": [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],
    },
]


def collator_with(**settings) -> DataCollatorForDualStreamMasking:
    return DataCollatorForDualStreamMasking(tiny_tokenizer(), **({"block_size": BLOCK, "num_eos": 1} | settings))


def supervised_of(example) -> list[bool]:
    return [bool(mark) for mark in example.get("completion_mask") or example["assistant_masks"]]


def masked_positions(example, collator) -> list[set[int]]:
    """What each copy masks, read from the batch."""
    batch = collator([example])
    slots = batch["targets"].ne(-100) & batch["stream_ids"].gt(0)
    copies = (slots & (batch["stream_ids"] == copy) for copy in range(1, collator.num_copies + 1))
    return [set(batch["position_ids"][copy].tolist()) for copy in copies]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("example", EXAMPLES[:2], ids=["long", "short"])
def test_sums_over_a_response_are_those_of_the_oracle(example, copies):
    model, collator = tiny_model().double(), collator_with(num_copies=copies)
    document = Document(example["input_ids"], supervised_of(example), masked_positions(example, collator))
    with torch.no_grad():
        mask_loss, ar_loss = document_losses(model, document, BLOCK)
        log_probs = response_log_probs(model, [example], collator)
    assert log_probs.mask_tokens.sum().item() == pytest.approx(-mask_loss.item(), rel=1e-5)
    assert log_probs.ar_tokens.sum().item() == pytest.approx(-ar_loss.item(), rel=1e-5)


def test_each_token_has_its_own_place_and_its_blocks_sum():
    model, collator = tiny_model(), collator_with()
    with torch.no_grad():
        log_probs = response_log_probs(model, EXAMPLES, collator)
        for row, example in enumerate(EXAMPLES):
            tokens, supervised = example["input_ids"], supervised_of(example)
            for position in range(17):
                is_response = position < len(tokens) and supervised[position]
                nll = last_nll(model, tokens[:position], [*range(position)], tokens[position]) if is_response else 0
                assert log_probs.ar_tokens[row, position].item() == pytest.approx(-float(nll), abs=1e-4)
    for tokens, blocks in ((log_probs.ar_tokens, log_probs.ar_blocks), (log_probs.mask_tokens, log_probs.mask_blocks)):
        assert tokens.shape == (3, 17) and blocks.shape == (3, 5)
        padded = torch.nn.functional.pad(tokens, (0, 3)).view(3, 5, BLOCK).sum(-1)
        torch.testing.assert_close(blocks, padded, atol=1e-4, rtol=1e-5)


def test_the_gradient_is_that_of_the_loss():
    collator, tokens = collator_with(), sum(map(sum, map(supervised_of, EXAMPLES)))
    expected, model = tiny_model(), tiny_model()
    expected(**collator(EXAMPLES)).loss.backward()
    log_probs = response_log_probs(model, EXAMPLES, collator)
    (-(log_probs.ar_tokens.sum() + log_probs.mask_blocks.sum()) / (2 * tokens)).backward()
    for weight, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert other.grad.abs().max() > 0
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_bad_examples_are_refused():
    for examples, message in (
        ([], "`examples` must hold at least one example, got none"),
        ([EXAMPLES[0] | {"seq_lengths": [7, 10]}], r"one conversation each, got a packed one with \['seq_lengths'\]"),
        ([{"completion_mask": [1]}], r"An example needs `input_ids`, got the columns \['completion_mask'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            response_log_probs(tiny_model(), examples, collator_with())
