"""Visibility and loss against the slot-by-slot oracle, and training against the forwards that decoding runs."""

from itertools import combinations, product
from math import comb, prod

import numpy as np
import pytest
import torch
from dual_stream_oracle import Document, Slot, batch_of, dense_mask, document_losses, last_nll, padded, slots_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import causal_forward
from peft import LoraConfig, get_peft_model
from tiny import MASK, assert_equal_but_rounding, tiny_model, tiny_tokenizer

from wedlm_hf.modeling_wedlm.dual_stream import dual_stream_mask_function, leave_out_repeats, token_nll
from wedlm_hf.training import DataCollatorForDualStreamMasking

BLOCK = 4
IGNORE = -100  # the target of a slot without one


def random_document(seed: int, length: int, copies: int = 1, prompt: int = 1) -> Document:
    """Random tokens of which the first `prompt` are not supervised, and a random mask for each copy."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 300, (length,), generator=generator).tolist()
    supervised = [position >= prompt for position in range(length)]
    masked: list[set[int]] = [set() for _ in range(copies)]
    for copy, start in product(masked, range(0, length, BLOCK)):
        if possible := [position for position in range(start, min(start + BLOCK, length)) if supervised[position]]:
            count = int(torch.randint(1, len(possible) + 1, (1,), generator=generator))
            copy |= {possible[i] for i in torch.randperm(len(possible), generator=generator)[:count]}
    return Document(tokens, supervised, masked)


def packed(documents: list[Document], ar_weight: float = 1.0) -> list[Slot]:
    return [slot for index, document in enumerate(documents) for slot in slots_of(document, BLOCK, ar_weight, index)]


def layout_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in ("stream_ids", "block_ids", "document_ids")}


def logits_of(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        return model(**inputs, **layout_of(batch)).logits


def gradients(model, loss: torch.Tensor) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


random_documents = st.builds(
    random_document, st.integers(0, 99), st.integers(1, 9), copies=st.integers(1, 2), prompt=st.integers(1, 6)
)

# Two rows, the second one padded: packed documents, prediction copies, prompts that fill whole blocks.
ROWS = [
    [random_document(0, 11, copies=2, prompt=5), random_document(1, 6, copies=2)],
    [random_document(2, 9, copies=2, prompt=3)],
]


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return batch_of([packed(row) for row in ROWS])


@given(st.lists(st.lists(random_documents, min_size=1, max_size=2), min_size=1, max_size=2))
def test_visibility_is_the_table_of_the_algorithm(documents):
    rows = [packed(row) for row in documents]
    rows = [padded(row, max(map(len, rows)) + 1) for row in rows]
    visible = dual_stream_mask_function(**layout_of(batch_of(rows)))
    row, slot = torch.arange(len(rows)), torch.arange(len(rows[0]))
    mask = visible(row[:, None, None], torch.tensor(0), slot[None, :, None], slot[None, None, :])
    assert torch.equal(mask, dense_mask(rows))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_the_model_looks_where_the_table_says(attention, batch):
    rows = [padded(packed(row), batch["input_ids"].shape[1]) for row in ROWS]
    additive = torch.zeros(len(rows), 1, len(rows[0]), len(rows[0]), dtype=torch.float64)
    additive.masked_fill_(~dense_mask(rows)[:, None], torch.finfo(torch.float64).min)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    with torch.no_grad():
        expected = tiny_model().double()(**inputs, attention_mask=additive).logits
    with torch.compiler.set_stance("force_eager"):  # flex attention as plain Python, without minutes of compiling
        logits = logits_of(tiny_model(attn_implementation=attention).double(), batch)
    assert_equal_but_rounding(logits, expected)


@given(st.lists(st.lists(random_documents, min_size=1, max_size=2), min_size=1, max_size=2))
def test_the_observed_tokens_before_a_blocks_first_mask_are_left_out_and_no_other_slot(documents):
    rows = [packed(row) for row in documents]
    batch = batch_of([padded(row, max(map(len, rows))) for row in rows])
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")} | layout_of(batch)
    compact = leave_out_repeats(inputs, batch["targets"])
    for row, slots in enumerate(rows):
        kept = []
        for index, slot in enumerate(slots):
            masked = documents[row][slot.document].masked[slot.stream - 1] if slot.stream else ()
            first = min((place for place in masked if place // BLOCK == slot.block), default=slot.position)
            if not slot.stream or slot.position >= first:
                kept.append(index)
        assert compact.places[row, kept].tolist() == list(range(len(kept)))
        for name, column in inputs.items():
            assert torch.equal(compact.inputs[name][row, : len(kept)], column[row, kept])
        assert (compact.inputs["stream_ids"][row, len(kept) :] == -1).all()


def disturbed(batch: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A batch some of whose entries are those of other slots, which no collator makes: one of them, or many."""
    generator = torch.Generator().manual_seed(seed)
    result, size = dict(batch), batch["input_ids"].shape[1]
    names = ["input_ids", "position_ids", "targets", *layout_of(batch)]
    if seed % 2:
        names = [names[int(torch.randint(len(names), (), generator=generator))]]
    for name in names:
        others = torch.randint(size, (size,), generator=generator)
        moved = torch.rand(size, generator=generator) < 0.3
        if seed % 2:
            moved = torch.arange(size) == torch.randint(size, (), generator=generator)
        result[name] = torch.where(moved, batch[name][:, others], batch[name])
    return result


