"""Verified decoding with branches: AR's own output whatever is drafted, and drafts that are what they should be."""

import copy
from itertools import product
from math import prod
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import causal_forward, decode, decode_ar
from test_generation import ENDS, LIMIT, ORACLE, check_every_commit, generate, prompts_of
from test_mask_adapter import with_adapter
from tiny import MASK, tiny_model

from wedlm_hf.adapters.attach import ROOT_WEIGHT
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.generation import mixin
from wedlm_hf.generation.decoding import ParallelDecoder
from wedlm_hf.generation.drafter import AdapterMasks, OwnMasks, Seen
from wedlm_hf.generation.lookup import AGREED_MATCH, LONGEST_MATCH, OCCURRENCES, SURE_MATCH, TextLookup
from wedlm_hf.generation.planner import Planner
from wedlm_hf.generation.rows import ADAPTER_MASKS, Tree, with_masks
from wedlm_hf.generation.rules import on_host
from wedlm_hf.generation.sampling import SHORTLIST, TokenSampler

FIXED = {"window_size": 4}
COUNTED = {"slot_cost": 0.01}  # a slot cost leaves no part to the clock


def adapted(style="qwen3", head_width=8, root_width=0, **overrides):
    """A tiny model with a random mask adapter that changes every mask."""
    settings = MaskAdapterSettings(rank=4, head_width=head_width, num_masks=8, root_width=root_width)
    return with_adapter(tiny_model(style, **overrides), settings)


@pytest.fixture(scope="module")
def qwen3():
    return adapted()


def ar_outputs(model, prompts):
    """What AR decoding says, by the slow oracle."""
    return [decode_ar(model, prompt, **ORACLE) for prompt in prompts]


@pytest.fixture
def foreseeing(monkeypatch):
    """Lets the masks draft what AR decoding will say, but for some of the drafts.

    Random weights never agree by chance, so without this hardly a draft would pass.
    """

    def install(answers, errors=0.3, seed=0, siblings=0):
        random = Random(seed)

        def add(source, tree, state, masks, guess):
            answer, parent = answers[state.index], -1
            for offset in range(state.new_count, state.new_count + masks):
                is_wrong = random.random() < errors or offset >= len(answer)
                tokens = [9 if is_wrong else answer[offset]]
                if siblings and offset < len(answer):
                    tokens += [answer[offset] if is_wrong else 9, 11][:siblings]
                for rank, token in enumerate(tokens):
                    tree.add(token, parent, (1 - errors) / (1 + rank))
                right = [place for place in tree.children(parent) if tree[place].token != 9]
                if tokens[0] in ENDS or not right:
                    break
                parent = right[0]

        for source in (AdapterMasks, OwnMasks):
            monkeypatch.setattr(source, "add", add)

    return install


def test_a_sampled_draft_shares_the_noise_of_the_token_it_guesses(qwen3, monkeypatch):
    """Masks that predict as the AR head does draft just what it will sample, at any temperature."""
    (prompt,), options = prompts_of([6]), {"seed": 3, "verification": "exact", "do_sample": True}
    _, (expected,) = generate(qwen3, [prompt], **options, slot_cost=1000.0)
    shortlist = torch.tensor([[token for token in range(320) if token != MASK]])

    def add(source, tree, state, masks, guess):
        place = -1
        for offset in range(state.new_count, state.new_count + masks):
            sequence = prompt + expected[:offset]
            scores = causal_forward(qwen3, sequence, list(range(len(sequence))))[-1:][:, shortlist[0]]
            token, _ = source.sampler.draft(scores[:, None], shortlist, torch.tensor([[offset]]), [0], 1)
            place = tree.add(token.item(), place, 0.99)

    monkeypatch.setattr(AdapterMasks, "add", add)
    output, (row,) = generate(qwen3, [prompt], **options, **FIXED)
    assert row == expected
    assert output.stats.accepted.sum() >= output.stats.drafted.sum() - 3  # those behind the end


def slot_states(model, prefix, size):
    """Last hidden states of `size` slots behind tokens, by a plain causal forward; of a model's own masks, logits.
    The token behind these is decided: slots stand at the positions behind that one, own masks begin there."""
    first = len(prefix) + model.has_mask_adapter
    positions = [*range(len(prefix)), *range(first, first + size)]
    if not model.has_mask_adapter:
        return causal_forward(model, prefix + [MASK] * size, positions)[-size:]
    ids = torch.tensor([prefix + [MASK] * size])
    with torch.no_grad(), model.predicting(size):
        return model.model(input_ids=ids, position_ids=torch.tensor([positions])).last_hidden_state[0, -size:]


