"""Scores, logits and log-probabilities; samples that a seed decides."""

import pytest
import torch
from oracle import causal_forward
from test_generation import generate, prompts_of
from tiny import MASK, PAD, tiny_model

KEEP = {"output_scores": True, "output_logits": True}
SHORT_AND_LONG = [5, 1, 12]


def test_verified_scores_logits_and_log_probs_are_those_of_ar_decoding(model):
    prompts = prompts_of(SHORT_AND_LONG)
    options = KEEP | {"suppress_tokens": [MASK], "repetition_penalty": 1.3}
    output, rows = generate(model, prompts, verification="exact", draft_threshold=2.0, **options)
    ar, ar_rows = generate(model, prompts, strategy="ar", **options)
    assert rows == ar_rows and len({len(row) for row in rows}) > 1
    for name in ("scores", "logits"):
        values, expected = getattr(output, name), getattr(ar, name)
        assert len(values) == len(expected) == max(map(len, rows))
        for row, tokens in enumerate(rows):
            for offset in range(len(values)):
                if offset < len(tokens):
                    torch.testing.assert_close(values[offset][row], expected[offset][row], atol=1e-4, rtol=1e-4)
                else:  # over: padding is certain
                    assert values[offset][row, PAD] == 0 and values[offset][row].isinf().sum() == 319
    for row, tokens in enumerate(rows):
        for offset, token in enumerate(tokens):
            log_prob = torch.log_softmax(ar.logits[offset][row], dim=-1)[token]
            assert output.log_probs[row, offset] == pytest.approx(log_prob.item(), abs=1e-4)
        assert (output.log_probs[row, len(tokens) :] == 0).all()
    transitions = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    expected = model.compute_transition_scores(ar.sequences, ar.scores, normalize_logits=True)
    for row, tokens in enumerate(rows):
        torch.testing.assert_close(transitions[row, : len(tokens)], expected[row, : len(tokens)], atol=1e-4, rtol=0)
        assert (transitions[row, len(tokens) :] == 0).all()


@pytest.mark.parametrize("strategy", ["wedlm", "block"])
def test_trace_and_step_map_tell_the_whole_generation_and_logits_are_those_of_the_masks_that_were_filled(
    model, strategy
):
    prompts = prompts_of(SHORT_AND_LONG)
    output, rows = generate(model, prompts, strategy=strategy, entropy_threshold=2.0, output_trace=True, **KEEP)
    assert output.log_probs is None
    for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True)):
        told = {}
        for index, step in enumerate(output.trace):
            if row not in step.rows:
                continue
            entry = step.rows.index(row)
            count, filled = step.counts[entry], step.filled[entry]
            ids = step.input_ids[entry, -count:].tolist()
            positions = step.position_ids[entry, -count:].tolist()
            committed = sorted(set(range(min(positions))) - set(positions))
            known = [*prompt, *tokens][: len(committed)]
            logits = causal_forward(model, known + ids, committed + positions)
            where = dict(zip(committed + positions, logits, strict=True))
            columns = step.logit_positions[entry][filled].tolist(), step.tokens[entry][filled].tolist()
            for position, token in zip(*columns, strict=True):
                told[position - len(prompt)] = index, token, where[position]
        for offset, token in enumerate(tokens):
            index, said, logits = told[offset]
            assert said == token and output.step_map[row, offset] == index
            torch.testing.assert_close(output.logits[offset][row], logits, atol=1e-4, rtol=1e-4)
            logits[MASK] = -torch.inf
            torch.testing.assert_close(output.scores[offset][row], logits, atol=1e-4, rtol=1e-4)
        assert (output.step_map[row, len(tokens) :] == -1).all()


def test_nothing_is_kept_that_nobody_asked_for(model):
    output, _ = generate(model, prompts_of([5]))
    assert output.scores is output.logits is output.log_probs is None
    output, _ = generate(model, prompts_of([5]), verification="exact")
    assert output.scores is output.logits is None
    assert output.log_probs is not None


def test_counts_print_as_a_table_and_ar_decoding_has_them(tmp_path):
    model = tiny_model("qwen3")
    inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]), "do_sample": False, "return_dict_in_generate": True}
    exact = model.generate(**inputs, max_new_tokens=9, strategy="wedlm", verification="exact")
    ar = model.generate(**inputs, max_new_tokens=9)
    assert ar.sequences.tolist() == exact.sequences.tolist()
    assert ar.stats.new_tokens.tolist() == ar.stats.forwards.tolist() == exact.stats.new_tokens.tolist()
    assert ar.stats.tokens_per_forward == 1
    titles, *rows = str(ar.stats).splitlines()
    assert titles.split("  ")[-2:] == ["tokens per forward", "drafts accepted"]
    counts = [*ar.stats.new_tokens.tolist(), int(ar.stats.new_tokens.sum())]
    named = zip(("0", "1", "all"), map(str, counts), strict=True)
    assert [row.split() for row in rows] == [[name, count, count, *"1.00 0 of 0".split()] for name, count in named]