@pytest.fixture(scope="module")
def double():
    """The layers of a tiny model, in float64."""
    return tiny_model().double().model


@settings(max_examples=60)  # of five layouts each
@given(st.lists(st.lists(random_documents, min_size=1, max_size=2), min_size=1, max_size=2), st.integers(0, 999))
def test_what_is_left_out_changes_no_state_of_a_slot_with_a_target_whatever_the_layout(double, documents, seed):
    rows = [packed(row) for row in documents]
    batch = batch_of([padded(row, max(map(len, rows))) for row in rows])
    for each in (batch, *(disturbed(batch, seed + more) for more in range(4))):
        inputs = {name: each[name] for name in ("input_ids", "position_ids")} | layout_of(each)
        compact = leave_out_repeats(inputs, each["targets"])
        with torch.no_grad():
            expected, found = (double(**some).last_hidden_state for some in (inputs, compact.inputs))
        row, slot = (each["targets"] != IGNORE).nonzero(as_tuple=True)
        if not len(row):
            continue  # no state is read
        assert_equal_but_rounding(found[row, compact.places[row, slot]], expected[row, slot])


def test_a_lora_leaves_slots_out_too_and_states_that_are_asked_for_are_of_all_slots(batch):
    seen: list[int] = []
    lora = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for model in (tiny_model(), lora):
        hook = model.get_input_embeddings().register_forward_hook(lambda _, __, output: seen.append(output.shape[1]))
        model(**batch)
        hook.remove()
    size = batch["input_ids"].shape[1]
    assert seen[0] == seen[1] < size
    model = tiny_model()
    assert model(**batch, output_hidden_states=True).hidden_states[-1].shape[1] == size
    model.config.output_hidden_states = True
    assert model(**batch).hidden_states[-1].shape[1] == size


def test_an_incomplete_layout_a_row_that_was_cut_and_kernels_without_free_masks_are_refused(batch):
    model = tiny_model()
    with pytest.raises(ValueError, match=r"shape of the input, \(2, 4\), got \(2, \d\d\)\. Context parallelism"):
        model(**batch | {"input_ids": batch["input_ids"][:, :4]})
    with pytest.raises(ValueError, match="`stream_ids` needs `block_ids` beside it, got None"):
        model(input_ids=batch["input_ids"], stream_ids=batch["stream_ids"])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"\('sdpa', 'eager' or 'flex_attention'\), got 'flash_attention_2'"):
        model(**batch)


@pytest.mark.parametrize("style", ["qwen3", "qwen2.5"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prediction_stream_logits_are_those_of_a_causal_forward_on_prefix_and_reordered_block(style, attention, batch):
    model = tiny_model(style, attn_implementation=attention).double()
    logits = logits_of(model, batch)
    compared = 0
    for row, documents in enumerate(ROWS):
        slots = packed(documents)
        places = [(slot.document, slot.stream, slot.block) for slot in slots]
        for place in {place for place in places if place[1] > 0}:
            index = [i for i, other in enumerate(places) if other == place]
            prefix, own = list(range(place[2] * BLOCK)), [slots[i] for i in index]
            ids = documents[place[0]].tokens[: len(prefix)] + [slot.token for slot in own]
            expected = causal_forward(model, ids, prefix + [slot.position for slot in own])
            assert_equal_but_rounding(logits[row, index], expected[len(prefix) :])
            compared += len(index)
    assert compared == sum(slot.stream > 0 for documents in ROWS for slot in packed(documents))


@pytest.mark.parametrize(("attention", "ar_weight"), [("sdpa", 0.0), ("sdpa", 1.0), ("eager", 0.5)])
def test_loss_and_gradient_equal_one_plain_forward_for_each_target(attention, ar_weight):
    model = tiny_model(attn_implementation=attention).double()
    count = sum(sum(document.supervised) for row in ROWS for document in row)
    losses = [document_losses(model, document, BLOCK) for row in ROWS for document in row]
    mask_loss, ar_loss = map(sum, zip(*losses, strict=True))
    expected = (mask_loss + ar_weight * ar_loss) / (1 + ar_weight) / count

    loss = model(**batch_of([packed(row, ar_weight) for row in ROWS]), num_items_in_batch=count).loss
    assert_equal_but_rounding(loss, expected)
    for gradient, wanted in zip(gradients(model, loss), gradients(model, expected), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()) + 1e-12)


def test_the_loss_is_divided_by_the_count_it_is_given_else_by_the_supervised_labels_else_by_the_targets(model, batch):
    total = model(**batch, num_items_in_batch=1).loss
    torch.testing.assert_close(model(**batch, num_items_in_batch=torch.tensor(7)).loss, total / 7)
    labels = torch.full((2, 9), IGNORE)
    labels[:, [0, 3, 4]] = 5  # the first column is never predicted
    torch.testing.assert_close(model(**batch, labels=labels).loss, total / 4)
    torch.testing.assert_close(model(**batch).loss, total / (batch["targets"] != IGNORE).sum())
    weights = batch.pop("loss_weights")
    torch.testing.assert_close(model(**batch).loss, model(**batch, loss_weights=torch.ones_like(weights)).loss)
    # A batch without targets gives zero, and a graph.
    loss = model(**batch | {"targets": torch.full_like(batch["targets"], IGNORE)}, num_items_in_batch=0).loss
    assert loss == 0 and all((gradient == 0).all() for gradient in gradients(model, loss))


def test_a_chunked_head_gives_the_loss_and_the_gradient_of_a_whole_one():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 11), torch.randn(6, 8, requires_grad=True)
    targets, weights, leaves = torch.tensor([0, 10, 3, 3, 7, 1]), torch.arange(1.0, 7.0), [hidden, *head.parameters()]
    whole = torch.nn.functional.cross_entropy(head(hidden), targets, reduction="none")
    expected = torch.autograd.grad((whole * weights).sum(), leaves)
    for chunk_size in (1, 3, 5, 6):
        chunked, correct = token_nll(head, hidden, targets, chunk_size=chunk_size)
        assert torch.equal(correct, head(hidden).argmax(-1) == targets)
        torch.testing.assert_close(chunked, whole)
        for gradient, wanted in zip(torch.autograd.grad((chunked * weights).sum(), leaves), expected, strict=True):
            torch.testing.assert_close(gradient, wanted)