def root_state(model, prefix, before):
    """What the root head, if there is one, makes of the last of some tokens, by a plain forward."""
    if model.mask_adapter.root_head is None:
        return None
    with torch.no_grad():
        read = model.model(input_ids=torch.tensor([prefix]), output_hidden_states=True)
        inner = read.hidden_states[model.mask_adapter.settings.root_layer]
        states = torch.cat([read.last_hidden_state[0, -1], inner[0, -1]])
        return model.mask_adapter.root_head(states, model.get_input_embeddings()(torch.tensor(before)))


def path_to(rows, place):
    """Tokens of the rows from the first one to one of them."""
    return [] if place < 0 else [*path_to(rows, rows[place].parent), rows[place].token]


def check_masks_of(model, prompts, monkeypatch, **options):
    """Compares each mask's hidden state, or logits, with those of a plain causal forward on its path and the masks
    before it. Returns which rows had masks."""
    forward, checked = ParallelDecoder._forward, []

    def checked_forward(decoder, step):
        sequences = copy.deepcopy(step.sequences)
        logits, hidden = forward(decoder, step)
        for entry, state in enumerate(sequences):
            masks = [place for place, row in enumerate(state.rows) if row.token is None]
            found = logits if hidden is None else hidden
            column = found.shape[1] - len(masks)
            for home in range(state.pending - 1, len(state.rows) - len(masks)):
                line, size = home, 0
                for place in masks:  # those behind this row, one behind the other
                    if state.rows[place].parent == line:
                        line, size = place, size + 1
                if size:
                    expected = slot_states(model, state.tokens[: state.committed] + path_to(state.rows, home), size)
                    torch.testing.assert_close(found[entry, column : column + size], expected, atol=1e-4, rtol=1e-4)
                    checked.append(home + 1 - state.pending)
                column += size
        return logits, hidden

    monkeypatch.setattr(ParallelDecoder, "_forward", checked_forward)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        generate(model, prompts, verification="exact", **options)
    model.set_attn_implementation("sdpa")
    return set(checked)


def replay(model, prompt, *, window_size, limit):
    """Decoding with branches of `window_size` masks, all from scratch. Returns tokens, forwards, token instances."""
    generated, drafts, committed, forwards, instances = [], [], 0, 0, 0
    while True:
        branches = [max(0, min(window_size, limit - len(generated) - row - 1)) for row in range(len(drafts) + 1)]
        if drafts and drafts[-1] in ENDS:
            branches[-1] = 0
        forwards += 1
        instances += len(generated) - committed + len(drafts) + sum(branches)
        committed = len(generated)
        found = []
        for draft in [*drafts, None]:
            found += decode_ar(model, prompt + generated + found, **ORACLE | {"limit": 1})
            if found[-1] != draft:
                break
        size, drafts = branches[len(found) - 1], []
        before, sequence = (prompt + generated + found)[-2:], prompt + generated + found[:-1]
        for token in found:
            generated.append(token)
            if token in ENDS or len(generated) == limit:
                return generated, forwards, instances
        of_root = root_state(model, sequence, before)
        for state in slot_states(model, sequence, size) if size else ():
            with torch.no_grad():
                corrected = model.draft_hidden(state, torch.tensor(before))
                if of_root is not None:
                    corrected, of_root = (1 - ROOT_WEIGHT) * corrected + ROOT_WEIGHT * of_root, None
                own, scores = model.lm_head(state), model.lm_head(corrected)
            own[MASK] = -torch.inf
            likely = own.topk(min(SHORTLIST, len(own) - 1)).indices
            drafts.append(int(likely[scores[likely].argmax()]))
            before = [before[1], drafts[-1]]
            if drafts[-1] in ENDS:
                break
        drafts = drafts[: limit - len(generated) - 1]


@pytest.mark.parametrize(("window_size", "head_width", "root_width"), [(2, 8, 0), (5, 0, 0), (5, 8, 8)])
def test_drafts_and_counts_are_those_of_a_replay_from_scratch(window_size, head_width, root_width):
    # A model whose answers soon repeat themselves, so that even random masks are right at times.
    model = adapted(initializer_range=0.1, head_width=head_width, root_width=root_width)
    passed = 0
    for prompt in prompts_of([5, 9, 3, 7], seed=2):
        output, (row,) = generate(model, [prompt], verification="exact", **FIXED | {"window_size": window_size})
        counts = output.stats.forwards.item(), output.stats.token_instances.item()
        assert (row, *counts) == replay(model, prompt, window_size=window_size, limit=LIMIT)
        passed += output.stats.accepted.item()
        for name in ("drafted", "accepted"):
            by_depth = getattr(output.stats, f"{name}_by_depth")[0].tolist()
            assert sum(by_depth) == getattr(output.stats, name).item() and by_depth == sorted(by_depth, reverse=True)