def test_the_output_holds_the_nll_of_each_target_and_whether_it_is_the_likeliest(model, batch):
    calls = []  # of the head: on slots with a target alone, and as a module, so that hooks fire
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: calls.append(output.shape[:-1].numel()))
    output = model(**batch, num_items_in_batch=1)
    hook.remove()
    logits = logits_of(model, batch)
    has_target = batch["targets"] != IGNORE
    assert output.logits is None and sum(calls) == has_target.sum()
    expected = torch.nn.functional.cross_entropy(logits.mT, batch["targets"], reduction="none")
    torch.testing.assert_close(output.token_nll, expected)
    assert torch.equal(output.correct, (logits.argmax(-1) == batch["targets"]) & has_target)
    torch.testing.assert_close((output.token_nll * batch["loss_weights"]).sum(), output.loss)


@torch.no_grad()
def test_the_expected_loss_over_all_masks_is_the_evidence_bound():
    """E over the collator's masks = Σ_blocks ∫₀¹ 1/t Σ_masks t^m (1−t)^(n−m) Σ_{j masked} −log p(x_j | …) dt."""
    model = tiny_model().double()
    tokens = [17, 18, 19, 20, 21, 22]
    blocks = [[1, 2, 3], [4, 5]]  # supervised positions of the two blocks of 4
    subsets = [[set(s) for m in range(1, len(block) + 1) for s in combinations(block, m)] for block in blocks]

    # Every pair of masks, as the collator lays it out and weighs it, times its probability under the count law.
    losses: dict[frozenset[int], torch.Tensor] = {}
    collator = DataCollatorForDualStreamMasking(tiny_tokenizer(), block_size=4, ar_weight=0.0)
    for epoch in range(400):
        collator.set_epoch(epoch)
        batch = collator([{"input_ids": tokens}])
        masked = frozenset(batch["position_ids"][batch["input_ids"] == MASK].tolist())
        if masked not in losses:
            losses[masked] = model(**batch).loss
    assert len(losses) == 7 * 3
    expectation = 0.0
    for masks in product(*subsets):
        pairs = zip(blocks, masks, strict=True)
        probability = prod(1 / (len(block) * comb(len(block), len(mask))) for block, mask in pairs)
        expectation += probability * float(losses[frozenset.union(*map(frozenset, masks))])

    bound = 0.0
    nodes, weights = np.polynomial.legendre.leggauss(4)  # exact for the polynomials at hand
    for start, block, masks in zip((0, 4), blocks, subsets, strict=True):
        for mask in masks:
            inputs = [MASK if position in mask else token for position, token in enumerate(tokens)]
            observed = [*range(start), *(p for p in range(start, min(start + 4, 6)) if p not in mask)]
            nll = 0.0
            for j in mask:
                seen = observed + [position for position in sorted(mask) if position <= j]
                nll += float(last_nll(model, [inputs[position] for position in seen], seen, tokens[j]))
            for t, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
                bound += weight * nll * t ** (len(mask) - 1) * (1 - t) ** (len(block) - len(mask))
    assert expectation == pytest.approx(bound / 5, rel=1e-6)