class WithSlots:
    """A model that is told which rows are slots by their tokens, for the oracle."""

    def __init__(self, model):
        self.model, self.dtype = model, model.dtype

    def __call__(self, input_ids, **inputs):
        ids = input_ids[0].tolist()
        count = next((index for index, token in enumerate(reversed(ids)) if token != MASK), len(ids))
        with self.model.predicting(count or None):
            return self.model(input_ids=input_ids, **inputs)


def test_unverified_windows_are_filled_by_the_adapter(qwen3):
    prompts = prompts_of([5, 1, 12])
    expected = [decode(WithSlots(qwen3), prompt, window_size=6, tau=1.5, lam=0.02, **ORACLE) for prompt in prompts]
    output, rows = generate(qwen3, prompts, window_size=6, entropy_threshold=1.5)
    assert rows == [tokens for tokens, _, _ in expected]
    assert output.stats.forwards.tolist() == [forwards for _, forwards, _ in expected]


def test_traces_show_drafts_one_step_before_they_are_checked(qwen3, foreseeing):
    prompt = prompts_of([6])
    (expected,) = ar_outputs(qwen3, prompt)
    foreseeing([expected], 0.2)
    output, (row,) = generate(qwen3, prompt, verification="exact", **FIXED, output_trace=True)
    scores = causal_forward(qwen3, prompt[0] + expected, list(range(6 + len(expected))))[5:-1]
    found = torch.log_softmax(scores, -1).gather(1, torch.tensor(expected)[:, None])[:, 0]
    torch.testing.assert_close(output.log_probs[0], found, atol=1e-3, rtol=1e-3)
    assert row == expected
    assert sorted(set(output.step_map[0].tolist())) == list(range(output.stats.forwards.item()))
    drafted = {}
    for step in output.trace:
        for position, token in drafted.items():
            assert position >= 6 + LIMIT - 1 or token in step.input_ids[0][step.position_ids[0] == position]
        columns = step.filled[0]
        drafted = dict(zip(step.logit_positions[0, columns].tolist(), step.tokens[0, columns].tolist(), strict=True))


class Bushy(Planner):
    """Checks as many drafts as there are, siblings too, with two masks behind each."""

    def plan(self, outlooks, before=0):
        plans = []
        for outlook in outlooks:
            drafts = [draft for draft in outlook.drafts if draft.position < outlook.room]
            room = [outlook.room - 1, *(outlook.room - draft.position - 1 for draft in drafts)]
            plans.append(with_masks(drafts, [max(0, min(2, each)) for each in room], self.run))
        return plans


@pytest.fixture(params=["line", "tree"])
def shape(request, monkeypatch):
    """How forwards are planned, and how many siblings a draft has."""
    if request.param == "line":
        return FIXED, 0
    monkeypatch.setattr(mixin, "Planner", Bushy)
    return COUNTED, 2


@pytest.mark.parametrize("make", [adapted, tiny_model])
def test_after_every_step_the_cache_is_that_of_a_fresh_prefill_of_the_path_that_passed(
    make, foreseeing, monkeypatch, shape
):
    model, prompts, (options, siblings) = make(), prompts_of([3, 10, 6]), shape
    rows = ar_outputs(model, prompts)
    foreseeing(rows, 1.0 if siblings else 0.3, siblings=siblings)  # of trees, only siblings pass
    seen = check_every_commit(model, prompts, rows, monkeypatch, verification="exact", **options)
    assert sum(map(len, rows)) // 4 <= seen < sum(map(len, rows))


@pytest.mark.parametrize(("make", "style"), [(adapted, "qwen3"), (tiny_model, "qwen2.5")])
def test_masks_see_their_own_branch_and_the_real_rows_before_it(make, style, shape, foreseeing, monkeypatch):
    model, prompts, (options, siblings) = make(style), prompts_of([5, 1, 12]), shape
    foreseeing(ar_outputs(model, prompts), 0.4, siblings=siblings)
    homes = check_masks_of(model, prompts, monkeypatch, **options)
    # A fixed window of own masks is a chain.
    assert {0, 3} <= homes and (siblings == 0 or max(homes) > 4)


def test_attention_that_takes_no_mask_is_given_none_where_the_text_knows_better_than_masks(monkeypatch):
    options = {"verification": "exact", "slot_cost": 0.001, "max_new_tokens": 24, "eos_token_id": None}
    flex, (prompt,), masks = adapted(), prompts_of([6]), []
    _, (expected,) = generate(flex, [prompt], **options)
    known = prompt + expected
    monkeypatch.setattr(TextLookup, "drafts", lambda self, text, drafts, count: known[len(text) : len(text) + count])
    flex.register_forward_pre_hook(lambda *call: masks.append(call[2]["attention_mask"]), with_kwargs=True)
    assert generate(flex, [prompt], **options)[1] == [expected]
    assert any(mask is not None for mask in masks)  # of branches
    masks.clear()
    flex.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):  # flex attention as plain Python
        assert generate(flex, [prompt], **options)[1] == [expected]
    assert len(masks) > 2 and all(mask is None for mask in masks)


def test_own_masks_draft_the_likeliest_paths_by_the_product_of_their_chances():
    sampler = TokenSampler([], False, MASK, torch.zeros(1, 1))
    logits = torch.full((1, 3, 12), -9.0)
    logits[0, :, 5:8] = torch.tensor([[2.0, 1.0, 0.0], [1.0, 0.9, 0.0], [9.0, 0.0, 0.0]])
    chances = logits[0].softmax(-1)[:, 5:8]
    seen = Seen(torch.zeros(1, 2).long(), torch.zeros(1, 1).long(), [0], logits, None, None, True)
    source, tree = OwnMasks(sampler, 3), Tree()
    source.add(tree, None, 3, on_host((source.guess(seen),))[0][0])
    found = {tuple(tree.tokens(place)): tree[place].chance for place in range(len(tree))}
    reaches = {}
    for size in (1, 2, 3):
        for path in product(range(3), repeat=size):
            parts = [chances[depth, rank].item() for depth, rank in enumerate(path)]
            reaches[tuple(5 + rank for rank in path)] = prod(parts), parts[-1]
    assert set(found) == set(sorted(reaches, key=reaches.get)[-len(found) :])
    assert all(found[path] == pytest.approx(reaches[path][1], rel=1e-3) for path in found)
    assert [tree[place].token for place in tree.likeliest(-1)] == [5, 5, 5]


def test_nothing_stands_behind_an_end_or_is_there_twice_and_paths_are_known():
    tree = Tree(ends=frozenset({2}), allows=lambda path: path != [5, 9])
    first, end = tree.add(5, chance=0.6), tree.add(2, chance=0.3)
    assert (first, end, tree.add(5, chance=0.1), tree.add(7, end), tree.add(9, first), tree.add(7, None)) == (
        0, 1, 0, None, None, None,
    )  # fmt: skip
    last = tree.add(8, first)
    assert tree[end].is_sibling and not tree[last].is_sibling and tree[last].position == 2
    assert (tree.path(last), tree.tokens(last), list(tree.children(-1))) == ([0, 2], [5, 8], [0, 1])
    rows = with_masks(tree, [1, 0, 0, 2], ADAPTER_MASKS)
    assert [rows.masks(place) for place in (-1, 0, 1, 2)] == [range(3, 4), range(6, 6), range(6, 6), range(4, 6)]
    assert [rows[place].position for place in range(3, 6)] == [2, 4, 5]
    tree.cut(1)
    assert list(tree.children(-1)) == [0] and not tree.children(0)


# --- drafts from the text --------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def continued(text, known, least, count):
    """The continuation of the longest earlier occurrence of what ends with `known`, by comparing everywhere."""
    whole, matches = text + known, []
    for end in range(1, min(len(text), len(whole) - 1) + 1):
        length = 0
        while length < min(end, LONGEST_MATCH + len(known)) and text[end - 1 - length] == whole[-1 - length]:
            length += 1
        if length >= 2:
            matches.append((length, end))
    matches = [(length, end) for length, end in matches[-OCCURRENCES:] if length >= least]
    if not matches:
        return []
    _, end = max(matches)
    for place in range(end, end + count):
        whole.append(whole[place])
    return whole[len(text) :]


@settings(max_examples=150)
@given(text=TOKENS, drafts=st.lists(st.integers(0, 2), max_size=3), count=st.integers(1, 9), cut=st.integers(0, 40))
def test_drafts_are_those_of_a_search_everywhere(text, drafts, count, cut):
    lookup = TextLookup()
    if text[:cut]:
        lookup.drafts(text[:cut], drafts, count)  # an earlier step
    expected = continued(text, [], SURE_MATCH, count)
    if drafts and not expected:
        expected = continued(text, drafts[:1], AGREED_MATCH, count)
    assert lookup.drafts(text, drafts, count) == expected[:count]


@pytest.mark.parametrize("make", [adapted, tiny_model])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.05, "top_k": 0}])
def test_answers_that_repeat_themselves_are_those_of_ar_decoding_in_fewer_forwards(make, sampling, monkeypatch):
    model, prompts, forwards = make(initializer_range=0.1), prompts_of([5, 9], seed=2), []
    options = sampling | {"seed": 0, "verification": "exact"}
    _, expected = generate(model, prompts, **options, slot_cost=1000.0)
    assert sampling or expected == ar_outputs(model, prompts)
    for _ in range(2):
        output, rows = generate(model, prompts, **options, slot_cost=0.01)
        assert rows == expected
        forwards.append(output.stats.forwards.sum())
        monkeypatch.setattr(TextLookup, "drafts", lambda *arguments: [])
    assert forwards[0] < forwards[1]
